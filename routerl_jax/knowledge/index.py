"""Search over vectors by inner product: one interface (`VectorIndex`), two backends, and the registry of them."""

from __future__ import annotations

from routerl_jax.knowledge.exact_index import ExactIndex
from routerl_jax.knowledge.scann_index import ScannIndex, ScannSettings
from routerl_jax.knowledge.vector_index import INDEXES, VectorIndex, VectorSource

__all__ = ["INDEXES", "ExactIndex", "ScannIndex", "ScannSettings", "VectorIndex", "VectorSource"]
