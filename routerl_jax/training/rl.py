"""Reinforcement learning runs: generate, score, compare within groups, update. Read this file from top to bottom."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from routerl_jax.agents.agent import Agent
from routerl_jax.agents.driver import no_room
from routerl_jax.core import stopping
from routerl_jax.core.config import naming
from routerl_jax.core.files import write_atomic
from routerl_jax.core.progress import Bar, note
from routerl_jax.core.safe_pickle import dumps, loads
from routerl_jax.core.text import counted
from routerl_jax.data.trajectories import golden_step
from routerl_jax.engine.engine import Engine
from routerl_jax.evaluation import figures
from routerl_jax.evaluation.report import print_table
from routerl_jax.knowledge.encoders import search_on
from routerl_jax.parallel import multihost
from routerl_jax.parallel.devices import tell_compilations
from routerl_jax.parallel.workdir import job_directory_lock
from routerl_jax.training.asynchronous import Ahead, PartialRollouts
from routerl_jax.training.callbacks import (
    Alarm,
    Callback,
    Step,
    Training,
    end_step,
    own_callbacks,
    running,
    states,
)
from routerl_jax.training.checks import check_run, check_workdir, keep_inputs
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.controls import ControlStarts, run_controls
from routerl_jax.training.credit import NotFinite
from routerl_jax.training.evaluation import (
    Evaluation,
    StageEnds,
    before_agents,
    check_calibration,
    evaluation_questions,
)
from routerl_jax.training.health import (
    memory_metrics,
    of_all_processes,
    together,
    tool_counts,
    tool_results,
    tool_table,
)
from routerl_jax.training.knowledge import try_sources
from routerl_jax.training.loggers import read_metrics
from routerl_jax.training.profiler import Clock, Profiler, profiled_steps
from routerl_jax.training.rollouts import RolloutSource
from routerl_jax.training.run import Checkpointing, Run, check_context
from routerl_jax.training.setup import (
    build_judge,
    build_mesh,
    build_policy,
    engine_mesh,
    evaluated_agent,
    headline,
    learner_mesh,
    make_engine,
    open_knowledge,
    with_judge,
)
from routerl_jax.training.sft import warm_start
from routerl_jax.training.stages import RunStage, Stages, count_steps
from routerl_jax.training.step import learn
from routerl_jax.training.watch import RunStopped, Watch

_ESTIMATED_AFTER = 10  # steps before the remaining time is estimated
_TRIED = 64  # questions for the check that prompts fit into a conversation


def train_rl(config: TrainConfig, workdir: pathlib.Path, *, resume: bool = False) -> dict[str, Any]:
    """Trains a policy with multi-turn tool calls, and evaluates it and its controls.

    The run is written to `workdir`: config.json, warm_start/ (a supervised run, if there is a warm start), metrics.jsonl,
    checkpoints/, episodes/, policy/ (a Hugging Face directory), evaluation/, controls/, snapshot/ (config.snapshot), figures/
    and results.json.

    Returns:
      The content of results.json.

    Raises:
      ValueError: the configuration or an input is wrong, or `workdir` belongs to another run or is in use.
      RunStopped: the run went wrong (config.watch).
      Interrupted: Ctrl-C or SIGTERM; there is a checkpoint of the last whole step.
    """
    config = count_steps(config)
    tell_compilations()
    with job_directory_lock(workdir), multihost.watched():
        results = _train(config, workdir, resume=resume)
        return run_controls(config, workdir, results, _train) if config.controls else results


def _train(config: TrainConfig, workdir: pathlib.Path, *, resume: bool = False) -> dict[str, Any]:
    session = _Session(config, workdir, resume)
    try:
        with stopping.deferred():
            if config.evaluation.before and session.run.start == 0:
                session.evaluation.keep(before_agents(config, session.evaluation.agent), "warm_start")
                check_calibration(session.evaluation.calibration(), config.evaluation.calibration)
            return session.finish(session.train())
    finally:
        if session.judge is not None:
            session.judge.close()


class _Session:
    """A run from its preparation to its results. The constructor makes all checks, before anything slow starts."""

    def __init__(self, config: TrainConfig, workdir: pathlib.Path, resume: bool) -> None:
        self.config, self.workdir = config, workdir
        self.started, self.clock = time.perf_counter(), Clock()
        with self.clock("setup"):
            check_workdir(config, workdir, resume)
            self.own = own_callbacks(config.callbacks)
            recipe = check_run(config, workdir, resume)
            self.judge = build_judge(config, recipe)
            self.recipe = with_judge(recipe, self.judge)
            judged = evaluated_agent(config, self.recipe)
            self.stages, self.watch = Stages(config, self.recipe), Watch(config.watch)
            validation, test = evaluation_questions(config)
        with self.clock("warm_start"):
            start = warm_start(config, workdir, resume=resume)
        with self.clock("setup"):
            self._load(start, judged, resume)
            self.evaluation = Evaluation(
                config=config,
                workdir=workdir,
                agent=judged,
                validation=validation,
                test=test,
                engine=self.engine,
                tools=self.tools,
                judge=self.judge if config.evaluation.judge else None,
                stages=self.stages,
                clock=self.clock,
            )

    def _load(self, start: TrainConfig, judged: Agent, resume: bool) -> None:
        """Loads policy, engine and knowledge bases, and the state of an earlier session."""
        config, first = self.config, self.stages.at(0)
        mesh = learner_mesh(config.mesh) if config.mesh.engine else build_mesh(config.mesh)
        model = build_policy(start, mesh)
        check_context(config, model)
        self.engine = make_engine(config, model, mesh=engine_mesh(config.mesh, mesh))
        _check_room(config, judged, first, self.engine)
        self.engine.rest()  # so that a merged adapter's weights exist only once
        # searches run beside the updates: programs of both on the same devices might wait for each other
        search_on(self.engine.mesh if config.mesh.engine else None)
        self.tools = open_knowledge(config, self.workdir, progress=multihost.is_main())
        try_sources(config, self.tools, self.workdir)
        loss, keeps = first.config.learner.loss, self.stages.has_reference
        self.run = Run(config, self.workdir, model, mesh, loss, first.updates, resume, keeps)
        multihost.on_main(lambda: keep_inputs(config, self.workdir))
        self.engine.update(self.run.served_params(), self.run.start)
        # of earlier sessions; copied, because a run that is stopped goes back to a checkpoint, which replaces `run.restored`
        self.seconds_earlier: dict[str, float] = self.run.restored.get("seconds", {})
        self.counted_earlier: dict[str, Any] = self.run.restored.get("tools", {})
        if self.run.restored:
            self.stages.restore(self.run.restored["streams"])
            self.watch.restore(self.run.restored["watch"])
        parts = (self.stages, self.recipe.agent, self.engine, self.tools)
        source = PartialRollouts(*parts) if config.rollout.partial else RolloutSource(*parts)
        self.source = Ahead(source, apart=bool(config.mesh.engine)) if config.rollout.ahead else source
        self.ending: Step | None = None  # a step whose updates the checkpoint has, and whose end was interrupted
        self.whole: _Whole | None = None
        with naming(f"{self.workdir / 'checkpoints' / str(self.run.start)}"):
            waiting = self.run.restored_rollouts
            if "ending" in self.run.restored:
                self.ending, waiting = loads(waiting)
            self.source.restore(waiting)

    def train(self) -> Alarm | None:
        """Runs all remaining steps. If something goes wrong, it ends early and returns the alarm."""
        checkpointing = Checkpointing(self.run, self.watch, self._state, self.clock)
        callbacks = [
            Profiler(profiled_steps(self.config.profile)),
            self.evaluation,
            *self.own.values(),
            # before checkpoints: a run that is killed in between must not lack this row
            self.run.writer,
            StageEnds(self.evaluation),
            self.watch,
            ControlStarts(self.run, self._start_of_controls),
            checkpointing,
        ]
        shown = Training(
            config=self.config,
            workdir=self.workdir,
            learner=self.run.learner,
            agent=self.evaluation.agent,
            engine=self.engine,
            tools=self.tools,
            start=self.run.start,
        )
        with (
            contextlib.closing(self.source),
            running(callbacks, shown, self.own, self.run.restored.get("callbacks", {})),
        ):
            try:
                return self._steps(callbacks, checkpointing)
            except stopping.Interrupted:
                if self.whole is not None:
                    self.engine.rest()
                    checkpointing.interrupted(self.whole.completed, self._state_of(self.whole))
                raise
            finally:
                stopping.release()

    def _steps(self, callbacks: Sequence[Callback], checkpointing: Checkpointing) -> Alarm | None:
        steps, start = self.config.steps, self.run.start
        if self.ending is not None and (alarm := self._end(callbacks, self.ending)):
            return alarm
        paces: list[float] = []  # seconds of the first steps of this session
        shown = {"total": steps, "desc": "training", "unit": "step", "disable": not multihost.is_main()}
        with Bar(range(start, steps), initial=start, **shown) as bar:
            for step in bar:
                clock, stage = Clock(), self.stages.at(step)
                multihost.at_step(step)
                try:
                    for callback in callbacks:
                        callback.on_step_begin(step)
                    with clock("step"):
                        whole = checkpointing.due(step + 1)  # a checkpoint holds no attempts that are under way
                        with self.source.rollouts(step, clock, whole=whole) as rollouts:
                            metrics = learn(stage, self.run, self.engine, self.tools, rollouts, clock)
                        self.engine.update(self.run.served_params(), step + 1)
                    taken = Step(
                        number=step,
                        stage=stage.name,
                        metrics=metrics,
                        episodes=rollouts.episodes,
                        seconds=clock.seconds,
                    )
                    if alarm := self._end(callbacks, taken):
                        return alarm
                except NotFinite as error:
                    return Alarm(step, error.metric, str(error))
                del rollouts, taken  # pictures and tokens, while the next step samples its own
                bar.set_postfix_str(_headline(metrics), refresh=False)
                paces.append(clock.seconds["step"])
                if len(paces) == _ESTIMATED_AFTER and multihost.is_main():
                    note(estimate(paces, steps - step - 1))
        return None

    def _end(self, callbacks: Sequence[Callback], step: Step) -> Alarm | None:
        """Shows a step to callbacks, which may evaluate for long. A session that goes on after an interruption there does so
        again."""
        self._note_whole(step, ending=True)
        stopping.release()
        alarm = end_step(callbacks, step)
        self._note_whole(step)
        return alarm

    def _note_whole(self, step: Step, *, ending: bool = False) -> None:
        shown = None
        if ending:
            episodes = step.episodes if self.own else ()
            shown = dataclasses.replace(step, metrics=dict(step.metrics), seconds=dict(step.seconds), episodes=episodes)
        self.whole = _Whole(
            completed=step.completed,
            state=copy.deepcopy(self._start_of_controls(step) | {"streams": self.stages.state()}),
            tools=tool_counts(self.tools),
            rollouts=None if self.source.under_way else self.source.kept(),
            ending=shown,
        )

    def _start_of_controls(self, step: Step) -> dict[str, Any]:
        """What the first checkpoint of a control keeps of the run."""
        streams = {"streams": self.source.positions, "stage": step.stage}
        return {**streams, "watch": self.watch.state(), **states(self.own)}

    def _state(self, step: Step) -> dict[str, Any]:
        """What a checkpoint keeps of the run."""
        return self._start_of_controls(step) | {
            "streams": self.stages.state(),
            "rollouts": self.source.state(),
            "seconds": self._seconds(),
            "tools": self._counted(tool_counts(self.tools)),
        }

    def _state_of(self, whole: _Whole) -> dict[str, Any] | None:
        """What the checkpoint of an interrupted run keeps; None if there can be none."""
        if whole.rollouts is None:
            return None
        rollouts = whole.rollouts()
        ending = {"ending": True, "rollouts": dumps((whole.ending, rollouts))} if whole.ending is not None else {}
        counted = self._counted(whole.tools)
        return {**whole.state, "seconds": self._seconds(), "tools": counted, "rollouts": rollouts, **ending}

    def finish(self, alarm: Alarm | None) -> dict[str, Any]:
        """Exports the policy, scores it and its baselines, and writes results.json.

        Raises:
          RunStopped: there was an alarm. Everything is written all the same.
        """
        config, evaluation = self.config, self.evaluation
        rows = read_metrics(self.workdir)
        stopped = _stop(self.run, self.engine, alarm) if alarm else {}
        usable = not stopped or stopped["stopped"]["steps"] > 0  # else no checkpoint from before the trouble is left
        self.run.finish(export=usable)
        agents = {"trained": evaluation.agent}
        if config.evaluation.baselines and not any(golden_step(example) is not None for example in evaluation.test):
            agents |= evaluation.agent.baselines(tuple(config.knowledge))
        table = evaluation.kept(["warm_start", *config.stages])
        table |= evaluation.table(agents) if usable else {}
        table = {config.evaluation.names.get(name, name): row for name, row in table.items()}
        counted = self._counted(tool_counts(self.tools))
        results = {
            "agents": table,
            "seconds": self._seconds() | {"training": sum(row.get("timing_s/step", 0.0) for row in rows)},
            "devices": len(jax.devices()),
            "platform": jax.devices()[0].platform,
            "steps": config.steps,
            **({"calibration": calibrated} if (calibrated := evaluation.calibration()) else {}),
            **({"tools": tool_results(counted)} if counted else {}),
            **stopped,
            "seed": config.seed,
            "peak_memory_gib": memory_metrics(),
        }
        if multihost.is_main():
            write_atomic(self.workdir / "results.json", json.dumps(results, indent=2) + "\n")
            figures.training_figures(rows, self.workdir / "figures", tuple(config.knowledge))
            if table:
                print_table(table, self.workdir, headline=headline(config, self.recipe))
            if tools_text := tool_table(counted):
                print(tools_text)
        if alarm:
            raise RunStopped(stopped["stopped"]["message"])
        return results

    def _seconds(self) -> dict[str, float]:
        """Seconds of the parts of the run, over all sessions. Earlier sessions count up to their last checkpoint."""
        earlier = self.seconds_earlier
        now = {**self.clock.seconds, "total": time.perf_counter() - self.started}
        return {name: earlier.get(name, 0.0) + now.get(name, 0.0) for name in {**earlier, **now}}

    def _counted(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Counts of requests to the tools, over all sessions and processes (a collective call). `own`: this one's."""
        return together(self.counted_earlier, of_all_processes(own))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Whole:
    """The run as it was after its last whole step, for a checkpoint if the next one is interrupted.

    Attributes:
      completed: steps whose updates are made.
      state: what a checkpoint keeps besides.
      tools: counts of requests to the tools.
      rollouts: gives the rollouts that waited; None if attempts are under way, which no checkpoint holds.
      ending: the last step, if callbacks have not seen it, or not all of them.
    """

    completed: int
    state: Mapping[str, Any]
    tools: Mapping[str, Any]
    rollouts: Callable[[], bytes] | None
    ending: Step | None


