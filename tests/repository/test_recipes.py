"""The commands of README and docs fit on the cards that they name, by the estimate that each run
prints first."""

import importlib
import re
import shlex
from dataclasses import replace

import pytest
import torch
from helpers import checked_args, memory_phases
from model_configs import VISION, YOUNGER, published_config
from pages import PAGES, split_commands, text, without_heredocs

from common.flags import EMBEDDED, Machine
from common.memory.plan import no_rollout
from common.memory.remedies import longest
from common.memory.shape import ModelShape, model_shape

ROOM = 0.92  # share of a card that may be planned with, as in docs/scaling.md
SMALL = 25.3  # GB of a card of 24 GB: an RTX 4090 reports 23.55 GiB
MADE = {
    "runs/gsm8k/model": "0.5B",
    "runs/gsm8k-defaults/model": "0.5B",
    "runs/warm-start/model": "VL-7B",
    "runs/curiosity/model": "VL-7B",
}
MADE |= {"runs/pyvision-sft/model": "VL-7B", "runs/pyvision-image/model": "VL-7B"}
ON_A_CPU = (*EMBEDDED, "smollm2", "runs/guess-form/model", "runs/grid-form/model")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """{name: folder with a config.json and nothing else}; names as `published_config` has them."""
    found = {}
    for name in ("0.5B", "1.5B", "3B", "7B", "32B", *VISION, *YOUNGER):
        found[name] = str(tmp_path_factory.mktemp(name))
        published_config(name).save_pretrained(found[name])
    return found


@pytest.fixture(scope="module", autouse=True)
def one_look_at_each_model():
    """Several commands name the same one, whose layers take transformers a while to build."""
    shapes: dict[tuple, ModelShape] = {}

    def known_shape(path: str, machine: Machine) -> ModelShape:
        key = (path, machine.freeze_vision, machine.lora_rank, machine.lora_targets)
        if key not in shapes:
            shapes[key] = model_shape(path, machine)
        return shapes[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.memory.shape.model_shape", known_shape)
        yield


def recipes(page: str) -> list[tuple[int, str]]:
    """(GB of a card, command) of each training or evaluation: 32 where a V100 is spoken of, SMALL
    where a card of 24 GB is, else 80."""
    found, content = [], text(page)
    for block in re.finditer(r"^```bash\n(.*?)^```$", content, flags=re.MULTILINE | re.DOTALL):
        section = content[: block.start()].rpartition("\n#")[2]
        spoken_of = section.splitlines()[0] + section.rstrip().rpartition("\n\n")[2]
        for words in split_commands(without_heredocs(block[1])):
            command = " ".join(shlex.quote(word) if " " in word else word for word in words)
            if re.search(r"\b(grpo|ppo|curiosity_rl|sft)\.py .*--model", command):
                sizes = (
                    re.search(r"for size in ([^;]+);", block[1])[1].split()
                    if "$size" in command
                    else [""]
                )
                card = 32 if "V100" in spoken_of else 80
                if "one card of 24 GB:" in spoken_of.replace("\n", " "):
                    card = SMALL
                found += [(card, command.replace("$size", size)) for size in sizes]
    return found


def size_of(model: str) -> str:
    name = re.sub("-(Base|Instruct|bf16)$", "", model.rpartition("/")[2])
    if name in VISION or name in YOUNGER:
        return name
    return MADE.get(model) or "".join(
        re.search(r"Qwen2\.5-(VL-|)(?:Math-)?([\d.]+B)", model).groups()
    )


def gigabytes(command: str, card: int, folders: dict[str, str], monkeypatch) -> float:
    """GB of a rank in the phase that takes most, on a card of so many."""
    script, arguments = re.search(r"(\w+)\.py (.*)", command).groups()
    local = re.search(r"nproc_per_node (\d+)", command)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local[1] if local else "1")
    args = checked_args(importlib.import_module(script), monkeypatch, *shlex.split(arguments))
    size = size_of(args.run.model)
    ranks = int(local[1]) if local else 1
    ranks *= int((re.search(r"nnodes (\d+)", command) or [0, 1])[1])
    trained, frozen = [folders[size]], []
    if getattr(args, "kl_loss_coef", 0) or getattr(args, "kl_reward_coef", 0):
        frozen = [folders[size]]
    rollout = getattr(args, "rollout", None)
    if script == "ppo" and not rollout.eval_only:
        trained *= 2
    if rollout is None:
        rollout = no_rollout(args.max_tokens)
    dtype = torch.float16 if card == 32 else torch.bfloat16
    machine = args.machine
    # the run lowers it by itself, but not below its longest episode
    if machine.micro_batch_tokens is None:
        machine = replace(machine, micro_batch_tokens=longest(rollout))
    phases = memory_phases(rollout, machine, ranks, dtype, trained, frozen, on_gpu=True)
    return phases["context"] + max(phases["rollout"], phases["update"])


