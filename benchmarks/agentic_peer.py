"""The worker of a peer in `benchmarks.agentic`: its rollout and its update, by the options that the benchmark gives.

The peers may have another Python, so this file imports nothing of theirs or ours.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from benchmarks.agentic_work import Trajectory, asked_work
from benchmarks.agentic_worker import Prepared, serve

MICRO = {"0.9M": 8, "8M": 8, "135M": 1}  # attempts of a micro-batch: TRL's default, and what fits


class Side(Protocol):
    """Some work that is prepared."""

    run: Prepared


def serve_peer(
    rollouts: Mapping[str, Callable[[str, Sequence[Trajectory]], Side]],
    update: Callable[[str, Sequence[Trajectory], int, bool], Side],
    micro_batches: Mapping[str, int] = MICRO,
) -> None:
    """The worker's main program (agentic_worker.serve).

    Args:
      rollouts: by name of the part, prepares a rollout, from the directory of the weights and the work.
      update: prepares the update, from these, the attempts of a micro-batch, and whether activations are computed again.
      micro_batches: attempts of a micro-batch, by size.
    """

    def prepare(rollout: Callable[[str, Sequence[Trajectory]], Side]) -> Callable[[argparse.Namespace], Prepared]:
        return lambda arguments: rollout(arguments.weights, asked_work(arguments)).run

    def prepare_update(arguments: argparse.Namespace) -> Prepared:
        work = asked_work(arguments)
        micro = min(micro_batches[arguments.size], len(work))
        return update(arguments.weights, work, micro, bool(arguments.checkpointing)).run

    serve({**{part: prepare(rollout) for part, rollout in rollouts.items()}, "update": prepare_update})
