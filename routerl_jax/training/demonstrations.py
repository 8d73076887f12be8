"""Demonstrations for supervised runs, by index: Atlas's, those made from the training questions (annotated.py), golden steps,
conversations, good episodes from files, or those of a function of your own."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import sys
import typing
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from routerl_jax.agents.agent import Agent, LearnsFrom, Pieces
from routerl_jax.agents.observation import Rendered, demonstrated, expanded_tokens
from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.core.buckets import fetched
from routerl_jax.core.config import naming
from routerl_jax.core.registry import Registry
from routerl_jax.core.rows import checked_path, read_rows
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Episode, Example
from routerl_jax.core.types import Sequence as TokenSequence
from routerl_jax.data.atlas.demonstrations import DemonstrationSource, StepSource
from routerl_jax.data.atlas.sight import SightSource
from routerl_jax.data.atlas.world import KNOWLEDGE_BASES
from routerl_jax.data.rounds import read_messages
from routerl_jax.data.trajectories import check_retrievers, golden_step
from routerl_jax.evaluation.records import episode_of
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.image_tokens import ImageTokens
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.rewards.terms import RewardFunction
from routerl_jax.training.annotated import worked_questions
from routerl_jax.training.config import TrainConfig, WarmStartConfig
from routerl_jax.training.sections import SEARCHED
from routerl_jax.training.setup import open_examples

_HELD_OUT_SHARE = 0.05  # share of the questions that is held out, for sources of fixed size


class Worked(NamedTuple):
    """A question and the pieces that follow it: texts and pictures, each with whether the policy writes it.

    A `bare` one does not have the agent's prompt; it begins with its pictures and its question.
    """

    example: Example
    pieces: Pieces
    bare: bool = False

    def sequence(self, agent: Agent, model: Decoder, room: int | None = None) -> TokenSequence:
        """The token sequence that a rollout of the agent would have recorded with this model, prompt and pictures included.

        Documents in the prompt that don't fit `room` tokens are left out. Nothing else is, so the sequence may be longer.

        Raises:
          ValueError: the example has a picture, and the model sees none; names the example.
        """
        assert model.tokenizer is not None
        host = model.image_tokens if isinstance(model, VisionLanguageModel) else None
        try:
            if not self.example.images:
                prompt: Any = self._opening(agent, model.tokenizer, host, room)
            elif host is None:
                raise ValueError(
                    "it has a picture, and the policy sees none: give a vision-language model, or demonstrations without "
                    "pictures (trajectories/text:FILE)"
                )
            else:
                if room is not None:
                    room -= expanded_tokens(host, self.example.images)
                prompt = host.fed(self._opening(agent, model.tokenizer, host, room), self.example.images)
            return demonstrated(prompt, self.pieces, model.tokenizer, host, agent.special_tokens, self.example.images)
        except ValueError as error:
            raise ValueError(f"demonstration {self.example.id!r}: {error}") from error

    def _opening(self, agent: Agent, tokenizer: Tokenizer, host: ImageTokens | None, room: int | None) -> list[int]:
        marker = "" if host is None else tokenizer.decode(host.marker)
        if self.bare:
            return tokenizer.encode_prompt(marker * len(self.example.images) + tokenizer.plain(self.example.question))
        return agent.opening(self.example, tokenizer, marker, room)


class Demonstrations(Protocol):
    """An endless, reproducible stream of demonstrations, by index. `len` is the number of different ones."""

    def __getitem__(self, index: int) -> Worked: ...

    def __len__(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class Stream:
    """Demonstrations that a function gives by their index; `size` is the number of different ones."""

    get: Callable[[int], Worked]
    size: int

    def __getitem__(self, index: int) -> Worked:
        return self.get(index)

    def __len__(self) -> int:
        return self.size


def mixed(main: Demonstrations, others: Demonstrations, every: int) -> Stream:
    """A stream whose every `every`-th demonstration, from the first on, is the next of `others`. They replace those of `main`
    at the same indices."""
    return Stream(lambda index: main[index] if index % every else others[index // every], len(main))


def then(first: Demonstrations, count: int, rest: Demonstrations) -> Stream:
    """A stream that begins with the first `count` demonstrations of another one."""
    return Stream(lambda index: (first if index < count else rest)[index], len(rest))


def drawn(seed: Sequence[int], draw: Callable[[np.random.Generator], Worked]) -> Stream:
    """An endless stream of demonstrations that are drawn: each is a function of the seed and its index."""
    return Stream(lambda index: draw(np.random.default_rng([*seed, index])), 2**31)


def shuffled(worked: Sequence[Worked], seed: int) -> Stream:
    """A list of demonstrations, in a new order every epoch."""

    @functools.lru_cache(maxsize=2)
    def order(epoch: int) -> np.ndarray:
        return np.random.default_rng([2, seed, epoch]).permutation(len(worked))

    def get(index: int) -> Worked:
        epoch, position = divmod(index, len(worked))
        return worked[order(epoch)[position]]

    return Stream(get, len(worked))


MADE = "made:"  # before the dotted path of a function that makes demonstrations
MESSAGES = "messages:"  # before a file of conversations (data.rounds)
_PICTURES = "[pictures]"  # after the file: skip conversations whose pictures can't be read
_MAKERS: Registry[Callable[[TrainConfig, Agent], tuple[Demonstrations, Demonstrations]]] = Registry(
    "maker of demonstrations"
)


def open_demonstrations(
    config: TrainConfig, agent: Agent, workdir: pathlib.Path | None = None
) -> tuple[Demonstrations, Demonstrations]:
    """The demonstrations to train on and the held-out ones, from the source `config.warm_start.demonstrations`.

    The source is `atlas`; `annotated` or `drawn` (config.data.train, with config.knowledge); a file or directory of episodes;
    `messages:FILE` (data.rounds); or `made:package.module:function`, called with (config, agent), which returns both. For
    agents that learn from golden steps it may also be a data set of them, `trajectories:FILE`, but not episodes or messages.

    Raises:
      ValueError: the file does not exist, a row is no episode, too few episodes are good enough, or the agent learns from
        another kind of demonstrations or from none.
    """
    check_demonstrations(config, agent)
    settings = config.warm_start
    source = f"config.warm_start.demonstrations={settings.demonstrations!r}"
    if settings.demonstrations == "atlas":
        return _atlas(config, agent, 0), _atlas(config, agent, 1)
    if settings.demonstrations.startswith(MADE):
        with naming("config.warm_start.demonstrations"):
            make = _MAKERS.get(settings.demonstrations.removeprefix(MADE))
        return make(config, agent)
    if agent.learns_from == "golden_steps":
        return _split(*_of_golden_steps(config, agent, source), source, config.seed)
    if settings.demonstrations in SEARCHED:
        # as many as the run trains on and a twentieth to hold out, if there are so many
        needed = math.ceil(config.steps * settings.examples / (1 - _HELD_OUT_SHARE))
        shown, description = worked_questions(config, agent, needed, workdir)
        worked = [Worked(*pair) for pair in shown]
    elif settings.demonstrations.startswith(MESSAGES):
        worked, description = _of_messages(settings.demonstrations, agent)
    else:
        worked, description = _of_good_episodes(settings, config.evaluation.normalizer)
    return _split(worked, description, source, config.seed)


def check_demonstrations(config: TrainConfig, agent: Agent, section: str = "config.warm_start") -> None:
    """Checks the settings of the demonstrations without reading these.

    Args:
      section: name of the section with the settings of config.warm_start, for messages.

    Raises:
      ValueError: a file or a reward term does not exist, or the agent learns from another kind of demonstrations or from none;
        names the key.
    """
    settings = config.warm_start
    source = f"{section}.demonstrations={settings.demonstrations!r}"
    if agent.learns_from not in typing.get_args(LearnsFrom):
        raise ValueError(
            f"{source}: {type(agent).__name__} can't be shown how to work (its learns_from is {agent.learns_from!r}); have it "
            f"say {' or '.join(map(repr, typing.get_args(LearnsFrom)))} and write what goes with it (docs/extending.md)"
        )
    if settings.demonstrations == "atlas":
        return
    if settings.demonstrations.startswith(MADE):
        with naming(f"{section}.demonstrations"):
            _MAKERS.get(settings.demonstrations.removeprefix(MADE))
        return
    if agent.learns_from == "golden_steps":
        if settings.demonstrations in SEARCHED or settings.demonstrations.startswith(MESSAGES):
            raise ValueError(
                f"{source}: agents that work step by step learn from golden steps; give 'trajectories:FILE', or 'atlas'"
            )
        open_examples(settings.demonstrations, (), source)
        return
    if settings.demonstrations.startswith("trajectories"):
        raise ValueError(
            f"{source}: {type(agent).__name__} learns from demonstrations, and golden steps are for agents that work step by "
            "step (config.recipe='r1_router')"
        )
    if settings.demonstrations == "drawn" and not isinstance(agent, SearchAgent):
        raise ValueError(
            f"{source}: these are text queries to any knowledge base, all of whose passages are shown, and "
            f"{type(agent).__name__} may search or show in another manner; take 'atlas', or 'made:package.module:function'"
        )
    if settings.demonstrations == "drawn" and not config.agent.max_searches:
        raise ValueError(f"{source}: config.agent.max_searches=0 allows no search; allow one at least")
    if settings.demonstrations in SEARCHED:
        return
    if settings.demonstrations.startswith(MESSAGES):
        with naming(f"{section}.demonstrations"):
            checked_path(_messages_file(settings.demonstrations)[0])
        return
    _episode_files(settings.demonstrations, source)
    with naming(f"{section}.select"):
        if asks := RewardFunction(dict(settings.select), config.evaluation.normalizer).asks:
            raise ValueError(
                f"{asks[0]!r} asks a judge, and episodes are selected without one; take another reward term"
            )


def _atlas(config: TrainConfig, agent: Agent, stream: int) -> Demonstrations:
    """Atlas's demonstrations in the form from which the agent learns. Each `stream` has different ones."""
    settings = config.warm_start
    options: dict[str, Any] = {
        "size": config.steps * settings.examples,
        "seed": config.seed + stream,
        "k": config.agent.k,
        "max_searches": config.agent.max_searches,
        **{key: getattr(settings, key) for key in ("invented", "hit", "persistence")},
    }
    bases = tuple(config.knowledge)
    if agent.learns_from == "golden_steps":
        return _of_atlas(
            StepSource(**options, tools=bases), lambda example: Worked(example, agent.step_pieces(example))
        )
    return _of_atlas(
        DemonstrationSource(**options, direct=settings.direct, tools=bases or KNOWLEDGE_BASES),
        lambda demonstration: Worked(demonstration.example, agent.pieces(demonstration)),
    )


