"""Named reward terms, and their weighted sum. A configuration chooses terms and weights; there are no implicit terms."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import numbers
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from routerl_jax.core.config import unknown_key
from routerl_jax.core.registry import Registry
from routerl_jax.core.types import Episode, Verdict
from routerl_jax.rewards.metrics import ANSWER_METRICS, NORMALIZERS, Golds, accepted_answers
from routerl_jax.rewards.retrieval import answer_found, found, has_gold, has_telling_answer

# --- judges ------------------------------------------------------------------------------------------------------------
# The interface of judges, and the reward that their verdicts give.


class Judge(Protocol):
    """Decides for each episode whether its answer is right (`services.judge.ModelJudge` asks a language model)."""

    def __call__(self, episodes: Sequence[Episode]) -> list[Verdict]:
        """One verdict per episode, in order, the same on every process (a collective call)."""
        ...


def judge_reward(episodes: Sequence[Episode], verdicts: Sequence[Verdict]) -> list[float]:
    """1 for an answer that the judge finds right, else 0. The judge decides what a failed verdict counts.

    An episode whose verdict does not count (`Verdict.counts` is None) gets the mean of the counting ones at its question, or 0
    if there are none. So it only changes the advantages of other attempts through the group's standard deviation. It is itself
    left out of the loss (learning.advantages.unjudged).
    """
    counted: dict[str, list[float]] = {}
    for episode, verdict in zip(episodes, verdicts, strict=True):
        if verdict.counts is not None:
            counted.setdefault(episode.example.id, []).append(verdict.counts)
    means = {question: float(np.mean(values)) for question, values in counted.items()}
    return [
        means.get(episode.example.id, 0.0) if verdict.counts is None else verdict.counts
        for episode, verdict in zip(episodes, verdicts)
    ]


def counts(episode: Episode) -> bool:
    """Whether an episode counts in the means of a judged term: no judge was asked, or its verdict counts."""
    return episode.verdict is None or episode.verdict.counts is not None


# --- terms -------------------------------------------------------------------------------------------------------------

# A term is a pure function of an episode. If it has a keyword `normalizer`, it gets the run's; a keyword `verdict` gets the
# judge's verdict on the episode. Other keywords are options for the configuration.
RewardTerm = Callable[..., float]


@dataclasses.dataclass(frozen=True)
class StepTerm:
    """A term that compares the episodes of a step: `function(episodes, **options)` returns one number per episode, in order.

    A keyword `verdicts` gets the judge's verdicts, one per episode. `judges` says to which episodes the term applies (None: to
    all); the values of the others are left out of its mean in the metrics.
    """

    function: Callable[..., Sequence[float]]
    judges: Callable[[Episode], bool] | None = None

    def __call__(self, episodes: Sequence[Episode], **options: Any) -> Sequence[float]:
        return self.function(episodes, **options)


@dataclasses.dataclass(frozen=True)
class TurnTerm:
    """A term that judges turns: `function(episodes, **options)` returns, per episode, one number per turn, in order, or None
    for a turn that it does not judge.

    The value of an episode is the sum of the numbers. With config.learner.credit="turn", each number belongs to its own turn,
    and only turns that the term judges are compared. `verdicts`: see `StepTerm`.
    """

    function: Callable[..., Sequence[Sequence[float | None]]]

    def __call__(self, episodes: Sequence[Episode], **options: Any) -> Sequence[Sequence[float | None]]:
        return self.function(episodes, **options)


# Each entry is a RewardTerm, a StepTerm or a TurnTerm. Those of the papers are imported when a configuration names them.
REWARD_TERMS: Registry[Callable[..., Any]] = Registry(
    "reward term",
    {
        "mmsearch_r1.accuracy": "routerl_jax.recipes.mmsearch_r1.rewards:accuracy",
        "mmsearch_r1.format": "routerl_jax.recipes.mmsearch_r1.rewards:format_kept",
        "mmsearch_r1.judged_accuracy": "routerl_jax.recipes.mmsearch_r1.rewards:JUDGED_ACCURACY",
        "r1_router.answer": "routerl_jax.recipes.r1_router.rewards:ANSWER",
        "r1_router.route": "routerl_jax.recipes.r1_router.rewards:ROUTE",
        "r1_router.turn_answer": "routerl_jax.recipes.r1_router.rewards:TURN_ANSWER",
        "r1_router.turn_format": "routerl_jax.recipes.r1_router.rewards:TURN_FORMAT",
        "r1_router.turn_route": "routerl_jax.recipes.r1_router.rewards:TURN_ROUTE",
        "r1_searcher.answer": "routerl_jax.recipes.r1_searcher:answer",
        "r1_searcher.calls": "routerl_jax.recipes.r1_searcher:calls_in_order",
        "r1_searcher.format": "routerl_jax.recipes.r1_searcher:format_kept",
        "r1_searcher.tags": "routerl_jax.recipes.r1_searcher:tags_in_order",
        "r1_searcher.violation": "routerl_jax.recipes.r1_searcher:violation",
        "routerag.efficiency": "routerl_jax.recipes.routerag:EFFICIENCY",
        "vrag_rl.gated_judge": "routerl_jax.recipes.vrag_rl.rewards:GATED_JUDGE",
        "vrag_rl.ndcg": "routerl_jax.recipes.vrag_rl.rewards:NDCG",
        "vrag_rl.pattern": "routerl_jax.recipes.vrag_rl.rewards:pattern",
    },
)

# Terms that look for a protocol's tags in what the policy wrote, and with which options they do. JSON tool calls have no tags.
READS_TAGS: dict[str, Callable[[Mapping[str, Any]], bool]] = {}


def _answer_term(metric: Callable[[str | None, Golds, str], float]) -> RewardTerm:
    def term(episode: Episode, normalizer: str = "search_r1") -> float:
        return metric(episode.answer, accepted_answers(episode.example, episode.answer), normalizer)

    return term


for _name, _metric in ANSWER_METRICS.items():
    REWARD_TERMS.register(_name)(_answer_term(_metric))


@REWARD_TERMS.register("format")
def well_formed(episode: Episode) -> float:
    """1 if there is an answer, every turn follows the grammar to the letter, and no action was invalid; else 0."""
    whole = episode.invalid_actions == 0 and all(turn.well_formed for turn in episode.turns)
    return float(whole and bool(answered(episode)))


@REWARD_TERMS.register("answered")
def answered(episode: Episode) -> float:
    """1 if the episode ended with an answer that is not blank, else 0."""
    return float(bool(episode.answer and episode.answer.strip()))


@REWARD_TERMS.register("searched")
def searched(episode: Episode) -> float:
    """1 if at least one search was made, else 0 (the retrieval reward of R1-Searcher, eq. 1)."""
    return float(bool(episode.calls))


@REWARD_TERMS.register("searches")
def searches(episode: Episode) -> float:
    """Number of tool calls, failed ones included."""
    return float(len(episode.calls))


@REWARD_TERMS.register("search_failures")
def search_failures(episode: Episode) -> float:
    """Number of tool calls that returned an error."""
    return float(sum(call.error is not None for call in episode.calls))


@REWARD_TERMS.register("invalid_actions")
def invalid_actions(episode: Episode) -> float:
    """Number of turns without an executable action, or with one that the protocol did not allow."""
    return float(episode.invalid_actions)


REWARD_TERMS.register("found")(StepTerm(found, judges=has_gold))
REWARD_TERMS.register("answer_found")(StepTerm(answer_found, judges=has_telling_answer))
REWARD_TERMS.register("judge")(StepTerm(judge_reward, judges=counts))
_GIVEN = {"normalizer", "verdict", "verdicts"}  # arguments of terms that the run passes, not the configuration


@dataclasses.dataclass(frozen=True)
class RewardFunction:
    """A weighted sum of named terms.

    Attributes:
      terms: maps the name of a term in `REWARD_TERMS`, or its dotted path, to its weight (negative for a penalty), or to a
        mapping of its options, which may have its `weight` (default 1).
      normalizer: normaliser of the answer metrics, a name in `NORMALIZERS`.
      judge: gives the verdicts for terms with a keyword `verdict` or `verdicts`. If there are such terms, it is asked once per
        step.

    Raises:
      ValueError: for an unknown term, option or normaliser, with the known ones.
    """

    terms: Mapping[str, float | Mapping[str, Any]]
    normalizer: str = "search_r1"
    judge: Judge | None = None

    def __post_init__(self) -> None:
        NORMALIZERS.get(self.normalizer)
        self._bound  # noqa: B018 - raises for what is unknown

    def __call__(self, episodes: Sequence[Episode]) -> list[dict[str, float]]:
        """For each episode of a step, the weighted terms by name, and their sum as `total`.

        Terms of turns are also stored in `Turn.rewards` of the turns that they judge, and verdicts in `Episode.verdict`.

        Raises:
          ValueError: a term did not return one number per episode, or a term of turns one number per turn (a string is none);
            a term needs a judge, and there is none; or a term raised a ValueError. The message names the term.
          RuntimeError: a term raised another error.
        """
        verdicts = self._verdicts(episodes) if self.asks else []
        columns = {name: self._values(name, episodes, verdicts) for name in self.terms}
        rows = [{name: values[i] for name, values in columns.items()} for i in range(len(episodes))]
        return [{**row, "total": float(sum(row.values()))} for row in rows]

    @functools.cached_property
    def asks(self) -> tuple[str, ...]:
        """The terms that need a judge's verdicts."""
        return tuple(name for name in self.terms if _options(REWARD_TERMS.get(name)) & {"verdict", "verdicts"})

    @property
    def reads_tags(self) -> tuple[str, ...]:
        """The terms that need the tags of a protocol (`READS_TAGS`)."""
        options = {name: spec if isinstance(spec, Mapping) else {} for name, spec in self.terms.items()}
        return tuple(name for name in self.terms if name in READS_TAGS and READS_TAGS[name](options[name]))

    def _verdicts(self, episodes: Sequence[Episode]) -> Sequence[Verdict]:
        if self.judge is None:
            raise ValueError(f"reward term {self.asks[0]!r} asks a judge, and there is none: set config.judge.model")
        verdicts = self.judge(episodes)
        for episode, verdict in zip(episodes, verdicts, strict=True):
            episode.verdict = verdict
        return verdicts

    @functools.cached_property
    def _bound(self) -> dict[str, tuple[float, Callable[..., Any], dict[str, Any]]]:
        """By name, the weight of a term, the term, and its options."""
        return {name: self._bind(name, spec) for name, spec in self.terms.items()}

    def _bind(self, name: str, spec: float | Mapping[str, Any]) -> tuple[float, Callable[..., Any], dict[str, Any]]:
        term = REWARD_TERMS.get(name)
        options: dict[str, Any] = dict(spec) if isinstance(spec, Mapping) else {"weight": spec}
        weight = options.pop("weight", 1.0)
        if not isinstance(weight, numbers.Real):
            raise ValueError(f"reward term {name!r} has the weight {weight!r:.80}: it must be a number")
        accepted = _options(term)
        for key in options:
            if key not in accepted - _GIVEN:
                raise ValueError(unknown_key(f"options of reward term {name!r}", key, {"weight", *accepted} - _GIVEN))
        if "normalizer" in accepted:
            options["normalizer"] = self.normalizer
        return float(weight), term, options

    def _values(self, name: str, episodes: Sequence[Episode], verdicts: Sequence[Verdict]) -> list[float]:
        """A term's weighted values, one per episode."""
        weight, term, options = self._bound[name]
        accepted = _options(term)
        if isinstance(term, StepTerm | TurnTerm):
            given = options | ({"verdicts": verdicts} if "verdicts" in accepted else {})
            with _named(name, "the episodes of a step"):
                values = term(episodes, **given)
                values = list(values) if isinstance(values, Iterator) else values  # a generator's errors are the term's
            values = _one_for_each(name, values, episodes)
            if isinstance(term, TurnTerm):
                values = [_of_turns(name, weight, own, episode) for own, episode in zip(values, episodes)]
        else:
            values = []
            for i, episode in enumerate(episodes):
                with _named(name, _attempt(episode)):
                    given = {"verdict": verdicts[i]} if "verdict" in accepted else {}
                    values.append(term(episode, **given, **options))
        return [weight * _number(name, value, episode) for value, episode in zip(values, episodes)]


