"""The flags that scripts share, in four groups; their ranges stand in their types. How a command
line is read.

A script's `Args` has its algorithm's own flags and, as fields, the groups it needs: `--help` shows
a box for each, and names on the command line carry no prefix. Another default for a fork stands in
one place, its `Args`:

    rollout: Rollout = field(default_factory=partial(Rollout, samples_per_prompt=16))
"""

import argparse
import operator
import re
import sys
import textwrap
import tomllib
import warnings
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import tyro
from annotated_types import Ge, Gt, Le
from tyro.constructors import PrimitiveConstructorSpec

from common.ending import said_once
from common.files import command_line, refuse
from common.processes import ranks_here
from common.progress import say

ROOT = Path(__file__).resolve().parents[1]
EMBEDDED = ("tiny", "tiny-vl", "tiny-vl-python")  # models that bring their own data
FOREIGN_FLAGS = ROOT / "common" / "foreign_flags.toml"
LORA_RATE = 10  # times the default learning rate
BOUNDS = {
    Gt: (operator.gt, "be above"),
    Ge: (operator.ge, "not be below"),
    Le: (operator.le, "not be above"),
}
HELP_COLUMN = 32  # where the texts of --help begin
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

OFFLOADS = ("optimizer", "reference")


def offload_of(texts: list[str]) -> str:
    names = texts[0].split(",")
    for name in names:
        if name not in OFFLOADS:
            raise ValueError(f"{name!r} is not one of {', '.join(OFFLOADS)}")
    return texts[0]


# Names of OFFLOADS, separated by commas.
Offload = Annotated[
    str,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="NAMES",
        instance_from_str=offload_of,
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda value: [value],
    ),
]


@dataclass
class Data:
    """Files of rows, and the pictures in them."""

    # .parquet, .jsonl, .json, .json*.gz, or ORG/NAME:CONFIG:SPLIT of the hub
    train_data: Files | None = None
    eval_data: Files | None = None  # the same formats; gives eval/*
    # where paths of pictures start that are not beside their data file; none may leave
    media_root: Path | None = None
    max_rows: Count | None = None  # use only the first rows of the training data
    # rows that are unusable or too long: stop, or count and drop them
    bad_rows: Literal["error", "drop"] = "error"
    # smaller pictures are enlarged to this area; 28 x 28 pixels are one token
    min_pixels: Count = 3136
    # largest area of a picture; crops are cut from the original
    max_pixels: Annotated[Count, Ge(784)] = 1_003_520
    max_frame_pixels: Annotated[Count, Ge(784)] = 401_408  # the same for a frame of a video


