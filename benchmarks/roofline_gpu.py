"""Compares the roofline of launch.compile_check with what was measured on a GPU that is not here.

    python -m benchmarks.roofline_gpu benchmarks/results/accelerator_h100.jsonl [benchmarks/results/accelerator_h200.jsonl] \
        [--json=FILE]

The files are those of benchmarks.accelerator. XLA compiles for GPUs only where there is one. So each measured update, prefill
and decode call is lowered at the same sizes and compiled for one TPU v5p; FLOPs and bytes of that program take their time at
the GPU's peaks. Both peaks are used: those that are published (extras/compile_check/roofline.py), and those that the file's own
run measured.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    os.environ.update(JAX_PLATFORMS="cpu", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import argparse
import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.accelerator import SIZES
from benchmarks.accelerator_ours import Shapes
from routerl_jax.extras.compile_check.check import compile_for_tpu, topology_devices
from routerl_jax.extras.compile_check.hlo_costs import Costs, count
from routerl_jax.extras.compile_check.roofline import CHIPS, Chip, estimate
from routerl_jax.extras.compile_check.run_programs import run_programs
from routerl_jax.parallel.mesh import make_mesh
from routerl_jax.training import config as schema

COMPILED_FOR = "v5p:2x2x1"  # one of its chips has more memory than the GPUs
SEGMENT = 32  # steps of a measured decode call


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Seconds of an update, or of a decoded token of every row: predicted by two kinds of peaks, and measured."""

    card: str
    size: str
    what: str
    published_s: float
    limits_s: float
    measured_s: float
    bound: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", nargs="+", type=pathlib.Path, help="files of benchmarks.accelerator")
    parser.add_argument("--json", type=pathlib.Path, help="file that comparisons are appended to, one a line")
    arguments = parser.parse_args()
    header = True
    for path in arguments.measured:
        for comparison in compare([json.loads(line) for line in path.read_text().splitlines()]):
            print(table([comparison], header=header), flush=True)
            header = False
            if arguments.json:
                with arguments.json.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(comparison)) + "\n")


def compare(lines: Sequence[Mapping[str, Any]]) -> Iterator[Comparison]:
    """A comparison for each update and each decode call of ours that was measured with the usual settings."""
    card = next(line["card"] for line in lines if "card" in line)
    [published] = [chip for name, chip in CHIPS.items() if name in card]
    limits = measured_limits(lines, published)
    for line in lines:
        usual = line.get("side", "ours") == "ours" and (
            line.get("part") == "generation" or line.get("what") == "update"
        )
        if not usual or line.get("what") not in ("update", "decode"):
            continue
        decodes = line["what"] == "decode"
        costs = count_decode(line) if decodes else count_update(line)
        by = [estimate(costs, chip) for chip in (published, limits)]
        share = 1 / SEGMENT if decodes else 1.0
        yield Comparison(
            card=published.name,
            size=line["size"],
            what=f"decode, {line['rows']} rows" if decodes else f"update, {line['dtype']}, remat {line['remat']}",
            published_s=by[0].seconds * share,
            limits_s=by[1].seconds * share,
            measured_s=line["seconds_per_step" if decodes else "seconds"],
            bound=by[1].bound,
        )


def measured_limits(lines: Sequence[Mapping[str, Any]], chip: Chip) -> Chip:
    """The chip with the rates of a copy and of the fastest product that the file's run measured."""
    measurements = {line["what"]: line for line in lines}
    return dataclasses.replace(
        chip,
        name=f"{chip.name}, measured",
        peak_flops=max(measurements["products"]["flops_per_s"].values()),
        memory_bandwidth=measurements["memory"]["bytes_per_s"],
    )


def count_decode(line: Mapping[str, Any]) -> Costs:
    """A call of SEGMENT steps, every row at the live length."""
    return _decode(line["size"], line["rows"], line["live"])


@functools.cache
def _decode(size: str, rows: int, live: int) -> Costs:
    run = _run(size, "bfloat16", engine=schema.EngineConfig(rows=rows, max_length=live, segment=SEGMENT))
    cached = -(-live // 128) * 128  # the paged cache has whole pages
    return _count(run, "decode", filled=live / cached)


def count_update(line: Mapping[str, Any]) -> Costs:
    """All micro-batches of an update, and the optimiser's step."""
    length = Shapes().length
    run = _run(
        line["size"],
        line["dtype"],
        engine=schema.EngineConfig(rows=1, max_length=length, segment=SEGMENT),
        rollout=schema.RolloutConfig(examples=line["tokens"] // length // 2, samples=2),
        learner=schema.LearnerConfig(
            length_buckets=(length,), micro_tokens=line["micro_tokens"], remat=line["remat"], minibatches=1
        ),
    )
    return _count(run, "update")


def _run(size: str, dtype: Any, **settings: Any) -> schema.TrainConfig:
    model = schema.ModelConfig(path=SIZES[size], dtype=dtype, compute_dtype="bfloat16")
    mesh = schema.MeshConfig(data=1, fsdp=1, tensor=1, layout="replicated")
    knowledge = {"text": schema.KnowledgeConfig(source="corpus.jsonl")}  # a run has one; it takes no part
    return schema.TrainConfig(model=model, mesh=mesh, knowledge=knowledge, **settings)


def _count(run: schema.TrainConfig, name: str, **options: Any) -> Costs:
    mesh = make_mesh(devices=topology_devices(COMPILED_FOR)[:1])
    program = run_programs(run, mesh, mesh)[1][name]
    return count(compile_for_tpu(program.lowered)[1], trips=program.trips, **options)


def table(comparisons: Sequence[Comparison], *, header: bool = True) -> str:
    """Markdown."""
    lines = [
        "| card | size | | predicted, published peaks | predicted, measured limits | measured | predicted / measured | binds |",
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    for row in comparisons:
        times = [f"{1000 * seconds:.4g} ms" for seconds in (row.published_s, row.limits_s, row.measured_s)]
        ratios = f"{row.published_s / row.measured_s:.2f}, {row.limits_s / row.measured_s:.2f}"
        lines.append(f"| {row.card} | {row.size} | {row.what} | {' | '.join(times)} | {ratios} | {row.bound} |")
    return "\n".join(lines if header else lines[2:])


if __name__ == "__main__":
    main()
