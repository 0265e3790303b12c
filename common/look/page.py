"""Rollouts as one HTML page without scripts or other files: turns, tool calls, and where the model looked."""

import base64
import html
import io
import json
import re
from itertools import groupby
from math import isfinite
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from common.files import replace_file, shorten
from common.pictures import decode

PAGE_PROMPTS = 8  # groups of episodes on the page
MAX_TEXT = 12_000  # characters shown of one text
SIZE = {"image": (640, 300), "video": (200, 110)}  # pixels of the longer side at most; height on the page
REPEATED = re.compile(r"(<\|\w{1,40}\|>)\1+")  # <|image_pad|>, hundreds of times
TAG = re.compile(r"&lt;(?:/?\w{1,20}|\|\w{1,40}\|)&gt;")
SPACES = str.maketrans({"\t": "    ", "\r": None, "\u00a0": " ", "\u202f": " ", "\u3000": " "})
STYLE = """
:root { color-scheme: light dark; --dim: color-mix(in srgb, CanvasText 62%, Canvas); --line: #8886; --prompt: #888;
  --policy: #3b7ff0; --observation: #14967f; --call: #8b5cf6; --error: #e0434b } .error { color: var(--error) }
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
text { font-weight: 700; fill: #fff; stroke: #000; stroke-width: .2em; paint-order: stroke }
"""


def rollout_page(title: str, episodes: list[dict]) -> str:
    """A whole HTML document. An episode is a dict with these keys; whatever texts and pictures hold, nothing raises.

    prompt_index, sample_index, finish_reason, score (may be nan), advantage (or None), rewards {name: number or str}
    segments  [{role "prompt" | "policy" | "observation", text, media: indices of what it shows}]
    media     [{kind "image" | "video", frames: encoded bytes, shown: [w, h] pixels}]
    calls     [{turn: which one of the policy, from 0; name, arguments, text, error; info: {} or target: index of
              media, with box: [x1, y1, x2, y2] from 0 to 1, and of a video its frame, or with frames; from 1}]
    """
    body, pictures, prompt = "", {}, None
    for episode in sorted(episodes, key=lambda e: (e["prompt_index"], e["sample_index"])):
        is_first, prompt = episode["prompt_index"] != prompt, episode["prompt_index"]
        body += f"<h2>Prompt {prompt}</h2>{transcript(episode, ['prompt'], pictures)}" if is_first else ""
        body += sample(episode, pictures, " open" * is_first)
    return f"""<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{shown(title)}</title>
<meta name='viewport' content='width=device-width'><style>{STYLE}</style></head><body><h1>{shown(title)}</h1>
<svg width='0' height='0' style='position: absolute'><defs>{"".join(p[0] for p in pictures.values())}</defs></svg>
{body}</body></html>\n"""


def sample(episode: dict, pictures: dict, state: str) -> str:
    score, advantage, finish = episode["score"], episode["advantage"], episode["finish_reason"]
    tags = badge(f"score {score:.3g}", 120 * min(1, max(0, score)) if isfinite(score) else None)
    gain = "not trained on" if advantage is None else f"advantage {advantage:+.3g}"
    tags += badge(gain, 120 * (advantage > 0) if advantage else None) + badge(finish, None if finish == "stop" else 35)
    targets = [call["info"].get("target") for call in episode["calls"]]
    looked = [figure(episode, i, pictures, episode["calls"]) for i in range(len(episode["media"])) if i in targets]
    last = "".join(segment["text"] for segment in episode["segments"][-1:])[-200:]
    return f"""<details{state}><summary>sample {episode["sample_index"]}{tags}<i>{shown(last)}</i></summary>
<article><div>{transcript(episode, ["policy", "observation"], pictures)}</div>
<aside>{shown(episode["rewards"])}{"".join(looked)}</aside></article></details>"""


def badge(text: str, hue: float | None) -> str:
    return f"""<b{"" if hue is None else f" style='background: hsl({hue:.0f} 65% 32%)'"}>{shown(text)}</b>"""


