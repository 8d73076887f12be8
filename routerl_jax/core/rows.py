"""Rows of data files: JSON Lines or a JSON list, plain or compressed. Errors name the row."""

from __future__ import annotations

import bz2
import codecs
import contextlib
import gzip
import io
import json
import lzma
import pathlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

from routerl_jax.core.buckets import fetched
from routerl_jax.core.packages import install_hint

# In UTF-8, half of a surrogate pair can only come from an escape. Rows without one, which are most, are spared the check.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class RowLocation(NamedTuple):
    """The location of a row in its file, for error messages."""

    path: pathlib.Path
    unit: str  # "line" or, in a JSON list, "item"
    number: int  # from 1

    def error(self, problem: str) -> ValueError:
        """A ValueError that names file, row and problem."""
        return ValueError(f"{self.path}, {self.unit} {self.number}: {problem}")


def read_rows(path: str | pathlib.Path, *, lines: bool = False) -> Iterator[tuple[RowLocation, dict[str, Any]]]:
    """The JSON objects of a file, each with its location.

    A .json file may have three forms: a list; an object whose only value is a list (`{"examples": [..]}`); or pandas' columns
    (`{name: {index: value}}`), where the index becomes the key `index`. Any other file has one object per line.

    Files may be compressed (.gz, .bz2, .xz, .zst). Blank lines are skipped. Only newlines end a line, not other separators
    that JSON strings may contain (U+2028).

    Args:
      lines: read one object per line, whatever the extension.

    Raises:
      ValueError: while reading: the file is missing, damaged or not UTF-8, or a row is not a JSON object, has a key twice or
        holds half of a surrogate pair.
    """
    path = fetched(path)
    location = RowLocation(path, "line", 0)
    with open_bytes(path, lambda: f" after {location.unit} {location.number}") as file:
        as_list = plain_suffix(path) == ".json" and not lines
        rows = _items(path, file.read()) if as_list else _lines(path, file)
        for location, row in rows:
            if not isinstance(row, dict):
                raise location.error(f"expected an object, found {type(row).__name__}")
            yield location, row


def check_text(value: Any, location: RowLocation, key: str = "") -> None:
    """Checks that every text in a JSON value can be encoded, for tokenizers and files: half of a surrogate pair, as in a text
    that was cut within an emoji, can't.

    Raises:
      ValueError: names row and key (such as `metadata.titles[1]`).
    """
    parts = [(key, value)]
    while parts:  # not recursive: a value may be nested as deeply as Python reads it
        key, value = parts.pop()
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise location.error(
                    f"key {key!r} holds half of a surrogate pair ({value[error.start]!a}), as in a text that was cut within "
                    "a character. Take it out, or write the file anew from whole texts"
                ) from error
        elif isinstance(value, dict):
            for name, item in reversed(value.items()):
                parts += [(f"{key}.{name}" if key else name, item), (name, name)]
        elif isinstance(value, list):
            parts += [(f"{key}[{number}]", item) for number, item in reversed(list(enumerate(value)))]


def checked_path(path: str | pathlib.Path) -> pathlib.Path:
    """The path, `~` expanded. Raises ValueError unless it is a file with the extension of a known form."""
    path = fetched(path)
    if not path.is_file():
        problem = "is a directory" if path.is_dir() else "does not exist"
        raise ValueError(f"{path} {problem}. Give a .jsonl, .jsonl.gz or .json file")
    if plain_suffix(path) not in (".jsonl", ".json"):
        raise ValueError(f"{path}: unknown extension. Rename it: .jsonl or .jsonl.gz (a row per line), .json (a list)")
    return path


def _lines(path: pathlib.Path, file: Iterable[bytes]) -> Iterator[tuple[RowLocation, Any]]:
    for number, line in enumerate(file, 1):
        line = line.rstrip()  # so that an error at its end is reported for this line, not the next
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if line:
            location = RowLocation(path, "line", number)
            row = _parse(line, location, "Put one JSON object on each line")
            if _SURROGATE.search(line):
                check_text(row, location)
            yield location, row


def _items(path: pathlib.Path, content: bytes) -> Iterator[tuple[RowLocation, Any]]:
    hint = "Rename it to .jsonl if it holds one JSON object per line"
    rows = _parse(content.removeprefix(codecs.BOM_UTF8), RowLocation(path, "line", 1), hint)
    if isinstance(rows, dict) and len(rows) == 1 and isinstance(next(iter(rows.values())), list):
        rows = next(iter(rows.values()))
    if isinstance(rows, dict) and rows and all(_is_column(column) for column in rows.values()):
        rows = _transposed(path, rows)
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a JSON list, found {type(rows).__name__}. {hint}")
    escaped = _SURROGATE.search(content) is not None
    for number, row in enumerate(rows, 1):
        location = RowLocation(path, "item", number)
        if escaped:
            check_text(row, location)
        yield location, row


