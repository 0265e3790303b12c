"""Tokenizers with the chat templates of published models, which lie in tests/templates."""

from helpers import ROOT
from vl import build_tokenizer

TEMPLATES = ROOT / "tests" / "templates"
END = {"llama-3.1": "<|eot_id|>", "mistral-nemo": "</s>", "devstral": "</s>"}
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
