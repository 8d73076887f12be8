"""Who says which knowledge base a search goes to: the policy, or a baseline in its place."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Protocol

from routerl_jax.core.types import Example


class Routing(Protocol):
    """Chooses the knowledge base that is really called."""

    def __call__(self, named: str, tools: Sequence[str], example: Example, sample: int, step: int) -> str:
        """A member of `tools` for search number `step` of an attempt; the policy has named `named`."""
        ...


@dataclasses.dataclass(frozen=True)
class AsNamed:
    """The policy's own choice."""

    def __call__(self, named: str, tools: Sequence[str], example: Example, sample: int, step: int) -> str:
        return named


@dataclasses.dataclass(frozen=True)
class Always:
    """One knowledge base, whatever the policy names."""

    tool: str

    def __call__(self, named: str, tools: Sequence[str], example: Example, sample: int, step: int) -> str:
        return self.tool


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One drawn uniformly by a hash of (seed, example, sample, step), the same in every run."""

    seed: int = 0

    def __call__(self, named: str, tools: Sequence[str], example: Example, sample: int, step: int) -> str:
        return tools[zlib.crc32(f"{self.seed}/{example.id}/{sample}/{step}".encode()) % len(tools)]
