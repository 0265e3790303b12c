"""sft.py as its users run it: real torchrun ranks, text and pictures, kills, half precision,
export."""

import io
import json
import math
import re
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from helpers import ROOT, kill_once, run_script, steps_of
from PIL import Image
from rows import write_pixel_reasoner
from vl import write_rows, write_tiny_vl

from common.hub import FOLDERS

PIXELS = ["--min-pixels", 784, "--max-pixels", 16 * 784, "--max-frame-pixels", 4 * 784]
NO_EVALUATION = ["--eval-every", 0, "--no-eval-before"]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A tiny Qwen2.5-VL; rows of Pixel Reasoner's, chat rows with pictures, and text alone."""
    folder = tmp_path_factory.mktemp("mixed")
    write_tiny_vl(folder / "model")
    write_pixel_reasoner(folder)
    rows = pq.read_table(write_rows(folder / "rows.parquet")).to_pylist()
    with (folder / "rows.jsonl").open("w") as file:
        for i, row in enumerate(rows):
            images = [f"{i}.png"] * len(row["images"])
            if not row["videos"]:
                answer = {
                    "role": "assistant",
                    "content": f"\\boxed{{{row['reward_model']['ground_truth']}}}",
                }
                file.write(
                    json.dumps({"messages": [*row["prompt"], answer], "images": images}) + "\n"
                )
    data = f"{folder / 'release.json'},{folder / 'rows.jsonl'}"
    return [
        "--model",
        folder / "model",
        "--train-data",
        data,
        "--eval-data",
        data,
        "--media-root",
        folder,
        *PIXELS,
    ]


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_demo_learns_and_its_export_is_the_same_model_in_vllm(ranks, tmp_path):
    run_script(
        "sft.py",
        "--total-steps",
        6,
        "--warmup-steps",
        2,
        "--batch-size",
        8,
        "--max-rows",
        256,
        "--output-dir",
        tmp_path,
        "--eval-rows",
        16,
        ranks=ranks,
    )
    steps = steps_of(tmp_path)
    assert steps[6]["eval/loss"] <= 0.8 * steps[0]["eval/loss"]
    assert steps[6]["eval/token_accuracy"] > steps[0]["eval/token_accuracy"]
    config = json.loads((tmp_path / "config.json").read_text())["args"]
    assert (config["lr_schedule"], config["lr_floor"]) == ("cosine", 0.0)
    shares = [0.5, 1.0, *(0.5 + 0.5 * math.cos(math.pi * done / 4) for done in range(4))]
    rates = [steps[step]["optim/lr"] for step in range(1, 7)]
    assert rates == pytest.approx([config["learning_rate"] * share for share in shares])
    done = run_script(
        ROOT / "tests" / "workers" / "engine_gap.py",
        "--model",
        tmp_path / "model",
        "--dtype",
        "fp32",
        "--synced-only",
    )
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert result["synced"] < 1e-4, "transformers and vLLM disagree about the exported folder"


def write_drawing_fork(path: Path) -> Path:
    """A copy of sft.py which draws from torch's generator in each step: a factor of the learning
    rate."""
    call = "optimizer.step(lr)"
    source = (ROOT / "sft.py").read_text()
    assert source.count(call) == 1
    path.write_text(source.replace(call, "optimizer.step(lr * torch.rand(()).item())"))
    return path


