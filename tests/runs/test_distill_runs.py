"""distill.py as its users run it: ranks, engines, embedded student and teacher; what rows and
flags are refused."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from helpers import (
    LITTLE_CACHE,
    ROOT,
    checked_args,
    metrics_of,
    prompts_of,
    run_script,
    skip_where_no_step_is_repeated,
    steps_of,
)
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import distill
from common.files import user_errors
from common.flags import Data
from common.hub import FOLDERS
from common.teacher import Responses, check_replayed_prompts, find_teacher
from common.types import Episode

GAME = "docs/examples/guess.py:Guess"
OPTIONS = ["--model", "tiny", "--prompts-per-step", 6, "--samples-per-prompt", 2]
OPTIONS += ["--max-prompt-tokens", 64, "--max-response-tokens", 24, "--learning-rate", 1e-4]
OPTIONS += ["--eval-rows", 8, "--eval-every", 0, "--total-steps", 3, "--save-every", 1]
OPTIONS += ["--keep-checkpoints", 3, "--dump-rollouts-every", 1, "--micro-batch-tokens", 256]
TAUGHT = ["--teacher", "tiny-teacher", "--eval-teacher", "--divergence", "jsd", "--minibatches", 2]
TAUGHT += ["--teacher-prompt-column", "extra_info.hint", "--teacher-temperature", 0.9]
TAUGHT += ["--data-share", 0.34, "--engine", "hf"]


def write_rows(file, **columns) -> str:
    """Sums of two numbers; every second row has a truth. columns: {name: value, or a function of
    the row's number}."""
    generator = random.Random(0)
    with open(file, "w") as lines:
        for i in range(24):
            a, b = generator.sample(range(1, 20), 2)
            truth = {"numbers": [a, b], "target": a + b} if i % 2 == 0 else None
            row = {
                "data_source": "countdown",
                "prompt": [{"role": "user", "content": f"{a} {b} = {a + b}"}],
                "reward_model": {"ground_truth": truth},
                "response": f"<think>{a}+{b}={a + b}</think><answer>{a}+{b}</answer>",
                "extra_info": {
                    "hint": [{"role": "user", "content": f"{a} {b} = {a + b} {a}+{b}={a + b}"}]
                },
            }
            for name, value in columns.items():
                row[name] = value(i) if callable(value) else value
            lines.write(json.dumps(row) + "\n")
    return str(file)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture(scope="module", params=[0, pytest.param(2, marks=pytest.mark.slow)])
def ranks(request) -> int:
    """By default one: test_invariance.py has gradients of two, test_grpo_runs.py their steps."""
    return request.param


@pytest.fixture(scope="module")
def whole(tmp_path_factory, rows, ranks):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    data = ["--train-data", rows, "--eval-data", rows]
    done = run_script("distill.py", *OPTIONS, *TAUGHT, *data, "--output-dir", folder, ranks=ranks)
    return folder, done.stdout


def check_run(folder: Path, output: str) -> None:
    """Of three steps with TAUGHT."""
    assert "teacher: eval/accuracy" in output
    (event,) = [record for record in metrics_of(folder) if record.get("event") == "teacher"]
    assert {"eval/teacher_accuracy", "eval/teacher_reward"} <= event.keys()
    steps = steps_of(folder)
    assert steps.keys() == {0, 1, 2, 3}
    for step in (1, 2, 3):
        metrics = steps[step]
        assert metrics["policy/rollout_logprob_gap"] < 0.01 and metrics["optim/grad_norm"] > 0
        assert 0 < metrics["distill/divergence"] < 0.7 and metrics["distill/teacher_entropy"] > 0
        assert 0 < metrics["distill/agreement"] < 1 and metrics["distill/teacher_logprob"] < 0
        assert metrics["reward/failed"] == 0 and "reward/unscored_steps" not in metrics


def test_a_run_learns_from_its_teacher_and_from_the_data_set(whole):
    check_run(*whole)


@pytest.mark.slow  # by default test_grpo_runs.py samples by vLLM on two ranks
def test_a_run_with_vllm_and_its_resume(rows, tmp_path):
    options = [*OPTIONS, *TAUGHT, "--engine", "vllm", *LITTLE_CACHE]
    options += ["--train-data", rows, "--eval-data", rows]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    check_run(whole, run_script("distill.py", *options, "--output-dir", whole, ranks=2).stdout)
    before = whole / "checkpoints/step_000001"
    run_script("distill.py", *options, "--resume", before, "--output-dir", resumed, ranks=2)
    for step in (2, 3):
        assert steps_of(resumed)[step] == steps_of(whole)[step]


def test_a_dump_has_divergences_and_what_the_teacher_read(whole):
    tokenizer = AutoTokenizer.from_pretrained(FOLDERS["tiny"])
    rows = pq.read_table(whole[0] / "rollouts/step_000001.parquet").to_pylist()
    from_data = [row for row in rows if row["finish_reason"] == "data"]
    assert len(from_data) == 2 and len(rows) == 2 + 4 * 2
    for row in rows:
        prompt, hint = (tokenizer.decode(row[n]) for n in ("prompt_ids", "teacher_prompt_ids"))
        question, _, answer = prompt.partition(" = ")
        assert question in hint and answer.split("<")[0] in hint and len(hint) > len(prompt) + 5
        assert len(row["divergences"]) == len(row["response_ids"])
        assert min(row["divergences"]) >= 0 and max(row["divergences"]) > 0
        scored = json.loads(row["rewards"])
        has_truth = row["truth"] != "null" and row["finish_reason"] != "data"
        assert bool(scored) == has_truth
    for row in from_data:
        assert row["completion"].startswith("<think>") and set(row["logprobs"]) == {0.0}


@pytest.mark.slow  # by default test_grpo_runs.py and test_curiosity_runs.py do
def test_a_resume_equals_an_uninterrupted_run(whole, rows, ranks, tmp_path):
    folder, _ = whole
    options = [*OPTIONS, *TAUGHT, "--train-data", rows, "--eval-data", rows]
    options += ["--resume", folder / "checkpoints/step_000001", "--output-dir", tmp_path / "run"]
    run_script("distill.py", *options, ranks=ranks)
    for step in (2, 3):
        assert steps_of(tmp_path / "run")[step] == steps_of(folder)[step]
        dumps = [
            pq.read_table(run / f"rollouts/step_{step:06d}.parquet").drop(["score"])  # NaN
            for run in (folder, tmp_path / "run")
        ]
        assert dumps[0].equals(dumps[1])
    exports = [run / "model/model.safetensors" for run in (folder, tmp_path / "run")]
    assert exports[0].read_bytes() == exports[1].read_bytes()


@pytest.mark.slow  # by default test_grpo_runs.py replays
def test_replay_repeats_an_update_bit_for_bit(whole, rows, ranks, tmp_path):
    folder, _ = whole
    taught = [flag for flag in TAUGHT if flag != "--eval-teacher"]
    options = [*OPTIONS, *taught, "--train-data", rows, "--eval-data", rows]
    options += ["--output-dir", tmp_path / "run"]
    options += ["--resume", folder / "checkpoints/step_000002"]
    options += ["--replay", folder / "rollouts/step_000003.parquet"]
    run_script("distill.py", *options, ranks=ranks)
    exports = [run / "model/model.safetensors" for run in (folder, tmp_path / "run")]
    assert exports[0].read_bytes() == exports[1].read_bytes()


@pytest.mark.parametrize("column, prompt", [(None, [1]), ("hint", [])])
def test_a_replay_needs_the_prompts_that_the_teacher_read(column, prompt):
    episode = Episode(0, 0, [1], [2], [1], [0.0], teacher_prompt_ids=prompt)
    with pytest.raises(SystemExit, match="--replay dump: give the --teacher-prompt-column"):
        check_replayed_prompts([episode], Path("dump"), column)
    check_replayed_prompts([episode], Path("dump"), "hint" if prompt else None)


@pytest.mark.slow  # by default test_grpo_runs.py has another reference
def test_another_teacher_is_refused_by_a_resume(whole, rows, tmp_path):
    options = [*OPTIONS, "--teacher", "tiny", "--engine", "hf"]
    options += ["--train-data", rows, "--eval-data", rows]
    options += ["--resume", whole[0] / "checkpoints/step_000001", "--output-dir", tmp_path / "run"]
    done = run_script("distill.py", *options, check=False)
    assert done.returncode == 1 and "is of another teacher, " in done.stderr, done.stderr


def test_a_teacher_that_is_the_student_moves_no_weight(rows, tmp_path):
    options = [*OPTIONS, "--teacher", "tiny", "--engine", "hf"]
    options += ["--train-data", rows, "--eval-data", rows]
    options += ["--dtype", "fp32", "--total-steps", 1, "--output-dir", tmp_path / "run"]
    done = run_script("distill.py", *options)
    assert "warning: --teacher tiny is --model itself, which has nothing to learn" in done.stdout
    (metrics,) = [record for record in metrics_of(tmp_path / "run") if record.get("step") == 1]
    assert metrics["distill/divergence"] == 0 and metrics["distill/agreement"] == 1
    assert metrics["optim/grad_norm"] == 0
    weights = load_file(tmp_path / "run/model/model.safetensors")
    for name, tensor in load_file(FOLDERS["tiny"] / "model.safetensors").items():
        assert torch.equal(weights[name].to(tensor.dtype), tensor), name


def test_with_lora_the_student_learns_from_its_base_with_the_solution(rows, tmp_path):
    """By the sampled estimator, with a ratio that is clipped."""
    options = [*OPTIONS, "--train-data", rows, "--eval-data", rows, "--engine", "hf"]
    options += ["--teacher-prompt-column", "extra_info.hint", "--estimator", "sampled"]
    options += ["--dtype", "fp32"]
    options += ["--lora-rank", 4, "--learning-rate", 1e-2, "--minibatches", 2, "--clip-low", 0.01]
    options += ["--total-steps", 2, "--output-dir", tmp_path / "run"]
    run_script("distill.py", *options)
    steps = steps_of(tmp_path / "run")
    for step in (1, 2):
        assert steps[step]["policy/rollout_logprob_gap"] < 1e-4
        assert steps[step]["policy/clip_fraction"] > 0 and steps[step]["policy/approx_kl"] > 0
        assert "distill/teacher_entropy" not in steps[step]
    assert (tmp_path / "run/model/adapter").is_dir()


@pytest.mark.slow
def test_a_student_that_sees_and_calls_tools(tmp_path):
    """Its trajectories with crops are read by the teacher as they stand; observations are not
    trained on. A teacher of the same weights agrees to the last bit."""
    options = ["--model", "tiny-vl", "--prompts-per-step", 4, "--samples-per-prompt", 2]
    options += ["--tools", "crop_image_normalized", "--max-turns", 3, "--max-pixels", 12544]
    options += [
        "--max-response-tokens",
        192,
        "--engine",
        "hf",
        "--dtype",
        "fp32",
        "--no-eval-before",
    ]
    options += ["--eval-rows", 2, "--eval-every", 0, "--total-steps", 1, "--dump-rollouts-every", 1]
    teacher = shutil.copytree(FOLDERS["tiny-vl"], tmp_path / "teacher")
    weights = load_file(teacher / "model.safetensors")
    scaled = {name: 1.1 * x if "q_proj" in name else x for name, x in weights.items()}
    save_file(scaled, teacher / "model.safetensors", {"format": "pt"})
    for name, folder in (("same", "tiny-vl"), ("other", teacher)):
        run_script("distill.py", *options, "--teacher", folder, "--output-dir", tmp_path / name)
        metrics = steps_of(tmp_path / name)[1]
        assert metrics["policy/rollout_logprob_gap"] < 1e-4 and metrics["tool/calls"] > 0
        assert (metrics["distill/divergence"] == 0) == (name == "same")
        for row in pq.read_table(tmp_path / name / "rollouts/step_000001.parquet").to_pylist():
            pairs = zip(row["divergences"], row["loss_mask"])
            assert all(value == 0 for value, is_trained in pairs if not is_trained)


@pytest.mark.slow  # by default test_grpo_faults.py runs out of memory
def test_out_of_memory_repeats_the_step_with_the_same_gradient(rows, tmp_path):
    """It runs out in a backward of step 2, with a teacher beside."""
    skip_where_no_step_is_repeated("fsdp")
    options = [*OPTIONS, "--train-data", rows, "--eval-data", rows, "--engine", "hf"]
    options += ["--teacher", "tiny-teacher", "--dtype", "fp32", "--micro-batch-tokens", 1024]
    options += ["--total-steps", 2, "--output-dir"]
    run_script("distill.py", *options, tmp_path / "plain")
    worker = ROOT / "tests/workers/out_of_memory.py"
    done = run_script(worker, *options, tmp_path / "short", env={"SCRIPT": "distill"})
    assert "--micro-batch-tokens is now 512, the step is repeated" in done.stdout
    plain, short = (steps_of(tmp_path / run)[2] for run in ("plain", "short"))
    for metric in ("policy/loss", "distill/agreement", "optim/grad_norm"):
        assert short[metric] == pytest.approx(plain[metric], rel=1e-4), metric


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "no --teacher: give a model to learn from"),
        ("--teacher x --estimator sampled --divergence jsd", "estimates the reverse KL alone"),
        ("--teacher x --estimator sampled --data-share 0.5", "tokens that the student has sampled"),
        ("--teacher x --jsd-beta 0.2", "--jsd-beta 0.2 has no effect: needs --divergence jsd"),
        ("--teacher x --divergence jsd --jsd-beta 1", "--jsd-beta 1.0: must be below 1"),
        ("--teacher x --response-column y", "needs a --data-share"),
        ("--teacher x --clip-low 0.1", "--estimator sampled, and several --minibatches"),
        ("--teacher x --eval-teacher", "needs a --teacher and --eval-data"),
        ("--teacher x --eval-teacher --eval-data y --eval-only", "--eval-data, and no --eval-only"),
        ("--teacher x --minibatches 200", "a minibatch needs a prompt"),
        ("--teacher x --data-share 0.1 --prompts-per-step 4", "less than half a prompt, so none"),
        (f"--teacher x --data-share 0.5 --environment {GAME}", "--data-share with a class as"),
        (f"--teacher-prompt-column y --environment {GAME}", "-column with a class as"),
        ("--teacher x --objective cispo", "grpo.py has it"),
    ],
)
def test_flags_that_cannot_work_are_refused(arguments, message, monkeypatch, capsys):
    given = ["--model", "m", "--train-data", "x.parquet", *arguments.split()]
    with pytest.raises(SystemExit) as error:
        checked_args(distill, monkeypatch, *given)
    assert message in f"{error.value}{capsys.readouterr().err}".replace("\n", " ")


