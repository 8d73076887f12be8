"""The stop automaton against a naive search in the decoded bytes."""

import jax
import numpy as np
import pytest

from routerl_jax.engine.stops import EOS_BIT, StopTables, build_automaton

TOKENS = [b"a", b"b", b"ab", b"</", b"answer", b">", b"</answer>", b"x</ans", b"wer>y", b"er", b"\xc3", b"\xa9", b" "]
STOPS = ("</answer>", "ab", "bab", "\u00e9", "> ")
SHARDING = jax.sharding.SingleDeviceSharding(jax.devices()[0])


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


def test_stop_strings_may_be_added_while_turns_are_under_way():
    """A turn that has read half of its stop string reads on in the new tables, from its old state, with its old mask."""
    tables = StopTables(TOKENS, (12,), len(TOKENS), SHARDING)
    tables.add(["bab", "</answer>"])
    old, _, _ = tables.current()
    state = int(old.transition[int(old.transition[0, 3]), 4])  # after </ and answer
    tables.add(["ab", "bab", "b>"])
    new, transition, hits = tables.current()
    assert new.stops == ("bab", "</answer>", "ab", "b>")
    mask = old.mask(["</answer>"])
    assert new.mask(["</answer>"]) == mask
    assert int(hits[state, 5]) & int(mask) == 0b10
    np.testing.assert_array_equal(transition, new.transition)
    np.testing.assert_array_equal(hits, new.hits)
    tables.add(["ab"])
    assert tables.current()[0] is new  # nothing new, nothing is built


@pytest.mark.parametrize("stops", [("a", "a"), ("",), tuple(str(i) for i in range(32))])
def test_unusable_stop_strings_are_refused(stops):
    with pytest.raises(ValueError, match="stop strings must be distinct"):
        build_automaton(stops, TOKENS, (), len(TOKENS))


def test_a_stop_string_that_comes_while_tables_are_built_is_in_the_next_ones(monkeypatch):
    """Agents whose searches have ended ask for turns while the engine steps in another thread."""
    tables = StopTables(TOKENS, (), len(TOKENS), SHARDING)
    tables.add(["a"])
    build = build_automaton

    def build_while_another_comes(stops, *rest):
        automaton = build(stops, *rest)
        tables.add(["b"])
        return automaton

    monkeypatch.setattr("routerl_jax.engine.stops.build_automaton", build_while_another_comes)
    assert tables.current()[0].stops == ("a",)
    assert tables.current()[0].stops == ("a", "b")


def test_too_many_stop_strings_say_whose_they_are():
    tables = StopTables(TOKENS, (), len(TOKENS), SHARDING)
    tables.add([f"stop {i}" for i in range(31)])
    with pytest.raises(ValueError, match="has been given 31 before 'one more'"):
        tables.add(["stop 1", "one more"])