@pytest.mark.parametrize(
    "ranks, dtype",
    [
        (0, "fp32"),
        pytest.param(2, "fp32", marks=pytest.mark.slow),
        pytest.param(1, "fp16", marks=pytest.mark.slow),
    ],
)
def test_kill_and_resume_with_pictures_equals_an_uninterrupted_run(mixed, tmp_path, ranks, dtype):
    """Of a fork that draws numbers, too: a step is seeded."""
    script = write_drawing_fork(tmp_path / "my_sft.py")
    options = [
        *mixed,
        "--batch-size",
        4,
        "--total-steps",
        4,
        "--save-every",
        2,
        "--eval-every",
        2,
        "--dtype",
        dtype,
    ]
    run_script(script, *options, "--output-dir", tmp_path / "whole", ranks=ranks)
    kill_once(script, *options, "--output-dir", tmp_path / "killed", ranks=ranks, after_step=3)
    run_script(script, *options, "--output-dir", tmp_path / "killed", ranks=ranks, fresh=ranks == 1)
    assert steps_of(tmp_path / "killed") == steps_of(tmp_path / "whole")
    rates = [record["optim/lr"] for step, record in steps_of(tmp_path / "whole").items() if step]
    assert len(set(rates)) == 4, "each step draws another one"
    weights = [
        (tmp_path / name / "model" / "model.safetensors").read_bytes()
        for name in ("whole", "killed")
    ]
    assert weights[0] == weights[1]
    best = (tmp_path / "whole" / "checkpoints" / "best").read_text()
    losses = {
        step: record["eval/loss"]
        for step, record in steps_of(tmp_path / "whole").items()
        if "eval/loss" in record
    }
    assert best == f"step_{min((loss, step) for step, loss in losses.items() if step)[1]:06d}"
    for file in ("preprocessor_config.json", "processor_config.json"):
        if (mixed[1] / file).exists():
            assert (tmp_path / "whole" / "model" / file).exists(), "the export lacks the processor"


@pytest.fixture(scope="module")
def rewriting(tmp_path_factory):
    """The tiny model with a template that begins with the number of messages, and rows of one turn
    and of three."""
    folder = tmp_path_factory.mktemp("rewriting")
    model = shutil.copytree(FOLDERS["tiny"], folder / "model")
    template = model / "chat_template.jinja"
    template.write_text("{{ messages | length }}" + template.read_text())
    with (folder / "rows.jsonl").open("w") as file:
        for i in range(5):
            messages = []
            for turn in range(1 + 2 * (i % 2)):
                messages.append({"role": "user", "content": f"{i} {turn} = ?"})
                messages.append({"role": "assistant", "content": f"<answer>{i + turn}</answer>"})
            file.write(json.dumps({"messages": messages}) + "\n")
    data = folder / "rows.jsonl"
    return ["--model", model, "--train-data", data, "--eval-data", data]


@pytest.mark.slow
def test_rows_that_are_trained_turn_by_turn_count_once_and_resume_exactly(rewriting, tmp_path):
    """5 rows, of which two have three samples, 2 a step: an epoch ends within the third step."""
    options = [*rewriting, "--batch-size", 2, "--total-epochs", 2, "--total-steps", "None"]
    options += ["--dtype", "fp32", "--save-every", 2, "--eval-every", 5]
    done = run_script("sft.py", *options, "--output-dir", tmp_path / "whole", ranks=2)
    assert "2 rows are trained turn by turn, as 6 samples" in done.stdout
    steps = steps_of(tmp_path / "whole")
    assert list(steps) == [0, 1, 2, 3, 4, 5]
    assert [steps[step]["data/epoch"] for step in range(1, 6)] == [0.4, 0.8, 1.2, 1.6, 2.0]
    assert [steps[step]["data/unreadable"] for step in range(1, 6)] == [0.0] * 5
    assert sum(steps[step]["data/samples"] for step in range(1, 6)) == 2 * (3 + 2 * 3)
    kill_once("sft.py", *options, "--output-dir", tmp_path / "killed", ranks=2, after_step=3)
    run_script("sft.py", *options, "--output-dir", tmp_path / "killed", ranks=2)
    assert steps_of(tmp_path / "killed") == steps
    weights = [
        (tmp_path / name / "model" / "model.safetensors").read_bytes()
        for name in ("whole", "killed")
    ]
    assert weights[0] == weights[1]
    run_script("sft.py", *options, "--output-dir", tmp_path / "one")
    losses = [steps_of(tmp_path / name)[5]["eval/loss"] for name in ("whole", "one")]
    assert losses[0] == pytest.approx(losses[1], rel=2e-4)


