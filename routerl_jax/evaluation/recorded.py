"""Scores of attempts that another program recorded, as a recipe's agent judges its own."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from routerl_jax.agents.config import AgentConfig
from routerl_jax.core.config import naming, override
from routerl_jax.core.types import Episode, Verdict
from routerl_jax.data.rounds import read_rounds
from routerl_jax.evaluation.metrics import summarize
from routerl_jax.recipes.known import RECIPES
from routerl_jax.rewards.terms import RewardFunction
from routerl_jax.rewards.verdicts import Judge, counts


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
    """What recorded rounds (data.rounds) come to.

    Args:
      recipe: a name in RECIPES or a dotted path.
      tools: names of the agent's knowledge bases.
      settings: fields of the agent, beside its number of `searches`; others are as the paper has them.
      judge: asked once about every answer, so that there are its metrics and verdicts, and terms of the reward that need them.
      reward: terms in the place of the recipe's own (`RewardFunction.terms`).

    Returns:
      `metrics` (evaluation.metrics.summarize), `reward` (mean of each term, weighted, and of `total`), `actions` (number of
      turns by what they ask for), `episodes` (id, answer and reward of each, and what the judge says) and `n`.

    Raises:
      ValueError: names file, row and key; an unknown recipe, setting or term, an agent that can't read recorded rounds, or a
        term that asks a judge where there is none.
    """
    with naming("--recipe"):
        build = RECIPES.get(recipe)
    made = build(AgentConfig(max_searches=searches), {}, tuple(tools), normalizer)
    agent = override(made.agent, dict(settings or {}), "--agent")
    with naming("--reward"):
        # every answer has its verdict by the time that it is rewarded
        terms = RewardFunction(dict(reward or made.reward or {}), normalizer, judge and _verdicts)
    if terms.asks and judge is None:
        raise ValueError(f"--reward: the term {terms.asks[0]!r} asks a judge: give --judge, or take another term")
    episodes = [agent.recorded(recorded) for _, recorded in read_rounds(path)]
    if not episodes:
        raise ValueError(f"{path} holds no recorded rounds")
    if judge is not None:
        for episode, verdict in zip(episodes, judge(episodes), strict=True):
            episode.verdict = verdict
    rewards = terms(episodes) if terms.terms else [{} for _ in episodes]
    actions: dict[str, int] = {}
    for turn in (turn for episode in episodes for turn in episode.turns):
        name = "none" if turn.action is None else f"{turn.action.kind} {turn.action.tool}".strip()
        actions[name] = actions.get(name, 0) + 1
    return {
        "metrics": summarize(episodes, normalizer, tuple(tools), agent.search_budget),
        "reward": _means(rewards, episodes, terms.asks),
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


def _means(
    rewards: Sequence[Mapping[str, float]], episodes: Sequence[Episode], asks: Sequence[str]
) -> dict[str, float]:
    """The mean of each term; of what hangs on a verdict, over the episodes whose verdict counts."""
    hanging = {*asks, "total"} if asks else set()
    found = {
        name: [row[name] for row, episode in zip(rewards, episodes) if name not in hanging or counts(episode)]
        for name in rewards[0]
    }
    return {name: float(np.mean(values)) for name, values in found.items() if values}


def _verdicts(episodes: Sequence[Episode]) -> list[Verdict]:
    return [episode.verdict for episode in episodes if episode.verdict is not None]
