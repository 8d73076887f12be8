"""All tables of papers that come with the package; importing this registers them."""

from __future__ import annotations

from routerl_jax.comparison.papers import r1_searcher  # noqa: F401 - it registers itself
from routerl_jax.comparison.papers.table import PAPER_TABLES

__all__ = ["PAPER_TABLES"]