def test_an_evaluation_says_that_it_reads_no_teacher(monkeypatch, capsys):
    line = "--eval-only evaluates the student alone: --teacher x is not read\n"
    for arguments, printed in (("--train-data y", ""), ("--eval-data y --eval-only", line)):
        checked_args(distill, monkeypatch, "--model", "m", "--teacher", "x", *arguments.split())
        assert capsys.readouterr().out == printed


def hints_of(file, column: str = "extra_info.hint", **options):
    tokenizer = AutoTokenizer.from_pretrained(FOLDERS["tiny"])
    with user_errors():
        return prompts_of(
            file,
            tokenizer=tokenizer,
            flag=f"--teacher-prompt-column {column}",
            prompt_column=column,
            needs_truth=False,
            max_prompt_tokens=32,
            max_response_tokens=32,
            **options,
        )


def hint_or(value):
    def extra_info(i: int) -> dict:
        if i == 3:
            return value
        return {"hint": [{"role": "user", "content": "1 2 = 3"}]}

    return extra_info


@pytest.mark.parametrize(
    "value, reason",
    [
        ({}, "line 4: prompt is None"),
        ({"hint": ""}, "line 4: prompt is empty"),
        ({"hint": "1 " * 60}, "longer than --max-prompt-tokens plus --max-response-tokens: "),
    ],
)
def test_prompts_of_the_teacher_are_checked_row_by_row(value, reason, tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", extra_info=hint_or(value))
    with pytest.raises(SystemExit) as error:
        hints_of(file)
    assert reason in str(error.value) and "line 4" in str(error.value)
    assert str(error.value).count("--teacher-prompt-column extra_info.hint: 1 ") == 1
    assert 3 not in hints_of(file, bad_rows="drop").usable


def test_responses_of_the_data_set_are_checked_row_by_row(tmp_path, job):
    wrong = {5: None, 7: "1 \ud83d"}  # half of a surrogate pair: no tokenizer reads it
    file = write_rows(tmp_path / "rows.jsonl", response=lambda i: wrong.get(i, "1+2"))
    train_data = prompts_of(file, tokenizer=job.tokenizer, needs_truth=False)
    with pytest.raises(SystemExit) as error:
        Responses(job, Data(), train_data, "response")
    assert "--response-column response" in str(error.value) and "line 6" in str(error.value)
    assert "2 rows without a response" in str(error.value)
    responses = Responses(job, Data(bad_rows="drop"), train_data, "response")
    assert not wrong.keys() & set(train_data.usable) and len(train_data) == 22
    episode = responses.episode(2, train_data[0], max_tokens=24)
    assert job.tokenizer.decode(episode.response_ids) == "1+2" + job.tokenizer.eos_token
    assert episode.loss_mask == [1] * len(episode.response_ids)
    cut = responses.episode(2, train_data[0], max_tokens=2)
    assert cut.response_ids == episode.response_ids[:2]


def test_a_response_with_a_token_that_the_model_lacks_is_refused(tmp_path, job):
    file = write_rows(tmp_path / "rows.jsonl", response=lambda i: "1+2")
    train_data = prompts_of(file, tokenizer=job.tokenizer, needs_truth=False)
    job.num_embeddings = max(job.tokenizer.encode("1+2"))
    with pytest.raises(SystemExit, match="has the token"):
        Responses(job, Data(), train_data, "response")


@pytest.fixture
def job(monkeypatch, world, tmp_path):
    from common.flags import Machine, Run
    from common.job import Job

    monkeypatch.setattr("common.job.init_world", lambda *_: world)
    run = Run(model="tiny", output_dir=tmp_path / "run", resume="never")
    return Job("distill", Data(), Machine(), run, demo=False, training=False)


def test_the_base_of_an_adapter_is_no_teacher_to_offload(job):
    """By whatever name it is given: `teacher.to("cpu")` would move the policy."""
    job.machine = replace(job.machine, lora_rank=4, offload=("reference",))
    for name in ("tiny", job.model_folder):
        with pytest.raises(SystemExit, match="--offload reference has no effect"):
            find_teacher(job, name, 96)


def test_a_teacher_needs_a_tokenizer_and_positions(job, tmp_path):
    assert find_teacher(job, None, 96) == job.model_folder
    with pytest.raises(SystemExit, match=r"teacher reads 2049 tokens, and --model .* has 2048"):
        find_teacher(job, None, 2049)
    folder = shutil.copytree(FOLDERS["tiny-teacher"], tmp_path / "teacher")
    with pytest.raises(SystemExit, match=r"teacher reads 2049 tokens, and --teacher .* has 2048"):
        find_teacher(job, str(folder), 2049)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(SystemExit, match=r"--teacher .*teacher: no config.json or no tokenizer"):
        find_teacher(job, str(folder), 96)
