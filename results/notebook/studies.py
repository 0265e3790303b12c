"""What curves.py runs: studies, each of them some runs that answer one question together.

A run is named VARIANT-seedN. Its command is a script with its flags, without the output folder.
"""

from dataclasses import dataclass, field, replace

DEMO_PYTHON = """\
grpo.py --model tiny-vl-python --tools python --max-turns 4 --tool-bonus 0.1 --oversample 1.5 \
--dynamic-sampling 4 --advantage group-mean --prompts-per-step 16 --samples-per-prompt 8 \
--max-prompt-tokens 64 --max-response-tokens 320 --max-pixels 12544 --max-frame-pixels 12544 \
--learning-rate 1e-4 --total-steps 30 --eval-every 10 --eval-rows 256"""

SFT = """\
sft.py --model smollm2 --batch-size 64 --learning-rate 2e-4 --lr-schedule cosine \
--warmup-steps 0.03 --eval-rows 512 --eval-every 50"""
RL = """\
--micro-batch-tokens 32768 --learning-rate 1e-5 --warmup-steps 5 --lr-schedule linear \
--lr-floor 0.1 --minibatches 2 --eval-every 20"""
GRPO = f"grpo.py {RL} --prompts-per-step 128 --samples-per-prompt 8"
PPO = f"""\
ppo.py {RL} --prompts-per-step 256 --samples-per-prompt 4 --critic-learning-rate 2e-5 \
--critic-warmup-steps 10"""
ON_GSM8K = "--total-steps 120 --eval-rows 1319 --max-prompt-tokens 320 --max-response-tokens 320"
ON_COUNTDOWN = "--total-steps 100 --eval-rows 512 --max-prompt-tokens 64 --max-response-tokens 288"

# trl_work.py has the same for SFTTrainer. fp32: a difference of the losses is one of what the two
# compute.
BESIDE_SFT = """\
sft.py --model smollm2 --batch-size 16 --learning-rate 1e-4 --lr-schedule linear \
--warmup-steps 0.1 --total-steps 12 --eval-every 12 --eval-rows 32 --micro-batch-tokens 1024 \
--dtype fp32"""

SFT_FORMS = ("pairs", "chats", "from-value")

# Six tiles in ten show a 7, and the warm start knows it. Guessing pays more than looking, since
# most looks miss the tile and each costs 0.05; aiming well would pay most. The demo of
# curiosity_rl.py is the same task without the trap.
MOSAIC = "--max-pixels 12544 --max-frame-pixels 12544"
TRAPPED = f"sft.py --model tiny-vl {MOSAIC} --batch-size 32 --learning-rate 2e-4 --total-steps 150"
TRAP = f"""\
curiosity_rl.py {MOSAIC} --tools crop_image_normalized --max-turns 4 --prompts-per-step 16 \
--samples-per-prompt 8 --max-prompt-tokens 96 --max-response-tokens 192 --dtype fp32 \
--micro-batch-tokens 4096 --learning-rate 8e-5 --lr-schedule linear --lr-floor 0.1 \
--warmup-steps 5 --total-steps 400 --eval-every 40 --eval-rows 256 --free-calls 0"""
TRAP_SCORE = f"""\
curiosity_rl.py {MOSAIC} --tools crop_image_normalized --max-turns 4 --max-prompt-tokens 96 \
--max-response-tokens 192 --dtype fp32 --eval-only --eval-rows 256 --eval-samples 8 \
--eval-temperature 1"""


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
    name: str
    question: str
    runs: dict[str, Run]
    # runs that were made with flags that are gone: shown, and not to be made again
    retired: dict[str, Run] = field(default_factory=dict)
    needs: str = ""  # flags of curves.py that it wants
    shown: tuple[str, ...] = ()  # runs whose own curves are drawn, too
    also: tuple[str, ...] = ()  # metrics of each step to show besides the evaluations
    # {variant: the one it is measured against}
    beside: dict[str, str] = field(default_factory=dict)
    dots: bool = False  # a figure of how much, not of when
    goal: float | None = None  # of the evaluation: after how many seconds is it there?
    dtype: str = ""  # what --dtype auto was in the runs that are kept

    @property
    def all_runs(self) -> dict[str, Run]:
        return self.runs | self.retired

    def script(self, variant: str) -> str:
        """The script that the runs of a variant call."""
        for name, run in self.all_runs.items():
            if name.startswith(f"{variant}-seed"):
                return run.command.split()[0]
        raise KeyError(variant)


