"""Multi-turn rollouts and their update beside transformers, TRL and google-tunix, on the shapes of real traces.

    make peers    # google-tunix, in a Python of its own
    python -m benchmarks.agentic [--size=0.9M --size=8M --size=135M] [--repeats=3] [--sides=SIDE,SIDE] \
        [--keep=FILE] [--json]

Work: 64 attempts in groups of 8 whose turns, lengths and documents are those of R1-Searcher's released rollouts, and tools that
sleep as long as a search takes (agentic_work.py); 8 shorter attempts for SmolLM2-135M's shape. All sides have the same
weights and produce the same numbers of tokens. Every side is a process of its own; they work in turn (A B C A B C ...). In one
more rollout of ours every program is waited for, and its time is split into what the machine must take, and the rest.

With --keep, what FILE has already is not measured again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.agentic_worker import Failed, Worker
from routerl_jax.parallel.platform import keep_compilations

# groups, attempts of a group, most tokens of an attempt (0: any), and whether updates recompute activations
SIZES = {"0.9M": (8, 8, 0, 0), "8M": (8, 8, 0, 0), "135M": (2, 4, 2048, 1)}
PEERS = pathlib.Path(".venv-peers/bin/python")  # of `make peers`
PARTS = {
    "rollout": {
        "ours": "agentic_ours rollout",
        "ours-default": "agentic_ours rollout_fixed",
        "transformers": "agentic_torch rollout",
        "transformers-continuous": "agentic_torch rollout_continuous",
        "tunix": "agentic_tunix rollout",
    },
    "update": {
        "ours": "agentic_ours update",
        "ours-shared-prompts": "agentic_ours update_shared",
        "trl": "agentic_torch update",
        "tunix": "agentic_tunix update",
    },
}
WARM_UPS = 6  # at most
Answers = dict[str, list[dict[str, Any]]]  # of every side, round by round


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """A part of one size: the answers of all sides (the first is the warm-up), and why sides failed.

    Attributes:
      gib: of every side, the most memory of an update in a process that compiles nothing, beyond that of its imports.
    """

    size: str
    part: str
    answers: Answers
    failed: dict[str, str]
    gib: dict[str, float]

    def seconds(self, side: str) -> list[float]:
        """Seconds of every round after the warm-up; empty for a side that was not measured."""
        return [answer["seconds"] for answer in self.answers.get(side, [])[1:]]

    def ratios(self, side: str) -> list[float]:
        """Ours against a side, round by round: how many times as fast; sorted."""
        return sorted(theirs / ours for ours, theirs in zip(self.seconds("ours"), self.seconds(side)))

    def last(self, side: str) -> dict[str, Any]:
        """The last answer of a side."""
        return self.answers[side][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", action="append", choices=sorted(SIZES), help="default: all")
    parser.add_argument("--part", action="append", choices=sorted(PARTS), help="default: both")
    parser.add_argument("--sides", default="", help="comma-separated; default: all")
    parser.add_argument("--repeats", type=int, default=3)
    for name in ("groups", "samples", "longest"):
        parser.add_argument(f"--{name}", type=int, help="for a smaller trial")
    parser.add_argument("--peers", type=pathlib.Path, default=PEERS, help="the Python that has google-tunix")
    parser.add_argument("--keep", type=pathlib.Path, help="file of what is measured, one part of a size a line")
    parser.add_argument("--json", action="store_true", help="print ratios and shares of limits alone")
    arguments = parser.parse_args()
    known = {side for sides in PARTS.values() for side in sides}
    if unknown := set(filter(None, arguments.sides.split(","))) - known:
        parser.error(f"--sides: there is no {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
    os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")  # for all sides; ours set it themselves
    keep_compilations()
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    measured = _read(arguments.keep)
    keys = [(size, part) for size in arguments.size or list(SIZES) for part in arguments.part or list(PARTS)]
    for size, part in keys:
        if (size, part) not in measured:
            measured[size, part] = measure(size, part, arguments)
            _append(arguments.keep, measured[size, part])
        if not arguments.json:
            print(table(measured[size, part]), flush=True)
    if arguments.json:
        print(json.dumps(summary([measured[key] for key in keys])))


def measure(size: str, part: str, arguments: argparse.Namespace) -> Measured:
    """All sides in turn, after one warm-up of each; a side that fails is left out from then on."""
    chosen = arguments.sides.split(",") if arguments.sides else [*PARTS["rollout"], *PARTS["update"]]
    sides = [side for side in PARTS[part] if side in chosen]
    failed: dict[str, str] = {}
    if "tunix" in sides and not arguments.peers.exists():
        failed["tunix"] = f"{arguments.peers} is absent: make peers"
    directory = pathlib.Path(tempfile.mkdtemp(prefix="agentic-"))
    answers: Answers = {}
    try:
        _alone(_start("agentic_ours weights", size, directory, arguments))
        if part == "rollout" and "ours" in sides:  # first, as the others' threads would disturb it
            answers["accounts"] = _alone(_start("agentic_ours accounts", size, directory, arguments), warm_up=True)
        workers = {side: _start(PARTS[part][side], size, directory, arguments) for side in sides if side not in failed}
        for repeat in range(-1, arguments.repeats + 1):
            for side, worker in workers.items():
                if side in failed:
                    continue
                try:
                    if repeat < 0:
                        worker.ready()
                        continue
                    answers.setdefault(side, []).append(worker.run() if repeat else _warm_up(worker))
                except Failed as error:
                    failed[side] = str(error)
                    continue
                print(f"{size} {part} {side}: {answers[side][-1]['seconds']:.2f} s", file=sys.stderr, flush=True)
        for worker in workers.values():
            worker.end()
        gib = {}
        if part == "update":  # programs are compiled by now, and are read from JAX's cache
            for side in set(workers) - set(failed):
                [answer] = _alone(_start(PARTS[part][side], size, directory, arguments))
                gib[side] = answer["gib"]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return Measured(size=size, part=part, answers=answers, failed=failed, gib=gib)


def _start(worker_name: str, size: str, directory: pathlib.Path, arguments: argparse.Namespace) -> Worker:
    module, part = worker_name.split()
    groups, samples, longest, checkpointing = SIZES[size]
    shape = {"groups": groups, "samples": samples, "longest": longest}
    shape = {
        name: default if getattr(arguments, name) is None else getattr(arguments, name)
        for name, default in shape.items()
    }
    python = str(arguments.peers) if module == "agentic_tunix" else sys.executable
    command = [
        python,
        "-m",
        f"benchmarks.{module}",
        f"--part={part}",
        f"--size={size}",
        f"--weights={directory}/weights",
    ]
    command += [f"--{name}={value}" for name, value in {**shape, "checkpointing": checkpointing}.items()]
    return Worker(command, os.environ, directory / f"{module}-{part}.log")


def _alone(worker: Worker, *, warm_up: bool = False) -> list[dict[str, Any]]:
    """Lets a worker do its work once, and ends it. With `warm_up`, the first of two answers is of the warm-up."""
    worker.ready()
    answers = [_warm_up(worker)] if warm_up else []
    answers.append(worker.run())
    worker.end()
    return answers


def _warm_up(worker: Worker) -> dict[str, Any]:
    """The first run that compiles nothing, or the last of a few: which rows decode together depends on when tools answer."""
    for _ in range(WARM_UPS):
        answer = worker.run()
        if not answer.get("compilations"):
            break
    return answer


# --- what is printed -------------------------------------------------------------------------------------------------------


def summary(measurements: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """Medians of ratios (above 1: ours is faster, or takes less memory), and shares of limits, by name and size."""
    ratios: dict[str, float] = {}
    shares: dict[str, float] = {}
    limits = {
        measured.size: measured.last("accounts")["limits"]
        for measured in measurements
        if "accounts" in measured.answers
    }
    for measured in measurements:
        for side in measured.answers:
            if side.startswith("ours") or side == "accounts" or not measured.ratios(side):
                continue
            ratios[f"{measured.part}_vs_{side}_{measured.size}"] = statistics.median(measured.ratios(side))
            if {side, "ours"} <= set(measured.gib):
                ratios[f"memory_vs_{side}_{measured.size}"] = measured.gib[side] / measured.gib["ours"]
        shares |= {
            f"{name}_{measured.size}": value for name, value in of_limit(measured, limits.get(measured.size)).items()
        }
    return {"ratios": ratios, "of_limit": shares}


def of_limit(measured: Measured, limits: Mapping[str, Any] | None) -> dict[str, float]:
    """Shares of the machine's limits: the seconds that the work must take over those that it took."""
    shares: dict[str, float] = {}
    if "accounts" in measured.answers:
        shares |= measured.last("accounts")["of_limit"]
    least = _least(measured, limits)
    for side in measured.answers:
        if least is not None and measured.seconds(side):
            shares[f"{measured.part}_{side}"] = least / statistics.median(measured.seconds(side))
    return shares


