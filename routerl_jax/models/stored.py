"""The safetensors format: lists the tensors of a file, maps parts of them, and writes a file tensor by tensor.

The library reads whole tensors and writes whole files. Here a file's pages are in memory only while their rows are copied.
Format: https://github.com/huggingface/safetensors (8 bytes of length, a JSON header, the tensors).
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

# Types of weights that can be read and written.
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    file: pathlib.Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors calls it; `DTYPES` has those that are floating point
    offset: int  # of its first byte in the file

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of the first axis, mapped: read when they are used, and given back with the last reference."""
        width = math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize
        shape = (stop - start, *self.shape[1:])
        return np.memmap(self.file, DTYPES[self.dtype], "r", self.offset + start * width, shape)


def tensors_of(file: pathlib.Path) -> list[StoredTensor]:
    """The tensors of a safetensors file.

    Raises:
      ValueError: the file is absent, damaged, or cut short at any byte.
    """
    if not file.is_file():
        raise ValueError(f"{file} is missing; expected weights in safetensors format")
    try:
        with safe_open(file, "np"):  # checks the header, and that its tensors fill the file
            pass
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or not a safetensors file: {error}") from error
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    return [
        StoredTensor(file, name, tuple(entry["shape"]), entry["dtype"], 8 + size + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    ]


class TensorWriter:
    """Writes a safetensors file, one tensor at a time, in the order of `tensors`.

    Args:
      path: the file; its mode follows the umask.
      tensors: shape and dtype by name, of all that will be written.
    """

    def __init__(self, path: pathlib.Path, tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (shape, dtype) in tensors.items():
            start, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 64)  # data begin at a multiple of 8; of 64, memory that is mapped is well aligned
        self._due = list(tensors.items())
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, tensor: np.ndarray) -> None:
        """Appends the next tensor."""
        name, (shape, dtype) = self._due.pop(0)
        assert tensor.shape == shape, (name, tensor.shape, shape)
        assert tensor.dtype == dtype, (name, tensor.dtype, dtype)
        self._file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)

    def close(self) -> None:
        """Ends the file."""
        self._file.close()

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
