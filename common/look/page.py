"""Rollouts as one HTML page without scripts or other files: turns, tool calls, and where the model looked."""

import base64
import html
import io
import json
import re
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from common.files import replace_file, shorten
from common.pictures import decode

PAGE_PROMPTS = 8  # groups of episodes on the page
MAX_TEXT = 12_000  # characters shown of one text
SIZE = {"image": (640, 300), "video": (200, 110)}  # pixels of the longer side at most; height on the page
REPEATED = re.compile(r"(<\|\w{1,40}\|>)\1+")  # <|image_pad|>, hundreds of times
MARKUP = re.compile(r"&lt;(?:/?\w{1,20}|\|\w{1,40}\|)&gt;")  # <think>, escaped
TOOLS = re.compile(r"<tools>\s*(\{.*?)\s*</tools>", re.DOTALL)  # as the template of Qwen2.5 offers them
ABOVE = "<tools> at the top of this page </tools>"
NAVIGATION = re.compile(r"<nav>.*?</nav>")
SPACES = str.maketrans({"\t": "    ", "\r": None, "\u00a0": " ", "\u202f": " ", "\u3000": " "})
STYLE = """
:root { color-scheme: light dark; --dim: color-mix(in srgb, CanvasText 62%, Canvas); --line: #8886; --prompt: #888;
  --policy: #3b7ff0; --observation: #14967f; --call: #8b5cf6; --error: #e0434b; --truth: #b7791f }
.error { color: var(--error) } nav { display: flex; gap: 1.5rem } p { margin: .4rem 0 }
body { max-width: 75rem; margin: auto; padding: 1.5rem; font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h2 { margin: 2.5rem 0 .6rem } h3 { margin: 0; font-size: .8rem; color: var(--edge) } figure { margin: .4rem 0 }
i, th, figcaption { color: var(--dim); font-size: .82rem; font-weight: normal } figcaption { width: 100% }
b { background: #767e88; color: #fff; border-radius: 5px; padding: 0 .45rem; font: 600 .8rem/1.5rem system-ui }
details { border: 1px solid var(--line); border-radius: 8px; margin-top: .6rem } article > div { flex: 1 30rem }
summary { display: flex; gap: .6rem; align-items: center; padding: .5rem .8rem; cursor: pointer; white-space: nowrap }
summary i { flex: 1; overflow: hidden; text-overflow: ellipsis } aside figure > svg:not(:only-of-type) { width: 31% }
article { display: flex; flex-wrap: wrap; gap: 1.2rem; padding: 0 .8rem .5rem }
aside { flex: 0 25em; align-self: start; position: sticky; top: 0 } figure { display: flex; flex-wrap: wrap; gap: 7px }
.turn { border-left: 3px solid var(--edge); padding: .2rem .8rem; margin: .8rem 0 } h3 b { margin-right: .4rem }
th, td { text-align: left; vertical-align: top; padding-right: .9rem; font-size: .85rem; white-space: pre-wrap }
pre { margin: 0 0 .4rem; font: inherit; white-space: pre-wrap; max-height: 34em; overflow: auto }
figure > svg { max-width: 100%; height: auto; background: #888 } figure:has(.chosen) > svg:not(.chosen) { opacity: .5 }
rect { fill: none; stroke-width: 3px; vector-effect: non-scaling-stroke } .chosen { outline: 3px solid var(--call) }
details > pre { padding: 0 .8rem } .shared { position: absolute; width: 0; height: 0 }
text { font-weight: 700; fill: #fff; stroke: #000; stroke-width: .2em; paint-order: stroke }
"""


