"""Routing accuracy: whether each search went to the right knowledge base, according to the example's gold path."""

from __future__ import annotations

from collections.abc import Collection

from routerl_jax.core.types import Episode
from routerl_jax.data.gold_paths import known_path
from routerl_jax.data.trajectories import NONE, golden_step, label_of


def routing_decisions(episode: Episode) -> tuple[int, int] | None:
    """(right decisions, decisions) of an episode; None if its example has no gold path.

    The gold path (`example.metadata["path"]`) lists hops, each with the knowledge base `kb` that has passage `passage_id`. A
    search is right if it goes to the knowledge base of the first hop whose passage has not been retrieved yet. Once all have
    been, every further search is wrong. An answer without any search counts as one decision: right if the question needs no
    retrieval, else wrong. An episode of a golden step (data.trajectories) makes one decision if the step is a route: the
    retriever that it names.
    """
    step = golden_step(episode.example)
    if step is not None:
        return None if step.kind != "route" else (int(_named(episode) in step.retrievers), 1)
    path = known_path(episode.example.metadata)
    if path is None:
        return None
    missing = list(path)
    right = 0
    for call in episode.calls:
        right += bool(missing) and call.tool == missing[0]["kb"]
        retrieved = {passage.id for passage in call.passages}
        while missing and missing[0]["passage_id"] in retrieved:
            missing.pop(0)
    if not episode.calls:
        return (0 if path else 1), 1
    return right, len(episode.calls)


def asked_knowledge_bases(episode: Episode) -> list[str]:
    """The knowledge bases that an episode searched. For a golden route, which makes no search, the one that it names."""
    if golden_step(episode.example) is None:
        return [call.tool for call in episode.calls]
    named = _choice(episode)
    return [named] if named not in ("", NONE) else []


def _named(episode: Episode) -> str:
    """The retriever that an episode of a golden route chose, in the form of trajectories; "" without a valid choice."""
    tool = _choice(episode)
    return label_of(tool) if tool else ""


def _choice(episode: Episode) -> str:
    action = episode.turns[-1].action if episode.turns else None
    return action.tool if action is not None and action.kind == "search" else ""


def routing_accuracy(episodes: list[Episode], tools: Collection[str] | None = None) -> float | None:
    """Share of right decisions over all episodes with a gold path.

    None if there is no such episode, or if gold paths use none of the knowledge bases, because these divide the same facts in
    another manner.

    Args:
      tools: names of the knowledge bases; default: those that were asked.
    """
    tool_names = {call.tool for episode in episodes for call in episode.calls} if tools is None else set(tools)
    gold = {hop["kb"] for episode in episodes for hop in known_path(episode.example.metadata) or ()}
    if tool_names and gold and not tool_names & gold:
        return None
    decisions = [d for episode in episodes if (d := routing_decisions(episode)) is not None]
    total = sum(count for _, count in decisions)
    return sum(right for right, _ in decisions) / total if total else None
