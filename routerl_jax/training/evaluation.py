"""The evaluation of a run: its questions, the names of scored agents, and tables that are kept until the end of the run."""

from __future__ import annotations

import difflib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from routerl_jax.agents.agent import Agent
from routerl_jax.core.config import unknown_key
from routerl_jax.core.files import read_json, write_atomic
from routerl_jax.core.types import Example
from routerl_jax.data.trajectories import check_retrievers, golden_step
from routerl_jax.parallel import multihost
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.setup import evaluation_examples


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
