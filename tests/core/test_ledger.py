"""The ledger: what was fed and sampled comes back exactly, and forks share the past but not the future."""

from collections.abc import Collection
from typing import cast

import numpy as np
import pytest

from routerl_jax.agents.observation import demonstrated
from routerl_jax.core.ledger import Ledger
from routerl_jax.core.tokenizer import Tokenizer


def test_history() -> None:
    ledger = Ledger()
    ledger.feed([5, 6, 7])
    ledger.sample([8, 9], [-0.5, -1.25], version=3)
    ledger.feed(np.array([10], np.int64))
    ledger.sample(np.array([11], np.int32), np.array([-2.0], np.float32), version=4)
    assert ledger.tokens == [5, 6, 7, 8, 9, 10, 11]
    assert all(type(token) is int for token in ledger.tokens)  # they go into JSON
    assert len(ledger) == 7
    sequence = ledger.sequence()
    assert len(sequence) == 7
    np.testing.assert_array_equal(sequence.tokens, [5, 6, 7, 8, 9, 10, 11])
    np.testing.assert_array_equal(sequence.loss_mask, [0, 0, 0, 1, 1, 0, 1])
    np.testing.assert_array_equal(sequence.logprobs, [0, 0, 0, -0.5, -1.25, 0, -2])
    np.testing.assert_array_equal(sequence.versions, [-1, -1, -1, 3, 3, -1, 4])
    np.testing.assert_array_equal(sequence.positions, [range(7)] * 3)
    dtypes = [sequence.tokens.dtype, sequence.loss_mask.dtype, sequence.logprobs.dtype, sequence.versions.dtype]
    assert dtypes == [np.int32, np.bool_, np.float32, np.int32]


def test_empty() -> None:
    sequence = Ledger().sequence()
    assert len(sequence) == 0
    assert sequence.positions.shape == (3, 0)


def test_random_histories_against_a_list_of_rows() -> None:
    """Every token keeps its own (mask, log-prob, version), whatever the order and size of the pieces."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        ledger, rows = Ledger(), []
        for version in range(rng.integers(1, 12)):
            tokens = rng.integers(0, 1000, rng.integers(0, 6)).tolist()
            if rng.random() < 0.5:
                ledger.feed(tokens)
                rows += [(token, False, 0.0, -1) for token in tokens]
            else:
                logprobs = (-rng.random(len(tokens))).astype(np.float32).tolist()
                ledger.sample(tokens, logprobs, version)
                rows += [(token, True, logprob, version) for token, logprob in zip(tokens, logprobs)]
        sequence = ledger.sequence()
        got = zip(sequence.tokens, sequence.loss_mask, sequence.logprobs, sequence.versions)
        assert [(int(t), bool(m), float(p), int(v)) for t, m, p, v in got] == rows


def test_positions_of_texts_and_pictures_against_a_list() -> None:
    """Texts one after the other, and pieces with positions of their own, cut at any place."""
    rng = np.random.default_rng(1)
    for _ in range(30):
        ledger, rows, following = Ledger(), [], 0
        for _ in range(rng.integers(0, 9)):
            count = int(rng.integers(0, 5))
            if rng.random() < 0.4:
                own = rng.integers(following, following + 9, (3, count)).astype(np.int32)
                following += int(rng.integers(0, 5))
                ledger.feed([7] * count, positions=own, next_position=following)
                rows += own.T.tolist()
            else:
                if rng.random() < 0.5:
                    ledger.feed([7] * count)
                else:
                    ledger.sample([7] * count, [-1.0] * count, 0)
                rows += [[following + i] * 3 for i in range(count)]
                following += count
            assert ledger.next_position == following
        for _ in range(5):
            start, stop = sorted(rng.integers(0, len(rows) + 2, 2).tolist())
            wanted = np.asarray(rows[start:stop], np.int32).reshape(-1, 3).T
            np.testing.assert_array_equal(ledger.positions(start, stop), wanted)
            np.testing.assert_array_equal(ledger.copy().positions(start, stop), wanted)


def test_sequence_is_a_snapshot() -> None:
    ledger = Ledger()
    ledger.feed([1, 2])
    before = ledger.sequence()
    ledger.sample([3], [-1.0], 0)
    assert before.tokens.tolist() == [1, 2]


def test_copies_are_independent() -> None:
    ledger = Ledger()
    ledger.feed([1])
    ledger.sample([2], [-0.1], 0)
    fork = ledger.copy()
    fork.sample([3], [-0.2], 1)
    ledger.feed([4, 5])
    assert ledger.tokens == [1, 2, 4, 5]
    assert fork.tokens == [1, 2, 3]
    assert fork.sequence().loss_mask.tolist() == [False, True, True]
    assert ledger.sequence().loss_mask.tolist() == [False, True, False, False]


def test_a_log_probability_for_every_sampled_token() -> None:
    ledger = Ledger()
    with pytest.raises(ValueError, match="2 sampled tokens came with 1 log-probabilities"):
        ledger.sample([1, 2], [-0.5], 0)
    assert len(ledger) == 0  # nothing half-written


def test_demonstrated_pieces_are_tokens_as_a_rollout_records_them() -> None:
    class Letters:
        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text]

        def plain(self, text: str, keep: Collection[str] = ()) -> str:
            return text

    sequence = demonstrated([1, 2], [("ab", True), ("c", False), ("d", True)], cast(Tokenizer, Letters()))
    np.testing.assert_array_equal(sequence.tokens, [1, 2, *map(ord, "abcd")])
    np.testing.assert_array_equal(sequence.loss_mask, [0, 0, 1, 1, 0, 1])
    np.testing.assert_array_equal(sequence.logprobs, np.zeros(6))
