"""The engine's attention kernel for GPUs by itself: errors against float32, and times by size of its blocks.

    python -m benchmarks.fused_attention [--json=FILE]

The heads of Qwen2.5-1.5B (12, of 128 channels; two key heads), rows of 1,024 tokens. Needs a GPU that the kernel supports.
Decoding is a step of 8 and of 64 rows, beside plain XLA on rows that lie together; prefill is 8 and 256 chunks of 64 tokens.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from routerl_jax.generation.attention import blockwise_attention, chunked_attention
from routerl_jax.generation.fused import fused_attention
from routerl_jax.generation.quantized import quantize_tokens

KV_HEADS, HEADS, WIDTH, ROWS, LENGTH, FILLED = 2, 12, 128, 64, 4096, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file that numbers are appended to, one measurement a line")
    arguments = parser.parse_args()

    def report(what: str, **numbers: Any) -> None:
        line = json.dumps({"what": what, **numbers})
        print(line, flush=True)
        if arguments.json:
            with pathlib.Path(arguments.json).open("a") as file:
                file.write(line + "\n")

    report("device", kind=jax.devices()[0].device_kind, jax=jax.__version__)
    for dtype, (steps, entries, window, int8, width) in itertools.product(
        ("float32", "bfloat16"),
        ((1, 3, None, False, 128), (64, 20, None, False, 128), (64, 4, 300, True, 64), (1, 300, 50, True, 16)),
    ):
        inputs = call(steps, entries, width=width, dtype=dtype, int8=int8)
        error = relative_error(inputs, window)
        report("error", dtype=dtype, steps=steps, entries=entries, window=window, int8=int8, width=width, error=error)
    decoding = {rows: call(1, rows, filled=FILLED) for rows in (8, 64)}
    chunks = {count: call(64, count, filled=FILLED) for count in (8, 256)}
    for keys, (rows, inputs) in itertools.product((32, 64, 128), decoding.items()):
        report("decode", rows=rows, keys=keys, microseconds=1e6 * seconds(inputs, (16, keys)))
    for rows, inputs in decoding.items():
        report("decode, plain XLA", rows=rows, microseconds=1e6 * plain_seconds(inputs))
    for queries, keys, (count, inputs) in itertools.product((64, 128), (32, 64, 128), chunks.items()):
        took = seconds(inputs, (queries, keys))
        report("prefill", chunks=count, queries=queries, keys=keys, microseconds=1e6 * took)


def call(
    steps: int,
    entries: int,
    *,
    width: int = WIDTH,
    dtype: str = "bfloat16",
    int8: bool = False,
    filled: int | None = None,
) -> tuple[Any, ...]:
    """Arguments of the kernel: rows filled with `filled` tokens, or each with some number."""
    rng = np.random.default_rng(steps + entries)
    layer = tuple(jnp.asarray(rng.normal(size=(ROWS, LENGTH, KV_HEADS, width)), dtype) for _ in range(2))
    q = jnp.asarray(rng.normal(size=(entries, steps, HEADS, width)), dtype)
    rows, starts = np.arange(entries) % ROWS, rng.integers(0, LENGTH - steps, entries)
    counts = np.sort(rng.integers(1, steps + 1, entries))[::-1]
    if filled is not None:
        starts, counts = np.full(entries, filled - steps), np.full(entries, steps)
    row_arrays = [jnp.asarray(x, jnp.int32) for x in (rows, starts, counts)]
    return q, tuple(map(quantize_tokens, layer)) if int8 else layer, *row_arrays


def relative_error(inputs: tuple[Any, ...], window: int | None) -> float:
    """Norm of the difference to plain XLA in float32, over the norm of that."""
    q, layer, rows, starts, counts = inputs
    exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf, (q, layer))
    with jax.default_matmul_precision("highest"):
        got = jax.jit(lambda *x: fused_attention(*x, window=window))(*inputs)
        wanted = jax.jit(lambda *x: chunked_attention(*x, window=window))(*exact, rows, starts, counts)
    used = np.arange(q.shape[1]) < np.asarray(counts)[:, None]
    difference = (np.asarray(got, np.float32) - np.asarray(wanted))[used]
    return float(np.linalg.norm(difference) / np.linalg.norm(np.asarray(wanted)[used]))


def seconds(inputs: tuple[Any, ...], blocks: tuple[int, int]) -> float:
    """Seconds of one call with these blocks of queries and keys."""
    q, *rest = inputs
    return _timed(lambda q: fused_attention(q, *rest, window=None, blocks=blocks), q)


def plain_seconds(inputs: tuple[Any, ...]) -> float:
    """Seconds of the same attention in plain XLA, over the rows' keys and values in the layout of a decode call."""
    q, layer, rows, *_ = inputs
    keys, values = (leaf[rows, :FILLED].swapaxes(1, 2) for leaf in layer)
    seen = jnp.ones((q.shape[0], 1, FILLED), bool)
    return _timed(lambda q: blockwise_attention(q, [(keys, values, seen)]), q)


def _timed(attention: Any, q: Any, count: int = 30) -> float:
    """The least of five runs of `count` calls, each of which depends on the one before it."""
    run = jax.jit(functools.partial(jax.lax.fori_loop, 0, count, lambda _, q: attention(q)))
    run(q).block_until_ready()
    least = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        run(q).block_until_ready()
        least = min(least, time.perf_counter() - started)
    return least / count


if __name__ == "__main__":
    main()