def _least(measured: Measured, limits: Mapping[str, Any] | None) -> float | None:
    """Seconds that the part must take on this machine."""
    if measured.part == "rollout" and "accounts" in measured.answers:
        lines = measured.last("accounts")["lines"]
        return lines["decode, at the limit"] + lines["prefill, at the limit"]
    if measured.part == "update" and limits is not None and "ours" in measured.answers:
        return measured.last("ours")["flops"] / limits["matmul_flops_per_s"]
    return None


def table(measured: Measured) -> str:
    """Markdown: a row for every side, and for rollouts where our time goes."""
    out = [f"\n{measured.size}, {measured.part}\n", *(f"{side} failed: {why}" for side, why in measured.failed.items())]
    if measured.part == "rollout":
        out += [
            "| side | seconds (range) | attempts/s | ours, times as fast (range) | prefilled / must be | padding | idle rows |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
    else:
        out += [
            "| side | seconds (range) | tokens/s | ours, times as fast (range) | computed / tokens | peak GiB |",
            "|---|---:|---:|---:|---:|---:|",
        ]
    for side in measured.answers:
        if not (seconds := measured.seconds(side)) or side == "accounts":
            continue
        last, median = measured.last(side), statistics.median(seconds)
        cells = [side, f"{median:.2f} ({min(seconds):.2f}-{max(seconds):.2f})"]
        ratios = measured.ratios(side)
        times = (
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})" if ratios and side != "ours" else ""
        )
        if measured.part == "rollout":
            must = measured.answers["ours"][-1]["must_prefill"] if "ours" in measured.answers else 0
            sampled = last["sampled"]
            decoded = last.get("decoded_tokens", sampled)
            cells += [
                f"{_attempts(measured) / median:.2f}",
                times,
                f"{last['prefilled_tokens'] / must:.2f}" if must else "",
                f"{1 - last['prefilled_tokens'] / last['prefill_slots']:.0%}",
                f"{1 - decoded / last['decode_slots']:.0%}",
            ]
        else:
            cells += [
                f"{last['tokens'] / median:,.0f}",
                times,
                f"{last['slots'] / last['tokens']:.2f}",
                f"{measured.gib.get(side, 0):.2f}",
            ]
        out.append(f"| {' | '.join(cells)} |")
    if "accounts" in measured.answers:
        out += _accounts(measured.last("accounts"))
    return "\n".join(out)