def seeded(variants: dict[str, Run], seeds: range) -> dict[str, Run]:
    """Seed by seed, so that variants take turns: machines drift."""
    runs = {}
    for seed in seeds:
        for name, run in variants.items():
            runs[f"{name}-seed{seed}"] = replace(run, seed=seed)
    return runs


ONE_GPU = {
    "sft-countdown": Run(f"{SFT} --total-steps 300", None, "countdown", ranks=1),
    "grpo-countdown-seed1": Run(f"{GRPO} {ON_COUNTDOWN}", 1, "countdown", "sft-countdown", 1),
    "grpo-countdown-seed2": Run(f"{GRPO} {ON_COUNTDOWN}", 2, "countdown", "sft-countdown", 1),
    "sft-gsm8k": Run(f"{SFT} --total-steps 350", None, "gsm8k", ranks=1),
    "grpo-gsm8k-seed1": Run(f"{GRPO} {ON_GSM8K}", 1, "gsm8k", "sft-gsm8k", 1),
    "grpo-gsm8k-seed2": Run(f"{GRPO} {ON_GSM8K}", 2, "gsm8k", "sft-gsm8k", 1),
    "grpo-gsm8k-fp16-seed1": Run(f"{GRPO} {ON_GSM8K} --dtype fp16", 1, "gsm8k", "sft-gsm8k", 1),
    "ppo-gsm8k-seed1": Run(f"{PPO} {ON_GSM8K}", 1, "gsm8k", "sft-gsm8k", 1),
}


def smollm2_runs(steps: int, tokens: int, sampled: int, further: str = "") -> dict[str, Run]:
    """Two warm starts of SmolLM2-135M. From each so many steps of RL with 128 samples of up to so
    many tokens, and beside them supervised training on as many rows, or on answers alone. Behind
    them, how each does greedily on all held-out rows, and with 8 samples of each of the first
    `sampled`."""
    sft = f"""\
sft.py --model smollm2 --learning-rate 2e-4 --lr-schedule cosine --warmup-steps 0.05{further} \
--micro-batch-tokens 4096 --eval-rows 256 --eval-every 20"""
    sampling = f"--max-prompt-tokens 192 --max-response-tokens {tokens}"
    rl = f"""\
{sampling} --engine-memory 1 --micro-batch-tokens 4096 --warmup-steps 5 --lr-schedule linear\
{further} --lr-floor 0.1 --total-steps {steps} --eval-every {steps // 4} --eval-rows 256"""
    grpo = f"grpo.py {rl} --prompts-per-step 16 --samples-per-prompt 8 --learning-rate"
    ppo = f"""\
ppo.py {rl} --prompts-per-step 128 --samples-per-prompt 1 --critic-warmup-steps {steps // 5} \
--critic-learning-rate 1e-4 --learning-rate"""
    searches = f"{sft} --batch-size 64 --total-steps"
    solutions = f"{sft} --batch-size 32 --total-steps"
    warm_countdown = "sft-countdown"
    warm_gsm8k = "sft-gsm8k"
    runs = {
        "sft-countdown": Run(f"{searches} {steps * 3 // 2}", None, "countdown"),
        "grpo-countdown-seed1": Run(f"{grpo} 2e-5", 1, "countdown", warm_countdown),
        "grpo-countdown-seed2": Run(f"{grpo} 2e-5", 2, "countdown", warm_countdown),
        "ppo-countdown-seed1": Run(f"{ppo} 2e-5", 1, "countdown", warm_countdown),
        "lora-countdown-seed1": Run(f"{grpo} 2e-4 --lora-rank 16", 1, "countdown", warm_countdown),
        "more-sft-countdown-seed1": Run(f"{searches} {2 * steps}", 1, "countdown", warm_countdown),
        "sft-gsm8k": Run(f"{solutions} {2 * steps}", None, "gsm8k"),
        "grpo-mawps-seed1": Run(f"{grpo} 2e-5", 1, "mawps", warm_gsm8k),
        "more-sft-gsm8k-seed1": Run(f"{solutions} {4 * steps}", 1, "gsm8k", warm_gsm8k),
        "answers-mawps-seed1": Run(f"{solutions} {2 * steps}", 1, "mawps", warm_gsm8k),
    }
    score = f"grpo.py {sampling} --engine-memory 2{further} --eval-only --eval-rows"
    samples = f"{score} {sampled} --eval-samples 8 --eval-temperature 1"
    scored = {}
    for name in runs:
        rows = "countdown" if "countdown" in name else "mawps"
        scored[f"{name}-greedy"] = Run(f"{score} 1024", None, rows, name)
        scored[f"{name}-samples"] = Run(samples, None, rows, name)
    return {name: replace(run, ranks=1) for name, run in (runs | scored).items()}


