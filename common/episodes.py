"""The Episode record, token ids in and token ids out; sampling episodes, their statistics, their dumps."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from common.data import Row
from common.distributed import World, gather_objects
from common.engine import Sampling
from common.logger import replace_file


@dataclass(slots=True)
class Episode:
    """One trajectory. Trained on is exactly `response_ids` where `loss_mask` is 1; text is never re-encoded."""

    prompt_index: int  # the prompt's place in the step's global batch: episodes that share it share `prompt_ids`
    sample_index: int  # which of the prompt's samples
    prompt_ids: list[int]
    response_ids: list[int]  # all that follows the prompt: sampled tokens and, with tools, observations
    loss_mask: list[int]  # 1 = sampled by the policy (the end-of-turn token too), 0 = observation or template
    logprobs: list[float]  # the engine's, at the sampling temperature; 0.0 where loss_mask is 0
    finish_reason: str  # "stop" or "length"
    rewards: dict[str, float | str] = field(default_factory=dict)  # components; "score" is what is trained on

    turn_rewards: list[list[float]] = field(default_factory=list)  # [index of a turn's last token, its own reward]

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


def request_seed(seed: int, step: int, prompt_index: int) -> int:
    """31 bits from (run seed, step, prompt), the same on any number of ranks; the engine adds the sample index."""
    digest = hashlib.blake2b(f"{seed}/{step}/{prompt_index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def sample_episodes(
    engine, prompts: Mapping[int, Row], sampling: Sampling, *, seed: int, step: int, weights_step: int
) -> list[Episode]:
    """`sampling.n` episodes of each prompt index, prompt by prompt. A single turn is an episode of one turn."""
    completions = engine.generate(
        [row.prompt_ids for row in prompts.values()],
        sampling,
        [request_seed(seed, step, index) for index in prompts],
        weights_step,
    )
    return [
        Episode(index, j, row.prompt_ids, c.token_ids, [1] * len(c.token_ids), c.logprobs, c.finish_reason)
        for (index, row), samples in zip(prompts.items(), completions)
        for j, c in enumerate(samples)
    ]


def by_prompt(episodes: list[Episode]) -> dict[int, list[Episode]]:
    groups: dict[int, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.prompt_index, []).append(episode)
    return groups


def prompts_of_all_ranks(episodes: list[Episode]) -> list[int]:
    return sorted({prompt for part in gather_objects([e.prompt_index for e in episodes]) for prompt in part})


def unequal_groups(episodes: list[Episode]) -> list[Episode]:
    """Those whose group has more than one score: the others would get advantage 0."""
    groups = by_prompt(episodes).values()
    return [e for group in groups if len({e.rewards["score"] for e in group}) > 1 for e in group]


def rollout_sums(episodes: list[Episode]) -> dict[str, float]:
    """What this rank adds to the metrics of a step: sums and counts, to be reduced once."""
    scored = [e for e in episodes if math.isfinite(e.rewards["score"])]
    scores = [e.rewards["score"] for e in scored]
    comparable = [group for group in by_prompt(scored).values() if len(group) > 1]
    return {
        "episodes": len(episodes),
        "scored": len(scored),
        "score": math.fsum(scores),
        "score_squared": math.fsum(score**2 for score in scores),
        "correct": sum(score >= 1.0 - 1e-6 for score in scores),
        "reward_model": math.fsum(e.rewards.get("reward_model", 0.0) for e in scored),
        "groups": len(comparable),
        "unequal_groups": len(by_prompt(unequal_groups(scored))),
        "response_tokens": sum(len(e.response_ids) for e in episodes),
        "truncated": sum(e.truncated for e in episodes),
    }


def rollout_metrics(sums: dict[str, float], seconds: dict[str, float]) -> dict[str, float]:
    """reward/* and rollout/* of a step from the reduced `rollout_sums` and its seconds by phase."""
    if not sums["scored"]:
        raise RuntimeError("not one response of this step could be scored: see the errors above")
    scored, episodes = sums["scored"], sums["episodes"]
    mean = sums["score"] / scored
    metrics = {
        "reward/mean": mean,
        "reward/std": math.sqrt(max(0.0, sums["score_squared"] / scored - mean**2)),
        "reward/accuracy": sums["correct"] / scored,
        "reward/failed": sums["episodes"] - sums["scored"],
        "rollout/response_length": sums["response_tokens"] / episodes,
        "rollout/truncated": sums["truncated"] / episodes,
    }
    if sums["groups"]:
        metrics["reward/zero_variance_groups"] = 1 - sums["unequal_groups"] / sums["groups"]
    if sums["reward_model"]:  # exactly 0 without one
        metrics["reward/model_mean"] = sums["reward_model"] / scored
    if "rollout" in seconds:
        metrics["rollout/tokens_per_s"] = sums["response_tokens"] / seconds["rollout"]
    return metrics


def value_sums(values: Tensor, returns: Tensor) -> dict[str, float]:
    """What this rank adds to the metrics of a critic: values before the update, their targets, both [T]."""
    sums = {}
    for name, x in (("value", values), ("return", returns), ("error", returns - values)):
        sums |= {name: x.double().sum().item(), f"{name}_squared": x.double().square().sum().item()}
    return sums


def value_metrics(sums: dict[str, float], num_tokens: float) -> dict[str, float]:
    """value/* of a step from the reduced `value_sums`. Returns that are all equal have no variance to explain: NaN."""
    variance = {x: sums[f"{x}_squared"] / num_tokens - (sums[x] / num_tokens) ** 2 for x in ("error", "return")}
    explicable = variance["return"] > 1e-9
    return {
        "value/mean": sums["value"] / num_tokens,
        "value/return_mean": sums["return"] / num_tokens,
        "value/explained_variance": 1 - variance["error"] / variance["return"] if explicable else math.nan,
    }


def dump_rollouts(
    folder: Path, step: int, sampled: list[Episode], trained: list[Episode], advantages: list[float], tokenizer, world
) -> None:
    """Write folder/step_NNNNNN.parquet: all episodes of all ranks; advantage is null where none was trained on."""
    advantage_of = {id(episode): advantage for episode, advantage in zip(trained, advantages)}
    rows = [
        {"step": step, "ranks": world.size, "rank": world.rank, "advantage": advantage_of.get(id(e))}
        | {"prompt": tokenizer.decode(e.prompt_ids), "completion": tokenizer.decode(e.response_ids)}
        | {f.name: getattr(e, f.name) for f in fields(e)}
        | {"score": e.rewards["score"], "rewards": json.dumps(e.rewards)}
        for e in sampled
    ]
    rows = [row for part in gather_objects(rows) for row in part]
    path = folder / f"step_{step:06d}.parquet"
    try:
        if world.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, lambda temporary: pq.write_table(pa.Table.from_pylist(rows), temporary))
    except OSError as error:  # a full disk costs the dump, not the run
        print(f"warning: {path} not written ({error})", flush=True)


def load_rollouts(
    path: Path, step: int, world: World, reward_model: str | None = None
) -> tuple[list[Episode], list[Episode]]:
    """(all episodes of this rank, those that were trained on) of a dump of `step` by as many ranks."""
    if not path.is_file():
        raise SystemExit(f"--replay {path}: no such file")
    rows = pq.read_table(path).to_pylist()
    if (rows[0]["step"], rows[0]["ranks"]) != (step, world.size):
        raise SystemExit(
            f"--replay {path}: is of step {rows[0]['step']} on {rows[0]['ranks']} ranks, this is step {step} on "
            f"{world.size}: --resume the checkpoint of the step before it, with as many ranks"
        )
    if ("reward_model" in json.loads(rows[0]["rewards"])) != bool(reward_model):
        raise SystemExit(f"--replay {path}: give the --reward-model of that run, and none if it had none")
    mine = [row | {"rewards": json.loads(row["rewards"])} for row in rows if row["rank"] == world.rank]
    sampled = [Episode(**{f.name: row[f.name] for f in fields(Episode)}) for row in mine]
    trained = [episode for episode, row in zip(sampled, mine) if row["advantage"] is not None]
    return sampled, trained
