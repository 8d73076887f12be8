"""Documents become pages of a knowledge base: PDFs, pictures and multi-frame scans, from directories or a list of pages.

A page's id is `file#page`, with the file's path below the corpus and the page's number from 1. Files are in natural order
(`slide2` before `slide10`), pages in the order of their file.

OCR is PP-OCR (rapidocr on onnxruntime), the text baseline of VRAG-RL. Each page is read only once: results are cached under
$ROUTERL_CACHE/ocr in a file per picture, named by the digest of its bytes and the engine's version. A page is written as a
picture file and a passage. A killed build resumes page by page.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from absl import logging

from routerl_jax.core.config import Range, checked
from routerl_jax.core.files import cache_directory, parse_json, read_json, write_atomic
from routerl_jax.core.packages import needs
from routerl_jax.core.progress import Bar
from routerl_jax.core.rows import RowLocation, checked_path, read_rows
from routerl_jax.core.types import Passage
from routerl_jax.knowledge.corpora.documents import Page, Reader
from routerl_jax.knowledge.corpus import DistinctIds, file_sha256, string_field
from routerl_jax.knowledge.picture_files import PictureFiles, PictureFormat, PictureJournal
from routerl_jax.knowledge.store import rebuild_hint
from routerl_jax.knowledge.writer import StoreWriter
from routerl_jax.models.images import decode_image

OnError = Literal["raise", "skip"]
PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
SUFFIXES = (".pdf", *PICTURE_SUFFIXES)


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
    ids = DistinctIds()
    for location, row in read_rows(checked_path(path)):
        page_id = ids.add(string_field(row, "id", location), location)
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
    ids.finish()


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


_ENGINE = "rapidocr"


class Line(NamedTuple):
    """A line of text, its box (left, top, right, bottom; pixels), and the engine's confidence, 0 to 1."""

    text: str
    box: tuple[float, float, float, float]
    confidence: float


class Ocr:
    """Reads text from pictures, with a cache in $ROUTERL_CACHE/ocr. Safe to use from several threads, each of which computes
    on one core.

    Raises:
      ValueError: the package is not installed.
    """

    def __init__(self) -> None:
        with needs("OCR", "pages"):
            self._version = importlib.metadata.version(_ENGINE)
            import onnxruntime  # noqa: F401 - what it computes with, imported at the first page
            import rapidocr
        self._package = rapidocr
        self._cache = cache_directory() / "ocr"
        self._engines = threading.local()

    def lines(self, picture: bytes, *, name: str = "picture") -> list[Line]:
        """The lines on an encoded picture from top to bottom; [] if it has no text.

        Raises:
          ValueError: the picture can't be read; names it.
        """
        digest = hashlib.sha256(f"{_ENGINE} {self._version}\0".encode() + picture).hexdigest()
        cached = self._cache / digest[:2] / f"{digest}.json"
        try:
            rows = parse_json(cached.read_text("utf-8"))
            return [Line(text, tuple(box), confidence) for text, box, confidence in rows]
        except (OSError, ValueError, TypeError):  # not there, or damaged
            pass
        pixels = np.asarray(decode_image(picture, name=name))[:, :, ::-1]  # the engine takes BGR
        result = self._engine()(np.ascontiguousarray(pixels))
        columns = () if result.txts is None else (result.boxes, result.txts, result.scores)
        lines = []
        for corners, text, confidence in zip(*columns):
            xs, ys = ([float(corner[axis]) for corner in corners] for axis in (0, 1))
            lines.append(Line(str(text), (min(xs), min(ys), max(xs), max(ys)), float(confidence)))
        write_atomic(cached, json.dumps(lines, ensure_ascii=False), shared=True)
        return lines

    def text(self, picture: bytes, *, name: str = "picture") -> str:
        """The lines on an encoded picture, one below the other."""
        return "\n".join(line.text for line in self.lines(picture, name=name))

    def _engine(self) -> Any:
        if not hasattr(self._engines, "engine"):
            # More threads than cores make its runtime spin: 52 s per page instead of 2, as measured.
            threads = {f"EngineConfig.onnxruntime.{key}_op_num_threads": 1 for key in ("intra", "inter")}
            quiet = {"Global.log_level": "error"}  # it warns of every picture without text
            self._engines.engine = self._package.RapidOCR(params=threads | quiet)
        return self._engines.engine


