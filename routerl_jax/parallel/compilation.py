"""Counts compilations. Shapes are rounded to a few sizes, so the number of programs stops growing after warm-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def compiled_programs(*functions: Callable[..., Any]) -> int:
    """Number of programs that these jitted functions have compiled so far."""
    return sum(int(function._cache_size()) for function in functions)  # type: ignore[attr-defined]
