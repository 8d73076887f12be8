"""Personalised PageRank of many queries at once, on an undirected weighted graph, on the host or on a device.

Let A be the adjacency matrix, P = A D^-1 its columns divided by their sums (the nodes' degrees), d the damping and v a query's
reset distribution. The ranks are x = d (P x + v * x(nodes without edges)) + (1 - d) v. A walk at a node without edges restarts
from v, as in igraph. So x is y / sum(y) with (I - d P) y = v.

D^-1/2 P D^1/2 is symmetric with eigenvalues in [-1, 1], so Chebyshev's iteration solves the system (Golub and Van Loan, Matrix
Computations, 11.2.8). Each step is one product of the sparse matrix with the block of all queries. Let
r = d / (1 + sqrt(1 - d^2)), which is 0.27 at d = 0.5 (plain iteration has the factor 0.5 per step). After k steps, the error of
any rank is at most 2 d r^k sqrt(largest degree / smallest degree). So the number of steps follows from the tolerance and the
graph, and the result of a query does not depend on the other queries.

Dimensions: N nodes, Q queries.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
import os

import jax
import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np
import scipy.sparse
import scipy.sparse.csgraph
from jaxtyping import Array, Float

_COLUMNS = 16  # queries that a thread works on at a time
_FLOAT32_TOLERANCE = 2e-7  # rounding error of float32; for a smaller tolerance float64 is used
# queries of a device program, and most products of matrix and block in its memory
_DEVICE_COLUMNS, _PRODUCTS = 64, 2**28


class HostPageRank:
    """PageRank on the host: compressed rows times a dense block, with threads over the queries.

    Nodes are in the reverse Cuthill-McKee order, in which neighbours are close to each other, and so in the CPU's cache.

    Args:
      matrix: symmetric adjacency with values above 0.
      damping: probability of walking on, in [0, 1).
      tolerance: bound on the error of a rank. From 2e-7 on float32 suffices; below it, float64 is used.
      threads: default: one per core, up to 16.

    Called with a block of reset distributions, it returns the ranks of all nodes; every column sums to 1.

    Raises:
      ValueError: the damping is outside of [0, 1), or the tolerance outside of [1e-14, 1). When called: the number of rows is
        not that of nodes, or a column is not finite, has a negative value or is all zero.
    """

    def __init__(
        self,
        matrix: scipy.sparse.csr_array,
        *,
        damping: float = 0.5,
        tolerance: float = 1e-6,
        threads: int | None = None,
    ) -> None:
        self.damping, self.nodes = damping, len(matrix.indptr) - 1
        self.steps = steps(_degrees(matrix), damping, tolerance)
        self.dtype = np.dtype(np.float32 if tolerance >= _FLOAT32_TOLERANCE else np.float64)
        self._threads = threads or min(os.cpu_count() or 1, 16)
        self._order = scipy.sparse.csgraph.reverse_cuthill_mckee(scipy.sparse.csr_matrix(matrix), symmetric_mode=True)
        ordered = scipy.sparse.csr_array(matrix[self._order][:, self._order])
        self._matrix = (damping * _transition(ordered)).astype(self.dtype)

    def __call__(self, reset: Float[np.ndarray, "N Q"]) -> Float[np.ndarray, "N Q"]:
        reset = _checked(reset, self.nodes)
        ranks = np.empty(reset.shape, self.dtype)
        blocks = [slice(start, start + _COLUMNS) for start in range(0, reset.shape[1], _COLUMNS)]

        weights = [self.dtype.type(weight) for weight in weights_of_steps(self.damping, self.steps)]

        def solve(block: slice) -> None:
            start = reset[self._order, block]
            v = (start / start.sum(0, dtype=np.float64)).astype(self.dtype, order="C")
            before, now = np.zeros_like(v), v
            for weight in weights:
                after = self._matrix @ now
                after += v
                after -= before
                after *= weight
                after += before
                before, now = now, after
            ranks[self._order, block] = now / now.sum(0, dtype=np.float64).astype(self.dtype)

        with concurrent.futures.ThreadPoolExecutor(min(self._threads, max(1, len(blocks)))) as pool:
            list(pool.map(solve, blocks))
        return ranks


class DevicePageRank:
    """`HostPageRank` on JAX's default device, in float32, with the matrix as coordinates (BCOO).

    On a CPU this takes a third of the time of rows padded to powers of two, and less than a segment sum. It was not measured on
    other devices. GPUs add in no fixed order, so ranks may differ by rounding from call to call.
    """

    def __init__(self, matrix: scipy.sparse.csr_array, *, damping: float = 0.5, tolerance: float = 1e-6) -> None:
        if tolerance < _FLOAT32_TOLERANCE:
            raise ValueError(
                f"tolerance={tolerance} needs float64: use the host, or a tolerance from {_FLOAT32_TOLERANCE}"
            )
        self.damping, self.nodes = damping, len(matrix.indptr) - 1
        self.steps = steps(_degrees(matrix), damping, tolerance)
        self._matrix = jax.experimental.sparse.BCOO.from_scipy_sparse(
            (damping * _transition(matrix)).astype(np.float32).tocoo()
        )
        self._columns = max(1, min(_DEVICE_COLUMNS, _PRODUCTS // max(matrix.nnz, 1)))
        self._weights = tuple(weights_of_steps(damping, self.steps))

    def __call__(self, reset: Float[np.ndarray, "N Q"]) -> Float[np.ndarray, "N Q"]:
        reset = _checked(reset, self.nodes)
        v = (reset / reset.sum(0, dtype=np.float64)).astype(np.float32)
        blocks = []
        for start in range(0, v.shape[1], self._columns):
            block = v[:, start : start + self._columns]
            missing = self._columns - block.shape[1]  # padded to one width, so that there is one program
            solved = _chebyshev(self._matrix, np.pad(block, ((0, 0), (0, missing))), self._weights)
            blocks.append(np.asarray(solved)[:, : block.shape[1]])
        return np.concatenate(blocks, axis=1) if blocks else v


def steps(degrees: Float[np.ndarray, " N"], damping: float, tolerance: float) -> int:
    """Number of steps after which the error of every rank is below the tolerance (see the module's docstring).

    Raises:
      ValueError: the damping is outside of [0, 1), or the tolerance outside of [1e-14, 1).
    """
    if not 0 <= damping < 1:
        raise ValueError(f"damping={damping} must lie in [0, 1)")
    if not 1e-14 <= tolerance < 1:
        raise ValueError(f"tolerance={tolerance} must lie in [1e-14, 1)")
    joined = degrees[degrees > 0]
    if damping == 0 or not len(joined):
        return 0
    rate = damping / (1 + math.sqrt(1 - damping**2))
    spread = math.sqrt(joined.max() / joined.min())
    return max(1, math.ceil(math.log(2 * damping * spread / tolerance) / -math.log(rate)))


def weights_of_steps(damping: float, count: int) -> list[float]:
    """Chebyshev's weights: y' = y_before + weight (v + d P y - y_before)."""
    weights: list[float] = []
    for i in range(count):
        weights.append(1.0 if i == 0 else 1 / (1 - damping**2 * weights[-1] / (2 if i == 1 else 4)))
    return weights


def _degrees(matrix: scipy.sparse.csr_array) -> np.ndarray:
    return np.asarray(matrix.sum(0)).reshape(-1)


def _transition(matrix: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
    degrees = _degrees(matrix).astype(np.float64)
    inverse = np.divide(1.0, degrees, out=np.zeros_like(degrees), where=degrees > 0)
    result = scipy.sparse.csr_array(matrix, dtype=np.float64, copy=True)
    result.data *= inverse[result.indices]
    return result


def _checked(reset: np.ndarray, nodes: int) -> np.ndarray:
    reset = np.asarray(reset)
    if reset.ndim != 2 or len(reset) != nodes:
        raise ValueError(f"reset must be [{nodes}, Q], a column per query, got {reset.shape}")
    smallest, sums = reset.min(0, initial=0), reset.sum(0, dtype=np.float64)
    bad = ~np.isfinite(sums) | (smallest < 0) | (sums <= 0)
    if bad.any():
        raise ValueError(f"reset column {int(bad.argmax())} must be finite, not negative, and not all zero")
    return reset


@functools.partial(jax.jit, static_argnums=2)
def _chebyshev(matrix: jax.experimental.sparse.BCOO, v: Array, weights: tuple[float, ...]) -> Array:
    before, now = jnp.zeros_like(v), v
    for weight in weights:
        before, now = now, before + weight * (matrix @ now + v - before)
    return now / now.sum(0)