Text = Literal["none", "layer", "ocr", "either"]
SKIPPED = "skipped.json"  # in the knowledge base: what was left out, and why
_JOURNAL = "rendered.jsonl"
_AHEAD = 4  # pages per core that are processed at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class PageConfig:
    """How documents become pages."""

    dpi: Annotated[int, Range(least=18, most=1200)] = 144  # resolution of PDF pages
    picture_format: PictureFormat = "jpeg"  # format of the stored pages: jpeg or png
    on_error: OnError = "raise"  # what to do with a damaged document: raise, or skip it and report
    # a page's text: "none", "layer" (the PDF's text layer), "ocr", "either" (OCR if the file has no text)
    text: Text = "layer"


class PageWriter:
    """Yields the passages of a corpus of documents, and writes their pictures meanwhile.

    Args:
      keep_blank: pages without text become passages too.
    """

    def __init__(
        self, corpus: str, config: PageConfig, writer: StoreWriter, *, keep_blank: bool = True, progress: bool = True
    ) -> None:
        self._corpus, self._config, self._keep_blank, self._progress = corpus, config, keep_blank, progress
        self._scratch, self._journal = writer.scratch, writer.progress / _JOURNAL
        self._files = PictureFiles(writer.scratch, config.picture_format)
        self._reader = Reader(config.dpi)
        self._ocr = Ocr() if config.text in ("ocr", "either") else None
        self._problems = Problems(config.on_error)
        self._blank: list[str] = []

    def passages(self) -> Iterator[Passage]:
        """A passage for every page, in order. After a kill, stored pages are not rendered again.

        Raises:
          ValueError: an error of `documents.read_pages`, or no page can be used.
        """
        row = 0
        bar = Bar(desc="pages", unit="page", disable=not self._progress, smoothing=0.05)
        with bar, PictureJournal(self._journal, self._files) as journal:
            for page, future in self._in_order(journal):
                bar.update()
                try:
                    # A picture stored for another row is not used: this run may have overwritten it.
                    stored_row = journal.row(page.id)
                    encoded, text = future.result() if stored_row in (None, row) else self._make(page, None)
                except ValueError as error:
                    self._problems.handle(error)
                    continue
                # PDFs hold halves of surrogate pairs
                text = text.replace("\0", " ").encode("utf-8", "replace").decode()
                if not text.strip() and not self._keep_blank:
                    self._blank.append(page.id)
                    continue
                if stored_row != row:
                    journal.write(page.id, row, encoded)
                yield Passage(id=page.id, title=page.title, text=text)
                row += 1
        if not row:
            raise ValueError(
                f"{self._corpus}: none of its pages can be used ({len(self._problems.skipped)} damaged, "
                f"{len(self._blank)} without text)"
            )
        skipped = {"damaged": self._problems.skipped, "blank": self._blank}
        (self._scratch / SKIPPED).write_text(json.dumps(skipped, indent=2, ensure_ascii=False) + "\n", "utf-8")

    def _in_order(self, journal: PictureJournal) -> Iterator[tuple[Page, Future[tuple[bytes, str]]]]:
        """Pages with the futures of their pictures and texts; a few are processed at a time."""
        workers = os.cpu_count() or 1
        waiting: collections.deque[tuple[Page, Future[tuple[bytes, str]]]] = collections.deque()
        with ThreadPoolExecutor(workers) as pool:
            for page in read_pages(self._corpus, self._reader, self._problems):
                waiting.append((page, pool.submit(self._make, page, journal.row(page.id))))
                if len(waiting) == _AHEAD * workers:
                    yield waiting.popleft()
            yield from waiting

    def _make(self, page: Page, row: int | None) -> tuple[bytes, str]:
        """The page's picture, encoded, and its text."""
        if row is not None:
            encoded = self._files.path(row).read_bytes()
        else:
            source = page.path if page.path.suffix.lower() != ".pdf" else None
            encoded = self._files.encode(self._reader.picture(page), source)
        text = self._reader.text(page) if self._config.text in ("layer", "either") else ""
        if self._ocr is not None and not text.strip():
            text = self._ocr.text(encoded, name=page.id)
        return encoded, text


def skipped_pages(directory: pathlib.Path) -> dict[str, list[str]]:
    """What a finished build left out: errors under "damaged", pages without text under "blank"."""
    path = directory / SKIPPED
    return read_json(path, rebuild_hint(directory)) if path.is_file() else {"damaged": [], "blank": []}
