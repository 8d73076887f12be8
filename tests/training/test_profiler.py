"""config.profile: which steps, what is left, and whose time it was."""

import pathlib
import types
from typing import Any, cast

import pytest

from routerl_jax.training import config as schema
from routerl_jax.training.callbacks import Training
from routerl_jax.training.profiler import Profiler, profiled_steps, spent
from tests.programs import finish, start


def test_which_steps() -> None:
    assert list(profiled_steps("")) == []
    assert list(profiled_steps("10:12")) == [10, 11]
    assert list(profiled_steps("0:1", 1)) == [0]
    for text in ("12:10", "3:3", "3", "a:b", "1:2:3", "-1:2", "1.0:2", " 1:2", "1:"):
        with pytest.raises(
            ValueError, match=r"^config\.profile=.* is no range of steps: write FIRST:END, such as 10:12"
        ):
            profiled_steps(text)


def test_the_configuration_is_checked() -> None:
    base: dict[str, Any] = {"model": schema.ModelConfig(path="x"), "knowledge": {"text": schema.KnowledgeConfig()}}
    with pytest.raises(ValueError, match=r"^config\.profile='90:101': the run has 100 steps"):
        schema.TrainConfig(**base, profile="90:101")
    with pytest.raises(ValueError, match=r"^config\.profile='5' is no range"):
        schema.TrainConfig(**base, profile="5")
    assert schema.TrainConfig(**base, profile="99:100").profile == "99:100"


def event(name: str, start: float, duration: float, **stats: Any) -> Any:
    return types.SimpleNamespace(name=name, start_ns=start * 1e9, duration_ns=duration * 1e9, stats=stats.items())


def line(name: str, *events: Any) -> Any:
    return types.SimpleNamespace(name=name, events=events)


def plane(name: str, *lines: Any) -> Any:
    return types.SimpleNamespace(name=name, lines=lines)


def seconds(found: Any) -> dict[str, tuple[float, float, int]]:
    return {name: (round(one.own, 6), round(one.whole, 6), one.times) for name, one in found.items()}


def test_time_counts_once() -> None:
    """Of events inside of each other, on threads side by side, and on a device whose lines repeat each other."""
    trace = types.SimpleNamespace(
        planes=[
            plane(
                "/host:CPU",
                line(
                    "python",
                    event("step", 0, 10),
                    event("rollout", 0, 6, part=1),
                    event("Await", 0, 6),
                    event("tools", 1, 2, part=1),
                    event("tools", 4, 2, part=1),
                    event("update", 6, 3, part=1),
                    event("Wait: pending=1/8", 6, 1),
                    event("Wait: pending=2/8", 7, 1),
                    event("marker", 5, 0),
                ),
                line("pool/1", event("ThunkExecutor", 0, 4), event("fusion", 1, 3, hlo_op="dot.2", hlo_module="jit_f")),
            ),
            plane(
                "/device:TPU:0",
                line("Steps", event("0", 0, 10)),
                line("XLA Modules", event("jit_f", 0, 10)),
                line("XLA Ops", event("dot.1", 0, 4, hlo_op="dot.1", hlo_module="jit_f"), event("copy", 4, 1)),
            ),
            plane(
                "/device:GPU:0",
                line("Stream #7", event("gemm", 2, 1, hlo_op="dot.2", hlo_module="jit_f")),
                line("Stream #8", event("MemcpyH2D", 2, 0.5)),
            ),
            plane("Task Environment", line("x", event("never", 0, 100))),
        ]
    )
    found = spent(trace)
    assert found.seconds == 10
    assert seconds(found.parts) == {"rollout": (2.0, 6.0, 1), "tools": (4.0, 4.0, 2), "update": (3.0, 3.0, 1)}
    assert seconds(found.host) == {
        "step": (1.0, 10.0, 1),
        "rollout": (0.0, 6.0, 1),
        "Await": (2.0, 6.0, 1),
        "tools": (4.0, 4.0, 2),
        "update": (1.0, 3.0, 1),
        "Wait: pending": (2.0, 2.0, 2),
        "ThunkExecutor": (1.0, 4.0, 1),
    }
    assert seconds(found.devices) == {
        "jit_f: dot.2": (4.0, 4.0, 2),
        "jit_f: dot.1": (4.0, 4.0, 1),
        "copy": (1.0, 1.0, 1),
        "MemcpyH2D": (0.5, 0.5, 1),
    }


def test_steps_that_are_past_are_told_of(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    Profiler(range(1, 3)).on_start(Training(config=None, workdir=tmp_path, learner=cast(Any, None), start=3))
    assert "config.profile=1:3: the run goes on at step 3, nothing is profiled" in caplog.text
    assert not (tmp_path / "profile").exists()


TRACES = "tests/training/profiler_traces.py"


@pytest.mark.slow
def test_traces() -> None:
    finish(start("pytest", "-q", "-p", "no:xdist", TRACES, "-k", "not test_a_run and not supervised"))


@pytest.mark.slow
def test_traces_of_runs() -> None:
    finish(start("pytest", "-q", "-p", "no:xdist", TRACES, "-k", "test_a_run or supervised"))
