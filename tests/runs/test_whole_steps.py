"""What scripts train on, recomputed from their dumps by loops and transformers' own forward.

Runs that are compared with runs (killed, replayed, on other ranks) would all agree on a wrong sign.
"""

import pyarrow.parquet as pq
import pytest
import torch
from helpers import LITTLE_CACHE, run_script, steps_of
from model_folders import save_reward_model
from transformers import AutoModelForCausalLM

from common.export import Args, main
from common.hub import FOLDERS

LONGEST, BUFFER, FLOOR, RATE, TEMPERATURE = 40, 30, 0.5, 1e-3, 2.0
RUN = [
    "--engine",
    "hf",
    "--dtype",
    "fp32",
    "--minibatches",
    1,
    "--micro-batch-tokens",
    512,
    "--max-rows",
    64,
]
RUN += [
    "--max-response-tokens",
    LONGEST,
    "--overlong-buffer",
    BUFFER,
    "--dump-rollouts-every",
    1,
    "--save-every",
    1,
]
RUN += [
    "--keep-checkpoints",
    9,
    "--eval-every",
    0,
    "--no-eval-before",
    "--eval-rows",
    1,
    "--learning-rate",
    RATE,
]
RUN += ["--lr-schedule", "linear", "--lr-floor", FLOOR, "--warmup-steps", 0]
RUN += ["--temperature", TEMPERATURE]


def rows_of(folder, step: int) -> list[dict]:
    return pq.read_table(folder / f"rollouts/step_{step:06d}.parquet").to_pylist()


def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logprobs(model, row: dict) -> torch.Tensor:
    """Of the trained tokens."""
    ids = torch.tensor(row["prompt_ids"] + row["response_ids"])
    own = (
        (model(ids[None]).logits[0, :-1] / TEMPERATURE)
        .log_softmax(-1)
        .gather(1, ids[1:, None])[:, 0]
    )
    return own[-len(row["response_ids"]) :][torch.tensor(row["loss_mask"]) > 0]


def punishment(row: dict) -> float:
    """DAPO's, of answers that come near to the limit."""
    return -max(0.0, len(row["response_ids"]) - (LONGEST - BUFFER)) / BUFFER


def check_update(
    record: dict, model, per_token: list[tuple[torch.Tensor, torch.Tensor]], kl_loss=0.0
) -> float:
    """Loss and gradient of a step with one minibatch, from (log-probs, advantages) of each episode.
    The loss."""
    count = sum(len(own) for own, _ in per_token)
    loss = (
        -sum(((own - own.detach()).exp() * advantages).sum() for own, advantages in per_token)
        / count
    )
    loss = loss + kl_loss
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert record["policy/loss"] == pytest.approx(loss.item(), rel=1e-3, abs=1e-6)
    assert record["optim/grad_norm"] == pytest.approx(norm.item(), rel=1e-3) and norm > 1e-3
    return loss.item()


@pytest.fixture(scope="module")
def grpo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grpo")
    options = ["--prompts-per-step", 4, "--samples-per-prompt", 4, "--advantage", "group-mean"]
    options += ["--kl-reward-coef", 0.5, "--kl-loss-coef", 0.3, "--output-dir", folder]
    options += ["--total-steps", 2, "--eval-rows", 24]
    run_script("grpo.py", *RUN, *options, "--strategy", "ddp", ranks=2)
    return folder


