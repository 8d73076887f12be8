"""Cleans texts so that every tokenizer, encoder and file takes them."""

from __future__ import annotations

from routerl_jax.core.types import Passage


def whole_letters(text: str) -> str:
    """The text with "?" for each half of a surrogate pair.

    JSON may contain such halves, from services that cut texts, and no tokenizer takes them.
    """
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def one_line(passage: Passage) -> str:
    """Title and text on one line, without the title if the text contains it."""
    text = " ".join(passage.text.split())
    return text if passage.title in text else f"{passage.title}: {text}"