@pytest.mark.parametrize("page", PAGES)
def test_recipes_fit_on_the_cards_that_they_name(page, folders, monkeypatch):
    for card, command in recipes(page):
        if re.search(r"--model (\S+)", command)[1] in ON_A_CPU:
            continue
        needed = gigabytes(command, card, folders, monkeypatch)
        assert needed <= ROOM * card, f"{needed:.1f} GB of {card}: {command}"


def test_recipes_and_their_cards_are_found():
    found = {page: recipes(page) for page in PAGES}
    assert sum(map(len, found.values())) > 20
    (on_v100s,) = [command for card, command in found["docs/curiosity.md"] if card == 32]
    assert "curiosity-v100" in on_v100s and [card for card, _ in found["docs/scaling.md"]] == [
        80,
        80,
        80,
        80,
        32,
        80,
        80,
        80,
        80,
    ]
    assert any(
        "Qwen2.5-1.5B --output-dir runs/tinyzero-1.5B" in command
        for _, command in found["docs/recipes.md"]
    )


def test_recipes_for_one_card_of_24_gb_are_found_and_need_their_flags(folders, monkeypatch):
    small = [command for card, command in recipes("docs/recipes.md") if card == SMALL]
    assert [size_of(re.search(r"--model (\S+)", command)[1]) for command in small] == [
        "0.5B",
        "1.5B",
        "3B",
        "7B",
    ]
    for command, flag in (
        (small[0], "--gradient-checkpointing "),
        (small[2], "--lora-rank 32 "),
        (small[3], "--offload base "),
    ):
        larger = command.replace(flag, "")
        assert larger != command
        assert gigabytes(larger, SMALL, folders, monkeypatch) > ROOM * SMALL, flag


def test_tinyzeros_3b_fits_on_two_cards(folders, monkeypatch):
    """docs/recipes.md: as the command for 1.5B, with torchrun on two GPUs; on one it would not."""
    (command,) = [
        command for _, command in recipes("docs/recipes.md") if "tinyzero-1.5B" in command
    ]
    larger = command.replace("1.5B", "3B")
    on_two = larger.replace("python ppo.py", "torchrun --nproc_per_node 2 ppo.py")
    assert gigabytes(on_two, 80, folders, monkeypatch) < ROOM * 80
    assert gigabytes(larger, 80, folders, monkeypatch) > ROOM * 80


def test_a_recipe_that_does_not_fit_is_found(folders, monkeypatch):
    """The one for V100s as it was."""
    (command,) = [command for card, command in recipes("docs/curiosity.md") if card == 32]
    before = command.replace("nproc_per_node 8", "nproc_per_node 4").replace(
        "--engine-memory 3 ", ""
    )
    assert gigabytes(before, 32, folders, monkeypatch) == pytest.approx(42.7, abs=0.1)
    assert gigabytes(command, 32, folders, monkeypatch) < ROOM * 32