def _of_atlas(source: DemonstrationSource | StepSource | SightSource, work: Callable[[Any], Worked]) -> Stream:
    return Stream(lambda index: work(source[index]), sys.maxsize)


def sight_demonstrations(seed: int, shares: Mapping[str, float] | None = None) -> Demonstrations:
    """Pictures and questions with the texts that the packaged vision policy was trained to write after them.

    Args:
      shares: how often each kind is drawn; default: as in `SightSource`.
    """
    source = SightSource(seed=seed, shares=shares) if shares else SightSource(seed=seed)
    return _of_atlas(source, lambda taught: Worked(taught.example, [(f" {taught.answer}\n", True)], bare=True))


def _pieces(episode: Episode) -> Pieces:
    pieces: Pieces = []
    for turn in episode.turns:
        pieces += [(turn.forced, False), (turn.text, True)]
        if turn.observation:  # as it was shown: the marks of a chat in it are the template's
            pictures = tuple(item for item in turn.shown if item.digest)
            pieces.append((Rendered(text=turn.observation, shown=pictures), False))
    return [(piece, learnt) for piece, learnt in pieces if piece]


def _of_golden_steps(config: TrainConfig, agent: Agent, source: str) -> tuple[list[Worked], str]:
    """All steps of golden trajectories, except those with empty answers, which the protocol can't express."""
    steps = open_examples(config.warm_start.demonstrations, (), "config.warm_start.demonstrations")
    examples = [steps[i] for i in range(len(steps))]
    if any(golden_step(example) is None for example in examples):
        raise ValueError(f"{source} holds questions, and agents that work step by step learn from golden steps")
    check_retrievers(examples, tuple(config.knowledge), source)
    examples = [example for example in examples if any(map(str.strip, example.answers))]
    return [Worked(example, agent.step_pieces(example)) for example in examples], f"{len(examples)} golden steps"


