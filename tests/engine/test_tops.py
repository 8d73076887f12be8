"""The likeliest tokens of each step: those of a whole forward pass, for whoever asked, on one device and on several."""

from __future__ import annotations

import numpy as np
import pytest

from routerl_jax.engine.engine import Engine
from routerl_jax.engine.sampling import MOST_TOP, Sampling
from tests import tiny
from tests.engine import reference


@pytest.mark.parametrize("devices", [1, 4])
def test_they_are_those_of_a_whole_forward_pass(devices: int) -> None:
    model = tiny.model(devices, layers=1)
    engine = Engine(model, rows=8, max_length=64, segment=5)
    wanted = [0, 3, MOST_TOP, 0, 1, 7]
    streams = [engine.open([9, 8, 7 + i], example_id=str(i)) for i in range(len(wanted))]
    for stream, top in zip(streams, wanted):
        engine.request(stream, max_tokens=12, sampling=Sampling(temperature=0.7), top=top)
    turns = {}
    while engine.busy:
        turns.update({stream.example_id: turn for stream, turn in engine.step()})
    one = tiny.model(layers=1)
    for i, top in enumerate(wanted):
        tops, tokens = turns[str(i)].tops, turns[str(i)].tokens
        assert [len(place) for place in tops] == ([top] * len(tokens) if top else [])
        history = [9, 8, 7 + i]
        for place, token in zip(tops, tokens):
            scores = reference.scores(one, history) / 0.7
            expected = scores - np.log(np.exp(scores).sum())
            assert [number for number, _ in place] == np.argsort(-expected)[:top].tolist()
            np.testing.assert_allclose([value for _, value in place], np.sort(expected)[::-1][:top], atol=2e-5)
            history.append(token)


def test_more_than_the_programs_tell_is_refused() -> None:
    engine = Engine(tiny.model(layers=1), rows=2, max_length=32)
    stream = engine.open([1])
    with pytest.raises(ValueError, match=r"top=21 must be in \[0, 20\]"):
        engine.request(stream, top=MOST_TOP + 1)
    engine.close(stream)