def _is_column(column: Any) -> bool:
    return isinstance(column, dict) and bool(column) and all(index.isdecimal() for index in column)


def _transposed(path: pathlib.Path, columns: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    indices = list(next(iter(columns.values())))
    for name, column in columns.items():
        if list(column) != indices:
            raise ValueError(
                f"{path}: pandas' columns {{name: {{index: value}}}} must be of one length; column {name!r} has other indices "
                "than the first. Write the file anew"
            )
    return [{"index": index, **{name: column[index] for name, column in columns.items()}} for index in indices]


def _parse(content: bytes, start: RowLocation, hint: str) -> Any:
    """The JSON value that begins at `start`. Errors name the faulty line."""
    try:
        return json.loads(content.decode(), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        location = start._replace(number=start.number + content.count(b"\n", 0, error.start))
        raise location.error(f"not UTF-8 text ({error.reason}). Convert the file to UTF-8") from error
    except json.JSONDecodeError as error:
        location = start._replace(number=start.number + error.lineno - 1)
        raise location.error(f"not JSON ({error.msg}, column {error.colno}). {hint}") from error
    except _RepeatedKeyError as error:
        raise start.error(f"key {error} occurs twice in one object. Keep one of the two") from error
    except (ValueError, RecursionError) as error:  # ValueError: of a number with more than 4,300 digits
        reason = error if isinstance(error, ValueError) else "nested too deeply"
        raise start.error(f"not JSON ({reason}). {hint}") from error


class _RepeatedKeyError(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedKeyError(repr(next(name for name in names if names.count(name) > 1)))
    return fields


# --- plain and compressed files ----------------------------------------------------------------------------------------

SUFFIXES = (".gz", ".bz2", ".xz", ".zst")


def plain_name(path: pathlib.Path) -> str:
    """The file's name without the extension of its compression."""
    return path.stem if path.suffix.lower() in SUFFIXES else path.name


def plain_suffix(path: pathlib.Path) -> str:
    """The extension without that of its compression, in lower case: `.jsonl` of A.JSONL.gz."""
    return pathlib.Path(plain_name(path)).suffix.lower()


@contextlib.contextmanager
def open_bytes(path: pathlib.Path, where: Callable[[], str] = lambda: "") -> Iterator[BinaryIO]:
    """The file's content, decompressed while it is read. UTF-16 and UTF-32, which spreadsheets and Windows write, become
    UTF-8.

    Args:
      where: returns how far the reader is (" after line 7"), for error messages.

    Raises:
      ValueError: the file can't be read, or its compressed data are damaged. Also raised while reading.
    """
    try:
        openers: dict[str, Callable[[pathlib.Path], Any]]
        openers = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstd}
        with openers.get(path.suffix.lower(), lambda path: path.open("rb"))(path) as file:
            mark = file.peek(4)[:4]
            if mark in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE):  # first: it begins with UTF-16's
                yield io.BytesIO(file.read().decode("utf-32").encode())
            elif mark[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                yield io.BytesIO(file.read().decode("utf-16").encode())
            else:
                yield file
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: begins like UTF-16 or UTF-32 text, but is none ({error}). Convert it to UTF-8"
        ) from error
    except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError, _Damaged) as error:
        raise _damaged(path, where(), error) from error
    except OSError as error:
        if error.strerror is None:  # bz2 has no error of its own
            raise _damaged(path, where(), error) from error
        raise ValueError(f"{path}: {error.strerror}. Give a file that can be read") from error


class _Damaged(Exception):
    pass


def _damaged(path: pathlib.Path, where: str, error: Exception) -> ValueError:
    kind = {".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}.get(path.suffix.lower(), "gzip")
    suffix = path.suffix if path.suffix.lower() in SUFFIXES else ".gz"
    return ValueError(
        f"{path}: damaged or not {kind}{where} ({error}). Fetch it again, or drop {suffix} if it is plain"
    )


def _open_zstd(path: pathlib.Path) -> io.BufferedReader:
    try:
        import zstandard
    except ImportError as error:
        raise ValueError(
            f"{path}: reading .zst needs the package zstandard. Run {install_hint('corpora')}, or decompress it"
        ) from error

    class Frames(io.RawIOBase):
        """All frames of the file, one after the other. Errors of zstandard become _Damaged."""

        def __init__(self) -> None:
            self._file = path.open("rb")
            self._frames = zstandard.ZstdDecompressor(max_window_size=2**31).stream_reader(
                self._file, read_across_frames=True
            )

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
            try:
                return self._frames.readinto(buffer)
            except zstandard.ZstdError as error:
                raise _Damaged(str(error)) from error

        def close(self) -> None:
            self._file.close()
            super().close()

    return io.BufferedReader(Frames(), 2**20)
