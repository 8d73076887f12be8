"""All recipes of the package. Importing this registers their grammars, reward terms and agents."""

from __future__ import annotations

from routerl_jax.recipes import r1_searcher, routerag, search, search_r1  # noqa: F401 - they register themselves
from routerl_jax.recipes.mmsearch_r1 import agents as mmsearch_r1  # noqa: F401
from routerl_jax.recipes.r1_router import agents as r1_router  # noqa: F401
from routerl_jax.recipes.r1_router import grammar, rewards  # noqa: F401
from routerl_jax.recipes.recipe import RECIPES
from routerl_jax.recipes.vrag_rl import agents as vrag_rl  # noqa: F401

__all__ = ["RECIPES"]
