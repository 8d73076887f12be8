"""Routings: they choose the knowledge base of a search, as the policy names it or, for baselines, in another manner."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Protocol

from routerl_jax.core.types import Example


class Routing(Protocol):
    """Chooses the knowledge base that a search really goes to."""

    def __call__(self, named: str, tools: Sequence[str], example: Example, sample: int, step: int) -> str:
        """The member of `tools` for search number `step` (from 0) of an attempt. The policy has named `named`."""
        ...


EVERY_KB = "every_kb"  # in place of a routing: every search goes to all knowledge bases at once


@dataclasses.dataclass(frozen=True)
class PolicyRouting:
    """The knowledge base that the policy names."""

    def __call__(self, named: str, tools: Sequence[str], example: Example, sample: int, step: int) -> str:
        return named


@dataclasses.dataclass(frozen=True)
class FixedRouting:
    """Always the same knowledge base, whatever the policy names."""

    tool: str

    def __call__(self, named: str, tools: Sequence[str], example: Example, sample: int, step: int) -> str:
        return self.tool


@dataclasses.dataclass(frozen=True)
class RandomRouting:
    """A knowledge base drawn uniformly by a hash of (seed, example, sample, step): the same one in every run."""

    seed: int = 0

    def __call__(self, named: str, tools: Sequence[str], example: Example, sample: int, step: int) -> str:
        return tools[zlib.crc32(f"{self.seed}/{example.id}/{sample}/{step}".encode()) % len(tools)]