def rollout_page(title: str, episodes: list[dict]) -> str:
    """A whole HTML document. An episode is a dict with these keys; whatever texts and pictures hold, nothing raises.

    prompt_index, sample_index, finish_reason, score (may be nan), advantage (or None), rewards {name: number or str}
    segments  [{role "prompt" | "policy" | "observation", text, media: indices of what it shows}]
    media     [{kind "image" | "video", frames: encoded bytes, shown: [w, h] pixels}]
    calls     [{turn: which one of the policy, from 0; name, arguments, text, error; info: {} or target: index of
              media, with box: [x1, y1, x2, y2] from 0 to 1, and of a video its frame, or with frames; from 1}]
    and, if they are known: row (which one of the data), truth, finish (the reason in words)
    """
    body, pictures, prompt = "", {}, None
    for episode in sorted(episodes, key=lambda e: (e["prompt_index"], e["sample_index"])):
        is_first, prompt = episode["prompt_index"] != prompt, episode["prompt_index"]
        body += heading(episode, pictures) if is_first else ""
        body += sample(episode, pictures, is_open=is_first)
    shared = tag("svg", tag("defs", *(p.element for p in pictures.values())), class_="shared")
    head = tag("meta", charset="utf-8") + tag("meta", name="viewport", content="width=device-width")
    head += tag("title", shown(title)) + tag("style", STYLE)
    body = tag("h1", shown(title)) + tag("nav") + tools_on_offer(episodes) + shared + body
    return f"<!doctype html>{tag('html', tag('head', head), tag('body', body), lang='en')}\n"


def tag(name: str, /, *content: str, **attributes: object) -> str:
    """An element. content: HTML; attributes: texts, or True and None, to be there and not; class_ and font_size."""
    start = name
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            start += f" {key}"
        elif value is not None:
            start += f' {key}="{html.escape(str(value))}"'
    return f"<{start}>" if name == "meta" else f"<{start}>{''.join(content)}</{name}>"


def tools_on_offer(episodes: list[dict]) -> str:
    """The schemas that prompts begin with: once for all prompts that have the same."""
    prompts = [s["text"] for e in episodes for s in e["segments"] if s["role"] == "prompt"]
    schemas = dict.fromkeys(schema for text in prompts for schema in TOOLS.findall(text))
    return "".join(tag("details", tag("summary", "tools"), tag("pre", shown(schema))) for schema in schemas)


def heading(episode: dict, pictures: dict) -> str:
    """What the samples of a group share: the prompt, and the truth."""
    row, truth = episode.get("row"), episode.get("truth")
    text = f"Prompt {episode['prompt_index']}" + ("" if row is None else f", row {row}")
    known = card("truth", "truth", tag("pre", shown(truth))) if truth else ""
    return tag("h2", text) + transcript(episode, ["prompt"], pictures) + known


def sample(episode: dict, pictures: dict, is_open: bool) -> str:
    score, advantage, reason = episode["score"], episode["advantage"], episode["finish_reason"]
    tags = badge(f"score {score:.3g}", 120 * min(1, max(0, score)) if isfinite(score) else None)
    gain = "not trained on" if advantage is None else f"advantage {advantage:+.3g}"
    tags += badge(gain, 120 * (advantage > 0) if advantage else None)
    tags += badge(reason, None if reason == "stop" else 35)
    last = "".join(segment["text"] for segment in episode["segments"][-1:])[-200:]
    summary = tag("summary", f"sample {episode['sample_index']}", tags, tag("i", shown(last)))

    finish = tag("p", shown(f"{reason}: {episode['finish']}")) if episode.get("finish") else ""
    targets = [call["info"].get("target") for call in episode["calls"]]
    looked = [figure(episode, i, pictures, episode["calls"]) for i in range(len(episode["media"])) if i in targets]
    aside = tag("aside", finish, shown(episode["rewards"]), *looked)
    turns = tag("div", transcript(episode, ["policy", "observation"], pictures))
    return tag("details", summary, tag("article", turns, aside), open=is_open or None)


def badge(text: str, hue: float | None) -> str:
    return tag("b", shown(text), style=None if hue is None else f"background: hsl({hue:.0f} 65% 32%)")


def card(kind: str, heading: str, content: str) -> str:
    """kind: a colour of STYLE; heading and content are HTML."""
    return tag("div", tag("h3", heading), content, class_=f"turn {kind}", style=f"--edge: var(--{kind})")


