"""The evaluation of a run: its questions, the names of scored agents, tables that are kept until the end of the run,
and the check that a price on searches can matter (config.evaluation.calibration)."""

from __future__ import annotations

import dataclasses
import difflib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from routerl_jax.agents.agent import Agent, SearchTool
from routerl_jax.core.config import unknown_key
from routerl_jax.core.files import read_json, write_atomic
from routerl_jax.core.types import Example
from routerl_jax.data.trajectories import check_retrievers, golden_step
from routerl_jax.engine.engine import Engine
from routerl_jax.evaluation.benchmark import canary, score, score_all
from routerl_jax.parallel import multihost
from routerl_jax.services.judge import ModelJudge, settings_that_count
from routerl_jax.training.callbacks import Callback, Step
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.profiler import Clock
from routerl_jax.training.sections import CalibrationConfig
from routerl_jax.training.setup import evaluation_examples
from routerl_jax.training.stages import Stages


def evaluation_questions(config: TrainConfig) -> tuple[list[Example], list[Example]]:
    """The questions for validation and for the final table.

    Raises:
      ValueError: golden steps among them use retrievers that the run lacks, or rule out the canary.
    """
    validation, test = evaluation_examples(config, "validation"), evaluation_examples(config, "test")
    for part, examples in (("validation", validation), ("test", test)):
        name = getattr(config.data, part) or config.data.train
        check_retrievers(examples, tuple(config.knowledge), f"config.data.{part}={name}")
    if config.evaluation.canary and any(golden_step(example) is not None for example in validation):
        raise ValueError(
            "config.evaluation.canary changes what searches find, and golden steps, of which config.data.validation has "
            "some, search nothing: switch it off, or validate on questions"
        )
    return validation, test


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation(Callback):
    """Scores the policy: on the validation questions every config.evaluation.every steps, and on the test questions for the
    final table.

    Attributes:
      agent: the run's agent as it is evaluated.
      judge: asked about every answer, if there is one.
      clock: of the whole run.
    """

    config: TrainConfig
    workdir: pathlib.Path
    agent: Agent
    validation: Sequence[Example]
    test: Sequence[Example]
    engine: Engine
    tools: Mapping[str, SearchTool]
    judge: ModelJudge | None
    stages: Stages
    clock: Clock

    def on_step_end(self, step: Step) -> None:
        settings = self.config.evaluation
        if settings.every and (step.completed % settings.every == 0 or step.completed == self.config.steps):
            clock, asked = Clock(step.seconds), (self.agent, self.validation, self.engine, self.tools)
            with clock("validation"):
                summary, _ = score(*asked, **self._options(), judge=self.judge)
            numbers = {name: value for name, value in summary.items() if isinstance(value, float)}
            step.metrics.update({f"validation/{name}": value for name, value in numbers.items()})
            if settings.canary:
                with clock("canary"):
                    step.metrics.update(canary(*asked, **self._options()))

    def table(self, agents: Mapping[str, Agent]) -> dict[str, Any]:
        """The rows of agents with the present policy."""
        shown = {"progress": multihost.is_main(), "records": self.workdir / "evaluation", "judge": self.judge}
        with self.clock("evaluation"):
            return score_all(agents, self.test, self.engine, self.tools, **self._options(), **shown)

    def keep(self, agents: Mapping[str, Agent], name: str) -> None:
        """Scores agents with the present policy, for the table at the end of the run."""
        save_table(self.workdir, name, self.table(agents), self._asked())

    def kept(self, names: Sequence[str]) -> dict[str, Any]:
        """The rows that were kept under these names."""
        return saved_tables(self.workdir, names, self._asked())

    def calibration(self) -> dict[str, Any]:
        """`calibration` of the untrained policy's scores, by kind of question."""
        if not (settings := self.config.evaluation.calibration).kind:
            return {}
        tables = self.kept(["warm_start"]) if multihost.is_main() else None
        return calibration(multihost.exchange(tables)[0], settings)

    def _options(self) -> dict[str, Any]:
        return {
            "normalizer": self.config.evaluation.normalizer,
            "tool_timeout": self.config.rollout.tool_timeout,
        }

    def _asked(self) -> dict[str, Any]:
        """The settings that tables must share to be combined."""
        judge = {"judge": dict(settings_that_count(self.config.judge))} if self.judge else {}
        return {"questions": len(self.test), "k": self.config.evaluation.k or self.config.agent.k, **judge}


class StageEnds(Callback):
    """Scores the policy on the test questions at the end of every stage, for the table at the end of the run."""

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation

    def on_step_end(self, step: Step) -> None:
        evaluation = self._evaluation
        if evaluation.config.evaluation.stages and evaluation.stages.ended(step.completed):
            evaluation.keep({step.stage: evaluation.agent}, step.stage)