@dataclass
class Rollout:
    """How answers are sampled, with which tools, and how they are scored."""

    prompts_per_step: Count = 128  # P: prompts per step, over all ranks
    samples_per_prompt: Count = 8  # G: responses to each prompt
    max_prompt_tokens: Count = 512  # longest prompt (tokens)
    # longest response (tokens), of all turns together; what tools return counts
    max_response_tokens: Count = 512
    # of sampling; the trainer's log-probs use it too
    temperature: Annotated[float, Gt(0), Ge(0.01), Le(2)] = 1.0
    # FILE.py:NAME, verl's signature; default: by the row's data_source
    reward_function: str | None = None
    # seconds for one response; slower: wrong by a built-in rule, left out by yours
    reward_timeout: Positive = 10.0
    # tools it may call: visual, python, FILE.py:NAME; visual: crop, frames; python: alone
    tools: str | None = None
    # FILE.py:NAME; of a class, as in TRL, methods are tools; a function answers turns
    environment: str | None = None
    tool_workers: Count = 64  # processes per rank, at most, that run tools
    tool_timeout: Positive = 30.0  # seconds for one call; more is an error that the policy is told
    # answers in a trajectory; each but the last is followed by what its tool returns
    max_turns: Count = 5
    # longest single answer (tokens); default: --max-response-tokens
    max_turn_tokens: Count | None = None
    max_tool_errors: Limit = 3  # errors that are told to the policy; one more ends the trajectory
    max_images: Count = 16  # pictures in a trajectory, the prompt's included
    # with tools: turns in lock-step, so that a resume repeats them bit for bit
    deterministic: bool = False
    # of rollouts; hf: transformers, slow; auto: vllm if installed
    engine: Literal["auto", "vllm", "hf"] = "auto"
    # ranks that share one vLLM; for models too large for one GPU; tools then in lock-step
    engine_parallel: Count = 1
    # KV cache (GiB per rank); default: what a GPU has left, 0.5 on CPUs
    engine_memory: Positive | None = None
    # engine while updating: 1 to host, 2 dropped, 0 stays (if others use the GPU)
    sleep_level: Literal[0, 1, 2] = 1
    # stop if |engine - trainer| log-probs exceed this mean; default by dtype
    max_logprob_gap: Positive | None = None
    # samples per row in evaluation, with --eval-temperature; above 1: pass@k, maj@k
    eval_samples: Count = 1
    # 0 = greedy; vLLM takes less than 0.01 for 0.01
    eval_temperature: Annotated[float, Ge(0), Le(2)] = 0.0
    eval_top_p: Annotated[float, Gt(0), Le(1)] = 1.0  # nucleus, in evaluation only
    eval_only: bool = False  # evaluate --eval-data, and stop; prints the table, writes the samples
    # steps between dumps of all episodes to OUTPUT_DIR/rollouts; 0: none
    dump_rollouts_every: Limit = 0
    # a dump: repeat the update of its step bit for bit, without an engine, and stop
    replay: Path | None = None

    @property
    def max_model_len(self) -> int:
        """Longest prompt with its response (tokens)."""
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def multi_turn(self) -> bool:
        """Does something answer the policy?"""
        return bool(self.tools or self.environment)

    @property
    def uses_vllm(self) -> bool:
        """--engine; auto means vLLM wherever it is installed."""
        if self.engine == "auto":
            return find_spec("vllm") is not None
        return self.engine == "vllm"


@dataclass
class Machine:
    """What it runs on, and how the model is laid over it."""

    # shard the model over the ranks (FSDP2), or a copy on each
    strategy: Literal["fsdp", "ddp"] = "fsdp"
    # ranks that share a copy of the model (HSDP), as those of a machine; default: all
    shard_size: Count | None = None
    # compute type; engine too; master weights are float32
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    # auto: flex on GPUs with bf16, else sdpa
    attention: Literal["auto", "flash", "flex", "sdpa"] = "auto"
    # tokens of one forward and backward, per rank; default: what fits
    micro_batch_tokens: Count | None = None
    # recompute activations in backward: less memory, a third more compute
    gradient_checkpointing: bool = False
    # on the host while idle: optimizer (Adam's moments); reference (of a KL); both with a comma
    offload: Offload = ""
    compile: bool = False  # torch.compile the layers, on GPUs: a slow first step, then faster ones
    freeze_vision: bool = False  # train the language model alone
    lora_rank: Limit = 0  # train LoRA adapters of this rank (try 16); 0: train the model itself
    lora_alpha: Positive = 32.0  # of LoRA: the product of the adapters counts alpha / rank times
    # of LoRA: linear layers of the language model, such as q_proj,v_proj; all: every one
    lora_targets: str = "all"
    trust_remote_code: bool = False  # run code that comes with the model


@dataclass
class Run:
    """One run: its model and folder, how long it is, when it evaluates and saves, where it goes
    on."""

    # folder or hub id, none given: the demo; smollm2; embedded: tiny, tiny-vl, tiny-vl-python
    model: str = "tiny"
    output_dir: Path | None = None  # run folder; default runs/SCRIPT-MODEL-TIME
    seed: Limit = 0  # data order, sampling, initialisation
    total_steps: Count | None = None  # steps, in place of --total-epochs
    # passes over the data, if no --total-steps; refills on top
    total_epochs: Annotated[float, Gt(0), Le(1e6)] = 1.0
    # steps between evaluations (0: none in between); those before and after besides
    eval_every: Limit = 20
    eval_before: bool = True  # evaluate before the first step
    eval_rows: Count = 512  # how many rows of --eval-data are used; the first ones
    # steps between checkpoints, or epoch; 0: at the end alone
    save_every: Limit | Literal["epoch"] = 20
    keep_checkpoints: Count = 2  # newest ones kept; the best by evaluation is kept besides
    resume: str = "auto"  # auto (the run in --output-dir), never, or a path
    # longest a phase (rollout, rewards, part of an evaluation) may take; then the end
    stall_minutes: Positive = 60.0
    profile_steps: str | None = None  # A:B, such as 3:5: traces of these steps, OUTPUT_DIR/profile
    log: str = ""  # trackers: tensorboard, wandb, trackio, swanlab; comma-separated


