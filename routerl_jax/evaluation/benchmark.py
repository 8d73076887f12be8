"""Scores agents on a fixed set of questions: runs them with their knowledge bases, or as a canary with passages for other
questions; or reads attempts that another program recorded, in the same manner as a recipe's agent judges its own."""

from __future__ import annotations

import base64
import json
import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from routerl_jax.agents.agent import Agent, SearchTool
from routerl_jax.agents.driver import run
from routerl_jax.core.config import naming, override
from routerl_jax.core.files import Journal, read_json_lines
from routerl_jax.core.safe_pickle import dumps, loads
from routerl_jax.core.types import Episode, Example, Passage, Query, Verdict
from routerl_jax.data.rounds import read_rounds
from routerl_jax.engine.policy import Policy
from routerl_jax.engine.sampling import GREEDY, Sampling
from routerl_jax.evaluation.metrics import summarize
from routerl_jax.evaluation.records import write_records
from routerl_jax.knowledge.base import query_text
from routerl_jax.parallel import multihost
from routerl_jax.recipes.recipe import RECIPES, AgentConfig
from routerl_jax.rewards.terms import Judge, RewardFunction, counts
from routerl_jax.services import faults


def score(
    agent: Agent,
    examples: Sequence[Example],
    engine: Policy,
    tools: Mapping[str, SearchTool],
    normalizer: str,
    *,
    tool_timeout: float,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    progress: str = "",
    judge: Judge | None = None,
    unfinished: Unfinished | None = None,
) -> tuple[dict[str, Any], list[Episode]]:
    """Runs an agent once on every example, greedily by default. Returns metrics and episodes.

    Args:
      unfinished: keeps every episode as it ends. Examples of which it has one are not run again.
      tool_timeout: seconds after which a search counts as failed. Use that of training, or results differ from it.
      judge: if given, it is asked about every answer, and its metrics are added.
    """
    known = unfinished.episodes if unfinished is not None else {}
    episodes = run(
        agent,
        [example for example in examples if example.id not in known],
        engine,
        tools,
        samples=1,
        seed=seed,
        sampling=sampling,
        tool_timeout=tool_timeout,
        progress=progress,
        finished=unfinished.add if unfinished is not None else None,
    )
    if known:
        of_id = known | {episode.example.id: episode for episode in episodes}
        episodes = [of_id[example.id] for example in examples]
    if judge is not None:
        for episode, verdict in zip(episodes, judge(episodes), strict=True):
            episode.verdict = verdict
    return summarize(episodes, normalizer, tuple(tools), agent.search_budget), episodes


def score_all(
    agents: Mapping[str, Agent],
    examples: Sequence[Example],
    engine: Policy,
    tools: Mapping[str, SearchTool],
    normalizer: str,
    *,
    progress: bool = True,
    records: pathlib.Path | None = None,
    unfinished: Mapping[str, Unfinished] | None = None,
    **options: Any,
) -> dict[str, dict[str, Any]]:
    """Metrics of several agents with one policy on the same questions, by name. Episodes go to `records`/NAME.jsonl.

    Args:
      unfinished: for each agent, what keeps its episodes as they end, see `score`.
      options: further arguments of `score`.
    """
    table = {}
    for name, agent in agents.items():
        options |= {"progress": f"evaluating {name}" if progress else "", "unfinished": (unfinished or {}).get(name)}
        table[name], episodes = score(agent, examples, engine, tools, normalizer, **options)
        if records is not None and multihost.is_main():
            write_records(records / f"{name}.jsonl", episodes)
    return table


class Unfinished:
    """The episodes of an agent that a killed evaluation had finished, whole, in a file. `close` it when all is done.

    An episode in which the policy failed in a way that says nothing about the question (faults.PASSING) is run again.

    Args:
      asked: the settings of the episodes, JSON-serialisable.

    Attributes:
      episodes: by the ids of their examples.

    Raises:
      ValueError: the file has episodes of other settings (names the key), or is damaged.
    """

    def __init__(self, path: pathlib.Path, asked: Mapping[str, Any]) -> None:
        self._path, self._asked = path, json.loads(json.dumps(asked))
        self._journal: Journal | None = None
        self._complete = True
        self.episodes: dict[str, Episode] = {}
        for number, record in enumerate(read_json_lines(path) if path.is_file() else (), 1):
            with naming(f"{path}, line {number}: give another --output, or remove the file"):
                before = record.get("asked", {})
                if differing := [key for key, value in self._asked.items() if before.get(key) != value]:
                    key = differing[0]
                    raise ValueError(f"an episode of {key} {before.get(key)!r}, and now it is {self._asked[key]!r}")
                episode: Episode = loads(base64.b64decode(record.get("episode", "")))
            if not _passing(episode):
                self.episodes[episode.example.id] = episode

    def add(self, episode: Episode) -> None:
        """Keeps an episode."""
        self._complete = self._complete and not _passing(episode)
        self._journal = self._journal or Journal(self._path)
        self._journal.append({"asked": self._asked, "episode": base64.b64encode(dumps(episode)).decode()})

    def close(self) -> None:
        """Removes the file, unless the next call should run some of the added episodes again."""
        if self._journal is not None:
            self._journal.close()
        if self._complete:
            self._path.unlink(missing_ok=True)


def _passing(episode: Episode) -> bool:
    return episode.failure is not None and episode.failure.kind in faults.PASSING


class RandomQueryTool:
    """A tool that ignores its query and searches for a question from a pool: it returns real but useless passages.

    Args:
      tool: the tool that is searched.
      pool: questions. The query's digest chooses one, so that a run is reproducible.
    """

    def __init__(self, tool: SearchTool, pool: Sequence[str]) -> None:
        self._tool, self._pool = tool, pool
        self.cost = getattr(tool, "cost", 1.0)

    def search(self, queries: Sequence[Query], k: int) -> list[list[Passage]]:
        digests = [zlib.crc32(query_text(query).encode("utf-8", "replace")) for query in queries]
        return self._tool.search([self._pool[digest % len(self._pool)] for digest in digests], k)


def canary(
    agent: Agent,
    examples: Sequence[Example],
    engine: Policy,
    tools: Mapping[str, SearchTool],
    normalizer: str,
    *,
    tool_timeout: float,
) -> dict[str, float]:
    """Validation with a retriever that returns passages for other questions: `canary/em`, `canary/searches_per_question`. It
    shows whether the policy uses what it reads.

    If `canary/em` is near the EM of validation, the policy answers without reading. If its searches fall to 0, it has learnt
    that searching is useless. Both show earlier here than in validation.
    """
    pool = [example.question for example in examples]
    elsewhere = {name: RandomQueryTool(tool, pool) for name, tool in tools.items()}
    summary, _ = score(agent, examples, engine, elsewhere, normalizer, tool_timeout=tool_timeout)
    return {f"canary/{name}": summary[name] for name in ("em", "searches_per_question")}


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
