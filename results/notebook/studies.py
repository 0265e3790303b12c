"""What curves.py runs: studies, each of them some runs that answer one question together.

A run is named VARIANT-seedN. Its command is a script with its flags, without the output folder.
"""

from dataclasses import dataclass, field, replace

DEMO_PYTHON = """\
grpo.py --model tiny-vl-python --tools python --max-turns 4 --tool-bonus 0.1 --oversample 1.5 \
--dynamic-sampling 4 \
--advantage group-mean --prompts-per-step 16 --samples-per-prompt 8 --max-prompt-tokens 64 \
--max-response-tokens 320 \
--max-pixels 12544 --max-frame-pixels 12544 --learning-rate 1e-4 --total-steps 30 --eval-every 10 \
--eval-rows 256"""

SFT = (
    "--model smollm2 --batch-size 64 --learning-rate 2e-4 --lr-schedule cosine --warmup-steps 0.03"
)
SFT += " --eval-rows 512 --eval-every 50"
RL = (
    "--micro-batch-tokens 32768 --learning-rate 1e-5 --warmup-steps 5 --lr-schedule linear "
    "--lr-floor 0.1"
)
RL += " --minibatches 2 --eval-every 20"
GRPO = f"grpo.py {RL} --prompts-per-step 128 --samples-per-prompt 8"
PPO = (
    f"ppo.py {RL} --prompts-per-step 256 --samples-per-prompt 4 --critic-learning-rate 2e-5 "
    "--critic-warmup-steps 10"
)
ON_GSM8K = "--total-steps 120 --eval-rows 1319 --max-prompt-tokens 320 --max-response-tokens 320"
ON_COUNTDOWN = "--total-steps 100 --eval-rows 512 --max-prompt-tokens 64 --max-response-tokens 288"

# trl_work.py has the same for SFTTrainer. In fp32, so that a difference of the losses is one of
# what is computed.
BESIDE_SFT = """\
sft.py --model smollm2 --batch-size 16 --learning-rate 1e-4 --lr-schedule linear \
--warmup-steps 0.1 --total-steps 12 \
--eval-every 12 --eval-rows 32 --micro-batch-tokens 1024 --dtype fp32"""

SFT_FORMS = ("pairs", "chats", "from-value")

# Six tiles in ten show a 7, and the warm start knows: to guess pays more than to look, since most
# looks miss and each costs 0.05. To learn to aim would pay; the demo of curiosity_rl.py is the same
# task without the trap.
MOSAIC = "--max-pixels 12544 --max-frame-pixels 12544"
TRAPPED = f"sft.py --model tiny-vl {MOSAIC} --batch-size 32 --learning-rate 2e-4 --total-steps 150"
TRAP = f"""\
curiosity_rl.py {MOSAIC} --tools crop_image_normalized --max-turns 4 --prompts-per-step 16 \
--samples-per-prompt 8 \
--max-prompt-tokens 96 --max-response-tokens 192 --dtype fp32 --micro-batch-tokens 4096 \
--learning-rate 8e-5 \
--lr-schedule linear --lr-floor 0.1 --warmup-steps 5 --total-steps 400 --eval-every 40 \
--eval-rows 256 \
--free-calls 0"""
TRAP_SCORE = f"""\
curiosity_rl.py {MOSAIC} --tools crop_image_normalized --max-turns 4 --max-prompt-tokens 96 \
--max-response-tokens 192 \
--dtype fp32 --eval-only --eval-rows 256 --eval-samples 8 --eval-temperature 1"""


@dataclass(frozen=True)
class Run:
    # script and flags; trl_step: GRPOTrainer on the demo of grpo.py; trl_sft: SFTTrainer
    command: str
    seed: int | None = None  # --seed
    data: str = ""  # rows of study_data.py; else what the command says
    parent: str = ""  # run of the study whose model this one starts from
    ranks: int = 2  # processes
    engine: str = ""  # how it is made wrong by wrong_engine.py; else it is right


@dataclass(frozen=True)
class Study:
    question: str
    runs: dict[str, Run]
    needs: str = ""  # what to give besides
    each: bool = True  # keep a picture of each run, else one of the study
    also: tuple[str, ...] = ()  # metrics of each step to show besides the evaluations
    # {variant: the one it is measured against}
    beside: dict[str, str] = field(default_factory=dict)
    dots: bool = False  # a figure of how much, not of when
    goal: float | None = None  # of the evaluation: after how many seconds is it there?
    dtype: str = ""  # what --dtype auto was in the runs that are kept

    def script(self, variant: str) -> str:
        return next(
            run.command.split()[0]
            for name, run in self.runs.items()
            if name.startswith(f"{variant}-seed")
        )


