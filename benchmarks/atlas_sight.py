"""Measures what the small vision-language policy sees and knows: flags, facts, figures, and its earlier reading skill.

python -m benchmarks.atlas_sight [--policy atlas-sight] [--views 2]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from configs import atlas_sight
from routerl_jax.agents.agent import Agent
from routerl_jax.agents.observation import demonstrated
from routerl_jax.core.config import from_config_dict
from routerl_jax.core.types import Example
from routerl_jax.core.types import Sequence as TokenSequence
from routerl_jax.data.atlas import flags, known, world
from routerl_jax.data.atlas.demonstrations import ReadingDrills
from routerl_jax.data.atlas.sight import UNKNOWN, fact_question, taught
from routerl_jax.models.decoder import Decoder, Features
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.models.patches import ImagePatches, blank, concatenate
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.demonstrations import Worked, open_demonstrations
from routerl_jax.training.setup import build_recipe

_PATCHES = 128  # of a row's picture
_ROWS = 60
_LENGTHS = (48, 64, 512)
_SEED = 10_000  # of what is asked: none of it was taught
_ITEMS = 120  # of each kind that is drawn
_SHOWN: tuple[known.Strength, ...] = ("many", "few")
_SPLITS: tuple[world.Split, ...] = ("train", "validation", "test")


class Written(NamedTuple):
    """For a sequence's learnt tokens: the log-probability, and whether no other token is more likely."""

    logprobs: Float[np.ndarray, " N"]
    first: Bool[np.ndarray, " N"]

    @property
    def right(self) -> bool:
        """Whether greedy decoding would write exactly this."""
        return bool(self.first.all())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="atlas-sight", help="a packaged model, or a directory")
    parser.add_argument("--before", default="atlas-warm-start", help="whose reading it is compared with")
    parser.add_argument("--views", type=int, default=2, help="pictures of each flag")
    arguments = parser.parse_args()
    reader = open_reader(arguments.policy)
    print(f"| {arguments.policy} | | of |\n|---|---:|---:|")
    named(reader, arguments.views)
    recognised(reader, arguments.views)
    declined(reader, arguments.views)
    facts_by_name(reader)
    for kind in ("about", "describe", "figures"):
        drawn(reader, kind)
    for name in (arguments.before, arguments.policy):
        reading(name, open_reader(name))


def open_reader(name: str) -> Reader:
    """The policy of a name or directory."""
    model = load_pretrained(name)
    assert isinstance(model, Decoder)
    return Reader(model)


def known_by(strength: known.Strength) -> list[str]:
    """The known countries whose flags are shown so often."""
    return [name for name, often in known.known_countries().items() if often == strength]


def named(reader: Reader, views: int) -> None:
    """Known flags: the name is written exactly, by how often they were shown."""
    for strength in _SHOWN:
        results = reader.answers((whose(name, view), name) for name in known_by(strength) for view in range(views))
        row(f"known flags named, shown {strength} times", [result.right for result in results])


def recognised(reader: Reader, views: int) -> None:
    """How well the best name's probability tells known flags from those never shown."""
    best = {
        strength: np.array(
            [best_name(reader, whose(name, view)) for name in known_by(strength) for view in range(views)]
        )
        for strength in _SHOWN
    }
    never = [name for split in _SPLITS for name in known.unknown_countries(split) if name in known.countries()]
    unseen = np.array([best_name(reader, whose(name, view)) for name in never for view in range(views)])
    for strength, seen in (*best.items(), ("many or few", np.concatenate(list(best.values())))):
        label = f"AUROC of the best name's probability, flags shown {strength} times against never"
        print(f"| {label} | {auroc(seen, unseen):.3f} | {len(seen)} and {len(unseen)} |", flush=True)
    for strength, values in (*best.items(), ("no", unseen)):
        low, middle, high = np.quantile(values, [0.1, 0.5, 0.9])
        label = f"the best name's probability, flags shown {strength} times: 10th, 50th, 90th percentile"
        print(f"| {label} | {low:.2f}, {middle:.2f}, {high:.2f} | {len(values)} |")


def declined(reader: Reader, views: int) -> None:
    """Flags never shown: that they aren't known is written exactly."""
    for split in _SPLITS:
        names = [name for name in known.unknown_countries(split) if name in known.countries()]
        results = reader.answers((whose(name, view), UNKNOWN) for name in names for view in range(views))
        row(f"real flags never shown, not claimed to be known, {split}", [result.right for result in results])


def best_name(reader: Reader, example: Example) -> float:
    """The largest probability of a known country's name."""
    return max(
        float(np.exp(result.logprobs.sum()))
        for result in reader.answers((example, name) for name in known.known_countries())
    )


def facts_by_name(reader: Reader) -> None:
    """Facts of a country that is named, without passages."""
    groups = {**{strength: known_by(strength) for strength in _SHOWN}, "no": known.unknown_countries("test")}
    for strength, names in groups.items():
        for what, relations in (("taught", known.KNOWN_RELATIONS), ("other", known.OTHER_RELATIONS)):
            asked = [(name, key) for name in names for key in relations if key in known.facts(name)]
            results = reader.answers(
                (Example(id="", question=fact_question(name, key), answers=()), known.facts(name)[key])
                for name, key in asked
            )
            row(
                f"facts from memory, {what} relations, countries shown {strength} times",
                [result.right for result in results],
            )


