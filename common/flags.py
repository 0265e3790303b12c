"""The flags that scripts share, in four groups; their ranges stand in their types. How a command line is read.

A script's `Args` has its algorithm's own flags and, as fields, the groups it needs: `--help` shows a box for each, and
names on the command line carry no prefix. Another default for a fork stands in one place, its `Args`:

    rollout: Rollout = field(default_factory=partial(Rollout, samples_per_prompt=16))
"""

import operator
import os
import re
import sys
from dataclasses import astuple, dataclass, fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import tyro
from annotated_types import Ge, Gt, Le
from tyro.constructors import PrimitiveConstructorSpec

from common.files import command_line, refuse
from common.processes import ranks_here, said_once

ROOT = Path(__file__).resolve().parents[1]
EMBEDDED = ("tiny", "tiny-vl", "tiny-vl-python")  # models that bring their own data
SCRIPTS = ("grpo.py", "ppo.py", "curiosity_rl.py", "sft.py")
LORA_RATE = 10  # times the default learning rate
BOUNDS = {Gt: (operator.gt, "be above"), Ge: (operator.ge, "not be below"), Le: (operator.le, "not be above")}
MOST_TOKENS = 16_384  # of a micro-batch, unless a number is typed
TRACKERS = ("tensorboard", "wandb", "trackio", "swanlab")

Count = Annotated[int, Gt(0), Le(2**53)]
Limit = Annotated[int, Ge(0), Le(2**53)]  # 0: there is none
Positive = Annotated[float, Gt(0)]
Amount = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]


def joined(names: list[str]) -> str:
    if not names:
        raise ValueError("expected a file")
    return ",".join(names)


# Files, or patterns of them, separated by commas; or by spaces, as a shell leaves its pattern.
Files = Annotated[
    str,
    PrimitiveConstructorSpec(
        nargs="*",
        metavar="FILES",
        instance_from_str=joined,
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda value: [value],
    ),
]


@dataclass
class Data:
    """Files of rows, and the pictures in them."""

    train_data: Files | None = None  # .parquet, .jsonl, .json, .json*.gz, or ORG/NAME:CONFIG:SPLIT of the hub
    eval_data: Files | None = None  # the same formats; gives eval/*
    media_root: Path | None = None  # where paths of pictures start that are not beside their data file; none may leave
    max_rows: Count | None = None  # use only the first rows of the training data
    bad_rows: Literal["error", "drop"] = "error"  # rows that are unusable or too long: stop, or count and drop them
    min_pixels: Count = 3136  # smaller pictures are enlarged to this area; 28 x 28 pixels are one token
    max_pixels: Annotated[Count, Ge(784)] = 1_003_520  # larger ones are reduced to it; crops are cut from the original
    max_frame_pixels: Annotated[Count, Ge(784)] = 401_408  # the same for a frame of a video


