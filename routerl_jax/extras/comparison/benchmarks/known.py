"""All benchmarks of the package. Importing this module registers them."""

from __future__ import annotations

from routerl_jax.extras.comparison.benchmarks import (  # noqa: F401 - they register themselves
    atlas,
    bamboogle,
    dyn_vqa,
    hotpotqa,
    hybridqa,
    infoseek,
    mmsearch_r1,
    musique,
    nq,
    open_wikitable,
    ottqa,
    popqa,
    r1_router,
    tabfact,
    triviaqa,
    two_wiki,
    vrag_rl,
    webqa,
    wikitablequestions,
)
from routerl_jax.extras.comparison.benchmarks.benchmark import BENCHMARKS

__all__ = ["BENCHMARKS"]
