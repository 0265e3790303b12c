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

from common.look.html import MAX_TEXT, render, save_among_neighbours
from common.look.shades import SHADES, mean_divergence, shaded_spans
from common.pictures import decode
from common.types import FINISH_REASONS

PAGE_PROMPTS = 8  # groups of episodes on the page
# kind -> pixels of the longer side at most, height on the page
SIZES = {"image": (640, 300), "video": (200, 110)}
# as the template of Qwen2.5 offers them
TOOLS = re.compile(r"<tools>\s*(\{.*?)\s*</tools>", re.DOTALL)


def rollout_page(title: str, episodes: list[dict]) -> str:
    """A whole HTML document of episodes, whose keys page.html lists. No text and no picture in them
    raises an error."""
    schemas: list[str] = []
    for episode in episodes:
        for segment in episode["segments"]:
            if segment["role"] == "prompt":
                schemas += TOOLS.findall(segment["text"])
    pictures: dict[tuple, dict] = {}
    by_sample = sorted(episodes, key=lambda episode: episode["sample_index"])
    prepared = [prepare(episode, pictures) for episode in by_sample]
    used_shades: set[int] = set()
    for episode in prepared:
        for segment in episode["segments"]:
            used_shades.update(span.shade for span in segment["spans"])
    return render(
        "page.html",
        title=title,
        episodes=prepared,
        shades=SHADES if used_shades else (),
        has_negative=any(shade < 0 for shade in used_shades),
        schemas=dict.fromkeys(schemas),  # each once
        pictures=pictures.values(),
    )


def prepare(episode: dict, pictures: dict) -> dict:
    """An episode with what the template needs besides. `pictures` grows by those of the episode."""
    segments = []
    for segment in episode["segments"]:
        text = segment["text"]
        if segment["role"] == "prompt":
            text = TOOLS.sub("<tools> at the top of this page </tools>", text)
        segments.append({"spans": []} | segment | {"text": text})
    strips = [strip(episode, index, pictures) for index in range(len(episode["media"]))]
    score = episode["score"]
    hue = round(120 * min(1, max(0, score))) if isfinite(score) else None  # red 0, green 120
    defaults = {
        "row": None,
        "truth": None,
        "finish": None,
        "divergence": None,
        "teacher_prompt": None,
    }
    return defaults | episode | {"segments": segments, "strips": strips, "score_hue": hue}


def strip(episode: dict, index: int, pictures: dict) -> dict:
    """An image, or the frames of a video, with the boxes and choices of the calls that targeted it.

    Pictures are numbered as tools count them: from 1 over the whole trajectory, each frame of a
    video by itself.
    """
    medium = episode["media"][index]
    max_side, height = SIZES[medium["kind"]]
    frames = []
    for data in medium["frames"]:
        if (data, max_side) not in pictures:
            name = f"picture{len(pictures)}"
            pictures[data, max_side] = embed(data, max_side) | {"name": name}
        frames.append(pictures[data, max_side])
    looks = []
    for number, call in enumerate(episode["calls"], start=1):
        if call["info"].get("target") == index:
            looks.append(look(number, call["info"]))
    num_before = sum(len(earlier["frames"]) for earlier in episode["media"][:index])
    return medium | {"first": num_before + 1, "height": height, "frames": frames, "looks": looks}


def look(number: int, info: dict) -> dict:
    """What a call did with its target; the `info` of a user's tool may hold anything."""
    frames = info.get("frames")
    if not isinstance(frames, list):
        frames = []
    result = {"number": number, "frames": frames, "box": None}
    try:
        x1, y1, x2, y2 = (min(1.0, max(0.0, x)) for x in info["box"])
    except (KeyError, TypeError, ValueError):
        return result
    result["box"] = {"x": x1, "y": y1, "width": x2 - x1, "height": y2 - y1}
    result["frame"] = info.get("frame")
    return result


def embed(data: bytes, max_side: int) -> dict:
    """A picture of at most `max_side` pixels as a data URI, or the reason why there is none."""
    try:
        image = decode(data)
    except ValueError as error:
        return {"problem": str(error)[:60], "size": (400, 200)}
    image.thumbnail((max_side, max_side))
    kind = "png" if image.getcolors(256) else "jpeg"  # few colours: a diagram
    file = io.BytesIO()
    image.save(file, kind)
    uri = f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"problem": None, "uri": uri, "size": image.size}


