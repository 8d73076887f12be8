"""Opens the run whose policy makes the attempts for MMSearch-R1's data."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from routerl_jax.recipes.mmsearch_r1.agents import MMSearchAgent
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.load import load_config
from routerl_jax.training.setup import build_recipe


def open_run(workdir: pathlib.Path, step: int) -> tuple[TrainConfig, MMSearchAgent, dict[str, Any]]:
    """A run's configuration, its agent, and the settings that attempts depend on (JSON-serialisable). Loads no weights.

    Args:
      step: step of a checkpoint; 0: the finished policy.

    Raises:
      ValueError: there is no run, it has another recipe, or its policy is not finished. The message names config.policy or
        config.step.
    """
    try:
        config = load_config(workdir)
    except ValueError as error:
        raise ValueError(f"config.policy={str(workdir)!r}: {error}") from error
    agent = build_recipe(config).agent
    if not isinstance(agent, MMSearchAgent):
        raise ValueError(
            f"config.policy={str(workdir)!r}: its config.recipe is {config.recipe!r}; give a run of recipe 'mmsearch_r1'"
        )
    if not step and not (workdir / "policy" / "config.json").is_file():
        raise ValueError(
            f"config.step=0: {workdir} has no finished policy; wait for its end, or give the step of a checkpoint"
        )
    parts = ("seed", "recipe", "model", "agent", "knowledge", "rollout")
    made_of = {"policy": str(workdir.resolve()), **{key: dataclasses.asdict(config)[key] for key in parts}}
    return config, agent, {**made_of, "max_length": config.engine.max_length}