def seeded(variants: dict[str, Run], seeds: range) -> dict[str, Run]:
    """Seed by seed, so that variants take turns: machines drift."""
    return {
        f"{name}-seed{seed}": replace(run, seed=seed)
        for seed in seeds
        for name, run in variants.items()
    }


ONE_GPU = {
    "sft-countdown": Run(f"sft.py {SFT} --total-steps 300", None, "countdown", ranks=1),
    "grpo-countdown-seed1": Run(f"{GRPO} {ON_COUNTDOWN}", 1, "countdown", "sft-countdown", 1),
    "grpo-countdown-seed2": Run(f"{GRPO} {ON_COUNTDOWN}", 2, "countdown", "sft-countdown", 1),
    "sft-gsm8k": Run(f"sft.py {SFT} --total-steps 350", None, "gsm8k", ranks=1),
    "grpo-gsm8k-seed1": Run(f"{GRPO} {ON_GSM8K}", 1, "gsm8k", "sft-gsm8k", 1),
    "grpo-gsm8k-seed2": Run(f"{GRPO} {ON_GSM8K}", 2, "gsm8k", "sft-gsm8k", 1),
    "grpo-gsm8k-fp16-seed1": Run(f"{GRPO} {ON_GSM8K} --dtype fp16", 1, "gsm8k", "sft-gsm8k", 1),
    "ppo-gsm8k-seed1": Run(f"{PPO} {ON_GSM8K}", 1, "gsm8k", "sft-gsm8k", 1),
}


def smollm2_runs(
    start: str, steps: int, tokens: int, sampled: int, further: str = ""
) -> dict[str, Run]:
    """Two warm starts of SmolLM2-135M, and from each so many steps of RL with 128 samples of up to
    so many tokens, beside supervised training on as many rows, or on answers alone. Behind them,
    how each does greedily on all held-out rows, and with 8 samples of each of the first so many.
    """
    sft = (
        "sft.py --model smollm2 --learning-rate 2e-4 --lr-schedule cosine --warmup-steps "
        f"0.05{further}"
    )
    sft += " --micro-batch-tokens 4096 --eval-rows 256 --eval-every 20"
    sampling = f"--max-prompt-tokens 192 --max-response-tokens {tokens}"
    rl = (
        f"{sampling} --engine-memory 1 --micro-batch-tokens 4096 --warmup-steps 5 "
        f"--lr-schedule linear{further}"
    )
    rl += f" --lr-floor 0.1 --total-steps {steps} --eval-every {steps // 4} --eval-rows 256"
    grpo = f"grpo.py {rl} --prompts-per-step 16 --samples-per-prompt 8 --learning-rate"
    ppo = (
        f"ppo.py {rl} --prompts-per-step 128 --samples-per-prompt 1 --critic-warmup-steps "
        f"{steps // 5}"
    )
    ppo += " --critic-learning-rate 1e-4 --learning-rate"
    countdown, gsm8k = (f"{sft} --batch-size {rows} --total-steps" for rows in (64, 32))
    searches, solutions = f"{start}-sft-countdown", f"{start}-sft-gsm8k"
    runs = {
        searches: Run(f"{countdown} {steps * 3 // 2}", None, "countdown"),
        f"{start}-grpo-countdown-seed1": Run(f"{grpo} 2e-5", 1, "countdown", searches),
        f"{start}-grpo-countdown-seed2": Run(f"{grpo} 2e-5", 2, "countdown", searches),
        f"{start}-ppo-countdown-seed1": Run(f"{ppo} 2e-5", 1, "countdown", searches),
        f"{start}-lora-countdown-seed1": Run(
            f"{grpo} 2e-4 --lora-rank 16", 1, "countdown", searches
        ),
        f"{start}-more-sft-countdown-seed1": Run(
            f"{countdown} {2 * steps}", 1, "countdown", searches
        ),
        solutions: Run(f"{gsm8k} {2 * steps}", None, "gsm8k"),
        f"{start}-grpo-mawps-seed1": Run(f"{grpo} 2e-5", 1, "mawps", solutions),
        f"{start}-more-sft-gsm8k-seed1": Run(f"{gsm8k} {4 * steps}", 1, "gsm8k", solutions),
        f"{start}-answers-mawps-seed1": Run(f"{gsm8k} {2 * steps}", 1, "mawps", solutions),
    }
    score = f"grpo.py {sampling} --engine-memory 2{further} --eval-only --eval-rows"
    scored = {}
    for name in runs:
        rows = "countdown" if "countdown" in name else "mawps"
        scored[f"{name}-greedy"] = Run(f"{score} 1024", None, rows, name)
        samples = f"{score} {sampled} --eval-samples 8 --eval-temperature 1"
        scored[f"{name}-samples"] = Run(samples, None, rows, name)
    return {name: replace(run, ranks=1) for name, run in (runs | scored).items()}


