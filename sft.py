"""Supervised fine-tuning: cross-entropy on the assistant's tokens of conversations, packed, exact over any split.

What this does that others do not:
1. One denominator: the loss is the mean over all trained tokens of the global batch, whatever the number of ranks,
   micro-batches, or the padding (invariant 2 of the design; tested).
2. Masks follow the rule "sampled by the assistant", the end-of-turn token included: never headers, never other roles.
3. A [tokens, vocabulary] tensor never exists: log-probs come from hidden states in chunks, of trained tokens only.

    torchrun --nproc_per_node 4 sft.py --model Qwen/Qwen2.5-0.5B --train-data train.parquet --eval-data test.parquet
    python sft.py --model smollm2 --train-data conversations.jsonl --total-steps 100

A row of the data (.parquet or .jsonl) has `messages` ({role, content} each), or `question` and `answer`.
"""

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import tyro
from torch import Tensor

from common.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from common.data import PromptLoader
from common.distributed import (
    all_reduce,
    broadcast_object,
    forward_context,
    init_world,
    run,
    wrap_model,
)
from common.episodes import Episode
from common.logger import Logger, save_config
from common.models import choose_attention, export_hugging_face, load_policy, load_tokenizer, resolve_model
from common.packing import TokenIndex, layout, pack
from common.precision import LossScale, choose_dtype, guarded_step


@dataclass
class Args:
    # model and data
    model: str  # folder, hub id, or an embedded model: tiny, smollm2
    train_data: str  # .parquet or .jsonl of conversations
    eval_data: str | None = None  # the same format; gives eval/loss
    output_dir: Path | None = None  # run folder; default runs/sft-MODEL-TIME
    from_scratch: bool = False  # random weights of the model's architecture instead of its own
    max_tokens: int = 1024  # longest conversation (tokens); longer ones are cut at the end
    seed: int = 0  # data order and initialisation
    # optimization
    batch_size: int = 64  # conversations per optimizer step, over all ranks
    micro_batch_tokens: int = 8192  # tokens of one forward and backward, per rank
    learning_rate: float = 1e-5  # peak
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"  # after the warm-up
    warmup_steps: float = 0.0  # optimizer steps of linear warm-up; below 1: share of all steps
    lr_floor: float = 0.0  # last learning rate as a share of the peak
    weight_decay: float = 0.0  # AdamW, decoupled
    max_grad_norm: float = 1.0  # global L2 norm; 0 = no clipping
    total_steps: int | None = None  # optimizer steps; default: from --total-epochs
    total_epochs: float = 1.0  # passes over the data, if --total-steps is not given
    # parallelism and precision
    strategy: Literal["fsdp", "ddp"] = "fsdp"  # shard the model (FSDP2) or replicate it
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # compute; master weights and optimizer are float32
    attention: Literal["auto", "flash", "flex", "sdpa"] = "auto"  # auto: flex on GPUs with bf16, else sdpa
    gradient_checkpointing: bool = False  # recompute activations in backward: less memory, a third more compute
    trust_remote_code: bool = False  # run code that comes with the model
    # evaluation, checkpoints, logging
    eval_every: int = 0  # steps between evaluations; 0: only at the end
    eval_rows: int = 512  # rows of --eval-data used
    save_every: int = 0  # steps between checkpoints; 0: only at the end
    keep_checkpoints: int = 1  # newest ones kept
    resume: str = "auto"  # auto: continue the run in --output-dir if there is one; never; or a path
    log: str = ""  # further trackers, comma-separated: tensorboard, wandb


def conversation_episode(messages: list[dict], tokenizer, index: int, max_tokens: int) -> Episode:
    """Tokens and loss mask of a conversation: 1 on what the assistant says and its end-of-turn token, else 0.

    The text up to the first assistant turn is the prompt. Each piece is tokenised by itself, as at inference, where
    the prompt is complete before the first token is sampled.
    """
    ids: list[int] = []
    mask: list[int] = []
    rendered = ""
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        header = tokenizer.apply_chat_template(messages[:turn], tokenize=False, add_generation_prompt=True)
        full = tokenizer.apply_chat_template(messages[: turn + 1], tokenize=False)
        if not header.startswith(rendered) or not full.startswith(header):
            raise ValueError("the chat template rewrites earlier turns: its masks cannot be derived turn by turn")
        end = full.rfind(tokenizer.eos_token)
        end = end + len(tokenizer.eos_token) if end >= len(header) else len(full)
        for text, trained in ((header[len(rendered) :], 0), (full[len(header) : end], 1)):
            piece = tokenizer.encode(text, add_special_tokens=False)
            ids += piece
            mask += [trained] * len(piece)
        rendered = full[:end]
    first = mask.index(1) if 1 in mask else len(mask)
    response, mask = ids[first:max_tokens], mask[first:max_tokens]
    return Episode(index, 0, ids[:first][:max_tokens], response, mask, [0.0] * len(response), "stop")


