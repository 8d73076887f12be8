"""A search for a run's best mesh, micro-batches and rows on a slice: each choice is compiled, and its least time estimated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection

from absl import logging

from routerl_jax.extras.compile_check.check import ProgramReport, Report, check
from routerl_jax.extras.compile_check.chips import CHIPS, chip_of, topology_devices
from routerl_jax.extras.compile_check.roofline import Estimate
from routerl_jax.extras.compile_check.run_programs import sequences_of_step
from routerl_jax.models.published import architecture_of
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.setup import check_engine_devices, random_architecture

Check = Callable[[TrainConfig, str, Collection[str]], Report]

_ROWS_OF_A_SHARD = (1, 2, 4)  # of a micro-batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """Settings with their estimate. The times are None if a program does not fit.

    Attributes:
      update_s: all updates of a step.
      tokens_per_s: decoded tokens per second of the slice, with every row full.
      step_s: the updates and the decoding of all tokens that a step's sequences can have; the longer of the two if the engine
        has devices of its own (`config.mesh.engine`). Real sequences are shorter.
      gib: memory of the larger of the two programs, per chip.
    """

    data: int
    fsdp: int
    tensor: int
    micro_tokens: int
    rows: int
    update_s: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    gib: float = 0.0

    def flags(self) -> str:
        """The choice as flags of a launch program."""
        settings = {
            "mesh.data": self.data,
            "mesh.fsdp": self.fsdp,
            "mesh.tensor": self.tensor,
            "learner.micro_tokens": self.micro_tokens,
            "engine.rows": self.rows,
        }
        return " ".join(f"--config.{name}={value}" for name, value in settings.items())


def search(config: TrainConfig, topology: str, *, compile_and_weigh: Check = check) -> list[Choice]:
    """All choices, the best that fits first.

    `tensor` is every power of two that divides the query heads and the devices; all other devices are on `fsdp`. For each mesh
    the update is compiled with micro-batches of one, two and four rows per shard, and decoding with the configured rows and
    with as many rows as a step has sequences.

    Raises:
      ValueError: the run generates nothing, the slice's chip has no published peaks here, or `check` raises it.
    """
    if config.kind != "rl":
        raise ValueError(
            f"--search chooses for runs that generate and learn (kind='rl'); this one is of kind={config.kind!r}"
        )
    slice_devices = topology_devices(topology)
    if chip_of(slice_devices[0]) is None:
        kind = slice_devices[0].device_kind
        raise ValueError(f"--search estimates times, and the peaks of {kind!r} are unknown; known: {', '.join(CHIPS)}")
    check_engine_devices(config.mesh, len(slice_devices))
    devices = len(slice_devices) - config.mesh.engine
    architecture = architecture_of(config.model.path) if config.model.path else random_architecture(config.model)
    heads = getattr(architecture, "text", architecture).heads  # of a model that sees, its decoder's
    common = math.gcd(devices, config.mesh.engine, heads)
    tried: list[Choice] = []
    for tensor in [2**i for i in range(common.bit_length()) if common % 2**i == 0]:
        mesh = dataclasses.replace(config.mesh, data=1, fsdp=devices // tensor, tensor=tensor)
        run = dataclasses.replace(config, mesh=mesh)
        updates = {}
        for micro in _micro_batches(run):
            changed = dataclasses.replace(run, learner=dataclasses.replace(run.learner, micro_tokens=micro))
            updates[micro] = compile_and_weigh(changed, topology, ["update"]).programs["update"]
        decodes = {}
        shards = config.mesh.engine // tensor or devices // tensor
        for rows in sorted({-(-rows // shards) * shards for rows in (config.engine.rows, sequences_of_step(config))}):
            changed = dataclasses.replace(run, engine=dataclasses.replace(run.engine, rows=rows))
            decodes[rows] = compile_and_weigh(changed, topology, ["decode"]).programs["decode"]
        choices = [_choice(run, micro, rows, updates[micro], decodes[rows]) for micro in updates for rows in decodes]
        tried += choices
        best = min(choices, key=_sort_key)
        logging.info("tensor=%d: %s", tensor, best)
    return sorted(tried, key=_sort_key)


def _sort_key(choice: Choice) -> tuple[bool, float]:
    """Sort key: layouts that fit first, then the fastest."""
    return choice.step_s is None, choice.step_s or choice.gib


def _micro_batches(config: TrainConfig) -> list[int]:
    """Tokens of one, two and four of the longest rows per shard, if a mini-batch has so many sequences."""
    longest = max(config.learner.length_buckets or (config.engine.max_length,))
    shards = config.mesh.data * config.mesh.fsdp
    sequences = -(-sequences_of_step(config) // config.learner.minibatches)
    return [shards * longest * rows for rows in _ROWS_OF_A_SHARD if rows == 1 or shards * rows <= sequences]


def _choice(config: TrainConfig, micro: int, rows: int, update: ProgramReport, decode: ProgramReport) -> Choice:
    choice = Choice(
        data=config.mesh.data,
        fsdp=config.mesh.fsdp,
        tensor=config.mesh.tensor,
        micro_tokens=micro,
        rows=rows,
        gib=max(update.hbm_gib_per_chip, decode.hbm_gib_per_chip),
    )
    if not (update.fits and decode.fits) or update.roofline is None or decode.roofline is None:
        return choice
    updates, decoding = step_parts(config, update.roofline, decode.roofline)
    step = max(updates, decoding) if config.mesh.engine else updates + decoding
    return dataclasses.replace(choice, update_s=updates, tokens_per_s=decode.roofline.tokens_per_s, step_s=step)


def step_parts(config: TrainConfig, update: Estimate, decode: Estimate) -> tuple[float, float]:
    """Seconds of a step's updates, and of decoding all tokens that its sequences can have, by the estimates of a call."""
    assert decode.tokens_per_s is not None, "of a program that decodes"
    decoding = sequences_of_step(config) * config.engine.max_length / decode.tokens_per_s
    return update.seconds * config.learner.minibatches, decoding
