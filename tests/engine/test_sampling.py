"""Sampling against the distributions that it should follow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from routerl_jax.engine.sampling import Sampling, _truncate, row_keys, sample_tokens

DRAWS = 20_000


def draw(logits, temperature=1.0, top_p=None, top_k=None, seed=0):
    """DRAWS samples from one row of logits, each with a key of its own."""
    identity = np.stack([np.arange(DRAWS), np.zeros(DRAWS), np.zeros(DRAWS)], axis=1).astype(np.uint32)
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (DRAWS, len(logits)))
    full = lambda value, dtype: None if value is None else jnp.full(DRAWS, value, dtype)  # noqa: E731
    if (top_p is None) != (top_k is None):
        top_p, top_k = (1.0 if top_p is None else top_p), (0 if top_k is None else top_k)
    return jax.jit(sample_tokens)(
        rows,
        row_keys(jnp.int32(seed), jnp.asarray(identity)),
        jnp.zeros(DRAWS, jnp.int32),
        jnp.full(DRAWS, temperature, jnp.float32),
        full(top_p, jnp.float32),
        full(top_k, jnp.int32),
    )


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def check_frequencies(tokens, expected):
    """Pearson's statistic over the frequent ids: mean df, standard deviation sqrt(2 df); six of these is never met by luck."""
    counts = np.bincount(np.asarray(tokens), minlength=len(expected))
    frequent = expected * DRAWS > 20
    statistic = ((counts - expected * DRAWS)[frequent] ** 2 / (expected * DRAWS)[frequent]).sum()
    df = frequent.sum()
    assert statistic < df + 6 * np.sqrt(2 * df)


@pytest.mark.parametrize("size", [5, 128, 300])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_frequencies_follow_the_softmax(size, temperature):
    logits = np.random.default_rng(size).normal(size=size) * 2
    tokens, logprobs = draw(logits, temperature)
    expected = softmax(logits / temperature)
    check_frequencies(tokens, expected)
    np.testing.assert_allclose(logprobs, np.log(expected)[np.asarray(tokens)], atol=1e-5)


def test_greedy_is_argmax_and_reports_log_probs_at_temperature_one():
    logits = np.random.default_rng(1).normal(size=50)
    tokens, logprobs = draw(logits, temperature=0.0)
    assert set(np.asarray(tokens).tolist()) == {int(np.argmax(logits))}
    np.testing.assert_allclose(logprobs, np.log(softmax(logits)).max(), atol=1e-5)


def support(logits, top_p, top_k):
    """The ids that nucleus sampling after top-k may draw: the smallest most-probable set that holds mass p."""
    p = softmax(logits)
    order = np.argsort(-p)
    order = order[:top_k] if top_k else order
    mass = np.cumsum(p[order]) / p[order].sum()
    return set(order[: int(np.searchsorted(mass, top_p)) + 1].tolist())


@pytest.mark.parametrize(("top_p", "top_k"), [(0.7, 0), (1.0, 5), (0.8, 10), (0.05, 0), (1.0, 1), (0.95, 300)])
def test_truncation_keeps_exactly_the_right_support(top_p, top_k):
    logits = np.random.default_rng(2).normal(size=40) * 1.5
    tokens, logprobs = draw(logits, top_p=top_p, top_k=top_k)
    allowed = support(logits, top_p, min(top_k, 40))
    seen = set(np.asarray(tokens).tolist())
    p = softmax(logits)
    assert seen <= allowed
    inside = np.where(np.isin(np.arange(40), list(allowed)), p, 0.0)
    check_frequencies(tokens, inside / inside.sum())  # renormalised
    np.testing.assert_allclose(logprobs, np.log(p)[np.asarray(tokens)], atol=1e-5)  # of the full distribution


def sorted_truncation(weights, top_p, top_k):
    """The same by sorting, in float64: ids of at least the k-th weight, of them those with less than p of the mass above."""
    kept = np.zeros_like(weights)
    for row, p, k, out in zip(weights.astype(np.float64), top_p, top_k, kept):
        descending = np.sort(row)[::-1]
        kth = descending[min(k, len(row)) - 1] if k else 0.0
        descending = np.where(descending >= kth, descending, 0.0)
        before = np.cumsum(descending) - descending
        needed = (descending > 0) & ((before < np.float64(p) * descending.sum()) | (p >= 1))
        lowest = max(descending[needed].min(), kth)
        out[row >= lowest] = row[row >= lowest]
    return kept


