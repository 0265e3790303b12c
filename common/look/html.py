"""The HTML templates of this folder. Values of any kind are escaped and shortened; none of them
raises an error."""

import json
import re
import secrets
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from common.files import replace_file, shorten

MAX_TEXT = 12_000  # characters of one text on a page
REPEATED = re.compile(r"(<\|\w{1,40}\|>)\1+")  # <|image_pad|>, hundreds of times
MARKUP = re.compile(r"&lt;(?:/?\w{1,20}|\|\w{1,40}\|)&gt;")  # <think>, escaped
SPACES = str.maketrans({"\t": "    ", "\r": None})


def to_text(value, limit: int = MAX_TEXT) -> str:
    """A text, shortened; of anything else its JSON."""
    try:
        if isinstance(value, float):
            text = f"{value:.5g}"
        elif isinstance(value, str):
            text = value
        else:
            text = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        text = f"({error})"
    text = REPEATED.sub(count_repeats, text)
    return shorten(text.translate(SPACES), limit)


def count_repeats(match: re.Match) -> str:
    token = match[1]
    return f"{token} × {len(match[0]) // len(token)}"


def to_markup(text: str) -> Markup:
    """HTML of a text, with its special tokens and tags in italics."""
    return Markup(MARKUP.sub(r"<i>\g<0></i>", str(escape(to_text(text)))))


TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
TEMPLATES.filters["shown"] = to_text
TEMPLATES.filters["marked"] = to_markup
TEMPLATES.filters["g"] = "{:g}".format


def render(template: str, **values) -> str:
    """A page; its nonce allows the scripts of this folder alone to run in it."""
    return TEMPLATES.get_template(template).render(values, nonce=secrets.token_hex(16))


def save_page(page: Path, text: str) -> None:
    replace_file(
        page, lambda temporary: temporary.write_text(text, encoding="utf-8", errors="replace")
    )
