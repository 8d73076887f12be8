"""The pictures of a knowledge base: one JPEG or PNG file per row. A file appears only when it is complete.

DIR/pictures/0012/00012345.jpg
"""

from __future__ import annotations

import io
import json
import pathlib
from typing import Literal

from PIL import Image

from routerl_jax.core.files import read_json_lines, write_atomic, write_json_lines
from routerl_jax.models.images import ImageSource, decode_image

PICTURES = "pictures"
PictureFormat = Literal["jpeg", "png"]
_SUFFIXES = {"jpeg": ".jpg", "png": ".png"}
_PER_DIRECTORY = 1000
_QUALITY = 90


class PictureFiles:
    """Pictures by row number.

    Args:
      directory: directory of the knowledge base.
      format: format of all its pictures.
    """

    def __init__(self, directory: pathlib.Path, format: PictureFormat = "jpeg") -> None:
        self._directory = directory.resolve() / PICTURES
        self.format: PictureFormat = format

    def path(self, row: int) -> pathlib.Path:
        """The path of a row's picture."""
        return self._directory / f"{row // _PER_DIRECTORY:04d}" / f"{row:08d}{_SUFFIXES[self.format]}"

    def write(self, row: int, encoded: bytes) -> pathlib.Path:
        """Writes a picture from `encode`."""
        path = self.path(row)
        write_atomic(path, encoded)
        return path

    def encode(self, picture: Image.Image, source: pathlib.Path | None = None) -> bytes:
        """A picture in its stored form. The bytes of `source`, the file from which it was read unchanged, are used if
        possible."""
        if source is not None and (encoded := source.read_bytes()) and self._is_plain(encoded, picture):
            return encoded
        buffer = io.BytesIO()
        if self.format == "png":
            picture.save(buffer, "PNG")
        else:
            picture.save(buffer, "JPEG", quality=_QUALITY, subsampling=0)  # coloured letters stay sharp
        return buffer.getvalue()

    def _is_plain(self, encoded: bytes, picture: Image.Image) -> bool:
        """Whether the file shows exactly this picture to any reader: same format and size, RGB, upright."""
        with Image.open(io.BytesIO(encoded)) as file:
            upright = file.getexif().get(0x0112, 1) == 1
            return (
                (file.format or "").lower() == self.format
                and file.mode == "RGB"
                and upright
                and (file.size == picture.size)
            )


class PictureJournal:
    """Journal of the pictures that a build has written. It survives a kill, so that none is made twice. Use as a context
    manager."""

    def __init__(self, path: pathlib.Path, files: PictureFiles) -> None:
        self._path, self._files = path, files
        self._rows: dict[str, int] = {}

    def __enter__(self) -> PictureJournal:
        notes = list(read_json_lines(self._path)) if self._path.is_file() else []  # a kill may have cut the last one
        latest: dict[int, str] = {}
        for name, row in notes:
            self._rows[name] = row
            latest[row] = name  # the last one that was written there
        self._rows = {
            name: row for name, row in self._rows.items() if latest[row] == name and self._files.path(row).is_file()
        }
        write_json_lines(self._path, notes)
        self._file = self._path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def row(self, name: str) -> int | None:
        """The row for which a picture was written, by the picture's name; None if it was not written."""
        return self._rows.get(name)

    def write(self, name: str, row: int, encoded: bytes) -> None:
        """Writes a picture and records it."""
        if self._files.path(row).is_file():
            self._note("", row)  # earlier entries for this row become invalid
        self._files.write(row, encoded)
        self._note(name, row)

    def _note(self, name: str, row: int) -> None:
        self._file.write(json.dumps([name, row]) + "\n")
        self._file.flush()


def smaller(source: ImageSource, side: int) -> Image.Image:
    """The picture in RGB, its shorter side at most `side` pixels and its longer one at most eight times that.

    Raises:
      ValueError: see `models.images.decode_image`.
    """
    picture = decode_image(source)
    factor = max(1.0, min(picture.size) / side, max(picture.size) / (8 * side))
    if factor == 1:
        return picture
    width, height = (max(1, round(length / factor)) for length in picture.size)
    return picture.resize((width, height), Image.Resampling.LANCZOS)