@contextlib.contextmanager
def _named(name: str, of: str) -> Iterator[None]:
    """Names the term, and what it was given, in what the term raises: a ValueError for bad input (also of a file), or a
    RuntimeError for other errors."""
    try:
        yield
    except Exception as error:
        kind = ValueError if isinstance(error, ValueError | OSError) else RuntimeError
        raise kind(f"reward term {name!r} raised {type(error).__name__} for {of}: {error}") from error


def _attempt(episode: Episode) -> str:
    return f"attempt {episode.sample} at question {episode.example.id!r}"


def _one_for_each(name: str, values: Any, episodes: Sequence[Episode]) -> list[Any]:
    """A term's values for the episodes of a step. Raises ValueError unless there is one per episode."""
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise ValueError(
            f"reward term {name!r} gave {_repr(values)} for the episodes of a step: it must give a list, one for each"
        )
    listed = list(values)
    if len(listed) != len(episodes):
        raise ValueError(f"reward term {name!r} gave {len(listed)} values for {len(episodes)} episodes")
    return listed


def _number(name: str, value: Any, episode: Episode) -> float:
    number = value.item() if getattr(value, "ndim", None) == 0 else value  # of NumPy, JAX and torch
    if not isinstance(number, numbers.Real):  # "1.0", which `float` takes, is none
        raise ValueError(f"reward term {name!r} gave {_repr(value)} for {_attempt(episode)}: it must give a number")
    return float(number)


