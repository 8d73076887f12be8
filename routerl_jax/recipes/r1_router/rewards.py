"""R1-Router's rewards: of golden steps, for routes and for answers (arXiv 2505.22095, equations 9, 10 and 18 to 24), and of
every turn of an attempt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from routerl_jax.agents.grammar import NO_TOOL
from routerl_jax.core.types import Action, Episode, Passage, Turn
from routerl_jax.data.gold_paths import GoldHop, gold_path
from routerl_jax.data.trajectories import RETRIEVERS, GoldenStep, golden_step, label_of
from routerl_jax.knowledge.encoders import TextEncoder, shared_encoder
from routerl_jax.rewards.metrics import accepted_answers, accuracy, f1_recall
from routerl_jax.rewards.terms import READS_TAGS, StepTerm, TurnTerm

ENCODER = "BAAI/bge-m3"  # the paper's
VARIANTS = ("paper", "released")

# Equations 9 and 10: a step is either a route or an answer, so that the sum is its reward.
REWARD = {"r1_router.route": 1.0, "r1_router.answer": 1.0}
RELEASED_REWARD = {
    "r1_router.route": {"weight": 1.0, "variant": "released", "none_by_cosine": True},
    "r1_router.answer": {"weight": 1.0, "variant": "released"},
}

Route = tuple[str, str]  # sub-question, retriever, in lower case


def route_reward(
    episodes: Sequence[Episode],
    variant: str = "paper",
    encoder: str = ENCODER,
    alpha: float = 0.5,
    beta: float = 0.5,
    none_by_cosine: bool = False,
) -> list[float]:
    """r_format x (alpha r_ask + beta r_route) for episodes of golden routes (equation 9); 0 for those of answers.

    With variant `paper`, r_format (equation 18) requires the three fields and nothing else, and a route that can be carried
    out: a known retriever, and `none` in both fields or in neither. With `released`, tags may be anywhere, `none` need not
    be in both fields, and the retrievers are R1-Router's.

    Args:
      encoder: the encoder for the cosine r_ask (equation 20); see `knowledge.encoders.shared_encoder`. It embeds all texts of
        the step in one call, and is loaded only when a cosine is needed.
      none_by_cosine: compare `none` like any other text, as the released code does. Any query then gets a share of the reward
        at the end of a trajectory. If False, `none` has similarity 1 with itself and 0 with anything else.

    Raises:
      ValueError: the variant is unknown, or an example is no golden step.
    """
    steps = _steps(episodes, variant, "r1_router.route")
    read = _released_route if variant == "released" else _paper_route
    routes = [read(episode) if step.kind == "route" else None for episode, step in zip(episodes, steps)]
    judged = [(route, step) for route, step in zip(routes, steps) if route is not None]
    pairs = [(route[0], step.query.lower()) for route, step in judged]
    cosines = iter(similarities(pairs, lambda: shared_encoder(encoder), none_by_cosine))
    rewards = []
    for route, step in zip(routes, steps):
        if route is None:
            rewards.append(0.0)
            continue
        rewards.append(alpha * float(next(cosines)) + beta * float(route[1] in step.retrievers))
    return rewards


def answer_reward(episodes: Sequence[Episode], variant: str = "paper", normalizer: str = "vqa") -> list[float]:
    """r_format x r_answer for episodes of golden answers (equation 10); 0 for those of routes.

    With variant `paper`, r_format (equation 19) requires a thought and an answer and nothing else. r_answer is F1-Recall for an
    intermediate answer (equations 22 and 23), and accuracy for a final one: 1 if it has all words of an accepted answer,
    else 0. With `released`, tags may be anywhere, and r_answer depends on the number and length of gold answers
    (`rewards.metrics.accuracy`). An empty gold answer (the released data have one) earns nothing.

    Raises:
      ValueError: the variant is unknown, or an example is no golden step.
    """
    steps = _steps(episodes, variant, "r1_router.answer")
    score = _released_answer if variant == "released" else _paper_answer
    return [0.0 if step.kind == "route" else score(episode, step, normalizer) for episode, step in zip(episodes, steps)]


def _is_route(episode: Episode) -> bool:
    step = golden_step(episode.example)
    return step is not None and step.kind == "route"


ROUTE = StepTerm(route_reward, judges=_is_route)
ANSWER = StepTerm(answer_reward, judges=lambda episode: not _is_route(episode))

for _name in ("route", "answer"):
    READS_TAGS[f"r1_router.{_name}"] = lambda options: options.get("variant") == "released"


def similarities(
    pairs: Sequence[tuple[str, str]], encoder: Callable[[], TextEncoder], none_by_cosine: bool = False
) -> Float[np.ndarray, " N"]:
    """Cosine of each pair's embeddings (equation 20), in [-1, 1]. The encoder is opened once, if it is needed at all.

    Equal texts have similarity 1 without an encoder. `none` has similarity 0 with anything else, unless `none_by_cosine`.
    """
    result = np.asarray([float(written == gold) for written, gold in pairs], np.float64)
    open_ = [
        i
        for i, (written, gold) in enumerate(pairs)
        if written != gold and (none_by_cosine or NO_TOOL not in (written, gold))
    ]
    if not open_:
        return result
    texts = sorted({text for i in open_ for text in pairs[i]})
    vectors = np.asarray(encoder().embed(texts), np.float64)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    rows = {text: row for row, text in enumerate(texts)}
    written = vectors[[rows[pairs[i][0]] for i in open_]]
    gold = vectors[[rows[pairs[i][1]] for i in open_]]
    result[open_] = (written * gold).sum(axis=1)
    return result


def _steps(episodes: Sequence[Episode], variant: str, term: str) -> list[GoldenStep]:
    if variant not in VARIANTS:
        raise ValueError(f"variant={variant!r} of {term} must be one of {', '.join(VARIANTS)}")
    steps = []
    for episode in episodes:
        step = golden_step(episode.example)
        if step is None:
            raise ValueError(
                f"{term} rewards steps of golden trajectories, and example {episode.example.id!r} is none; give "
                "config.data.train=trajectories:FILE, or another reward for questions"
            )
        steps.append(step)
    return steps


def _text(episode: Episode) -> str:
    return "".join(turn.forced + turn.text for turn in episode.turns)


# --- the paper's -------------------------------------------------------------------------------------------------------


def _paper_route(episode: Episode) -> Route | None:
    """The sub-question and the retriever, if the route is well formed and can be carried out; else None."""
    if not episode.turns:
        return None
    turn = episode.turns[-1]
    if not turn.well_formed or turn.action is None or turn.action.kind != "search":
        return None
    return turn.action.query.lower(), label_of(turn.action.tool)


def _paper_answer(episode: Episode, step: GoldenStep, normalizer: str) -> float:
    if not episode.turns or not episode.turns[-1].well_formed:
        return 0.0
    if step.kind == "answer":
        return f1_recall(episode.answer, step.answers[0], normalizer)
    return final_accuracy(episode.answer, step.answers, normalizer)


_OPPOSITE = {"yes": "no", "no": "yes"}


def final_accuracy(answer: str | None, golds: Sequence[str], normalizer: str = "vqa") -> float:
    """Acc of a final answer (equations 17 and 24): 1 if it has all words of some accepted answer, else 0.

    Further words cost nothing, except the opposite of a yes or a no: "yes and no" matches neither.
    """

    def has(gold: str) -> bool:
        return f1_recall(answer, gold, normalizer) == 1.0

    def accepts(gold: str) -> bool:
        opposite = _OPPOSITE.get(gold.strip().lower())
        return has(gold) and not (opposite and has(opposite))

    return float(any(map(accepts, golds)))


# --- the released code's -----------------------------------------------------------------------------------------------


def _released_route(episode: Episode) -> Route | None:
    contents = _tagged(_text(episode), "think", "sub-question", "ret")
    if contents is None:
        return None
    retrievers = contents[2].split(",")
    labels = (*RETRIEVERS.values(), NO_TOOL)
    names = [name.strip() for name in retrievers]
    if any(name not in labels for name in names) or (NO_TOOL in names and len(names) > 1):
        return None
    return contents[1].strip(), names[0] if len(names) == 1 else ""


def _released_answer(episode: Episode, step: GoldenStep, normalizer: str) -> float:
    contents = _tagged(_text(episode), "think", "answer")
    return 0.0 if contents is None else accuracy(contents[1], step.answers, normalizer)


def _tagged(text: str, *tags: str) -> list[str] | None:
    """The first content of each tag in the lower-cased text; None if one of them is missing."""
    parts = [text.lower().partition(f"<{tag}>")[2].partition(f"</{tag}>") for tag in tags]
    return [content for content, _, _ in parts] if all(closing for _, closing, _ in parts) else None


# --- rewards of every turn, for online training on the policy's own prefix ---
#
# The paper rewards a golden step on its golden prefix. Here a turn comes after the policy's own turns, so the right
# turn depends on which hops of the gold path are still open. If the policy works on an open hop again, a turn earns
# only its improvement over the best earlier turn at that hop. So the sum over an attempt is the worth of the best turns
# at its hops, and doing a hop badly first, or twice, gains nothing.

Open = tuple[tuple[int, GoldHop], ...]


class Judged(NamedTuple):
    """A turn, by index, and the hops that were open for it, with their indices in the path; () if all were closed."""

    turn: int
    open: Open


class HopScore(NamedTuple):
    """The worth of a turn at a hop. `hop` is the hop's index in the path; -1: no hop was open."""

    turn: int
    hop: int
    value: float


