"""What an episode says about itself, on a hand-made one."""

import dataclasses

import numpy as np
import pytest

from routerl_jax.core.types import Action, Call, Episode, Example, Sequence, Turn


def sequence(*mask: int) -> Sequence:
    length = len(mask)
    return Sequence(
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=np.array(mask, bool),
        logprobs=np.zeros(length, np.float32),
        positions=np.zeros((3, length), np.int32),
        versions=np.zeros(length, np.int32),
    )


def turn(kind: str | None, *calls: Call) -> Turn:
    action = None if kind is None else Action(kind=kind)  # pyright: ignore[reportArgumentType]
    return Turn(text="", stop_reason="stop", tokens=1, action=action, calls=list(calls))


def test_episode_counts() -> None:
    first, second, third = (Call(tool="text", query=query) for query in "abc")
    episode = Episode(
        example=Example(id="1", question="?", answers=("x",)),
        sample=0,
        answer=None,
        turns=[turn("search", first, second), turn("invalid"), turn(None), turn("search", third), turn("invalid")],
        sequences=[sequence(0, 1, 1, 0), sequence(), sequence(1, 0, 0)],
    )
    assert episode.calls == [first, second, third]
    assert episode.invalid_actions == 2
    assert [len(s) for s in episode.sequences] == [4, 0, 3]


def test_an_empty_episode() -> None:
    episode = Episode(example=Example(id="1", question="?", answers=()), sample=0, answer="", turns=[], sequences=[])
    assert (episode.calls, episode.invalid_actions) == ([], 0)


def test_episodes_do_not_share_their_defaults() -> None:
    one, two = turn("search"), turn("search")
    one.calls.append(Call(tool="t", query="q"))
    assert two.calls == []


@pytest.mark.parametrize(
    "value", [Example(id="1", question="?", answers=()), Call(tool="t", query="q"), Action(kind="answer"), sequence(1)]
)
def test_what_travels_is_frozen(value: object) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, "other")  # pyright: ignore[reportArgumentType]
