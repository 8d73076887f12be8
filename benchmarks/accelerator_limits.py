"""What a device can do, measured, and what work must do at least: the two numbers behind every share of a limit."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from routerl_jax.models.config import DecoderConfig

MATMULS = (2048, 4096, 8192, 16384)  # sides of square products
COPIED = 2**32  # bytes of the array that is copied


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What one decoder's tokens take. Norms, rotations and sampling are left out: their share is below a percent.

    Attributes:
      matrices: entries of the matrices that every token goes through, the output projection included.
      stored: entries of all parameters; an embedding that is not the output projection, too, is read by rows.
    """

    config: DecoderConfig
    bytes_per_entry: int = 2

    @property
    def matrices(self) -> int:
        config = self.config
        attention = config.embed * config.head_dim * 2 * (config.heads + config.kv_heads)
        return config.layers * (attention + 3 * config.embed * config.mlp) + config.embed * config.vocab_size

    @property
    def stored(self) -> int:
        config = self.config
        biases = (config.heads + 2 * config.kv_heads) * config.head_dim if config.qkv_bias else 0
        norms = 2 * config.head_dim * config.qk_norm
        untied = 0 if config.tied_embeddings else config.embed * config.vocab_size
        return self.matrices + untied + config.layers * (2 * config.embed + biases + norms) + config.embed

    def key_bytes(self, tokens: int) -> int:
        """Keys and values of one conversation of so many tokens."""
        return 2 * self.config.layers * self.config.kv_heads * self.config.head_dim * tokens * self.bytes_per_entry

    def decode_bytes(self, rows: int, tokens: int) -> int:
        """Least bytes of one step: every matrix once, and the keys and values of every row's `tokens` cached tokens."""
        return self.matrices * self.bytes_per_entry + rows * self.key_bytes(tokens)

    def forward_flops(self, lengths: list[int], *, unembedded: int | None = None) -> float:
        """FLOPs of whole sequences: two per entry and token, and causal attention, which sees half of the square.

        Args:
          unembedded: tokens that go through the output projection; default: all. (Prefill needs none.)
        """
        config, tokens = self.config, sum(lengths)
        output = config.embed * config.vocab_size
        products = 2 * (self.matrices - output) * tokens + 2 * output * (tokens if unembedded is None else unembedded)
        seen = sum(length * (length + 1) / 2 for length in lengths)
        return products + 4 * config.layers * config.heads * config.head_dim * seen

    def update_flops(self, lengths: list[int]) -> float:
        """Forward and backward of whole sequences; what is computed again to save memory does not count."""
        return 3 * self.forward_flops(lengths)


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
