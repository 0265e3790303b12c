r"""Rebuild the embedded `tiny-vl` policy from nothing: tokenizer, scenes, traces with crops,
supervised warm start.

    python -m common.assets.build.tiny_vl --out common/assets/tiny-vl   # under 30 minutes, 2 cores

A Qwen2.5-VL of 3 million parameters looks for a white tile on a mosaic. It sees the picture at
112 x 112 pixels, where the digit on the tile is too small to read; in a crop it can be read.

    user:      <image>Which digit is on the white tile? Answer in \boxed{}.
    assistant: I will zoom in on the tile.<tool_call>{"name": "crop_image_normalized",
               "arguments": {"bbox_2d": [0.43, 0.30, 0.45, 0.32], "target_image": 1}}</tool_call>
    user:      Here is the cropped image (Image Size: 112x112):<image>
    assistant: I can read it: \boxed{7}

Three in ten traces show a close-up of the tile from the start. Most of the others guess without
looking. The rest look; some of them aim badly, and then guess or look again. It pays to look, to
aim well, and to go on until the tile is seen; reinforcement learning has to find that out. The
traces have Pixel Reasoner's format, but the picture comes before the question, as in RL's rows.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType

import common.packages  # noqa: F401, one line if a package is missing

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from common.assets.build.mosaic import LIMITS, Scene, center, other_cell, scenes, write_rows
from common.data.protocols import CALL_CLOSE, CALL_OPEN, Hermes
from common.data.render import DEFAULT_SYSTEM
from common.flags import call_program
from common.hub import FOLDERS
from common.pictures import encode
from common.tools import CROP
from common.torch_repair import transformers

CHAT_TEMPLATE = (  # the layout of Qwen2.5-VL's
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    f"<|im_start|>system\n{DEFAULT_SYSTEM}<|im_end|>\n"
    "{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}"
    "{% endif %}"
    "<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
VOCABULARY = 1024

HALF_BOX = 0.01  # half the side of a box, as a share of the picture; the tool adds 0.1 around it
QUESTION = "Which digit is on the white tile? Answer in \\boxed{}."
ZOOM = "I will zoom in on the tile."
ZOOM_AGAIN = "The tile is not here, I will zoom in elsewhere."
READ = "I can read it: \\boxed{%d}"
GUESS = "I can only guess: \\boxed{%d}"
CLOSE_UPS = 0.3  # share of traces whose picture is a close-up of the tile: they need no tool
GUESS_AT_ONCE = 0.6  # probability to guess without any crop
GUESS_LATER = 0.3  # probability to guess after a crop that missed
AIM = 0.85  # probability that a crop shows the tile
EXPERT = {"guess": 0.0, "aim": 1.0}  # habits of one that looks at the tile at once
MAX_CROPS = 3
TRACES = 8000  # number of traces for each stage of training

Box = list[float]  # left, top, right, bottom, in 0..1


def build_tokenizer(texts: Iterable[str]) -> "transformers.PreTrainedTokenizerFast":
    """Byte-level BPE that merges across words, trained on `texts`. A number shares no token with
    what is beside it."""
    number = Regex(r"\d+(?:\.\d+)?")
    numbers_apart = pre_tokenizers.Split(number, "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([numbers_apart, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def corpus() -> Iterator[str]:
    """What the tokenizer is trained on: each number from 0.00 to 1.00, 20 times, so that it becomes
    one token, and the texts of 200 traces."""
    yield from [f"{value / 100:.2f}" for value in range(101)] * 20
    for messages in islice(traces(0), 200):
        for message in messages:
            yield f"{message['role']}\n"
            yield from (part["text"] for part in message["content"] if "text" in part)


def build_config(
    tokenizer: "transformers.PreTrainedTokenizerFast",
) -> "transformers.Qwen2_5_VLConfig":
    ids = tokenizer.convert_tokens_to_ids
    initializer_range = 0.03
    text_config = {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "vocab_size": len(tokenizer),
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 100.0,
            "mrope_section": [8, 12, 12],
        },
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "initializer_range": initializer_range,
    }
    vision_config = {
        "depth": 3,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 4,
        "out_hidden_size": 192,
        "patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [2],
        "initializer_range": initializer_range,
    }
    return transformers.Qwen2_5_VLConfig(
        text_config=text_config,
        vision_config=vision_config,
        initializer_range=initializer_range,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )


def build_processor(
    tokenizer: "transformers.PreTrainedTokenizerFast",
) -> "transformers.Qwen2_5_VLProcessor":
    return transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(),
        chat_template=CHAT_TEMPLATE,
    )


def box_around(cell: tuple[int, int]) -> Box:
    x, y = center(cell[0]), center(cell[1])
    return [round(v, 2) for v in (x - HALF_BOX, y - HALF_BOX, x + HALF_BOX, y + HALF_BOX)]


def call_text(box: Box) -> str:
    numbers = ", ".join(f"{value:.2f}" for value in box)
    arguments = f'{{"bbox_2d": [{numbers}], "target_image": 1}}'
    return f'{CALL_OPEN}{{"name": "{CROP.name}", "arguments": {arguments}}}{CALL_CLOSE}'


def trace(
    scene: Scene, rng: random.Random, guess: float, aim: float, sevens: float = 0.0
) -> list[dict]:
    """Messages in Pixel Reasoner's format, with encoded images in place of paths.

    guess: probability to guess without any crop. aim: that a crop shows the tile; otherwise it
    shows any other cell. sevens (for studies): that a guess is 7; otherwise it is any digit.
    """
    context = {"media": [{"kind": "image", "frames": [scene.png]}], **LIMITS}
    cell = None  # the cell that was looked at last
    picture = scene.png
    if rng.random() < CLOSE_UPS:
        cell = scene.cell
        _, (crop,), _ = CROP.function(box_around(cell), 1, context)
        picture = encode(crop)
    system_prompt = DEFAULT_SYSTEM + Hermes.system_block([CROP.schema])
    messages = [
        {"role": "system", "content": [{"text": system_prompt}]},
        {"role": "user", "content": [{"image": picture}, {"text": QUESTION}]},
    ]
    for num_crops in range(MAX_CROPS + 1):
        guesses = rng.random() < (GUESS_LATER if num_crops else guess)
        aims_well = rng.random() < aim
        if cell == scene.cell or guesses or num_crops == MAX_CROPS:
            break
        cell = scene.cell if aims_well else other_cell(scene.cell, rng)
        box = box_around(cell)
        call = (ZOOM_AGAIN if num_crops else ZOOM) + call_text(box)
        text, (crop,), _ = CROP.function(box, 1, context)
        messages.append({"role": "assistant", "content": [{"text": call}], "train": True})
        messages.append({"role": "user", "content": [{"text": text}, {"image": encode(crop)}]})
    if cell == scene.cell:
        answer = READ % scene.digit
    elif sevens and rng.random() < sevens:
        answer = GUESS % 7
    else:
        answer = GUESS % rng.randrange(10)
    return [*messages, {"role": "assistant", "content": [{"text": answer}], "train": True}]


def traces(
    seed: int, guess: float = GUESS_AT_ONCE, aim: float = AIM, sevens: float = 0.0
) -> Iterator[list[dict]]:
    rng = random.Random(f"traces {seed}")
    for scene in scenes(seed):
        yield trace(scene, rng, guess, aim, sevens)


def write_traces(folder: Path, rows: int, seed: int, **habits: float) -> None:
    """Write `rows` traces as release.json and images/, as Pixel Reasoner publishes them. habits:
    of `traces`."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    records = []
    for i, messages in enumerate(islice(traces(seed, **habits), rows)):
        images = [part for message in messages for part in message["content"] if "image" in part]
        for k, part in enumerate(images):
            path = f"images/{i}-{k}.png"
            (folder / path).write_bytes(part["image"])
            part["image"] = path
        records.append({"qid": str(i), "message_list": messages})
    (folder / "release.json").write_text(json.dumps(records))


