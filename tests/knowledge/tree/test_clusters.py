"""How many Gaussians are found, and what the clusters of texts must keep."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from routerl_jax.knowledge.tree import ClusterSettings, best_mixture, reduced, soft_clusters

SETTINGS = ClusterSettings(dimensions=3, most=8)


def blobs(sizes: tuple[int, ...], dim: int = 6, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.normal(size=dim) * 9 + rng.normal(size=(size, dim)) for size in sizes])


def test_bic_finds_as_many_as_there_are() -> None:
    for sizes in ((80,), (50, 50), (40, 30, 60)):
        points = blobs(sizes, dim=3, seed=len(sizes))
        belongs = best_mixture(points, 8, seed=0)
        assert belongs.shape[1] == len(sizes)
        labels = belongs.argmax(1)
        starts = np.cumsum([0, *sizes])
        assert all(len(set(labels[a:b])) == 1 for a, b in itertools.pairwise(starts))


def test_points_without_groups_stay_together() -> None:
    """A handful in few dimensions: without a floor under the covariances each two or three of them would be a cluster."""
    for seed in range(5):
        assert best_mixture(np.random.default_rng(seed).normal(size=(12, 3)), 6, seed=0).shape[1] <= 2


@pytest.mark.parametrize("shape", [(30, 6), (6, 30)])
def test_principal_components_keep_distances(shape: tuple[int, int]) -> None:
    vectors = np.random.default_rng(1).normal(size=shape)
    points = reduced(vectors, 100)
    assert points.shape == (shape[0], min(shape[0] - 1, shape[1]))
    apart = np.square(vectors[:, None] - vectors).sum(-1)
    assert np.square(points[:, None] - points).sum(-1) == pytest.approx(apart)
    variance = points.var(0)
    assert (np.diff(variance) <= 0).all()
    assert reduced(vectors, 2) == pytest.approx(points[:, :2])
    assert reduced(np.ones((5, 4)), 3).shape == (5, 0)


def test_every_text_is_somewhere_and_no_group_is_too_long() -> None:
    vectors = blobs((30, 30, 30), seed=5)
    lengths = [10] * 90
    groups = soft_clusters(vectors, lengths, 10_000, SETTINGS, seed=0)
    assert sorted({row for group in groups for row in group}) == list(range(90))
    assert all(len({row // 30 for row in group}) == 1 for group in groups)  # blobs are far from each other
    short = soft_clusters(vectors, lengths, 55, SETTINGS, seed=0)
    assert sorted({row for group in short for row in group}) == list(range(90))
    assert 1 < max(map(len, short)) <= 5
    again = soft_clusters(vectors, lengths, 55, SETTINGS, seed=0)
    assert [group.tolist() for group in again] == [group.tolist() for group in short]


def test_a_text_between_two_groups_is_in_both() -> None:
    rng = np.random.default_rng(2)
    vectors = np.concatenate([rng.normal(size=(60, 2)), rng.normal(loc=(6, 0), size=(60, 2)), [[3.0, 0.0]]])
    belongs = best_mixture(reduced(vectors, 2), 4, seed=0)
    assert belongs.shape[1] == 2
    assert belongs[-1].min() > 0.02
    settings = ClusterSettings(dimensions=2, most=4, share=0.02)
    groups = soft_clusters(vectors, [1] * 121, 1000, settings, seed=0)
    assert sum(120 in group for group in groups) >= 2


def test_equal_texts_do_not_fall_apart_by_their_vectors() -> None:
    groups = soft_clusters(np.ones((20, 4)), [10] * 20, 50, SETTINGS, seed=0)
    assert all(len(group) * 10 <= 50 for group in groups)
    assert sorted({row for group in groups for row in group}) == list(range(20))
    (alone,) = soft_clusters(np.ones((1, 4)), [100], 50, SETTINGS, seed=0)
    assert alone.tolist() == [0]
