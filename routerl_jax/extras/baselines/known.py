"""All baselines of the package. Importing this module registers them."""

from __future__ import annotations

from routerl_jax.extras.baselines import few_shot, rounds, routing, vanilla_rag  # noqa: F401 - they register themselves
from routerl_jax.extras.baselines.registry import BASELINES

__all__ = ["BASELINES"]
