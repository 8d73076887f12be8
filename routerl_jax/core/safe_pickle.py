"""Values of the library's types as bytes that a later process reads: pickles, whose reader makes data and runs nothing.

The reader knows arrays, paths, pictures and the dataclasses of modules that the process has loaded already, such as those of a
user's own agent. Everything else that a pickle could name, it refuses.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import pickle
import sys
from typing import Any

_MARK = b"rj1\n"  # before the digest and the pickle
# What numpy's and Pillow's values and paths are made of, besides dataclasses.
_KNOWN = {
    "builtins": {"set", "frozenset", "bytearray", "complex", "slice", "range"},
    "collections": {"OrderedDict", "deque"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
    "numpy": {"ndarray", "dtype"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.numeric": {"_frombuffer"},
    "numpy._core.numeric": {"_frombuffer"},
    "PIL.Image": {"Image"},
}


def dumps(value: Any) -> bytes:
    """The bytes of a value. Objects that occur twice are one object again after `loads`."""
    data = pickle.dumps(value, protocol=5)
    return _MARK + hashlib.sha256(data).digest() + data


def loads(data: bytes) -> Any:
    """The value of `dumps`.

    Raises:
      ValueError: the bytes are damaged, or hold something that is neither data of a known kind nor a loaded dataclass.
    """
    if data.startswith(_MARK):  # a damaged pickle may ask for any amount of memory and time before it fails
        digest, data = data[len(_MARK) : len(_MARK) + 32], data[len(_MARK) + 32 :]
        if hashlib.sha256(data).digest() != digest:
            raise ValueError("what was kept can't be read: it is damaged (its digest is another)")
    try:
        return _Reader(io.BytesIO(data)).load()
    except Exception as error:  # damaged bytes raise errors of any class
        raise ValueError(f"what was kept can't be read: {str(error) or type(error).__name__}") from error


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        cls: Any = sys.modules.get(module)
        for part in name.split("."):
            cls = getattr(cls, part, None)
        if isinstance(cls, type) and dataclasses.is_dataclass(cls):
            return cls
        raise pickle.UnpicklingError(f"{module}.{name} is no dataclass of a module that is loaded")