@pytest.mark.slow  # by default test_grpo_engines.py and test_vision.py do, each a part of it
def test_packing_ranks_and_strategy_play_no_part_with_pictures(mixed, tmp_path):
    records = {}
    for name, ranks, extra in (
        ("one", 1, ["--micro-batch-tokens", 64]),
        ("two ddp", 2, ["--strategy", "ddp", "--gradient-checkpointing"]),
    ):
        options = [
            *mixed,
            "--batch-size",
            8,
            "--total-steps",
            2,
            "--dtype",
            "fp32",
            "--learning-rate",
            1e-3,
            *NO_EVALUATION,
            *extra,
        ]
        done = run_script("sft.py", *options, "--output-dir", tmp_path / name, ranks=ranks)
        records[name] = steps_of(tmp_path / name)
        tokens = json.loads((tmp_path / name / "config.json").read_text())["args"][
            "micro_batch_tokens"
        ]
        assert "\nneeds per rank, estimated: update " in f"\n{done.stdout}"
        assert re.search(r"each with weights [\d.]+ and Adam [\d.]+; free [\d.]+ GB", done.stdout)
        if name == "one":
            assert tokens == 64 and "chosen" not in done.stdout
        else:
            assert (
                f"; --micro-batch-tokens {tokens} chosen to fit" in done.stdout and tokens <= 8192
            )
    for name, steps in records.items():
        for step in (1, 2):
            for metric in ("policy/loss", "optim/grad_norm", "data/tokens"):
                assert steps[step][metric] == pytest.approx(
                    records["one"][step][metric], rel=2e-4
                ), (
                    name,
                    step,
                    metric,
                )


@pytest.mark.parametrize(
    "dtype, bound, pairs",
    [
        ("float64", 1e-10, ["--pairs"]),
        ("float64", 1e-10, []),
        ("float32", 1e-5, []),
    ],
)
@pytest.mark.slow  # by default test_vision.py compares gradients with those of single trajectories
def test_the_gradient_of_mixed_rows_is_the_sum_of_the_rows_gradients(
    mixed, tmp_path, dtype, bound, pairs
):
    """Of Qwen2.5-VL, and of Qwen3-VL with DeepStack. By default half of the combinations: any two
    settings meet."""
    qwen3_vl = write_tiny_vl(tmp_path / "qwen3_vl", kind="qwen3_vl")
    _, model, _, data, _, _, _, media_root, *_ = mixed
    worker = ROOT / "tests" / "workers" / "sft_gradients.py"
    options = [
        "--model",
        model,
        qwen3_vl,
        "--data",
        data,
        "--media-root",
        media_root,
        "--dtype",
        dtype,
    ]
    distances = json.loads(run_script(worker, *options, *pairs, ranks=2).stdout.splitlines()[-1])
    assert len(distances) == 2 * (4 if pairs else 8)
    worst = max(distances, key=distances.get)
    assert distances[worst] <= bound, f"{worst}: {distances[worst]:.2g}"


@pytest.fixture(scope="module")
def frozen(mixed, tmp_path_factory):
    """(folder, what is said) of a run with --freeze-vision and --save-weights-only: in the place of
    its first weights is a file, and other weights stand beside them."""
    folder = tmp_path_factory.mktemp("frozen")
    (folder / "model-step_000001").write_text("in its place")
    (folder / "model-step_000900").mkdir()  # another run's
    (folder / "model-step_000002").mkdir()
    (folder / "model-step_000002/notes.txt").write_text("the user's")
    options = [
        *mixed,
        "--batch-size",
        4,
        "--total-steps",
        5,
        "--dtype",
        "fp32",
        "--learning-rate",
        1e-3,
    ]
    options += ["--freeze-vision", "--save-weights-only", "--save-every", 1, "--eval-rows", 2]
    return folder, run_script("sft.py", *options, "--output-dir", folder)


def test_frozen_vision_does_not_move(mixed, frozen):
    from safetensors.torch import load_file

    folder, _ = frozen
    before = load_file(mixed[1] / "model.safetensors")
    after = load_file(folder / "model" / "model.safetensors")
    moved = {name for name in before if not before[name].equal(after[name])}
    assert moved and not any("visual" in name for name in moved)
    assert (folder / "model-step_000004").is_dir() and not (folder / "checkpoints").exists()