def turn_route_reward(
    episodes: Sequence[Episode],
    encoder: str = ENCODER,
    alpha: float = 0.5,
    beta: float = 0.5,
    normalizer: str = "vqa",
) -> list[list[float]]:
    """r_format x (alpha r_ask + beta r_route) for each route turn, compared with an open gold hop; 0 for other turns.

    r_ask is the cosine with the hop's sub-question. r_route says whether the hop's knowledge base is asked or, if the gold path
    does not name it, whether the search finds the hop's passage. A part that is unknown is left out, and the weights of the
    others are scaled to alpha + beta. If several hops are open (in a comparison), the one with the most worth counts; if
    only passages are known of them, all hops whose passage the search finds count. If no hop is open, `none` earns alpha +
    beta and a search 0. A question without a gold path earns 0. Each of several routes to a hop earns only what exceeds the
    best one before it.

    Args:
      encoder: see `knowledge.encoders.shared_encoder`. It embeds all texts of the step in one call.
    """
    judged = [
        [route for route in _walk(episode, normalizer, "search") if episode.turns[route.turn].well_formed]
        for episode in episodes
    ]
    pairs = {
        (i, route.turn, index): (_action(episodes[i].turns[route.turn]).query.lower(), hop.query.lower())
        for i, of_episode in enumerate(judged)
        for route in of_episode
        for index, hop in route.open
        if hop.query
    }
    likeness = dict(zip(pairs, similarities(list(pairs.values()), lambda: shared_encoder(encoder)).tolist()))
    rewards = []
    for i, (episode, of_episode) in enumerate(zip(episodes, judged)):
        worths = []
        for route in of_episode:
            turn = episode.turns[route.turn]
            values = [
                (index, _route(turn, hop, likeness.get((i, route.turn, index)), alpha, beta))
                for index, hop in route.open
            ]
            if route.open and not any(hop.query or hop.kb for _, hop in route.open):
                worths += [HopScore(route.turn, *value) for value in values]
            else:
                worths.append(
                    HopScore(route.turn, *_best(values or [(-1, (alpha + beta) * (_action(turn).tool == NO_TOOL))]))
                )
        rewards.append(_gains(len(episode.turns), worths))
    return rewards


