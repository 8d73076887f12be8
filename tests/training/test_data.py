"""The stream of examples: shuffled, without repeats in a batch, and exact about where it stands."""

import json

import pytest

from routerl_jax.core.types import Example
from routerl_jax.training.data import ExampleStream


class Source:
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Example:
        return Example(id=str(index), question="?", answers=("!",))


def take(stream: ExampleStream, count: int) -> list[list[str]]:
    return [[example.id for example in stream.next(5)] for _ in range(count)]


def test_an_epoch_has_no_repeats_and_every_epoch_its_own_order() -> None:
    batches = take(ExampleStream(Source(), seed=1), 8)
    first, second = ([id for batch in part for id in batch] for part in (batches[:4], batches[4:]))
    assert len(set(first)) == len(set(second)) == 20
    assert first != second
    assert first != sorted(first, key=int)


def test_seeds() -> None:
    assert take(ExampleStream(Source(), seed=1), 6) == take(ExampleStream(Source(), seed=1), 6)
    assert take(ExampleStream(Source(), seed=1), 6) != take(ExampleStream(Source(), seed=2), 6)


@pytest.mark.parametrize("position", [0, 1, 4, 5, 11])
def test_a_restored_stream_continues(position: int) -> None:
    whole = ExampleStream(Source(), seed=3)
    take(whole, position)
    state = json.loads(json.dumps(whole.state()))
    rest = take(whole, 6)
    other = ExampleStream(Source(), seed=3)
    other.restore(state)
    assert take(other, 6) == rest


def test_batches_may_differ_in_size() -> None:
    """One order for all: what a smaller batch has taken a larger one does not take again within the epoch."""
    stream, other = ExampleStream(Source(), seed=1), ExampleStream(Source(), seed=1)
    first = [example.id for count in (5, 9, 5) for example in stream.next(count)]
    assert len(set(first)) == 19
    assert first[:18] == [example.id for _ in range(2) for example in other.next(9)]
    assert len({example.id for example in stream.next(9)}) == 9  # four were left


def test_too_few_examples() -> None:
    with pytest.raises(ValueError, match=r"has 23 examples, fewer than config.rollout.examples=24"):
        ExampleStream(Source(), seed=0).check(24)
    with pytest.raises(ValueError, match=r"has 23 examples"):
        ExampleStream(Source(), seed=0).next(24)


def test_a_position_that_was_kept_otherwise_is_refused() -> None:
    """Checkpoints of earlier versions: going on from the beginning would repeat questions without a word."""
    with pytest.raises(ValueError, match=r"an earlier version of routerl_jax"):
        ExampleStream(Source(), seed=0).restore({"epoch": 1})
