"""The engine's attention kernels for GPUs by themselves: errors against float32, and times by size of their blocks.

    python -m benchmarks.fused_attention [--json=FILE]

The heads of Qwen2.5-1.5B (12, of 128 channels; two key heads), rows of 1,024 tokens. Needs a GPU that the kernels support.
Decoding is a step of 1, 8, 64 and 256 rows, which writes the new tokens too. Steps of 8 and 64 rows stand beside two that only
attend: with the kernel of prefill, and with plain XLA on rows that lie together. Prefill is 8 and 256 chunks of 64 tokens.
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

from routerl_jax.engine.cache import quantize_tokens
from routerl_jax.engine.fused import fused_attention, fused_decode
from routerl_jax.engine.segments import blockwise_attention, chunked_attention

KV_HEADS, HEADS, WIDTH, ROWS, LENGTH, FILLED = 2, 12, 128, 64, 4096, 1024
PARTS = {1: (16, 32), 8: (8, 16, 32), 64: (2, 4, 8), 256: (1, 2)}  # programs that share a row's keys, by number of rows


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
    for dtype, (steps, window) in itertools.product(("float32", "bfloat16"), ((1, None), (3, 300))):
        error = relative_error_of_a_step(call(steps, ROWS, dtype=dtype), window)
        report("error of a step", dtype=dtype, steps=steps, entries=ROWS, window=window, error=error)
    decoding = {rows: call(1, rows, filled=FILLED) for rows in (8, 64)}
    chunks = {count: call(64, count, filled=FILLED) for count in (8, 256)}
    for (rows, all_parts), keys in itertools.product(PARTS.items(), (32, 64, 128)):
        for parts in all_parts:
            took = step_seconds(call(1, rows, filled=FILLED, rows=max(rows, ROWS)), keys, parts)
            report("decode", rows=rows, keys=keys, parts=parts, microseconds=1e6 * took)
    for rows, inputs in decoding.items():
        report("decode, attending alone", rows=rows, microseconds=1e6 * seconds(inputs, (16, 64)))
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
    rows: int = ROWS,
) -> tuple[Any, ...]:
    """Arguments of the kernel: `rows` rows filled with `filled` tokens, or each with some number."""
    rng = np.random.default_rng(steps + entries)
    layer = tuple(jax.random.normal(jax.random.key(i), (rows, LENGTH, KV_HEADS, width), dtype) for i in range(2))
    q = jnp.asarray(rng.normal(size=(entries, steps, HEADS, width)), dtype)
    of_entry, starts = np.arange(entries) % rows, rng.integers(0, LENGTH - steps, entries)
    counts = np.sort(rng.integers(1, steps + 1, entries))[::-1]
    if filled is not None:
        starts, counts = np.full(entries, filled - steps), np.full(entries, steps)
    row_arrays = [jnp.asarray(x, jnp.int32) for x in (of_entry, starts, counts)]
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


def relative_error_of_a_step(inputs: tuple[Any, ...], window: int | None) -> float:
    """As `relative_error`, of a step that writes new tokens first. Raises if it writes anything else."""
    q, layer, rows, starts, _ = inputs
    counts = jnp.full_like(starts, q.shape[1])
    new = tuple(jax.random.normal(jax.random.key(i), (*q.shape[:2], KV_HEADS, q.shape[-1]), q.dtype) for i in (2, 3))
    positions = starts[:, None] + jnp.arange(q.shape[1])
    written = tuple(leaf.at[rows[:, None], positions].set(x) for leaf, x in zip(layer, new))
    exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (q, written))
    with jax.default_matmul_precision("highest"):
        step = jax.jit(lambda layer: fused_decode(q, new, layer, rows, starts, counts, window), donate_argnums=0)
        got, stored = step(layer)
        wanted = jax.jit(lambda *x: chunked_attention(*x, window=window))(*exact, rows, starts, counts)
    for leaf, expected in zip(stored, written):
        np.testing.assert_array_equal(leaf, expected)
    return float(np.linalg.norm(np.asarray(got, np.float32) - wanted) / np.linalg.norm(wanted))


def step_seconds(inputs: tuple[Any, ...], keys: int, parts: int) -> float:
    """Seconds of one step of decoding, writing included."""
    q, layer, rows, starts, counts = inputs
    new = tuple(jnp.ones((*q.shape[:2], KV_HEADS, q.shape[-1]), q.dtype) for _ in range(2))

    def step(carry: Any) -> Any:
        q, layer = carry
        return fused_decode(q, new, layer, rows, starts - 1, counts, None, keys=keys, parts=parts)

    return _timed(step, (q, layer))


def seconds(inputs: tuple[Any, ...], blocks: tuple[int, int]) -> float:
    """Seconds of one call with these blocks of queries and keys."""
    q, *rest = inputs
    return _timed(lambda q: fused_attention(q, *rest, window=None, blocks=blocks), q)


def plain_seconds(inputs: tuple[Any, ...]) -> float:
    """Seconds of the same attention in plain XLA, over the rows' keys and values in the layout of a decode call."""
    q, layer, rows, *_ = inputs
    keys = layer[0][rows, :FILLED].transpose(0, 2, 3, 1)
    values = layer[1][rows, :FILLED].swapaxes(1, 2)
    seen = jnp.ones((q.shape[0], 1, FILLED), bool)
    return _timed(lambda q: blockwise_attention(q, [(keys, values, seen)]), q)


def _timed(attention: Any, carry: Any, count: int = 100) -> float:
    """The least of five runs of `count` calls, each of which depends on the one before it."""
    run = jax.jit(functools.partial(jax.lax.fori_loop, 0, count, lambda _, carry: attention(carry)), donate_argnums=0)
    carry = jax.block_until_ready(run(jax.tree.map(jnp.copy, carry)))
    least = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        carry = jax.block_until_ready(run(carry))
        least = min(least, time.perf_counter() - started)
    return least / count


if __name__ == "__main__":
    main()
