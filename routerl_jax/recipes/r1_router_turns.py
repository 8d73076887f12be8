"""R1-Router's rewards for every turn of an attempt at a question, for training online, on the policy's own prefix.

The paper rewards a golden step on its golden prefix (arXiv 2505.22095, equations 9, 10 and 18 to 24). Here the step comes after
what the policy did itself, so that what a turn should do depends on which hops of the gold path are still open. A hop that
stays open is worked on again; then a turn earns what it is better by than the best one at that hop before it. So an attempt's
sum is what the best turns at its hops are worth, and nothing is gained by doing a thing badly first, or twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from routerl_jax.agents.grammar import NO_TOOL
from routerl_jax.core.types import Episode, Turn
from routerl_jax.data.gold_paths import GoldHop, gold_path
from routerl_jax.knowledge.encoders import shared_encoder
from routerl_jax.recipes.r1_router_rewards import ENCODER, final_accuracy, similarities
from routerl_jax.rewards.metrics import f1_recall
from routerl_jax.rewards.ranges import accepted_answers
from routerl_jax.rewards.terms import REWARD_TERMS, TurnTerm


class Judged(NamedTuple):
    """A turn by its index, and the hop that it was to work on by its place in the path; one past the end: none was open."""

    turn: int
    place: int
    hop: GoldHop | None


def turn_route_reward(
    episodes: Sequence[Episode],
    encoder: str = ENCODER,
    alpha: float = 0.5,
    beta: float = 0.5,
    normalizer: str = "vqa",
) -> list[list[float]]:
    """r_format x (alpha r_ask + beta r_route) of each turn that routes, against the gold hop that is open next; else 0.

    r_ask is the cosine with the hop's sub-question, r_route whether its knowledge base is asked. What the gold path does not
    say is left out, and the weights of the rest are scaled to alpha + beta; of a hop that names a passage alone, what counts is
    whether the search finds it. Where no hop is open, `none` earns alpha + beta and a search nothing. A question without a
    gold path earns nothing. Of several routes to a hop each earns what it has beyond the best before it.

    Args:
      encoder: as `knowledge.encoders.shared_encoder` takes it; it embeds all texts of the step in one call.
    """
    judged = [
        [one for one in routes(episode, normalizer) if episode.turns[one.turn].well_formed] for episode in episodes
    ]
    asked = {
        (i, one.turn): (_query(episodes[i].turns[one.turn]), one.hop.query.lower())
        for i, of_episode in enumerate(judged)
        for one in of_episode
        if one.hop is not None and one.hop.query
    }
    likeness = dict(zip(asked, similarities(list(asked.values()), lambda: shared_encoder(encoder)).tolist()))
    rewards = []
    for i, (episode, of_episode) in enumerate(zip(episodes, judged)):
        values = [
            _route(episode.turns[one.turn], one.hop, likeness.get((i, one.turn)), alpha, beta) for one in of_episode
        ]
        rewards.append(_gains(len(episode.turns), of_episode, values))
    return rewards


def turn_answer_reward(episodes: Sequence[Episode], normalizer: str = "vqa") -> list[list[float]]:
    """r_format x r_answer of each turn that answers; 0 of other turns.

    An intermediate answer earns its F1-recall against the value of the hop that its search was for (equations 22 and 23), less
    the best one's before it, and nothing where none was open or its value is not known; the final answer 1 if it has all words
    of an accepted answer, else 0.
    """
    rewards = []
    for episode in episodes:
        judged = [one for one in answers(episode, normalizer) if one.hop is not None and one.hop.value]
        values = [_answers(episode.turns[one.turn], one.hop, normalizer) for one in judged]
        of_episode = _gains(len(episode.turns), judged, values)
        last = _final(episode)
        if last is not None and episode.turns[last].well_formed:
            of_episode[last] = final_accuracy(
                episode.answer, accepted_answers(episode.example, episode.answer), normalizer
            )
        rewards.append(of_episode)
    return rewards


def turn_format_reward(episodes: Sequence[Episode]) -> list[list[float]]:
    """-1 for each turn that is not in the form, or that can't be carried out; else 0.

    On golden prefixes the right turn is always there to be written, and format is its factor. On the policy's own one often
    is not, where a search missed: all that can be written then earns 0, and only this keeps it in the form. (Not of the paper.)
    """
    return [[-float(not _fine(turn)) for turn in episode.turns] for episode in episodes]


def _fine(turn: Turn) -> bool:
    return turn.well_formed and turn.action is not None and turn.action.kind != "invalid"


REWARD_TERMS.register("r1_router.turn_format")(TurnTerm(turn_format_reward))
REWARD_TERMS.register("r1_router.turn_route")(TurnTerm(turn_route_reward))
REWARD_TERMS.register("r1_router.turn_answer")(TurnTerm(turn_answer_reward))


def routes(episode: Episode, normalizer: str) -> list[Judged]:
    """The turns that route and the hop that was open next when they did; none where the example has no gold path."""
    return [one for one in _walk(episode, normalizer) if episode.turns[one.turn].action.kind == "search"]  # type: ignore[union-attr]


def answers(episode: Episode, normalizer: str) -> list[Judged]:
    """The turns that give an intermediate answer and the hop that their search was for."""
    return [one for one in _walk(episode, normalizer) if episode.turns[one.turn].action.kind == "answer"]  # type: ignore[union-attr]


def _gains(turns: int, judged: Sequence[Judged], values: Sequence[float]) -> list[float]:
    """One number per turn: by how much its value is above the best before it at the same hop; 0 for turns without value."""
    rewards, best = [0.0] * turns, dict[int, float]()
    for one, value in zip(judged, values, strict=True):
        before = best.get(one.place, 0.0)
        rewards[one.turn] = max(value - before, 0.0)
        best[one.place] = max(value, before)
    return rewards


def _walk(episode: Episode, normalizer: str) -> Iterator[Judged]:
    """Routes and intermediate answers in order, each with the hop that it was to work on.

    A hop is closed by what the policy carries on from its search: the intermediate answer, if it holds the whole value, or
    where it reads what was found in its own conversation, the passages. Hops close in the order of the path.
    """
    path = gold_path(episode.example)
    if path is None:
        return
    waiting, final = list(path), _final(episode)
    found: list[int] = []  # places in the path whose passages have come up
    for k, turn in enumerate(episode.turns):
        kind = "invalid" if turn.action is None else turn.action.kind
        if kind == "invalid" or k == final:
            continue
        hop = waiting[0] if waiting else None
        yield Judged(k, len(path) - len(waiting), hop)
        if kind == "answer":
            if hop is not None and _states(turn, hop, normalizer):
                waiting.pop(0)
            continue
        if not turn.asked:
            passages = tuple(passage for call in turn.calls for passage in call.passages)
            found += [place for place, other in enumerate(path) if other.found_in(passages)]
            while waiting and len(path) - len(waiting) in found:
                waiting.pop(0)


def _states(turn: Turn, hop: GoldHop, normalizer: str) -> bool:
    """Whether an intermediate answer closes its hop; one that has no value is closed by any answer."""
    return not hop.value or f1_recall(_answer(turn), hop.value, normalizer) == 1.0


def _answers(turn: Turn, hop: GoldHop | None, normalizer: str) -> float:
    return turn.well_formed * f1_recall(_answer(turn), hop.value, normalizer) if hop is not None else 0.0


def _route(turn: Turn, hop: GoldHop | None, likeness: float | None, alpha: float, beta: float) -> float:
    assert turn.action is not None
    if hop is None or turn.action.tool == NO_TOOL:
        return (alpha + beta) * float(hop is None and turn.action.tool == NO_TOOL)
    parts = []
    if likeness is not None:
        parts.append((alpha, likeness))
    if hop.kb:
        parts.append((beta, float(turn.action.tool == hop.kb)))
    if not parts:
        passages = tuple(passage for call in turn.calls for passage in call.passages)
        return (alpha + beta) * float(hop.found_in(passages))
    weight = sum(weight for weight, _ in parts)
    return (alpha + beta) * sum(weight * value for weight, value in parts) / weight if weight else 0.0


def _final(episode: Episode) -> int | None:
    """Index of the turn with the answer to the question; None if there is none."""
    last = len(episode.turns) - 1
    if episode.answer is None or last < 0:
        return None
    action = episode.turns[last].action
    return last if action is not None and action.kind == "answer" else None


def _query(turn: Turn) -> str:
    return turn.action.query.lower() if turn.action is not None else ""


def _answer(turn: Turn) -> str:
    return turn.action.answer if turn.action is not None else ""