TWO_CORES = smollm2_runs(steps=16, tokens=160, sampled=512, further=" --dtype fp32")
WITHOUT_GPU = ("sft-countdown", "grpo-countdown")

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
# {knob: the one it differs from in one setting}, where that is not the demo
KNOB_BASES = {
    "4-clip-higher": "4-minibatches",
    "4-gspo": "4-minibatches",
    "4-cispo": "4-minibatches",
    "kl-reward": "rloo",
    "bf16-none": "fp32",
    "bf16-truncate": "bf16-none",
    "int3-none": "fp32",
    "int3-truncate": "int3-none",
    "int3-mask": "int3-none",
    "int3-sequence": "int3-none",
}
WRONG_ENGINES = (
    "bf16-none",
    "bf16-truncate",
    "int3-none",
    "int3-truncate",
    "int3-mask",
    "int3-sequence",
)


def knobs() -> dict[str, Run]:
    """One run of each knob."""
    runs = {name: Run(f"grpo.py {flags}".strip()) for name, flags in GRPO_KNOBS.items()}
    runs["fp32"] = Run("grpo.py --dtype fp32")
    for name in WRONG_ENGINES:  # under a trainer in fp32
        engine, _, correction = name.partition("-")
        command = f"grpo.py --dtype fp32 --max-logprob-gap 1 --correction {correction}"
        runs[name] = Run(command, engine=engine)
    for name, flags in PPO_KNOBS.items():
        runs[f"ppo-{name}"] = Run(f"ppo.py {flags}".strip())
    return runs


def in_fp32(run: Run) -> Run:
    return run if "--dtype" in run.command else replace(run, command=f"{run.command} --dtype fp32")


def knob_runs() -> dict[str, Run]:
    """Three seeds of each. What was left when no machine with bf16 was at hand runs in fp32: the
    knob `fp32`, whose first two seeds are beside the demo's in bf16, shows what that changes."""
    runs = seeded(knobs(), range(1, 4))
    for name in ["ppo-no-critic-warmup-seed2", *(f"{knob}-seed3" for knob in knobs())]:
        runs[name] = in_fp32(runs[name])
    return runs


def knob_bases() -> dict[str, str]:
    bases = {}
    for knob in [*knobs(), "ppo-no-whitening"]:
        if not knob.endswith("demo"):
            demo = "ppo-demo" if knob.startswith("ppo-") else "demo"
            bases[knob] = KNOB_BASES.get(knob, demo)
    return bases


# --no-whiten went in 0fc9b62
NO_WHITENING = {
    "ppo-no-whitening-seed1": Run("ppo.py --no-whiten", 1),
    "ppo-no-whitening-seed2": Run("ppo.py --no-whiten --dtype fp32", 2),
    "ppo-no-whitening-seed3": Run("ppo.py --no-whiten --dtype fp32", 3),
}

PYVISION = {  # the demo with programs: ranking by deviation, and the bonus for programs that ran
    "both": DEMO_PYTHON,
    "unranked": DEMO_PYTHON.replace("--oversample 1.5 ", ""),
    "no-bonus": DEMO_PYTHON.replace("--tool-bonus 0.1 ", ""),
    "neither": DEMO_PYTHON.replace("--tool-bonus 0.1 --oversample 1.5 ", ""),
}


