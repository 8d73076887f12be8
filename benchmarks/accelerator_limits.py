"""Measures the limits of a device. routerl_jax/models/work.py counts the work, whose share of a limit is then known."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

MATMULS = (2048, 4096, 8192, 16384)  # sides of square products
COPIED = 2**32  # bytes of the array that is copied


def timed(function: Callable[[], Any], repeats: int, warm_up: int = 1) -> list[float]:
    """Seconds of each call after the first `warm_up`; the result is waited for."""
    seconds = []
    for _ in range(warm_up + repeats):
        started = time.perf_counter()
        jax.block_until_ready(function())
        seconds.append(time.perf_counter() - started)
    return seconds[warm_up:]


def matmul_rates(sides: tuple[int, ...], repeats: int, dtype: Any = jnp.bfloat16) -> dict[str, float]:
    """FLOP/s of square products of random matrices, by side; ten in a row, so that launching costs nothing."""
    count = 10

    @jax.jit
    def chain(x: Array, y: Array) -> Array:
        return jax.lax.fori_loop(0, count, lambda _, x: (x @ y).astype(dtype), x)

    rates = {}
    for side in sides:
        x, y = (jax.random.normal(jax.random.key(i), (side, side), dtype) * side**-0.5 for i in range(2))
        rates[str(side)] = 2 * side**3 * count / statistics.median(timed(lambda x=x, y=y: chain(x, y), repeats))
    return rates


def memory_rate(size: int, repeats: int) -> float:
    """Bytes/s of a copy of `size` bytes, those read and those written: an array plus one, ten calls in a row."""
    x = jax.random.normal(jax.random.key(0), (size // 4,), jnp.float32)
    count, plus_one = 10, jax.jit(lambda x: x + 1)

    def again() -> Array:
        y = x
        for _ in range(count):
            y = plus_one(y)
        return y

    return 2 * size * count / statistics.median(timed(again, repeats))


def peak_gib() -> float | None:
    """Most memory that the allocator has handed out in this process, GiB; None where it does not tell (CPUs)."""
    statistics_of_device = jax.local_devices()[0].memory_stats() or {}
    peak = statistics_of_device.get("peak_bytes_in_use")
    return None if peak is None else peak / 2**30