@dataclass
class Rollout:
    """How answers are sampled, with which tools, and how they are scored."""

    prompts_per_step: Count = 128  # P: prompts per step, over all ranks
    samples_per_prompt: Count = 8  # G: responses to each prompt
    max_prompt_tokens: Count = 512  # longest prompt (tokens)
    max_response_tokens: Count = 512  # longest response (tokens), with tools all that follows the prompt
    temperature: Annotated[float, Gt(0), Ge(0.01), Le(2)] = 1.0  # of sampling; the trainer's log-probs use it too
    reward_function: str | None = None  # FILE.py:NAME, verl's signature; default: by the row's data_source
    reward_timeout: Positive = 10.0  # seconds for one response; one that takes longer, or crashes, is left out
    judge_patience: Positive = 30.0  # minutes without an answer of the judge (JUDGE_URLS); then the run saves and ends
    judge_probe: bool = True  # ask the judge for a right and a wrong pair at the start; --no-judge-probe: take any
    tools: str | None = None  # what the policy may call: visual (crop, frames), FILE.py:NAME, ...; or python, alone
    interaction: str | None = None  # FILE.py:NAME: answers turns that call no tool, as a user does, or rates them
    interaction_rows: Literal["own", "all"] = "own"  # rows that it answers: those with interaction_kwargs, or all
    environment: str | None = None  # FILE.py:CLASS, whose methods are tools: an object for each trajectory, as in TRL
    tool_workers: Count = 64  # processes per rank, at most, that run tools
    tool_timeout: Positive = 30.0  # seconds for one call; more is an error that the policy is told
    max_turns: Count = 5  # answers in a trajectory, each but the last followed by what its tool returns
    max_turn_tokens: Count | None = None  # longest single answer (tokens); default: --max-response-tokens
    max_tool_errors: Limit = 3  # errors that are told to the policy; one more ends the trajectory
    max_images: Count = 16  # pictures in a trajectory, the prompt's included
    deterministic: bool = False  # with tools: turns in lock-step, so that a resume repeats them bit for bit
    engine: Literal["auto", "vllm", "hf"] = "auto"  # of rollouts; hf: transformers, slow; auto: vllm if installed
    engine_parallel: Count = 1  # ranks that share one vLLM, for models too large for one GPU; tools then in lock-step
    engine_memory: Positive | None = None  # KV cache (GiB per rank); default: what a GPU has left, 0.5 on CPUs
    sleep_level: Literal[0, 1, 2] = 1  # engine while updating: 1 to host, 2 dropped, 0 stays (if others use the GPU)
    max_logprob_gap: Positive | None = None  # stop if |engine - trainer| log-probs exceed this mean; default by dtype
    eval_samples: Count = 1  # samples per row in evaluation, with --eval-temperature; above 1: pass@k, maj@k
    eval_temperature: Annotated[float, Ge(0), Le(2)] = 0.0  # 0 = greedy; vLLM takes less than 0.01 for 0.01
    eval_top_p: Annotated[float, Gt(0), Le(1)] = 1.0  # nucleus, in evaluation only
    eval_top_k: Annotated[int, Ge(-1)] = -1  # most likely tokens to choose from, in evaluation only; -1: all
    eval_only: bool = False  # evaluate --eval-data, print the table, write the samples, and stop
    dump_rollouts_every: Limit = 0  # steps between dumps of all episodes to OUTPUT_DIR/rollouts; 0: none
    replay: Path | None = None  # a dump: repeat the update of its step bit for bit, without an engine, and stop

    @property
    def multi_turn(self) -> bool:
        """Does something answer the policy?"""
        return bool(self.tools or self.interaction or self.environment)

    @property
    def uses_vllm(self) -> bool:
        """--engine; auto means vLLM wherever it is installed."""
        if self.engine == "auto":
            return find_spec("vllm") is not None
        return self.engine == "vllm"


@dataclass
class Machine:
    """What it runs on, and how the model is laid over it."""

    strategy: Literal["fsdp", "ddp"] = "fsdp"  # shard the model over the ranks (FSDP2), or a copy on each
    shard_size: Count | None = None  # ranks that share a copy of the model (HSDP), as those of a machine; default: all
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # trainer and engine; master weights are float32
    attention: Literal["auto", "flash", "flex", "sdpa"] = "auto"  # auto: flex on GPUs with bf16, else sdpa
    micro_batch_tokens: Count | None = None  # tokens of one forward and backward, per rank; default: what fits
    gradient_checkpointing: bool = False  # recompute activations in backward: less memory, a third more compute
    optimizer_offload: bool = False  # Adam's moments on the host, but for the optimizer's step
    reference_offload: bool = False  # the reference model on the host, but for its log-probs
    compile: bool = False  # torch.compile the layers, on GPUs: a slow first step, then faster ones
    freeze_vision: bool = False  # train the language model alone
    lora_rank: Limit = 0  # LoRA: train adapters of this rank (try 16) beside the frozen model; 0: train the model
    lora_alpha: Positive = 32.0  # of LoRA: the product of the adapters counts alpha / rank times
    lora_targets: str = "all"  # of LoRA: linear layers of the language model, such as q_proj,v_proj; all: every one
    trust_remote_code: bool = False  # run code that comes with the model


@dataclass
class Run:
    """One run: its model and folder, how long it is, when it evaluates and saves, where it goes on."""

    model: str = "tiny"  # folder, hub id, smollm2, or embedded: tiny, tiny-vl, tiny-vl-python; none given: the demo
    output_dir: Path | None = None  # run folder; default runs/SCRIPT-MODEL-TIME
    seed: Limit = 0  # data order, sampling, initialisation
    total_steps: Count | None = None  # steps; default: from --total-epochs
    total_epochs: Annotated[float, Gt(0), Le(1e6)] = 1.0  # passes over the data, if no --total-steps; refills on top
    eval_every: Limit = 20  # steps between evaluations; 0: only before and after
    eval_before: bool = True  # evaluate before the first step
    eval_rows: Count = 512  # so many rows of --eval-data are used, the first ones
    save_every: Limit = 0  # steps between checkpoints, the best evaluation has one too; 0: only at the end
    keep_checkpoints: Count = 1  # newest ones kept; the best by evaluation is kept besides
    resume: str = "auto"  # auto: continue the run in --output-dir if there is one; never; or a path
    stall_minutes: Positive = 60.0  # longest a phase (rollout, rewards, part of an evaluation) may take; then the end
    profile_steps: str | None = None  # A:B, such as 3:5: traces of these steps, OUTPUT_DIR/profile
    log: str = ""  # further trackers, comma-separated: tensorboard, wandb, trackio, swanlab


