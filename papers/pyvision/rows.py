r"""PyVision-RL's rows in verl's columns: pictures as bytes, in the prompt or for the interpreter
alone.

    python -m papers.pyvision.rows --source train.json --media-root FOLDER \
        --out data/pyvision.parquet
    python -m papers.pyvision.rows --source train_1.parquet,train_2.parquet \
        --out data/pyvision.parquet
    python -m papers.pyvision.rows --source val.json --media-root FOLDER --like train.json \
        --out data/val.parquet

The columns of rows (.parquet, .json, .jsonl) tell which of these they are:

    the first version  prompt, image {bytes, path}, data_source, reward_model, extra_info, env_name
    the release        the same with mm_hint {hint_path, hint_type} for image
    without a prompt   question, answer, data_source, image_path or video_path, id, ability

If env_name ends in _wo_image_hint or _wo_video_hint, the prompt does not show the picture or video,
and programs have it as image_hint_0 or video_clue_0; without an env_name the row is a single turn
without tools. A row without a prompt gets our wording, or that of a published row (--like). A
video_path may be the list of its frames; videos stay files: train with the same --media-root.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Literal

import common.packages  # noqa: F401, one line if a package is missing

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
    extra_info = {
        "index": pa.int64(),
        "split": pa.string(),
        "id": pa.string(),
        "question": pa.string(),
        "answer": pa.string(),
        "tools_kwargs": pa.struct({"python": pa.struct({"create_kwargs": names})}),
    }
    return pa.schema(
        {
            "data_source": pa.string(),
            "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
            "images": MEDIA,
            "ability": pa.string(),
            "agent_name": pa.string(),
            "reward_model": pa.struct({"style": pa.string(), "ground_truth": ground_truth}),
            "extra_info": pa.struct(extra_info),
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
    progress = files.progress()
    bad_rows: dict[int, str] = {}

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
                bad_rows[index] = str(error)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                bad_rows[index] = f"malformed: {type(error).__name__}: {error!s:.100}"
            else:
                yield row
        files.refuse(bad_rows, "unusable rows", args.bad_rows == "drop")

    stream_rows(args.out, usable(), schema(pa.string()))


def convert(record: Mapping, index: int, root: Path | None) -> dict:
    """The row of a record with a prompt, whose wording stays."""
    env_name = record.get("env_name") or ""
    if env_name not in (*SHOWN, *MODES):
        names = ", ".join(sorted({*SHOWN, *MODES} - {""}))
        raise BadRow(f"env_name {env_name!r:.60}: known are {names}")
    messages = []
    for message in record["prompt"]:
        role = text_of(message["role"], "a role")
        content = text_of(message["content"], "a content")
        messages.append({"role": role, "content": content})
    hint = record.get("mm_hint") or {}
    is_video = hint.get("hint_type") == "video"
    pictures = []
    kwargs = {}
    if env_name in SHOWN:
        text = "\n".join(message["content"] for message in messages)
        for _, (item,) in picture_sources(record, text):
            data, _ = read_picture(item, root)
            pictures.append(data)
        if (hint and not pictures) or is_video:
            raise BadRow(
                f"its {hint.get('hint_type')} is not in the prompt, as its env_name "
                f"{env_name!r} says"
            )
    elif is_video:
        kwargs["video_clue_0"] = video_argument(hint["hint_path"], root)
    else:
        data, _ = read_picture(hint.get("hint_path") or record.get("image"), root)
        kwargs["image_hint_0"] = image_argument(data)
    info = record.get("extra_info") or {}
    reward_model = record.get("reward_model") or {}
    return make_row(
        data_source=text_of(record["data_source"], "data_source"),
        messages=tagged(messages),
        truth=answer_of(reward_model.get("ground_truth")),
        question=text_of(info.get("question"), "extra_info.question, which a judge reads,"),
        images=pictures,
        kwargs=kwargs,
        ability=str(record.get("ability") or ""),
        agent_name="tool_agent" if env_name else "single_turn_agent",
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
    image = record.get("image_path")
    video = record.get("video_path")
    if "question" not in record or bool(image) == bool(video):
        raise BadRow(
            f"has the columns {', '.join(record)}; expected prompt, or question and "
            "image_path or video_path"
        )
    mode: Mode
    if video:
        mode = "video"
    elif show_images:
        mode = "shown"
    else:
        mode = "hidden"
    if mode not in wordings:
        env_name = next(name for name in MODES if MODES[name] == mode)
        raise BadRow(f"--like has no row with the env_name {env_name} to take the wording from")
    question = text_of(record["question"], "question")
    question = question.replace("<image>", "").replace("<video>", "").strip()
    pictures = []
    kwargs = {}
    if mode == "video":
        size, length, fps = look_at_video(video, record.get("fps"), root)
        facts = video_facts(size, length, fps)
        kwargs["video_clue_0"] = video_argument(video, root, fps)
    else:
        data, size = read_picture(image, root)
        facts = picture_facts([size])
        if mode == "shown":
            pictures.append(data)
        else:
            kwargs["image_hint_0"] = image_argument(data)
    return make_row(
        data_source=text_of(record.get("data_source"), "data_source"),
        messages=wordings[mode].messages(question, facts, len(pictures)),
        truth=answer_of(record.get("answer")),
        question=question,
        images=pictures,
        kwargs=kwargs,
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
    kwargs: Mapping[str, Mapping] | None = None,
    ability: str = "",
    agent_name: str = "tool_agent",
) -> dict:
    """A row of `schema`. BadRow if a file cannot hold it.

    truth: a text, or a mapping with the text as "answer". kwargs: pictures and videos for the
    interpreter, which the prompt does not show.
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
    if kwargs:
        row["extra_info"]["tools_kwargs"] = {"python": {"create_kwargs": kwargs}}
    texts = [data_source, ability, answer, question, info["id"], info["split"]]
    for message in messages:
        texts += message.values()
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:  # half a surrogate pair
        raise BadRow(f"a text that is no Unicode: {error}") from error
    return row