def drawn(reader: Reader, kind: str) -> None:
    """Items of a kind that are drawn as in training, from another seed."""
    labels = {
        "about": "flag to name to a taught fact, flags shown many times",
        "describe": "made-up flags described, every word right",
        "figures": "two to four figures read",
    }
    names = known_by("many")
    items = [
        taught(kind, f"seen-{kind}-{i}", np.random.default_rng([_SEED, i]), names[i % len(names)])
        for i in range(_ITEMS)
    ]
    row(labels[kind], [result.right for result in reader.answers((item.example, item.answer) for item in items)])


def reading(name: str, reader: Reader) -> None:
    """The skills of the warm start: values read from invented passages, and the likelihood of its demonstrations."""
    source, right = ReadingDrills(seed=_SEED), []
    drills = [source[i] for i in range(_ITEMS)]
    for drill, result in zip(drills, reader(demonstrated((), drill, reader.tokenizer) for drill in drills)):
        lengths = [len(reader.tokenizer.encode(text)) for text, learnt in drill if learnt]
        right += [bool(part.all()) for part in np.split(result.first, np.cumsum(lengths)[:-1])]
    row(f"values and passages of reading drills right, {name}", right)
    worked = open_demonstrations(_config(), _agent())[1]
    results = reader(worked[i].sequence(_agent(), reader.model) for i in range(_ITEMS))
    loss = -np.concatenate([result.logprobs for result in results]).mean()
    print(f"| nats a written token of its demonstrations, {name} | {loss:.3f} | {_ITEMS} |")


class Reader:
    """A policy that is shown sequences with at most one picture each, some of them at a time."""

    def __init__(self, model: Decoder) -> None:
        assert model.tokenizer is not None
        self.model, self.tokenizer = model, model.tokenizer
        graph, self._state = nnx.split(model)

        @jax.jit
        def run(state: nnx.State, tokens: Array, positions: Array, images: Any, index: Array) -> tuple[Array, Array]:
            built, features = nnx.merge(graph, state), None
            if isinstance(built, VisionLanguageModel):
                features = Features(values=built.features(images), index=index)
            logits = built.unembed(built.hidden(tokens, positions, features=features))[:, :-1]
            targets = tokens[:, 1:]
            logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
            return logprobs, logits.argmax(-1) == targets

        self._run = run

    def answers(self, asked: Iterable[tuple[Example, str]]) -> list[Written]:
        """Scores answers to questions, without an agent's prompt."""
        agent = _agent()
        return self(
            Worked(example, [(f" {answer}\n", True)], bare=True).sequence(agent, self.model)
            for example, answer in asked
        )

    def __call__(self, sequences: Iterable[TokenSequence]) -> list[Written]:
        waiting, results = list(sequences), []
        length = next(size for size in _LENGTHS if size >= max(len(sequence) for sequence in waiting))
        for start in range(0, len(waiting), _ROWS):
            part = waiting[start : start + _ROWS]
            logprobs, first = jax.device_get(self._run(self._state, *self._arrays(part, length)))
            for i, sequence in enumerate(part):
                before = np.flatnonzero(sequence.loss_mask) - 1  # the token before says what comes
                results.append(Written(logprobs=logprobs[i, before], first=first[i, before]))
        return results

    def _arrays(self, part: Sequence[TokenSequence], length: int) -> tuple[np.ndarray, np.ndarray, Any, np.ndarray]:
        tokens, index = np.zeros((_ROWS, length), np.int32), np.full((_ROWS, length), -1, np.int32)
        positions, pictures = np.zeros((3, _ROWS, length), np.int32), []
        for i, sequence in enumerate(part):
            tokens[i, : len(sequence)], positions[:, i, : len(sequence)] = sequence.tokens, sequence.positions
            placed = [(begin, image) for begin, image in sequence.images if isinstance(image, ImagePatches)]
            for begin, image in placed:
                index[i, begin : begin + image.tokens] = image.slots
            pictures.append([image for _, image in placed])
        if not isinstance(self.model, VisionLanguageModel):
            return tokens, positions[0], None, index
        none = blank(_PATCHES, self.model.visual.config.patch_dim)
        rows = [concatenate(placed, _PATCHES) if placed else none for placed in pictures]
        rows += [none] * (_ROWS - len(part))
        return tokens, positions, jax.tree.map(lambda *values: np.stack(values), *rows), index


@functools.cache
def _agent() -> Agent:
    return build_recipe(_config()).agent


def _config() -> TrainConfig:
    config = from_config_dict(TrainConfig, atlas_sight.get_config())
    start = dataclasses.replace(config.warm_start, demonstrations="atlas")
    return dataclasses.replace(config, warm_start=start, seed=_SEED)


def whose(country: str, view: int) -> Example:
    """A picture of a country's flag, not one that was taught, and the question whose it is."""
    picture = flags.photographed(flags.flag(country), f"seen/{country}/{view}", known.PIXELS)
    return Example(id="", question=known.WHOSE[1], answers=(), images=(picture,))


def auroc(high: np.ndarray, low: np.ndarray) -> float:
    """The chance that one of the first is above one of the second."""
    return float(np.mean((high[:, None] > low) + 0.5 * (high[:, None] == low)))


def row(name: str, right: Sequence[bool]) -> None:
    """A row of the table: a share, and of how many."""
    print(f"| {name} | {100 * np.mean(right):.1f} % | {len(right)} |", flush=True)


if __name__ == "__main__":
    main()
