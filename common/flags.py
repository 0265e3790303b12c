"""The flags that scripts share, in four groups, with their ranges in their types; and how a script
reads its command line.

A script's `Args` has its algorithm's own flags and, as fields, the groups it needs: `--help` shows
a box for each, and names on the command line carry no prefix. A fork changes a default in one
place, its `Args`:

    rollout: Rollout = field(default_factory=partial(Rollout, samples_per_prompt=16))
"""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
from annotated_types import Ge, Gt, Le
from tyro.constructors import PrimitiveConstructorSpec

from common.command_line import (
    check_ranges,
    expanded_arguments,
    flag,
    flat,
    help_screen,
    refuse_broken_line,
    refuse_idle,
    switches,
    title_and_commands,
    typed_flags,
)
from common.ending import one_rank_prints
from common.foreign_flags import refuse_foreign_flags
from common.printing import guard_output
from common.processes import ranks_here
from common.progress import say

ROOT = Path(__file__).resolve().parents[1]
EMBEDDED = ("tiny", "tiny-vl", "tiny-vl-python")  # models that bring their own data
LORA_RATE_FACTOR = 10  # learning rate of adapters, by default, over that of full training
MAX_MICRO_BATCH_TOKENS = 16_384  # of a micro-batch, unless a number is typed
TRACKERS = ("tensorboard", "wandb", "trackio", "swanlab")
OFFLOADS = ("optimizer", "reference", "base")
# of --sleep-level. 2 spares a copy to the host and back: when tests/gpu/test_engine.py has passed
# at level 2 on a card, this becomes 2
SLEEP_LEVEL = 1

Count = Annotated[int, Gt(0), Le(2**53)]
Natural = Annotated[int, Ge(0), Le(2**53)]  # what 0 means, each flag says
Positive = Annotated[float, Gt(0)]
Amount = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]


# How tyro reads the types below, from the words behind a flag, and prints their defaults.


def read_files(words: list[str]) -> str:
    if not words:
        raise ValueError("expected a file")
    return ",".join(words)


def read_offloads(words: list[str]) -> str:
    for name in words[0].split(","):
        if name not in OFFLOADS:
            raise ValueError(f"{name!r} is not one of {', '.join(OFFLOADS)}")
    return words[0]


def read_json_object(words: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(words[0])
    except ValueError as error:
        raise ValueError(f"{words[0]!r:.80} is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f'{words[0]!r:.80} is no JSON object, such as {{"name": false}}')
    return value


def as_json(value: dict[str, Any]) -> list[str]:
    return [json.dumps(value)]


def as_words(text: str) -> list[str]:
    return [text]


def is_dict(value: object) -> bool:
    return isinstance(value, dict)


def is_text(value: object) -> bool:
    return isinstance(value, str)


# Files, or patterns of them, separated by commas; or by spaces, as a shell expands a pattern.
Files = Annotated[
    str,
    PrimitiveConstructorSpec(
        nargs="*",
        metavar="FILES",
        instance_from_str=read_files,
        is_instance=is_text,
        str_from_instance=as_words,
    ),
]
# Keyword arguments.
JsonObject = Annotated[
    dict[str, Any],
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=read_json_object,
        is_instance=is_dict,
        str_from_instance=as_json,
    ),
]
# Names of OFFLOADS, separated by commas.
Offload = Annotated[
    str,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="NAMES",
        instance_from_str=read_offloads,
        is_instance=is_text,
        str_from_instance=as_words,
    ),
]


@dataclass
class Data:
    """Files of rows, and the pictures in them."""

    # rows: .parquet, .jsonl, .json, .json*.gz, or ORG/NAME:CONFIG:SPLIT of the hub
    train_data: Files | None = None
    eval_data: Files | None = None  # held-out rows, in the same formats; gives eval/*
    # folder of pictures that are not beside their data file; no path may leave these folders
    media_root: Path | None = None
    max_rows: Count | None = None  # use only the first rows of the training data
    # arguments of the chat template, such as '{"enable_thinking": false}'
    template_args: JsonObject | None = None
    # rows that are unusable or too long: stop, or count and drop them
    bad_rows: Literal["error", "drop"] = "error"
    # smaller pictures are enlarged to this area; 28 x 28 pixels are one token (Qwen3: 32 x 32)
    min_pixels: Count = 3136
    # largest area of a picture; crops are cut from the original
    max_pixels: Annotated[Count, Ge(784)] = 1_003_520
    max_frame_pixels: Annotated[Count, Ge(784)] = 401_408  # largest area of a frame of a video


