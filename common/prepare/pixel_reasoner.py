"""Pixel Reasoner's data sets as published: download, or take a local copy; unzip; check that every
path resolves.

    python -m common.prepare.pixel_reasoner --folder data/pixel_reasoner --repository OWNER/NAME
    # resumes
    python -m common.prepare.pixel_reasoner --folder FOLDER
    # a copy

Nothing is rewritten: rows keep their relative paths, which start in the folder of their file.
"""

import shutil
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import snapshot_download

from common.data.rows import RowFiles
from common.data.table_files import files_in
from common.data.visual_qa import paths_of
from common.files import refuse, user_errors
from common.flags import call_program
from common.prepare.writing import downloading

MAX_SHOWN = 5  # missing files that are named


@dataclass
class Args:
    folder: Path  # of the data set: *.json, *.jsonl or *.parquet, images.zip, videos.zip
    # data set on the hub (HF_ENDPOINT names a mirror) to download into the folder first
    repository: str | None = None


def main(args: Args) -> None:
    if args.repository:
        download(args.repository, args.folder)
    tables = files_in(args.folder)
    if not tables:
        raise SystemExit(
            f"--folder {args.folder}: there is no .json or .parquet file; --repository "
            "downloads some"
        )
    for archive in sorted(args.folder.glob("*.zip")):
        try:
            count = unzip(archive)
        except (RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            # encrypted, packed in another way, cut, ...
            raise SystemExit(
                f"{archive}: cannot be unpacked ({error}): copy or download it again"
            ) from error
        print(f"{archive}: {count} files unpacked, the others were there")
    missing: list[tuple[RowFiles, int, str]] = []  # file, row, path
    for table in tables:
        rows = pictures = 0
        files, paths_of_rows = media_of(table)
        for row, paths in enumerate(paths_of_rows):
            rows, pictures = rows + 1, pictures + len(paths)
            for path in paths:
                if not (args.folder / str(path)).is_file():
                    missing.append((files, row, path))
        print(f"{table}: {rows} rows, {pictures} pictures and frames")
    if missing:
        shown = "".join(
            f"\n  {files.place(row)}: {path}" for files, row, path in missing[:MAX_SHOWN]
        )
        raise SystemExit(f"{len(missing)} files are missing in {args.folder}, the first:{shown}")
    print(f"all there: {args.folder}")


def download(repository: str, folder: Path) -> None:
    """Into the folder; what is complete there is kept. SystemExit if it holds another
    repository."""
    mark = folder / ".repository"
    holds = mark.read_text().strip() if mark.is_file() else repository
    refuse(
        holds != repository, f"--folder {folder} holds {holds}: give {repository} another --folder"
    )
    with downloading(
        repository, "give --folder with a copy of it alone; the same command goes on from here"
    ):
        try:
            snapshot_download(repository, repo_type="dataset", local_dir=folder)
        finally:
            if folder.is_dir() and any(folder.iterdir()):
                mark.write_text(repository)


def unzip(archive: Path) -> int:
    """Unpack beside the archive what is not there; a killed run leaves no half file. Returns how
    many.

    SystemExit for a file that is there with another content: the pictures of two data sets would be
    exchanged.
    """
    count = 0
    with zipfile.ZipFile(archive) as files:
        for member in files.infolist():
            target = archive.parent / member.filename
            if not target.resolve().is_relative_to(archive.parent.resolve()):
                raise SystemExit(f"{archive}: {member.filename} would lie outside of its folder")
            if member.is_dir():
                continue
            if target.exists():
                told = (
                    f"{target} is there already, and is not that of {archive.name}: one "
                    "--folder for each data set"
                )
                refuse(
                    not is_member(target, member), f"{told} (or delete it, if it is a broken copy)"
                )
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f".{target.name}.tmp")
            try:
                with files.open(member) as source, temporary.open("wb") as copy:
                    shutil.copyfileobj(source, copy)
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)
            count += 1
    return count


def is_member(path: Path, member: zipfile.ZipInfo) -> bool:
    """Has a file the content of an archive's member, by size and checksum?"""
    same_size = path.is_file() and path.stat().st_size == member.file_size
    return same_size and zlib.crc32(path.read_bytes()) == member.CRC


def media_of(table: Path) -> tuple[RowFiles, list[list[str]]]:
    """A table, and the relative paths of each row's pictures: of release.json's items, of the
    column image of others.

    SystemExit for a table of another format.
    """
    try:
        files = RowFiles([table], "--folder")
        return files, list(read_paths(files))
    except (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error!s:.100}".partition("\n")[0]
        raise SystemExit(
            f"{table}: not one of Pixel Reasoner's; it belongs elsewhere ({why})"
        ) from error


def read_paths(files: RowFiles) -> Iterator[list[str]]:
    for record in files.records(("image", "message_list")):
        if isinstance(record, str):
            raise ValueError(record)
        if "image" in record:
            paths = [path for path in paths_of(record) if path]
        else:
            items = [item for message in record["message_list"] for item in message["content"]]
            paths = [item["image"] for item in items if item.get("image")]
            paths += [frame for item in items for frame in item.get("video") or []]
        yield paths


if __name__ == "__main__":
    with user_errors():
        main(call_program(Args, "common.prepare.pixel_reasoner", __doc__))
