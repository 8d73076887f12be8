"""Writes pages of documents into a knowledge base: a picture file and a passage for each. A killed build resumes page by
page."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Literal

from routerl_jax.core.config import Range, checked
from routerl_jax.core.files import read_json
from routerl_jax.core.progress import Bar
from routerl_jax.core.types import Passage
from routerl_jax.knowledge.pages.documents import OnError, Page, Problems, Reader, read_pages
from routerl_jax.knowledge.pages.ocr import Ocr
from routerl_jax.knowledge.picture_files import PictureFiles, PictureFormat, PictureJournal
from routerl_jax.knowledge.store import rebuild_hint
from routerl_jax.knowledge.writer import StoreWriter

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
