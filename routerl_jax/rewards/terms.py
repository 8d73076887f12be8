"""Named reward terms, and their weighted sum. A recipe picks terms and weights in its config; nothing is implicit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from routerl_jax.core.registry import Registry
from routerl_jax.core.types import Episode
from routerl_jax.rewards import format as formats
from routerl_jax.rewards.metrics import ANSWER_METRICS, Golds
from routerl_jax.rewards.normalize import NORMALIZERS

# A term is a pure function of an episode; the answer metrics also take a normaliser's name, search_r1 by default.
RewardTerm = Callable[..., float]
REWARD_TERMS: Registry[RewardTerm] = Registry("reward term")


def _answer_term(metric: Callable[[str | None, Golds, str], float]) -> RewardTerm:
    def term(episode: Episode, normalizer: str = "search_r1") -> float:
        return metric(episode.answer, episode.example.answers, normalizer)

    return term


for _name, _metric in ANSWER_METRICS.items():
    REWARD_TERMS.register(_name)(_answer_term(_metric))


@REWARD_TERMS.register("format")
def well_formed(episode: Episode) -> float:
    """1 if the whole episode is well formed and answered, else 0."""
    return float(formats.well_formed(episode))


@REWARD_TERMS.register("answered")
def answered(episode: Episode) -> float:
    """1 if the episode has an answer, else 0."""
    return float(formats.answered(episode))


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
    """Number of turns that held no executable action."""
    return float(episode.invalid_actions)


@dataclasses.dataclass(frozen=True)
class RewardFunction:
    """A weighted sum of named terms.

    Attributes:
      terms: weight of each term by its name in `REWARD_TERMS` or its dotted path; a penalty has a negative weight.
      normalizer: how the answer metrics normalise, a name in `NORMALIZERS`.

    Raises:
      ValueError: for an unknown term or normaliser, with the known ones.
    """

    terms: Mapping[str, float]
    normalizer: str = "search_r1"

    def __post_init__(self) -> None:
        NORMALIZERS.get(self.normalizer)
        for name in self.terms:
            REWARD_TERMS.get(name)

    def __call__(self, episode: Episode) -> dict[str, float]:
        """The weighted terms by name, and their sum as `total`."""
        rewards = {name: weight * self._value(name, episode) for name, weight in self.terms.items()}
        return {**rewards, "total": sum(rewards.values())}

    def _value(self, name: str, episode: Episode) -> float:
        term = REWARD_TERMS.get(name)
        return term(episode, self.normalizer) if name in ANSWER_METRICS else term(episode)
