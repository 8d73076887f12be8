"""Attention of chunks of rows on a CPU."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routerl_jax.engine.cache import quantize_tokens
from routerl_jax.engine.segments import _TILES, _tiles, chunked_attention

STEPS, LENGTH, KV_HEADS, GROUP, WIDTH = 4, 300, 2, 3, 8
ROWS = [3] * 11 + [0] * 8 + [2] + [1] * 3 + [4]  # the last one is padding
CHUNKS = len(ROWS)


def call(int8):
    """Chunks of rows of which some hold tokens already; the last chunk of a row may not be full."""
    rng = np.random.default_rng(0)
    cached = {3: 250, 0: 0, 2: 299, 1: 126, 4: 0}
    starts = [cached[row] + STEPS * ROWS[:i].count(row) for i, row in enumerate(ROWS)]
    counts = [STEPS] * CHUNKS
    counts[10], counts[19], counts[22], counts[-1] = 3, 1, 2, 0
    q = jnp.asarray(rng.normal(size=(CHUNKS, STEPS, KV_HEADS * GROUP, WIDTH)), jnp.float32)
    layer = tuple(jnp.asarray(rng.normal(size=(5, LENGTH, KV_HEADS, WIDTH)), jnp.float32) for _ in "kv")
    layer = tuple(map(quantize_tokens, layer)) if int8 else layer
    return q, layer, *(jnp.asarray(x, jnp.int32) for x in (ROWS, starts, counts))


def reference(q, layer, rows, starts, counts, window):
    """Query by query."""
    keys, values = ((x.codes * x.scale if hasattr(x, "codes") else x) for x in layer)
    out = np.zeros(q.shape)
    for chunk, step in itertools.product(range(CHUNKS), range(STEPS)):
        last = int(starts[chunk]) + step
        seen = slice(0 if window is None else max(0, last - window + 1), last + 1)
        for head in range(KV_HEADS * GROUP):
            k, v = (np.asarray(x[rows[chunk], seen, head // GROUP], np.float64) for x in (keys, values))
            weights = np.exp(k @ np.asarray(q[chunk, step, head], np.float64) / np.sqrt(WIDTH))
            out[chunk, step, head] = weights @ v / weights.sum()
    return out


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("window", [None, 37, 200])
def test_chunks_of_a_row_see_all_tokens_before_each_query(window, int8):
    q, layer, rows, starts, counts = call(int8)
    got = np.asarray(
        jax.jit(chunked_attention, static_argnames="window")(q, layer, rows, starts, counts, window=window)
    )
    wanted = reference(q, layer, rows, starts, counts, window)
    used = np.arange(STEPS) < np.asarray(counts)[:, None]
    np.testing.assert_allclose(got[used], wanted[used], atol=1e-6)


@pytest.mark.parametrize("window", [None, 100])
def test_a_chunk_has_the_same_output_to_the_bit_with_and_without_others(window):
    """So what an engine caches of a row does not depend on which other rows it feeds."""
    rng, steps, width = np.random.default_rng(0), 32, 64
    layer = tuple(jnp.asarray(rng.normal(size=(5, 1024, KV_HEADS, width)), jnp.float32) for _ in "kv")
    q = jnp.asarray(rng.normal(size=(11, steps, KV_HEADS * GROUP, width)), jnp.float32)
    starts = 300 + steps * jnp.arange(11)
    attend = jax.jit(chunked_attention, static_argnames="window")

    def in_calls_of(size):
        parts = [slice(i, min(i + size, 11)) for i in range(0, 11, size)]
        calls = [(q[i], layer, jnp.full(len(q[i]), 3), starts[i], jnp.full(len(q[i]), steps)) for i in parts]
        return np.concatenate([attend(*call, window=window) for call in calls])

    for size in (1, 2, 4):
        np.testing.assert_array_equal(in_calls_of(size), in_calls_of(11))


def test_every_chunk_with_tokens_is_in_one_tile_of_its_row():
    """For random runs of chunks, with as few tiles as their sizes allow."""
    rng, most = np.random.default_rng(0), 100
    tiles_of = jax.jit(lambda rows, counts: [each[1:] for each in _tiles(rows, counts)])
    for _ in range(30):
        runs = rng.integers(1, 20, rng.integers(1, 6))
        rows = np.repeat(rng.permutation(len(runs)), runs)
        padded = np.append(rows, [rows[-1]] * (most - len(rows)))
        tiles = []
        for size, (firsts, number) in zip(
            _TILES, tiles_of(padded, np.where(np.arange(most) < len(rows), 5, 0)), strict=True
        ):
            tiles += [range(first, first + size) for first in np.asarray(firsts)[: int(number)]]
        assert sorted(itertools.chain(*tiles)) == list(range(len(rows)))
        assert all(len(set(rows[list(tile)])) == 1 for tile in tiles)
        fewest = 0
        for run in runs:
            for size in _TILES:
                fewest, run = fewest + run // size, run % size
        assert len(tiles) == fewest