def transcript(episode: dict, roles: list[str], pictures: dict) -> str:
    """The segments of these roles, and after a turn its calls; what they returned is part of the next observation."""
    cards, turns = "", 0
    for role, segment in [(s["role"], s) for s in episode["segments"] if s["role"] in roles]:
        text = TOOLS.sub(ABOVE, segment["text"]) if role == "prompt" else segment["text"]
        text = MARKUP.sub(r"<i>\g<0></i>", shown(text))
        figures = [figure(episode, index, pictures) for index in segment["media"]]
        cards += card(role, f"policy {turns + 1}" if role == "policy" else role, tag("pre", text) + "".join(figures))
        for number, call in enumerate(episode["calls"], 1):
            if role == "policy" and call["turn"] == turns:
                error = tag("pre", shown(call["text"]) if call["error"] else "")
                title = badge(str(number), number * 137 % 360) + shown(call["name"])
                cards += card("error" if call["error"] else "call", title, shown(call["arguments"]) + error)
        turns += role == "policy"
    return cards


def figure(episode: dict, index: int, pictures: dict, calls: list[dict] | tuple = ()) -> str:
    """An image, or the frames of a video, with the boxes and the choices of the calls that had it as their target.

    They are numbered as tools count: from 1 over the whole trajectory, each frame of a video having its own number.
    """
    medium, strip = episode["media"][index], ""
    first = 1 + sum(len(m["frames"]) for m in episode["media"][:index])
    infos = [(n, call["info"]) for n, call in enumerate(calls, 1) if call["info"].get("target") == index]
    for place, data in enumerate(medium["frames"], 1):
        key = data, SIZE[medium["kind"]][0]
        if key not in pictures:
            pictures[key] = embed(*key, f"picture{len(pictures)}")
        label = str(first + place - 1) if medium["kind"] == "video" else ""
        strip += frame(pictures[key], place, SIZE[medium["kind"]][1], label, infos)
    last = first + len(medium["frames"]) - 1
    numbers = f"image {first}" if medium["kind"] == "image" else f"video, images {first} to {last}"
    size = "{} × {}".format(*medium["shown"])
    return tag("figure", strip, tag("figcaption", f"{numbers}, shown to the model at {size}"))


def frame(picture: "Picture", place: int, tall: int, label: str, infos: list[tuple[int, dict]]) -> str:
    """A picture, the frame at a place of its medium. infos: what calls had to say of the medium, by their number."""
    w, h = picture.size
    em, drawn, chosen = 18 * h / tall, "", False
    for number, info in infos:
        try:
            if place in info.get("frames", ()):
                label, chosen = f"{label} (call {number})", True
            x1, y1, x2, y2 = (min(1.0, max(0.0, x)) for x in info["box"] if info.get("frame", place) == place)
        except (KeyError, TypeError, ValueError):  # no box, not in this frame, or a user's tool has its own idea
            continue
        color = f"hsl({number * 137 % 360} 95% 60%)"
        box = tag("rect", x=f"{x1:g}", y=f"{y1:g}", width=f"{x2 - x1:g}", height=f"{y2 - y1:g}", stroke=color)
        drawn += tag("svg", box, viewBox="0 0 1 1", preserveAspectRatio="none")
        drawn += tag("text", str(number), x=f"{x1 * w + em / 4:g}", y=f"{y1 * h + em:g}")
    return tag(
        "svg",
        tag("use", href=f"#{picture.name}"),
        drawn,
        tag("text", label, x="2%", y="96%"),
        viewBox=f"0 0 {w} {h}",
        width=f"{w * tall / h:.0f}",
        font_size=f"{em:g}",
        class_="chosen" if chosen else None,
    )


class Picture(NamedTuple):
    element: str  # of SVG
    name: str  # to use it by
    size: tuple[int, int]


def embed(data: bytes, side: int, name: str) -> Picture:
    """A picture of at most `side` pixels, or the reason why not."""
    try:
        image = decode(data)
    except ValueError as error:
        return Picture(tag("text", shown(str(error)[:60]), id=name, x=9, y=99, font_size=11), name, (400, 200))
    image.thumbnail((side, side))
    kind = "png" if image.getcolors(256) else "jpeg"  # few colours: a diagram
    image.save(file := io.BytesIO(), kind)
    uri = f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
    return Picture(tag("image", id=name, width=image.width, height=image.height, href=uri), name, image.size)


