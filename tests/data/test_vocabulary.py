"""Vocabularies trained here: tags are single ids, digits stand alone, no text is lost."""

import pathlib
import random

import pytest
from transformers import AutoTokenizer

from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.data.vocabulary import EOS, train_tokenizer

TAGS = ("<search>", "</search>", "<search text>", "<|answer|>", "<result 1>")
TEXTS = [
    "<search>Who was born in 1984 in 1984?</search><|answer|>Nobody was born in 1984.",
    "the theory of the thing that they thought through <search text> 1984 </search>",
    "every good boy deserves fudge, and all cows eat grass",
] * 40


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 300, TAGS, context=128)


def test_tags_are_single_ids(tokenizer: Tokenizer) -> None:
    ids = {tag: tokenizer.encode(tag) for tag in TAGS}
    assert all(len(found) == 1 for found in ids.values())
    assert len({found[0] for found in ids.values()}) == len(TAGS)
    inside = tokenizer.encode("a<search>b</search>c <search text><|answer|>")  # whatever stands around them
    assert [i for i in inside if [i] in ids.values()] == [
        ids[tag][0] for tag in ("<search>", "</search>", "<search text>", "<|answer|>")
    ]
    assert len(tokenizer.encode("<searc")) > 1
    # ordinary tokens for transformers: users decode with skip_special_tokens=True and must see them
    assert tokenizer.hf.decode(tokenizer.encode("<search>x</search>"), skip_special_tokens=True) == "<search>x</search>"


def test_digits_stand_alone(tokenizer: Tokenizer) -> None:
    """1984 is frequent enough to become a token without the rule."""
    digits = [tokenizer.decode([i]) for i in tokenizer.encode("1984 19 8")]
    assert [piece for piece in digits if piece.strip()] == list("1984198")
    for i, piece in enumerate(tokenizer.token_bytes):
        text = piece.decode(errors="replace")
        if any(c.isdigit() for c in text) and tokenizer.decode([i]) not in TAGS:
            assert len(text) == 1, text
    assert any(tokenizer.decode([i]) == " the" for i in range(len(tokenizer)))  # while words do merge


def test_size_and_end_token(tokenizer: Tokenizer) -> None:
    assert len(tokenizer) == 300
    assert tokenizer.encode(EOS) == [tokenizer.hf.eos_token_id]
    assert tokenizer.eos_ids == {tokenizer.hf.eos_token_id}
    assert tokenizer.hf.model_max_length == 128
    assert len(train_tokenizer(["ab"], 1000, TAGS, context=8)) < 300  # little text holds few merges


def test_lossless_on_unicode(tokenizer: Tokenizer) -> None:
    generator = random.Random(0)
    alphabet = [chr(c) for c in [*range(128), 0xA0, 0xE9, 0x301, 0x4E2D, 0x661, 0x200D, 0x1F469, 0xFFFD, 0x10FFFF]]
    for _ in range(300):
        text = "".join(generator.choice([*alphabet, *TAGS, EOS, "  ", "the"]) for _ in range(generator.randint(0, 30)))
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert b"".join(tokenizer.token_bytes[i] for i in ids) == text.encode()


def test_the_same_texts_give_the_same_vocabulary(tokenizer: Tokenizer, tmp_path: pathlib.Path) -> None:
    again = train_tokenizer(iter(TEXTS), 300, TAGS, context=128)
    assert again.hf.get_vocab() == tokenizer.hf.get_vocab()
    again.save(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
    assert (loaded.eos_token, loaded.pad_token, loaded.model_max_length) == (EOS, EOS, 128)


def test_tags_are_not_learned_from(tokenizer: Tokenizer) -> None:
    """`search` occurs in tags alone: it becomes a token where the tags are text, and none where they are tags."""
    assert not any(b"sear" in piece for piece in tokenizer.token_bytes if piece.decode(errors="replace") not in TAGS)
    assert any(b"sear" in piece for piece in train_tokenizer(TEXTS, 300, [], context=8).token_bytes)


def test_impossible_requests() -> None:
    smallest = 256 + 1 + len(TAGS)
    assert len(train_tokenizer(TEXTS, smallest, TAGS, context=8)) == smallest
    with pytest.raises(ValueError, match=rf"a vocabulary of {smallest - 1} is too small: .* need {smallest}"):
        train_tokenizer(TEXTS, smallest - 1, TAGS, context=8)
    with pytest.raises(ValueError, match=r"tag '«search»' can't be a token of its own.*use ASCII"):
        train_tokenizer(TEXTS, 300, ["«search»"], context=8)