def write_page(dump: Path, tokenizer, page: Path | None = None) -> None:
    """Write the page of a dump (common/rollout/dumps.py): the first groups of its episodes, with
    their pictures. page: where; by default beside the dump."""
    page = page or dump.with_suffix(".html")
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        rows = read_groups(dump)
        if not rows:
            raise pa.ArrowInvalid(f"{dump} has no rows")
        pictures = read_pictures(dump, rows)
        episodes = [page_episode(row, pictures, tokenizer) for row in rows]
        title = f"{dump.absolute().parent.parent.name}, step {rows[0]['step']}"
        save_among_neighbours(page, rollout_page(title, episodes))
    except (OSError, pa.ArrowException) as error:
        # a full disk, or half a file, costs the page, not the run
        print(f"warning: {page} not written ({error})", flush=True)


def read_groups(dump: Path) -> list[dict]:
    """The rows of the first PAGE_PROMPTS prompts."""
    column = pq.read_table(dump, columns=["prompt_index"])["prompt_index"]
    prompts = sorted(column.unique().to_pylist())[:PAGE_PROMPTS]
    return pq.read_table(dump, filters=[("prompt_index", "in", prompts)]).to_pylist()


def read_pictures(dump: Path, rows: list[dict]) -> dict[str, bytes]:
    """{name: encoded bytes} of the pictures of these rows, from the files of all ranks."""
    names = set()
    for row in rows:
        for medium in json.loads(row["media"]):
            names.update(medium["frames"])
    if not names:  # Arrow cannot look for members of an empty set
        return {}
    pictures: dict[str, bytes] = {}
    for path in sorted(dump.parent.glob(f"{dump.stem}.media_*.parquet")):
        table = pq.read_table(path, filters=[("hash", "in", names)]).to_pydict()
        pictures.update(zip(table["hash"], table["bytes"]))
    return pictures


def page_episode(row: dict, pictures: dict[str, bytes], tokenizer) -> dict:
    """The episode of a dump's row, with the keys that page.html lists."""
    calls = json.loads(row["calls"])
    media = []
    for medium, size in zip(json.loads(row["media"]), row["shown"]):
        frames = [pictures.get(name, b"") for name in medium["frames"]]
        media.append(medium | {"frames": frames, "shown": size})
    rewards = json.loads(row["rewards"]) | json.loads(row.get("terms") or "{}")
    if row["model_reward"] is not None:
        rewards["--reward-model"] = row["model_reward"]
    return row | {
        "rewards": rewards,
        "calls": calls,
        "media": media,
        "segments": segments_of(row, calls, len(media), tokenizer),
        "divergence": mean_divergence(row.get("divergences"), row["loss_mask"]),
        "teacher_prompt": tokenizer.decode(row.get("teacher_prompt_ids") or []),
        "finish": FINISH_REASONS.get(row["finish_reason"]),
    }


def segments_of(row: dict, calls: list[dict], num_media: int, tokenizer) -> list[dict]:
    """The prompt, then turns of the policy and observations, each with the indices of its media;
    turns also with spans, if there are divergences."""
    num_in_prompt = num_media - sum(call["media"] for call in calls)
    prompt = {"role": "prompt", "text": row["prompt"], "media": list(range(num_in_prompt))}
    segments = [prompt]
    next_medium = num_in_prompt
    divergences = row.get("divergences")
    media_of_turn = {call["turn"]: call["media"] for call in calls}
    turn = -1
    start = 0
    for sampled, run in groupby(row["loss_mask"]):
        end = start + len(list(run))
        ids = row["response_ids"][start:end]
        text = tokenizer.decode(ids)
        if sampled:
            turn += 1
            segment = {"role": "policy", "text": text, "media": []}
            if divergences:
                segment["spans"] = shaded_spans(ids, divergences[start:end], tokenizer, MAX_TEXT)
            segments.append(segment)
        else:
            num_new = media_of_turn.get(turn, 0)  # a function of --environment makes no call
            indices = list(range(next_medium, next_medium + num_new))
            next_medium += num_new
            segments.append({"role": "observation", "text": text, "media": indices})
        start = end
    return segments
