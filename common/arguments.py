"""What a user can get wrong with flags: refused before anything is loaded, with the flag and the remedy."""

import sys

import torch

from common.engine.books import Sampling
from common.files import refuse
from common.hub import EMBEDDED

PICTURE_FLAGS = ("freeze_vision", "min_pixels", "max_pixels", "max_frame_pixels", "media_root")
TOOL_FLAGS = ("max_turns", "max_turn_tokens", "max_tool_errors", "tool_workers", "tool_timeout", "deterministic")

# Numbers that must be above 0, at most 1, or may be negative; all others must be 0 or above.
LENGTHS = ("max_tokens", "max_prompt_tokens", "max_response_tokens", "max_turn_tokens", "loss_length")
PICTURES = ("max_images", "min_pixels", "max_pixels", "max_frame_pixels")
BATCHES = ("batch_size", "prompts_per_step", "samples_per_prompt", "minibatches", "micro_batch_tokens", "max_turns")
PASSES = ("epochs_per_step", "critic_epochs", "total_steps", "total_epochs", "max_rows", "eval_rows", "eval_samples")
PROCESSES = ("reward_workers", "reward_timeout", "tool_workers", "tool_timeout", "stall_minutes", "engine_memory")
OTHERS = ("eval_top_p", "kl_horizon", "max_logprob_gap", "keep_checkpoints")
POSITIVE = (*LENGTHS, *PICTURES, *BATCHES, *PASSES, *PROCESSES, *OTHERS)
SHARES = ("gamma", "critic_lambda", "policy_lambda", "lr_floor", "eval_top_p", "replay_share")
ANY_SIGN = ("entropy_coef", "reward_model_weight", "eval_top_k")


def check_shared_args(args) -> None:
    """Refuse values that cannot work, and flags without effect, of those that all RL scripts share."""
    sampled = (args.eval_temperature > 0, "an --eval-temperature above 0")
    called = (bool(args.tools), "--tools")
    evaluated = (bool(args.eval_data) or not args.train_data, "--eval-data")
    refuse_idle(
        args,
        {
            **dict.fromkeys(["optimizer_offload", "sleep_level"], (torch.cuda.is_available(), "a GPU")),
            "engine_memory": (args.engine == "vllm", "--engine vllm"),
            "lr_floor": (args.lr_schedule != "constant", "--lr-schedule linear or cosine"),
            "total_epochs": (args.total_steps is None, "no --total-steps"),
            "eval_top_p": sampled,
            "eval_top_k": sampled,
            "eval_samples": sampled,  # greedy ones are all the same
            **dict.fromkeys(TOOL_FLAGS, called),
            **dict.fromkeys(["eval_every", "eval_before", "eval_rows", "eval_temperature"], evaluated),
        },
    )
    Sampling(temperature=args.temperature).check_exact()
    refuse(bool(args.replay) and args.eval_only, "--replay is of training, --eval-only does none")
    data = "--eval-data" if args.eval_only else "--train-data"
    given = args.eval_data if args.eval_only else args.train_data
    refuse(not given and (args.model not in EMBEDDED or bool(args.train_data)), f"--model {args.model} needs {data}")


def check_objective_args(args) -> None:
    """The same for those of the policy's objective, and the ranges of all numbers. It comes first."""
    check_ranges(args)
    off_policy = args.minibatches * args.epochs_per_step > 1
    moved = "several --minibatches or --epochs-per-step: on-policy the ratio is 1"
    kl = (args.kl_in != "none", "--kl-in reward or loss")
    refuse_idle(
        args,
        {
            **dict.fromkeys(["objective", "clip_low", "clip_high"], (off_policy, moved)),
            "dual_clip": (off_policy and args.objective == "ppo", f"--objective ppo, and {moved}"),
            "correction_low": (args.correction in ("mask", "sequence"), "--correction mask or sequence"),
            "correction_high": (args.correction != "none", "a --correction"),
            **dict.fromkeys(["kl_coef", "kl_estimator", "kl_target"], kl),
            "kl_horizon": (args.kl_target > 0, "--kl-target"),
            "loss_length": (args.reduction == "dr_grpo", "--reduction dr_grpo"),
        },
    )
    P, M, estimator = args.prompts_per_step, args.minibatches, args.kl_estimator
    refuse(P < M, f"--minibatches {M} of --prompts-per-step {P}: a minibatch needs a prompt (groups stay together)")
    refuse(0 < args.dual_clip <= 1, f"--dual-clip {args.dual_clip}: a bound on the ratio must be above 1 (0 = off)")
    refuse(not 0 <= args.overlong_buffer < args.max_response_tokens, "--overlong-buffer: below --max-response-tokens")
    refuse(args.kl_in != "none" and not args.kl_coef, f"--kl-in {args.kl_in} needs a --kl-coef, such as 0.001")
    refuse(args.kl_in == "reward" and estimator != "k1", f"--kl-in reward with {estimator}: biased there, take k1")
    refuse(args.kl_in == "loss" and estimator == "k1", "--kl-in loss with k1: no gradient on average, take k3-is")


def check_ranges(args) -> None:
    """Refuse numbers outside their range, of any script."""
    refuse(args.min_pixels > args.max_pixels, f"--min-pixels {args.min_pixels}: above --max-pixels {args.max_pixels}")
    for name, value in vars(args).items():
        if isinstance(value, int | float):
            said = f"--{name.replace('_', '-')} {value}"
            refuse(name in POSITIVE and not value > 0, f"{said}: must be above 0")
            refuse(name in SHARES and not value <= 1, f"{said}: must not be above 1")
            refuse(name not in ANY_SIGN and not value >= 0, f"{said}: must not be below 0")


def refuse_idle(args, uses: dict[str, tuple[bool, str]]) -> None:
    """Stop if a flag is given that has no effect. uses: {field: (is it used, what it would need)}."""
    given = {argument.partition("=")[0].replace("_", "-") for argument in sys.argv[1:]}
    for name, (used, needs) in uses.items():
        flag = f"--{name.replace('_', '-')}"
        said = {flag, flag.replace("--", "--no-", 1)} & given
        refuse(not used and bool(said), f"{flag} {getattr(args, name)} has no effect: needs {needs}")
