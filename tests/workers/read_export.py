"""What transformers 4.57 makes of an export: a JSON object for each folder. Run by a Python that
has that version."""

import json
import sys

import torch

# CUDA builds beside a CPU torch: common/torch_repair.py
sys.modules["torchaudio"] = sys.modules["torchcodec"] = None
for name in ("nms", "qnms"):
    torch.library.define(
        f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    )

import transformers  # noqa: E402

for folder in sys.argv[1:]:
    config = transformers.AutoConfig.from_pretrained(folder)
    text = config.get_text_config()
    kind = "ImageTextToText" if hasattr(config, "vision_config") else "CausalLM"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if kind != "CausalLM":
        transformers.AutoProcessor.from_pretrained(folder)
    model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(folder, dtype="auto")
    ids = tokenizer.encode("12 + 34 = 46\n", add_special_tokens=False)
    with torch.no_grad():
        logits = model.float()(torch.tensor([ids * 20])).logits[0, -1]
    result = {
        "version": transformers.__version__,
        "dtype": str(config.dtype),
        "rope_theta": text.rope_theta,
        "rope_scaling": text.rope_scaling,
        "tokenizer": type(tokenizer).__name__,
        "eos_token": tokenizer.eos_token,
        "ids": ids,
        "logits": logits.tolist(),
    }
    print(json.dumps(result))
