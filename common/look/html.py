"""The HTML templates of this folder. Values of any kind are escaped and shortened; none of them
raises an error."""

import json
import os
import re
import secrets
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from common.files import replace_file, shorten

MAX_TEXT = 12_000  # characters of one text on a page
REPEATED = re.compile(r"(<\|\w{1,40}\|>)\1+")  # <|image_pad|>, hundreds of times
MARKUP = re.compile(r"&lt;(?:/?\w{1,20}|\|\w{1,40}\|)&gt;")  # <think>, escaped
NAVIGATION = re.compile(r"<nav>.*?</nav>")
SPACES = str.maketrans({"\t": "    ", "\r": None})


def to_text(value, limit: int = MAX_TEXT) -> str:
    """A text, shortened; a float with five digits; of anything else its JSON."""
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
    """A page. With `nonce` a template can allow the scripts of this folder alone to run in it."""
    return TEMPLATES.get_template(template).render(values, nonce=secrets.token_hex(16))


def save_page(page: Path, text: str) -> None:
    replace_file(
        page, lambda temporary: temporary.write_text(text, encoding="utf-8", errors="replace")
    )


def save_among_neighbours(page: Path, text: str) -> None:
    """Write a page with links to its neighbours, and renew the links of these."""
    save_with_links(page, text)
    for neighbour in neighbours(page).values():
        modified_ns = neighbour.stat().st_mtime_ns
        save_with_links(neighbour, neighbour.read_text("utf-8", errors="replace"))
        os.utime(neighbour, ns=(modified_ns, modified_ns))  # what it shows is as old as before


def neighbours(page: Path) -> dict[str, Path]:
    """The pages of the previous and the next step in its folder, as far as they exist."""
    pages = {page}
    for path in page.parent.glob(f"step_{'[0-9]' * 6}.html"):
        if path.is_file():
            pages.add(path)
    in_order = sorted(pages)
    place = in_order.index(page)
    neighbour_pages = {}
    if place > 0:
        neighbour_pages["previous"] = in_order[place - 1]
    if place + 1 < len(in_order):
        neighbour_pages["next"] = in_order[place + 1]
    return neighbour_pages


def save_with_links(page: Path, text: str) -> None:
    """Write a page with links to its neighbours as they are now."""
    links = ""
    for name, path in neighbours(page).items():
        step = int(path.stem.removeprefix("step_"))
        links += f'<a href="{path.name}">{name}: step {step}</a>'
    save_page(page, NAVIGATION.sub(f"<nav>{links}</nav>", text, count=1))