def turn_answer_reward(episodes: Sequence[Episode], normalizer: str = "vqa") -> list[list[float]]:
    """r_format x r_answer for each answer turn; 0 for other turns.

    An intermediate answer earns its F1-Recall against the value of an open hop (equations 22 and 23), less that of the best one
    before it. Of several open hops, the one with the highest F1-Recall counts. It earns 0 if no hop was open or no value is
    known. The final answer earns 1 if it has all words of an accepted answer, else 0.
    """
    rewards = []
    for episode in episodes:
        worths = []
        for judged in _walk(episode, normalizer, "answer"):
            turn = episode.turns[judged.turn]
            values = [
                (index, turn.well_formed * f1_recall(_action(turn).answer, hop.value, normalizer))
                for index, hop in judged.open
                if hop.value
            ]
            if values:
                worths.append(HopScore(judged.turn, *_best(values)))
        of_episode = _gains(len(episode.turns), worths)
        last = _final(episode)
        if last is not None and episode.turns[last].well_formed:
            of_episode[last] = final_accuracy(
                episode.answer, accepted_answers(episode.example, episode.answer), normalizer
            )
        rewards.append(of_episode)
    return rewards


def turn_format_reward(episodes: Sequence[Episode]) -> list[list[float]]:
    """-1 for each turn that has a wrong form or can't be carried out; else 0. (Not in the paper.)

    On golden prefixes a right turn always exists, and the format is a factor of its reward. On the policy's own prefixes there
    often is none, because a search missed. Every turn earns 0 then, and only this term keeps the policy in the right form.
    """
    return [[-float(not _is_valid(turn)) for turn in episode.turns] for episode in episodes]


