"""Text that comes in pieces is the text of the whole, whatever the pieces, and ends where a stop string ends it."""

from __future__ import annotations

import random

import pytest

from routerl_jax.extras.policy_server.generator import Detokenizer
from tests import tiny

TEXTS = [
    "naïve café, Αθήνα, 東京, \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 done",
    "plain words and more words " * 40,
    "\u20ac" * 200,
]


def pieces(
    tokens: list[int], sizes: random.Random, stops: tuple[str, ...] = (), **options: bool
) -> tuple[list[str], int]:
    """What a writer gives of tokens that come a few at a time, and how many of them count."""
    writer, given, counted, at = Detokenizer(tiny.tokenizer(), stops, **options), [], 0, 0
    while at < len(tokens) and writer.stop is None:
        size = sizes.randint(1, 5)
        piece, count = writer.add(tokens[at : at + size])
        given.append(piece)
        counted += count
        at += size
    return [*given, writer.end()], counted


@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_holds_a_part_of_a_character(text: str) -> None:
    tokens = tiny.tokenizer().encode(text)
    for seed in range(5):
        given, counted = pieces(tokens, random.Random(seed))
        assert "".join(given) == text
        assert "\ufffd" not in "".join(given)
        assert counted == len(tokens)
        assert sum(map(bool, given)) > 3


def test_bytes_that_are_no_text_come_as_in_the_whole() -> None:
    """A random policy writes whatever bytes; what is decoded of its pieces is what is decoded of all."""
    for seed in range(20):
        sizes = random.Random(seed)
        tokens = [sizes.randrange(len(tiny.tokenizer())) for _ in range(300)]
        given, _ = pieces(tokens, sizes)
        assert "".join(given) == tiny.tokenizer().decode(tokens)


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (("cat",), "a con"),
        (("zz",), "a concatenation"),
        (("tena", "cat"), "a con"),
        (("nati", "on"), "a c"),
        (("n",), "a co"),
    ],
)
def test_a_stop_string_ends_the_text_before_it_wherever_tokens_end(stops: tuple[str, ...], expected: str) -> None:
    tokenizer = tiny.tokenizer()
    tokens = [token for letter in "a concatenation" for token in tokenizer.encode(letter)]
    for seed in range(5):
        given, counted = pieces(tokens, random.Random(seed), stops)
        assert "".join(given) == expected
        so_far = tokenizer.decode(tokens[:counted])
        assert any(so_far.endswith(stop) for stop in stops) or counted == len(tokens)
        for number in range(len(given)):  # nothing that is given early is taken back
            assert expected.startswith("".join(given[:number]))


def test_a_stop_string_may_stay() -> None:
    given, _ = pieces(tiny.tokenizer().encode("find it</search> and"), random.Random(0), ("</search>",), keep_stop=True)
    assert "".join(given) == "find it</search>"
