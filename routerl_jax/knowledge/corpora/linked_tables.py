"""HybridQA's and OTT-QA's files: tables of Wikipedia whose cells link to pages, and those pages' first paragraphs.

    tables_tok/TABLE.json      a table `{uid, title, section_title, header: [cell, ..], data: [[cell, ..], ..]}`; a cell is
                               `["2019", ["/wiki/2019_in_athletics"]]`, its text and its links
    all_plain_tables.json      `{uid: table}`, cells without links
    request_tok/TABLE.json     passages that a table links to: `{"/wiki/Doha": "Doha is ..", ..}`
    all_passages.json          the same of all tables

Sources: Chen et al. 2020 (arXiv 2004.07347), Chen et al. 2021 (arXiv 2010.10439), as their repositories hold them.
"""

from __future__ import annotations

import json
import pathlib
import urllib.parse
from collections.abc import Iterator
from typing import Any

from routerl_jax.core.rows import RowLocation, check_text, open_bytes, plain_suffix
from routerl_jax.core.types import Passage

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
        (RowLocation(path, "item", number), Passage(id=link, title=_title(link), text=text))
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
            content = json.loads(file.read().decode())
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


def _title(link: str) -> str:
    return urllib.parse.unquote(link.removeprefix(_WIKI)).replace("_", " ")