@pytest.mark.parametrize("size", [1, 7, 3000])
def test_truncation_without_sorting_keeps_what_sorting_keeps(size):
    """Whole numbers, whose float32 sums are exact: with many ties, with zeros, one weight alone, all equal, all sizes."""
    rng = np.random.default_rng(size)
    kinds = [
        rng.integers(0, 2000, (64, size)),
        rng.integers(0, 3, (64, size)),
        rng.geometric(0.01, (64, size)) * rng.integers(0, 2, (64, size)),
        np.eye(1, size).repeat(64, axis=0) * 7,
        np.ones((64, size)),
    ]
    weights = np.concatenate(kinds).astype(np.float32)
    weights[:, 0] += weights.sum(axis=1) == 0
    top_p = rng.choice(np.float32([1, 0.5, 0.25, 0.875, 2**-20]), len(weights))  # products with sums are exact
    top_k = rng.choice([0, 1, 2, 5, 2000, 5000], len(weights)).astype(np.int32)
    kept = jax.jit(_truncate)(jnp.asarray(weights), jnp.asarray(top_p), jnp.asarray(top_k))
    np.testing.assert_array_equal(kept, sorted_truncation(weights, top_p, top_k))


def test_truncation_of_real_weights_lies_between_masses_that_differ_by_rounding():
    """float32 sums of 20,000 weights are good to 1e-5: what is kept lies between the sets of p - 1e-5 and p + 1e-5."""
    rng = np.random.default_rng(9)
    weights = np.exp(rng.normal(size=(16, 20_000)) * 3 - 8).astype(np.float32)
    weights[:, :50] = np.float32(1e-40)  # subnormal
    top_p, top_k = rng.uniform(0.05, 0.99, 16).astype(np.float32), rng.integers(0, 2, 16).astype(np.int32) * 900
    kept = np.asarray(jax.jit(_truncate)(jnp.asarray(weights), jnp.asarray(top_p), jnp.asarray(top_k))) > 0
    less, more = (sorted_truncation(weights, top_p + shift, top_k) > 0 for shift in (-1e-5, 1e-5))
    assert (less <= kept).all()
    assert (kept <= more).all()
    assert (kept == less).mean() > 0.999


def test_no_sort_is_compiled_and_a_split_vocabulary_stays_split():
    """Truncation on eight devices that share the vocabulary: no result of a collective is larger than a number per row."""
    mesh = jax.make_mesh((8,), ("tensor",), devices=jax.devices()[:8])
    split = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    logits = jax.ShapeDtypeStruct((4, 4096), jnp.float32, sharding=split)
    per_row = [jax.ShapeDtypeStruct((4,), dtype) for dtype in (jnp.float32, jnp.int32)]
    text = jax.jit(_truncate, out_shardings=split).lower(logits, *per_row).compile().as_text() or ""
    assert " sort(" not in text
    assert "all-gather" not in text
    assert "all-reduce" in text


def test_truncation_of_other_rows_leaves_a_row_exactly_alone():
    """Rows with top_p=1 and no top_k keep every id of a large vocabulary, though float32 sums of it round."""
    rng = np.random.default_rng(4)
    weights = jnp.exp(jnp.asarray(rng.normal(size=(8, 49_152)) * 4, jnp.float32))
    weights = weights.at[:, :100].set(0.0)
    top_p, top_k = jnp.asarray([1.0, 0.9] * 4, jnp.float32), jnp.zeros(8, jnp.int32)
    kept = np.asarray(jax.jit(_truncate)(weights, top_p, top_k))
    np.testing.assert_array_equal(kept[::2], weights[::2])
    assert ((kept[1::2] > 0).sum(axis=-1) < 40_000).all()


def test_ids_of_probability_zero_are_never_drawn():
    logits = np.full(200, -np.inf)
    logits[[3, 150]] = 0.0
    tokens, _ = draw(logits)
    assert set(np.asarray(tokens).tolist()) == {3, 150}


def test_a_row_depends_on_its_own_logits_and_key_only():
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.normal(size=(6, 300)), jnp.float32)
    identity = jnp.asarray(rng.integers(0, 2**32, (6, 3), dtype=np.uint32))
    positions = jnp.arange(6)
    sample = jax.jit(sample_tokens)
    together, _ = sample(logits, row_keys(jnp.int32(7), identity), positions, jnp.ones(6))
    order = np.asarray([4, 1, 5, 0, 3, 2])
    shuffled, _ = sample(logits[order], row_keys(jnp.int32(7), identity[order]), positions[order], jnp.ones(6))
    np.testing.assert_array_equal(np.asarray(together)[order], shuffled)
    moved, _ = sample(logits, row_keys(jnp.int32(8), identity), positions, jnp.ones(6))
    assert (np.asarray(moved) != np.asarray(together)).any()


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -2}])
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Sampling(**bad)