Args = TypeVar("Args")
Result = TypeVar("Result")


def parse(
    args_class: type[Args], demo: Args, doc: str, first_screen: str = ""
) -> tuple[Args, bool]:
    """(the script's arguments, whether they are the demo's: no --model is given). SystemExit for
    what is wrong.

    first_screen: the flags that --help shows, a group a line; without any it shows all, as
    --help-all does.
    """
    is_demo = "--model" not in given()
    asks_for_help = bool(given() & {"--help", "-h", "--help-all"})
    default = demo if is_demo and not asks_for_help else args_class()
    with said_once():
        told = "python -OO (PYTHONOPTIMIZE=2) leaves out the docstrings that --help and tools show"
        refuse(sys.flags.optimize > 1, f"{told}: take python, or python -O")
        sys.argv[1:] = command_line()
        if first_screen and given() & {"--help", "-h"}:
            print(help_screen(args_class, doc, first_screen.strip().splitlines()))
            raise SystemExit(0)
        explain_foreign(sys.argv[1:], args_class)
        try:
            parsed = tyro.cli(
                tyro.conf.OmitArgPrefixes[args_class],
                args=[
                    "--help" if argument == "--help-all" else argument for argument in sys.argv[1:]
                ],
                default=default,
                description=teaching(doc),
                add_help=asks_for_help,  # its errors would name --help, which has not all flags
            )
        except SystemExit as stop:
            if stop.code:
                print(f"all flags: python {sys.argv[0]} --help-all", file=sys.stderr)
            raise
        check_ranges(parsed)
    return with_lora_rates(parsed) if parsed.machine.lora_rank else parsed, is_demo


def call_program(function: Callable[..., Result], module: str, doc: str) -> Result:
    """function(...) with the command line of `python -m MODULE`, whose --help begins with its
    docstring as it stands: tyro would fold commands into a paragraph."""
    if given() & {"--help", "-h"}:
        print(f"{doc.strip()}\n")
    return tyro.cli(function, args=command_line(), prog=f"python -m {module}", description="")


def teaching(doc: str) -> str:
    """The title of a script, and its commands, from its docstring."""
    title, *paragraphs = doc.split("\n\n")
    commands = [text for text in paragraphs if text.startswith("    ")]
    return "\n\n".join([title.partition("\n")[0], *commands])


