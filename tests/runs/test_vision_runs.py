"""Scripts on a tiny Qwen2.5-VL or Qwen3-VL with pictures and tools: real torchrun ranks, real
vLLM."""

import json
from html.parser import HTMLParser

import pyarrow.parquet as pq
import pytest
from helpers import LITTLE_CACHE, ROOT, kill_once, metrics_of, run_script, steps_of
from model_folders import same_files
from vl import vllm_knows_times, write_rows, write_tiny_vl

from common.export import Args, main
from common.pictures import PixelLimits
from common.vision import load_vision

# By default test_python_runs.py has vLLM with pictures, test_curiosity_runs.py crops between turns,
# test_sft_runs.py pictures on two ranks, test_vision.py packs with pictures and text alone, and
# test_page.py and test_export.py what these runs leave.
pytestmark = pytest.mark.slow

PIXELS = ["--min-pixels", 784, "--max-pixels", 16 * 784, "--max-frame-pixels", 4 * 784]
SIZES = [
    "--max-prompt-tokens",
    400,
    "--max-response-tokens",
    400,
    "--max-turn-tokens",
    80,
    "--prompts-per-step",
    6,
]
STEPS = [
    "--samples-per-prompt",
    4,
    "--total-steps",
    2,
    "--eval-rows",
    6,
    "--learning-rate",
    1e-4,
    "--dtype",
    "fp32",
]
TOOLS = [
    "--tools",
    "visual",
    "--tool-workers",
    2,
    "--deterministic",
    "--dump-rollouts-every",
    1,
    "--mask-truncated",
]


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vl")
    write_tiny_vl(folder / "model", taught=True)
    data = write_rows(folder / "rows.parquet", videos=vllm_knows_times())
    files = [
        "--model",
        folder / "model",
        "--train-data",
        data,
        "--eval-data",
        data,
        "--media-root",
        folder,
    ]
    return [*files, *PIXELS, *SIZES, *STEPS, *TOOLS]


