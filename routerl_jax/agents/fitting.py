"""How much of what was found is shown."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

from routerl_jax.core.types import Passage
from routerl_jax.data.trajectories import Document

T = TypeVar("T", Passage, Document)


def fitting(found: Sequence[T], fits: Callable[[Sequence[T]], bool], *, cut: bool = True) -> tuple[T, ...]:
    """As many, best first, as fit whole; else as many words of the first as do, with ` ..` for the rest; () if not one does.

    Args:
      fits: whether there is room for these; if there is for some, there is for fewer.
      cut: whether the first may be shown in part.
    """
    for count in range(len(found), 0, -1):
        if fits(found[:count]):
            return tuple(found[:count])
    if not found or not cut:
        return ()
    first = found[0]

    def beginning(words: int) -> T:
        return dataclasses.replace(first, text=" ".join(first.text.split()[:words]) + " ..")

    words = bisect.bisect_left(range(1, len(first.text.split())), True, key=lambda n: not fits([beginning(n)]))
    return (beginning(words),) if words else ()
