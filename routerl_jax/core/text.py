"""Text that every tokenizer, encoder and file takes."""

from __future__ import annotations


def whole_letters(text: str) -> str:
    """The text with "?" for halves of surrogate pairs: JSON may hold them, of services that cut texts, and no tokenizer
    takes them."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
