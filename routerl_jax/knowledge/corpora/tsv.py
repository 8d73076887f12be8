"""Passages in tab-separated files: DPR's and KILT's `id, text, title`, R1-Searcher's `number, title   text`."""

from __future__ import annotations

import codecs
import csv
import io
import pathlib
import re
from collections.abc import Iterator
from typing import BinaryIO

from routerl_jax.core.rows import RowLocation, open_bytes
from routerl_jax.core.types import Passage

_COLUMNS = ("id", "text", "title")
_HOTPOT = re.compile(r"\s*Title:\s*(?P<title>.*?)\s*Text:\s*(?P<text>.*)", re.DOTALL)


def read_tsv(path: pathlib.Path) -> Iterator[tuple[RowLocation, Passage]]:
    """Passages of a .tsv file with their locations.

    The first line may name the columns id, text and title, in any order (psgs_w100.tsv); fields may then be quoted as in CSV.
    Without such a line, each line is `id<TAB>text<TAB>title`, or R1-Searcher's `id<TAB>title   text` (three spaces) or
    `id<TAB>Title: .. Text: ..`, and quotes are ordinary characters.

    Raises:
      ValueError: while reading: a line has another number of columns or is not UTF-8.
    """
    location = RowLocation(path, "line", 0)
    with open_bytes(path, lambda: f" after line {location.number}") as file:
        head, columns = _header(file, path)
        if columns:
            yield from _with_header(file, path, columns)
            return
        for number, line in enumerate(_chain(head.removeprefix(codecs.BOM_UTF8), file), 1):
            location = location._replace(number=number)
            text = _decoded(line, location).rstrip("\r\n")
            if text.strip():
                yield location, _without_header(text, location)


def _header(file: BinaryIO, path: pathlib.Path) -> tuple[bytes, list[str]]:
    """The first line, and the names of the columns if it has these."""
    head = file.readline()
    names = _decoded(head, RowLocation(path, "line", 1)).removeprefix("\ufeff").strip().split("\t")
    is_header = sorted(names) == sorted(_COLUMNS) or sorted(names) == ["id", "text"]
    return head, names if is_header else []


def _with_header(file: BinaryIO, path: pathlib.Path, columns: list[str]) -> Iterator[tuple[RowLocation, Passage]]:
    csv.field_size_limit(2**31 - 1)
    rows = csv.reader(io.TextIOWrapper(file, "utf-8", newline=""), delimiter="\t")
    while True:
        location = RowLocation(
            path, "line", rows.line_num + 2
        )  # the header was line 1; a quoted field may span several
        try:
            row = next(rows, None)
        except UnicodeDecodeError as error:
            raise location.error(f"not UTF-8 text here or soon after ({error.reason}). Convert the file") from error
        except csv.Error as error:
            raise location.error(f"not tab-separated text ({error})") from error
        if row is None:
            return
        if not row:
            continue
        if len(row) != len(columns):
            raise location.error(f"{len(row)} columns, but line 1 names {len(columns)} ({', '.join(columns)})")
        fields = dict(zip(columns, row))
        yield location, Passage(id=fields["id"], title=fields.get("title", ""), text=fields["text"])


def _without_header(line: str, location: RowLocation) -> Passage:
    columns = line.split("\t")
    if len(columns) == 3:
        return Passage(id=columns[0], title=columns[2], text=columns[1])
    if len(columns) != 2:
        raise location.error(f"{len(columns)} columns; expected id, text, title, or a number and `title   text`")
    marked = _HOTPOT.fullmatch(columns[1])
    if marked:
        return Passage(id=columns[0], title=marked["title"], text=marked["text"])
    title, gap, text = columns[1].partition("   ")
    if not gap:
        raise location.error(
            "the second column holds neither `title   text` (three blanks between) nor `Title: .. Text: ..`"
        )
    return Passage(id=columns[0], title=title.strip(), text=text)


def _decoded(line: bytes, location: RowLocation) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise location.error(f"not UTF-8 text ({error.reason}). Convert the file to UTF-8") from error


def _chain(head: bytes, file: BinaryIO) -> Iterator[bytes]:
    if head:
        yield head
    yield from file