SMALL = smollm2_runs("small", steps=16, tokens=160, sampled=512, further=" --dtype fp32")
WITHOUT_GPU = ("small-sft-countdown", "small-grpo-countdown")

# the demo: group-std, dapo, one minibatch, clipped at 0.2, learning rate 8e-5, no KL
GRPO_KNOBS = {
    "demo": "",
    "group-mean": "--advantage group-mean",
    "rloo": "--advantage rloo",
    "batch-std": "--advantage batch-std",
    "grpo": "--reduction grpo",
    "dr-grpo": "--reduction dr_grpo",
    "2-minibatches": "--minibatches 2",
    "4-minibatches": "--minibatches 4",
    "4-clip-higher": "--minibatches 4 --clip-high 0.28",
    "4-gspo": "--minibatches 4 --objective gspo --reduction grpo --clip-low 3e-4 --clip-high 4e-4",
    "4-cispo": "--minibatches 4 --objective cispo",
    "kl-reward": "--kl-reward-coef 0.001 --advantage rloo",
    "kl-loss": "--kl-loss-coef 0.001",
    "kl-loss-0.1": "--kl-loss-coef 0.1",
    "rate-8e-6": "--learning-rate 8e-6",
    "rate-2.5e-5": "--learning-rate 2.5e-5",
    "rate-2.5e-4": "--learning-rate 2.5e-4",
    "rate-8e-4": "--learning-rate 8e-4",
}
PPO_KNOBS = {  # the demo: advantages with lambda 0.99, whitened; 16 steps for the critic alone
    "demo": "",
    "lambda-0.95": "--gae-lambda 0.95",
    "lambda-1": "--gae-lambda 1",
    "no-critic-warmup": "--critic-warmup-steps 0",
}
CORRECTIONS = (
    "bf16-none",
    "bf16-truncate",
    "int3-none",
    "int3-truncate",
    "int3-mask",
    "int3-sequence",
)


def corrected(name: str) -> Run:
    """With a wrong engine, under a trainer in fp32."""
    engine, _, correction = name.partition("-")
    return Run(f"grpo.py --dtype fp32 --max-logprob-gap 1 --correction {correction}", engine=engine)


KNOBS = (
    {f"knob-{name}": Run(f"grpo.py {flags}".strip()) for name, flags in GRPO_KNOBS.items()}
    | {"knob-fp32": Run("grpo.py --dtype fp32")}
    | {f"knob-{name}": corrected(name) for name in CORRECTIONS}
    | {f"knob-ppo-{name}": Run(f"ppo.py {flags}".strip()) for name, flags in PPO_KNOBS.items()}
)


def knob_runs() -> dict[str, Run]:
    """Three seeds of each. What was left when no machine with bf16 was at hand runs in fp32: the
    knob `fp32`, whose first two seeds are beside the demo's in bf16, shows what that changes."""
    runs = seeded(KNOBS, range(1, 4))
    for name in ["knob-ppo-no-critic-warmup-seed2", *(f"{knob}-seed3" for knob in KNOBS)]:
        if "--dtype" not in runs[name].command:
            runs[name] = replace(runs[name], command=f"{runs[name].command} --dtype fp32")
    return runs


# what a knob's name begins with, and the variant that differs from it in one thing: the first other
# one
BASES = (
    ("knob-4-", "knob-4-minibatches"),
    ("knob-kl-reward", "knob-rloo"),
    ("knob-bf16-", "knob-bf16-none"),
    ("knob-int3-", "knob-int3-none"),
    ("knob-bf16-", "knob-fp32"),
    ("knob-int3-", "knob-fp32"),
    ("knob-ppo-", "knob-ppo-demo"),
    ("knob-", "knob-demo"),
)