def end_of_turn(tokenizer) -> str:
    """The token that the chat template puts after an assistant turn, if it is a special one; else the end token.

    They differ in base models: Qwen2.5's end token is <|endoftext|>, its template ends turns with <|im_end|>. A policy
    that was trained to say one and is stopped at the other never stops.
    """
    mark = "\u2603"
    messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": mark}]
    tail = tokenizer.apply_chat_template(messages, tokenize=False).rpartition(mark)[2]
    ids = tokenizer.encode(tail, add_special_tokens=False)
    first = tokenizer.convert_ids_to_tokens(ids[0]) if ids else tokenizer.eos_token
    return first if first in tokenizer.get_added_vocab() else tokenizer.eos_token


class Conversations:
    """Rows of a .parquet or .jsonl file as lists of messages; they stay packed until they are asked for."""

    def __init__(self, path: str, flag: str):
        self.path = Path(path)
        if not self.path.is_file():
            raise SystemExit(f"{flag}: no such file: {path}")
        if self.path.suffix == ".parquet":
            self.rows: pa.Table | list[bytes] = pq.read_table(self.path)
        else:
            self.rows = self.path.read_bytes().splitlines()
        if not len(self.rows):
            raise SystemExit(f"{flag}: {path} has no rows")
        self[0]  # a file without the columns is refused at start-up

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> list[dict]:
        record = json.loads(self.rows[i]) if isinstance(self.rows, list) else self.rows.slice(i, 1).to_pylist()[0]
        if "messages" in record:
            return record["messages"]
        if "question" in record and "answer" in record:
            contents = (("user", record["question"]), ("assistant", record["answer"]))
            return [{"role": role, "content": content} for role, content in contents]
        raise SystemExit(f"{self.path} row {i}: has {list(record)}; expected `messages`, or `question` and `answer`")


