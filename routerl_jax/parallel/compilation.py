"""Counting compilations: shapes are bucketed, so the number of programs is bounded and stops growing after warm-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def compiled_programs(*functions: Callable[..., Any]) -> int:
    """How many programs these jitted functions have compiled so far."""
    return sum(int(function._cache_size()) for function in functions)  # type: ignore[attr-defined]
