"""Reinforcement learning runs: generate, score, compare within groups, update. Read this file from top to bottom."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from routerl_jax.agents.agent import Agent, check_choices
from routerl_jax.agents.room import no_room
from routerl_jax.core.config import naming
from routerl_jax.core.files import write_atomic
from routerl_jax.core.progress import Bar, note
from routerl_jax.core.text import counted
from routerl_jax.data.trajectories import golden_step
from routerl_jax.engine.engine import Engine
from routerl_jax.evaluation import figures
from routerl_jax.evaluation.benchmark import canary, score, score_all
from routerl_jax.evaluation.report import print_table
from routerl_jax.knowledge.encoders import search_on
from routerl_jax.parallel import multihost
from routerl_jax.parallel.compilation import tell_compilations
from routerl_jax.parallel.workdir import job_directory_lock
from routerl_jax.services.judge import settings_that_count
from routerl_jax.training.ahead import Ahead
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.controls import check_controls, fork, run_controls
from routerl_jax.training.credit import NotFinite
from routerl_jax.training.evaluation import (
    before_agents,
    calibration,
    check_calibration,
    check_names,
    evaluation_questions,
    save_table,
    saved_tables,
)
from routerl_jax.training.health import (
    memory_metrics,
    of_all_processes,
    together,
    tool_counts,
    tool_results,
    tool_table,
)
from routerl_jax.training.inputs import check_gold_paths, check_inputs, check_overlap, keep_inputs
from routerl_jax.training.knowledge import check_knowledge, check_snapshot, check_sources_differ, try_sources
from routerl_jax.training.loggers import read_metrics, require_log
from routerl_jax.training.partial import PartialRollouts
from routerl_jax.training.profiler import Clock, Profiler, profiled_steps
from routerl_jax.training.run import Run, check_context, check_workdir
from routerl_jax.training.setup import (
    build_judge,
    build_mesh,
    build_policy,
    build_recipe,
    check_engine_devices,
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
from routerl_jax.training.step import train_step
from routerl_jax.training.watch import Alarm, RunStopped, Watch

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
    """
    config = count_steps(config)
    tell_compilations()
    with job_directory_lock(workdir):
        results = _train(config, workdir, resume=resume)
        return run_controls(config, workdir, results, _train) if config.controls else results


def _train(config: TrainConfig, workdir: pathlib.Path, *, resume: bool = False) -> dict[str, Any]:
    training = _Training(config, workdir, resume)
    try:
        if config.evaluation.before and training.run.start == 0:
            training.keep("warm_start", before_agents(config, training.judged))
            check_calibration(training.calibration(), config.evaluation.calibration)
        return training.finish(training.train())
    finally:
        if training.judge is not None:
            training.judge.close()


