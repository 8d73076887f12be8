"""The fields that data sets of questions about documents share: pages of a file, and types of evidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from routerl_jax.core.rows import RowLocation
from routerl_jax.data.formats.format import Row, distinct, strings
from routerl_jax.data.page_ids import page_id

SOURCE_TYPES = ("text", "table", "chart", "figure", "layout")  # types of evidence (VRAG-RL, table 1)
_SOURCES = {
    **{name: name for name in SOURCE_TYPES},
    "pure-text (plain-text)": "text",
    "generalized-text (layout)": "layout",
    "2d_layout": "layout",
}
_TYPES = {  # parts of names, in any case and however they are joined
    "multihop": "multi_hop",
    "singlehop": "single_hop",
    "extraction": "extraction",
    "logic": "logic",
}


def page_fields(document: Any, pages: Any, location: RowLocation, document_key: str, pages_key: str) -> dict[str, Any]:
    """Metadata: `document`, `pages` (from 1, each once, in the row's order) and `supporting` (ids of the pages,
    `data.page_ids`).

    Args:
      pages: whole numbers, a list of them, or such a list in a string.

    Raises:
      ValueError: the document has no name, or `pages` has another form; names the key.
    """
    if not isinstance(document, str) or not document.strip():
        raise location.error(f"key {document_key!r} is missing or empty; give the document's name")
    numbers = list(
        dict.fromkeys(_page(number, location, pages_key) for number in strings(pages, location, pages_key, listed=True))
    )
    document = document.strip()
    return {
        "document": document,
        "pages": numbers,
        "supporting": [page_id(document, number) for number in numbers],
    }


def source_types(value: Any, location: RowLocation, key: str) -> dict[str, list[str]]:
    """`{"source_type": [..]}` in the words of `SOURCE_TYPES`; other names are kept unchanged. {} if the row has none.

    Args:
      value: a name, a list of names, or such a list in a string.

    Raises:
      ValueError: the value has another form; names the key.
    """
    named = distinct([_SOURCES.get(name.strip().lower(), name) for name in strings(value, location, key, listed=True)])
    return {"source_type": list(named)} if named else {}


def query_type(value: Any) -> dict[str, str]:
    """`{"type": ..}`: single_hop, multi_hop, extraction or logic, or else the row's own word. {} if the row has none."""
    if not isinstance(value, str) or not value.strip():
        return {}
    plain = value.lower().replace("-", "").replace("_", "").replace(" ", "")
    return {"type": next((name for part, name in _TYPES.items() if part in plain), value.strip())}


def document_answers(value: Any, location: RowLocation, key: str, *, whole: bool = False) -> tuple[str, ...]:
    """The accepted answers. With `whole`, a list (or a list in a string) is one answer.

    Raises:
      ValueError: there is none; names the key.
    """
    values = [", ".join(strings(item, location, key, listed=True)) for item in _as_list(value)] if whole else value
    answers = distinct([answer.strip() for answer in strings(values, location, key)])
    if not answers:
        raise location.error(f"key {key!r} is missing or empty; give the answer")
    return answers


def _as_list(value: Any) -> list[Any]:
    """The alternatives: the items of `[[..], ..]` and `["..", ..]`. Other lists, and a string, are one answer."""
    if isinstance(value, list) and all(isinstance(item, str) and item.strip()[:1] == "[" for item in value):
        return value
    return [value]


def _page(number: str, location: RowLocation, key: str) -> int:
    page = int(number) if number.strip().isdecimal() else 0
    if page < 1:
        raise location.error(f"key {key!r} must hold numbers of pages, from 1, found {str(number)[:80]!r}")
    return page


def without(row: Row, keys: Sequence[str]) -> dict[str, Any]:
    """The other values of a row, without empty ones."""
    return {key: value for key, value in row.items() if key not in keys and value not in (None, "", [], "None")}
