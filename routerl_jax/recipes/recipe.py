"""What a recipe is: how the policy works on a question, and what it is rewarded for, stage by stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from routerl_jax.agents.agent import Agent
from routerl_jax.agents.config import AgentConfig
from routerl_jax.core.registry import Registry
from routerl_jax.core.types import Episode

# (the episodes of a step) -> for each its named terms and their sum as `total`
Reward = Callable[[Sequence[Episode]], list[dict[str, float]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A stretch of training from step `start` on."""

    name: str
    start: int
    reward: Reward


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """An agent and its stages, in order of their start.

    Attributes:
      headline: the metrics by which its paper judges.
      reward: what its paper pays, for attempts that no run's stages judge (launch.score).
    """

    agent: Agent
    stages: Sequence[Stage]
    headline: tuple[str, ...] = ("em",)
    reward: Mapping[str, float | Mapping[str, Any]] = dataclasses.field(default_factory=dict)


# (config.agent, config.stages, names of the knowledge bases, config.evaluation.normalizer) -> Recipe
RECIPES: Registry[Callable[..., Recipe]] = Registry("recipe")


def check_own_protocol(agent: AgentConfig, recipe: str, prompt: str, instead_of_on_invalid: str) -> None:
    """That nothing is set which a recipe with a protocol of its own decides.

    Args:
      prompt: where the recipe's prompt comes from, for the error.
      instead_of_on_invalid: what says what follows a turn that can't be read, for the error.

    Raises:
      ValueError: a grammar, a prompt, or another `on_invalid` than the default.
    """
    if agent.grammar:
        raise ValueError(
            f"config.agent.grammar={agent.grammar!r}: config.recipe={recipe!r} has tags of its own; leave it empty"
        )
    if agent.prompt or agent.prompt_suffix:
        raise ValueError(
            f"config.agent.prompt and prompt_suffix: config.recipe={recipe!r} has {prompt}; leave them empty"
        )
    if agent.on_invalid != "remind":
        raise ValueError(
            f"config.agent.on_invalid={agent.on_invalid!r}: config.recipe={recipe!r} {instead_of_on_invalid}; leave "
            "on_invalid='remind'"
        )