def lr_factor(step: int, total_steps: int, warmup_steps: float, schedule: str, floor: float) -> float:
    """Share of the peak learning rate at step 0, 1, ...; the first step is never 0.

    Linear warm-up (step + 1) / warmup, then constant, or linear or cosine decay towards `floor`. `warmup_steps` below
    1 is a share of all steps.
    """
    warmup = round(warmup_steps * total_steps) if warmup_steps < 1 else int(warmup_steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    progress = (step - warmup) / max(1, total_steps - warmup)
    decay = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return floor + (1 - floor) * decay


def cross_entropy(logprobs: Tensor, num_loss_tokens: float, world_size: int) -> Tensor:
    """Mean of -log p over all trained tokens of the global batch, of which [N] are here.

    FSDP2 and DDP average gradients over ranks: hence the factor `world_size`.
    """
    return -logprobs.sum() * world_size / num_loss_tokens


def main(args: Args) -> None:
    world = init_world()
    torch.manual_seed(args.seed)  # the same random initialisation everywhere
    stamp = broadcast_object(time.strftime("%Y%m%d-%H%M%S"))  # the clocks of the ranks may differ
    output_dir = args.output_dir or Path("runs") / f"sft-{Path(args.model).name}-{stamp}"
    compute_dtype, why = choose_dtype(args.dtype, world.device)
    path = resolve_model(args.model)
    tokenizer = load_tokenizer(path, args.trust_remote_code)
    train_data = Conversations(args.train_data, "--train-data")
    eval_data = Conversations(args.eval_data, "--eval-data") if args.eval_data else None
    total_steps = args.total_steps
    if total_steps is None:
        total_steps = max(1, round(args.total_epochs * len(train_data) / args.batch_size))
    if end_of_turn(tokenizer) != tokenizer.eos_token:
        world.print(f"turns end with {end_of_turn(tokenizer)}, not {tokenizer.eos_token}: it becomes the end token")
        tokenizer.eos_token = end_of_turn(tokenizer)

    attention = choose_attention(args.attention, world.device)
    policy = load_policy(
        path,
        attention,
        gradient_checkpointing=args.gradient_checkpointing,
        trust_remote_code=args.trust_remote_code,
        from_scratch=args.from_scratch,
    )
    pack_options = layout(attention, args.micro_batch_tokens)
    num_parameters = sum(p.numel() for p in policy.parameters())
    policy = wrap_model(policy, world, args.strategy, compute_dtype)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )
    loss_scale = LossScale.for_dtype(compute_dtype)
    loader = PromptLoader(len(train_data), args.seed)
    trained = {"policy": (policy, optimizer)}
    start, best = 0, math.inf
    if resumed := find_checkpoint(output_dir, args.resume, world):
        state = load_checkpoint(resumed, trained, world)
        world.print(f"resumed: {resumed}, step {state['step']}")
        loader.load_state_dict(state["loader"])
        loss_scale.load_state_dict(state["loss_scale"])
        start, best = state["step"], state["best"]
    else:
        torch.manual_seed(args.seed + world.rank)
    if world.is_main:
        save_config(output_dir, vars(args))
    logger = Logger(
        output_dir, total_steps=total_steps, trackers=args.log, config=vars(args), name="sft", is_main=world.is_main
    )
    if resumed:
        logger.event({"event": "resumed", "step": start, "checkpoint": str(resumed)})
    world.print(
        f"sft.py: {num_parameters / 1e6:.1f} M parameters, {world.size} x {world.device.type}, {args.strategy}, "
        f"compute {compute_dtype} ({why}) | {len(train_data)} rows, {args.batch_size} a step, {total_steps} steps -> "
        f"{output_dir}"
    )

    def episodes_of(data: Conversations, positions: list[int]) -> list[Episode]:
        episodes = [conversation_episode(data[i], tokenizer, i, args.max_tokens) for i in positions]
        return [episode for episode in episodes if any(episode.loss_mask)]  # others were cut before the first answer

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        rows = list(range(min(args.eval_rows, len(eval_data))))[world.rank :: world.size]
        episodes = episodes_of(eval_data, rows)
        index = TokenIndex(episodes)
        loss = 0.0
        for batch in pack(episodes, range(len(episodes)), index, **pack_options):
            with forward_context(policy):
                logprobs, _ = policy(batch.to(world.device))
            loss -= logprobs.sum().item()
        loss, tokens = all_reduce([loss, len(index)])
        return {"eval/loss": loss / max(tokens, 1)}

    for step in range(start, total_steps):
        step_start = time.perf_counter()

        # 1. data
        positions = loader.next(args.batch_size)[world.rank :: world.size]
        episodes = episodes_of(train_data, positions)
        index = TokenIndex(episodes)
        num_loss_tokens = max(all_reduce([len(index)])[0], 1.0)

        # 4. update
        lr = args.learning_rate * lr_factor(step, total_steps, args.warmup_steps, args.lr_schedule, args.lr_floor)
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = lr, args.weight_decay  # of this run, not of the checkpoint
        loss_sum = entropy_sum = 0.0
        batches = pack(episodes, range(len(episodes)), index, **pack_options)
        for i, batch in enumerate(batches):
            with forward_context(policy, last=i == len(batches) - 1):
                logprobs, entropy = policy(batch.to(world.device))
                loss = cross_entropy(logprobs, num_loss_tokens, world.size)
                (loss * loss_scale.scale).backward()
            loss_sum -= logprobs.detach().sum().item()
            entropy_sum += entropy.detach().sum().item()
        grad_norm, stepped = guarded_step(policy, optimizer, args.max_grad_norm, loss_scale)

        # 5. log
        loss_sum, entropy_sum = all_reduce([loss_sum, entropy_sum])
        metrics = {
            "policy/loss": loss_sum / num_loss_tokens,
            "policy/entropy": entropy_sum / num_loss_tokens,
            "optim/grad_norm": grad_norm,
            "optim/lr": lr,
            "optim/skipped_steps": float(not stepped),
            "optim/loss_scale": loss_scale.scale,
            "data/epoch": loader.epoch,
            "data/tokens": num_loss_tokens,
        }

        # 6. eval, checkpoint
        last = step + 1 == total_steps
        if eval_data and (last or (args.eval_every and (step + 1) % args.eval_every == 0)):
            metrics |= evaluate()
        metrics["time/step_s"] = time.perf_counter() - step_start
        logger.log(step + 1, metrics)
        if last or (args.save_every and (step + 1) % args.save_every == 0):
            improved = metrics.get("eval/loss", math.inf) < best
            best = min(best, metrics.get("eval/loss", math.inf))
            state = {"best": best, "loader": loader.state_dict(), "loss_scale": loss_scale.state_dict()}
            folder = output_dir / "checkpoints"
            save_checkpoint(folder, step + 1, trained, state, world, keep=args.keep_checkpoints, best=improved)

    export_hugging_face(policy, tokenizer, output_dir / "model", world, compute_dtype)
    logger.close()
    world.print(f"done: {output_dir / 'model'}")


if __name__ == "__main__":
    run(main, tyro.cli(Args, description=__doc__))
