"""Decoding, prefill, rollouts and updates on the accelerator at hand, as shares of its limits, and beside peers.

    python -m benchmarks.accelerator [--size=1.5B --size=7B] [--part=decode ..] [--json=FILE] [--tiny]
    python -m benchmarks.accelerator --table=FILE    # of what was measured before

Weights are random, in the shapes of published models. Every part runs in its own process, one after the other, and writes its
numbers to FILE at once. If a part fails or runs out of memory, its last lines are printed, and the other parts keep their
numbers.

A part is one of:

- NAME;
- NAME:DTYPE:REMAT of an update, with the dtype of weights and optimiser state, and the recomputed part (`none`, `dots`, `full`;
  of `peer_update` none or full);
- `generation:SETTING=VALUE` (and `traces:..`), with a setting of the engine.

`traces` and `peer_traces` are rollouts of recorded lengths, with tools that take their time (benchmarks.agentic_work).

Shares are of limits that are measured first. A decode step must move every matrix and the keys and values of every row: these
bytes are compared with the rate of a copy, and FLOPs with the best rate of a product.
"""

from __future__ import annotations

from routerl_jax.parallel.platform import tune_process

if __name__ == "__main__":
    tune_process()

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

SIZES = {
    "135M": "SmolLM2-135M-Instruct",
    "0.5B": "Qwen/Qwen2.5-0.5B-Instruct",
    "1.5B": "Qwen/Qwen2.5-1.5B-Instruct",
    "3B": "Qwen/Qwen2.5-3B-Instruct",
    "7B": "Qwen/Qwen2.5-7B-Instruct",
}
ALONE = ("limits", "check")  # parts that are of no size
PARTS = ("generation", "rollout", "update:float32:dots", "peer_decode", "peer_rollout", "peer_update:float32:full")
_PATIENCE = 900.0  # seconds for a part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", action="append", choices=sorted(SIZES), help="default: 135M, 1.5B and 7B")
    parser.add_argument("--part", action="append", help=f"default: {', '.join((*ALONE, *PARTS))}")
    parser.add_argument("--json", help="file that numbers are appended to, one measurement a line")
    parser.add_argument("--tiny", action="store_true", help="two layers of little width, few tokens: does it run?")
    parser.add_argument("--table", help="print the table of such a file and measure nothing")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    for field, kind in (("rows", int), ("micro-tokens", int), ("sequences", int), ("repeats", int)):
        parser.add_argument(f"--{field}", type=kind, action="append" if field == "rows" else "store")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(_read(pathlib.Path(arguments.table))))
    elif arguments.here:
        _measure(arguments)
    else:
        _all(arguments)


def _all(arguments: argparse.Namespace) -> None:
    """Runs every part in its own process."""
    path = pathlib.Path(arguments.json or pathlib.Path(tempfile.mkdtemp()) / "accelerator.jsonl")
    wanted = arguments.part or [*ALONE, *PARTS]
    sizes = arguments.size or ["135M", "1.5B", "7B"]
    alone = [(sizes[0], part) for part in wanted if part in ALONE]
    for size, part in [*alone, *((size, part) for size in sizes for part in wanted if part not in ALONE)]:
        passed = [f"--rows={rows}" for rows in arguments.rows or []]
        for name in ("micro_tokens", "sequences", "repeats"):
            if getattr(arguments, name):
                passed.append(f"--{name.replace('_', '-')}={getattr(arguments, name)}")
        command = [sys.executable, "-m", "benchmarks.accelerator", "--here", f"--size={size}", f"--part={part}"]
        command += [f"--json={path}", *passed, *["--tiny"] * arguments.tiny]
        started = time.perf_counter()
        environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93", **os.environ}
        try:
            subprocess.run(command, check=True, timeout=_PATIENCE, env=environment, stderr=subprocess.PIPE, text=True)
            outcome = ""
        except subprocess.CalledProcessError as error:
            outcome = f" FAILED: {' | '.join(str(error.stderr).strip().splitlines()[-3:])[-600:]}"
            _append(path, {"size": size, "part": part, "failed": outcome[-300:]})
        except subprocess.TimeoutExpired:
            outcome = f" FAILED: no end after {_PATIENCE:.0f} s"
        print(f"[{time.perf_counter() - started:.0f} s] {size} {part}{outcome}", flush=True)
    print(table(_read(path)))


