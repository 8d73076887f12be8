"""How many of the passages found by a search fit into the room for an observation."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

from routerl_jax.core.types import Passage
from routerl_jax.data.trajectories import Document

T = TypeVar("T", Passage, Document)


def fitting(items: Sequence[T], fits: Callable[[Sequence[T]], bool], *, cut: bool = True) -> tuple[T, ...]:
    """As many whole items as fit, best first; else as many words of the first one as fit, then ` ..`; () if no word fits.

    Args:
      items: the items, best first.
      fits: whether there is room for these items. It must also hold for fewer or shorter items.
      cut: whether the first one may be shown in part.
    """
    for count in range(len(items), 0, -1):
        if fits(items[:count]):
            return tuple(items[:count])
    if not items or not cut:
        return ()
    first = items[0]

    def beginning(words: int) -> T:
        return dataclasses.replace(first, text=" ".join(first.text.split()[:words]) + " ..")

    words = bisect.bisect_left(range(1, len(first.text.split())), True, key=lambda n: not fits([beginning(n)]))
    return (beginning(words),) if words else ()
