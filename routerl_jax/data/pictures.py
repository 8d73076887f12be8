"""The pictures of a file's rows: finds the files that a row names, and checks that pictures can be read."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

from routerl_jax.core.rows import RowLocation

_ENDINGS = (".jpg", ".jpeg", ".JPEG", ".JPG", ".png", ".PNG", ".webp")


class MissingPictureError(ValueError):
    """A row names a picture that does not exist, or holds one that can't be read."""


def picture_name(image: Any) -> str:
    """A name of a picture that is valid in any directory: its absolute path or `data:` URI; "" for a picture in memory."""
    if isinstance(image, str) and image.startswith("data:"):
        return image
    return str(pathlib.Path(image).resolve()) if isinstance(image, str | pathlib.Path) else ""


def picture_beside(
    name: str, location: RowLocation, key: str, otherwise: str, folders: Sequence[str] = ("images",)
) -> pathlib.Path:
    """The picture that a row names by its path: beside the row's file, or in one of `folders` beside it.

    Args:
      key: the row's key with the path, for the message.
      otherwise: what the user can do if the picture is missing or can't be read, for the message.

    Raises:
      MissingPictureError: the picture is in none of these directories, or can't be read; names the row.
    """
    parent = location.path.parent
    directories = [parent, *(parent / folder for folder in folders)]
    for directory in directories:
        if (path := directory / name).is_file():
            if fault := _fault_of_file(path, path.stat().st_mtime_ns):
                raise _unreadable(location, key, fault, otherwise)
            return path
    searched = " nor in ".join(map(str, directories))
    raise MissingPictureError(
        str(location.error(f"image {name!r} is neither in {searched}; put it there, or {otherwise}"))
    )


def picture_called(name: str, location: RowLocation) -> pathlib.Path | None:
    """The picture with an id: `NAME.jpg`, or NAME with another usual ending, in `images` beside the row's file. None if there
    is no such file.

    Raises:
      MissingPictureError: the picture can't be read; names the row.
    """
    for ending in _ENDINGS:
        path = location.path.parent / "images" / f"{name}{ending}"
        if path.is_file():
            if fault := _fault_of_file(path, path.stat().st_mtime_ns):
                raise _unreadable(location, path.name, fault, f"leave out such rows: {location.path}[pictures]")
            return path
    return None


def check_picture(source: bytes | str, location: RowLocation, key: str) -> None:
    """Checks a picture that a row holds as bytes or as a `data:` URI. Raises MissingPictureError, which names row and key,
    if it is no picture or can't be read."""
    if fault := _fault(source):
        raise _unreadable(location, key, fault, f"leave out such rows: {location.path}[pictures]")


@functools.lru_cache(maxsize=100_000)  # many rows name one picture
def _fault_of_file(path: pathlib.Path, changed: int) -> str:
    del changed
    return _fault(path)


def _fault(source: bytes | str | pathlib.Path) -> str:
    """The fault of a picture; "" if it has none."""
    from routerl_jax.models.images import check_image  # a slow import; files without pictures don't need it

    try:
        check_image(source, name="the picture")
    except ValueError as error:
        return str(error).removeprefix("the picture: ")
    return ""


def _unreadable(location: RowLocation, key: str, fault: str, otherwise: str) -> MissingPictureError:
    return MissingPictureError(str(location.error(f"key {key!r}: the picture can't be read: {fault}; or {otherwise}")))
