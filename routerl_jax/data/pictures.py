"""Where the pictures lie that rows of a file name."""

from __future__ import annotations

import pathlib
from typing import Any

from routerl_jax.core.rows import Place


class MissingPictureError(ValueError):
    """A row names a picture that is not there."""


def picture_name(image: Any) -> str:
    """What names a picture in a file that lies anywhere: its absolute path, or its `data:` URI; "" of one that is in memory."""
    if isinstance(image, str) and image.startswith("data:"):
        return image
    return str(pathlib.Path(image).resolve()) if isinstance(image, str | pathlib.Path) else ""


def picture_beside(name: str, place: Place, otherwise: str) -> pathlib.Path:
    """The picture that a row names by its path: beside the row's file, or in `images` beside it.

    Args:
      otherwise: what else to do about a picture that is not there, for the message.

    Raises:
      MissingPictureError: it is in neither place; names the row.
    """
    beside = place.path.parent
    for path in (beside / name, beside / "images" / name):
        if path.is_file():
            return path
    problem = f"image {name!r} is neither in {beside} nor in {beside / 'images'}; put it there, or {otherwise}"
    raise MissingPictureError(str(place.error(problem)))