def _repr(value: Any) -> str:
    return "None (does a `return` lack?)" if value is None else f"{value!r:.80}"


def _of_turns(name: str, weight: float, values: Any, episode: Episode) -> float:
    """Stores a term's weighted values in the turns of an episode. Returns their unweighted sum."""
    if not isinstance(values, Collection) or len(values) != len(episode.turns):
        count = len(values) if isinstance(values, Collection) else _repr(values)
        raise ValueError(
            f"reward term {name!r} gave {count} values for the {len(episode.turns)} turns of {_attempt(episode)}: it must give "
            "one for each, or None for a turn that it does not judge"
        )
    given = [None if value is None else _number(name, value, episode) for value in values]
    for turn, value in zip(episode.turns, given):
        turn.rewards.pop(name, None)
        if value is not None:
            turn.rewards[name] = weight * value
    return float(sum(value for value in given if value is not None))


def judged(name: str, episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes to which the reward term of this name applies."""
    term = REWARD_TERMS.get(name) if name in REWARD_TERMS or ":" in name else None
    if not isinstance(term, StepTerm) or term.judges is None:
        return list(episodes)
    return list(filter(term.judges, episodes))


def _options(term: RewardTerm | StepTerm | TurnTerm) -> set[str]:
    """The names of a term's arguments besides its episode or episodes."""
    function = term.function if isinstance(term, StepTerm | TurnTerm) else term
    return set(list(inspect.signature(function).parameters)[1:])
