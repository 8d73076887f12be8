"""Splits long pages into passages of a fixed number of words without overlap, as in DPR, KILT and R1-Router's paper."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

WORDS = 100  # words of a passage: DPR (Karpukhin et al. 2020, section 4.1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """How pages become passages: `words` words each, without overlap. A last piece of fewer than `least` words is dropped.

    A page's only piece is always kept.
    """

    words: int = WORDS
    least: int = 7  # R1-Router (section 1.4 of its paper): passages have at least seven words

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.words:
            raise ValueError(f"a passage of {self.words} words with at least {self.least}: give 1 <= least <= words")

    def pieces(self, text: str) -> Iterator[str]:
        """The passages of a text. Words are separated by white space, and are joined with single spaces."""
        words = text.split()
        for start in range(0, len(words), self.words):
            piece = words[start : start + self.words]
            if not start or len(piece) >= self.least:
                yield " ".join(piece)

    def whole_pieces(self, text: str) -> Iterator[str]:
        """Like `pieces`, with the white space inside a passage as it is, and no word is dropped: a last piece of fewer than
        `least` words belongs to the one before."""
        words = re.findall(r"\S+\s*", text)
        starts = list(range(0, len(words), self.words))
        if len(starts) > 1 and len(words) - starts[-1] < self.least:
            starts.pop()
        for start, stop in zip(starts, [*starts[1:], None]):
            yield "".join(words[start:stop]).rstrip()


def split_of(words: int, least: int) -> Split | None:
    """The split of a configuration; None (words=0) means the format's default."""
    return Split(words=words, least=least) if words else None