def demo_runs() -> dict[str, Run]:
    runs = seeded({"grpo-tiny": Run("grpo.py"), "ppo-tiny": Run("ppo.py")}, range(1, 4))
    runs |= seeded({"grpo-tiny-lora": Run("grpo.py --lora-rank 16")}, range(1, 4))
    two_seeds = {"grpo-tiny-vl-python": Run(DEMO_PYTHON)}
    for bonus in ("paper", "none"):
        two_seeds[f"curiosity-tiny-vl-{bonus}"] = Run(f"curiosity_rl.py --curiosity {bonus}")
    return runs | seeded(two_seeds, range(1, 3))


def trap_runs() -> dict[str, Run]:
    runs = {
        "warm-start": Run(TRAPPED, None, "trap"),
        "warm-start-samples": Run(TRAP_SCORE, None, "trap", "warm-start"),
    }
    variants = {
        "bonus": Run(TRAP, None, "trap", "warm-start"),
        "none": Run(f"{TRAP} --curiosity-alpha 0", None, "trap", "warm-start"),
    }
    return runs | seeded(variants, range(1, 4))


def sft_runs() -> dict[str, Run]:
    """sft.py and TRL's SFTTrainer in turns."""
    runs = {}
    for form in SFT_FORMS:
        runs[f"sft-{form}"] = Run(BESIDE_SFT, 1, f"gsm8k-{form}")
        runs[f"trl-{form}"] = Run("trl_sft", 1, f"gsm8k-{form}")
    return runs


def distillation_runs() -> dict[str, Run]:
    """grpo.py's demo and distill.py's, which have the same student."""
    variants = {
        "grpo": Run("grpo.py --eval-every 5"),
        "reverse-kl": Run("distill.py --eval-every 5"),
    }
    return seeded(variants, range(1, 4))


# prompts of two examples and a question
GYM = "--max-prompt-tokens 224 --max-response-tokens 48 --engine-memory 1"
GYM_STEPS = "--warmup-steps 3 --lr-schedule linear --lr-floor 0.1 --total-steps 12"
# in bf16, with 128 rows of the level held out
GYM_GCD_SCORE = f"{GYM} --eval-only --eval-rows 192 --eval-samples 8 --eval-temperature 1"
GYM_GCD = {
    "gym-gcd-samples": Run(f"grpo.py --model smollm2 {GYM_GCD_SCORE}", None, "gym-gcd"),
    "grpo-gcd-seed1": Run(
        f"grpo.py --model smollm2 {GYM} --micro-batch-tokens 1024 --prompts-per-step 16 "
        f"--samples-per-prompt 8 --learning-rate 4e-5 {GYM_STEPS} --eval-every 6 --eval-rows 128",
        1,
        "gym-gcd",
    ),
    "grpo-gcd-seed1-samples": Run(f"grpo.py {GYM_GCD_SCORE}", None, "gym-gcd", "grpo-gcd-seed1"),
}


def gym_runs() -> dict[str, Run]:
    """GRPO and self-distillation on tasks of reasoning-gym, from SmolLM2-135M as it comes; on one
    of them a second seed, LoRA, and a supervised control. Before and after it 8 samples of each
    held-out row, those of a harder level behind those of the level."""
    score = f"{GYM} --eval-only --eval-rows 576 --eval-samples 8 --eval-temperature 1"
    train = f"""\
--model smollm2 {GYM_STEPS} --micro-batch-tokens 1024 --eval-every 12 --eval-rows 512"""
    grpo = f"grpo.py {train} {GYM} --prompts-per-step 16 --samples-per-prompt 8 --learning-rate"
    distill = f"""\
distill.py {train} {GYM} --prompts-per-step 16 --samples-per-prompt 4 --learning-rate 4e-5 \
--teacher-prompt-column hint"""
    variants = {"distill": distill, "grpo": f"{grpo} 4e-5"}
    runs = {}
    for task in ("gcd", "letter-counting", "family-relationships"):
        rows = f"gym-{task}"
        policies = {
            f"{name}-{task}-seed1": Run(command, 1, rows) for name, command in variants.items()
        }
        if task == "gcd":
            del policies["grpo-gcd-seed1"]
        else:
            runs[f"{rows}-samples"] = Run(f"grpo.py --model smollm2 {score}", None, rows)
        if task == "letter-counting":
            sft = f"sft.py {train} --batch-size 32 --learning-rate 1e-4"
            policies |= {
                f"sft-{task}-seed1": Run(sft, 1, rows),
                f"lora-{task}-seed1": Run(f"{grpo} 4e-4 --lora-rank 16", 1, rows),
                f"grpo-{task}-seed2": Run(f"{grpo} 4e-5", 2, rows),
            }
        for policy, run in policies.items():
            runs[policy] = run
            runs[f"{policy}-samples"] = Run(f"grpo.py {score}", None, rows, policy)
    return runs


