"""What a supervised run learns from: Atlas's worked examples, or the good ones among episodes that were written to files."""

from __future__ import annotations

import functools
import pathlib
import zlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.core.ledger import demonstrated
from routerl_jax.core.rows import read_rows
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Episode, Example
from routerl_jax.core.types import Sequence as TokenSequence
from routerl_jax.data.atlas.demonstrations import DemonstrationSource
from routerl_jax.data.atlas.world import KNOWLEDGE_BASES
from routerl_jax.evaluation.records import episode_of
from routerl_jax.rewards.terms import RewardFunction
from routerl_jax.training.config import TrainConfig

_HELD_OUT_SHARE = 0.05  # of the questions of episode files


class Worked(NamedTuple):
    """A question and what followed it: stretches of text, and whether the policy is to write them."""

    example: Example
    pieces: list[tuple[str, bool]]

    def sequence(self, agent: SearchAgent, tokenizer: Tokenizer) -> TokenSequence:
        """As the agent's rollout would have recorded it, its prompt included."""
        return demonstrated(agent.opening(self.example, tokenizer), self.pieces, tokenizer)


class Demonstrations(Protocol):
    """An endless, reproducible stream of worked examples, by index."""

    def __getitem__(self, index: int) -> Worked: ...


def open_demonstrations(config: TrainConfig, agent: SearchAgent, *, held_out: bool = False) -> Demonstrations:
    """The source that `config.warm_start.demonstrations` names: `atlas`, or a file or directory of episodes.

    Args:
      held_out: those that are kept out of training.

    Raises:
      ValueError: there is no such file, a row is no episode, or too few episodes are good enough.
    """
    settings = config.warm_start
    if settings.demonstrations != "atlas":
        good, read = _good_episodes(
            settings.demonstrations, RewardFunction(dict(settings.select), config.evaluation.normalizer), settings.least
        )
        return _KeptEpisodes(_split(good, read, settings.demonstrations, held_out), config.seed)
    source = DemonstrationSource(
        size=config.steps * settings.examples,
        seed=config.seed + held_out,
        invented=settings.invented,
        k=config.agent.k,
        max_searches=config.agent.max_searches,
        hit=settings.hit,
        persistence=settings.persistence,
        direct=settings.direct,
        tools=tuple(config.knowledge) or KNOWLEDGE_BASES,
    )
    return _OfAtlas(source, agent)


class _OfAtlas:
    def __init__(self, source: DemonstrationSource, agent: SearchAgent) -> None:
        self._source = source
        self._agent = agent

    def __getitem__(self, index: int) -> Worked:
        demonstration = self._source[index]
        return Worked(demonstration.example, self._agent.pieces(demonstration))


class _KeptEpisodes:
    """Episodes in a new order every epoch."""

    def __init__(self, episodes: Sequence[Episode], seed: int) -> None:
        self._episodes = episodes
        self._seed = seed
        self._order = functools.lru_cache(maxsize=2)(self._permutation)

    def __getitem__(self, index: int) -> Worked:
        epoch, place = divmod(index, len(self._episodes))
        episode = self._episodes[self._order(epoch)[place]]
        return Worked(episode.example, _pieces(episode))

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([2, self._seed, epoch]).permutation(len(self._episodes))


def _pieces(episode: Episode) -> list[tuple[str, bool]]:
    stretches = [
        stretch
        for turn in episode.turns
        for stretch in ((turn.forced, False), (turn.text, True), (turn.observation, False))
    ]
    return [stretch for stretch in stretches if stretch[0]]


def _good_episodes(source: str, reward: RewardFunction, least: float) -> tuple[list[Episode], int]:
    """The episodes of a file, or of all .jsonl files under a directory, whose reward is enough; and how many there were."""
    path = pathlib.Path(source).expanduser()
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise ValueError(
            f"config.warm_start.demonstrations={source!r} is neither 'atlas' nor a .jsonl file of episodes nor a directory "
            "with such files; give WORKDIR/episodes of a run, or the --output of launch.evaluate"
        )
    episodes = [episode_of(row, place) for file in files for place, row in read_rows(file)]
    totals = [terms["total"] for terms in reward(episodes)]
    return [episode for episode, total in zip(episodes, totals) if total >= least], len(episodes)


def _split(good: list[Episode], read: int, source: str, held_out: bool) -> list[Episode]:
    """A twentieth of the questions, at least one, is held out with all its episodes."""
    names = sorted({episode.example.id for episode in good}, key=lambda name: (zlib.crc32(name.encode()), name))
    if len(names) < 2:
        raise ValueError(
            f"config.warm_start.demonstrations={source!r}: {len(good)} of {read} episodes, on {len(names)} questions, reach "
            "config.warm_start.least; two questions are needed, one to learn from and one to hold out"
        )
    kept_out = set(names[: max(1, round(_HELD_OUT_SHARE * len(names)))])
    return [episode for episode in good if (episode.example.id in kept_out) == held_out]