@pytest.mark.parametrize("step", [1, 2])
def test_a_step_of_grpo(grpo, tmp_path, step):
    """In the second one the policy has moved away from the reference, whose KL is charged, in
    reward and loss."""
    folder = FOLDERS["tiny"]
    if step > 1:
        main(
            Args(
                grpo / "checkpoints/step_000001",
                "tiny",
                folder := tmp_path / "before",
                dtype="fp32",
            )
        )
    initial, model, rows, record = (
        plain(FOLDERS["tiny"]),
        plain(folder),
        rows_of(grpo, step),
        steps_of(grpo)[step],
    )
    own = [logprobs(model, row) for row in rows]
    with torch.no_grad():
        reference = [logprobs(initial, row) for row in rows]
    gaps = [x - of_reference for x, of_reference in zip(own, reference)]
    kl = [gap.sum().item() for gap in gaps]
    kl_loss = 0.3 * torch.cat([(-gap).exp() - 1 + gap for gap in gaps]).mean()
    scores = [row["score"] + punishment(row) - 0.5 * x for row, x in zip(rows, kl)]
    groups = [
        [s for s, other in zip(scores, rows) if other["prompt_index"] == row["prompt_index"]]
        for row in rows
    ]
    advantages = [score - sum(group) / len(group) for score, group in zip(scores, groups)]
    assert (
        len(rows) == 16
        and {len(group) for group in groups} == {4}
        and (max(map(abs, kl)) > 0.1) == (step > 1)
    )
    assert [row["advantage"] for row in rows] == pytest.approx(advantages, abs=1e-4) and any(
        advantages
    )
    loss = check_update(
        record, model, [(x, torch.full_like(x, a)) for x, a in zip(own, advantages)], kl_loss
    )
    assert abs(loss) > 1e-4 and (kl_loss > 1e-4) == (step > 1)
    assert record["optim/lr"] == pytest.approx(RATE * [1.0, 1 - (1 - FLOOR) / 2][step - 1])


@pytest.mark.slow  # by default test_sft_runs.py opens an export in vLLM
@pytest.mark.parametrize("engine", ["vllm", "hf"])
def test_the_export_scores_the_same_in_vllm_and_transformers(engine, grpo, tmp_path):
    """By itself in both engines what the run's own evaluation measured, after two visible steps."""
    options = ["--eval-only", "--model", grpo / "model", "--eval-rows", 24, "--dtype", "fp32"]
    options += ["--eval-data", grpo / "data" / "eval.parquet", "--max-response-tokens", LONGEST]
    trained = pq.read_table(grpo / "eval/step_000002.parquet").to_pylist()
    run_script("grpo.py", *options, "--engine", engine, *LITTLE_CACHE, "--output-dir", tmp_path)
    samples = pq.read_table(tmp_path / "eval_samples.parquet").to_pylist()
    right = sum(sample["correct"] for sample in samples)
    assert 0 < right < len(samples) == 24
    assert right / len(samples) == steps_of(grpo)[2]["eval/accuracy"]
    same = [s["completion"] == other["completion"] for s, other in zip(samples, trained)]
    assert sum(same) >= 22, "but for a token or two that are equally probable"


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_first_step_of_ppo(ranks, tmp_path):
    """Its values are 0, so that estimates are discounted rewards: of the rule, the reward model,
    and the limit."""
    discount, gae_lambda, weight = 0.99, 0.9, 2.0
    options = ["--gamma", discount, "--gae-lambda", gae_lambda]
    options += [
        "--reward-model",
        save_reward_model(tmp_path / "reward"),
        "--reward-model-weight",
        weight,
    ]
    options += ["--critic-warmup-steps", 0, "--total-steps", 1, "--prompts-per-step", 8]
    run_script("ppo.py", *RUN, *options, "--output-dir", tmp_path / "run", ranks=ranks)
    model = plain(FOLDERS["tiny"])
    rows, record = rows_of(tmp_path / "run", 1), steps_of(tmp_path / "run")[1]
    logprobs_of, estimates, returns = [], [], []
    for row in rows:
        own, score = (
            logprobs(model, row),
            row["score"] + punishment(row) + weight * row["model_reward"],
        )
        left = torch.arange(len(own)).flip(0)  # tokens until the reward comes
        logprobs_of.append(own)
        estimates.append(score * (discount * gae_lambda) ** left)
        returns += (score * discount**left).tolist()
    mean, std = torch.cat(estimates).mean(), torch.cat(estimates).std()
    advantages = [(of_row - mean) / std for of_row in estimates]
    for row, of_row in zip(rows, advantages, strict=True):
        assert row["advantage"] == pytest.approx(of_row.mean().item(), rel=1e-4, abs=1e-5)
    assert len(rows) == 8 and record["value/return_mean"] == pytest.approx(
        sum(returns) / len(returns), rel=1e-4
    )
    assert record["value/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    loss = check_update(record, model, list(zip(logprobs_of, advantages)))
    assert abs(loss) < 1e-4, "the mean of what is whitened"
