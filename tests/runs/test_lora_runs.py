"""LoRA in the scripts: real ranks and engines, from the first lines to the export, a resume, and
what is refused."""

import json
import sys

import pytest
import torch
from helpers import LITTLE_CACHE, ROOT, kill_once, metrics_of, run_script, steps_of
from model_folders import other_weights
from safetensors.torch import load_file

import curiosity_rl
import grpo
import ppo
import sft
from common.export import Args, main
from common.flags import parse
from common.hub import FOLDERS

LORA = ["--lora-rank", 4, "--learning-rate", 1e-3, "--dtype", "fp32"]
OPTIONS = [
    "--prompts-per-step",
    6,
    "--samples-per-prompt",
    4,
    "--max-response-tokens",
    64,
    "--max-rows",
    64,
    *LORA,
]
OPTIONS += ["--eval-rows", 8, "--no-eval-before", "--eval-every", 0, *LITTLE_CACHE]
STEPS = ["--total-steps", 4, "--save-every", 1, "--keep-checkpoints", 9, "--dump-rollouts-every", 1]
STEPS += ["--kl-loss-coef", 0.01, "--kl-estimator", "k3-is"]
SHORT = [*OPTIONS, *STEPS, "--engine", "hf", "--total-steps", 3, "--max-response-tokens", 16]
SHORT += ["--reward-function", ROOT / "tests/workers/kinds.py:kinds", "--temperature", 2.0]


@pytest.fixture(scope="module", params=[0, pytest.param(2, marks=pytest.mark.slow)])
def ranks(request) -> int:
    """By default one: adapters are whole on each rank; test_grpo_runs.py has weights of two."""
    return request.param


@pytest.fixture(scope="module")
def whole(tmp_path_factory, ranks):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    done = run_script("grpo.py", *SHORT, "--output-dir", folder, ranks=ranks)
    return folder, done.stdout


