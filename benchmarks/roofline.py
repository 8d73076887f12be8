"""Compares the roofline of launch.compile_check with measurements on this machine: updates and decoding, three model sizes.

    python -m benchmarks.roofline [--size=0.9M --size=8M --size=107M] [--repeats=5] [--json=FILE]

It uses the same count (extras/compile_check/hlo_costs.py) and the same estimate (extras/compile_check/roofline.py), for the
programs that the learner and the engine run here. The peaks of this machine are measured in the same run, with products as
large as the model's and sums of arrays as large as its activations. A prediction is a lower bound: measured over predicted is
at least about 1.
"""

from __future__ import annotations

from routerl_jax.parallel.platform import tune_process

if __name__ == "__main__":
    tune_process()

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import peers
from benchmarks.accelerator_limits import memory_rate, timed
from routerl_jax.core.ledger import Ledger
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.sampling import Sampling
from routerl_jax.extras.compile_check.hlo_costs import Costs, count
from routerl_jax.extras.compile_check.roofline import Chip, Estimate, estimate
from routerl_jax.learning.batch import BatchLayout
from routerl_jax.learning.learner import Learner
from routerl_jax.learning.losses import LossConfig, token_weights
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.models.config import DecoderConfig
from routerl_jax.parallel.mesh import make_mesh

ROWS, LENGTH, SEGMENT = 64, 256, 16
SEQUENCES, MICRO = 32, 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """A program of one size: seconds of a call, predicted and measured (the median)."""

    size: str
    program: str
    predicted_s: float
    measured_s: float
    range_s: tuple[float, float]
    bound: str
    gflop: float
    mb: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured_s / self.predicted_s


class Watched:
    """A jitted program that records the costs and the times of its calls, by the shapes of their arguments."""

    def __init__(self, program: Any) -> None:
        self._program = program
        self.costs: dict[str, Costs] = {}
        self.seconds: dict[str, list[float]] = {}

    def __call__(self, **arguments: Any) -> Any:
        shapes = [str(getattr(leaf, "shape", leaf)) for leaf in jax.tree.leaves(arguments)]
        statics = [str(value) for value in arguments.values() if isinstance(value, (int, bool))]
        key = " ".join((*shapes, *statics))
        if key not in self.costs:
            text = self._program.lower(**arguments).compile().as_text()
            batch = arguments.get("batch")
            self.costs[key] = count(text, trips=1 if batch is None else int(batch.count))
        started = time.perf_counter()
        result = jax.block_until_ready(self._program(**arguments))
        self.seconds.setdefault(key, []).append(time.perf_counter() - started)
        return result

    def _cache_size(self) -> int:
        return self._program._cache_size()

    def compare(self, size: str, name: str, chip: Chip) -> Comparison:
        """The comparison for the shapes that were called most, without the first call."""
        key = max(self.seconds, key=lambda key: len(self.seconds[key]))
        predicted, measured = estimate(self.costs[key], chip), self.seconds[key][1:]
        return _comparison(size, name, predicted, measured)


def _comparison(size: str, name: str, predicted: Estimate, measured: list[float]) -> Comparison:
    return Comparison(
        size=size,
        program=name,
        predicted_s=predicted.seconds,
        measured_s=statistics.median(measured),
        range_s=(min(measured), max(measured)),
        bound=predicted.bound,
        gflop=predicted.flops / 1e9,
        mb=predicted.hbm_bytes / 1e6,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", action="append", choices=sorted(peers.SIZES), help="default: all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="file for the numbers")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:  # what is compiled to be counted is run, too
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        _all(arguments)


