"""Incremental detokenization: the text of a turn while it is sampled, in whole characters and without stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from routerl_jax.core.tokenizer import Tokenizer

_BROKEN = "\ufffd"  # decoded from a part of a character
_WINDOW = 96  # most tokens that are decoded together
_OVERLAP = 8  # tokens that stay when the window is full; the next ones are decoded with them


class Detokenizer:
    """Turns tokens into text as they come. Its parts together are the text of all tokens up to the first stop string.

    Text that may be the beginning of a stop string is held back until more tokens decide it.

    Args:
      stops: stop strings. The text ends before the one that is complete first.
      keep_stop: the text ends after the stop string instead.

    Attributes:
      stop: the stop string that has ended the text; None if none has.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, keep_stop: bool = False) -> None:
        self._tokenizer, self._stops, self._keep_stop = tokenizer, tuple(stops), keep_stop
        self._window: list[int] = []
        self._emitted = 0  # letters of the window's text that have been released or held
        self._held = ""  # text that is held back, as it may begin a stop string
        self.stop: str | None = None

    def add(self, tokens: Sequence[int]) -> tuple[str, int]:
        """The text that is certain now, and how many of the tokens count: all, or those up to the end of a stop string."""
        if self.stop is not None:
            return "", 0
        saved = list(self._window), self._emitted, self._held
        piece = self._add(tokens)
        if self.stop is None or len(tokens) < 2:
            return piece, len(tokens)
        for count in range(1, len(tokens) + 1):  # once a turn
            self._window, self._emitted, self._held = list(saved[0]), saved[1], saved[2]
            self.stop = None
            piece = self._add(tokens[:count])
            if self.stop is not None:
                return piece, count
        raise AssertionError("a stop string was there and is not")

    def end(self) -> str:
        """The text that was held back. No token follows."""
        if self.stop is not None:
            return ""
        text = self._tokenizer.decode(self._window)
        piece = self._release(text[self._emitted :])
        self._emitted = len(text)
        held, self._held = self._held, ""
        return piece if self.stop is not None else piece + held

    def _add(self, tokens: Sequence[int]) -> str:
        self._window += tokens
        text = self._tokenizer.decode(self._window)
        certain = text.rstrip(_BROKEN)
        new = certain[self._emitted :]
        self._emitted = max(self._emitted, len(certain))
        if len(self._window) > _WINDOW and len(certain) == len(text):
            self._window = self._window[-_OVERLAP:]
            self._emitted = len(self._tokenizer.decode(self._window))
        return self._release(new)

    def _release(self, new: str) -> str:
        text, self._held = self._held + new, ""
        ends = [(start + len(stop), stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            end, self.stop = min(ends)
            return text[: end if self._keep_stop else end - len(self.stop)]
        held = max((_prefix_length(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _prefix_length(text: str, stop: str) -> int:
    """How many letters at the end of a text are the beginning of a stop string."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
