"""Maps ids of pages to documents and page numbers. Data sets number the pages of a file; corpora name them."""

from __future__ import annotations

import re
from typing import NamedTuple

_DOCUMENTS = (".pdf", ".tif", ".tiff")  # one file, many pages
_PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")  # one file, one page
_NUMBERED = re.compile(r"(.+)_(\d+)")  # the file of one page: DOCUMENT_PAGE
_SLIDE = re.compile(r".+-(\d+)-(?:320|638|728|1024|2048)")  # SlideShare, in the deck's folder: TITLE-PAGE-WIDTH


class PageName(NamedTuple):
    """A document's name without folder and extension, and the page's number from 1."""

    document: str
    page: int


def page_id(document: str, page: int) -> str:
    """The id of a document's page in a knowledge base of documents (`knowledge.pages.reading`): `report.pdf#3`."""
    return f"{document}#{page}"


def page_of(name: str) -> PageName | None:
    """The page of an id; None if the id has no page number.

    Known forms: `report.pdf#3`, in any folder; the picture of a page, `report_3.jpg` or `report_003.jpg#1`; `report_3`, as in
    lists of pages; a slide as SlideVQA's script saves it, `deck/its-title-3-1024.jpg`.
    """
    file, mark, number = name.rpartition("#")
    file, number = (file, number) if mark and number.isdecimal() else (name, "")
    folder, _, last = file.rpartition("/")
    stem, suffix = _split(last)
    if number and suffix not in _PICTURES:
        return PageName(stem, int(number))
    if folder and suffix in _PICTURES and (slide := _SLIDE.fullmatch(stem)):
        return PageName(folder.rpartition("/")[2], int(slide[1]))
    match = None if suffix in _DOCUMENTS else _NUMBERED.fullmatch(stem)
    return PageName(match[1], int(match[2])) if match else None


def _split(file: str) -> tuple[str, str]:
    """Stem and extension. Only known extensions count, because the names of documents have dots."""
    for suffix in (*_DOCUMENTS, *_PICTURES):
        if file.lower().endswith(suffix):
            return file[: -len(suffix)], suffix
    return file, ""
