"""Late interaction beside torch: MaxSim of many queries over the real ColQwen2 page vectors of VRAG's demo.

    python -m benchmarks.maxsim [--repeats 5] [--json]

ROUTERL_TEST_DATA names the real datasets; torch is needed. All sides score the same float32 vectors on the same cores.
"""

from __future__ import annotations

from routerl_jax.parallel.platform import tune_process

if __name__ == "__main__":
    tune_process()

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.passages import data_directory
from routerl_jax.knowledge.pages.index import MaxSim

COPIES, QUERIES, VECTORS = 8, 32, 16  # pages for each real one; queries, and vectors of a query
_NOISE = 0.02  # of a copy's vectors, each component
_PADDED = 16  # queries and pages of one padded product


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = _measure(COPIES, arguments.repeats)
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=2))


def measure(quick: bool) -> dict[str, Any]:
    """For benchmarks/retrieval.py."""
    return _measure(1 if quick else COPIES, 3 if quick else 5)


def _measure(copies: int, repeats: int) -> dict[str, Any]:
    directory = data_directory() / "vrag_demo_pages"
    with np.load(directory / "colqwen_vectors.npz") as file:
        real = {name: file[name].astype(np.float32) for name in file.files}
    pages, queries = _copies(list(real.values()), copies)
    index = MaxSim(pages)
    sides = {
        "routerl_jax": lambda: index.scores(queries),
        "torch_loop": _torch_loop(pages, queries),
        "torch_padded": _torch_padded(pages, queries),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    scores = {name: side() for name, side in sides.items()}  # warm
    for _ in range(repeats):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - start)
    return {
        "ratios": {
            key: statistics.median(theirs / ours for theirs, ours in zip(seconds[name], seconds["routerl_jax"]))
            for key, name in (("maxsim_vs_torch", "torch_loop"), ("maxsim_vs_torch_padded", "torch_padded"))
        },
        "recall": {},
        "pages": len(pages),
        "vectors": sum(map(len, pages)),
        "queries": QUERIES,
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "largest_difference_from_torch": float(np.abs(scores["routerl_jax"] - scores["torch_loop"]).max()),
        "largest_difference_from_reference": _from_reference(real, directory / "maxsim_reference.json"),
    }


def _copies(real: Sequence[np.ndarray], copies: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Pages with a little noise on every real one's vectors, and queries near some vectors of real pages."""
    rng = np.random.default_rng(0)

    def near(vectors: np.ndarray) -> np.ndarray:
        moved = vectors + _NOISE * rng.standard_normal(vectors.shape, np.float32)
        return moved / np.linalg.norm(moved, axis=-1, keepdims=True)

    queries = [near(real[i % len(real)][5 : 5 + VECTORS]) for i in range(QUERIES)]
    return [near(page) for _ in range(copies) for page in real], queries


def _torch_loop(pages: Sequence[np.ndarray], queries: Sequence[np.ndarray]) -> Callable[[], np.ndarray]:
    """A query and a page at a time."""
    import torch

    ours, theirs = [torch.from_numpy(query) for query in queries], [torch.from_numpy(page) for page in pages]

    def run() -> np.ndarray:
        with torch.inference_mode():
            rows = [torch.stack([(query @ page.T).amax(1).sum() for page in theirs]) for query in ours]
            return torch.stack(rows).numpy()

    return run


def _torch_padded(pages: Sequence[np.ndarray], queries: Sequence[np.ndarray]) -> Callable[[], np.ndarray]:
    """Groups of queries by groups of pages, padded, in one einsum: what colpali-engine's processors do."""
    import torch

    ours, theirs = [torch.from_numpy(query) for query in queries], [torch.from_numpy(page) for page in pages]

    def pad(group: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(group, batch_first=True)

    def run() -> np.ndarray:
        with torch.inference_mode():
            rows = []
            for i in range(0, len(ours), _PADDED):
                some = pad(ours[i : i + _PADDED])
                groups = [pad(theirs[j : j + _PADDED]) for j in range(0, len(theirs), _PADDED)]
                rows.append(torch.cat([torch.einsum("bnd,csd->bcns", some, g).amax(3).sum(2) for g in groups], 1))
            return torch.cat(rows).numpy()

    return run


def _from_reference(real: dict[str, np.ndarray], file: pathlib.Path) -> float:
    """Largest difference of a score of the real pages from the data's own, computed with numpy."""
    reference = json.loads(file.read_text())
    scores = MaxSim(list(real.values())).scores([real[name][5:21] for name in reference])
    return float(np.abs(scores - [[reference[name][page] for page in real] for name in reference]).max())


if __name__ == "__main__":
    main()