@dataclass
class Rollout:
    """How answers are sampled, with which tools, and how they are scored."""

    prompts_per_step: Count = 128  # P: prompts per step, over all ranks
    samples_per_prompt: Count = 8  # G: responses to each prompt
    max_prompt_tokens: Count = 512  # longest prompt (tokens)
    # longest response (tokens), of all turns together; what tools return counts
    max_response_tokens: Count = 512
    # of sampling, and of the trainer's log-probs; at least 0.01, to which vLLM raises what is less
    temperature: Annotated[Positive, Ge(0.01), Le(2)] = 1.0
    # FILE.py:NAME, verl's signature or TRL's; default: by the row's data_source
    reward_function: str | None = None
    # seconds for one response; slower: wrong by a built-in rule, left out by yours
    reward_timeout: Positive = 10.0
    # tools it may call: visual, python, FILE.py:NAME; visual is crop and frames; python goes alone
    tools: str | None = None
    # FILE.py:NAME; of a class, as in TRL, methods are tools; a function answers turns
    environment: str | None = None
    tool_workers: Count = 64  # processes per rank, at most, that run tools
    tool_timeout: Positive = 30.0  # seconds for one call; more is an error that the policy is told
    # answers in a trajectory; each but the last is followed by what its tool returns
    max_turns: Count = 5
    # longest single answer (tokens); default: --max-response-tokens
    max_turn_tokens: Count | None = None
    max_tool_errors: Natural = 3  # errors that are told to the policy; one more ends the trajectory
    max_images: Count = 16  # pictures in a trajectory, the prompt's included
    # with tools: turns in lock-step, so that a resume repeats them bit for bit
    deterministic: bool = False
    # what samples; hf: transformers, slow; auto: vllm if installed
    engine: Literal["auto", "vllm", "hf"] = "auto"
    # ranks that share one vLLM; for models too large for one GPU; tools then in lock-step
    engine_parallel: Count = 1
    # KV cache (GiB per rank); default: what a GPU has left, 0.5 on CPUs
    engine_memory: Positive | None = None
    # further arguments of vLLM, such as '{"kv_cache_dtype": "fp8"}'
    engine_args: JsonObject | None = None
    # the engine's weights while updating: 1 to the host, 2 dropped, 0 stay (if others use the GPU,
    # who could take what is freed)
    sleep_level: Literal[0, 1, 2] = SLEEP_LEVEL
    # stop if the mean |engine - trainer| of the log-probs exceeds this; default by dtype
    max_logprob_gap: Positive | None = None
    # samples per row in evaluation, with --eval-temperature; above 1: pass@k, maj@k
    eval_samples: Count = 1
    # of evaluation, 0 = greedy; vLLM takes less than 0.01 for 0.01
    eval_temperature: Annotated[float, Ge(0), Le(2)] = 0.0
    eval_top_p: Annotated[float, Gt(0), Le(1)] = 1.0  # nucleus, in evaluation only
    eval_only: bool = False  # evaluate --eval-data, and stop; prints the table, writes the samples
    # steps between dumps of all episodes to OUTPUT_DIR/rollouts; 0: none
    dump_rollouts_every: Natural = 0
    # a dump: repeat the update of its step bit for bit, without an engine, and stop
    replay: Path | None = None

    @property
    def max_model_len(self) -> int:
        """Longest prompt with its response (tokens)."""
        return self.max_prompt_tokens + self.max_response_tokens

    @property
    def multi_turn(self) -> bool:
        """Whether something answers the policy."""
        return bool(self.tools or self.environment)

    @property
    def uses_vllm(self) -> bool:
        """Whether --engine is vLLM; auto means vLLM wherever it is installed."""
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
    # auto: flex on GPUs of capability 8.0 or more, else sdpa; rows for models that need them
    attention: Literal["auto", "flash", "flex", "sdpa", "rows"] = "auto"
    # of gated delta rules (Qwen3.5, Qwen3-Next, OLMo-Hybrid) in packs, on GPUs: transformers'
    # functions in torch, or the kernels of flash-linear-attention
    recurrent_kernels: Literal["torch", "fla"] = "torch"
    # tokens of one forward and backward, per rank; default: what fits
    micro_batch_tokens: Count | None = None
    # recompute activations in backward: less memory, a third more compute
    gradient_checkpointing: bool = False
    # share of the activations of compiled layers that is kept; auto: what fits. What is cheap is
    # recomputed first
    activation_memory: Share | Literal["auto"] = 1.0
    # on the host while idle: optimizer (Adam's moments); reference (of a KL); base (of LoRA)
    offload: Offload = ""
    # torch.compile the layers, on GPUs: a slow first step, then faster ones; default: on with flex,
    # for families that were tried
    compile: tyro.conf.DisallowNone[bool | None] = None
    freeze_vision: bool = False  # train the language model alone
    lora_rank: Natural = 0  # train LoRA adapters of this rank (try 16); 0: train the model itself
    lora_alpha: Positive = 32.0  # of LoRA: the product of the adapters counts alpha / rank times
    # of LoRA: linear layers of the language model, such as q_proj,v_proj; all: every one
    lora_targets: str = "all"
    trust_remote_code: bool = False  # run code that comes with the model


