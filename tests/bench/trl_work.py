"""The work of a run of TRL's, as WORK.json for trl_step.py and trl_sft.py: the same rows in the
same order as ours."""

import json
import shutil
from pathlib import Path

import report  # noqa: F401  (puts the repository on the import path)

from common.assets.build import tiny
from common.data.order import RowOrder
from common.data.render import apply_template, to_messages
from common.hub import load_tokenizer, resolve_model
from common.optimizer import lr_factor

# The demo of grpo.py, and settings of TRL for two cores: results/beside-trl has what else was tried
GRPO = {
    "prompts": 32,
    "samples": 8,
    "response_tokens": 256,
    "steps": 40,
    "eval_every": 5,
    "batch": 64,
}
GRPO |= {"checkpointing": False, "weights": "float32", "vllm": False, "vllm_memory": 0.0}
GRPO_OPTIONS = {"learning_rate": 8e-5, "bf16": True}
GRPO_RATES = {"total_steps": 40, "warmup_steps": 5, "schedule": "linear", "floor": 0.1}

# studies.py has the same as flags of sft.py.
SFT = {
    "model": "smollm2",
    "rows_of_a_step": 16,
    "steps": 12,
    "eval_every": 12,
    "held_out": 32,
    "batch": 4,
}
SFT_OPTIONS = {"learning_rate": 1e-4, "bf16": False, "adam_beta2": 0.95, "max_grad_norm": 1.0}
SFT_RATES = {"total_steps": 12, "warmup_steps": 0.1, "schedule": "linear", "floor": 0.0}


def write_grpo(folder: Path, seed: int, processes: int) -> Path:
    """The demo of grpo.py, its prompts in the order of that seed."""
    model = resolve_model("tiny")
    tokenizer = load_tokenizer(model)

    def as_text(problem: tiny.Problem) -> dict:
        messages = to_messages(
            [{"role": "user", "content": tiny.prompt_text(problem, "compact")}], tokenizer
        )
        truth = {"numbers": problem.numbers, "target": problem.target}
        return {"prompt": apply_template([messages], tokenizer)[0], "ground_truth": truth}

    held_out, training = tiny.rl_problems()
    order = RowOrder(len(training), seed).next(GRPO["steps"] * GRPO["prompts"])
    factors = [lr_factor(step, **GRPO_RATES) for step in range(GRPO["steps"])]
    work = GRPO | {
        "model": str(model),
        "options": GRPO_OPTIONS | {"seed": seed},
        "processes": processes,
    }
    rows = {
        "rows": [as_text(training[i]) for i in order],
        "eval_rows": [as_text(p) for p in held_out[:512]],
    }
    return write(folder, work | {"lr_factors": factors}, rows)


def write_sft(folder: Path, seed: int, processes: int, rows: Path) -> Path:
    """The conversations of a folder, train.jsonl and eval.jsonl, in the order of that seed."""
    training, evaluation = (
        [as_trl(json.loads(line)) for line in (rows / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "eval")
    )
    order = RowOrder(len(training), seed).next(SFT["steps"] * SFT["rows_of_a_step"])
    factors = [lr_factor(step, **SFT_RATES) for step in range(SFT["steps"])]
    work = SFT | {
        "model": str(resolve_model(SFT["model"])),
        "options": SFT_OPTIONS | {"seed": seed},
    }
    work |= {"processes": processes, "lr_factors": factors}
    return write(
        folder,
        work,
        {"rows": [training[i] for i in order], "eval_rows": evaluation[: SFT["held_out"]]},
    )


def as_trl(row: dict) -> dict:
    """A row of study_data.py as TRL takes it."""
    if "prompt" not in row:
        return row
    return {
        "prompt": row["prompt"],
        "completion": [{"role": "assistant", "content": row["extra_info"]["answer"]}],
    }


def write(folder: Path, work: dict, rows: dict) -> Path:
    """FOLDER/work.json; config.json, which is kept, has all of it but the rows."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    work |= {"output_dir": str(folder), "metrics": str(folder / "metrics.jsonl")}
    (folder / "config.json").write_text(json.dumps(work, indent=2))
    (folder / "work.json").write_text(json.dumps(work | rows))
    return folder / "work.json"
