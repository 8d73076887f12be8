"""All benchmarks that come with the package; importing this registers them."""

from __future__ import annotations

from routerl_jax.comparison.benchmarks import (  # noqa: F401 - they register themselves
    atlas,
    bamboogle,
    hotpotqa,
    musique,
    nq,
    popqa,
    tabfact,
    triviaqa,
    two_wiki,
    wikitablequestions,
)
from routerl_jax.comparison.benchmarks.benchmark import BENCHMARKS

__all__ = ["BENCHMARKS"]