class _Training:
    """A run from its preparation to its results. The constructor makes all checks, before anything slow starts."""

    def __init__(self, config: TrainConfig, workdir: pathlib.Path, resume: bool) -> None:
        self.config, self.workdir = config, workdir
        self.started, self.clock = time.perf_counter(), Clock()
        self.owed = False  # whether a checkpoint that was due is still to be written
        with self.clock("setup"):
            check_workdir(config, workdir, resume)
            multihost.on_main(lambda: require_log(config.log))
            check_knowledge(config.knowledge)
            check_sources_differ(config.knowledge)
            check_snapshot(config, workdir, resume=resume)
            self.recipe = build_recipe(config)
            self.judge = build_judge(config, self.recipe)
            self.recipe = with_judge(self.recipe, self.judge)
            self.evaluating = self.judge if config.evaluation.judge else None
            if forked := next((name for name in config.stages if config.in_stage(name).rollout.forks), None):
                check_choices(self.recipe.agent, f"config.rollout.forks (stage {forked!r})")
            self.judged = evaluated_agent(config, self.recipe)
            check_names(config, self.judged)
            check_controls(config, workdir)
            check_overlap(config)
            check_inputs(config, workdir, resume)
            check_gold_paths(config)
            self.stages, self.watch = Stages(config, self.recipe), Watch(config.watch)
            check_engine_devices(config.mesh)
            self.validation, self.test = evaluation_questions(config)
        with self.clock("warm_start"):
            start = warm_start(config, workdir, resume=resume)
        with self.clock("setup"):
            self._load(start, resume)

    def _load(self, start: TrainConfig, resume: bool) -> None:
        """Loads policy, engine and knowledge bases, and the state of an earlier session."""
        config, first = self.config, self.stages.at(0)
        mesh = learner_mesh(config.mesh) if config.mesh.engine else build_mesh(config.mesh)
        model = build_policy(start, mesh)
        check_context(config, model)
        self.engine = make_engine(config, model, mesh=engine_mesh(config.mesh, mesh))
        _check_room(config, self.judged, first, self.engine)
        self.engine.rest()  # so that a merged adapter's weights exist only once
        # searches run beside the updates: programs of both on the same devices might wait for each other
        search_on(self.engine.mesh if config.mesh.engine else None)
        self.tools = open_knowledge(config, self.workdir, progress=multihost.is_main())
        try_sources(config, self.tools, self.workdir)
        loss, keeps = first.config.learner.loss, self.stages.has_reference
        self.run = Run(config, self.workdir, model, mesh, loss, first.updates, resume, keeps)
        multihost.on_main(lambda: keep_inputs(config, self.workdir))
        self.engine.update(self.run.served_params(), self.run.start)
        self.earlier: dict[str, float] = self.run.restored.get("seconds", {})  # seconds of earlier sessions
        self.counted_earlier: dict[str, Any] = self.run.restored.get("tools", {})
        if self.run.restored:
            self.stages.restore(self.run.restored["streams"])
            self.watch.restore(self.run.restored["watch"])
        parts = (self.stages, self.recipe.agent, self.engine, self.tools, config.steps)
        self.partial = PartialRollouts(*parts) if config.rollout.partial else None
        self.ahead: Ahead | None = None
        if config.rollout.ahead:
            self.ahead = Ahead(*parts, apart=bool(config.mesh.engine), partial=self.partial)
            with naming(f"{self.workdir / 'checkpoints' / str(self.run.start)}"):
                self.ahead.restore(self.run.restored_rollouts)

    def train(self) -> Alarm | None:
        """Runs all remaining steps. If something goes wrong, it ends early and returns the alarm."""
        try:
            return self._steps()
        finally:
            if self.partial is not None:
                self.partial.close()

    def _steps(self) -> Alarm | None:
        steps = self.config.steps
        remaining = range(self.run.start, steps)
        shown = {"total": steps, "desc": "training", "unit": "step", "disable": not multihost.is_main()}
        paces: list[float] = []  # seconds of the first steps of this session
        profiler = Profiler(profiled_steps(self.config.profile), self.workdir, self.run.start)
        with Bar(remaining, initial=self.run.start, **shown) as bar, profiler:
            for step in bar:
                clock, stage = Clock(), self.stages.at(step)
                try:
                    with profiler.step(step), clock("step"):
                        metrics = self._step(stage, step, clock)
                    if alarm := self._after_step(stage, step + 1, metrics, clock):
                        return alarm
                except NotFinite as error:
                    return Alarm(step, error.metric, str(error))
                bar.set_postfix_str(_headline(metrics), refresh=False)
                paces.append(clock.seconds["step"])
                if len(paces) == _ESTIMATED_AFTER and multihost.is_main():
                    note(estimate(paces, steps - step - 1))
        return None

    def _step(self, stage: RunStage, step: int, clock: Clock) -> dict[str, Any]:
        partial = self.partial
        whole = self.owed or self.run.due(step + 1)  # a checkpoint holds no attempts that are under way
        if self.ahead is not None:
            return self.ahead.step(stage, self.run, step, clock, whole=whole)
        examples = stage.examples() if partial is None else partial.draw(stage, step, whole=whole)
        parts = (stage, self.recipe.agent, self.run, self.engine, self.tools)
        return train_step(*parts, examples, step, clock, partial)

    def _after_step(self, stage: RunStage, completed: int, metrics: dict[str, Any], clock: Clock) -> Alarm | None:
        """Validates, writes metrics, asks the watch, and writes a checkpoint if one is due and all is well."""
        evaluation = self.config.evaluation
        if evaluation.every and (completed % evaluation.every == 0 or completed == self.config.steps):
            with clock("validation"):
                summary, _ = score(
                    self.judged,
                    self.validation,
                    self.engine,
                    self.tools,
                    **self._scoring_options(),
                    judge=self.evaluating,
                )
            metrics |= {f"validation/{name}": value for name, value in summary.items() if isinstance(value, float)}
            if evaluation.canary:
                with clock("canary"):
                    metrics |= canary(self.judged, self.validation, self.engine, self.tools, **self._scoring_options())
        metrics |= {f"timing_s/{name}": seconds for name, seconds in clock.seconds.items()}
        # before the checkpoint: a run killed in between must not lack this row
        self.run.writer.write(completed - 1, metrics)
        if evaluation.stages and self.stages.ended(completed):
            self.keep(stage.name)
        if alarm := self.watch.see(completed - 1, stage.name, metrics):
            return alarm
        extra = {"streams": self.stages.state(), "stage": stage.name, "watch": self.watch.state()}
        self.owed = self.owed or self.run.due(completed)
        # before the checkpoint: a session that resumes from that checkpoint would be too late to fork
        fork(self.run, completed, **extra | ({"streams": self.ahead.before} if self.ahead else {}))
        if self.owed and (completed == self.config.steps or not self.watch.worried):
            with self.clock("checkpoint"):
                waiting = self.ahead.state() if self.ahead else b""
                self.run.save(completed, rollouts=waiting, **extra, seconds=self._seconds(), tools=self._counted())
            self.owed = False
        return None

    def finish(self, alarm: Alarm | None) -> dict[str, Any]:
        """Exports the policy, scores it and its baselines, and writes results.json.

        Raises:
          RunStopped: there was an alarm. Everything is written all the same.
        """
        config = self.config
        rows = read_metrics(self.workdir)
        stopped = _stop(self.run, self.engine, alarm) if alarm else {}
        usable = not stopped or stopped["stopped"]["steps"] > 0  # else no checkpoint from before the trouble is left
        self.run.finish(export=usable)
        agents = {"trained": self.judged}
        if config.evaluation.baselines and not any(golden_step(example) is not None for example in self.test):
            agents |= self.judged.baselines(tuple(config.knowledge))
        table = saved_tables(self.workdir, ["warm_start", *config.stages], self._table_settings())
        table |= self._evaluate(agents) if usable else {}
        table = {config.evaluation.names.get(name, name): row for name, row in table.items()}
        counted = self._counted()
        results = {
            "agents": table,
            "seconds": self._seconds() | {"training": sum(row.get("timing_s/step", 0.0) for row in rows)},
            "devices": len(jax.devices()),
            "platform": jax.devices()[0].platform,
            "steps": config.steps,
            **({"calibration": calibrated} if (calibrated := self.calibration()) else {}),
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

    def keep(self, name: str, agents: Mapping[str, Agent] | None = None) -> None:
        """Scores the present policy, for the table at the end of the run."""
        save_table(self.workdir, name, self._evaluate(agents or {name: self.judged}), self._table_settings())

    def calibration(self) -> dict[str, Any]:
        """`calibration.calibration` of the untrained policy's scores, by kind of question."""
        if not (settings := self.config.evaluation.calibration).kind:
            return {}
        tables = saved_tables(self.workdir, ["warm_start"], self._table_settings()) if multihost.is_main() else None
        return calibration(multihost.exchange(tables)[0], settings)

    def _evaluate(self, agents: Mapping[str, Agent]) -> dict[str, Any]:
        shown = {"progress": multihost.is_main(), "records": self.workdir / "evaluation"}
        with self.clock("evaluation"):
            return score_all(
                agents, self.test, self.engine, self.tools, **self._scoring_options(), **shown, judge=self.evaluating
            )

    def _seconds(self) -> dict[str, float]:
        """Seconds of the parts of the run, over all sessions. Earlier sessions count up to their last checkpoint."""
        now = {**self.clock.seconds, "total": time.perf_counter() - self.started}
        return {name: self.earlier.get(name, 0.0) + now.get(name, 0.0) for name in {**self.earlier, **now}}

    def _counted(self) -> dict[str, Any]:
        """Counts of requests to the tools, over all sessions and processes (a collective call)."""
        return together(self.counted_earlier, of_all_processes(tool_counts(self.tools)))

    def _scoring_options(self) -> dict[str, Any]:
        """Keyword arguments for scoring agents."""
        return {
            "normalizer": self.config.evaluation.normalizer,
            "tool_timeout": self.config.rollout.tool_timeout,
        }

    def _table_settings(self) -> dict[str, Any]:
        """The settings that tables must share to be combined."""
        judge = {"judge": dict(settings_that_count(self.config.judge))} if self.evaluating else {}
        return {"questions": len(self.test), "k": self.config.evaluation.k or self.config.agent.k, **judge}


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