def _all(arguments: argparse.Namespace) -> None:
    comparisons = []
    for size in arguments.size or list(peers.SIZES):
        comparisons += [update(size, arguments.repeats), decode(size, arguments.repeats)]
        print(table(comparisons[-2:], header=len(comparisons) == 2), flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(
                {
                    "of_limit": {
                        f"{comparison.program}_{comparison.size}": 1 / comparison.ratio for comparison in comparisons
                    }
                },
                file,
                indent=2,
            )


def machine(rows: int, config: DecoderConfig, repeats: int) -> Chip:
    """This machine as a chip: products of `rows` tokens with a feed-forward matrix, and arrays of their activations."""
    count, inner = 10, config.embed
    x = jax.random.normal(jax.random.key(0), (rows, inner), jnp.float32)
    y = jax.random.normal(jax.random.key(1), (count, inner, config.mlp), jnp.float32) * inner**-0.5
    z = jax.random.normal(jax.random.key(2), (count, config.mlp, inner), jnp.float32) * config.mlp**-0.5

    @jax.jit
    def chain(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (x @ w[0] @ w[1], None), x, (y, z))[0]

    seconds = statistics.median(timed(lambda: chain(x, y, z), repeats, warm_up=2))
    flops = 4 * rows * inner * config.mlp * count / seconds
    rate = memory_rate(4 * max(rows * config.mlp, 2**18), repeats)
    return Chip(
        name="this machine",
        peak_flops=flops,
        memory_bandwidth=rate,
        link_bandwidth=1.0,
        torus_axes=0,
        source="measured",
    )


def update(size: str, repeats: int) -> Comparison:
    """Updates of packed rows, all weights trained."""
    model = peers.policy(size)
    layout = BatchLayout(make_mesh(), (LENGTH,), MICRO)
    learner = Learner(model, OptimizerConfig(lr=1e-5, weight_decay=0.0).build(1000), LossConfig(), layout)
    watched = Watched(learner._programs.update)
    learner._programs = dataclasses.replace(learner._programs, update=watched)
    rng, sequences = np.random.default_rng(0), []
    for _ in range(SEQUENCES):
        ledger = Ledger()
        ledger.feed(rng.integers(0, peers.VOCABULARY, LENGTH // 2).tolist())
        ledger.sample(rng.integers(0, peers.VOCABULARY, LENGTH // 2).tolist(), [-7.0] * (LENGTH // 2), 0)
        sequences.append(ledger.sequence())
    weights = token_weights([sequence.loss_mask for sequence in sequences], "token", 1.0)
    for _ in range(repeats + 1):
        learner.update(layout.build(sequences, weights, rng.normal(size=SEQUENCES).tolist())[0])
    return watched.compare(size, "update", machine(MICRO, model.config, repeats))


def decode(size: str, repeats: int) -> Comparison:
    """Calls of the decoding program, all rows alive."""
    model = peers.policy(size)
    assert model.tokenizer is not None
    model.tokenizer.eos_ids = frozenset()
    engine = Engine(model, rows=ROWS, max_length=LENGTH, segment=SEGMENT)
    watched = Watched(engine._calls._programs.decode)
    engine._calls._programs = dataclasses.replace(engine._calls._programs, decode=watched)
    rng = np.random.default_rng(0)
    prompt, sampled = LENGTH // 2, min(SEGMENT * (repeats + 1), LENGTH // 2 - 1)
    for i in range(ROWS):
        stream = engine.open(rng.integers(0, peers.VOCABULARY, prompt).tolist(), str(i))
        engine.request(stream, max_tokens=sampled, sampling=Sampling())
    while engine.busy:
        engine.step()
    return watched.compare(size, f"decode, {SEGMENT} steps", machine(ROWS, model.config, repeats))


def table(comparisons: list[Comparison], *, header: bool = True) -> str:
    """Markdown."""
    lines = [
        "| size | program | predicted | measured (range) | ratio | binds | GFLOP | MB |",
        "|---|---|---:|---:|---:|---|---:|---:|",
    ]
    for row in comparisons:
        low, high = row.range_s
        lines.append(
            f"| {row.size} | {row.program} | {1000 * row.predicted_s:.1f} ms | {1000 * row.measured_s:.1f} ms "
            f"({1000 * low:.1f}-{1000 * high:.1f}) | {row.ratio:.2f} | {row.bound} | {row.gflop:.2f} | {row.mb:.1f} |"
        )
    return "\n".join(lines if header else lines[2:])


if __name__ == "__main__":
    main()
