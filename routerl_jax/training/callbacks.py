"""What a run does beside its steps is callbacks: profiler, validation, metrics, watch, controls, checkpoints, and those of your
own that config.callbacks names."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from routerl_jax.core.config import naming
from routerl_jax.core.registry import Registry

if TYPE_CHECKING:  # the configuration checks the names of callbacks without the engine
    from routerl_jax.agents.agent import Agent, SearchTool
    from routerl_jax.core.types import Episode
    from routerl_jax.engine.engine import Engine
    from routerl_jax.learning.learner import Learner


@dataclasses.dataclass(frozen=True)
class Alarm:
    """Why a run is stopped: the metric, and what was wrong with it. `unharmed`: the weights are as good as before."""

    step: int
    metric: str
    complaint: str
    unharmed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A run, as its callbacks see it.

    Attributes:
      config: the run's configuration (a `TrainConfig`).
      workdir: the run's directory.
      learner: the policy's weights and optimiser.
      agent, engine, tools: as the policy is evaluated; None and {} in a supervised run, which generates nothing.
      start: the first step of this session.
    """

    config: Any
    workdir: pathlib.Path
    learner: Learner
    agent: Agent | None = None
    engine: Engine | None = None
    tools: Mapping[str, SearchTool] = dataclasses.field(default_factory=dict)
    start: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A step that was taken.

    Attributes:
      number: counted from 0, as in metrics.jsonl.
      stage: the name of its stage; "" in a supervised run.
      metrics: its row of metrics.jsonl. A callback may add to it.
      episodes: its rollouts, with rewards; () in a supervised run.
      seconds: by part of the step; they become `timing_s/PART`.
    """

    number: int
    stage: str = ""
    metrics: dict[str, Any]
    episodes: Sequence[Episode] = ()
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def completed(self) -> int:
        """Steps of the run that are done with this one."""
        return self.number + 1


class Callback:
    """Something that a run does beside its steps. Every method does nothing unless it is overridden.

    All processes of a run have the same callbacks and call them in the same order; `multihost.is_main()` tells which writes.

    Attributes:
      saves: it keeps the policy, and so it is not shown a step at which an earlier callback raised an alarm.
    """

    saves: ClassVar[bool] = False

    def on_start(self, training: Training) -> None:
        """Before the first step of this session."""

    def on_step_begin(self, step: int) -> None:
        """Before the rollouts of a step."""

    def on_step_end(self, step: Step) -> Alarm | None:
        """After the updates of a step; the engine has the new weights. An alarm stops the run, on all processes alike.

        If the run is interrupted while callbacks see a step, they see it again when it goes on, with their `state` from before.
        """

    def on_finish(self, error: BaseException | None = None) -> None:
        """After the last step of this session. `error`: what ended it, if it ends otherwise."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, as JSON-serialisable data. Asked after every step, as the next may be interrupted."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from the state that a checkpoint kept. Called after `on_start`, if the checkpoint knows the callback."""


CALLBACKS: Registry[type[Callback]] = Registry("callback")


def own_callbacks(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Callback]:
    """The callbacks of config.callbacks, by name, made with their settings as keyword arguments.

    Raises:
      ValueError: one can't be loaded, takes no such settings, or is no Callback.
    """
    made: dict[str, Callback] = {}
    for name, arguments in settings.items():
        with naming("config.callbacks"):
            make = CALLBACKS.get(name)
        try:
            inspect.signature(make).bind(**arguments)
        except TypeError as error:
            raise ValueError(f"config.callbacks.{name}: {error}; it takes {inspect.signature(make)}") from error
        made[name] = callback = make(**arguments)
        if not isinstance(callback, Callback):
            raise ValueError(
                f"config.callbacks.{name} is a {type(callback).__name__}: derive it from training.callbacks.Callback"
            )
    return made


@contextlib.contextmanager
def running(
    callbacks: Iterable[Callback], training: Training, own: Mapping[str, Callback], kept: Mapping[str, Any]
) -> Iterator[None]:
    """Around the steps of a session: starts the callbacks, and finishes those that have started, however it ends.

    Args:
      callbacks: all, in the order in which they are called.
      own: those of config.callbacks among them, by name.
      kept: states of these in the checkpoint that the run goes on from, by name.
    """
    error: BaseException | None = None
    started: list[Callback] = []
    try:
        for callback in callbacks:
            callback.on_start(training)
            started.append(callback)
        for name in kept:
            if name in own:
                own[name].restore(kept[name])
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        with contextlib.ExitStack() as finishing:  # all of them, in order, even if one of them fails
            for callback in reversed(started):
                finishing.callback(callback.on_finish, error)


def states(own: Mapping[str, Callback]) -> dict[str, Any]:
    """What a checkpoint keeps of callbacks: {"callbacks": their states}, or {} if there are none."""
    kept = {name: state for name, callback in own.items() if (state := callback.state())}
    return {"callbacks": kept} if kept else {}


def end_step(callbacks: Iterable[Callback], step: Step) -> Alarm | None:
    """Shows a step to callbacks, one after the other, but to those that save not after an alarm. Returns the first alarm."""
    alarm: Alarm | None = None
    for callback in callbacks:
        if alarm is None or not callback.saves:
            raised = callback.on_step_end(step)
            alarm = alarm or raised
    return alarm
