"""Readers of text corpora: JSON Lines (plain or gzip) and HippoRAG's JSON lists, one Passage per row.

Rows are `{id, title, text}`, or as FlashRAG and Search-R1 have them `{id, contents: "\\"Title\\"\\ntext"}`, or, in a
JSON list, HippoRAG's `{title, text, idx?}`. Other keys are ignored. Nothing is skipped: a row that cannot become a
passage is an error.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from routerl_jax.core.rows import Place, checked_path, read_rows
from routerl_jax.core.types import Passage


def read_corpus(path: str | pathlib.Path) -> Iterator[Passage]:
    """Passages of a corpus file, in its order, with scores 0.

    Raises:
      ValueError: a missing file or unknown extension (at once); while reading, a row that is not JSON, lacks id or
        text, is empty, or repeats an id, and a file without rows. The message names file, line, key and the fix.
    """
    return _passages(checked_path(path))


def file_sha256(path: pathlib.Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def passages_sha256(passages: Iterable[Passage]) -> str:
    """Hex digest of passages in memory: ids, titles and texts, in their order."""
    digest = hashlib.sha256()
    for passage in passages:
        digest.update(json.dumps([passage.id, passage.title, passage.text]).encode())
    return digest.hexdigest()


def string_field(row: dict[str, Any], key: str, place: Place, *, default: str | None = None) -> str:
    """`row[key]` as a string that can be stored (numbers are spelled out, null counts as absent)."""
    value = row.get(key)
    if value is None:
        if default is None:
            raise place.error(f"key {key!r} is missing (keys: {', '.join(row) or 'none'}). Every row needs it")
        return default
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise place.error(f"key {key!r} holds {type(value).__name__}, expected a string")
    value = str(value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise place.error(f"key {key!r} holds half of a surrogate pair ({error.reason}). Re-encode the file") from error
    return value


def new_id(row_id: str, place: Place, seen: dict[str, int]) -> str:
    """`row_id`, remembered in `seen`; ValueError if it is empty or was there before."""
    if not row_id.strip():
        raise place.error("key 'id' is empty. Give every row an id of its own")
    if row_id in seen:
        raise place.error(f"key 'id': {row_id!r} was used in {place.unit} {seen[row_id]} already. Make ids distinct")
    seen[row_id] = place.number
    return row_id


def _passages(path: pathlib.Path) -> Iterator[Passage]:
    seen: dict[str, int] = {}
    for place, row in read_rows(path):
        title, text = _title_and_text(row, place)
        if not text.strip():
            key = "text" if "text" in row else "contents"
            raise place.error(f"empty passage: key {key!r} holds no text. Remove the row or fill it in")
        if place.unit == "item":  # HippoRAG's lists number their passages or leave that to the order
            row = {"id": row.get("idx", place.number - 1), **row}
        yield Passage(id=new_id(string_field(row, "id", place), place, seen), title=title, text=text)
    if not seen:
        raise ValueError(f"{path} holds no passages. Expected rows like {{id, title, text}} or {{id, contents}}")


def _title_and_text(row: dict[str, Any], place: Place) -> tuple[str, str]:
    if "text" in row or "contents" not in row:
        return string_field(row, "title", place, default=""), string_field(row, "text", place)
    contents = string_field(row, "contents", place)
    first, newline, rest = contents.partition("\n")
    if not newline:
        return "", contents
    first = first.strip()
    quoted = len(first) >= 2 and first[0] == first[-1] == '"'
    return first[1:-1] if quoted else first, rest
