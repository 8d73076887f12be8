"""Soft clusters of vectors, by mixtures of Gaussians in few dimensions: first coarse ones over all, then fine ones within each.

Source: RAPTOR (Sarthi et al. 2024, arXiv 2401.18059, section 3). RAPTOR reduces dimensions with UMAP. We use principal
components, which need no further package and are the same in every run. The coarse clusters use the directions of largest
variance over all texts, the fine ones those within their cluster.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from routerl_jax.core.packages import needs

# added to covariances, in units of the points' mean variance: with less, BIC likes clusters of two or three points, whose
# likelihood has no bound
_FLOOR = 1e-2
_NOTHING = 1e-5  # of the widest direction: as little counts as no variation
_PATIENCE = 8  # numbers of clusters without a better BIC after which no larger ones are tried


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """How texts are grouped.

    Attributes:
      dimensions: number of principal components.
      most: most clusters of one mixture; BIC decides how many.
      share: probability above which a text belongs to a cluster. It always belongs to its likeliest one.
    """

    dimensions: int = 10
    most: int = 50
    share: float = 0.1


def soft_clusters(
    vectors: Float[np.ndarray, "N D"],
    lengths: Sequence[int],
    longest: int,
    settings: ClusterSettings,
    seed: int,
) -> list[Int[np.ndarray, " M"]]:
    """Row numbers of each cluster, ascending; every row is in at least one. Equal arguments give equal clusters.

    Args:
      lengths: lengths of the rows' texts. A cluster with a total above `longest` is divided further, down to single rows.
    """
    rows = np.arange(len(vectors))
    clusters: list[Int[np.ndarray, " M"]] = []
    for rough in _mixed(vectors, rows, settings, seed):
        for fine in _mixed(vectors, rough, settings, seed):
            clusters += _short(vectors, fine, np.asarray(lengths), longest, settings, seed)
    distinct = {cluster.tobytes(): cluster for cluster in clusters}
    return sorted(distinct.values(), key=lambda cluster: cluster.tolist())


def reduced(vectors: Float[np.ndarray, "N D"], dimensions: int) -> Float[np.ndarray, "N d"]:
    """The coordinates along the directions of largest variance; at most N - 1 directions, and none without variance."""
    centred = np.asarray(vectors, np.float64) - np.mean(vectors, axis=0, dtype=np.float64)
    tall = len(centred) > centred.shape[1]
    _, spread, directions = np.linalg.svd(np.linalg.qr(centred, mode="r") if tall else centred, full_matrices=False)
    significant = np.flatnonzero(spread > spread[0] * _NOTHING)[: min(dimensions, len(centred) - 1)]
    directions = directions[significant].T
    signs = np.sign(directions[np.abs(directions).argmax(0), np.arange(len(significant))])  # which are left open
    return centred @ (directions * signs)


def best_mixture(points: Float[np.ndarray, "N d"], most: int, seed: int) -> Float[np.ndarray, "N K"]:
    """Each point's probability of each cluster, by the mixture with the lowest BIC among 1, 2, .. `most` Gaussians with full
    covariances. The search stops when BIC no longer falls.

    Raises:
      ValueError: scikit-learn is missing.
    """
    with needs("a tree of summaries", "tree"):
        from sklearn.mixture import GaussianMixture

    floor = _FLOOR * max(float(points.var(0).mean()), np.finfo(np.float64).tiny)
    best, shares, waited = np.inf, np.ones((len(points), 1)), 0
    distinct = len(np.unique(points, axis=0))
    for clusters in range(1, min(most, distinct, len(points) - 1) + 1):
        mixture = GaussianMixture(clusters, reg_covar=floor, random_state=seed).fit(points)
        waited += 1
        if (criterion := float(mixture.bic(points))) < best:
            best, shares, waited = criterion, mixture.predict_proba(points), 0
        if waited > _PATIENCE:
            break
    return shares


def _mixed(
    vectors: Float[np.ndarray, "N D"], rows: Int[np.ndarray, " M"], settings: ClusterSettings, seed: int
) -> list[Int[np.ndarray, " L"]]:
    """Clusters of some rows; a single one if there are hardly more rows than dimensions, or all are equal."""
    if len(rows) <= settings.dimensions + 1:
        return [rows]
    points = reduced(vectors[rows], settings.dimensions)
    if not points.shape[1]:
        return [rows]
    belongs = best_mixture(points, settings.most, seed)
    members = (belongs > settings.share) | (belongs == belongs.max(1, keepdims=True))
    return [rows[column] for column in members.T if column.any()]


def _short(
    vectors: Float[np.ndarray, "N D"],
    rows: Int[np.ndarray, " M"],
    lengths: Int[np.ndarray, " N"],
    longest: int,
    settings: ClusterSettings,
    seed: int,
) -> list[Int[np.ndarray, " L"]]:
    """The cluster, or smaller ones if its texts are too long together."""
    if len(rows) == 1 or lengths[rows].sum() <= longest:
        return [rows]
    parts = _mixed(vectors, rows, settings, seed)
    if any(len(part) == len(rows) for part in parts):  # the mixture does not split it
        parts = _halves(vectors, rows)
    return [short for part in parts for short in _short(vectors, part, lengths, longest, settings, seed)]


def _halves(vectors: Float[np.ndarray, "N D"], rows: Int[np.ndarray, " M"]) -> list[Int[np.ndarray, " L"]]:
    """Splits rows in two along the direction of largest variance; in their order if there is none."""
    points = reduced(vectors[rows], 1)
    order = np.argsort(points[:, 0], kind="stable") if points.shape[1] else np.arange(len(rows))
    half = len(rows) // 2
    return [np.sort(rows[order[:half]]), np.sort(rows[order[half:]])]
