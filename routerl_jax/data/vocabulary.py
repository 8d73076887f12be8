"""Training a small byte-level BPE vocabulary, for policies that are trained from scratch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from routerl_jax.core.tokenizer import Tokenizer

EOS = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], size: int, tags: Sequence[str], *, context: int) -> Tokenizer:
    """Trains a tokenizer whose tags are single tokens and whose digits stand alone.

    Args:
      texts: training text.
      size: vocabulary size, tags, bytes and end token included.
      tags: strings that become one token each (kept when decoding with skip_special_tokens).
      context: the model's context length, for the tokenizer's own metadata.

    Raises:
      ValueError: `size` has no room for bytes and tags, or a tag does not survive encoding and decoding.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if size < len(alphabet) + 1 + len(tags):
        raise ValueError(
            f"a vocabulary of {size} is too small: {len(alphabet)} bytes, {len(tags)} tags and the end token need "
            f"{len(alphabet) + 1 + len(tags)}"
        )
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(tags), special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    pieces = (piece for text in texts for piece in _without(text, tags))
    backend.train_from_iterator(pieces, trainer)
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=EOS,
        pad_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )
    tokenizer = Tokenizer(hf)
    for tag in tags:
        if len(tokenizer.encode(tag)) != 1 or tokenizer.decode(tokenizer.encode(tag)) != tag:
            raise ValueError(
                f"tag {tag!r} can't be a token of its own: byte-level decoders garble it; use ASCII letters"
            )
    return tokenizer


def _without(text: str, tags: Sequence[str]) -> list[str]:
    """The parts of the text between the tags."""
    for tag in tags:
        text = text.replace(tag, "\0")
    return [piece for piece in text.split("\0") if piece]
