"""TRL's GRPOTrainer on the work that step.py writes down: `python trl_step.py WORK.json`, in TRL's environment.

It generates with transformers, or, if "vllm" says so, with vLLM in its own process, asleep during the update.

Appends one JSON object a step to the file WORK names, with the keys of our metrics.jsonl. The trainer's own code is
untouched: three of its methods are timed from outside, a callback reads the clock around each optimizer step.
"""

import json
import resource
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from common.rewards.countdown import score

# `prepare` is all that precedes the first forward of the update, the other two included.
TIMED = {"prepare": "_prepare_inputs", "rollout": "_generate", "reward": "_calculate_rewards"}


class Clock(TrainerCallback):
    """Seconds by phase from the first micro-batch of a step to the end of its optimizer step."""

    def __init__(self, metrics: Path):
        self.metrics, self.seconds, self.response_length = metrics, {}, 0.0

    def timed(self, phase: str, method):
        def wrapper(*args, **kwargs):
            start = time.perf_counter()
            result = method(*args, **kwargs)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
            return result

        return wrapper

    def on_step_begin(self, args, state, control, **kwargs):
        self.seconds, self.start = {}, time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        step = time.perf_counter() - self.start
        phases = {"rollout": self.seconds["rollout"], "reward": self.seconds["reward"], "step": step}
        phases["update"] = step - self.seconds["prepare"]
        record = {"step": state.global_step} | {f"time/{phase}_s": x for phase, x in phases.items()}
        record["rollout/response_length"] = self.response_length
        record["memory/peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        if torch.cuda.is_available():
            record["memory/peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        with self.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")


def main(work: dict) -> None:
    clock = Clock(Path(work["metrics"]))

    def reward(completions: list[str], completion_ids: list[list[int]], ground_truth: list[dict], **_) -> list[float]:
        clock.response_length = sum(map(len, completion_ids)) / len(completion_ids)
        return [score(text, truth)["score"] for text, truth in zip(completions, ground_truth)]

    config = GRPOConfig(
        num_generations=work["samples"],
        per_device_train_batch_size=work["batch"],  # sequences of one forward and backward
        gradient_accumulation_steps=work["prompts"] * work["samples"] // work["batch"],  # also one rollout a step
        max_completion_length=work["response_tokens"],
        max_steps=work["steps"],
        temperature=1.0,
        loss_type="dapo",
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        use_vllm=work["vllm"],
        vllm_mode="colocate",
        vllm_enable_sleep_mode=work["vllm"],
        vllm_gpu_memory_utilization=work["vllm_memory"],
        model_init_kwargs={"dtype": work["weights"]},
        gradient_checkpointing=work["checkpointing"],
        shuffle_dataset=False,  # the rows stand in the order in which grpo.py takes them
        output_dir=work["output_dir"],
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = Dataset.from_list(work["rows"])
    trainer = GRPOTrainer(work["model"], reward_funcs=reward, args=config, train_dataset=rows, callbacks=[clock])
    for phase, name in TIMED.items():
        setattr(trainer, name, clock.timed(phase, getattr(trainer, name)))
    trainer.train()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