def _measure(arguments: argparse.Namespace) -> None:
    """One part, in this process."""
    [size], [part] = arguments.size, arguments.part
    name, *options = part.split(":")
    path = pathlib.Path(arguments.json)
    from benchmarks import accelerator_ours as ours
    from benchmarks.accelerator_limits import COPIED, MATMULS, matmul_rates, memory_rate, peak_gib
    from routerl_jax.models.published import architecture_of

    config = architecture_of(SIZES[size])
    shapes = ours.TINY if arguments.tiny else ours.Shapes()
    if arguments.tiny:
        config = dataclasses.replace(
            config, vocab_size=512, embed=32, layers=2, heads=4, kv_heads=2, head_dim=16, mlp=64
        )
    overrides = {"rows": tuple(arguments.rows or ()), "micro_tokens": arguments.micro_tokens}
    overrides |= {"sequences": arguments.sequences, "repeats": arguments.repeats}
    shapes = dataclasses.replace(shapes, **{key: value for key, value in overrides.items() if value})

    def report(what: str, **numbers: Any) -> None:
        line = {"size": size, "part": part, "what": what, **numbers}
        _append(path, line)
        print(json.dumps(line), flush=True)

    from benchmarks.agentic_work import trajectories

    work = trajectories(2, 2, longest=1024) if arguments.tiny else trajectories(shapes.groups // 2, shapes.samples)
    if name.startswith("peer_"):
        from benchmarks import accelerator_peers as theirs

        if name == "peer_update":
            dtype, remat = options
            theirs.update(report, config, shapes, dtype, remat == "full")
        elif name == "peer_traces":
            theirs.traces(report, config, work)
        else:
            {"peer_decode": theirs.decode, "peer_rollout": theirs.rollout}[name](report, config, shapes)
        return
    import jax

    if name == "limits":
        device = jax.devices()[0]
        report("device", kind=device.device_kind, platform=device.platform, jax=jax.__version__)
        report("memory", bytes_per_s=memory_rate(2**20 if arguments.tiny else COPIED, shapes.repeats))
        report("products", flops_per_s=matmul_rates((64,) if arguments.tiny else MATMULS, shapes.repeats))
    elif name == "check":
        ours.check(report, shapes)
    elif name == "update":
        dtype, remat = options
        ours.update(report, config, shapes, dtype, remat)  # type: ignore[arg-type]
    elif name in ("generation", "traces"):
        settings = dict(option.split("=") for option in options)
        engine = {key: int(value) if value.isdigit() else value for key, value in settings.items()}
        if name == "generation":
            ours.generation(report, config, shapes, **engine)
        else:
            ours.traces(report, config, work, shapes.repeats, **engine)
    else:
        ours.rollout(report, config, shapes)
    report("memory peak", gib=peak_gib())


def _append(path: pathlib.Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _read(path: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: limits, correctness, then a row for every measurement, ours beside the peer's where there is one."""
    measurements = {line["what"]: line for line in lines if "what" in line}
    memory = measurements.get("memory", {}).get("bytes_per_s")
    rates = measurements.get("products", {}).get("flops_per_s", {})
    best = max(rates.values(), default=None)
    out = []
    if "device" in measurements:
        out.append(f"{measurements['device']['kind']}, jax {measurements['device']['jax']}")
    if memory:
        out.append(f"copy: {memory / 1e12:.3g} TB/s")
    if best:
        out.append("products: " + ", ".join(f"{side} {rate / 1e12:.0f} TFLOP/s" for side, rate in rates.items()))
    for line in lines:
        if line.get("part") == "check" and "what" in line and line["what"] != "memory peak":
            shown = {key: value for key, value in line.items() if key not in ("size", "part", "what")}
            out.append(f"check: {line['what']}: " + ", ".join(f"{key} {_plain(value)}" for key, value in shown.items()))
    out += [
        "",
        "| size | what | side | | tokens/s | seconds | share of the limit | GiB |",
        "|---|---|---|---|---:|---:|---:|---:|",
    ]
    for line in lines:
        if line.get("what") not in ("decode", "prefill", "rollout", "traces", "update"):
            if "failed" in line:
                out.append(f"| {line['size']} | {line['part']} | | failed | | | | |")
            continue
        rate = next((line[key] for key in ("tokens_per_s", "sampled_per_s") if key in line), 0.0)
        took = line.get("seconds_per_step", line.get("seconds"))
        share = ""
        if "bytes_per_s" in line and memory:
            share = f"{line['bytes_per_s'] / memory:.0%} of the copy"
        elif "flops_per_s" in line and best:
            share = f"{line['flops_per_s'] / best:.0%} of the product"
        detail = (
            f"{line['rows']} rows" if "rows" in line else f"{line.get('dtype', '')} {line.get('remat', '')}".strip()
        )
        if "idle_share" in line:
            detail = f"idle {line['idle_share']:.0%}"
        settings = line.get("part", "").partition(":")[2]
        if line["what"] == "decode" and settings:
            detail += f", {settings}"
        peak = line.get("peak_gib")
        out.append(
            f"| {line['size']} | {line['what']} | {line.get('side', 'ours')} | {detail} | {rate:,.0f} | {took:.4g} | {share} | "
            f"{'' if peak is None else f'{peak:.1f}'} |"
        )
    return "\n".join(out)


def _plain(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