Args = TypeVar("Args")


def parse(args_class: type[Args], demo: Args, doc: str) -> tuple[Args, bool]:
    """(the script's arguments, whether they are the demo's: no --model is given). SystemExit for what is wrong."""
    is_demo = "--model" not in given()
    default = demo if is_demo and not given() & {"--help", "-h"} else args_class()
    with said_once():
        told = "python -OO (PYTHONOPTIMIZE=2) leaves out the docstrings that --help and tools show"
        refuse(sys.flags.optimize > 1, f"{told}: take python, or python -O")
        paragraphs = doc.split("\n\n")
        teaching = [paragraphs[0], *(text for text in paragraphs if text.startswith("    "))]  # the commands
        sys.argv[1:] = command_line()
        explain_foreign(sys.argv[1:], args_class)
        parsed = tyro.cli(tyro.conf.OmitArgPrefixes[args_class], default=default, description="\n\n".join(teaching))
        check_ranges(parsed)
    return with_lora_rates(parsed) if parsed.machine.lora_rank else parsed, is_demo


def with_lora_rates(args: Args) -> Args:
    """With the learning rates of adapters, by default ten times those of full training; says so."""
    rates = {name: rate for name, rate in vars(args).items() if name.endswith("learning_rate")}
    rates |= {name: LORA_RATE * rate for name, rate in rates.items() if flag(name) not in given()}
    for name, rate in rates.items() if os.environ.get("RANK", "0") == "0" else ():
        low = ": low, ten times that of full training is usual" if rate < 0.99e-5 else ""
        print(f"{'warning: ' if low else ''}LoRA of rank {args.machine.lora_rank}, {flag(name)} {rate:g}{low}")
    return replace(args, **rates)


def check_pixels(data: Data) -> None:
    refuse(data.min_pixels > data.max_pixels, f"--min-pixels {data.min_pixels}: above --max-pixels {data.max_pixels}")


def check_shared(data: Data, run: Run, rollout: Rollout) -> None:
    """Refuse what cannot work, or has no effect, of the flags that the RL scripts share."""
    check_pixels(data)
    refuse(bool(rollout.replay) and rollout.eval_only, "--replay is of training, --eval-only does none")
    shared, local = rollout.engine_parallel, ranks_here()
    refuse(shared > 1 and not rollout.uses_vllm, f"--engine-parallel {shared} needs --engine vllm")
    refuse(local % shared > 0, f"--engine-parallel {shared}: torchrun's --nproc_per_node {local} is no multiple of it")
    needed, rows = ("--eval-data", data.eval_data) if rollout.eval_only else ("--train-data", data.train_data)
    bare = run.model not in EMBEDDED or bool(data.train_data)
    refuse(not rows and bare, f"--model {run.model} needs {needed}")
    evaluated = (bool(data.eval_data) or not data.train_data, "--eval-data")
    refuse_idle(run, dict.fromkeys(["eval_every", "eval_before", "eval_rows"], evaluated))
    trains = (not rollout.eval_only, "training, and no --eval-only")
    refuse_idle(run, {"total_epochs": (run.total_steps is None, "--total-steps None"), "profile_steps": trains})
    called = (rollout.multi_turn, "--tools, --interaction or --environment")
    sampled = (rollout.eval_temperature > 0, "an --eval-temperature above 0")
    idle = dict.fromkeys(["max_turns", "max_turn_tokens", "max_tool_errors", "deterministic"], called)
    idle |= dict.fromkeys(["tool_workers", "tool_timeout"], called)
    idle |= {"interaction_rows": (bool(rollout.interaction), "--interaction")}
    idle |= dict.fromkeys(["eval_top_p", "eval_top_k", "eval_samples"], sampled)  # greedy ones are all the same
    refuse_idle(rollout, idle | {"eval_temperature": evaluated})


def flat(args: Any) -> dict[str, Any]:
    """{name: value} of all flags, those of groups too."""
    pairs = {item.name: getattr(args, item.name) for item in fields(args)}
    groups = {name: value for name, value in pairs.items() if is_dataclass(value)}
    own = {name: value for name, value in pairs.items() if name not in groups}
    return own | {name: value for group in groups.values() for name, value in flat(group).items()}


def step_range(text: str | None) -> range:
    """The steps of --profile-steps A:B, from the first to the last; none of None."""
    match = re.fullmatch(r"([1-9]\d{0,8}):(\d{1,9})", text or "")
    steps = range(int(match[1]), int(match[2]) + 1) if match else range(0)
    refuse(text is not None and not steps, f"--profile-steps {text}: give the first and the last step, such as 3:5")
    return steps


