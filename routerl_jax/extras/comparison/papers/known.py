"""All figures of papers in the package. Importing this module registers them."""

from __future__ import annotations

from routerl_jax.extras.comparison.papers import (  # noqa: F401 - they register themselves
    mmsearch_r1,
    r1_router,
    r1_searcher,
    routerag,
    vrag_rl,
)
from routerl_jax.extras.comparison.papers.figure import FIGURE_HEADINGS, PAPER_FIGURES, listing

__all__ = ["FIGURE_HEADINGS", "PAPER_FIGURES", "listing"]
