"""Pools the vectors of a page: means of similar vectors, or of neighbours on the page.

Ward's clusters are the token pooling of ColPali's authors (arXiv 2409.14683). The means of neighbours cost almost nothing.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from jaxtyping import Float32

Pooling = Literal["ward", "runs"]
POOLINGS = get_args(Pooling)


def pool(vectors: Float32[np.ndarray, "m D"], count: int, method: Pooling = "ward") -> Float32[np.ndarray, "c D"]:
    """At most `count` vectors that represent a page's: means of groups, not normalised.

    Args:
      method: "ward" merges step by step the groups that increase the variance least; "runs" cuts the vectors, which are in
        reading order of the patches, into runs of equal length.
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
