"""The HTML templates of this folder; whatever they are given is escaped, shortened, and never
raises."""

import json
import re
import secrets
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from common.files import replace_file, shorten

MAX_TEXT = 12_000  # characters shown of one text
REPEATED = re.compile(r"(<\|\w{1,40}\|>)\1+")  # <|image_pad|>, hundreds of times
MARKUP = re.compile(r"&lt;(?:/?\w{1,20}|\|\w{1,40}\|)&gt;")  # <think>, escaped
SPACES = str.maketrans({"\t": "    ", "\r": None, "\u00a0": " ", "\u202f": " ", "\u3000": " "})


def shown(value, limit: int = MAX_TEXT) -> str:
    """A text, shortened; the JSON of anything else."""
    try:
        value = f"{value:.5g}" if isinstance(value, float) else value
        text = (
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        )
    except (TypeError, ValueError, RecursionError) as error:
        text = f"({error})"
    text = REPEATED.sub(lambda match: f"{match[1]} × {len(match[0]) // len(match[1])}", text)
    return shorten(text.translate(SPACES), limit)


def marked(text: str) -> Markup:
    """HTML of a text, its special tokens and tags in italics."""
    return Markup(MARKUP.sub(r"<i>\g<0></i>", str(escape(shown(text)))))


OPTIONS = {
    "autoescape": True,
    "trim_blocks": True,
    "lstrip_blocks": True,
    "undefined": StrictUndefined,
}
TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), **OPTIONS)
TEMPLATES.filters |= {"shown": shown, "marked": marked, "g": "{:g}".format}


def render(template: str, **values) -> str:
    """A page that runs the scripts of this folder, which alone know its nonce."""
    return TEMPLATES.get_template(template).render(values, nonce=secrets.token_hex(16))


def save_page(page: Path, text: str) -> None:
    replace_file(
        page, lambda temporary: temporary.write_text(text, encoding="utf-8", errors="replace")
    )
