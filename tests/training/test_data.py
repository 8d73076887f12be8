"""The stream of examples: shuffled, without repeats in a batch, and exact about where it stands."""

import json

import numpy as np
import pytest

from routerl_jax.core.types import Example
from routerl_jax.training.stages import ExampleStream


class Source:
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Example:
        return Example(id=str(index), question="?", answers=("!",))


def take(stream: ExampleStream, count: int) -> list[list[str]]:
    return [[example.id for example in stream.next(5)] for _ in range(count)]


@pytest.mark.parametrize("count", [1, 2, 5, 7, 12, 22, 23])
def test_every_pass_has_every_question_once_and_an_order_of_its_own(count: int) -> None:
    """Also where a pass does not divide by the batch; no batch has a question twice."""
    stream = ExampleStream(Source(), seed=1)
    batches = [[example.id for example in stream.next(count)] for _ in range(-(-7 * 23 // count))]
    assert all(len(set(batch)) == count for batch in batches)
    visited = [id for batch in batches for id in batch]
    passes = [visited[i * 23 : (i + 1) * 23] for i in range(7)]
    assert all(sorted(one, key=int) == [str(i) for i in range(23)] for one in passes)
    assert len({tuple(one) for one in passes}) == 7
    assert passes[0] != sorted(passes[0], key=int)


def test_batches_of_changing_sizes_keep_passes_whole() -> None:
    """What is put off for a large batch may be more than the next one takes."""
    sizes = np.random.default_rng(0).integers(1, 24, 60).tolist()
    stream = ExampleStream(Source(), seed=4)
    batches = [[example.id for example in stream.next(count)] for count in sizes]
    assert all(len(set(batch)) == count for batch, count in zip(batches, sizes))
    visited = [id for batch in batches for id in batch]
    for i in range(len(visited) // 23):
        assert len(set(visited[i * 23 : (i + 1) * 23])) == 23


def test_seeds() -> None:
    assert take(ExampleStream(Source(), seed=1), 6) == take(ExampleStream(Source(), seed=1), 6)
    assert take(ExampleStream(Source(), seed=1), 6) != take(ExampleStream(Source(), seed=2), 6)


@pytest.mark.parametrize("position", [0, 1, 4, 5, 10, 11, 14])
def test_a_restored_stream_continues(position: int) -> None:
    whole = ExampleStream(Source(), seed=3)
    take(whole, position)
    state = json.loads(json.dumps(whole.state()))
    rest = take(whole, 6)
    other = ExampleStream(Source(), seed=3)
    other.restore(state)
    assert take(other, 6) == rest
    assert bool(state["put_off"]) == (position in (10, 14))  # the ends of the second and the third pass


def test_a_checkpoint_that_knows_of_nothing_put_off() -> None:
    """Those of before: they passed over the rest of a pass, so nothing is owed."""
    stream, other = (ExampleStream(Source(), seed=3) for _ in range(2))
    other.restore({"position": 10})
    take(stream, 2)
    assert take(other, 3) == take(stream, 3)


def test_batches_may_differ_in_size() -> None:
    """One order for all: what a smaller batch has taken a larger one does not take again within the epoch."""
    stream, other = ExampleStream(Source(), seed=1), ExampleStream(Source(), seed=1)
    first = [example.id for count in (5, 9, 5) for example in stream.next(count)]
    assert len(set(first)) == 19
    assert first[:18] == [example.id for _ in range(2) for example in other.next(9)]
    assert len({example.id for example in stream.next(9)}) == 9  # four were left, five are of the next pass


def test_too_few_examples() -> None:
    with pytest.raises(ValueError, match=r"has 23 examples, fewer than config.rollout.examples=24"):
        ExampleStream(Source(), seed=0).check(24)
    with pytest.raises(ValueError, match=r"has 23 examples"):
        ExampleStream(Source(), seed=0).next(24)


def test_a_position_that_was_kept_otherwise_is_refused() -> None:
    """Checkpoints of earlier versions: going on from the beginning would repeat questions without a word."""
    with pytest.raises(ValueError, match=r"an earlier version of routerl_jax"):
        ExampleStream(Source(), seed=0).restore({"epoch": 1})
