"""How memory and the least time of a step grow with sequences, groups, models and chips, from the TPU compiler.

    python -m benchmarks.scale --json=FILE [--only=length --only=chips] [--config=..] [--topology=v5e:16x16]
    python -m benchmarks.scale --table=FILE
    python -m benchmarks.scale --least    # from sizes alone, ten times as much of each setting among them; seconds

One setting of R1-Searcher's run at full size changes at a time. Each point compiles the update and decoding
(launch.compile_check) for a slice that is not there, and is appended to FILE as soon as it is known; points that FILE has are
not compiled again. A step is its updates, and decoding as many tokens as its sequences can have. Exponents are slopes of a
line through the logarithms.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    os.environ.update(JAX_PLATFORMS="cpu", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import argparse
import dataclasses
import importlib
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from routerl_jax.core.config import from_config_dict
from routerl_jax.extras.compile_check.check import HBM_GIB, check, step_parts, topology_devices
from routerl_jax.extras.compile_check.roofline import CHIPS
from routerl_jax.extras.compile_check.run_programs import sequences_of_step
from routerl_jax.models.published import architecture_of
from routerl_jax.models.work import Work
from routerl_jax.training.config import TrainConfig

BASE, TOPOLOGY = "configs.r1_searcher_qwen25_7b", "v5e:16x16"
VALUES: dict[str, tuple[Any, ...]] = {
    "length": (2048, 4096, 8192),  # tokens of a conversation at most
    "group": (8, 16, 32),  # attempts at a question; as many rows of the engine as a step has sequences
    "model": ("3B", "7B", "14B"),  # Qwen2.5
    "chips": ("v5e:8x8", "v5e:16x16"),
}
# For --least: the settings as they are, twice and four times as much, and ten times (a number of chips has no slice's name).
LEAST: dict[str, tuple[Any, ...]] = {
    "length": (4096, 8192, 16384, 40960),
    "group": (16, 32, 64, 160),
    "model": ("3B", "7B", "14B", "32B", "72B"),
    "chips": (64, 256, 1024, 2560),
}
_SAME = {"length": "4096", "group": "16", "model": "7B", "chips": "v5e:16x16"}  # the run as it is configured
_UNIT = {"length": "tokens", "group": "attempts", "model": "parameters", "chips": "chips"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """A run with one setting changed. Times are seconds, memory GiB of a chip; None where the compiler finds no room.

    Attributes:
      varied, value: the setting, and its value (of a model its parameters, of a slice its chips).
      update_s, decode_s: all updates of a step, and decoding all its tokens, at least.
      token_s: a token of every row.
      update_bound, decode_bound: the part that takes longest.
      update_gib, decode_gib: memory of the program and of the run's other arrays.
    """

    varied: str
    label: str
    value: float
    topology: str
    update_s: float | None
    decode_s: float | None
    token_s: float | None
    update_bound: str | None
    decode_bound: str | None
    update_gib: float | None
    decode_gib: float | None
    available_gib: float
    mfu: float | None
    hbm_share: float | None
    compile_s: float

    @property
    def step_s(self) -> float | None:
        """Seconds of a step at least."""
        return None if self.update_s is None or self.decode_s is None else self.update_s + self.decode_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=sorted(VALUES), help="default: all")
    parser.add_argument("--json", help="file that points are appended to, one a line")
    parser.add_argument("--table", help="print the table of such a file and compile nothing")
    parser.add_argument("--least", action="store_true", help="print what sizes alone say, and compile nothing")
    parser.add_argument("--topology", default=TOPOLOGY)
    arguments = parser.parse_args()
    path = pathlib.Path(arguments.table or arguments.json or os.devnull)
    points = read(path)
    config = from_config_dict(TrainConfig, importlib.import_module(BASE).get_config())
    if arguments.least:
        print(least_table(config))
        return
    if not arguments.table:
        for varied in arguments.only or list(VALUES):
            for value in VALUES[varied]:
                label = str(value)
                if any(point.varied == varied and point.label == label for point in points):
                    continue
                points.append(measure(config, varied, value, arguments.topology, points))
                with path.open("a") as file:
                    file.write(json.dumps(dataclasses.asdict(points[-1])) + "\n")
                print(points[-1], flush=True)
    print(table(points))


def read(path: pathlib.Path) -> list[Point]:
    """The points of a file; none if it is not there."""
    return [Point(**json.loads(line)) for line in path.read_text().splitlines()] if path.is_file() else []


def changed(config: TrainConfig, varied: str, value: Any, topology: str) -> tuple[TrainConfig, str]:
    """The run with another value of one setting, and its slice. A micro-batch stays one row of each shard."""
    if varied == "length":
        config = dataclasses.replace(
            config,
            engine=dataclasses.replace(config.engine, max_length=value),
            learner=dataclasses.replace(config.learner, length_buckets=(value,)),
        )
    elif varied == "group":
        config = dataclasses.replace(
            config,
            rollout=dataclasses.replace(config.rollout, samples=value),
            engine=dataclasses.replace(config.engine, rows=config.rollout.examples * value),
        )
    elif varied == "model":
        path = f"Qwen/Qwen2.5-{value}-Instruct"
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=path))
    else:
        topology = value
    shards = len(topology_devices(topology)) // config.mesh.tensor
    micro = shards * config.engine.max_length
    return dataclasses.replace(config, learner=dataclasses.replace(config.learner, micro_tokens=micro)), topology


def measure(config: TrainConfig, varied: str, value: Any, topology: str, measured: Sequence[Point] = ()) -> Point:
    """Compiles a point. The run as configured is compiled once: other settings copy its point from `measured`."""
    run, topology = changed(config, varied, value, topology)
    if varied == "model":
        number = float(Work(config=architecture_of(run.model.path)).stored)
    else:
        number = float(len(topology_devices(topology)) if varied == "chips" else value)
    if _SAME[varied] == str(value):
        for point in measured:
            if _SAME[point.varied] == point.label and point.topology == topology:
                return dataclasses.replace(point, varied=varied, label=str(value), value=number)
    report = check(run, topology, ["update", "decode"])
    update, decode = report.programs["update"], report.programs["decode"]
    updates = decoding = None
    if update.roofline is not None and decode.roofline is not None:
        updates, decoding = step_parts(run, update.roofline, decode.roofline)
    return Point(
        varied=varied,
        label=str(value),
        value=number,
        topology=topology,
        update_s=updates,
        decode_s=decoding,
        token_s=decode.roofline and decode.roofline.token_s,
        update_bound=update.roofline and update.roofline.bound,
        decode_bound=decode.roofline and decode.roofline.bound,
        update_gib=_finite(update.hbm_gib_per_chip),
        decode_gib=_finite(decode.hbm_gib_per_chip),
        available_gib=report.hbm_gib,
        mfu=update.roofline and update.roofline.mfu,
        hbm_share=decode.roofline and decode.roofline.hbm_share,
        compile_s=update.compile_s + decode.compile_s,
    )


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def exponent(values: Sequence[float], results: Sequence[float | None]) -> float | None:
    """The slope of the least-squares line through the logarithms; None with fewer than two results."""
    pairs = [(math.log(x), math.log(y)) for x, y in zip(values, results) if y]
    if len(pairs) < 2:
        return None
    x, y = np.array(pairs).T
    return float(np.polyfit(x, y, 1)[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Least:
    """The least time and memory of a step on v5e, from sizes alone: no padding, no recomputation, no network.

    Attributes:
      update_s: needed FLOPs at the chips' peak.
      decode_s, token_s: weights and full cache at the memory's bandwidth, for all tokens of a step, and for one of every row.
      gib: memory of a chip that decodes: the engine's weights, its cache, the learner's weights and moments.
      idle: share of the groups of chips without a conversation in an update.
    """

    update_s: float
    decode_s: float
    token_s: float
    gib: float
    idle: float


def least(config: TrainConfig, chips: int) -> Least:
    """A step of a run whose engine holds a copy in bfloat16 over `tensor`, and whose learner's state is in float32."""
    chip, work, tensor = CHIPS["v5e"], Work(config=architecture_of(config.model.path)), config.mesh.tensor
    groups, length, sequences = chips // tensor, config.engine.max_length, sequences_of_step(config)
    heads = tensor if work.config.kv_heads % tensor == 0 else 1
    cache = -(-config.engine.rows // groups) * work.key_bytes(length) / heads
    read = (work.decode_bytes(1, 0) / tensor + cache) / chip.memory_bandwidth
    held = 2 * work.stored / tensor + cache + 12 * work.stored / chips
    update = -(-sequences // config.learner.minibatches)
    return Least(
        update_s=work.update_flops([length] * sequences) / chips / chip.peak_flops,
        decode_s=-(-sequences // config.engine.rows) * length * read,
        token_s=read,
        gib=held / 2**30,
        idle=1 - update / (-(-update // groups) * groups),
    )


def least_table(config: TrainConfig) -> str:
    """Markdown: `least` for the values of LEAST, each setting's followed by its exponents."""
    lines = [
        "| | a step, s | updates | decoding | ms a token | decode, GiB | groups of chips idle in an update |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for varied, values in LEAST.items():
        estimates, numbers = [], []
        for value in values:
            chips = value if varied == "chips" else 256
            run = changed(config, varied, value, TOPOLOGY)[0] if varied != "chips" else config
            estimate = least(run, chips)
            estimates.append(estimate)
            stored = Work(config=architecture_of(run.model.path)).stored
            numbers.append(float(stored if varied == "model" else value))
            times = [
                estimate.update_s + estimate.decode_s,
                estimate.update_s,
                estimate.decode_s,
                1000 * estimate.token_s,
            ]
            cells = " | ".join(f"{time:.3g}" for time in times)
            lines.append(
                f"| {varied} {value} | {cells} | {_room(estimate.gib, HBM_GIB['TPU v5 lite'])} | {estimate.idle:.0%} |"
            )
        columns = [
            [estimate.update_s + estimate.decode_s for estimate in estimates],
            *(
                [getattr(estimate, name) for estimate in estimates]
                for name in ("update_s", "decode_s", "token_s", "gib")
            ),
        ]
        slopes = " | ".join(f"**{round(exponent(numbers, column) or 0, 2) + 0.0:.2f}**" for column in columns)
        lines.append(f"| exponent in {_UNIT[varied]} | {slopes} | |")
    return "\n".join(lines)


def table(points: Sequence[Point]) -> str:
    """Markdown: the points, each setting's followed by its exponents."""
    lines = [
        "| | a step, s | updates | decoding | ms a token | MFU | HBM | update, GiB | decode, GiB | binds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for varied in VALUES:
        group = sorted((point for point in points if point.varied == varied), key=lambda point: point.value)
        for point in group:
            share = [_percent(point.mfu), _percent(point.hbm_share)]
            times = [
                _number(point.step_s),
                _number(point.update_s),
                _number(point.decode_s),
                _number(point.token_s, 1000),
            ]
            memory = [_room(gib, point.available_gib) for gib in (point.update_gib, point.decode_gib)]
            bound = f"{point.update_bound or '?'}, {point.decode_bound or '?'}"
            lines.append(f"| {varied} {point.label} | {' | '.join([*times, *share, *memory, bound])} |")
        if len(group) > 1:
            values = [point.value for point in group]
            exponents = [
                exponent(values, [getattr(point, name) for point in group])
                for name in ("step_s", "update_s", "decode_s", "token_s")
            ]
            exponents += [
                None,
                None,
                *(exponent(values, [getattr(p, f"{n}_gib") for p in group]) for n in ("update", "decode")),
            ]
            cells = " | ".join("" if slope is None else f"**{round(slope, 2) + 0.0:.2f}**" for slope in exponents)
            lines.append(f"| exponent in {_UNIT[varied]} | {cells} | |")
    return "\n".join(lines)


def _number(value: float | None, times: float = 1.0) -> str:
    return "" if value is None else f"{times * value:.3g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _room(gib: float | None, available: float) -> str:
    if gib is None:
        return "does not fit"
    return f"{gib:.2f}" + (" (does not fit)" if gib > available else "")


if __name__ == "__main__":
    main()