def transcript(episode: dict, roles: list[str], pictures: dict) -> str:
    """The segments of these roles, and after a turn its calls; what they returned is part of the next observation."""
    cards, turns = [], 0
    for role, segment in [(s["role"], s) for s in episode["segments"] if s["role"] in roles]:
        figures = "".join(figure(episode, index, pictures) for index in segment["media"])
        text = TAG.sub(r"<i>\g<0></i>", shown(segment["text"]))
        cards.append((role, f"policy {turns + 1}" if role == "policy" else role, f"<pre>{text}</pre>{figures}"))
        for number, call in enumerate(episode["calls"], 1):
            if role == "policy" and call["turn"] == turns:
                heading = badge(str(number), number * 137 % 360) + shown(call["name"])
                kind, error = ("error", shown(call["text"])) if call["error"] else ("call", "")
                cards.append((kind, heading, f"{shown(call['arguments'])}<pre>{error}</pre>"))
        turns += role == "policy"
    return "".join(f"<div class='turn {k}' style='--edge: var(--{k})'><h3>{h}</h3>{c}</div>" for k, h, c in cards)


def figure(episode: dict, index: int, pictures: dict, calls: list[dict] | tuple = ()) -> str:
    """An image, or the frames of a video, with the boxes and the choices of the calls that had it as their target."""
    medium, strip = episode["media"][index], ""
    side, tall = SIZE[medium["kind"]]
    for place, data in enumerate(medium["frames"], 1):
        if (data, side) not in pictures:
            pictures[data, side] = embed(data, side, f"picture{len(pictures)}")
        _, name, w, h = pictures[data, side]
        em, drawn, label = 18 * h / tall, "", str(place) * (medium["kind"] == "video")
        for number, info in [(n, c["info"]) for n, c in enumerate(calls, 1) if c["info"].get("target") == index]:
            try:
                label += f" (call {number})" * (place in info.get("frames", ()))
                x1, y1, x2, y2 = (min(1.0, max(0.0, x)) for x in info["box"] if info.get("frame", place) == place)
            except (KeyError, TypeError, ValueError):  # no box, not in this frame, or a user's tool has its own idea
                continue
            drawn += f"<svg viewBox='0 0 1 1' preserveAspectRatio='none'><rect x='{x1:g}' y='{y1:g}' "
            drawn += f"width='{x2 - x1:g}' height='{y2 - y1:g}' stroke='hsl({number * 137 % 360} 95% 60%)'/></svg>"
            drawn += f"<text x='{x1 * w + em / 4:g}' y='{y1 * h + em:g}'>{number}</text>"
        look = f"viewBox='0 0 {w} {h}' width='{w * tall / h:.0f}' font-size='{em:g}'{' class=chosen' * ('c' in label)}"
        strip += f"<svg {look}><use href='#{name}'/>{drawn}<text x='2%' y='96%'>{label}</text></svg>"
    size = "{} × {}".format(*medium["shown"])
    return f"<figure>{strip}<figcaption>{medium['kind']} {index}, shown to the model at {size}</figcaption></figure>"


def embed(data: bytes, side: int, name: str) -> tuple[str, str, int, int]:
    """(SVG element, its name, width, height) of a picture of at most `side` pixels, or of the reason why not."""
    try:
        image = decode(data)
    except ValueError as error:
        return f"<text id='{name}' x='9' y='99' font-size='11'>{shown(str(error)[:60])}</text>", name, 400, 200
    image.thumbnail((side, side))
    kind = "png" if image.getcolors(256) else "jpeg"  # few colours: a diagram
    image.save(file := io.BytesIO(), kind)
    uri, (w, h) = base64.b64encode(file.getvalue()).decode(), image.size
    return f"<image id='{name}' width='{w}' height='{h}' href='data:image/{kind};base64,{uri}'/>", name, w, h


def shown(value, in_table: bool = False) -> str:
    """HTML of a text, shortened; a table of a dict; the JSON of anything else."""
    try:
        if isinstance(value, dict) and not in_table:
            rows = "".join(f"<tr><th>{shown(str(k))}</th><td>{shown(v, True)}</td></tr>" for k, v in value.items())
            return f"<table>{rows}</table>"
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
        page = rollout_page(f"step {rows[0]['step']}", page_episodes(rows, pictures, tokenizer))
        replace_file(dump.with_suffix(".html"), lambda temporary: temporary.write_text(page, errors="replace"))
    except (OSError, pa.ArrowInvalid) as error:  # a full disk, or half a file, costs the page, not the run
        print(f"warning: {dump.with_suffix('.html')} not written ({error})", flush=True)


def page_episodes(rows: list[dict], files: dict[str, bytes], tokenizer) -> list[dict]:
    """What `rollout_page` wants to know of each episode."""
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
        model_reward = row.get("model_reward")  # older dumps lack it
        judged = {} if model_reward is None else {"--reward-model": model_reward}
        episode = {key: row[key] for key in keys} | {"rewards": json.loads(row["rewards"]) | judged, "calls": calls}
        episodes.append(episode | {"segments": segments, "media": media})
    return episodes