@pytest.fixture(scope="module")
def whole(options, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run_script(
        "grpo.py",
        *options,
        *LITTLE_CACHE,
        "--save-every",
        1,
        "--keep-checkpoints",
        9,
        "--output-dir",
        folder,
        ranks=2,
    )
    return folder


def test_several_turns_with_pictures_and_text_only_rows_in_one_batch(whole):
    steps = steps_of(whole)
    assert sorted(steps) == [0, 1, 2]
    for step in (1, 2):
        assert 0 < steps[step]["policy/rollout_logprob_gap"] < 1e-4
        assert steps[step]["optim/grad_norm"] > 0
    rows = [
        row
        for step in (1, 2)
        for row in pq.read_table(whole / f"rollouts/step_{step:06d}.parquet").to_pylist()
    ]
    media = [len(json.loads(row["media"])) for row in rows]
    assert 0 in media and max(media) >= 3, "text alone, and crops beside two pictures of the prompt"
    calls = [call for row in rows for call in json.loads(row["calls"])]
    assert {call["error"] for call in calls} == {True, False}
    assert max(row["turns"] for row in rows) > 2
    assert {row["rank"] for row in rows} == {0, 1}


class Pictures(HTMLParser):
    """Boxes and pictures of a page."""

    def __init__(self):
        super().__init__()
        self.boxes, self.images = [], 0

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "rect":
            self.boxes.append([float(attributes[key]) for key in ("x", "y", "width", "height")])
        self.images += tag == "image" and attributes["href"].startswith("data:image/")


def test_the_page_of_a_dump_shows_pictures_and_crops(whole):
    pages = [Pictures() for _ in range(2)]
    for step, page in enumerate(pages, 1):
        page.feed((whole / f"rollouts/step_{step:06d}.html").read_text())
        assert page.images > 0
    boxes = {tuple(round(x, 2) for x in box) for page in pages for box in page.boxes}
    assert boxes & {(0.0, 0.0, 0.6, 0.6), (0.3, 0.1, 0.7, 0.8)}, "padded by a tenth"


def test_kill_and_resume_with_pictures_equals_an_uninterrupted_run(options, whole, tmp_path):
    arguments = [
        "grpo.py",
        *options,
        *LITTLE_CACHE,
        "--save-every",
        1,
        "--output-dir",
        tmp_path / "killed",
    ]
    kill_once(*arguments, ranks=2, after_step=1)
    run_script(*arguments, ranks=2)
    assert any(record.get("event") == "resumed" for record in metrics_of(tmp_path / "killed"))
    assert steps_of(tmp_path / "killed") == steps_of(whole)
    weights = [
        (folder / "model" / "model.safetensors").read_bytes()
        for folder in (whole, tmp_path / "killed")
    ]
    assert weights[0] == weights[1]


def test_replay_of_a_dump_with_pictures_repeats_its_update(options, whole, tmp_path):
    dump, before = whole / "rollouts" / "step_000002.parquet", whole / "checkpoints" / "step_000001"
    arguments = [*options, "--replay", dump, "--resume", before, "--output-dir", tmp_path]
    run_script("grpo.py", *arguments, ranks=2)
    names = ("policy/loss", "optim/grad_norm", "policy/rollout_logprob_gap", "reward/mean")
    assert [steps_of(tmp_path)[2][n] for n in names] == [steps_of(whole)[2][n] for n in names]


@pytest.fixture(scope="module")
def exported(options, whole, tmp_path_factory):
    """The last checkpoint of two ranks as a folder."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    main(Args(whole, str(options[options.index("--model") + 1]), folder))
    return folder


def test_the_export_of_a_model_that_sees_is_the_runs_model(whole, exported):
    same_files(exported, whole / "model")


@pytest.mark.parametrize(
    "script,extra", [("grpo.py", ["--engine", "hf"]), ("ppo.py", ["--freeze-vision"])]
)
def test_other_ways_take_a_step_with_pictures(options, exported, tmp_path, script, extra):
    """Of a folder that was exported, which both engines open, sample from and evaluate."""
    extra = ["--model", exported, *extra]
    run_script(
        script, *options, *extra, "--total-steps", 1, "--no-eval-before", "--output-dir", tmp_path
    )
    (step,) = steps_of(tmp_path).values()
    assert (
        step["policy/rollout_logprob_gap"] < 1e-4
        and step["optim/grad_norm"] > 0
        and step["tool/calls"] > 0
    )
    assert step["eval/rows"] == 6


def test_engines_sample_from_qwen3_as_its_packs_say(tmp_path):
    """Pictures, videos and crops between two turns, fp32. Qwen3.5's recurrent layers have no vLLM
    kernel on CPUs in fp32."""
    pairs = []
    for engine, kind in (("hf", "qwen3_vl"), ("vllm", "qwen3_vl"), ("hf", "qwen3_5")):
        folder = write_tiny_vl(tmp_path / kind, kind=kind)
        pairs.append(f"{engine}:{folder}")
    done = run_script(ROOT / "tests" / "workers" / "vision_gap.py", *pairs)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == 3
    for pair, result in zip(pairs, results):
        assert max(result["fresh"], result["synced"]) < 1e-5, (pair, result)
        assert result["stale"] > 0.5, (pair, result)


@pytest.mark.parametrize(
    "kind, engine",
    [("qwen3_vl_moe", "vllm"), ("qwen3_vl", "vllm"), ("qwen3_vl", "hf"), ("qwen3_5", "hf")],
)
def test_qwen3_calls_tools_and_sees_crops(kind, engine, options, tmp_path):
    """On two ranks, from tool calls to the export."""
    model = write_tiny_vl(tmp_path / "model", taught=True, kind=kind)
    limits = ["--max-frame-pixels", 4 * 1024, "--engine", engine]
    run = tmp_path / "run"
    run_script(
        "grpo.py", *options, *LITTLE_CACHE, *limits, "--model", model, "--output-dir", run, ranks=2
    )
    steps = steps_of(run)
    for step in (1, 2):
        assert 0 < steps[step]["policy/rollout_logprob_gap"] < 1e-5
        assert steps[step]["optim/grad_norm"] > 0 and steps[step]["tool/calls"] > 0
    same = load_vision(str(run / "model"), PixelLimits(784, 7840, 784))
    assert same.limits.cell == 32 and same.model_type == kind