def test_weights_that_cannot_be_written_cost_their_folder_alone(frozen):
    """With --save-weights-only there is no checkpoint to go on from."""
    folder, done = frozen
    assert f"warning: {folder}/model-step_000001 not written" in done.stdout + done.stderr
    folders = sorted(path.name for path in folder.glob("model*") if path.is_dir())
    assert folders == ["model", *(f"model-step_{step:06d}" for step in (2, 3, 4, 900))]
    assert [path.name for path in (folder / "model-step_000002").iterdir()] == ["notes.txt"], (
        "two of this run's stay"
    )
    assert (folder / "model-step_000003/config.json").is_file()


@pytest.fixture(scope="module")
def half_readable(tmp_path_factory):
    """Two rows; the picture of the second one opens, but is cut off."""
    folder = tmp_path_factory.mktemp("half")
    write_tiny_vl(folder / "model")
    picture = io.BytesIO()
    Image.effect_noise((56, 56), 100).convert("RGB").save(picture, "PNG")
    (folder / "cut.png").write_bytes(picture.getvalue()[:1500])
    with (folder / "rows.jsonl").open("w") as file:
        for prompt, images in (("2 + 2 = ?", []), ("<image> What is it?", ["cut.png"])):
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "4"}]
            file.write(json.dumps({"messages": messages, "images": images}) + "\n")
    return ["--model", folder / "model", "--train-data", folder / "rows.jsonl", *PIXELS]


@pytest.mark.parametrize(
    "options, is_there, is_not_there",
    [
        (["--save-weights-only"], "model-step_000001/config.json", "checkpoints"),
        # the first case is of every time
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                # saved already: it does not make room for itself
                (
                    ["--save-weights-only", "--save-every", 1, "--keep-checkpoints", 1],
                    "model-step_000001/config.json",
                    "checkpoints",
                ),
                ([], "checkpoints/step_000001", "model-step_000001"),
            )
        ),
    ],
)
def test_a_step_without_a_token_to_learn_keeps_what_was_learned(
    half_readable, tmp_path, options, is_there, is_not_there
):
    options = ["--batch-size", 1, "--total-steps", 2, "--dtype", "fp32", *options]
    done = run_script("sft.py", *half_readable, *options, "--output-dir", tmp_path, check=False)
    assert "not one row of this step has a token to learn" in done.stdout + done.stderr
    assert list(steps_of(tmp_path)) == [1]
    assert (tmp_path / is_there).exists() and not (tmp_path / is_not_there).exists()


def test_an_overflow_on_one_rank_skips_the_step_on_both(mixed, tmp_path):
    options = [*mixed, "--batch-size", 4, "--total-steps", 3, "--dtype", "fp16", *NO_EVALUATION]
    worker = ROOT / "tests" / "workers" / "sft_overflow.py"
    run_script(worker, *options, "--micro-batch-tokens", 100_000, "--output-dir", tmp_path, ranks=2)
    steps = steps_of(tmp_path)
    assert [steps[i]["optim/skipped_steps"] for i in (1, 2, 3)] == [0.0, 1.0, 0.0]
    assert (
        steps[2]["optim/loss_scale"]
        == steps[1]["optim/loss_scale"] / 2
        == steps[3]["optim/loss_scale"]
    )
    state = json.loads((tmp_path / "checkpoints" / "step_000003" / "trainer.json").read_text())
    assert state["loss_scale"]["policy"]["scale"] == steps[3]["optim/loss_scale"]


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.is_dir(), reason="needs shared/data/gsm8k")
def test_smollm2_learns_from_gsm8k(tmp_path):
    run_script("-m", "common.prepare.gsm8k", "--out", tmp_path / "data", "--source", GSM8K)
    train, test = (tmp_path / "data" / f"{split}.parquet" for split in ("train", "test"))
    options = ["--train-data", train, "--eval-data", test, "--eval-rows", 64]
    options += [
        "--batch-size",
        8,
        "--total-steps",
        20,
        "--micro-batch-tokens",
        2048,
        "--learning-rate",
        2e-5,
    ]
    run_script(
        "sft.py", "--model", "smollm2", *options, "--output-dir", tmp_path / "run", timeout=3000
    )
    steps = steps_of(tmp_path / "run")
    print(f"\neval loss {steps[0]['eval/loss']:.3f} -> {steps[20]['eval/loss']:.3f}")
    assert steps[20]["eval/loss"] < steps[0]["eval/loss"]