def test_adapters_are_trained_sampled_from_saved_and_exported(whole):
    folder, said = whole
    assert said.startswith("LoRA of rank 4, --learning-rate 0.001\n"), said
    steps = steps_of(folder)
    for step in (1, 2, 3):
        assert steps[step]["policy/rollout_logprob_gap"] < 1e-5 and steps[step]["optim/grad_norm"]
    assert steps[1]["policy/kl_to_ref"] == 0 < 1e-5 < steps[3]["policy/kl_to_ref"], (
        "the reference is the base"
    )
    base = load_file(FOLDERS["tiny"] / "model.safetensors")
    state = sum(
        file.stat().st_size
        for file in (folder / "checkpoints/step_000003/state").glob("*.safetensors")
    )
    adapter = load_file(folder / "model" / "adapter" / "adapter_model.safetensors")
    assert (
        state
        < 3 * sum(4 * t.numel() for t in adapter.values()) + 2e6
        < sum(4 * t.numel() for t in base.values())
    )
    model = load_file(folder / "model" / "model.safetensors")
    for name, weight in base.items():
        part = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{part}.lora_A.weight" in adapter:
            moved = 8 * adapter[f"{part}.lora_B.weight"] @ adapter[f"{part}.lora_A.weight"]
            assert moved.abs().max() > 1e-4
            torch.testing.assert_close(model[name], weight.float() + moved, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(model[name], weight.float()), name


@pytest.mark.slow
def test_kill_and_resume_equals_an_uninterrupted_run(whole, ranks, tmp_path):
    folder = tmp_path / "killed"
    kill_once("grpo.py", *SHORT, "--output-dir", folder, ranks=ranks, after_step=2)
    run_script("grpo.py", *SHORT, "--output-dir", folder, ranks=ranks)
    assert any(record.get("event") == "resumed" for record in metrics_of(folder))
    assert steps_of(folder) == steps_of(whole[0])
    for file in ("model/model.safetensors", "model/adapter/adapter_model.safetensors"):
        assert (folder / file).read_bytes() == (whole[0] / file).read_bytes()


@pytest.mark.slow  # by default test_grpo_runs.py has another reference
@pytest.mark.parametrize(
    "change, told",
    [
        (["--lora-rank", 8], "is of another LoRA, [4, 32.0, 'all'] and not [8,"),
        ([], "another base"),
    ],
)
def test_a_resume_with_other_adapters_or_another_base_is_refused(whole, tmp_path, change, told):
    model = ["--model", FOLDERS["tiny"] if change else other_weights(tmp_path / "model")]
    data = [f"--{part}-data={whole[0] / 'data' / part}.parquet" for part in ("train", "eval")]
    options = [*SHORT, *model, *data, "--resume", whole[0] / "checkpoints/step_000002", *change]
    refused = run_script("grpo.py", *options, "--output-dir", tmp_path / "run", check=False)
    assert refused.returncode == 1 and told in refused.stderr, refused.stderr


def test_the_export_of_a_checkpoint_is_the_runs_model(whole, tmp_path):
    main(Args(whole[0], "tiny", tmp_path / "out"))
    files = [
        path.relative_to(whole[0] / "model")
        for path in (whole[0] / "model").rglob("*")
        if path.is_file()
    ]
    assert len([file for file in files if file.parent.name == "adapter"]) == 2
    for file in files:
        assert (tmp_path / "out" / file).read_bytes() == (whole[0] / "model" / file).read_bytes(), (
            file
        )


def test_the_export_on_another_base_is_refused(whole, tmp_path):
    with pytest.raises(SystemExit, match="has adapters of another base than --model"):
        main(Args(whole[0], str(other_weights(tmp_path / "model")), tmp_path / "out"))


def test_flags_without_lora_are_refused(tmp_path):
    refused = run_script(
        "grpo.py", "--lora-alpha", 16, "--output-dir", tmp_path / "run", check=False
    )
    assert (
        refused.returncode == 1
        and "--lora-alpha 16.0 has no effect: needs --lora-rank" in refused.stderr
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, dtype, strategy", [(2, "bf16", "fsdp"), (2, "fp16", "ddp"), (1, "fp32", "fsdp")]
)
def test_with_vllm(tmp_path, ranks, dtype, strategy):
    options = [
        *OPTIONS,
        *STEPS,
        "--dtype",
        dtype,
        "--strategy",
        strategy,
        "--output-dir",
        tmp_path / "run",
    ]
    run_script("grpo.py", *options, ranks=ranks)
    gaps = [
        record["policy/rollout_logprob_gap"]
        for step, record in steps_of(tmp_path / "run").items()
        if step
    ]
    assert max(gaps) < {"bf16": 0.02, "fp16": 2e-3, "fp32": 1e-5}[dtype]


@pytest.mark.slow
def test_vllm_has_the_adapters_after_a_resume_and_reads_the_export(tmp_path):
    options = [*OPTIONS, *STEPS, "--output-dir"]
    run_script("grpo.py", *options, tmp_path / "run")
    again = ["--resume", tmp_path / "run/checkpoints/step_000002"]
    run_script("grpo.py", *options, tmp_path / "again", *again)
    assert [
        steps_of(tmp_path / "again")[step] == steps_of(tmp_path / "run")[step] for step in (3, 4)
    ] == [True, True]
    assert 0 < steps_of(tmp_path / "again")[3]["policy/rollout_logprob_gap"] < 1e-5
    look = [
        "--eval-only",
        "--eval-data",
        tmp_path / "run/data/eval.parquet",
        "--eval-rows",
        8,
        *LITTLE_CACHE,
    ]
    run_script(
        "grpo.py",
        "--model",
        tmp_path / "run/model",
        *look,
        "--dtype",
        "fp32",
        "--output-dir",
        tmp_path / "eval",
    )
    (event,) = metrics_of(tmp_path / "eval")
    assert event["eval/accuracy"] == steps_of(tmp_path / "run")[4]["eval/accuracy"]


@pytest.mark.slow
def test_ppo_and_its_critic(tmp_path):
    options = [
        *LORA,
        "--prompts-per-step",
        6,
        "--max-response-tokens",
        64,
        "--eval-rows",
        8,
        *LITTLE_CACHE,
    ]
    options += [
        "--total-steps",
        3,
        "--minibatches",
        2,
        "--critic-learning-rate",
        1e-3,
        "--critic-warmup-steps",
        0,
    ]
    options += ["--save-every", 1, "--keep-checkpoints", 9]
    run_script("ppo.py", *options, "--engine", "hf", "--output-dir", tmp_path / "run", ranks=2)
    steps = steps_of(tmp_path / "run")
    assert steps[3]["value/grad_norm"] > 0 and steps[3]["value/mean"] != steps[1]["value/mean"]
    again = [
        "--resume",
        tmp_path / "run/checkpoints/step_000002",
        "--output-dir",
        tmp_path / "again",
    ]
    run_script("ppo.py", *options, *again, "--engine", "hf", ranks=2)
    names = ("value/loss", "policy/loss", "optim/grad_norm")
    assert [steps_of(tmp_path / "again")[3][n] for n in names] == [steps[3][n] for n in names]

    again += ["--critic-model", other_weights(tmp_path / "critic")]
    more = ["--resume", "auto", "--total-steps", 4]
    refused = run_script("ppo.py", *options, *again, *more, "--engine", "hf", ranks=2, check=False)
    assert refused.returncode == 1 and "is of a critic on another base" in refused.stderr, (
        refused.stderr
    )


@pytest.mark.slow
def test_a_model_that_sees_and_its_tower(tmp_path):
    """Crops in vLLM; the tower stays as it is, bit for bit, and adapters of the language model are
    in the export."""
    options = [
        *LORA,
        "--prompts-per-step",
        8,
        "--samples-per-prompt",
        4,
        "--eval-rows",
        8,
        "--tool-workers",
        2,
    ]
    options += ["--total-steps", 3, "--eval-every", 0, "--no-eval-before", *LITTLE_CACHE]
    run_script("curiosity_rl.py", *options, "--output-dir", tmp_path / "run", ranks=2)
    steps = steps_of(tmp_path / "run")
    assert (
        max(steps[step]["policy/rollout_logprob_gap"] for step in (1, 2, 3))
        < 1e-4
        < steps[3]["tool/callers"]
    )
    base, model = (
        load_file(path / "model.safetensors")
        for path in (FOLDERS["tiny-vl"], tmp_path / "run" / "model")
    )
    moved = {
        name
        for name, weight in base.items()
        if not torch.equal(weight.float(), model[name].float())
    }
    assert base.keys() == model.keys() and moved and all(".layers." in name for name in moved)
    assert not [name for name in moved if "visual" in name] and [
        name for name in base if "visual" in name
    ]


@pytest.mark.slow
def test_supervised(tmp_path):
    """Answers that tiny does not give yet: its own task has nothing left to be learnt."""
    rows = tmp_path / "rows.jsonl"
    with rows.open("w") as file:
        for number in range(32):
            answer = {"role": "assistant", "content": "I would rather not."}
            file.write(
                json.dumps({"messages": [{"role": "user", "content": f"{number} 2 = 3"}, answer]})
                + "\n"
            )
    options = [
        "--lora-rank",
        4,
        "--learning-rate",
        3e-3,
        "--dtype",
        "fp32",
        "--total-steps",
        6,
        "--batch-size",
        8,
    ]
    options += ["--model", "tiny", "--train-data", rows, "--eval-data", rows, "--save-every", 3]
    options += ["--keep-checkpoints", 9]
    run_script("sft.py", *options, "--output-dir", tmp_path / "run", ranks=2)
    again = [
        "--resume",
        tmp_path / "run/checkpoints/step_000003",
        "--output-dir",
        tmp_path / "again",
    ]
    run_script("sft.py", *options, *again, ranks=2)
    steps = steps_of(tmp_path / "run")
    assert steps[6]["eval/loss"] < 0.8 * steps[0]["eval/loss"]
    assert steps_of(tmp_path / "again")[6]["eval/loss"] == steps[6]["eval/loss"]
    weights = [
        (tmp_path / name / "model/adapter/adapter_model.safetensors").read_bytes()
        for name in ("run", "again")
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("script", [grpo, ppo, curiosity_rl, sft])
@pytest.mark.parametrize("given", [[], ["--model", "x"]])
def test_the_default_learning_rate_is_tenfold(script, given, monkeypatch):
    def rates(*arguments: str) -> dict[str, float]:
        monkeypatch.setattr(sys, "argv", [script.__name__, *given, *arguments])
        args, _ = parse(script.Args, script.DEMO, script.__doc__)
        return {name: rate for name, rate in vars(args).items() if name.endswith("learning_rate")}

    usual, adapted = rates(), rates("--lora-rank", "4")
    assert usual and adapted == {name: 10 * rate for name, rate in usual.items()}
    assert rates("--lora-rank=4", "--learning-rate=0.5")["learning_rate"] == 0.5
    assert rates("--lora-rank", "0") == usual, "no LoRA"


def test_a_rate_of_full_training_is_warned_of(monkeypatch, capsys):
    for rate, low in (("1e-6", True), ("1e-5", False)):
        monkeypatch.setattr(
            sys, "argv", ["grpo.py", "--model", "x", "--lora-rank", "8", "--learning_rate", rate]
        )
        parse(grpo.Args, grpo.DEMO, grpo.__doc__)
        said = capsys.readouterr().out
        assert (
            said.startswith("warning: LoRA of rank 8, --learning-rate 1e-06: low")
            if low
            else "warning" not in said
        )