def _of_messages(name: str, agent: Agent) -> tuple[list[Worked], str]:
    """The conversations of a file, each with the agent's own prompt at its beginning."""
    path, pictures = _messages_file(name)
    worked = []
    for location, recorded in read_messages(path, pictures=pictures):
        try:
            worked.append(Worked(recorded.example, agent.recorded_pieces(recorded)))
        except ValueError as error:
            raise location.error(f"key 'messages': {error}") from error
    return worked, f"{path} holds {len(worked)} conversations"


def _messages_file(name: str) -> tuple[str, bool]:
    """The file named by `messages:FILE`, and whether `[pictures]` follows it."""
    path = name.removeprefix(MESSAGES)
    return path.removesuffix(_PICTURES), path.endswith(_PICTURES)


def demonstration_files(config: TrainConfig) -> list[pathlib.Path]:
    """The files of episodes or messages that `config.warm_start.demonstrations` names; [] if it names none."""
    name = config.warm_start.demonstrations
    if name in ("atlas", *SEARCHED) or name.startswith(MADE):
        return []
    path = fetched(_messages_file(name)[0])
    return [file for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else [path]


def shown_questions(name: str) -> Iterator[Example]:
    """The questions of a source of demonstrations: golden steps, messages, or episodes (bad ones included)."""
    if name.startswith(MESSAGES):
        path, pictures = _messages_file(name)
        yield from (recorded.example for _, recorded in read_messages(path, pictures=pictures))
        return
    if not pathlib.Path(name).expanduser().exists():
        steps = open_examples(name, (), "config.warm_start.demonstrations")
        yield from (steps[i] for i in range(len(steps)))
        return
    for file in _episode_files(name, f"config.warm_start.demonstrations={name!r}"):
        yield from (episode_of(row, location).example for location, row in read_rows(file))


def _of_good_episodes(settings: WarmStartConfig, normalizer: str) -> tuple[list[Worked], str]:
    """The episodes of a file, or of all .jsonl files under a directory, whose reward is at least the configured one."""
    source = f"config.warm_start.demonstrations={settings.demonstrations!r}"
    files = _episode_files(settings.demonstrations, source)
    reward = RewardFunction(dict(settings.select), normalizer)
    episodes = [episode_of(row, location) for file in files for location, row in read_rows(file)]
    totals = [terms["total"] for terms in reward(episodes)]
    good = [episode for episode, total in zip(episodes, totals) if total >= settings.least]
    if lost := [episode.example.id for episode in good if not all(_pictures(episode))]:
        raise ValueError(
            f"{source}: the pictures of {len(lost)} episodes, the first at question {lost[0]!r}, were in memory alone when "
            "they were written; roll out questions whose pictures are files"
        )
    questions = len({episode.example.id for episode in good})
    return (
        [Worked(episode.example, _pieces(episode)) for episode in good],
        f"{len(good)} of {len(episodes)} episodes, on {questions} questions, reach config.warm_start.least",
    )


def _pictures(episode: Episode) -> list[Any]:
    """The pictures of an episode's question and observations; "" for one without a file."""
    return [*episode.example.images, *(item.image for turn in episode.turns for item in turn.shown if item.digest)]


def _episode_files(name: str, source: str) -> list[pathlib.Path]:
    """The .jsonl files of a file or directory. `source`: its key and value, for error messages."""
    path = pathlib.Path(name).expanduser()
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise ValueError(
            f"{source} is neither 'atlas' nor 'annotated' nor 'drawn' nor a .jsonl file of episodes nor "
            "a directory with such files; give WORKDIR/episodes of a run, or the --output of launch.evaluate, or messages:FILE "
            "for a file of conversations"
        )
    return files


def _split(worked: Sequence[Worked], description: str, source: str, seed: int) -> tuple[Stream, Stream]:
    """The demonstrations to train on, and the held-out ones: those of a twentieth of the questions, at least of one."""

    def question(item: Worked) -> str:
        if golden_step(item.example) is None:
            return item.example.id
        return "\n".join([item.example.question, *map(str, item.example.images)])  # one question, many pictures

    names = sorted({question(item) for item in worked}, key=lambda name: (zlib.crc32(name.encode()), name))
    if len(names) < 2:
        raise ValueError(f"{source}: {description}; two questions are needed, one to learn from and one to hold out")
    held_out_questions = set(names[: max(1, round(_HELD_OUT_SHARE * len(names)))])
    training = [item for item in worked if question(item) not in held_out_questions]
    held_out = [item for item in worked if question(item) in held_out_questions]
    return shuffled(training, seed), shuffled(held_out, seed)
