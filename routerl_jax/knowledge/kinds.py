"""All kinds of knowledge bases that come with the package; importing this registers how each is built and opened."""

from __future__ import annotations

from routerl_jax.knowledge import build, dense  # noqa: F401 - they register themselves
from routerl_jax.knowledge.base import KB_BUILDERS, KB_KINDS
from routerl_jax.knowledge.pages import build as build_pages  # noqa: F401
from routerl_jax.knowledge.pages import kb as pages  # noqa: F401
from routerl_jax.knowledge.pictures import build as build_pictures  # noqa: F401
from routerl_jax.knowledge.pictures import kb as pictures  # noqa: F401

__all__ = ["KB_BUILDERS", "KB_KINDS"]
