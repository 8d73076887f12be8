"""Splits long pages into passages of a fixed number of words without overlap, as in DPR, KILT and R1-Router's paper."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from routerl_jax.core.text import split

WORDS = 100  # words of a passage: DPR (Karpukhin et al. 2020, section 4.1)
_LONGEST = 1000  # characters of a word of a document; a longer one (encoded data) counts as several


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """How pages become passages: `words` words each, without overlap. A last piece of fewer than `least` words is dropped.

    A page's only piece is always kept. Words stand between white space; in a text of a script without spaces between words
    (Chinese, Japanese, Thai), each character is one.
    """

    words: int = WORDS
    least: int = 7  # R1-Router (section 1.4 of its paper): passages have at least seven words

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.words:
            raise ValueError(f"a passage of {self.words} words with at least {self.least}: give 1 <= least <= words")

    def pieces(self, text: str) -> Iterator[str]:
        """The passages of a text, with single spaces for white space."""
        characters = _characters(text)
        words = characters or text.split()
        for start in range(0, len(words), self.words):
            piece = words[start : start + self.words]
            if not start or len(piece) >= self.least:
                yield " ".join("".join(piece).split() if characters else piece)

    def whole_pieces(self, text: str) -> Iterator[str]:
        """Like `pieces`, with the white space inside a passage as it is, and no word is dropped: a last piece of fewer than
        `least` words belongs to the one before."""
        words = _characters(text) or re.findall(rf"\S{{1,{_LONGEST}}}\s*", text)
        starts = list(range(0, len(words), self.words))
        if len(starts) > 1 and len(words) - starts[-1] < self.least:
            starts.pop()
        for start, stop in zip(starts, [*starts[1:], None]):
            yield "".join(words[start:stop]).rstrip()


def _characters(text: str) -> list[str]:
    """The words of a text that has few spaces, each with the white space and the punctuation marks after it; else []."""
    parts = split(text)
    if len(parts) <= 2 * len(text.split()):  # a foreign name in another text moves no border
        return []
    words: list[str] = []
    end = 0
    for part in parts:
        start = text.index(part, end)
        if words:
            words[-1] += text[end:start]
        if words and not any(map(str.isalnum, part)):
            words[-1] += part
        else:
            words.append(part)
        end = start + len(part)
    return words


def split_of(words: int, least: int) -> Split | None:
    """The split of a configuration; None (words=0) means the format's default."""
    return Split(words=words, least=least) if words else None
