"""Fewer vectors per page: means of those that are alike, or that are neighbours on the page.

Ward's clusters are what ColPali's authors pool by ("token pooling", arXiv 2409.14683); the means of neighbours cost nothing.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from jaxtyping import Float32

Pooling = Literal["ward", "runs"]
POOLINGS = get_args(Pooling)


def pool(vectors: Float32[np.ndarray, "m D"], count: int, method: Pooling = "ward") -> Float32[np.ndarray, "c D"]:
    """At most `count` vectors that stand for a page's: means of groups, at the length that they have.

    Args:
      method: "ward" merges what is nearest, step by step (variance grows least); "runs" cuts the page, whose vectors come in
        reading order of its patches, into stretches of equal length.
    """
    vectors = np.asarray(vectors, np.float32)
    if count == 1:
        return vectors.mean(0, keepdims=True)
    if len(vectors) <= count:
        return vectors
    if method == "runs":
        return np.stack([part.mean(0) for part in np.array_split(vectors, count)])
    from scipy.cluster.hierarchy import fcluster, linkage

    groups = fcluster(linkage(vectors, "ward"), count, "maxclust")
    _, groups, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    sums = np.zeros((len(sizes), vectors.shape[1]), np.float32)
    np.add.at(sums, groups, vectors)
    return sums / sizes[:, None].astype(np.float32)
