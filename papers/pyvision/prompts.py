"""Prompts that teach PyVision-RL's protocol, programs between <code> tags: ours, or those of a
published row.

A picture in a prompt stands between <image_clue_i> tags, i being the name that programs know it by.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.data.rows import RowFiles

# Where the picture is: in the prompt; a picture, or a video, that the interpreter alone has.
Mode = Literal["shown", "hidden", "video"]
MODES: dict[str, Mode] = {  # env_name of the release's rows
    "pyvision_gym_w_image_hint": "shown",
    "pyvision_gym_wo_image_hint": "hidden",
    "pyvision_gym_wo_video_hint": "video",
}
MARK = re.compile(r"(?:<image_clue_\d+>)?<image>(?:</image_clue_\d+>)?")
FACTS = re.compile(  # as published; each row has its own numbers there
    r"Image Width: \d+; Image Height: \d+"
    r"|Frame Width: \d+; Frame Height: \d+;\s*Video Length: \d+; Sample FPS: [\d.]+"
)


@dataclass(frozen=True)
class Wording:
    """A prompt without its pictures, cut where the question stands; it has `FACTS` somewhere."""

    before: str
    after: str

    def messages(self, question: str, facts: str, pictures: int = 0) -> list[dict]:
        """The prompt of a question with so many pictures; what these look like is in `facts`."""
        before, after = (FACTS.sub(lambda _: facts, text) for text in (self.before, self.after))
        marks = "<image>" * pictures + "\n" * (pictures > 0)
        return tagged([{"role": "user", "content": f"{marks}{before}{question}{after}"}])


TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
OWN: dict[Mode, Wording] = {
    mode: Wording(TEXTS["before"].format(**TEXTS[mode]), TEXTS["after"]) for mode in MODES.values()
}


def picture_facts(sizes: Sequence[tuple[int, int]]) -> str:
    """sizes: (width, height) of each picture in its file."""
    lines = [f"Image Width: {width}; Image Height: {height}" for width, height in sizes]
    return (
        lines[0]
        if len(lines) == 1
        else "\n".join(f"image_clue_{i}: {line}" for i, line in enumerate(lines))
    )


def video_facts(size: tuple[int, int], length: int, fps: float) -> str:
    frame = f"Frame Width: {size[0]}; Frame Height: {size[1]}"
    return f"{frame};\nVideo Length: {length}; Sample FPS: {fps:.2f}"


def tagged(messages: list[dict]) -> list[dict]:
    """Messages with each <image> between tags that bear its number."""
    count = 0

    def numbered(_: re.Match) -> str:
        nonlocal count
        count += 1
        return f"<image_clue_{count - 1}><image></image_clue_{count - 1}>"

    return [message | {"content": MARK.sub(numbered, message["content"])} for message in messages]


def wordings_like(path: str) -> dict[Mode, Wording]:
    """Of each mode, the wording of the first row that shows where its question stands. ValueError
    if no row does."""
    found: dict[Mode, Wording] = {}
    for record in RowFiles(path, "--like").records():
        mode = MODES.get(str(record.get("env_name"))) if isinstance(record, Mapping) else None
        if mode and mode not in found and (wording := wording_of(record)):
            found[mode] = wording
        if len(found) == len(OWN):
            break
    if not found:
        expected = (
            'with an env_name, extra_info.question in its prompt, and "Image Width: W; '
            'Image Height: H" or so'
        )
        raise ValueError(f"--like {path}: no row {expected}")
    return found


def wording_of(record: Mapping) -> Wording | None:
    """None for a row whose prompt has its question not just once, or no `FACTS`."""
    prompt, info = record.get("prompt"), record.get("extra_info")
    question = info.get("question") if isinstance(info, Mapping) else None
    content = (
        prompt[0].get("content")
        if isinstance(prompt, list) and [*map(type, prompt)] == [dict]
        else None
    )
    if (
        not isinstance(content, str)
        or not isinstance(question, str)
        or not question
        or content.count(question) != 1
    ):
        return None
    before, _, after = content.partition(question)
    wording = Wording(MARK.sub("", before).lstrip("\n"), after)
    return wording if FACTS.search(before) or FACTS.search(after) else None
