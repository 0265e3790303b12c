"""Tokenizers with the chat templates of published models, which lie in tests/templates."""

from helpers import ROOT
from vl import build_tokenizer

TEMPLATES = ROOT / "tests" / "templates"
END = {
    "deepseek-r1": "<｜end▁of▁sentence｜>",
    "devstral": "</s>",
    "gemma-3": "<end_of_turn>",
    "gemma-4": "<turn|>",
    "gpt-oss": "<|return|>",
    "llama-3.1": "<|eot_id|>",
    "mistral-nemo": "</s>",
    "nemotron-nano-v2": "<SPECIAL_12>",
}
SPECIAL = [
    "<|python_tag|>",
    "<|eom_id|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
]


def tokenizer_of(name: str):
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.add_special_tokens({"eos_token": END.get(name, "<|im_end|>")})
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    return tokenizer
