r"""A build of millions of passages whose vectors are given: what reading, storing and indexing take without an encoder.

    python -m benchmarks.build_scale --count=2000000 --dim=384 --workdir=/tmp/kb2m [--real=kb/hotpotqa]

Vectors are drawn around those of the knowledge base --real (benchmarks.vectors.mixture), else around random centres.
Prints the build's report, then the time of searches of the built directory.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.vectors import Mixture, real_vectors
from routerl_jax.knowledge.build import BuildConfig, build_kb
from routerl_jax.knowledge.builds import BuildReport, peak_rss
from routerl_jax.knowledge.index import jittered
from routerl_jax.knowledge.load import load_kb


class Given:
    """An encoder that draws vectors, one after the other; queries get the same."""

    def __init__(self, mixture: Mixture) -> None:
        self._mixture = mixture

    def embed(self, inputs: Sequence[str], /, *, prefix: str | None = None, batch_size: int = 32) -> np.ndarray:
        return self._mixture.draw(len(inputs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2_000_000)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--real", type=pathlib.Path)
    arguments = parser.parse_args()
    shutil.rmtree(arguments.workdir, ignore_errors=True)
    encoder = Given(Mixture(real_vectors([arguments.real] if arguments.real else [], arguments.dim)))
    print(build(arguments.workdir, arguments.count, encoder), flush=True)
    _searches(arguments.workdir / "kb", encoder)


def build(workdir: pathlib.Path, count: int, encoder: Given, index: str = "scann") -> BuildReport:
    """Writes a corpus of `count` passages to `workdir` and builds the knowledge base `workdir`/kb of it."""
    workdir.mkdir(parents=True, exist_ok=True)
    corpus = workdir / "corpus.jsonl"
    start = time.perf_counter()
    with corpus.open("w") as file:
        for i in range(count):
            row = {"id": str(i), "title": f"Title {i % 9999}", "text": f"passage {i} of a synthetic corpus"}
            file.write(json.dumps(row) + "\n")
    print(f"corpus of {corpus.stat().st_size / 1e6:.0f} MB written in {time.perf_counter() - start:.0f} s", flush=True)
    config = BuildConfig(corpus=str(corpus), shard_size=65_536, name="synthetic", index=index)
    return build_kb(config, workdir / "kb", encoder=encoder)


def _searches(directory: pathlib.Path, encoder: Given) -> None:
    start = time.perf_counter()
    kb = load_kb(directory, encoder=encoder)
    print(f"opened in {time.perf_counter() - start:.1f} s")
    queries = jittered(kb.store.embeddings, 256)  # type: ignore[attr-defined]
    for size in (1, 64, 256):
        times = []
        for at in range(0, 256, size):
            start = time.perf_counter()
            ids, _ = kb.index.search(queries[at : at + size], 5)  # type: ignore[attr-defined]
            kb.store.passages.take(np.unique(ids))  # type: ignore[attr-defined]
            times.append(time.perf_counter() - start)
        print(
            f"batches of {size}: {1e3 * float(np.median(times)):.1f} ms, {size / float(np.median(times)):.0f} queries/s"
        )
    print(f"peak memory {peak_rss() / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
