"""R1-Router's rewards for every turn of an attempt at a question, for training online, on the policy's own prefix.

The paper rewards a golden step on its golden prefix (arXiv 2505.22095, equations 9, 10 and 18 to 24). Here the step comes after
what the policy did itself, so that what a turn should do depends on which hops of the gold path are still open. A hop that
stays open is worked on again; then a turn earns what it is better by than the best one at that hop before it. So an attempt's
sum is what the best turns at its hops are worth, and nothing is gained by doing a thing badly first, or twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from routerl_jax.agents.grammar import NO_TOOL
from routerl_jax.core.types import Episode, Passage, Turn
from routerl_jax.data.gold_paths import GoldHop, gold_path
from routerl_jax.knowledge.encoders import shared_encoder
from routerl_jax.recipes.r1_router.rewards import ENCODER, final_accuracy, similarities
from routerl_jax.rewards.metrics import f1_recall
from routerl_jax.rewards.ranges import accepted_answers
from routerl_jax.rewards.terms import REWARD_TERMS, TurnTerm

Open = tuple[tuple[int, GoldHop], ...]


class Judged(NamedTuple):
    """A turn by its index, and the hops that it may have worked on, with their places in the path; none: all were closed."""

    turn: int
    open: Open


class Worth(NamedTuple):
    """What a turn is worth at a hop, by its place in the path; -1: none was open."""

    turn: int
    place: int
    value: float


def turn_route_reward(
    episodes: Sequence[Episode],
    encoder: str = ENCODER,
    alpha: float = 0.5,
    beta: float = 0.5,
    normalizer: str = "vqa",
) -> list[list[float]]:
    """r_format x (alpha r_ask + beta r_route) of each turn that routes, against a gold hop that is open; else 0.

    r_ask is the cosine with the hop's sub-question, r_route whether its knowledge base is asked or, where the gold path does
    not say which that is, whether the search finds its passage. What is not known at all is left out, and the weights of the
    rest are scaled to alpha + beta. Of several open hops (a comparison's) the one counts at which the route is worth most, but
    where a passage is all that is known of them, all that the search finds. Where no hop is open, `none` earns alpha + beta and
    a search nothing. A question without a gold path earns nothing. Of several routes to a hop each earns what it has beyond the
    best before it.

    Args:
      encoder: as `knowledge.encoders.shared_encoder` takes it; it embeds all texts of the step in one call.
    """
    judged = [
        [one for one in routes(episode, normalizer) if episode.turns[one.turn].well_formed] for episode in episodes
    ]
    asked = {
        (i, one.turn, place): (_query(episodes[i].turns[one.turn]), hop.query.lower())
        for i, of_episode in enumerate(judged)
        for one in of_episode
        for place, hop in one.open
        if hop.query
    }
    likeness = dict(zip(asked, similarities(list(asked.values()), lambda: shared_encoder(encoder)).tolist()))
    rewards = []
    for i, (episode, of_episode) in enumerate(zip(episodes, judged)):
        found = []
        for one in of_episode:
            turn = episode.turns[one.turn]
            values = [
                (place, _route(turn, hop, likeness.get((i, one.turn, place)), alpha, beta)) for place, hop in one.open
            ]
            if one.open and not any(hop.query or hop.kb for _, hop in one.open):
                found += [Worth(one.turn, *value) for value in values]
            else:
                found.append(Worth(one.turn, *_most(values or [(-1, (alpha + beta) * _stops(turn))])))
        rewards.append(_gains(len(episode.turns), found))
    return rewards


def turn_answer_reward(episodes: Sequence[Episode], normalizer: str = "vqa") -> list[list[float]]:
    """r_format x r_answer of each turn that answers; 0 of other turns.

    An intermediate answer earns its F1-recall against the value of a hop that was open, of several the one that it has most of
    (equations 22 and 23), less the best one's before it, and nothing where none was open or no value is known; the final answer
    1 if it has all words of an accepted answer, else 0.
    """
    rewards = []
    for episode in episodes:
        found = []
        for one in answers(episode, normalizer):
            turn = episode.turns[one.turn]
            values = [
                (place, turn.well_formed * f1_recall(_answer(turn), hop.value, normalizer))
                for place, hop in one.open
                if hop.value
            ]
            if values:
                found.append(Worth(one.turn, *_most(values)))
        of_episode = _gains(len(episode.turns), found)
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
    """The turns that route and the hops that were open when they did; none where the example has no gold path."""
    return [one for one in _walk(episode, normalizer) if episode.turns[one.turn].action.kind == "search"]  # type: ignore[union-attr]


def answers(episode: Episode, normalizer: str) -> list[Judged]:
    """The turns that give an intermediate answer and the hops that were open before it."""
    return [one for one in _walk(episode, normalizer) if episode.turns[one.turn].action.kind == "answer"]  # type: ignore[union-attr]


def _most(values: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """The largest value and its place, the first of equals."""
    return max(values, key=lambda pair: pair[1])


def _gains(turns: int, found: Sequence[Worth]) -> list[float]:
    """One number per turn: by how much it is worth more than the best before it at the same hop, summed over its hops."""
    rewards, best = [0.0] * turns, dict[int, float]()
    for one in found:
        before = best.get(one.place, 0.0)
        rewards[one.turn] += max(one.value - before, 0.0)
        best[one.place] = max(one.value, before)
    return rewards


def _walk(episode: Episode, normalizer: str) -> Iterator[Judged]:
    """Routes and intermediate answers in order, each with the hops that it may work on.

    A hop is open once the hops that it needs are closed. It is closed by what the policy carries on from its search: the
    intermediate answer, if it holds the whole value, or, if that is not known, any answer to a search that found the passage;
    or, where the policy reads what was found in its own conversation, by the passages.
    """
    path = gold_path(episode.example)
    if path is None:
        return
    waiting, final = dict(enumerate(path)), _final(episode)
    found: set[int] = set()  # places in the path whose passages have come up
    shown: tuple[Passage, ...] = ()  # by the last search
    for k, turn in enumerate(episode.turns):
        kind = "invalid" if turn.action is None else turn.action.kind
        if kind == "invalid" or k == final:
            continue
        hops = _open(waiting)
        yield Judged(k, hops)
        if kind == "answer":
            closed = next((place for place, hop in hops if _closes(turn, hop, shown, normalizer)), None)
            waiting.pop(closed, None)  # type: ignore[arg-type]
            continue
        shown = _passages(turn)
        if not turn.asked:
            found |= {place for place, hop in enumerate(path) if hop.found_in(shown)}
            while closed_now := [place for place, _ in _open(waiting) if place in found]:
                for place in closed_now:
                    del waiting[place]


def _open(waiting: Mapping[int, GoldHop]) -> Open:
    return tuple((place, hop) for place, hop in waiting.items() if not any(one in waiting for one in hop.needs))


def _closes(turn: Turn, hop: GoldHop, shown: tuple[Passage, ...], normalizer: str) -> bool:
    """Whether an intermediate answer closes a hop."""
    return f1_recall(_answer(turn), hop.value, normalizer) == 1.0 if hop.value else hop.found_in(shown)


def _stops(turn: Turn) -> bool:
    assert turn.action is not None
    return turn.action.tool == NO_TOOL


def _route(turn: Turn, hop: GoldHop, likeness: float | None, alpha: float, beta: float) -> float:
    """What a route is worth at a hop that is open: nothing if it searches nothing, because it stops or the budget is spent."""
    assert turn.action is not None
    if _stops(turn) or not turn.calls:
        return 0.0
    parts = []
    if likeness is not None:
        parts.append((alpha, likeness))
    if hop.kb:
        parts.append((beta, float(turn.action.tool == hop.kb)))
    elif hop.passage_id:
        parts.append((beta, float(hop.found_in(_passages(turn)))))
    if not parts:
        return (alpha + beta) * float(hop.found_in(_passages(turn)))
    weight = sum(weight for weight, _ in parts)
    return (alpha + beta) * sum(weight * value for weight, value in parts) / weight if weight else 0.0


def _passages(turn: Turn) -> tuple[Passage, ...]:
    return tuple(passage for call in turn.calls for passage in call.passages)


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
