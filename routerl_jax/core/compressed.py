"""Reads files that are plain or compressed (.gz, .bz2, .xz, .zst) as one stream of bytes."""

from __future__ import annotations

import bz2
import codecs
import contextlib
import gzip
import io
import lzma
import pathlib
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO, cast

from routerl_jax.core.packages import install_hint

SUFFIXES = (".gz", ".bz2", ".xz", ".zst")


def plain_name(path: pathlib.Path) -> str:
    """The file's name without the extension of its compression."""
    return path.stem if _packing(path) in SUFFIXES else path.name


def plain_suffix(path: pathlib.Path) -> str:
    """The extension without that of its compression, in lower case: `.jsonl` of A.JSONL.gz."""
    return pathlib.Path(plain_name(path)).suffix.lower()


def _packing(path: pathlib.Path) -> str:
    return path.suffix.lower()


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
        with _open(path) as file:
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
    kind = {".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}.get(_packing(path), "gzip")
    suffix = path.suffix if _packing(path) in SUFFIXES else ".gz"
    return ValueError(
        f"{path}: damaged or not {kind}{where} ({error}). Fetch it again, or drop {suffix} if it is plain"
    )


def _open(path: pathlib.Path) -> io.BufferedReader:
    if _packing(path) == ".gz":
        return cast(io.BufferedReader, gzip.open(path))
    if _packing(path) == ".bz2":
        return cast(io.BufferedReader, bz2.open(path))
    if _packing(path) == ".xz":
        return cast(io.BufferedReader, lzma.open(path))
    return _open_zstd(path) if _packing(path) == ".zst" else path.open("rb")


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