def _check_room(config: TrainConfig, agent: Agent, stage: RunStage, engine: Engine) -> None:
    """Raises ValueError if conversations are too short for all of the first training questions."""
    reason = no_room(agent, stage.stream.first(_TRIED), engine, tuple(config.knowledge))
    if reason:
        raise ValueError(
            f"config.engine.max_length={config.engine.max_length} leaves no room for a turn at any of the first training "
            f"questions ({reason}); raise it, or shorten the prompt or config.agent.answer_tokens"
        )


def _stop(run_: Run, engine: Engine, alarm: Alarm) -> dict[str, Any]:
    """Goes back to the last checkpoint from before the trouble, if there is one, or keeps weights that are unharmed.

    Returns:
      The entry for results.json.
    """
    engine.rest()
    completed = alarm.step + 1 if alarm.unharmed else run_.back_to_checkpoint()
    if completed:
        engine.update(run_.served_params(), completed)
        remedy = (
            f"policy/ is that of {completed} steps. Start another run from it with other settings "
            f"(config.model.path={run_.workdir / 'policy'}), or mend the cause, or loosen config.watch, and --resume"
        )
    else:
        remedy = (
            "this was before the first checkpoint; no policy was written. Start again with other settings, or a smaller "
            "config.checkpoint.every"
        )
    message = f"stopped after step {alarm.step + 1}: {alarm.complaint}; {remedy}"
    return {"stopped": {**dataclasses.asdict(alarm), "steps": completed, "message": message}}


def estimate(paces: Sequence[float], remaining: int) -> str:
    """A text with the remaining time of a run, from the median seconds of its first steps (the very first ones compile)."""
    pace = float(np.median(paces))
    seconds = pace * remaining
    hours, minutes = round(seconds / 3600, 1), max(round(seconds / 60), 1)
    span = counted(hours, "hour") if seconds >= 2 * 3600 else counted(minutes, "minute")
    return f"{pace:.1f} s a step: about {span} of training to go, validation and the final evaluation not counted"


def _headline(metrics: Mapping[str, Any]) -> str:
    parts = [f"reward {metrics['reward/total']:.2f}", f"em {metrics['rollout/em']:.2f}"]
    if "rollout/routing_accuracy" in metrics:
        parts.append(f"routing {metrics['rollout/routing_accuracy']:.2f}")
    parts.append(f"searches {metrics['rollout/searches_per_question']:.2f}")
    return ", ".join(parts)
