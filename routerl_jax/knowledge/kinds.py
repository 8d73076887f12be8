"""All kinds of knowledge bases of the package. Importing this registers how each is built and opened."""

from __future__ import annotations

from routerl_jax.knowledge import bm25, build, dense, graph_rag, hybrid, light_rag  # noqa: F401 - they register themselves
from routerl_jax.knowledge.base import KB_BUILDERS, KB_KINDS
from routerl_jax.knowledge.graph import build as _graph  # noqa: F401
from routerl_jax.knowledge.pages import build as _pages_build  # noqa: F401
from routerl_jax.knowledge.pages import kb as _pages  # noqa: F401
from routerl_jax.knowledge.pictures import build as _pictures_build  # noqa: F401
from routerl_jax.knowledge.pictures import kb as _pictures  # noqa: F401
from routerl_jax.knowledge.tree import build as _tree_build  # noqa: F401
from routerl_jax.knowledge.tree import kb as _tree  # noqa: F401
from routerl_jax.knowledge.web import build as _web  # noqa: F401

__all__ = ["KB_BUILDERS", "KB_KINDS"]
