"""Ranks beside python-igraph's PRPACK: all kinds of graphs, host and device; and the bound on the error."""

import numpy as np
import pytest
import scipy.sparse

from routerl_jax.knowledge.graph.pagerank import DevicePageRank, HostPageRank, steps

igraph = pytest.importorskip("igraph")

GRAPHS = {
    "single node": (1, []),
    "no edges": (5, []),
    "path": (4, [(0, 1, 1.0), (1, 2, 2.0), (2, 3, 0.5)]),
    "two parts and a loner": (7, [(0, 1, 1.0), (1, 2, 1.0), (3, 4, 2.0), (4, 5, 1.0)]),
    "parallel edges": (3, [(0, 1, 1.0), (1, 0, 2.0), (0, 1, 0.25), (1, 2, 1.0)]),
    "loops": (4, [(0, 0, 3.0), (0, 1, 1.0), (2, 2, 1.0), (1, 3, 1.0)]),
    "star": (50, [(0, i, 1.0) for i in range(1, 50)]),
}


def random_graph(nodes: int, edges: int, seed: int = 0) -> tuple[int, list[tuple[int, int, float]]]:
    rng = np.random.default_rng(seed)
    popular = rng.zipf(1.6, size=edges) % nodes
    return nodes, list(
        zip(rng.integers(nodes, size=edges).tolist(), popular.tolist(), rng.uniform(0.5, 3, edges).tolist())
    )


def of_igraph(nodes: int, edges: list, reset: np.ndarray, damping: float) -> np.ndarray:
    graph = igraph.Graph(n=nodes, edges=[edge[:2] for edge in edges], directed=False)
    graph.es["weight"] = [edge[2] for edge in edges]
    columns = [
        graph.personalized_pagerank(
            damping=damping, directed=False, weights="weight", reset=column.tolist(), implementation="prpack"
        )
        for column in reset.T
    ]
    return np.stack(columns, axis=1)


def matrix_of(nodes: int, edges: list):
    sources, targets, weights = (np.asarray(part) for part in zip(*edges)) if edges else (np.zeros(0, int),) * 3
    half = scipy.sparse.coo_array((weights.astype(float), (sources, targets)), shape=(nodes, nodes))
    return (half + half.T).tocsr()  # parallel edges are summed, and a loop counts at both of its ends, as in igraph


def resets(nodes: int, queries: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    reset = rng.random((nodes, queries)) * (rng.random((nodes, queries)) < 0.3)
    reset[rng.integers(nodes, size=queries), np.arange(queries)] = 1
    return reset


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("damping", [0.5, 0.85])
def test_equal_to_prpack(name: str, damping: float) -> None:
    nodes, edges = GRAPHS[name]
    reset = resets(nodes, 3)
    expected = of_igraph(nodes, edges, reset, damping)
    matrix = matrix_of(nodes, edges)
    for walk in (HostPageRank(matrix, damping=damping), DevicePageRank(matrix, damping=damping)):
        np.testing.assert_allclose(walk(reset), expected, atol=1e-6)
    exact = HostPageRank(matrix, damping=damping, tolerance=1e-12)
    np.testing.assert_allclose(exact(reset), expected, atol=1e-9)  # PRPACK stops at 1e-10


def test_large_graph_and_its_top_ten() -> None:
    nodes, edges = random_graph(3000, 15000)
    reset = resets(nodes, 40)
    expected = of_igraph(nodes, edges, reset, 0.5)
    matrix = matrix_of(nodes, edges)
    for walk in (HostPageRank(matrix, threads=2), DevicePageRank(matrix)):
        found = walk(reset)
        np.testing.assert_allclose(found, expected, atol=1e-6)
        np.testing.assert_allclose(found.sum(0), 1, atol=1e-5)
        np.testing.assert_array_equal(np.argsort(-found, axis=0)[:10], np.argsort(-expected, axis=0)[:10])


def test_a_column_does_not_depend_on_the_others() -> None:
    matrix = matrix_of(*random_graph(500, 2500))
    reset = resets(500, 70)
    walk = HostPageRank(matrix)
    whole = walk(reset)
    for some in (slice(0, 1), slice(3, 40), slice(69, 70)):
        np.testing.assert_array_equal(walk(reset[:, some]), whole[:, some])


@pytest.mark.parametrize("damping", [0.1, 0.5, 0.85, 0.99])
@pytest.mark.parametrize("tolerance", [1e-3, 1e-6, 1e-9])
def test_error_is_bounded(damping: float, tolerance: float) -> None:
    """Against a dense solver, from the worst start: all weight on a leaf beside a hub."""
    nodes, edges = 200, [(0, i, 1.0) for i in range(1, 199)] + [(0, 0, 50.0), (198, 199, 0.01)]
    matrix = matrix_of(nodes, edges)
    degrees = matrix.sum(0)
    dense = np.eye(nodes) - damping * matrix.toarray() / degrees
    reset = np.eye(nodes)[:, [199, 0, 7]]
    exact = np.linalg.solve(dense, reset)
    exact /= exact.sum(0)
    found = HostPageRank(matrix, damping=damping, tolerance=tolerance)(reset)
    assert np.abs(found - exact).max() <= tolerance
    assert steps(degrees, damping, tolerance) < 20 / (1 - damping)


def test_bad_input() -> None:
    walk = HostPageRank(matrix_of(*GRAPHS["path"]))
    for reset, message in (
        (np.ones((3, 1)), r"reset must be \[4, Q\]"),
        (np.ones(4), r"reset must be \[4, Q\]"),
        (np.array([[1, 0]] * 4), "column 1 must be finite, not negative, and not all zero"),
        (np.array([[1, np.nan]] * 4), "column 1"),
        (np.array([[-1.0], [2], [2], [2]]), "column 0"),
    ):
        with pytest.raises(ValueError, match=message):
            walk(reset)
    assert walk(np.ones((4, 0))).shape == (4, 0)
    for settings in ({"damping": 1.0}, {"damping": -0.1}, {"tolerance": 0.0}, {"tolerance": 2.0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            HostPageRank(matrix_of(*GRAPHS["path"]), **settings)
    with pytest.raises(ValueError, match="needs float64"):
        DevicePageRank(matrix_of(*GRAPHS["path"]), tolerance=1e-9)
