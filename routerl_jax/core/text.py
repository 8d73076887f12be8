"""Text that every tokenizer, encoder and file takes."""

from __future__ import annotations

from routerl_jax.core.types import Passage


def whole_letters(text: str) -> str:
    """The text with "?" for halves of surrogate pairs: JSON may hold them, of services that cut texts, and no tokenizer
    takes them."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def one_line(passage: Passage) -> str:
    """Title and text, the title left out where the text holds it."""
    text = " ".join(passage.text.split())
    return text if passage.title in text else f"{passage.title}: {text}"
