"""Where a walk starts: weights worked out by hand, the nearest facts, the recognition filter and its nonsense."""

import numpy as np
import pytest

from routerl_jax.knowledge.graph.kb import (
    RecognitionFilter,
    largest_of,
    min_max,
    nearest,
    phrase_weights,
    products,
)
from routerl_jax.services.base import Completion
from tests.knowledge.graph.helpers import Scripted
from tests.knowledge.helpers import InMemory, clustered

ENDS = np.array([[0, 1], [1, 2], [3, 3], [0, 4]])
SCORES = [1.0, 0.8, 0.6, 0.4]
PASSAGES_OF = np.array([2, 1, 4, 1, 1])


def test_average() -> None:
    """0: (1/2 + .4/2)/2, 1: (1 + .8)/2, 2: .8/4, 3: .6 (twice), 4: .4."""
    everything = phrase_weights(ENDS, SCORES, PASSAGES_OF, keep=9)
    assert everything == pytest.approx({1: 0.9, 3: 0.6, 4: 0.4, 0: 0.35, 2: 0.2})
    assert list(phrase_weights(ENDS, SCORES, PASSAGES_OF, keep=3)) == [1, 3, 4]


def test_released() -> None:
    """The last fact's share stands: 0: .4/2, 1: .8; what is kept goes by the mean score: 1 (.9), 2 (.8), 0 (.7), 3, 4."""
    everything = phrase_weights(ENDS, SCORES, PASSAGES_OF, keep=9, rule="released")
    assert everything == pytest.approx({1: 0.8, 2: 0.2, 0: 0.2, 3: 0.6, 4: 0.4})
    assert list(phrase_weights(ENDS, SCORES, PASSAGES_OF, keep=3, rule="released")) == [1, 2, 0]


@pytest.mark.parametrize("count", [3, 500, 70_000])
def test_nearest(count: int) -> None:
    vectors = clustered(count, 8)
    vectors[-1] = vectors[0]  # a tie
    queries = np.concatenate([vectors[:1], clustered(20, 8, seed=3)])
    found = nearest(queries, InMemory(vectors), 5)
    expected = queries.astype(np.float64) @ vectors.T.astype(np.float64)
    for (ids, scores), row in zip(found.best, expected):
        np.testing.assert_allclose(scores, np.sort(row)[::-1][:5], atol=1e-6)
        np.testing.assert_allclose(row[ids], scores, atol=1e-6)
    assert found.best[0][0][:2].tolist() == [0, count - 1]
    np.testing.assert_allclose(found.smallest, expected.min(1), atol=1e-6)
    np.testing.assert_allclose(found.largest, expected.max(1), atol=1e-6)


def test_products_do_not_depend_on_company() -> None:
    queries, keys = clustered(70, 24, seed=1), clustered(301, 24)
    whole = products(queries, keys)
    for some in (slice(0, 1), slice(5, 23), slice(69, 70)):
        np.testing.assert_array_equal(products(queries[some], keys), whole[some])


@pytest.mark.parametrize("size", [1, 7, 300, 20_000])
def test_largest_of(size: int) -> None:
    values = np.random.default_rng(size).integers(0, 50, size=size).astype(np.float32)
    for k in (1, 5, 100):
        expected = np.lexsort((np.arange(size), -values))[:k]
        np.testing.assert_array_equal(largest_of(values, k), expected)


def test_min_max() -> None:
    values = np.array([1.0, 3, 2])
    assert min_max(values, values.min(), values.max()).tolist() == [0, 1, 0.5]
    assert min_max(np.full(3, 2.0), np.float64(2), np.float64(2)).tolist() == [1, 1, 1]


FACTS = [("a", "is", "b"), ("c", "is", "d"), ("e", "is", "f")]


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ('{"keep": [3, 1]}', [2, 0]),
        ('Thinking about it: {"keep": [2]}', [1]),
        ("[2, 2]", [1]),
        ('Of the facts [1] to [3], {"keep": [2]}', [1]),
        ('{"keep": []}', []),
        ('{"keep": [0]}', [0, 1, 2]),
        ('{"keep": [4]}', [0, 1, 2]),
        ('{"keep": ["c is d"]}', [0, 1, 2]),
        ('{"keep": [true]}', [0, 1, 2]),
        ("blah", [0, 1, 2]),
        ("", [0, 1, 2]),
        (Completion(error="gone", finish="error"), [0, 1, 2]),
    ],
)
def test_filter(answer: str | Completion, kept: list[int]) -> None:
    model = Scripted(lambda messages: answer)
    assert RecognitionFilter(model)(["q", "nothing linked"], [FACTS, []]) == [kept, []]
    assert len(model.asked) == 1
    assert 'Question: q\n\n1. ["a", "is", "b"]\n2.' in model.asked[0]


def test_filter_keeps_at_most_four() -> None:
    model = Scripted(lambda messages: '{"keep": [5, 4, 3, 2, 1]}')
    assert RecognitionFilter(model)(["q"], [FACTS + FACTS]) == [[4, 3, 2, 1]]
