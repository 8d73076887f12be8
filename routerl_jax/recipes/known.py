"""All recipes that come with the package; importing this registers their grammars, reward terms and agents."""

from __future__ import annotations

from routerl_jax.recipes import (  # noqa: F401 - they register themselves
    r1_router,
    r1_router_recipe,
    r1_router_rewards,
    r1_router_turns,
    r1_searcher,
    routerag,
    search,
    search_r1,
)
from routerl_jax.recipes.recipe import RECIPES

__all__ = ["RECIPES"]
