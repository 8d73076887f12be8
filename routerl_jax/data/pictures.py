"""The pictures of a file's rows: where those lie that a row names, and whether those can be read that it brings along."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Sequence
from typing import Any

from routerl_jax.core.rows import Place


class MissingPictureError(ValueError):
    """A row names a picture that is not there, or brings one along that can't be read."""


def picture_name(image: Any) -> str:
    """What names a picture in a file that lies anywhere: its absolute path, or its `data:` URI; "" of one that is in memory."""
    if isinstance(image, str) and image.startswith("data:"):
        return image
    return str(pathlib.Path(image).resolve()) if isinstance(image, str | pathlib.Path) else ""


def picture_beside(name: str, place: Place, otherwise: str, folders: Sequence[str] = ("images",)) -> pathlib.Path:
    """The picture that a row names by its path: beside the row's file, or in one of `folders` beside it.

    Args:
      otherwise: what else to do about a picture that is not there, for the message.

    Raises:
      MissingPictureError: it is in none of these places; names the row.
    """
    beside = place.path.parent
    directories = [beside, *(beside / folder for folder in folders)]
    for directory in directories:
        if (directory / name).is_file():
            return directory / name
    places = " nor in ".join(map(str, directories))
    raise MissingPictureError(str(place.error(f"image {name!r} is neither in {places}; put it there, or {otherwise}")))


def check_picture(source: bytes | str, place: Place, key: str) -> None:
    """Reads the header of a picture that a row holds itself, as bytes or as a `data:` URI: pixels are decoded when it is shown.

    Raises:
      MissingPictureError: it is no picture; names row and key.
    """
    from PIL import Image  # takes a moment, which files without pictures need not wait for

    from routerl_jax.models.images import image_bytes

    try:
        content = image_bytes(source)
        with Image.open(io.BytesIO(content)):
            return
    except Image.UnidentifiedImageError:
        fault = f"{len(content):,} bytes that are no picture"
    except Exception as error:  # decoders raise whatever they stumble over
        fault = str(error)
    problem = f"key {key!r}: the picture can't be read ({fault}); get the file again, or leave out such rows: "
    raise MissingPictureError(str(place.error(f"{problem}{place.path}[pictures]")))
