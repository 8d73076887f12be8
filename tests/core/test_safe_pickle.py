"""What is kept is read back as it was, and a pickle that would run something is refused."""

import collections
import os
import pickle
from typing import Any

import numpy as np
import pytest
from PIL import Image

from routerl_jax.core.safe_pickle import dumps, loads
from routerl_jax.core.types import Action, Call, Episode, Example, Passage, Turn
from tests import tiny


def test_episodes_are_read_back_as_they_were() -> None:
    picture = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(2, 2, 3))
    example = Example(id="1", question="?", answers=("a",), images=(picture, b"bytes"), metadata={"hops": [1, None]})
    call = Call(tool="text", query="q", passages=(Passage(id="p", title="t", text="x"),), seconds=0.5)
    turn = Turn(text="é", stop_reason="stop", tokens=1, action=Action(kind="search"), calls=[call])
    sequences = tiny.random_sequences(2)
    made = [
        Episode(example=example, sample=i, answer=None, turns=[turn], sequences=[one], rewards={"total": 0.1 + 0.2})
        for i, one in enumerate(sequences)
    ]
    found = loads(dumps(made))
    assert found[0].example is found[1].example
    assert found[0].turns == made[0].turns
    assert found[0].rewards == {"total": 0.1 + 0.2}
    np.testing.assert_array_equal(np.asarray(found[0].example.images[0]), np.asarray(picture))
    assert (found[0].example.images[1], found[0].example.metadata) == (b"bytes", {"hops": [1, None]})
    for one, other in zip(found, sequences):
        for name in ("tokens", "loss_mask", "logprobs", "positions", "versions"):
            read, wanted = getattr(one.sequences[0], name), getattr(other, name)
            assert read.dtype == wanted.dtype
            np.testing.assert_array_equal(read, wanted)


class _Runs:
    def __init__(self, what: Any) -> None:
        self.what = what

    def __reduce__(self) -> Any:
        return self.what


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ((os.system, ("exit 1",)), r"(posix|nt)\.system is no dataclass"),
        ((eval, ("1",)), r"builtins\.eval is no dataclass"),
        ((collections.Counter, ()), r"collections\.Counter is no dataclass"),
    ],
)
def test_what_would_run_is_refused(what: Any, named: str) -> None:
    with pytest.raises(ValueError, match=f"can't be read: {named}"):
        loads(pickle.dumps(_Runs(what)))


def test_damaged_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="what was kept can't be read"):
        loads(dumps([1, 2, 3])[:-2])


def test_damaged_bytes_are_an_error_of_one_kind() -> None:
    """2,000 pickles with a changed, a lost and an added byte."""
    picture = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(2, 2, 3))
    example = Example(id="1", question="?", answers=("a",), images=(picture,), metadata={"scores": np.arange(3.0)})
    whole = dumps([Episode(example=example, sample=0, answer=None, turns=[], sequences=tiny.random_sequences(1))])
    rng, refused = np.random.default_rng(0), 0
    for _ in range(2000):
        data = bytearray(whole)
        data[rng.integers(len(data))] = rng.integers(256)
        del data[rng.integers(len(data))]
        data.insert(rng.integers(len(data)), rng.integers(256))
        try:
            loads(bytes(data))
        except ValueError:
            refused += 1
    assert refused > 1980  # else the changes undid each other
