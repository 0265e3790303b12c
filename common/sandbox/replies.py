"""Checks of what a sandbox's child has sent. A program can write to the child's socket, too: it may
claim nothing that it could not have printed or drawn."""

import contextlib
import io
import json

from PIL import Image

from common.sandbox.interpreter import MAX_FIGURES, check_size
from common.types import ToolReply, trim

MAX_JSON = 2**16  # bytes of a reply without its figures
MAX_HEADERS = 2**17  # bytes of a figure before its data


def parse_reply(message: bytes) -> ToolReply | None:
    """The reply in a message: JSON, then a line feed and the figures. None if it is malformed."""
    head, _, figures = message.partition(b"\n")
    if len(head) > MAX_JSON:
        return None
    try:
        fields = json.loads(head)
    except (ValueError, RecursionError):
        return None
    match fields:
        case {"text": str(text), "error": str(error), "figures": list(sizes)}:
            pngs = split_figures(figures, sizes)
        case _:
            return None
    if pngs is None:
        return None
    acted = bool(text.strip() or pngs) and not error  # else the call earns no --tool-bonus
    parts = [text]
    if error:
        parts.append(f"Execution error: {error}")
    return ToolReply(
        trim("\n".join(filter(None, parts))),
        pngs,
        error=bool(error),
        info={"ended": True, "acted": acted},
        role="user",
    )


def split_figures(figures: bytes, sizes: list) -> list[bytes] | None:
    """The PNGs, which have these sizes in bytes. None if one of them cannot be shown, or if the
    sizes are wrong."""
    if len(sizes) > MAX_FIGURES or any(type(size) is not int or size < 1 for size in sizes):
        return None
    pngs = []
    start = 0
    for size in sizes:
        pngs.append(figures[start : start + size])
        start += size
    if sum(sizes) != len(figures) or not all(map(can_be_shown, pngs)):
        return None
    return pngs


def can_be_shown(png: bytes) -> bool:
    """Whether it is a PNG of a size that a program can draw. A forged one may have several headers:
    Pillow goes by the last."""
    with contextlib.suppress(Exception):  # whatever Pillow runs into
        image = Image.open(io.BytesIO(png[:MAX_HEADERS]), formats=["PNG"])
        check_size(*image.size)
        return True
    return False


def failed_block(reason: str) -> ToolReply:
    """The reply to a block that did not end, or never began: the state is that before it."""
    text = trim(f"Execution error: {reason}; variables are as before this block")
    return ToolReply(text, error=True, role="user", info={"ended": False, "acted": False})
