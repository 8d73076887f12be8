"""Scores attempts that another program recorded, in the same manner as a recipe's agent judges its own."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from routerl_jax.core.config import naming, override
from routerl_jax.core.types import Episode, Verdict
from routerl_jax.data.rounds import read_rounds
from routerl_jax.evaluation.metrics import summarize
from routerl_jax.recipes.recipe import RECIPES, AgentConfig
from routerl_jax.rewards.terms import Judge, RewardFunction, counts


def score_rounds(
    path: str | pathlib.Path,
    recipe: str,
    tools: Sequence[str],
    settings: Mapping[str, Any] | None = None,
    *,
    searches: int = 2,
    normalizer: str = "search_r1",
    judge: Judge | None = None,
    reward: Mapping[str, float | Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Scores of recorded rounds (data.rounds).

    Args:
      recipe: a name in RECIPES or a dotted path.
      tools: names of the agent's knowledge bases.
      settings: fields of the agent besides its number of `searches`; other fields are those of the paper.
      judge: if given, it is asked once about every answer. Its metrics and verdicts are added, and terms of the reward may use
        them.
      reward: replaces the terms of the recipe's reward (`RewardFunction.terms`).

    Returns:
      `metrics` (evaluation.metrics.summarize), `reward` (mean of each weighted term, and of `total`), `actions` (number of
      turns by kind of action), `episodes` (id, answer, reward and verdict of each) and `n`.

    Raises:
      ValueError: a row is wrong (names file, row and key); the recipe, a setting or a term is unknown; the agent can't read
        recorded rounds; or a term needs a judge and there is none.
    """
    with naming("--recipe"):
        build = RECIPES.get(recipe)
    built = build(AgentConfig(max_searches=searches), {}, tuple(tools), normalizer)
    agent = override(built.agent, dict(settings or {}), "--agent")
    with naming("--reward"):
        # verdicts come first, because terms of the reward may need them
        terms = RewardFunction(dict(reward or built.reward or {}), normalizer, judge and _verdicts)
    if terms.asks and judge is None:
        raise ValueError(f"--reward: the term {terms.asks[0]!r} asks a judge: give --judge, or take another term")
    episodes = [agent.recorded(recorded) for _, recorded in read_rounds(path)]
    if not episodes:
        raise ValueError(f"{path} holds no recorded rounds")
    if judge is not None:
        for episode, verdict in zip(episodes, judge(episodes), strict=True):
            episode.verdict = verdict
    rewards = terms(episodes) if terms.terms else [{} for _ in episodes]
    # A term that needs verdicts is averaged over the episodes whose verdict counts.
    hanging = {*terms.asks, "total"} if terms.asks else set()
    values = {
        name: [row[name] for row, episode in zip(rewards, episodes) if name not in hanging or counts(episode)]
        for name in rewards[0]
    }
    actions: dict[str, int] = {}
    for turn in (turn for episode in episodes for turn in episode.turns):
        name = "none" if turn.action is None else f"{turn.action.kind} {turn.action.tool}".strip()
        actions[name] = actions.get(name, 0) + 1
    return {
        "metrics": summarize(episodes, normalizer, tuple(tools), agent.search_budget),
        "reward": {name: float(np.mean(counted)) for name, counted in values.items() if counted},
        "actions": dict(sorted(actions.items())),
        "episodes": [
            {
                "id": episode.example.id,
                "answer": episode.answer,
                "reward": row.get("total"),
                **({"verdict": episode.verdict.kind, "said": episode.verdict.said} if episode.verdict else {}),
            }
            for episode, row in zip(episodes, rewards)
        ],
        "n": len(episodes),
    }


def _verdicts(episodes: Sequence[Episode]) -> list[Verdict]:
    return [episode.verdict for episode in episodes if episode.verdict is not None]