def _is_valid(turn: Turn) -> bool:
    return turn.well_formed and turn.action is not None and turn.action.kind != "invalid"


TURN_FORMAT = TurnTerm(turn_format_reward)
TURN_ROUTE = TurnTerm(turn_route_reward)
TURN_ANSWER = TurnTerm(turn_answer_reward)


def _best(values: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """The largest value with its index; the first of equals."""
    return max(values, key=lambda pair: pair[1])


def _gains(turns: int, scores: Sequence[HopScore]) -> list[float]:
    """One number per turn: its improvement over the best earlier turn at the same hop, summed over its hops."""
    rewards, best = [0.0] * turns, dict[int, float]()
    for worth in scores:
        before = best.get(worth.hop, 0.0)
        rewards[worth.turn] += max(worth.value - before, 0.0)
        best[worth.hop] = max(worth.value, before)
    return rewards


def _walk(episode: Episode, normalizer: str, wanted: Literal["search", "answer"]) -> Iterator[Judged]:
    """The routes, or the intermediate answers, each with the hops that are open for it; none without a gold path.

    A hop opens once the hops that it needs are closed. It is closed by an intermediate answer with its whole value; or, if the
    value is not known, by any answer after a search that found its passage. If the policy reads passages in its own
    conversation, without intermediate answers, the passage itself closes the hop.
    """
    path = gold_path(episode.example)
    if path is None:
        return
    waiting, final = dict(enumerate(path)), _final(episode)
    found_hops: set[int] = set()  # indices of hops whose passages have been found
    latest_passages: tuple[Passage, ...] = ()  # passages of the last search
    for k, turn in enumerate(episode.turns):
        kind = "invalid" if turn.action is None else turn.action.kind
        if kind == "invalid" or k == final:
            continue
        hops = _open(waiting)
        if kind == wanted:
            yield Judged(k, hops)
        if kind == "answer":
            for index, hop in hops:
                said = _action(turn).answer
                if f1_recall(said, hop.value, normalizer) == 1.0 if hop.value else hop.found_in(latest_passages):
                    del waiting[index]
                    break
            continue
        latest_passages = _passages(turn)
        if not turn.asked:
            found_hops |= {i for i, hop in enumerate(path) if hop.found_in(latest_passages)}
            while closed_now := [i for i, _ in _open(waiting) if i in found_hops]:
                for index in closed_now:
                    del waiting[index]


def _open(waiting: Mapping[int, GoldHop]) -> Open:
    return tuple((index, hop) for index, hop in waiting.items() if not any(needed in waiting for needed in hop.needs))


def _route(turn: Turn, hop: GoldHop, likeness: float | None, alpha: float, beta: float) -> float:
    """The worth of a route at an open hop; 0 if the route makes no search, because it stops or the budget is spent."""
    if _action(turn).tool == NO_TOOL or not turn.calls:
        return 0.0
    parts = []
    if likeness is not None:
        parts.append((alpha, likeness))
    if hop.kb:
        parts.append((beta, float(_action(turn).tool == hop.kb)))
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


def _action(turn: Turn) -> Action:
    assert turn.action is not None, "only turns with an action are judged"
    return turn.action
