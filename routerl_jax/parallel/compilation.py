"""Counts compilations. Shapes are rounded to a few sizes, so the number of programs stops growing after warm-up."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from routerl_jax.core.progress import compiling

_BEGINS_AND_ENDS = {
    "/jax/core/compile/jaxpr_to_mlir_module_duration": True,
    "/jax/core/compile/backend_compile_duration": False,
}


@functools.cache
def tell_compilations() -> None:
    """Lets the bar that is shown say when JAX compiles: from the end of a program's lowering to the end of its compilation."""

    def heard(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event in _BEGINS_AND_ENDS:
            compiling(_BEGINS_AND_ENDS[event])

    jax.monitoring.register_event_duration_secs_listener(heard)


def compiled_programs(*functions: Callable[..., Any]) -> int:
    """Number of programs that these jitted functions have compiled so far."""
    return sum(int(function._cache_size()) for function in functions)  # type: ignore[attr-defined]