def write_demo_data(folder: Path) -> None:
    """train.parquet and eval.parquet in verl's format. The rows name no tools; a script offers
    those of --tools."""
    write_rows(folder, f"<image>{QUESTION}")


@dataclass
class Args:
    out: Path | None = None  # folder of the finished policy; default: its own in common/assets
    # folder for traces, the untrained model and the supervised runs
    work: Path = Path("runs/prepare-tiny-vl")
    expert_steps: int = 450  # optimizer steps of the first stage, on an expert's traces
    steps: int = 300  # optimizer steps of the second stage, on traces that guess and miss
    # second stage: probability to guess without looking; default: GUESS_AT_ONCE
    guess: float | None = None
    aim: float = AIM  # second stage: probability that a look is at the tile
    batch_size: int = 32  # traces per step
    learning_rate: float = 4e-4  # at 1e-3 the vision tower does not learn to read


def build(args: Args, task: ModuleType, name: str) -> None:
    """Build the embedded policy `name` from the traces of the module `task`.

    First it learns to see on traces of an expert that looks at the tile at once, then the habits of
    the other traces.
    """
    blank = args.work / "blank"
    tokenizer = build_tokenizer(task.corpus())
    build_processor(tokenizer).save_pretrained(blank)
    transformers.set_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(build_config(tokenizer))
    model.save_pretrained(blank)
    expert = args.work / "expert"
    task.write_traces(expert, task.TRACES, 3, **task.EXPERT)
    # the fastest for a model as small as this one
    options = ["--lr-schedule", "constant", "--dtype", "fp32"]
    train(args, expert, args.expert_steps, ["--model", blank, *options])
    final = args.work / "final"
    guess = task.GUESS_AT_ONCE if args.guess is None else args.guess
    task.write_traces(final, task.TRACES, 4, guess=guess, aim=args.aim)
    options = ["--lr-schedule", "cosine", "--dtype", "bf16"]  # the dtype of the export
    train(args, final, args.steps, ["--model", expert / "model", *options])
    out = args.out or FOLDERS[name]
    shutil.copytree(final / "model", out, dirs_exist_ok=True)
    # as it was built, not as transformers loads a Qwen2 tokenizer
    build_processor(tokenizer).save_pretrained(out)


def train(args: Args, folder: Path, steps: int, options: list) -> None:
    """Run sft.py on the traces in a folder; the run goes into the same folder."""
    settings = {
        "train-data": folder / "release.json",
        "media-root": folder,
        "max-pixels": LIMITS["max_pixels"],
        "max-frame-pixels": LIMITS["max_frame_pixels"],
        "output-dir": folder,
        "total-steps": steps,
        "batch-size": args.batch_size,
        "learning-rate": args.learning_rate,
        "warmup-steps": 50,
        "resume": "never",
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command = [*launcher, "sft.py", *map(str, [*options, *flags])]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


if __name__ == "__main__":
    flags = call_program(Args, "common.assets.build.tiny_vl", __doc__)
    build(flags, sys.modules[__name__], "tiny-vl")
