"""Rows of data files, and files of them."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
from vl import picture


def row(content="What is 1 + 1?", truth="2", **changes):
    prompt = [{"role": "user", "content": content}]
    record = {
        "data_source": "gsm8k",
        "prompt": prompt,
        "reward_model": {"style": "rule", "ground_truth": truth},
    }
    return record | {"extra_info": {"index": 0}} | changes


def write(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text(
            "".join(json.dumps(r) + "\n" if isinstance(r, dict) else r + "\n" for r in rows)
        )
    return str(path)


def write_pixel_reasoner(folder) -> str:
    """A corrected crop of an image, and a video: frames first, then one of them again."""
    for name in ("0.jpg", "1.jpg", "2.jpg"):
        (folder / name).write_bytes(picture(100, 80, int(name[0]), format_="JPEG"))

    def message(role, *items):
        return {
            "role": role,
            "content": [item if isinstance(item, dict) else {"text": item} for item in items],
        }

    corrected = [
        message("system", "sys"),
        message("user", "what?", {"image": "0.jpg"}),
        message("assistant", "wrong crop"),
        message("user", "\nHere is", {"image": "1.jpg"}),
        message("assistant", "right crop"),
        message("user", "\nHere is", {"image": "2.jpg"}),
        message("assistant", "\\boxed{3}"),
    ]
    clip = [
        message("system", "sys"),
        message("user", "when?", {"video": ["0.jpg", "1.jpg", "2.jpg"]}),
        message("assistant", "select"),
        message("user", "\nHere are", {"image": "1.jpg"}),
        message("assistant", "then"),
    ]
    path = folder / "release.json"
    path.write_text(
        json.dumps(
            [{"qid": str(i), "message_list": rows} for i, rows in enumerate((corrected, clip))]
        )
    )
    return str(path)