def _attempts(measured: Measured) -> int:
    return next((a[-1]["attempts"] for a in measured.answers.values() if "attempts" in a[-1]), 0)


def _accounts(last: Mapping[str, Any]) -> list[str]:
    limits = last["limits"]
    products = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in limits["flops_per_s"].items())
    copies = ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in limits["bytes_per_s"].items())
    shares = ", ".join(f"{name} {share:.0%}" for name, share in last["of_limit"].items())
    lines = [f"| {name} | {value:.2f} | {value / last['seconds']:.0%} |" for name, value in last["lines"].items()]
    return [
        "",
        f"Products, GFLOP/s by tokens with a feed-forward matrix and by side: {products}. Copies, GB/s by MiB: {copies}. "
        f"A call of nothing: {1e6 * limits['dispatch_s']:.0f} us.",
        f"Shares of the limit: {shares}. "
        f"The device idled while a row could run: {last['device_idle_while_a_row_could_run']:.1%}. "
        f"Programs compiled after the warm-up: {last['compilations']}. Calls: {last['calls']}.",
        "",
        "| where a rollout of ours goes | seconds | share |",
        "|---|---:|---:|",
        *lines,
        f"| all | {last['seconds']:.2f} | |",
    ]


def _read(path: pathlib.Path | None) -> dict[tuple[str, str], Measured]:
    if path is None or not path.exists():
        return {}
    rows = [Measured(**json.loads(line)) for line in path.read_text().splitlines()]
    return {(row.size, row.part): row for row in rows}


def _append(path: pathlib.Path | None, measured: Measured) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(measured)) + "\n")


if __name__ == "__main__":
    main()
