"""PyVision-RL's rows in verl's columns: pictures as bytes, in the prompt or for the interpreter
alone.

    python -m papers.pyvision.rows --source train.json --media-root FOLDER --out
    data/pyvision.parquet
    python -m papers.pyvision.rows --source train_1.parquet,train_2.parquet --out
    data/pyvision.parquet
    python -m papers.pyvision.rows --source val.json --media-root FOLDER --like train.json --out
    data/val.parquet

Rows (.parquet, .json, .jsonl) are told apart by their columns:

    prompt, image {bytes, path}, data_source, reward_model, extra_info, env_name       the first
    version the same with mm_hint {hint_path, hint_type} for image                             the
    release question, answer, data_source, image_path or video_path, id, ability
    without a prompt

With an env_name that ends in _wo_image_hint or _wo_video_hint the prompt does not show it, and
programs have it as image_hint_0 or video_clue_0; without any the row is a single turn without
tools. A row without a prompt gets ours, or that of a published row (--like). A video_path may be
the list of its frames; videos stay files: train with the same
--media-root.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Literal

import pyarrow as pa

from common.data.media import media_file, picture_sources
from common.data.rows import RowFiles
from common.files import user_errors
from common.flags import Files, call_program
from common.pictures import BadRow, decode
from common.prepare.writing import stream_rows
from papers.pyvision.prompts import (
    MODES,
    OWN,
    Mode,
    Wording,
    picture_facts,
    tagged,
    video_facts,
    wordings_like,
)

# env_name of rows whose prompts have their pictures
SHOWN = ("", "pyvision_gym", "pyvision_gym_w_image_hint")
# What PyAV may open: playlists, which ffmpeg reads too, name other files and hosts.
VIDEO_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,flv"
MEDIA = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))


def schema(ground_truth: pa.DataType) -> pa.Schema:
    """Columns of the rows that `make_row` makes."""
    picture = pa.struct({"kind": pa.string(), "frames": MEDIA})
    video = pa.struct({"kind": pa.string(), "frames": MEDIA, "fps": pa.float64()})
    names = pa.struct({"image_hint_0": picture, "video_clue_0": video})
    texts = dict.fromkeys(["split", "id", "question", "answer"], pa.string())
    tools = {"tools_kwargs": pa.struct({"python": pa.struct({"create_kwargs": names})})}
    return pa.schema(
        {
            "data_source": pa.string(),
            "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
            "images": MEDIA,
            "ability": pa.string(),
            "agent_name": pa.string(),
            "reward_model": pa.struct({"style": pa.string(), "ground_truth": ground_truth}),
            "extra_info": pa.struct({"index": pa.int64()} | texts | tools),
        }
    )


@dataclass
class Args:
    source: Files  # files of rows
    out: Path  # parquet file
    media_root: Path | None = None  # folder of the rows' relative paths
    # file of the release: rows without a prompt get the wording of its first rows
    like: str | None = None
    # in rows without a prompt: it shows their images; else the interpreter alone has them
    show_images: bool = True
    # rows that are unusable: stop, or count and drop them
    bad_rows: Literal["error", "drop"] = "error"


def main(args: Args) -> None:
    wordings = wordings_like(args.like) if args.like else OWN
    files = RowFiles(args.source, "--source")
    progress, bad = files.progress(), {}

    def usable() -> Iterator[dict]:
        for index, record in enumerate(files.records()):
            progress.add(1)
            try:
                if isinstance(record, str):
                    raise BadRow(record)
                if "prompt" in record:
                    row = convert(record, index, args.media_root)
                else:
                    row = compose(record, index, args.media_root, wordings, args.show_images)
            except BadRow as error:
                bad[index] = str(error)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                bad[index] = f"malformed: {type(error).__name__}: {error!s:.100}"
            else:
                yield row
        files.refuse(bad, "unusable rows", args.bad_rows == "drop")

    stream_rows(args.out, usable(), schema(pa.string()))


def convert(record: Mapping, index: int, root: Path | None) -> dict:
    """The row of one that has its prompt, in the words that stand there."""
    env, hint, info = (
        record.get("env_name") or "",
        record.get("mm_hint") or {},
        record.get("extra_info") or {},
    )
    if env not in (*SHOWN, *MODES):
        raise BadRow(f"env_name {env!r:.60}: known are {', '.join(filter(None, {*SHOWN, *MODES}))}")
    messages = [
        {name: text_of(m[name], f"a {name}") for name in ("role", "content")}
        for m in record["prompt"]
    ]
    text, pictures, gets = "\n".join(message["content"] for message in messages), [], {}
    is_video = hint.get("hint_type") == "video"
    if env in SHOWN:
        pictures = [read_picture(item, root)[0] for _, (item,) in picture_sources(record, text)]
        if (hint and not pictures) or is_video:
            raise BadRow(
                f"its {hint.get('hint_type')} is not in the prompt, as its env_name {env!r} says"
            )
    elif is_video:
        gets = {"video_clue_0": video_argument(hint["hint_path"], root)}
    else:
        gets = {
            "image_hint_0": image_argument(
                read_picture(hint.get("hint_path") or record.get("image"), root)[0]
            )
        }
    return make_row(
        text_of(record["data_source"], "data_source"),
        tagged(messages),
        answer_of((record.get("reward_model") or {}).get("ground_truth")),
        text_of(info.get("question"), "extra_info.question, which a judge reads,"),
        images=pictures,
        gets=gets,
        ability=str(record.get("ability") or ""),
        agent_name="tool_agent" if env else "single_turn_agent",
        info={
            "index": index,
            "id": str(info.get("index", info.get("id", ""))),
            "split": str(info.get("split") or "train"),
        },
    )


def compose(
    record: Mapping,
    index: int,
    root: Path | None,
    wordings: Mapping[Mode, Wording],
    show_images: bool,
) -> dict:
    """The row of a question without a prompt."""
    image, video = record.get("image_path"), record.get("video_path")
    if "question" not in record or bool(image) == bool(video):
        raise BadRow(
            f"has the columns {', '.join(record)}; expected prompt, or question and "
            "image_path or video_path"
        )
    mode: Mode = "video" if video else "shown" if show_images else "hidden"
    if mode not in wordings:
        env = next(env for env in MODES if MODES[env] == mode)
        raise BadRow(f"--like has no row with the env_name {env} to take the wording from")
    question = (
        text_of(record["question"], "question")
        .replace("<image>", "")
        .replace("<video>", "")
        .strip()
    )
    pictures, gets = [], {}
    if mode == "video":
        size, length, fps = look_at_video(video, record.get("fps"), root)
        gets, facts = (
            {"video_clue_0": video_argument(video, root, fps)},
            video_facts(size, length, fps),
        )
    else:
        data, size = read_picture(image, root)
        facts = picture_facts([size])
        pictures, gets = (
            ([data], {}) if show_images else ([], {"image_hint_0": image_argument(data)})
        )
    return make_row(
        text_of(record.get("data_source"), "data_source"),
        wordings[mode].messages(question, facts, len(pictures)),
        answer_of(record.get("answer")),
        question,
        images=pictures,
        gets=gets,
        ability=str(record.get("ability") or ""),
        info={"index": index, "id": str(record.get("id", "")), "split": "train"},
    )


def make_row(
    data_source: str,
    messages: list[dict],
    truth: str | Mapping,
    question: str,
    *,
    images: list[bytes],
    info: dict,
    gets: Mapping[str, Mapping] | None = None,
    ability: str = "",
    agent_name: str = "tool_agent",
) -> dict:
    """A row of `schema`; gets: what the interpreter has that the prompt does not show. BadRow for
    what no file holds.

    truth: a text, or a mapping with the text as "answer".
    """
    answer = truth if isinstance(truth, str) else truth["answer"]
    row = {
        "data_source": data_source,
        "prompt": messages,
        "images": [{"bytes": data, "path": None} for data in images],
        "ability": ability,
        "agent_name": agent_name,
        "reward_model": {"style": "model", "ground_truth": truth},
        "extra_info": info | {"question": question, "answer": answer},
    }
    picture_sources(row, "\n".join(message["content"] for message in messages))  # a mark for each
    if gets:
        row["extra_info"]["tools_kwargs"] = {"python": {"create_kwargs": gets}}
    texts = [data_source, ability, answer, question, info["id"], info["split"]]
    try:
        "".join(texts + [text for message in messages for text in message.values()]).encode()
    except UnicodeEncodeError as error:  # half a surrogate pair
        raise BadRow(f"a text that is no Unicode: {error}") from error
    return row


def text_of(value: object, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f"{what} is {value!r:.80}, expected text")
    return value


def answer_of(value: object) -> str:
    """An answer as text; numbers are answers too."""
    is_number = type(value) is int or (type(value) is float and isfinite(value))
    return str(value) if is_number else text_of(value, "the answer")


# --- pictures and videos --------------------------------------------------------------------------


def read_picture(item: object, root: Path | None) -> tuple[bytes, tuple[int, int]]:
    """The bytes of a picture, and its width and height as it is to be looked at."""
    with media_file(item, root) as file:
        data = file.read()
    try:
        return data, decode(data).size
    except ValueError as error:
        raise BadRow(str(error)) from error


def image_argument(data: bytes) -> dict:
    return {"kind": "image", "frames": [{"bytes": data, "path": None}]}


def video_argument(video: str | list[str], root: Path | None, fps: float | None = None) -> dict:
    """What the interpreter gets: the frames, or the file, which are read where they are used."""
    paths = video if isinstance(video, list) else [video]
    for path in paths:
        media_file(path, root).close()
    kind = "video" if isinstance(video, list) else "file"
    return {"kind": kind, "frames": [{"bytes": None, "path": path} for path in paths], "fps": fps}


def look_at_video(
    video: str | list[str], fps: object, root: Path | None
) -> tuple[tuple[int, int], int, float]:
    """((width, height), number of frames, frames a second); these are 1 of a list of frames, unless
    its row says."""
    if isinstance(video, list):
        rate = float(fps or 1)
        if not (isfinite(rate) and rate > 0):
            raise BadRow(f"fps is {fps!r:.80}, expected frames a second")
        return read_picture(video[0], root)[1], len(video), rate
    try:
        import av
    except ImportError as error:
        told = f"{video}: a video file needs PyAV: pip install av (see requirements.txt)"
        raise SystemExit(f"{told}; the list of its frames needs nothing") from error
    try:
        with (
            media_file(video, root) as file,
            av.open(file, options={"format_whitelist": VIDEO_FORMATS}) as container,
        ):
            stream = container.streams.video[0]
            size, rate = (stream.width, stream.height), float(stream.average_rate or 1)
            length = sum(packet.pts is not None for packet in container.demux(stream))
    except (av.FFmpegError, IndexError, OSError) as error:
        raise BadRow(f"{video} is no video that can be read ({error})") from error
    if not length:
        raise BadRow(f"{video} has no frames")
    return size, length, rate


if __name__ == "__main__":
    with user_errors():
        main(call_program(Args, "papers.pyvision.rows", __doc__))
