"""Reads documents as pages: PDFs (through pypdfium2), pictures and multi-frame scans, from directories or a list of pages.

A page's id is `file#page`, with the file's path below the corpus and the page's number from 1. Files are in natural order
(`slide2` before `slide10`), pages in the order of their file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

from absl import logging
from PIL import Image

from routerl_jax.core.extras import needs
from routerl_jax.core.rows import RowLocation, checked_path, read_rows
from routerl_jax.knowledge.corpus import file_sha256, new_id, string_field
from routerl_jax.models.images import check_aspect, decode_image

OnError = Literal["raise", "skip"]
PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
SUFFIXES = (".pdf", *PICTURES)
_SCANS = (".tif", ".tiff")  # files whose frames are pages
_MOST_PIXELS = 2**25  # most pixels of a rendered page; a larger page (a poster) gets a lower resolution
_POINTS = 72  # PDF points per inch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """One page of a document, not yet read.

    Attributes:
      number: number of the page in the file, from 1.
      text: the page's text according to a list of pages; for PDFs see `Reader.text`.
    """

    id: str
    title: str
    path: pathlib.Path
    number: int = 1
    text: str = ""


class Reader:
    """Reads pages. Keeps the last document open. Safe to use from several threads; only one at a time reads PDFs.

    Args:
      dpi: resolution of PDF pages in dots per inch.
    """

    def __init__(self, dpi: int) -> None:
        self.dpi = dpi
        self._lock = threading.Lock()  # PDFium may not be called by two threads at once
        self._open: tuple[pathlib.Path, Any] | None = None

    def count(self, path: pathlib.Path) -> int:
        """Number of pages of a file.

        Raises:
          ValueError: the file is no readable PDF or picture, or needs a password; names the file.
        """
        if path.suffix.lower() == ".pdf":
            with self._lock:
                pages = len(self._document(path))
            if not pages:
                raise ValueError(f"{path}: a PDF without pages; repair or remove it")
            return pages
        if path.suffix.lower() in _SCANS:
            try:
                with Image.open(path) as scan:
                    return getattr(scan, "n_frames", 1)
            except Exception as error:  # decoders raise many classes
                raise ValueError(f"{path}: not a picture that can be read ({error}); repair or remove it") from error
        return 1

    def picture(self, page: Page) -> Image.Image:
        """The page as a picture, RGB. Raises ValueError that names file and page if it is damaged, or if no model can read a
        picture of its shape."""
        name = f"{page.path}, page {page.number}"
        picture = self._picture(page, name)
        check_aspect(*picture.size, name)
        return picture

    def _picture(self, page: Page, name: str) -> Image.Image:
        if page.path.suffix.lower() == ".pdf":
            return self._pdf(page, name, self._render)
        if page.path.suffix.lower() not in _SCANS:
            return decode_image(page.path)
        try:
            with Image.open(page.path) as scan:
                scan.seek(page.number - 1)
                return decode_image(scan.copy(), name=name)
        except (OSError, EOFError, SyntaxError) as error:
            raise ValueError(f"{name}: damaged or incomplete ({error}); repair or remove it") from error

    def text(self, page: Page) -> str:
        """The text of a page in the file itself (a PDF's text layer); "" if there is none."""
        if page.path.suffix.lower() != ".pdf":
            return page.text
        return self._pdf(
            page, f"{page.path}, page {page.number}", lambda pdf_page: pdf_page.get_textpage().get_text_range()
        )

    def _pdf(self, page: Page, name: str, use: Callable[[Any], Any]) -> Any:
        with self._lock:
            document = self._document(page.path)
            try:
                return use(document[page.number - 1])
            except Exception as error:  # PdfiumError, and IndexError for a page that is not there
                raise ValueError(f"{name}: can't be read ({error}); repair the file or remove it") from error

    def _render(self, page: Any) -> Image.Image:
        width, height = page.get_size()
        scale = self.dpi / _POINTS
        scale *= min(1.0, (_MOST_PIXELS / max(1.0, width * height * scale**2)) ** 0.5)
        return page.render(scale=scale).to_pil().convert("RGB")

    def _document(self, path: pathlib.Path) -> Any:
        if self._open is not None and self._open[0] == path:
            return self._open[1]
        pdfium = _pdfium()
        try:
            document = pdfium.PdfDocument(path)
        except (pdfium.PdfiumError, OSError) as error:
            locked = "password" in str(error).lower()
            problem = "needs a password; save it without one" if locked else "not a PDF that can be read"
            raise ValueError(f"{path}: {problem} ({error}); repair or remove it, or set on_error='skip'") from error
        if self._open is not None:
            self._open[1].close()
        self._open = path, document
        return document


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


def _pdfium() -> Any:
    with needs("reading PDFs", "pages"):
        import pypdfium2
    return pypdfium2
