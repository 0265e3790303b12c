"""Pixel Reasoner's data sets as published: download, or take a local copy; unzip; check that every
path resolves.

    python -m common.prepare.pixel_reasoner --folder data/pixel_reasoner --repository OWNER/NAME
    python -m common.prepare.pixel_reasoner --folder FOLDER

The first downloads, and resumes a download; the second takes a copy. Nothing is rewritten: rows
keep their relative paths, which start in the folder of their file.
"""

import shutil
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import common.packages  # noqa: F401, one line if a package is missing

from huggingface_hub import snapshot_download

from common.data.rows import RowFiles
from common.data.table_files import files_in, stem_of
from common.data.visual_qa import paths_of
from common.files import user_errors
from common.flags import call_program
from common.prepare.writing import downloading

MAX_SHOWN = 5  # paths without a file that are named


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
        num_pictures = 0
        files = RowFiles([table], "--folder")
        paths_of_rows = media_of(files)
        prefix = f"{stem_of(table)}_"  # Pixel Reasoner's script moves images/ to FILE_images/
        for row, paths in enumerate(paths_of_rows):
            num_pictures += len(paths)
            for path in paths:
                places = (args.folder / path, args.folder / f"{prefix}{path}")
                if not any(place.is_file() for place in places):
                    missing.append((files, row, path))
        print(f"{table}: {len(paths_of_rows)} rows, {num_pictures} pictures and frames")
    if missing:
        message = f"{len(missing)} paths lead to no file in {args.folder}, the first:"
        for files, row, path in missing[:MAX_SHOWN]:
            message += f"\n  {files.place(row)}: {path}"
        raise SystemExit(message)
    print(f"all there: {args.folder}")


def download(repository: str, folder: Path) -> None:
    """Download into the folder, and keep the files that are complete there. SystemExit if it holds
    another repository."""
    mark = folder / ".repository"
    if mark.is_file():
        present = mark.read_text().strip()
        if present != repository:
            raise SystemExit(
                f"--folder {folder} holds {present}: give {repository} another --folder"
            )
    with downloading(
        repository, "give --folder with a copy of it alone; the same command goes on from here"
    ):
        # raises if there is no network or no such repository; the download itself would then
        # only return the folder, if that is not empty
        snapshot_download(repository, repo_type="dataset", local_dir=folder, dry_run=True)
        try:
            snapshot_download(repository, repo_type="dataset", local_dir=folder)
        finally:
            if folder.is_dir() and any(folder.iterdir()):
                mark.write_text(repository)


def unzip(archive: Path) -> int:
    """Unpack what is missing in the archive's folder, and return the number of files. A killed run
    leaves no half file under its name.

    SystemExit for a file that exists with other content, as the pictures of two data sets would be
    mixed up; and for one that would lie outside of the folder.
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
                if is_member(target, member):
                    continue
                raise SystemExit(
                    f"{target} is there already, and is not that of {archive.name}: one --folder "
                    "for each data set (or delete it, if it is a broken copy)"
                )
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
    """Whether a file has the content of an archive's member, by size and checksum."""
    if not path.is_file() or path.stat().st_size != member.file_size:
        return False
    return zlib.crc32(path.read_bytes()) == member.CRC


def media_of(files: RowFiles) -> list[list[str]]:
    """The relative paths of each row's pictures and frames. SystemExit for another format."""
    try:
        return list(read_paths(files))
    except (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error!s:.100}".partition("\n")[0]
        raise SystemExit(
            f"{files.paths[0]}: not one of Pixel Reasoner's (it belongs elsewhere), or a "
            f"broken copy: {reason}"
        ) from error


def read_paths(files: RowFiles) -> Iterator[list[str]]:
    """The paths of each row: those of its column image, or without one those in its message_list
    (as in release.json), images before the frames of videos."""
    for record in files.records(("image", "message_list")):
        if isinstance(record, str):
            raise ValueError(record)
        if "image" in record:
            yield checked([path for path in paths_of(record) if path])
            continue
        images = []
        frames = []
        for message in record["message_list"]:
            for item in message["content"]:
                if item.get("image"):
                    images.append(item["image"])
                video = item.get("video") or []
                if not isinstance(video, list):
                    raise TypeError(f"the video {video!r:.40} is no list of frames")
                frames += video
        yield checked(images + frames)


def checked(paths: list) -> list[str]:
    """The paths as they are. TypeError if one of them is no text."""
    for path in paths:
        if not isinstance(path, str):
            raise TypeError(f"the picture {path!r:.40} is no path")
    return paths


if __name__ == "__main__":
    with user_errors():
        main(call_program(Args, "common.prepare.pixel_reasoner", __doc__))
