"""Reads the pages of PDFs (through pypdfium2), pictures and multi-frame scans: as a picture, and the text in the file."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
from collections.abc import Callable
from typing import Any

from PIL import Image

from routerl_jax.core.packages import needs
from routerl_jax.models.images import check_aspect, decode_image

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


def _pdfium() -> Any:
    with needs("reading PDFs", "pages"):
        import pypdfium2
    return pypdfium2
