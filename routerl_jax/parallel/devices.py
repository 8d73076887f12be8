"""Programs on devices: compilations are shown and counted, and work that finds no memory is done in smaller pieces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from absl import logging

from routerl_jax.core.progress import compiling

T = TypeVar("T")
_DETAIL = 200  # characters of XLA's message that are shown
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
    """Number of programs that these jitted functions have compiled so far. It stops growing after warm-up, because shapes are
    rounded to a few sizes."""
    return sum(int(function._cache_size()) for function in functions)  # type: ignore[attr-defined]


class OutOfMemory(ValueError):
    """The devices are out of memory, and nothing can be made smaller while the program runs."""


def with_less(work: Callable[[], T], less: Callable[[], str | None], where: str, remedy: str) -> T:
    """The result of `work`, which is done again in smaller pieces whenever the devices are out of memory.

    With several processes nothing is done again: they must run the same programs, and only some may be out of memory.

    Args:
      less: makes the pieces smaller, and returns the setting with which they would have been so from the start; None if they
        can't be smaller.
      where: name of the whole that the work is part of, for messages.
      remedy: the settings that the user can lower.

    Raises:
      OutOfMemory: it can't be done; names the remedy.
    """
    while True:
        try:
            return work()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            failed: Exception = error
        detail = " ".join(str(failed).split())[:_DETAIL]
        setting = less() if jax.process_count() == 1 else None
        if setting is None:
            raise OutOfMemory(f"out of device memory in {where} ({detail}): {remedy}") from failed
        del failed  # its frames hold arrays
        logging.warning(
            "out of device memory in %s (%s): going on with %s; set it, and the run begins so", where, detail, setting
        )
