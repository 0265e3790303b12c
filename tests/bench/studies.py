"""What curves.py runs: studies, each of them some runs that answer one question together.

A run is named VARIANT-seedN. Its command is a script with its flags, without the output folder.
"""

from dataclasses import dataclass

DEMO_PYTHON = """\
grpo.py --model tiny-vl-python --tools python --max-turns 4 --tool-bonus 0.1 --oversample 1.5 --dynamic-sampling 4 \
--advantage group-mean --prompts-per-step 16 --samples-per-prompt 8 --max-prompt-tokens 64 --max-response-tokens 320 \
--max-pixels 12544 --max-frame-pixels 12544 --learning-rate 1e-4 --total-steps 30 --eval-every 10 --eval-rows 256"""

SFT = "--model smollm2 --batch-size 64 --learning-rate 2e-4 --lr-schedule cosine --warmup-steps 0.03"
SFT += " --eval-rows 512 --eval-every 50"
RL = "--micro-batch-tokens 32768 --learning-rate 1e-5 --warmup-steps 5 --lr-schedule linear --lr-floor 0.1"
RL += " --minibatches 2 --eval-every 20"
GRPO = f"grpo.py {RL} --prompts-per-step 128 --samples-per-prompt 8"
PPO = f"ppo.py {RL} --prompts-per-step 256 --samples-per-prompt 4 --critic-learning-rate 2e-5 --critic-warmup-steps 10"
ON_GSM8K = "--total-steps 120 --eval-rows 1319 --max-prompt-tokens 320 --max-response-tokens 320"
ON_COUNTDOWN = "--total-steps 100 --eval-rows 512 --max-prompt-tokens 64 --max-response-tokens 288"

# Six tiles in ten show a 7, and the warm start knows: to guess pays more than to look, since most looks miss and each
# costs 0.05. To learn to aim would pay; the demo of curiosity_rl.py is the same task without the trap.
MOSAIC = "--max-pixels 12544 --max-frame-pixels 12544"
TRAPPED = f"sft.py --model tiny-vl {MOSAIC} --mask all --batch-size 32 --learning-rate 2e-4 --total-steps 150"
TRAP = f"""\
curiosity_rl.py {MOSAIC} --tools crop_image_normalized --max-turns 4 --prompts-per-step 16 --samples-per-prompt 8 \
--max-prompt-tokens 96 --max-response-tokens 192 --dtype fp32 --micro-batch-tokens 4096 --learning-rate 8e-5 \
--lr-schedule linear --lr-floor 0.1 --warmup-steps 5 --total-steps 240 --eval-every 30 --eval-rows 256 \
--free-calls 0"""


@dataclass(frozen=True)
class Run:
    command: str  # script and flags; "trl": GRPOTrainer on the demo of grpo.py
    seed: int | None = None  # --seed
    data: str = ""  # countdown, gsm8k or trap, made by curves.py; else what the command says
    parent: str = ""  # run of the study whose model this one starts from
    ranks: int = 2  # processes


@dataclass(frozen=True)
class Study:
    question: str
    runs: dict[str, Run]
    needs: str = ""  # what to give besides
    each: bool = True  # keep a picture of each run, else one of the study


def seeded(variants: dict[str, Run], seeds: range) -> dict[str, Run]:
    """Seed by seed, so that variants take turns: machines drift."""
    return {
        f"{name}-seed{seed}": Run(run.command, seed, run.data, run.parent, run.ranks)
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

KNOBS = {  # the demo: group-std, dapo, one minibatch, clipped at 0.2, learning rate 8e-5, no KL
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
    "kl-reward": "--kl-in reward --kl-coef 0.001 --advantage rloo",
    "kl-loss": "--kl-in loss --kl-coef 0.001 --kl-estimator k3",
    "kl-loss-0.1": "--kl-in loss --kl-coef 0.1 --kl-estimator k3",
    "rate-8e-6": "--learning-rate 8e-6",
    "rate-2.5e-5": "--learning-rate 2.5e-5",
    "rate-2.5e-4": "--learning-rate 2.5e-4",
    "rate-8e-4": "--learning-rate 8e-4",
}
PPO_KNOBS = {  # the demo: advantages with lambda 0.99, whitened; 16 steps for the critic alone
    "demo": "",
    "lambda-0.95": "--policy-lambda 0.95",
    "lambda-1": "--policy-lambda 1",
    "no-critic-warmup": "--critic-warmup-steps 0",
    "no-whitening": "--no-whiten",
}

STUDIES = {
    "demos": Study(
        "Do the demos learn, with every seed?",
        seeded({"grpo-tiny": Run("grpo.py"), "ppo-tiny": Run("ppo.py")}, range(1, 4))
        | seeded({"grpo-tiny-lora": Run("grpo.py --lora-rank 16")}, range(1, 4))
        | seeded({"grpo-tiny-vl-python": Run(DEMO_PYTHON)}, range(1, 3))
        | seeded(
            {f"curiosity-tiny-vl-{bonus}": Run(f"curiosity_rl.py --curiosity {bonus}") for bonus in ("paper", "none")},
            range(1, 3),
        ),
    ),
    "beside-trl": Study(
        "Does grpo.py get to the same accuracy as TRL's GRPOTrainer with as many samples, and how much sooner?",
        seeded({"timed-grpo": Run("grpo.py --eval-every 5"), "timed-trl": Run("trl")}, range(1, 6)),
        needs="--trl FOLDER",
    ),
    "knobs": Study(
        "What does each setting of grpo.py do to the demo, everything else being as it is there?",
        seeded({f"knob-{name}": Run(f"grpo.py {flags}") for name, flags in KNOBS.items()}, range(1, 4)),
        each=False,
    ),
    "knobs-ppo": Study(
        "And of ppo.py?",
        seeded({f"knob-ppo-{name}": Run(f"ppo.py {flags}") for name, flags in PPO_KNOBS.items()}, range(1, 4)),
        each=False,
    ),
    "curiosity": Study(
        "Where guessing pays more than looking does at first, does the bonus for looking keep it alive?",
        {"sft-trap": Run(TRAPPED, None, "trap")}
        | seeded(
            {
                "trap-bonus": Run(TRAP, None, "trap", "sft-trap"),
                "trap-none": Run(f"{TRAP} --curiosity-alpha 0", None, "trap", "sft-trap"),
            },
            range(1, 4),
        ),
    ),
    "one-gpu": Study("What does SmolLM2-135M learn on Countdown and GSM8K, at full size?", ONE_GPU, "--gsm8k FOLDER"),
}