def tracker_names(trackers: str) -> list[str]:
    """The comma-separated names of --log. ValueError for an unknown one."""
    names = list(dict.fromkeys(item.strip() for item in trackers.split(",") if item.strip()))
    if unknown := [item for item in names if item not in TRACKERS]:
        raise ValueError(f"--log {trackers}: unknown tracker {unknown[0]!r}, expected {', '.join(TRACKERS)}")
    return names


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_ranges(args: Any) -> None:
    """Refuse numbers outside the range that their type names, of a group or of all in it."""
    for name, hint in get_type_hints(type(args), include_extras=True).items():
        value = getattr(args, name)
        if is_dataclass(value):
            check_ranges(value)
        elif isinstance(value, int | float):
            refuse(value != value, f"{flag(name)} {value}: must be a number")
            for bound in (bound for part in (hint, *get_args(hint)) for bound in getattr(part, "__metadata__", ())):
                holds, words = BOUNDS[type(bound)]
                (limit,) = astuple(bound)
                refuse(not holds(value, limit), f"{flag(name)} {value}: must {words} {limit:g}")


def given() -> set[str]:
    """The flags on the command line."""
    return {argument.partition("=")[0].replace("_", "-") for argument in sys.argv[1:]}


def refuse_idle(flags: Any, uses: dict[str, tuple[bool, str]]) -> None:
    """Stop if a flag is given that has no effect. uses: {field: (is it used, what it would need)}."""
    for name, (used, needs) in uses.items():
        said = {flag(name), flag(name).replace("--", "--no-", 1)} & given()
        refuse(not used and bool(said), f"{flag(name)} {getattr(flags, name)} has no effect: needs {needs}")


def explain_foreign(arguments: list[str], args_class: type) -> None:
    """SystemExit with our name for a flag of verl's, of TRL's or of another script of ours; for a broken line."""
    old_launcher = any(argument.replace("_", "-").startswith("--local-rank") for argument in arguments)
    refuse(old_launcher, "--local-rank is what python -m torch.distributed.launch and deepspeed add: take torchrun")
    blank = any(argument and not argument.strip() for argument in arguments)
    refuse(blank, "a lone space is an argument: a backslash that continues a line must be its last character")
    pairs = [a.split("=", 1) if "=" in a else (a, b) for a, b in zip(arguments, [*arguments[1:], None])]
    if empty := [name for name, value in pairs if value == "" and name.replace("_", "-") not in ("--tools", "--log")]:
        raise SystemExit(f"{empty[0]} is empty: an unset variable?")
    for name, value in pairs:
        is_bare = value is None or value.startswith("--")
        refuse(
            is_bare and name in ("--train-data", "--eval-data"), f"{name} is followed by no file: an unset variable?"
        )
    ours = {flag(name) for name in flat(args_class())}
    ours |= {known.replace("--", "--no-", 1) for known in ours} | {"--help"}
    answers = {key: f"{script} has it" for script in reversed(SCRIPTS) for key in script_flags(ROOT / script)}
    answers |= {flag(item.name): "grpo.py, ppo.py and curiosity_rl.py have it" for item in fields(Rollout)}
    answers |= foreign_names()
    for argument in arguments:
        name = argument.partition("=")[0].lstrip("+")
        key = flag(name.lstrip("-").removeprefix("no-"))
        asked = name.startswith("--") or ("=" in argument and "." in name)
        if asked and key in answers.keys() - ours:
            script, shown = Path(sys.argv[0]).name, key if name.startswith("--") else name
            raise SystemExit(f"{script} has no {shown}: {answers[key]}")


def script_flags(script: Path) -> set[str]:
    """A script's own flags, read off its text: importing it would take seconds."""
    text = script.read_text() if script.is_file() else ""
    body = text.partition("class Args:")[2].partition("\n\n\n")[0]
    return {flag(name) for name in re.findall(r"^    (\w+): .*#", body, re.MULTILINE)}


def foreign_names() -> dict[str, str]:
    """{another system's key, as a flag: what it is here}, the table of docs/from_verl_trl.md."""
    page, names = ROOT / "docs" / "from_verl_trl.md", {}
    for line in page.read_text().splitlines() if page.is_file() else ():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 3:
            for key in re.findall(r"`([^`]+)`", cells[0]):
                here = f"{cells[1]} ({cells[2]})".replace("`", "")
                names[flag(key.lstrip("-"))] = f"here {here}; see docs/from_verl_trl.md"
    return names
