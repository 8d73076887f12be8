"""The stop automaton against a naive search in the decoded bytes."""

import numpy as np
import pytest

from routerl_jax.generation.stops import EOS_BIT, build_automaton

TOKENS = [b"a", b"b", b"ab", b"</", b"answer", b">", b"</answer>", b"x</ans", b"wer>y", b"er", b"\xc3", b"\xa9", b" "]
STOPS = ("</answer>", "ab", "bab", "\u00e9", "> ")


def run(automaton, ids, mask=None):
    """States walked over ids; returns the bits hit at each token."""
    state, found = 0, []
    for i in ids:
        bits = int(automaton.hits[state, i])
        found.append(bits if mask is None else bits & int(mask))
        state = int(automaton.transition[state, i])
    return found


def naive(ids):
    """For each token, which stops end inside the bytes that it adds."""
    text, found = b"", []
    for i in ids:
        before = len(text)
        text += TOKENS[i]
        bits = 0
        for bit, stop in enumerate(STOPS):
            needle = stop.encode()
            if any(text[:end].endswith(needle) for end in range(before + 1, len(text) + 1)):
                bits |= 1 << bit
        found.append(bits)
    return found


def test_equals_a_naive_search_on_random_token_streams():
    automaton = build_automaton(STOPS, TOKENS, (), len(TOKENS))
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(300):
        ids = rng.integers(0, len(TOKENS), 12)
        expected = naive(ids)
        assert run(automaton, ids) == expected
        hits += sum(map(bool, expected))
    assert hits > 300  # the streams do contain stops


def test_a_stop_may_span_tokens_or_lie_inside_one():
    automaton = build_automaton(("</answer>",), TOKENS, (), len(TOKENS))
    assert run(automaton, [3, 4, 5]) == [0, 0, 1]  # </ answer >
    assert run(automaton, [6]) == [1]
    assert run(automaton, [7, 8]) == [0, 1]  # x</ans wer>y


def test_mask_selects_stops_and_always_keeps_end_of_sequence():
    automaton = build_automaton(STOPS, TOKENS, (12,), len(TOKENS) + 3)
    mask = automaton.mask(["ab"])
    assert run(automaton, [2, 6, 12], mask) == [0b10, 0, int(EOS_BIT)]
    assert not automaton.hits[:, len(TOKENS) :].any()  # ids beyond the tokenizer match nothing


@pytest.mark.parametrize("stops", [("a", "a"), ("",), tuple(str(i) for i in range(32))])
def test_unusable_stop_strings_are_refused(stops):
    with pytest.raises(ValueError, match="stop strings must be distinct"):
        build_automaton(stops, TOKENS, (), len(TOKENS))