@dataclass
class Run:
    """One run: its model and folder, how long it is, when it evaluates and saves, where it goes
    on."""

    # folder or hub id[@REVISION] (none: the demo); or smollm2, tiny, tiny-vl, tiny-vl-python
    model: str = "tiny"
    output_dir: Path | None = None  # run folder; default runs/SCRIPT-MODEL-TIME-PID
    seed: Natural = 0  # data order, sampling, initialisation
    total_steps: Count | None = None  # steps, in place of --total-epochs
    # passes over the data, if no --total-steps; prompts that refill a step come on top
    total_epochs: Annotated[float, Gt(0), Le(1e6)] = 1.0
    # steps between evaluations (0: none in between); those before and after besides
    eval_every: Natural = 20
    eval_before: bool = True  # evaluate before the first step
    eval_rows: Count = 512  # how many rows of --eval-data are used; the first ones
    # steps between checkpoints, or epoch; 0: at the end alone
    save_every: Natural | Literal["epoch"] = 20
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
    """(the script's arguments, whether its demo runs: no --model is given).

    first_screen: the flags that --help shows, a group a line; without any it shows all, as
    --help-all does. SystemExit after help, and for a command line that is wrong.
    """
    is_demo = "--model" not in typed_flags()
    wants_help = bool(typed_flags() & {"--help", "-h", "--help-all"})
    if wants_help:
        guard_output()  # a reader such as `head` may be gone before the end
    default = demo if is_demo and not wants_help else args_class()
    with one_rank_prints():
        if sys.flags.optimize > 1:
            raise SystemExit(
                "python -OO (PYTHONOPTIMIZE=2) leaves out the docstrings that --help and tools "
                "show: take python, or python -O"
            )
        sys.argv[1:] = expanded_arguments()
        if first_screen and typed_flags() & {"--help", "-h"}:
            print(help_screen(args_class, doc, first_screen.strip().splitlines()))
            raise SystemExit(0)
        script_flags = {flag(name) for name in flat(args_class())}
        rollout_flags = {flag(item.name) for item in fields(Rollout)}
        refuse_foreign_flags(
            sys.argv[1:], script_flags, rollout_flags, switches=switches(args_class())
        )
        refuse_broken_line(sys.argv[1:])
        arguments = ["--help" if word == "--help-all" else word for word in sys.argv[1:]]
        try:
            args = tyro.cli(
                tyro.conf.OmitArgPrefixes[args_class],
                args=arguments,
                default=default,
                description=title_and_commands(doc),
                add_help=wants_help,  # tyro's errors would name --help, which has not all flags
            )
        except SystemExit as stop:
            if stop.code:
                print(f"all flags: python {sys.argv[0]} --help-all", file=sys.stderr)
            raise
        check_ranges(args)
    if args.machine.lora_rank:
        args = with_lora_rates(args)
    return args, is_demo


def call_program(function: Callable[..., Result], module: str, doc: str) -> Result:
    """function(...) with the command line of `python -m MODULE`. Its --help begins with the
    docstring as it stands: tyro would fold commands into a paragraph."""
    if typed_flags() & {"--help", "-h"}:
        guard_output()
        print(f"{(doc or '').strip()}\n")  # python -OO has none
    return tyro.cli(function, args=expanded_arguments(), prog=f"python -m {module}", description="")


