"""Which settings a run really reads."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import types
from collections.abc import Iterator
from typing import Any

from routerl_jax.training import config as schema

_SCHEMA = tuple(f"routerl_jax/training/{name}.py" for name in ("config", "sections"))
# Copying, comparing, printing and checking a configuration reads every field and uses none; `in_stage` applies a stage's.
_BOOKKEEPING = (dataclasses.__file__, "<string>", "routerl_jax/core/config.py", *_SCHEMA)


def sections(cls: type = schema.TrainConfig) -> list[type]:
    """The classes of a configuration and of its sections."""
    if cls is schema.TrainConfig:
        return [cls, *_inner(cls), schema.KnowledgeConfig, schema.StageConfig]
    return [cls, *_inner(cls)]


def _inner(cls: type) -> list[type]:
    kinds = [type(field.default) for field in dataclasses.fields(cls) if dataclasses.is_dataclass(field.default)]
    return [section for kind in kinds for section in sections(kind)]


def _outward(frame: types.FrameType | None) -> Iterator[types.CodeType]:
    """What runs in a frame, in its caller, and so on."""
    while frame:
        yield frame.f_code
        frame = frame.f_back


def settings() -> set[str]:
    """All settings, as `Section.field`; a field that is a section does not count."""
    return {
        f"{cls.__name__}.{field.name}"
        for cls in sections()
        for field in dataclasses.fields(cls)
        if not dataclasses.is_dataclass(field.default)
    }


@contextlib.contextmanager
def recorded_reads() -> Iterator[set[str]]:
    """Collects, while it lasts, the settings that are read, bookkeeping aside."""
    reads: set[str] = set()

    def getattribute(self: Any, name: str) -> Any:
        section = next(cls for cls in type(self).__mro__ if cls in classes)  # a copy's class derives from it
        codes = list(itertools.islice(_outward(sys._getframe(1)), 8))
        names = {code.co_name for code in codes}
        bookkeeping = codes[0].co_filename.endswith(_BOOKKEEPING) and "in_stage" not in names
        if not (bookkeeping or "__post_init__" in names or name.startswith("__")):
            reads.add(f"{section.__name__}.{name}")
        return object.__getattribute__(self, name)

    classes: list[Any] = list(dict.fromkeys(sections()))
    for cls in classes:
        cls.__getattribute__ = getattribute
    try:
        yield reads
    finally:
        for cls in classes:
            del cls.__getattribute__
