"""Rows of tables: .parquet (.pq), and .csv and .tsv files whose first line names the columns."""

from __future__ import annotations

import csv
import glob
import io
import itertools
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from routerl_jax.core.buckets import fetched
from routerl_jax.core.rows import RowLocation, open_bytes, plain_suffix, read_rows

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_PARQUET = (".parquet", ".pq")
_BATCH = 1024  # rows of a parquet file in memory at a time


def read_question_rows(path: str | pathlib.Path) -> Iterator[tuple[RowLocation, dict[str, Any]]]:
    """Rows of a file, with their locations. The file's name decides the form: .parquet (.pq), .csv, .tsv, or JSON
    (`core.rows.read_rows`). A name with * or ? stands for all such files, sorted by name.

    All but .parquet may be compressed (.gz, .bz2, .xz, .zst).

    Raises:
      ValueError: while reading: a file is missing or damaged, or a row has another number of columns than the first.
    """
    if is_pattern(str(path)):
        return itertools.chain.from_iterable(map(read_question_rows, files_called(str(path))))
    path = fetched(path)
    suffix = plain_suffix(path)
    if path.suffix.lower() in _PARQUET:
        return _parquet(path)
    return read_named_columns(path) if suffix in _DELIMITERS else read_rows(path)


def is_pattern(name: str) -> bool:
    """Whether a name stands for several files: it has * or ?, and no file has exactly this name."""
    return any(mark in name for mark in "*?") and not pathlib.Path(name).expanduser().exists()


def files_called(pattern: str) -> list[str]:
    """The files that match a name with * or ?, sorted. ValueError if there are none."""
    paths = sorted(glob.glob(str(pathlib.Path(pattern).expanduser())))
    if not paths:
        raise ValueError(f"{pattern}: no file is called so")
    return paths


def read_named_columns(path: pathlib.Path) -> Iterator[tuple[RowLocation, dict[str, Any]]]:
    """Rows of a .csv or .tsv file by the names that its first line gives the columns.

    A first column without a name is pandas' index, and is left out. So are other columns without a name, which spreadsheets add
    at the end; their cells must be empty.

    Raises:
      ValueError: as `read_cells`; or two columns have the same name, or a cell has text in a column without one.
    """
    columns: list[str] = []
    for location, row in read_cells(path):
        if not columns:
            columns = row
            named = [name for name in columns if name]
            if repeated := next((name for name in named if named.count(name) > 1), None):
                raise location.error(f"two columns are called {repeated!r}. Rename or remove one of them")
            continue
        for number, (name, cell) in enumerate(zip(columns, row), 1):
            if number > 1 and not name and cell.strip():
                raise location.error(
                    f"column {number} has no name, but a cell {cell[:40]!r}. Name it in the first line"
                )
        yield location, {name: cell for name, cell in zip(columns, row) if name}


def read_cells(path: pathlib.Path) -> Iterator[tuple[RowLocation, list[str]]]:
    """The lines of a .csv or .tsv file as cells: first the names of the columns, then the rows. Lines with empty cells alone
    are skipped.

    A .csv file whose first line has no comma may have semicolons or tabs instead, as spreadsheets write them where the comma
    is in numbers; or its first line says so (`sep=;`).

    Raises:
      ValueError: while reading: the file is damaged or neither UTF-8 nor UTF-16, or a row has another number of cells than the
        first line.
    """
    delimiter = _DELIMITERS[plain_suffix(path)]
    csv.field_size_limit(2**31 - 1)
    location = RowLocation(path, "line", 1)
    with open_bytes(path, lambda: f" after line {location.number}") as file:
        lines = io.TextIOWrapper(file, "utf-8-sig", newline="")
        rows, before = csv.reader(lines, delimiter=delimiter), 0
        columns: list[str] = []
        while True:
            location = location._replace(number=rows.line_num + before + 1)
            try:
                row = next(rows, None)
                if row and not columns and delimiter == ",":
                    separator = re.fullmatch(r"sep=(.)", ",".join(row).strip(), re.IGNORECASE)
                    other = separator[1] if separator else next((mark for mark in ";\t" if mark in row[0]), "")
                    if separator or (other and len(row) == 1):
                        delimiter, before = other, location.number
                        first = [] if separator else [row[0]]
                        before -= len(first)
                        rows = csv.reader(itertools.chain(first, lines), delimiter=delimiter)
                        continue
            except UnicodeDecodeError as error:
                raise location.error(f"not UTF-8 text here or soon after ({error.reason}). Convert the file") from error
            except csv.Error as error:
                raise location.error(f"not a table ({error})") from error
            if row is None:
                return
            if not any(cell.strip() for cell in row):
                continue
            if not columns:
                row = columns = [name.strip() for name in row]
            if len(row) != len(columns):
                raise location.error(
                    f"{len(row)} columns, but line 1 names {len(columns)} ({', '.join(columns)}). Is it {delimiter!r} that "
                    f"stands between them?"
                )
            yield location, row


def _parquet(path: pathlib.Path) -> Iterator[tuple[RowLocation, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    if not path.is_file():
        raise ValueError(f"{path}: No such file or directory")
    try:
        file = pyarrow.parquet.ParquetFile(path)
        number = 0
        for batch in file.iter_batches(batch_size=_BATCH):
            for row in batch.to_pylist():
                number += 1
                yield RowLocation(path, "row", number), row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: damaged or not parquet ({error}). Fetch it again") from error
