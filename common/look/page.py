"""Rollouts as one HTML page without scripts or other files: turns, tool calls, and where the model
looked."""

import base64
import io
import json
import re
from itertools import groupby
from math import isfinite
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from common.look.html import render, save_page
from common.pictures import decode

PAGE_PROMPTS = 8  # groups of episodes on the page
# pixels of the longer side at most; height on the page
SIZE = {"image": (640, 300), "video": (200, 110)}
# as the template of Qwen2.5 offers them
TOOLS = re.compile(r"<tools>\s*(\{.*?)\s*</tools>", re.DOTALL)
NAVIGATION = re.compile(r"<nav>.*?</nav>")


def rollout_page(title: str, episodes: list[dict]) -> str:
    """A whole HTML document of episodes as page.html has them; whatever texts and pictures hold,
    nothing raises."""
    pictures: dict[tuple, dict] = {}
    texts = [s["text"] for e in episodes for s in e["segments"] if s["role"] == "prompt"]
    schemas = dict.fromkeys(schema for text in texts for schema in TOOLS.findall(text))
    prepared = [prepare(e, pictures) for e in sorted(episodes, key=lambda e: e["sample_index"])]
    return render(
        "page.html", title=title, episodes=prepared, schemas=schemas, pictures=pictures.values()
    )


def prepare(episode: dict, pictures: dict) -> dict:
    """An episode with what the template wants to know besides."""
    segments, score = [], episode["score"]
    for s in episode["segments"]:
        text = (
            TOOLS.sub("<tools> at the top of this page </tools>", s["text"])
            if s["role"] == "prompt"
            else s["text"]
        )
        segments.append(s | {"text": text})
    strips = [strip(episode, index, pictures) for index in range(len(episode["media"]))]
    hue = round(120 * min(1, max(0, score))) if isfinite(score) else None
    known = {"row": None, "truth": None, "finish": None} | episode
    return known | {"segments": segments, "strips": strips, "score_hue": hue}


def strip(episode: dict, index: int, pictures: dict) -> dict:
    """An image, or the frames of a video; with the boxes and the choices of the calls that had it
    as their target.

    They are numbered as tools count: from 1 over the whole trajectory, each frame of a video having
    its own number.
    """
    medium = episode["media"][index]
    side, height = SIZE[medium["kind"]]
    for data in medium["frames"]:
        if (data, side) not in pictures:
            pictures[data, side] = embed(data, side) | {"name": f"picture{len(pictures)}"}
    return medium | {
        "first": 1 + sum(len(m["frames"]) for m in episode["media"][:index]),
        "height": height,
        "frames": [pictures[data, side] for data in medium["frames"]],
        "looks": [
            look(n, c["info"])
            for n, c in enumerate(episode["calls"], 1)
            if c["info"].get("target") == index
        ],
    }


def look(number: int, info: dict) -> dict:
    """What a call did with its target; a user's tool may have its own idea of `info`."""
    frames = info.get("frames")
    look = {"number": number, "frames": frames if isinstance(frames, list) else [], "box": None}
    try:
        x1, y1, x2, y2 = (min(1.0, max(0.0, x)) for x in info["box"])
        box = {"x": x1, "y": y1, "width": x2 - x1, "height": y2 - y1}
        return look | {"box": box, "frame": info.get("frame")}
    except (KeyError, TypeError, ValueError):
        return look


def embed(data: bytes, side: int) -> dict:
    """A picture of at most `side` pixels, or the reason why not."""
    try:
        image = decode(data)
    except ValueError as error:
        return {"problem": str(error)[:60], "size": (400, 200)}
    image.thumbnail((side, side))
    kind = "png" if image.getcolors(256) else "jpeg"  # few colours: a diagram
    image.save(file := io.BytesIO(), kind)
    uri = f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"problem": None, "uri": uri, "size": image.size}


def write_page(dump: Path, tokenizer) -> None:
    """The .html beside a dump (common/rollout/dumps.py): the first groups of its episodes, with
    their pictures."""
    try:
        prompts = pq.read_table(dump, columns=["prompt_index"])["prompt_index"].unique().to_pylist()
        rows = pq.read_table(
            dump, filters=[("prompt_index", "in", sorted(prompts)[:PAGE_PROMPTS])]
        ).to_pylist()
        wanted = {name for row in rows for m in json.loads(row["media"]) for name in m["frames"]}
        pictures: dict[str, bytes] = {}
        for file in sorted(dump.parent.glob(f"{dump.stem}.media_*.parquet")):
            table = pq.read_table(file, filters=[("hash", "in", wanted)]).to_pydict()
            pictures |= zip(table["hash"], table["bytes"])
        title = f"{dump.absolute().parent.parent.name}, step {rows[0]['step']}"
        page = dump.with_suffix(".html")
        save_with_links(page, rollout_page(title, page_episodes(rows, pictures, tokenizer)))
        for neighbour in neighbours(page).values():
            save_with_links(neighbour, neighbour.read_text(errors="replace"))
    except (OSError, pa.ArrowInvalid) as error:
        # a full disk, or half a file, costs the page, not the run
        print(f"warning: {dump.with_suffix('.html')} not written ({error})", flush=True)


def neighbours(page: Path) -> dict[str, Path]:
    """The pages of the dumps before and after that of a page, as far as they are there."""
    pages = sorted(
        {page, *(path for path in page.parent.glob(f"step_{'[0-9]' * 6}.html") if path.is_file())}
    )
    place = pages.index(page)
    return dict(zip(["previous"], pages[:place][-1:])) | dict(zip(["next"], pages[place + 1 :]))


def save_with_links(page: Path, text: str) -> None:
    """Write it with the links to its neighbours, which may have come or gone."""
    links = [
        f'<a href="{p.name}">{name}: step {int(p.stem[5:])}</a>'
        for name, p in neighbours(page).items()
    ]
    save_page(page, NAVIGATION.sub(f"<nav>{''.join(links)}</nav>", text, count=1))


def page_episodes(rows: list[dict], files: dict[str, bytes], tokenizer) -> list[dict]:
    """What `rollout_page` wants to know of each episode."""
    from common.types import FINISH_REASONS

    episodes = []
    for row in rows:
        calls = json.loads(row["calls"])
        media = [
            m | {"frames": [files.get(name, b"") for name in m["frames"]]}
            for m in json.loads(row["media"])
        ]
        media = [m | {"shown": shown} for m, shown in zip(media, row["shown"])]
        shown = iter(range(len(media)))
        prompt_media = [
            next(shown) for _ in range(len(media) - sum(call["media"] for call in calls))
        ]
        segments = [{"role": "prompt", "text": row["prompt"], "media": prompt_media}]
        media_of_turn, turn = {call["turn"]: call["media"] for call in calls}, -1
        ids = iter(row["response_ids"])
        for sampled, part in groupby(row["loss_mask"]):
            text = tokenizer.decode([next(ids) for _ in part])
            turn += sampled
            # a function answers without a call
            added = 0 if sampled else media_of_turn.get(turn, 0)
            numbers = [next(shown) for _ in range(added)]
            segments.append(
                {"role": "policy" if sampled else "observation", "text": text, "media": numbers}
            )
        judged = {} if row["model_reward"] is None else {"--reward-model": row["model_reward"]}
        episode = row | {
            "rewards": json.loads(row["rewards"]) | judged,
            "calls": calls,
            "media": media,
        }
        episodes.append(
            episode | {"segments": segments, "finish": FINISH_REASONS.get(row["finish_reason"])}
        )
    return episodes
