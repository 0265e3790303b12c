"""Prompts that teach PyVision-RL's protocol, programs between <code> tags: ours, or those of a
published row.

A picture in a prompt stands between <image_clue_i> tags; image_clue_i is its name in programs.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

from common.data.rows import RowFiles

# Where the picture is: in the prompt; or a picture or a video for the interpreter alone.
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
    """A prompt without its pictures, cut where the question stands; its texts contain `FACTS`."""

    before: str
    after: str

    def messages(self, question: str, facts: str, pictures: int = 0) -> list[dict]:
        """The prompt of a question with so many pictures, whose sizes `facts` gives."""
        # a function: `facts` as a template would have its backslashes read
        before = FACTS.sub(lambda _: facts, self.before)
        after = FACTS.sub(lambda _: facts, self.after)
        marks = "<image>" * pictures
        if pictures:
            marks += "\n"
        return tagged([{"role": "user", "content": f"{marks}{before}{question}{after}"}])


TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
OWN: dict[Mode, Wording] = {
    mode: Wording(TEXTS["before"].format(**TEXTS[mode]), TEXTS["after"]) for mode in MODES.values()
}


def picture_facts(sizes: Sequence[tuple[int, int]]) -> str:
    """sizes: (width, height) of each picture in its file."""
    lines = [f"Image Width: {width}; Image Height: {height}" for width, height in sizes]
    if len(lines) == 1:
        return lines[0]
    return "\n".join(f"image_clue_{i}: {line}" for i, line in enumerate(lines))


def video_facts(size: tuple[int, int], length: int, fps: float) -> str:
    frame = f"Frame Width: {size[0]}; Frame Height: {size[1]}"
    return f"{frame};\nVideo Length: {length}; Sample FPS: {fps:.2f}"


def tagged(messages: list[dict]) -> list[dict]:
    """Messages with each <image> between tags that bear its number."""
    numbers = count()

    def tag(_: re.Match) -> str:
        name = f"image_clue_{next(numbers)}"
        return f"<{name}><image></{name}>"

    return [message | {"content": MARK.sub(tag, message["content"])} for message in messages]


def wordings_like(path: str) -> dict[Mode, Wording]:
    """The wording of each mode, from its first row in which a wording is found. ValueError if no
    row has one."""
    wordings: dict[Mode, Wording] = {}
    for record in RowFiles(path, "--like").records():
        if not isinstance(record, Mapping):
            continue
        mode = MODES.get(str(record.get("env_name")))
        if mode and mode not in wordings:
            wording = wording_of(record)
            if wording:
                wordings[mode] = wording
        if len(wordings) == len(OWN):
            break
    if not wordings:
        raise ValueError(
            f"--like {path}: no row with an env_name, extra_info.question in its prompt, and "
            '"Image Width: W; Image Height: H" or so'
        )
    return wordings


def wording_of(record: Mapping) -> Wording | None:
    """None unless the prompt is one message that has the question exactly once, and `FACTS`."""
    prompt = record.get("prompt")
    info = record.get("extra_info")
    if not isinstance(info, Mapping):
        return None
    if not isinstance(prompt, list) or len(prompt) != 1 or type(prompt[0]) is not dict:
        return None
    question = info.get("question")
    content = prompt[0].get("content")
    if not isinstance(content, str) or not isinstance(question, str) or not question:
        return None
    if content.count(question) != 1:
        return None
    before, _, after = content.partition(question)
    if not FACTS.search(before) and not FACTS.search(after):
        return None
    return Wording(before=MARK.sub("", before).lstrip("\n"), after=MARK.sub("", after))