def knob_base(knob: str) -> str:
    return next(base for start, base in BASES if knob.startswith(start) and knob != base)


RANKED, BONUS = "--oversample 1.5 ", "--tool-bonus 0.1 "
PYVISION = {  # of the demo with programs: ranking by deviation, and the bonus for programs that ran
    "python-both": DEMO_PYTHON,
    "python-unranked": DEMO_PYTHON.replace(RANKED, ""),
    "python-no-bonus": DEMO_PYTHON.replace(BONUS, ""),
    "python-neither": DEMO_PYTHON.replace(RANKED, "").replace(BONUS, ""),
}

STUDIES = {
    "demos": Study(
        "Do the demos learn, with every seed?",
        seeded({"grpo-tiny": Run("grpo.py"), "ppo-tiny": Run("ppo.py")}, range(1, 4))
        | seeded({"grpo-tiny-lora": Run("grpo.py --lora-rank 16")}, range(1, 4))
        | seeded({"grpo-tiny-vl-python": Run(DEMO_PYTHON)}, range(1, 3))
        | seeded(
            {
                f"curiosity-tiny-vl-{bonus}": Run(f"curiosity_rl.py --curiosity {bonus}")
                for bonus in ("paper", "none")
            },
            range(1, 3),
        ),
        dtype="bf16",
    ),
    "beside-trl": Study(
        "Does grpo.py get to the same accuracy as TRL's GRPOTrainer with as many samples, and "
        "how much sooner?",
        seeded(
            {"timed-grpo": Run("grpo.py --eval-every 5"), "timed-trl": Run("trl_step")}, range(1, 6)
        ),
        needs="--trl FOLDER",
        also=("reward/accuracy", "rollout/response_length"),
        beside={"timed-trl": "timed-grpo"},
        goal=0.8,
        dtype="bf16",
    ),
    "knobs": Study(
        "What does each setting do to the demos of grpo.py and ppo.py, everything else being "
        "as it is there?",
        knob_runs(),
        each=False,
        beside={name: knob_base(name) for name in KNOBS if not name.endswith("demo")},
        dots=True,
        dtype="bf16",
    ),
    "curiosity": Study(
        "Where guessing pays more than looking does at first, does the bonus for looking keep "
        "it alive?",
        {
            "sft-trap": Run(TRAPPED, None, "trap"),
            "sft-trap-samples": Run(TRAP_SCORE, None, "trap", "sft-trap"),
        }
        | seeded(
            {
                "trap-bonus": Run(TRAP, None, "trap", "sft-trap"),
                "trap-none": Run(f"{TRAP} --curiosity-alpha 0", None, "trap", "sft-trap"),
            },
            range(1, 4),
        ),
        also=("tool/rapr", "reward/accuracy"),
    ),
    "pyvision": Study(
        "Do ranking and the bonus for programs of PyVision-RL matter on the mosaic?",
        seeded(
            {name: Run(f"{command} --dtype fp32") for name, command in PYVISION.items()},
            range(1, 3),
        ),
        also=("tool/callers", "tool/acted", "reward/accuracy"),
    ),
    "sft-beside-trl": Study(
        "Does sft.py compute the loss of TRL's SFTTrainer, on rows of three formats, and how "
        "much sooner?",
        {
            f"{prefix}-{form}": Run(command, 1, f"gsm8k-{form}")
            for form in SFT_FORMS
            for prefix, command in (("timed-sft", BESIDE_SFT), ("timed-trl-sft", "trl_sft"))
        },
        needs="--trl FOLDER --gsm8k FOLDER",
        each=False,
        also=("policy/loss", "data/tokens"),
        beside={f"timed-trl-sft-{form}": f"timed-sft-{form}" for form in SFT_FORMS},
    ),
    "real-weights": Study(
        "What does SmolLM2-135M learn on Countdown and on arithmetic word problems?",
        smollm2_runs("real", steps=40, tokens=256, sampled=1024),
        needs="--gsm8k FOLDER --math FOLDER",
        dtype="bf16",
    ),
    "two-cores": Study(
        "GRPO on Countdown in fewer steps and in fp32: how much of that without a GPU, in "
        "runs of less than an hour?",
        {name: run for name, run in SMALL.items() if name.startswith(WITHOUT_GPU)},
    ),
    "one-gpu": Study(
        "What does SmolLM2-135M learn on Countdown and GSM8K, at full size?",
        ONE_GPU,
        "--gsm8k FOLDER",
    ),
}