def with_lora_rates(args: Args) -> Args:
    """The arguments with the learning rates of adapters, by default ten times those of full
    training. Prints them."""
    rates: dict[str, float] = {}
    for name, rate in vars(args).items():
        if name.endswith("learning_rate"):
            if flag(name) not in typed_flags():
                rate *= LORA_RATE_FACTOR
            rates[name] = rate
            line = f"LoRA of rank {args.machine.lora_rank}, {flag(name)} {rate:g}"
            if rate < 0.99e-5:  # below 1e-5, but for rounding: 10 * 1e-6 is less
                line = f"warning: {line}: low, ten times that of full training is usual"
            say(line)
    return replace(args, **rates)


def check_pixels(data: Data) -> None:
    if data.min_pixels > data.max_pixels:
        raise SystemExit(f"--min-pixels {data.min_pixels}: above --max-pixels {data.max_pixels}")


def check_shared(data: Data, run: Run, rollout: Rollout) -> None:
    """SystemExit for shared flags that cannot work together, or have no effect, in an RL script."""
    check_pixels(data)
    if rollout.replay and rollout.eval_only:
        raise SystemExit("--replay is of training, --eval-only does none")
    check_engine_parallel(rollout)
    brings_data = run.model in EMBEDDED and not data.train_data
    if rollout.eval_only:
        files_flag = "--eval-data"
        files = data.eval_data
    else:
        files_flag = "--train-data"
        files = data.train_data
    if not files and not brings_data:
        close_names = get_close_matches(run.model, EMBEDDED, n=1)
        hint = ""
        if close_names and run.model not in EMBEDDED:
            hint = f"; {close_names[0]} brings rows of its own"
        raise SystemExit(f"--model {run.model} needs {files_flag}{hint}")
    evaluates = bool(data.eval_data) or brings_data
    uses = {  # flag: (whether it has an effect, what it needs for one)
        "eval_every": (evaluates, "--eval-data"),
        "eval_before": (evaluates, "--eval-data"),
        "eval_rows": (evaluates, "--eval-data"),
        "total_epochs": (run.total_steps is None, "--total-steps None"),
        "profile_steps": (not rollout.eval_only, "training, and no --eval-only"),
    }
    refuse_idle(run, uses)
    is_random = rollout.eval_temperature > 0  # greedy samples are all the same
    uses = {
        "max_turns": (rollout.multi_turn, "--tools or --environment"),
        "max_turn_tokens": (rollout.multi_turn, "--tools or --environment"),
        "max_tool_errors": (rollout.multi_turn, "--tools or --environment"),
        "deterministic": (rollout.multi_turn, "--tools or --environment"),
        "tool_workers": (rollout.multi_turn, "--tools or --environment"),
        "tool_timeout": (rollout.multi_turn, "--tools or --environment"),
        "eval_top_p": (is_random, "an --eval-temperature above 0"),
        "eval_samples": (is_random, "an --eval-temperature above 0"),
        "eval_temperature": (evaluates, "--eval-data"),
    }
    refuse_idle(rollout, uses)


def check_engine_parallel(rollout: Rollout) -> None:
    size = rollout.engine_parallel
    if size > 1 and not rollout.uses_vllm:
        raise SystemExit(f"--engine-parallel {size} needs --engine vllm")
    ranks = ranks_here()
    if ranks % size > 0:
        raise SystemExit(
            f"--engine-parallel {size}: torchrun's --nproc_per_node {ranks} is no multiple of it"
        )


def check_reward_timeout(flags: Any, deadline_s: float) -> None:
    """SystemExit if --reward-timeout has no effect: a function with a deadline of its own replaces
    it. deadline_s: the one that holds."""
    is_used = deadline_s == flags.reward_timeout
    needs = "a --reward-function without a timeout_s of its own"
    refuse_idle(flags, {"reward_timeout": (is_used, needs)})


def step_range(text: str | None) -> range:
    """The steps of --profile-steps A:B, from the first to the last; none for None. SystemExit for
    another text."""
    if text is None:
        return range(0)
    match = re.fullmatch(r"([1-9]\d{0,8}):(\d{1,9})", text)
    steps = range(int(match[1]), int(match[2]) + 1) if match else range(0)
    if not steps:
        raise SystemExit(f"--profile-steps {text}: give the first and the last step, such as 3:5")
    return steps


def tracker_names(trackers: str) -> list[str]:
    """The comma-separated names of --log, each once. ValueError for an unknown one."""
    names: list[str] = []
    for item in trackers.split(","):
        name = item.strip()
        if not name or name in names:
            continue
        if name not in TRACKERS:
            expected = ", ".join(TRACKERS)
            raise ValueError(f"--log {trackers}: unknown tracker {name!r}, expected {expected}")
        names.append(name)
    return names
