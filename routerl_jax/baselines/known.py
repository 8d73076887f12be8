"""All baselines that come with the package; importing this registers them."""

from __future__ import annotations

from routerl_jax.baselines import direct, ircot, iter_retgen, react, search_o1, self_ask, vanilla_rag  # noqa: F401
from routerl_jax.baselines.registry import BASELINES

__all__ = ["BASELINES"]