def check_names(config: TrainConfig, judged: Agent) -> None:
    """Raises ValueError if two agents have the same name, or config.evaluation.names names an agent that is not scored."""
    baselines = judged.baselines(tuple(config.knowledge))
    for section in ("stages", "controls"):
        if duplicate := next((name for name in getattr(config, section) if name in baselines), None):
            raise ValueError(
                f"config.{section}.{duplicate}: call it something else; results.json has another agent so named"
            )
    for name in config.evaluation.before_baselines:
        if name not in baselines:
            raise ValueError(unknown_key("config.evaluation.before_baselines", name, baselines))
    before = before_agents(config, judged)
    scored = (*before, "trained", *config.stages, *baselines)
    if clashes := [name for key, name in config.evaluation.names.items() if name in scored and name != key]:
        raise ValueError(f"config.evaluation.names: {clashes[0]!r} is another agent's name; take one that nobody has")
    if unknown := [name for name in config.evaluation.names if name not in scored]:
        close = difflib.get_close_matches(unknown[0], scored, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(scored)}"
        raise ValueError(f"config.evaluation.names.{unknown[0]}: no agent is called so; {hint}")


def before_agents(config: TrainConfig, judged: Agent) -> dict[str, Agent]:
    """The agents with which the untrained policy is scored, by the names of their rows."""
    baselines = judged.baselines(tuple(config.knowledge)) if config.evaluation.before_baselines else {}
    return {"warm_start": judged} | {
        f"warm_start_{name}": baselines[name] for name in config.evaluation.before_baselines
    }


def save_table(workdir: pathlib.Path, name: str, table: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Saves a table measured during the run for its final table, possibly in a later session. `asked`: the settings with which
    it was measured, because these may have changed by then."""
    if multihost.is_main():
        path = workdir / "evaluation" / f"{name}.json"
        write_atomic(path, json.dumps({"asked": asked, "agents": table}))


def saved_tables(workdir: pathlib.Path, names: Sequence[str], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The saved tables. Those measured with other settings are left out, with a warning.

    Raises:
      ValueError: a table's file is damaged.
    """
    tables: dict[str, Any] = {}
    for path in (workdir / "evaluation" / f"{name}.json" for name in names):
        if not path.is_file():
            continue
        saved = read_json(path, "remove it, and the run goes on without these rows of its table")
        if saved["asked"] == asked:
            tables |= saved["agents"]
        else:
            logging.warning("%s was measured with %s, and now it is %s: it is left out", path, saved["asked"], asked)
    return tables


def calibration(table: Mapping[str, Mapping[str, Any]], config: CalibrationConfig) -> dict[str, dict[str, Any]]:
    """By kind of question: `closed_book` and `open_book` (EM of the untrained policy without a search and with all searches),
    and `n`, the number of questions. {} if the configuration does not ask for this, or it was not measured.

    Args:
      table: the untrained policy's rows, by `before_agents`' names.
    """
    names = [f"warm_start_{name}" for name in (config.closed, config.open)]
    if not config.kind or not all(name in table for name in names):
        return {}
    closed, opened = (table[name].get("by", {}).get("kind", {}) for name in names)
    return {
        kind: {"closed_book": closed[kind]["em"], "open_book": opened[kind]["em"], "n": closed[kind]["n"]}
        for kind in closed
    }


def check_calibration(measured: Mapping[str, Mapping[str, Any]], config: CalibrationConfig) -> None:
    """Refuses a start at which a price on searches could teach nothing.

    Raises:
      ValueError: there are no questions of the kind. Or accuracy without a search is not slightly below that with searches: a
        search then always pays, or never does.
    """
    if not config.kind:
        return
    where = "config.evaluation.calibration"
    if config.kind not in measured:
        kinds = ", ".join(measured) or "no kinds"
        raise ValueError(f"{where}.kind={config.kind!r}: the test questions have {kinds} (metadata 'kind')")
    closed, opened = (measured[config.kind][name] for name in ("closed_book", "open_book"))
    if (1 - config.penalty) * opened < closed < opened:
        return
    lacks = closed <= (1 - config.penalty) * opened
    outcome = "so every search pays" if lacks else "so that no search pays, with or without the price"
    mend = "teach it what it shall know" if lacks else "teach it to read, or less by heart"
    raise ValueError(
        f"{where}: of the {config.kind} questions the untrained policy answers {100 * closed:.1f} % without a search and "
        f"{100 * opened:.1f} % with all searches, {outcome} (searches cost {100 * config.penalty:.0f} % of a right answer); "
        f"{mend} (config.warm_start), or set {where}.kind='' to train all the same"
    )