def help_screen(args_class: type, doc: str, groups: list[str]) -> str:
    """Title, commands, and groups of flags with their defaults and the first part of their help, in
    80 columns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # requirements.txt pins tyro
        parser = tyro.extras.get_parser(tyro.conf.OmitArgPrefixes[args_class], default=args_class())
    actions = {action.option_strings[0]: action for action in parser._actions}
    defaults = flat(args_class())
    lines = [teaching(doc)]
    for group in groups:
        lines.append("")
        for name in group.split():
            lines += help_lines(actions[f"--{name}"], defaults[name.replace("-", "_")])
    return "\n".join([*lines, "", "--help-all: all flags, and all that is to be said of them"])


def help_lines(action: argparse.Action, default: Any) -> list[str]:
    """A flag with its default, and what its help says before the first semicolon."""
    shown = f"  {action.option_strings[0]}"
    if isinstance(default, float):
        shown += f" {default:g}"
    elif default is None or default == "":
        shown += f" {action.metavar.removeprefix('{None}|')}"
    elif not isinstance(default, bool):
        shown += f" {default}"
    text = action.help.rpartition(" (default: ")[0].partition("; ")[0]
    if "," in (action.metavar or ""):  # {one,or,another}
        text += f" ({action.metavar.strip('{}').replace(',', ', ')})"
    first, *further = textwrap.wrap(text, width=80 - HELP_COLUMN, break_on_hyphens=False)
    return [shown.ljust(HELP_COLUMN) + first, *(" " * HELP_COLUMN + line for line in further)]


def with_lora_rates(args: Args) -> Args:
    """With the learning rates of adapters, by default ten times those of full training; says so."""
    rates = {name: rate for name, rate in vars(args).items() if name.endswith("learning_rate")}
    rates |= {name: LORA_RATE * rate for name, rate in rates.items() if flag(name) not in given()}
    for name, rate in rates.items():
        low = ": low, ten times that of full training is usual" if rate < 0.99e-5 else ""
        say(
            f"{'warning: ' if low else ''}LoRA of rank {args.machine.lora_rank}, {flag(name)} "
            f"{rate:g}{low}"
        )
    return replace(args, **rates)


def check_pixels(data: Data) -> None:
    refuse(
        data.min_pixels > data.max_pixels,
        f"--min-pixels {data.min_pixels}: above --max-pixels {data.max_pixels}",
    )


def check_shared(data: Data, run: Run, rollout: Rollout) -> None:
    """Refuse what cannot work, or has no effect, of the flags that the RL scripts share."""
    check_pixels(data)
    refuse(
        bool(rollout.replay) and rollout.eval_only, "--replay is of training, --eval-only does none"
    )
    shared, local = rollout.engine_parallel, ranks_here()
    refuse(shared > 1 and not rollout.uses_vllm, f"--engine-parallel {shared} needs --engine vllm")
    refuse(
        local % shared > 0,
        f"--engine-parallel {shared}: torchrun's --nproc_per_node {local} is no multiple of it",
    )
    needed, rows = (
        ("--eval-data", data.eval_data) if rollout.eval_only else ("--train-data", data.train_data)
    )
    bare = run.model not in EMBEDDED or bool(data.train_data)
    refuse(not rows and bare, f"--model {run.model} needs {needed}")
    evaluates = bool(data.eval_data) or not data.train_data
    uses = {  # flag: (whether it has an effect, what it needs for one)
        "eval_every": (evaluates, "--eval-data"),
        "eval_before": (evaluates, "--eval-data"),
        "eval_rows": (evaluates, "--eval-data"),
        "total_epochs": (run.total_steps is None, "--total-steps None"),
        "profile_steps": (not rollout.eval_only, "training, and no --eval-only"),
    }
    refuse_idle(run, uses)
    samples = rollout.eval_temperature > 0  # greedy ones are all the same
    uses = {
        "max_turns": (rollout.multi_turn, "--tools or --environment"),
        "max_turn_tokens": (rollout.multi_turn, "--tools or --environment"),
        "max_tool_errors": (rollout.multi_turn, "--tools or --environment"),
        "deterministic": (rollout.multi_turn, "--tools or --environment"),
        "tool_workers": (rollout.multi_turn, "--tools or --environment"),
        "tool_timeout": (rollout.multi_turn, "--tools or --environment"),
        "eval_top_p": (samples, "an --eval-temperature above 0"),
        "eval_samples": (samples, "an --eval-temperature above 0"),
        "eval_temperature": (evaluates, "--eval-data"),
    }
    refuse_idle(rollout, uses)


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
    refuse(
        text is not None and not steps,
        f"--profile-steps {text}: give the first and the last step, such as 3:5",
    )
    return steps


def tracker_names(trackers: str) -> list[str]:
    """The comma-separated names of --log. ValueError for an unknown one."""
    names = list(dict.fromkeys(item.strip() for item in trackers.split(",") if item.strip()))
    if unknown := [item for item in names if item not in TRACKERS]:
        raise ValueError(
            f"--log {trackers}: unknown tracker {unknown[0]!r}, expected {', '.join(TRACKERS)}"
        )
    return names


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_ranges(args: Any) -> None:
    """Refuse numbers outside the range that their type names, of a group or of all in it."""
    for name, hint in get_type_hints(type(args), include_extras=True).items():
        value = getattr(args, name)
        if is_dataclass(value):
            check_ranges(value)
        elif isinstance(value, tuple):
            for part, hint_of_part in zip(value, get_args(hint), strict=True):
                check_range(flag(name), part, hint_of_part)
        elif isinstance(value, int | float):
            check_range(flag(name), value, hint)


def check_range(shown: str, value: float, hint: Any) -> None:
    """Refuse a number outside the range that its type names, or one of the types that it may
    have."""
    refuse(value != value, f"{shown} {value}: must be a number")
    for part in (hint, *get_args(hint)):
        for bound in getattr(part, "__metadata__", ()):
            holds, words = BOUNDS[type(bound)]
            (limit,) = astuple(bound)
            refuse(not holds(value, limit), f"{shown} {value}: must {words} {limit:g}")


def given() -> set[str]:
    """The flags on the command line."""
    return {argument.partition("=")[0].replace("_", "-") for argument in sys.argv[1:]}


def refuse_idle(flags: Any, uses: dict[str, tuple[bool, str]]) -> None:
    """Stop if a flag is given that has no effect. uses: {field: (is it used, what it would
    need)}."""
    for name, (used, needs) in uses.items():
        said = {flag(name), flag(name).replace("--", "--no-", 1)} & given()
        refuse(
            not used and bool(said),
            f"{flag(name)} {getattr(flags, name)} has no effect: needs {needs}",
        )


def check_reward_timeout(flags: Any, deadline_s: float) -> None:
    """Stop if --reward-timeout is given beside a function that has another deadline of its own."""
    is_deadline = deadline_s == flags.reward_timeout
    refuse_idle(
        flags,
        {"reward_timeout": (is_deadline, "a --reward-function without a timeout_s of its own")},
    )


def explain_foreign(arguments: list[str], args_class: type) -> None:
    """SystemExit with what a flag of another system or script is here, or one that is gone; for a
    broken line."""
    old_launcher = any(
        argument.replace("_", "-").startswith("--local-rank") for argument in arguments
    )
    refuse(
        old_launcher,
        "--local-rank is what python -m torch.distributed.launch and deepspeed add: take torchrun",
    )
    blank = any(argument and not argument.strip() for argument in arguments)
    refuse(
        blank,
        "a lone space is an argument: a backslash that continues a line must be its last character",
    )
    pairs = [
        a.split("=", 1) if "=" in a else (a, b) for a, b in zip(arguments, [*arguments[1:], None])
    ]
    if empty := [
        name
        for name, value in pairs
        if value == "" and name.replace("_", "-") not in ("--tools", "--log")
    ]:
        raise SystemExit(f"{empty[0]} is empty: an unset variable?")
    for name, value in pairs:
        is_bare = value is None or value.startswith("--")
        refuse(
            is_bare and name in ("--train-data", "--eval-data"),
            f"{name} is followed by no file: an unset variable?",
        )
    ours = {flag(name) for name in flat(args_class())}
    ours |= {known.replace("--", "--no-", 1) for known in ours} | {"--help", "--help-all"}
    for argument in arguments:
        name = argument.partition("=")[0].lstrip("+")
        key = flag(name.lstrip("-").removeprefix("no-"))
        is_flag = name.startswith("--")
        is_foreign = is_flag or ("=" in argument and "." in name)  # verl's keys have no dashes
        if not is_foreign or key in ours:
            continue
        answer = foreign_flags().get(key)
        if answer is not None:
            raise SystemExit(
                f"{Path(sys.argv[0]).name} has no {key if is_flag else name}: {answer}"
            )


def foreign_flags() -> dict[str, str]:
    """{a flag that this script may not have: who has it, or what it is here}."""
    tables = tomllib.loads(FOREIGN_FLAGS.read_text())
    scripts = tables.pop("scripts")
    answers = {
        flag(item.name): "grpo.py, ppo.py and curiosity_rl.py have it" for item in fields(Rollout)
    }
    for name, owners in scripts.items():
        answers[name] = f"{owners} {'have' if ' and ' in owners else 'has'} it"
    for table in tables.values():
        for name, (here, note) in table.items():
            answer = f"here {here} ({note})" if note else f"here {here}"
            if here == "none":
                answer = note
            answers[flag(name.lstrip("-"))] = f"{answer}; see docs/from_verl_trl.md".replace(
                "`", ""
            )
    return answers
