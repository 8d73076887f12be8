"""A callback of one's own, named in the configuration, beside those of the package."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, cast

import pytest

from routerl_jax.training import config as schema
from routerl_jax.training.callbacks import Alarm, Callback, Step, Training, end_step, own_callbacks, running
from routerl_jax.training.loggers import read_metrics
from routerl_jax.training.rl import train_rl
from routerl_jax.training.watch import RunStopped
from tests.training.small_run import make_config


class Diary(Callback):
    """Writes what happens to WORKDIR/FILE, counts the episodes of all sessions, and stops a run at so many."""

    def __init__(self, file: str, most: int = 10**6) -> None:
        self._file, self._most, self._episodes = file, most, 0

    def on_start(self, training: Training) -> None:
        assert training.engine is not None
        self._path = training.workdir / self._file
        self._write(f"starts at {training.start} with {', '.join(sorted(training.tools))}")

    def on_step_begin(self, step: int) -> None:
        self._write(f"begins {step}")

    def on_step_end(self, step: Step) -> Alarm | None:
        self._episodes += len(step.episodes)
        step.metrics["diary/episodes"] = self._episodes
        self._write(f"ends {step.number} with {'validation/em' in step.metrics}")
        return Alarm(step.number, "diary/episodes", "enough") if self._episodes >= self._most else None

    def on_finish(self, error: BaseException | None = None) -> None:
        self._write(f"finishes with {error}")

    def state(self) -> dict[str, Any]:
        return {"episodes": self._episodes}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._episodes = state["episodes"]

    def _write(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(line + "\n")


NAME = f"{__name__}:Diary"


def test_it_is_called_in_order_adds_metrics_goes_on_after_a_resume_and_stops_the_run(tmp_path: pathlib.Path) -> None:
    whole = make_config(tmp_path / "home")
    config = dataclasses.replace(
        whole,
        steps=2,
        stages={"main": schema.StageConfig(reward={"em": 1.0})},
        evaluation=schema.EvaluationConfig(every=2, examples=2, final_examples=2, before=False, baselines=False),
        callbacks={NAME: {"file": "diary.txt"}},
    )
    workdir, names = tmp_path / "run", ", ".join(sorted(config.knowledge))
    train_rl(config, workdir)
    asked = config.rollout.examples * config.rollout.samples
    assert [row["diary/episodes"] for row in read_metrics(workdir)] == [asked, 2 * asked]
    first = [
        f"starts at 0 with {names}",
        "begins 0",
        "ends 0 with False",
        "begins 1",
        "ends 1 with True",
        "finishes with None",
    ]
    assert (workdir / "diary.txt").read_text().splitlines() == first
    longer = dataclasses.replace(config, steps=4, callbacks={NAME: {"file": "diary.txt", "most": 3 * asked}})
    with pytest.raises(RunStopped, match="enough"):
        train_rl(longer, workdir, resume=True)
    assert [row["diary/episodes"] for row in read_metrics(workdir)] == [asked, 2 * asked, 3 * asked]
    assert (workdir / "diary.txt").read_text().splitlines() == [
        *first,
        f"starts at 2 with {names}",
        "begins 2",
        "ends 2 with False",
        "finishes with None",
    ]


@pytest.mark.parametrize(
    ("callbacks", "complaint"),
    [
        ({f"{__name__}:Dairy": {}}, r"config\.callbacks.*did you mean 'Diary'"),
        ({NAME: {}}, rf"config\.callbacks\.{NAME}: missing .*'file'"),
        ({NAME: {"file": "a", "lines": 3}}, rf"config\.callbacks\.{NAME}: .*'lines'"),
        (
            {"collections:Counter": {}},
            r"config\.callbacks\.collections:Counter is a Counter: derive it from .*Callback",
        ),
    ],
)
def test_what_is_no_callback_or_takes_other_settings_is_refused(
    callbacks: dict[str, dict[str, Any]], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        own_callbacks(callbacks)


def test_after_an_alarm_those_that_save_do_not_see_the_step() -> None:
    seen: list[str] = []

    class Noted(Callback):
        def __init__(self, name: str, alarm: Alarm | None = None) -> None:
            self._name, self._alarm = name, alarm

        def on_step_end(self, step: Step) -> Alarm | None:
            seen.append(self._name)
            return self._alarm

    class Saving(Noted):
        saves = True

    first, second = (Alarm(3, name, "bad") for name in ("a", "b"))
    callbacks = [Saving("before"), Noted("first", first), Saving("after"), Noted("second", second)]
    assert end_step(callbacks, Step(number=3, metrics={})) is first
    assert seen == ["before", "first", "second"]


def test_those_that_have_started_are_finished_in_order_whatever_fails(tmp_path: pathlib.Path) -> None:
    told: list[tuple[str, BaseException | None]] = []

    class Told(Callback):
        def __init__(self, name: str, fails: str = "") -> None:
            self._name, self._fails = name, fails

        def on_start(self, training: Training) -> None:
            if self._fails == "start":
                raise OSError("start")

        def on_finish(self, error: BaseException | None = None) -> None:
            told.append((self._name, error))
            if self._fails == "finish":
                raise OSError("finish")

    training = Training(config=None, workdir=tmp_path, learner=cast(Any, None))
    with pytest.raises(OSError, match="finish"), running([Told("a", "finish"), Told("b")], training, {}, {}):
        raise KeyError("step")
    assert [(name, type(error)) for name, error in told] == [("a", KeyError), ("b", KeyError)]
    told.clear()
    with pytest.raises(OSError, match="start"), running([Told("a"), Told("b", "start"), Told("c")], training, {}, {}):
        pass
    assert [(name, type(error)) for name, error in told] == [("a", OSError)]
