"""The directory for all that can be made or fetched again: weights, knowledge bases, replies, compiled programs."""

from __future__ import annotations

import os
import pathlib


def cache_directory() -> pathlib.Path:
    """$ROUTERL_CACHE, default ~/.cache/routerl_jax."""
    return pathlib.Path(os.environ.get("ROUTERL_CACHE") or pathlib.Path.home() / ".cache" / "routerl_jax")
