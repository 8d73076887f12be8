"""OCR of page images with PP-OCR (rapidocr on onnxruntime), the text baseline of VRAG-RL. Each page is read only once.

Results are cached under $ROUTERL_CACHE/ocr in a file per picture, named by the digest of its bytes and the engine's version.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import pathlib
import threading
from typing import Any, NamedTuple

import numpy as np

from routerl_jax.core.files import cache_directory, write_atomic
from routerl_jax.core.packages import needs
from routerl_jax.models.images import decode_image

_ENGINE = "rapidocr"


class Line(NamedTuple):
    """A line of text, its box (left, top, right, bottom; pixels), and the engine's confidence, 0 to 1."""

    text: str
    box: tuple[float, float, float, float]
    confidence: float


class Ocr:
    """Reads text from pictures. Safe to use from several threads, each of which computes on one core.

    Args:
      cache: directory of cached results; default: $ROUTERL_CACHE/ocr.

    Raises:
      ValueError: the package is not installed.
    """

    def __init__(self, cache: pathlib.Path | None = None) -> None:
        with needs("OCR", "pages"):
            self._version = importlib.metadata.version(_ENGINE)
            import onnxruntime  # noqa: F401 - what it computes with, imported at the first page
            import rapidocr
        self._package = rapidocr
        self._cache = cache or cache_directory() / "ocr"
        self._engines = threading.local()

    def lines(self, picture: bytes, *, name: str = "picture") -> list[Line]:
        """The lines on an encoded picture from top to bottom; [] if it has no text.

        Raises:
          ValueError: the picture can't be read; names it.
        """
        cached = self._cache_file(picture)
        if (result := _read(cached)) is not None:
            return result
        pixels = np.asarray(decode_image(picture, name=name))[:, :, ::-1]  # the engine takes BGR
        result = self._engine()(np.ascontiguousarray(pixels))
        columns = () if result.txts is None else (result.boxes, result.txts, result.scores)
        lines = [_line(box, text, confidence) for box, text, confidence in zip(*columns)]
        _keep(cached, lines)
        return lines

    def text(self, picture: bytes, *, name: str = "picture") -> str:
        """The lines on an encoded picture, one below the other."""
        return "\n".join(line.text for line in self.lines(picture, name=name))

    def _cache_file(self, content: bytes) -> pathlib.Path:
        name = hashlib.sha256(f"{_ENGINE} {self._version}\0".encode() + content).hexdigest()
        return self._cache / name[:2] / f"{name}.json"

    def _engine(self) -> Any:
        if not hasattr(self._engines, "engine"):
            # More threads than cores make its runtime spin: 52 s per page instead of 2, as measured.
            threads = {f"EngineConfig.onnxruntime.{key}_op_num_threads": 1 for key in ("intra", "inter")}
            quiet = {"Global.log_level": "error"}  # it warns of every picture without text
            self._engines.engine = self._package.RapidOCR(params=threads | quiet)
        return self._engines.engine


def _line(box: Any, text: str, confidence: Any) -> Line:
    left, top = (float(min(corner[axis] for corner in box)) for axis in (0, 1))
    right, bottom = (float(max(corner[axis] for corner in box)) for axis in (0, 1))
    return Line(str(text), (left, top, right, bottom), float(confidence))


def _read(path: pathlib.Path) -> list[Line] | None:
    """The cached lines in a file; None if there are none, or the file is damaged."""
    try:
        return [Line(text, tuple(box), confidence) for text, box, confidence in json.loads(path.read_text("utf-8"))]
    except (OSError, ValueError, TypeError):
        return None


def _keep(path: pathlib.Path, lines: list[Line]) -> None:
    write_atomic(path, json.dumps(lines, ensure_ascii=False), shared=True)
