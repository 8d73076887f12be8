"""Wikipedia's dumps (pages-articles.xml.bz2) as plain text, page by page, and the files of data sets that link to its pages.

Dumps are read through mwxml and mwparserfromhell. HybridQA's and OTT-QA's files are tables of Wikipedia whose cells link to
pages, and those pages' first paragraphs:

    tables_tok/TABLE.json      a table `{uid, title, section_title, header: [cell, ..], data: [[cell, ..], ..]}`; a cell is
                               `["2019", ["/wiki/2019_in_athletics"]]`, its text and its links
    all_plain_tables.json      `{uid: table}`, cells without links
    request_tok/TABLE.json     passages that a table links to: `{"/wiki/Doha": "Doha is ..", ..}`
    all_passages.json          the same of all tables

Sources: Chen et al. 2020 (arXiv 2004.07347), Chen et al. 2021 (arXiv 2010.10439), as their repositories hold them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
import re
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any, NamedTuple

from routerl_jax.core.files import parse_json
from routerl_jax.core.packages import needs
from routerl_jax.core.rows import RowLocation, check_text, open_bytes, plain_suffix
from routerl_jax.core.types import Passage

_ALONE_BELOW = 2**26  # bytes; smaller dumps are cleaned by one process, larger ones by several
_CHUNK = 64  # pages that a worker gets at a time
_LISTS = ("List of ", "Lists of ", "Index of ", "Outline of ")
_NO_TEXT = ("ref", "table", "gallery", "math", "chem", "score", "timeline", "syntaxhighlight", "imagemap", "references")
_NO_LINK = re.compile(r"\s*(file|image|category|datei|media)\s*:", re.IGNORECASE)
_DISAMBIGUATION = re.compile(r"\{\{\s*(disambig|hndis|geodis)", re.IGNORECASE)
_PARSERS = ("mwxml", "mwtypes", "xml", "pyexpat", "mwcli", "jsonable")  # packages whose errors tell of a damaged dump
_LEFT = re.compile(r"\[\[|\]\]|\{\{|\}\}|__[A-Z]+__|'{2,}")
_END = re.compile(r"\n==\s*(See also|References|External links|Further reading|Notes|Bibliography|Sources)\s*==")


class Page(NamedTuple):
    """An article: its number in Wikipedia, its title, and its text without markup."""

    id: str
    title: str
    text: str


def read_dump(path: pathlib.Path, *, workers: int = 0) -> Iterator[tuple[RowLocation, Page]]:
    """Articles of a dump (.xml, .xml.bz2, ...), in its order, with their locations (page numbers in the file, from 1).

    Left out are redirects, pages outside the main namespace, disambiguation pages, lists, indexes and outlines (as in
    R1-Router), and pages without text. Within an article, tables, templates, references, pictures, categories, and all sections
    from "See also" or "References" on are left out.

    Args:
      workers: processes that remove the markup; 0: one per core for files of 64 MB and more, else none.

    Raises:
      ValueError: while reading: the file is no MediaWiki dump or is damaged, or packages are missing.
    """
    _libraries()
    workers = workers or (os.cpu_count() or 1 if path.stat().st_size >= _ALONE_BELOW else 1)
    sources = _sources(path)
    if workers == 1:
        yield from ((location, page) for location, page in map(_clean, sources) if page.text)
        return
    ahead = _Ahead(sources, 4 * workers * _CHUNK)
    # spawn: this process may hold devices and threads, which a fork would copy
    with multiprocessing.get_context("spawn").Pool(workers) as pool, contextlib.closing(ahead):
        for location, page in pool.imap(_clean, ahead, chunksize=_CHUNK):
            ahead.consumed()
            if page.text:
                yield location, page


class _Ahead:
    """Feeds pages to a pool of processes, with a limit. Without it, a pool with a slow consumer would read the whole dump.

    At most `most` pages are read that are not yet `consumed`. Once closed, it ends, so that the pool can end.
    """

    def __init__(self, pages: Iterator[tuple[RowLocation, Page]], most: int) -> None:
        self._pages, self._room, self._closed = pages, threading.Semaphore(most), False

    def __iter__(self) -> Iterator[tuple[RowLocation, Page]]:
        self._room.acquire()
        for page in self._pages:
            yield page
            self._room.acquire()
            if self._closed:
                return

    def consumed(self) -> None:
        """Reports that the consumer has taken a page."""
        self._room.release()

    def close(self) -> None:
        """Reports that no more pages are needed."""
        self._closed = True
        self._room.release()


def plain_text(markup: str) -> str:
    """The text of wiki markup. Headings stay; templates, tables, notes, pictures and categories are removed."""
    code = _libraries()[1].parse(_END.split(markup, maxsplit=1)[0])
    for node in code.filter_tags(matches=lambda tag: str(tag.tag).strip().lower() in _NO_TEXT):
        _remove(code, node)
    for node in code.filter_wikilinks(matches=lambda link: bool(_NO_LINK.match(str(link.title)))):
        _remove(code, node)
    text = code.strip_code(normalize=True, collapse=True, keep_template_params=False)
    lines = (" ".join(_LEFT.sub("", line).split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def _remove(code: Any, node: Any) -> None:
    with contextlib.suppress(ValueError):  # it was inside a node that is already removed
        code.remove(node)


def _clean(item: tuple[RowLocation, Page]) -> tuple[RowLocation, Page]:
    location, source = item
    try:
        return location, source._replace(text=plain_text(source.text))
    except RecursionError:  # thousands of nested braces, from vandalism
        return location, source._replace(text="")


def _sources(path: pathlib.Path) -> Iterator[tuple[RowLocation, Page]]:
    """Articles with their markup."""
    mwxml, _ = _libraries()
    location = RowLocation(path, "page", 0)
    with open_bytes(path, lambda: f" after page {location.number}") as file:
        try:
            for number, page in enumerate(mwxml.Dump.from_file(file).pages, 1):
                location = location._replace(number=number)
                if page.namespace or page.redirect or page.title.startswith(_LISTS):
                    continue
                markup = next((revision.text for revision in page if revision.text), None)
                if markup and not page.title.endswith("(disambiguation)") and not _DISAMBIGUATION.search(markup):
                    yield location, Page(str(page.id), page.title, markup)
        except (OSError, EOFError):
            raise
        except Exception as error:  # mwxml's, and those of the XML parser under it, have no common class
            package = type(error).__module__.partition(".")[0]
            if isinstance(error, GeneratorExit | ValueError) and package not in _PARSERS:
                raise
            raise location.error(
                f"not a MediaWiki XML dump, or a damaged one ({error or type(error).__name__})"
            ) from error


def _libraries() -> tuple[Any, Any]:
    with needs("a Wikipedia dump", "corpora"):
        import mwparserfromhell
        import mwxml
    return mwxml, mwparserfromhell


_WIKI = "/wiki/"
_KEYS = ("header", "data")  # keys of a table
_LINKS = 2  # length of a cell: its text and its links


def table_rows(path: pathlib.Path) -> Iterator[tuple[RowLocation, dict[str, Any]]] | None:
    """Tables as rows `{id, title, section_title, header, rows}`; None for a file of another kind.

    Raises:
      ValueError: while reading: a cell is neither a text nor a text with links; names file, table and row.
    """
    content = _object(path)
    if content is None:
        return None
    if _is_table(content):
        return iter([_row(path, 1, str(content.get("uid") or path.name.partition(".json")[0]), content)])
    if content and all(map(_is_table, content.values())):
        return (_row(path, number, name, table) for number, (name, table) in enumerate(content.items(), 1))
    return None


def linked_passages(path: pathlib.Path) -> Iterator[tuple[RowLocation, Passage]] | None:
    """Passages. Their ids are their links, and their titles are the names in the links. None for a file of another kind."""
    content = _object(path)
    if not content or not all(key.startswith(_WIKI) and isinstance(text, str) for key, text in content.items()):
        return None
    return (
        (
            RowLocation(path, "item", number),
            Passage(id=link, title=urllib.parse.unquote(link.removeprefix(_WIKI)).replace("_", " "), text=text),
        )
        for number, (link, text) in enumerate(content.items(), 1)
    )


def _object(path: pathlib.Path) -> dict[str, Any] | None:
    """The JSON object in a .json file; None if the file is something else, which other readers handle."""
    if plain_suffix(path) != ".json":
        return None
    with open_bytes(path) as file:
        if file.read(1) != b"{":
            return None
    with open_bytes(path) as file:
        try:
            content = parse_json(file.read().decode())
        except ValueError:
            return None
    check_text(content, RowLocation(path, "line", 1))
    return content


def _is_table(content: Any) -> bool:
    return isinstance(content, dict) and all(isinstance(content.get(key), list) for key in _KEYS)


def _row(path: pathlib.Path, number: int, name: str, table: dict[str, Any]) -> tuple[RowLocation, dict[str, Any]]:
    location = RowLocation(path, "item", number)
    rows = [_texts(row, location, f"table {name!r}, row {i}") for i, row in enumerate(table["data"])]
    header = _texts(table["header"], location, f"table {name!r}, header")
    titles = {key: table.get(key) for key in ("title", "section_title")}
    return location, {"id": name, **titles, "header": header, "rows": rows}


def _texts(cells: Any, location: RowLocation, part: str) -> list[Any]:
    if not isinstance(cells, list):
        raise location.error(f"{part} holds {type(cells).__name__}, expected a list of cells")
    return [cell[0] if isinstance(cell, list) and len(cell) == _LINKS else cell for cell in cells]
