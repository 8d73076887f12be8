"""Which settings are chosen for a slice, and that they are tried on the run's own programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import pytest

from routerl_jax.extras.compile_check.check import ProgramReport, Report, search
from routerl_jax.extras.compile_check.hlo_costs import Costs, Operation
from routerl_jax.extras.compile_check.roofline import CHIPS, estimate
from routerl_jax.training.config import TrainConfig
from tests.training.small_policy import small_policy

SLICE = "v5e:2x2"

pytestmark = pytest.mark.usefixtures("tpu_compiler")


def run(**learner: Any) -> TrainConfig:
    """32 sequences of 256 tokens a step, in two updates; 16 rows; four heads."""
    config = small_policy()
    rollout = dataclasses.replace(config.rollout, examples=8)
    return dataclasses.replace(
        config, rollout=rollout, learner=dataclasses.replace(config.learner, minibatches=2, **learner)
    )


class Weighed:
    """Stands in for the compiler: programs that take as long as their settings say, of which some do not fit."""

    def __init__(self, too_large: int = 10**9) -> None:
        self.asked: list[tuple[str, int, int, int]] = []
        self._too_large = too_large

    def __call__(self, config: TrainConfig, topology: str, programs: Collection[str]) -> Report:
        [name] = programs
        tensor, micro, rows = config.mesh.tensor, config.learner.micro_tokens, config.engine.rows
        self.asked.append((name, tensor, micro if name == "update" else 0, rows if name == "decode" else 0))
        seconds = (1 + abs(tensor - 2)) * (1 + 1024 / micro) if name == "update" else 0.001 * tensor
        costs = Costs(operations=(Operation(name="x", flops=197e12 * seconds, bytes=0, times=1),), collectives=())
        decoded = (config.engine.segment, rows) if name == "decode" else None
        report = ProgramReport(
            hbm_gib_per_chip=micro / 1024,
            fits=name != "update" or micro < self._too_large,
            roofline=estimate(costs, CHIPS["v5e"], decoded=decoded),
        )
        return Report(
            fits=report.fits,
            topology=topology,
            compiler="libtpu 1, jax 2",
            device="",
            devices=4,
            mesh={},
            engine_mesh={},
            hbm_gib=1.0,
            programs={name: report},
        )


def test_what_is_tried_and_chosen() -> None:
    """tensor of 1, 2 and 4; micro-batches of one, two and four rows a shard, as far as an update's 16 sequences go round."""
    compiler = Weighed()
    found = search(run(), SLICE, compile_and_weigh=compiler)
    assert {tensor for _, tensor, *_ in compiler.asked} == {1, 2, 4}
    assert [micro for name, tensor, micro, _ in compiler.asked if (name, tensor) == ("update", 2)] == [512, 1024, 2048]
    assert [rows for name, tensor, _, rows in compiler.asked if (name, tensor) == ("decode", 4)] == [16, 32]
    best = found[0]
    assert (best.data, best.fsdp, best.tensor, best.micro_tokens, best.rows) == (1, 2, 2, 2048, 32)
    # Two updates of 1.5 s; 32 sequences of 256 tokens, at 32 rows and four steps in 2 ms.
    assert best.update_s == pytest.approx(2 * 1.5)
    assert best.step_s == pytest.approx(3 + 32 * 256 / (32 * 4 / 0.002))
    assert [one.step_s for one in found] == sorted(one.step_s or 0 for one in found)
    assert best.flags() == (
        "--config.mesh.data=1 --config.mesh.fsdp=2 --config.mesh.tensor=2 --config.learner.micro_tokens=2048 "
        "--config.engine.rows=32"
    )


def test_an_engine_with_devices_of_its_own() -> None:
    """The learner's mesh is over the others, `tensor` divides both parts, and the longer of the two takes a step's time."""
    config = run()
    config = dataclasses.replace(
        config,
        mesh=dataclasses.replace(config.mesh, engine=2),
        rollout=dataclasses.replace(config.rollout, ahead=1),
    )
    compiler = Weighed()
    best = search(config, SLICE, compile_and_weigh=compiler)[0]
    assert {tensor for _, tensor, *_ in compiler.asked} == {1, 2}
    assert best.fsdp * best.tensor == 2
    assert best.update_s is not None
    assert best.tokens_per_s is not None
    assert best.step_s == max(best.update_s, 32 * 256 / best.tokens_per_s)


def test_what_does_not_fit_comes_last() -> None:
    found = search(run(), SLICE, compile_and_weigh=Weighed(too_large=1024))
    assert found[0].micro_tokens == 512
    assert found[0].step_s is not None
    assert found[-1].step_s is None
    assert found[-1].micro_tokens > 512


def test_supervised_runs_generate_nothing() -> None:
    with pytest.raises(ValueError, match="--search chooses for runs that generate and learn"):
        search(dataclasses.replace(run(), kind="sft"), SLICE, compile_and_weigh=Weighed())


def test_chips_without_peaks_are_refused() -> None:
    with pytest.raises(ValueError, match="the peaks of 'TPU v4' are unknown; known: v5e"):
        search(run(), "v4:2x2x1", compile_and_weigh=Weighed())


@pytest.mark.slow
def test_with_the_compiler() -> None:
    """All meshes of four chips compile, and every choice has an estimate."""
    config = dataclasses.replace(small_policy(), rollout=dataclasses.replace(small_policy().rollout, examples=1))
    found = search(config, SLICE)
    assert {(one.fsdp, one.tensor) for one in found} == {(4, 1), (2, 2), (1, 4)}
    assert all(one.step_s for one in found)