def shown(value, in_table: bool = False) -> str:
    """HTML of a text, shortened; a table of a dict; the JSON of anything else."""
    try:
        if isinstance(value, dict) and not in_table:
            rows = [tag("tr", tag("th", shown(str(k))), tag("td", shown(v, True))) for k, v in value.items()]
            return tag("table", *rows)
        value = f"{value:.5g}" if isinstance(value, float) else value
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError) as error:
        text = f"({error})"
    text = REPEATED.sub(lambda match: f"{match[1]} × {len(match[0]) // len(match[1])}", text)
    return html.escape(shorten(text.translate(SPACES), MAX_TEXT))


def write_page(dump: Path, tokenizer) -> None:
    """The .html beside a dump (common/data/dumps.py): the first groups of its episodes, with their pictures."""
    try:
        prompts = pq.read_table(dump, columns=["prompt_index"])["prompt_index"].unique().to_pylist()
        rows = pq.read_table(dump, filters=[("prompt_index", "in", sorted(prompts)[:PAGE_PROMPTS])]).to_pylist()
        wanted = {name for row in rows for m in json.loads(row["media"]) for name in m["frames"]}
        pictures: dict[str, bytes] = {}
        for file in sorted(dump.parent.glob(f"{dump.stem}.media_*.parquet")):
            table = pq.read_table(file, filters=[("hash", "in", wanted)]).to_pydict()
            pictures |= zip(table["hash"], table["bytes"])
        title = f"{dump.absolute().parent.parent.name}, step {rows[0]['step']}"
        page = dump.with_suffix(".html")
        save_page(page, rollout_page(title, page_episodes(rows, pictures, tokenizer)))
        for neighbour in neighbours(page).values():
            save_page(neighbour, neighbour.read_text(errors="replace"))
    except (OSError, pa.ArrowInvalid) as error:  # a full disk, or half a file, costs the page, not the run
        print(f"warning: {dump.with_suffix('.html')} not written ({error})", flush=True)


def neighbours(page: Path) -> dict[str, Path]:
    """The pages of the dumps before and after that of a page, as far as they are there."""
    pages = sorted({*page.parent.glob("step_??????.html"), page})
    place = pages.index(page)
    return dict(zip(["previous"], pages[:place][-1:])) | dict(zip(["next"], pages[place + 1 :]))


def save_page(page: Path, text: str) -> None:
    """Write it with the links to its neighbours, which may have come or gone."""
    links = [tag("a", f"{name}: step {int(path.stem[5:])}", href=path.name) for name, path in neighbours(page).items()]
    text = NAVIGATION.sub(tag("nav", *links), text, count=1)
    replace_file(page, lambda temporary: temporary.write_text(text, errors="replace"))


def page_episodes(rows: list[dict], files: dict[str, bytes], tokenizer) -> list[dict]:
    """What `rollout_page` wants to know of each episode."""
    from common.episodes import FINISH_REASONS  # which needs torch, as a page does not

    episodes = []
    for row in rows:
        calls = json.loads(row["calls"])
        media = [m | {"frames": [files.get(name, b"") for name in m["frames"]]} for m in json.loads(row["media"])]
        media = [m | {"shown": shown} for m, shown in zip(media, row["shown"])]
        shown = iter(range(len(media)))
        prompt_media = [next(shown) for _ in range(len(media) - sum(call["media"] for call in calls))]
        segments = [{"role": "prompt", "text": row["prompt"], "media": prompt_media}]
        answers = iter(calls)
        ids = iter(row["response_ids"])
        for sampled, part in groupby(row["loss_mask"]):
            text = tokenizer.decode([next(ids) for _ in part])
            added = 0 if sampled else next(answers, {"media": 0})["media"]  # --mask-truncated masks what was sampled
            numbers = [next(shown) for _ in range(added)]
            segments.append({"role": "policy" if sampled else "observation", "text": text, "media": numbers})
        keys = ("prompt_index", "sample_index", "finish_reason", "score", "advantage")
        model_reward = row.get("model_reward")  # older dumps lack it, row and truth
        judged = {} if model_reward is None else {"--reward-model": model_reward}
        episode = {key: row[key] for key in keys} | {"rewards": json.loads(row["rewards"]) | judged, "calls": calls}
        episode |= {"row": row.get("row"), "truth": row.get("truth")}
        episode |= {"finish": FINISH_REASONS.get(row["finish_reason"])}
        episodes.append(episode | {"segments": segments, "media": media})
    return episodes