def text_of(value: object, column: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f"{column} is {value!r:.80}, expected text")
    return value


def answer_of(value: object) -> str:
    """An answer as text; numbers are answers too."""
    if type(value) is int or (type(value) is float and isfinite(value)):
        return str(value)
    answer = text_of(value, "the answer")
    if answer == "None":  # the scorer takes it for none
        raise BadRow("the answer is the text None")
    return answer


# --- pictures and videos --------------------------------------------------------------------------


def read_picture(item: object, root: Path | None) -> tuple[bytes, tuple[int, int]]:
    """The bytes of a picture, and its (width, height) once it is upright."""
    with media_file(item, root) as file:
        data = file.read()
    try:
        return data, decode(data).size
    except ValueError as error:
        raise BadRow(str(error)) from error


def image_argument(data: bytes) -> dict:
    return {"kind": "image", "frames": [{"bytes": data, "path": None}]}


def video_argument(video: str | list[str], root: Path | None, fps: float | None = None) -> dict:
    """What the interpreter gets: the paths of the frames, or of the file. They are read where they
    are used."""
    paths = video if isinstance(video, list) else [video]
    for path in paths:
        media_file(path, root).close()
    kind = "video" if isinstance(video, list) else "file"
    return {"kind": kind, "frames": [{"bytes": None, "path": path} for path in paths], "fps": fps}


def look_at_video(
    video: str | list[str], fps: object, root: Path | None
) -> tuple[tuple[int, int], int, float]:
    """((width, height), number of frames, frames per second). fps is the row's; it counts for a
    list of frames alone, whose default is 1."""
    if isinstance(video, list):
        rate = float(fps or 1)
        if not (isfinite(rate) and rate > 0):
            raise BadRow(f"fps is {fps!r:.80}, expected frames a second")
        _, size = read_picture(video[0], root)
        return size, len(video), rate
    try:
        import av
    except ImportError as error:
        raise SystemExit(
            f"{video}: a video file needs PyAV: pip install av (see requirements.txt); the list of "
            "its frames needs nothing"
        ) from error
    try:
        with (
            media_file(video, root) as file,
            av.open(file, options={"format_whitelist": VIDEO_FORMATS}) as container,
        ):
            stream = container.streams.video[0]
            size = (stream.width, stream.height)
            rate = float(stream.average_rate or 1)
            length = sum(packet.pts is not None for packet in container.demux(stream))
    except (av.FFmpegError, IndexError, OSError) as error:
        raise BadRow(f"{video} is no video that can be read ({error})") from error
    if not length:
        raise BadRow(f"{video} has no frames")
    return size, length, rate


if __name__ == "__main__":
    with user_errors():
        main(call_program(Args, "papers.pyvision.rows", __doc__))
