"""Corpora of pictures: rows with texts and picture files, or directories of pictures."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from routerl_jax.core.rows import RowLocation, checked_path, read_rows
from routerl_jax.knowledge.corpus import file_sha256, new_id, string_field
from routerl_jax.knowledge.pages.documents import PICTURES, Problems, documents
from routerl_jax.models.images import ImageSource


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of a corpus; `image` is a path, a `data:` URI, or None."""

    id: str
    title: str
    text: str
    image: ImageSource | None
    location: str  # its position, for messages


def read_pictures(corpus: str | pathlib.Path, problems: Problems) -> Iterator[Entry]:
    """The rows of a corpus, in order.

    Args:
      corpus: one of three forms. A .jsonl, .jsonl.gz or .json file with rows {id, title?, text? or caption?, image?}; images
        are paths relative to the file, or `data:` URIs. M-BEIR's candidates {did, txt, img_path, modality}; paths are relative
        to a directory above the file (cand_pool/local/mbeir_*_cand_pool.jsonl). A directory of pictures; the paths below it are
        ids, and the file names titles.

    Raises:
      ValueError: the corpus does not exist or is empty; a row has no id, or neither text nor picture; or a picture is missing,
        unless `problems` skips it. Names file and row.
    """
    root = pathlib.Path(corpus).expanduser()
    count = 0
    for entry in _files(root) if root.is_dir() else _rows(root, problems):
        count += 1
        yield entry
    if not count:
        raise ValueError(f"{root} holds nothing that can be used. Expected rows like {{id, title, text, image}}")


def pictures_digest(corpus: str | pathlib.Path) -> str:
    """Hex digest of a corpus: a file's bytes, or names, sizes and times of a directory's pictures."""
    root = pathlib.Path(corpus).expanduser()
    if not root.is_dir():
        return file_sha256(checked_path(root))
    digest = hashlib.sha256()
    for path in documents(root, PICTURES):
        status = os.stat(path)
        digest.update(f"{path.relative_to(root)}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _files(root: pathlib.Path) -> Iterator[Entry]:
    for path in documents(root, PICTURES):
        name = path.relative_to(root).as_posix()
        yield Entry(id=name, title=path.stem.replace("_", " "), text="", image=path, location=str(path))


def _rows(path: pathlib.Path, problems: Problems) -> Iterator[Entry]:
    used_ids: dict[str, int] = {}
    for location, row in read_rows(checked_path(path)):
        row = _of_mbeir(row, location) if "did" in row else row
        name = new_id(string_field(row, "id", location), location, used_ids)
        title = string_field(row, "title", location, default="")
        text = string_field(row, "text" if row.get("text") is not None else "caption", location, default="")
        image = string_field(row, "image", location, default="")
        if not (title.strip() or text.strip() or image.strip()):
            raise location.error(
                "neither text nor picture: fill in 'title', 'text', 'caption' or 'image', or remove the row"
            )
        try:
            source = _source(path, image, location) if image.strip() else None
        except ValueError as error:
            problems.handle(error)
            continue
        yield Entry(
            id=name, title=title, text=text, image=source, location=f"{path}, {location.unit} {location.number}"
        )


def _of_mbeir(row: dict[str, Any], location: RowLocation) -> dict[str, Any]:
    """A candidate of M-BEIR (Wei et al. 2023, arXiv 2311.17136) in this module's keys."""
    image = string_field(row, "img_path", location, default="")
    above = (folder / image for folder in location.path.parents)
    path = next((file for file in above if file.is_file()), image) if image.strip() else ""
    return {"id": row["did"], "text": row.get("txt"), "image": str(path)}


def _source(path: pathlib.Path, image: str, location: RowLocation) -> ImageSource:
    if image.startswith("data:"):
        return image
    if "://" in image:
        raise location.error(f"key 'image': {image[:80]!r} is not on this machine; fetch it and give its path")
    source = path.parent / pathlib.Path(image).expanduser()
    if not source.is_file():
        raise location.error(f"key 'image': {source} does not exist. Paths are relative to the file")
    return source
