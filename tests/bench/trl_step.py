"""TRL's GRPOTrainer, in an environment of its own, on the work that step.py or curves.py writes
down: WORK.json.

It generates with transformers, or, if "vllm" says so, with vLLM in its own process, asleep during
the update.

Appends one JSON object a step to the file WORK names, with the keys of our metrics.jsonl. The
trainer's own code is untouched: its methods are timed from outside, a callback reads the
clock around each optimizer step, and tries the policy between steps: "eval_rows", every
"eval_every" steps.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from common.rewards.countdown import score

# `prepare` is all that precedes the first forward of the update, the other two included.
TIMED = {"prepare": "_prepare_inputs", "rollout": "_generate", "reward": "_calculate_rewards"}


class Clock(TrainerCallback):
    """Seconds by phase from the first micro-batch of a step to the end of its optimizer step;
    accuracy in between."""

    def __init__(self, work: dict):
        self.work, self.metrics, self.trainer = work, Path(work["metrics"]), None
        self.seconds, self.response_length, self.accuracy = {}, 0.0, 0.0

    def timed(self, phase: str, method):
        def wrapper(*args, **kwargs):
            start = time.perf_counter()
            result = method(*args, **kwargs)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
            return result

        return wrapper

    def on_train_begin(self, args, state, control, **kwargs):
        if self.work.get("eval_rows"):
            self.write({"step": 0, "eval/accuracy": greedy_accuracy(self.trainer, self.work)})

    def on_step_begin(self, args, state, control, **kwargs):
        self.seconds, self.start = {}, time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        step = time.perf_counter() - self.start
        phases = {
            "rollout": self.seconds["rollout"],
            "reward": self.seconds["reward"],
            "step": step,
        }
        phases["update"] = step - self.seconds["prepare"]
        if "sync" in self.seconds:  # TRL makes it when it generates
            phases["sync"] = self.seconds["sync"]
            phases["rollout"] -= phases["sync"]
        record = {"step": state.global_step} | {f"time/{phase}_s": x for phase, x in phases.items()}
        record |= {
            "rollout/response_length": self.response_length,
            "reward/accuracy": self.accuracy,
        }
        record["memory/peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        if torch.cuda.is_available():
            record["memory/peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        if self.work.get("eval_rows") and state.global_step % self.work["eval_every"] == 0:
            record["eval/accuracy"] = greedy_accuracy(self.trainer, self.work)
        self.write(record)

    def write(self, record: dict) -> None:
        if self.trainer.accelerator.is_main_process:
            with self.metrics.open("a") as file:
                file.write(json.dumps(record) + "\n")


@torch.no_grad()
def greedy_accuracy(trainer: GRPOTrainer, work: dict) -> float:
    """Of the policy as it is, on "eval_rows"; each process answers its share of them."""
    accelerator, tokenizer = trainer.accelerator, trainer.processing_class
    model, rows = accelerator.unwrap_model(trainer.model), work["eval_rows"]
    own, right = rows[accelerator.process_index :: accelerator.num_processes], 0
    limits = {
        "do_sample": False,
        "max_new_tokens": work["response_tokens"],
        "pad_token_id": tokenizer.pad_token_id,
    }
    model.eval()
    for start in range(0, len(own), 128):
        batch = own[start : start + 128]
        prompts = tokenizer(
            [row["prompt"] for row in batch], return_tensors="pt", padding=True, padding_side="left"
        )
        ids = model.generate(prompts.input_ids, attention_mask=prompts.attention_mask, **limits)
        texts = tokenizer.batch_decode(
            ids[:, prompts.input_ids.shape[1] :], skip_special_tokens=True
        )
        right += sum(
            score(text, row["ground_truth"])["score"] >= 1 for text, row in zip(texts, batch)
        )
    model.train()
    return sum(gather_object([right])) / len(rows)


def main(work: dict) -> None:
    clock = Clock(work)

    def reward(
        completions: list[str], completion_ids: list[list[int]], ground_truth: list[dict], **_
    ) -> list[float]:
        clock.response_length = sum(map(len, completion_ids)) / len(completion_ids)
        scores = [score(text, truth)["score"] for text, truth in zip(completions, ground_truth)]
        clock.accuracy = sum(one >= 1 for one in scores) / len(scores)
        return scores

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    options = {"learning_rate": 1e-6, "lr_scheduler_type": "constant", "bf16": True} | work.get(
        "options", {}
    )
    config = GRPOConfig(
        num_generations=work["samples"],
        per_device_train_batch_size=work["batch"],  # sequences of one forward and backward
        # also one rollout a step
        gradient_accumulation_steps=work["prompts"] * work["samples"] // work["batch"] // processes,
        max_completion_length=work["response_tokens"],
        max_steps=work["steps"],
        temperature=1.0,
        loss_type="dapo",
        use_cpu=not torch.cuda.is_available(),
        use_vllm=work["vllm"],
        vllm_mode="colocate",
        vllm_enable_sleep_mode=work["vllm"],
        vllm_gpu_memory_utilization=work["vllm_memory"],
        vllm_max_model_length=work.get("max_model_length"),
        model_init_kwargs={"dtype": work["weights"]},
        gradient_checkpointing=work["checkpointing"],
        shuffle_dataset=False,  # the rows stand in the order in which grpo.py takes them
        output_dir=work["output_dir"],
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    rows = Dataset.from_list(work["rows"])
    trainer = GRPOTrainer(
        work["model"], reward_funcs=reward, args=config, train_dataset=rows, callbacks=[clock]
    )
    clock.trainer = trainer
    if factors := work.get("lr_factors"):  # of the learning rate, by step
        optimizer = trainer.create_optimizer()
        trainer.lr_scheduler = LambdaLR(
            optimizer, lambda step: factors[min(step, len(factors) - 1)]
        )
    for phase, name in TIMED.items():
        setattr(trainer, name, clock.timed(phase, getattr(trainer, name)))
    if work["vllm"]:
        generation = trainer.vllm_generation
        generation.sync_weights = clock.timed("sync", generation.sync_weights)
    trainer.train()
    trainer.accelerator.end_training()  # else gloo may abort where one process ends before another


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