ALL = (
    Study(
        "demos",
        "Do the demos learn, with every seed?",
        demo_runs(),
        shown=(
            "grpo-tiny-seed1",
            "ppo-tiny-seed1",
            "grpo-tiny-vl-python-seed1",
            "curiosity-tiny-vl-paper-seed1",
            "curiosity-tiny-vl-none-seed1",
        ),
        dtype="bf16",
    ),
    Study(
        "beside-trl",
        "Does grpo.py get to the same accuracy as TRL's GRPOTrainer with as many samples, and how "
        "much sooner?",
        seeded({"grpo": Run("grpo.py --eval-every 5"), "trl": Run("trl_step")}, range(1, 6)),
        needs="--trl FOLDER",
        also=("reward/accuracy", "rollout/response_length"),
        beside={"trl": "grpo"},
        goal=0.8,
        dtype="bf16",
    ),
    Study(
        "distillation",
        "How many samples and seconds does a student need with a teacher, and how many with a "
        "reward?",
        distillation_runs(),
        beside={"reverse-kl": "grpo"},
        goal=0.85,
        dtype="bf16",
    ),
    Study(
        "knobs",
        "What does each setting do to the demos of grpo.py and ppo.py, everything else being as "
        "it is there?",
        knob_runs(),
        retired=NO_WHITENING,
        beside=knob_bases(),
        dots=True,
        dtype="bf16",
    ),
    Study(
        "curiosity",
        "Where guessing pays more than looking does at first, does the bonus for looking keep it "
        "alive?",
        trap_runs(),
        also=("tool/rapr", "reward/accuracy"),
    ),
    Study(
        "pyvision",
        "Do ranking and the bonus for programs of PyVision-RL matter on the mosaic?",
        seeded({name: in_fp32(Run(command)) for name, command in PYVISION.items()}, range(1, 3)),
        also=("tool/callers", "tool/acted", "reward/accuracy"),
    ),
    Study(
        "sft-beside-trl",
        "Does sft.py compute the loss of TRL's SFTTrainer, on rows of three formats, and how much "
        "sooner?",
        sft_runs(),
        needs="--trl FOLDER --gsm8k FOLDER",
        also=("policy/loss", "data/tokens"),
        beside={f"trl-{form}": f"sft-{form}" for form in SFT_FORMS},
    ),
    Study(
        "real-weights",
        "What does SmolLM2-135M learn on Countdown and on arithmetic word problems?",
        smollm2_runs(steps=40, tokens=256, sampled=1024),
        needs="--gsm8k FOLDER --math FOLDER",
        dtype="bf16",
    ),
    Study(
        "reasoning-gym",
        "What does SmolLM2-135M learn on procedural tasks, as it comes and without a GPU?",
        gym_runs(),
        retired=GYM_GCD,
        also=("reward/format", "reward/accuracy"),
        dtype="fp32",
    ),
    Study(
        "two-cores",
        "GRPO on Countdown in fewer steps and in fp32: how much of that without a GPU, in runs of "
        "less than an hour?",
        {name: run for name, run in TWO_CORES.items() if name.startswith(WITHOUT_GPU)},
    ),
    Study(
        "one-gpu",
        "What does SmolLM2-135M learn on Countdown and GSM8K, at full size?",
        ONE_GPU,
        needs="--gsm8k FOLDER",
    ),
)
STUDIES = {study.name: study for study in ALL}
