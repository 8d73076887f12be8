"""Scores of attempts that another program recorded, as a recipe's agent judges its own."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from routerl_jax.agents.config import AgentConfig
from routerl_jax.core.config import naming, override
from routerl_jax.data.rounds import read_rounds
from routerl_jax.evaluation.metrics import summarize
from routerl_jax.recipes.known import RECIPES
from routerl_jax.rewards.terms import RewardFunction


def score_rounds(
    path: str | pathlib.Path,
    recipe: str,
    tools: Sequence[str],
    settings: Mapping[str, Any] | None = None,
    *,
    searches: int = 2,
    normalizer: str = "search_r1",
) -> dict[str, Any]:
    """What recorded rounds (data.rounds) come to.

    Args:
      recipe: a name in RECIPES or a dotted path.
      tools: names of the agent's knowledge bases.
      settings: fields of the agent, beside its number of `searches`; others are as the paper has them.

    Returns:
      `metrics` (evaluation.metrics.summarize), `reward` (mean of each term, weighted, and of `total`), `actions` (number of
      turns by what they ask for), `episodes` (id, answer and reward of each) and `n`.

    Raises:
      ValueError: names file, row and key; an unknown recipe or setting, or an agent that can't read recorded rounds.
    """
    with naming("--recipe"):
        build = RECIPES.get(recipe)
    made = build(AgentConfig(max_searches=searches), {}, tuple(tools), normalizer)
    agent = override(made.agent, dict(settings or {}), "--agent")
    episodes = [agent.recorded(recorded) for _, recorded in read_rounds(path)]
    if not episodes:
        raise ValueError(f"{path} holds no recorded rounds")
    rewards = RewardFunction(dict(made.reward), normalizer)(episodes) if made.reward else [{} for _ in episodes]
    actions: dict[str, int] = {}
    for turn in (turn for episode in episodes for turn in episode.turns):
        name = "none" if turn.action is None else f"{turn.action.kind} {turn.action.tool}".strip()
        actions[name] = actions.get(name, 0) + 1
    return {
        "metrics": summarize(episodes, normalizer, tuple(tools), agent.search_budget),
        "reward": {name: float(np.mean([row[name] for row in rewards])) for name in rewards[0]},
        "actions": dict(sorted(actions.items())),
        "episodes": [
            {"id": episode.example.id, "answer": episode.answer, "reward": row.get("total")}
            for episode, row in zip(episodes, rewards)
        ],
        "n": len(episodes),
    }
