"""R1-Router's rewards of golden steps, for routes and for answers (arXiv 2505.22095, equations 9, 10 and 18 to 24)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from routerl_jax.agents.grammar import NO_TOOL
from routerl_jax.core.types import Episode
from routerl_jax.data.trajectories import RETRIEVERS, GoldenStep, golden_step, label_of
from routerl_jax.knowledge.encoders import TextEncoder, shared_encoder
from routerl_jax.rewards.metrics import accuracy, f1_recall
from routerl_jax.rewards.terms import READS_TAGS, StepTerm

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
    matches = [re.search(rf"<{tag}>(.*?)</{tag}>", text.lower(), re.DOTALL) for tag in tags]
    return [match[1] for match in matches if match] if all(matches) else None
