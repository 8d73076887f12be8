"""Handles devices that are out of memory: repeats the work in smaller pieces, or raises an error with the setting to lower."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
from absl import logging

T = TypeVar("T")
_DETAIL = 200  # characters of XLA's message that are shown


class OutOfMemory(ValueError):
    """The devices are out of memory, and nothing can be made smaller while the program runs."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is XLA's, of a program or an array that finds no room on a device."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


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
            if not is_out_of_memory(error):
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
