"""Reads documents as pages: PDFs (through pypdfium2), pictures and multi-frame scans, from directories or a list of pages.

A page's id is `file#page`, with the file's path below the corpus and the page's number from 1. Files are in natural order
(`slide2` before `slide10`), pages in the order of their file.
"""

from __future__ import annotations

import hashlib
import pathlib
import re
from collections.abc import Iterator
from typing import Any, Literal

from absl import logging

from routerl_jax.core.rows import RowLocation, checked_path, read_rows
from routerl_jax.knowledge.corpus import file_sha256, new_id, string_field
from routerl_jax.knowledge.pages.reader import Page, Reader

OnError = Literal["raise", "skip"]
PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
SUFFIXES = (".pdf", *PICTURES)


class Problems:
    """Handling of unreadable documents: either the first one ends the build, or all are left out and reported."""

    def __init__(self, on_error: OnError) -> None:
        self.on_error = on_error
        self.skipped: list[str] = []

    def handle(self, error: ValueError) -> None:
        """Raises the error, or records it."""
        if self.on_error == "raise":
            raise error
        logging.warning("skipped: %s", error)
        self.skipped.append(str(error))


def read_pages(corpus: str | pathlib.Path, reader: Reader, problems: Problems) -> Iterator[Page]:
    """All pages of a corpus, in order.

    Args:
      corpus: a directory (read recursively; hidden files and other types are skipped), a PDF or picture, or a list of pages:
        .jsonl, .jsonl.gz or .json with rows {id, image, title?, text?}, whose pictures are relative to it.

    Raises:
      ValueError: the corpus does not exist or has no page. While reading: an error that `problems` does not skip. Names file or
        row.
    """
    root = pathlib.Path(corpus).expanduser()
    count = 0
    for page in _listed(root, problems) if _is_list(root) else _pages_in(root, reader, problems):
        count += 1
        yield page
    if not count:
        raise ValueError(f"{root} holds no pages that can be read. Give PDFs or pictures ({', '.join(SUFFIXES)})")


def corpus_digest(corpus: str | pathlib.Path) -> str:
    """Hex digest of all documents of a corpus: their names and contents.

    Raises:
      ValueError: there is no such file or directory.
    """
    root = pathlib.Path(corpus).expanduser()
    digest = hashlib.sha256()
    if _is_list(root):
        digest.update(file_sha256(checked_path(root)).encode())
        return digest.hexdigest()  # a changed picture with the same name is not noticed
    for path in documents(root):
        digest.update(f"{_name(path, root)}\0{file_sha256(path)}\0".encode())
    return digest.hexdigest()


def documents(root: pathlib.Path, suffixes: tuple[str, ...] = SUFFIXES) -> list[pathlib.Path]:
    """The files of a directory at any depth, in natural order; or the given file.

    Raises:
      ValueError: the path does not exist, is a file of another type, or is a directory without files.
    """
    if root.is_file():
        if root.suffix.lower() not in suffixes:
            raise ValueError(f"{root}: unknown type of document. Known: {', '.join(suffixes)}")
        return [root]
    if not root.is_dir():
        raise ValueError(f"{root} does not exist. Give a directory of documents ({', '.join(suffixes)})")
    paths = [
        path
        for path in root.rglob("*")
        if path.suffix.lower() in suffixes
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    if not paths:
        raise ValueError(f"{root} holds no documents ({', '.join(suffixes)})")
    return sorted(paths, key=lambda path: _natural(path.relative_to(root).as_posix()))


def _pages_in(root: pathlib.Path, reader: Reader, problems: Problems) -> Iterator[Page]:
    for path in documents(root):
        name = _name(path, root)
        try:
            count = reader.count(path)
        except ValueError as error:
            problems.handle(error)
            continue
        for number in range(1, count + 1):
            title = f"{path.stem}, page {number}" if count > 1 else path.stem
            yield Page(id=f"{name}#{number}", title=title, path=path, number=number)


def _listed(path: pathlib.Path, problems: Problems) -> Iterator[Page]:
    used_ids: dict[str, int] = {}
    for location, row in read_rows(checked_path(path)):
        page_id = new_id(string_field(row, "id", location), location, used_ids)
        try:
            picture = _picture(path, row, location)
        except ValueError as error:
            problems.handle(error)
            continue
        yield Page(
            id=page_id,
            title=string_field(row, "title", location, default=page_id),
            path=picture,
            text=string_field(row, "text", location, default=""),
        )


def _picture(path: pathlib.Path, row: dict[str, Any], location: RowLocation) -> pathlib.Path:
    name = string_field(row, "image", location)
    if "://" in name or name.startswith("data:"):
        raise location.error(f"key 'image': {name[:60]!r} is not a file; save the pictures beside the list")
    picture = path.parent / pathlib.Path(name).expanduser()
    if not picture.is_file():
        raise location.error(f"key 'image': {picture} does not exist. Paths are relative to the list")
    return picture


def _is_list(root: pathlib.Path) -> bool:
    return root.name.endswith((".jsonl", ".jsonl.gz", ".json", ".json.gz"))


def _name(path: pathlib.Path, root: pathlib.Path) -> str:
    return path.name if path == root else path.relative_to(root).as_posix()


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Digits compare as numbers."""
    parts = [(0, int(part), part) if part.isdigit() else (1, 0, part) for part in re.split(r"([0-9]+)", name)]
    return [*parts, (-1, 0, name)]
