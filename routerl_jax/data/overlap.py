"""Finds questions that are in two data sets, equal or nearly equal. Training and evaluation must not share any."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import pathlib
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from routerl_jax.core.progress import Bar
from routerl_jax.core.text import words
from routerl_jax.core.types import Example
from routerl_jax.data.readers import ExampleSource

_SLACK = 1e-9  # tolerance of sums of weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
    """A pair of questions. `score` is 1 for equal words, else the Jaccard similarity of their shingles."""

    train_id: str
    test_id: str
    train_question: str
    test_question: str
    score: float
    exact: bool


def examples_of(source: ExampleSource) -> Iterator[Example]:
    """All examples of a source, one after the other."""
    return (source[index] for index in range(len(source)))


def words_of(text: str) -> list[str]:
    """The words of a text (`core.text`) for comparison: lower case, no accents, no punctuation."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c))
    return words(plain)


def find_overlaps(
    train: Iterable[Example], test: Sequence[Example], *, threshold: float = 0.6, words: int = 1, progress: bool = False
) -> list[Overlap]:
    """All pairs of questions with equal words, or with similar sets of shingles (`words` consecutive words).

    Two sets are similar if their weighted Jaccard similarity is at least `threshold`. A shingle that is in n of all N questions
    has weight log(1 + N/n). So the words of a common template count little, and the names in it count much.

    In text without spaces between words, each character is a word.

    No pair is missed. A pair that reaches the threshold shares at least one of the test question's rarest shingles, those that
    together hold more than 1 - threshold of its weight (prefix filtering, Bayardo et al. 2007). Only training questions with
    one of these are compared.

    For a question with pictures, a pair counts only if text and pictures are equal. If the question has only the URLs of its
    pictures (`image_urls`), these are compared.

    Args:
      train: training questions; read once, in order.
      test: test questions, to compare with.
      threshold: in (0, 1]; with 1 only equal sets count.
      words: number of words of a shingle; a shorter question is one shingle.
      progress: show progress bars.

    Returns:
      Pairs by test question, best first.

    Raises:
      ValueError: threshold or words out of range.
    """
    if not 0 < threshold <= 1 or words < 1:
        raise ValueError(f"threshold={threshold} must be in (0, 1] and words={words} at least 1")
    index = _Index(words)
    for example in Bar(train, desc="reading questions", unit="question", disable=not progress):
        index.add(example)
    test_shingles = index.close(test)
    overlaps: list[Overlap] = []
    for example, shingles in zip(Bar(test, desc="comparing", unit="question", disable=not progress), test_shingles):
        overlaps += index.matches(example, shingles, threshold)
    return overlaps


class _Index:
    """Training questions by their words and by their shingles."""

    def __init__(self, words: int) -> None:
        self._words = words
        self._examples: list[tuple[str, str]] = []  # id, question
        self._exact: dict[str, list[int]] = collections.defaultdict(list)
        self._numbers: dict[str, int] = {}  # number of each shingle
        self._flat: list[np.ndarray] = []  # the shingles of each question

    def add(self, example: Example) -> None:
        self._exact[_key(example)].append(len(self._examples))
        self._examples.append((example.id, example.question))
        self._flat.append(self._shingles(example))

    def close(self, test: Sequence[Example]) -> list[np.ndarray]:
        """Weighs the shingles, now that all questions are known; returns those of the test questions."""
        test_shingles = [self._shingles(example) for example in test]
        sizes = np.array([len(item) for item in self._flat], np.int64)
        flat = np.concatenate([np.empty(0, np.int32), *self._flat])
        kinds = len(self._numbers)
        in_train = np.bincount(flat, minlength=kinds)
        in_test = np.bincount(np.concatenate([np.empty(0, np.int32), *test_shingles]), minlength=kinds)
        self._weights = np.log1p((len(sizes) + len(test_shingles)) / np.maximum(in_train + in_test, 1))
        owners = np.repeat(np.arange(len(sizes)), sizes)
        # weight of each training question
        self._totals = np.bincount(owners, self._weights[flat], minlength=len(sizes))
        self._postings = owners[np.argsort(flat, kind="stable")]  # questions by shingle, in ascending order
        self._bounds = np.concatenate([[0], np.cumsum(in_train)])
        self._flat = []
        return test_shingles

    def matches(self, example: Example, shingles: np.ndarray, threshold: float) -> list[Overlap]:
        exact = self._exact.get(_key(example), [])
        equal = set(exact)
        near = [(number, score) for number, score in self._matches_above(shingles, threshold) if number not in equal]
        near.sort(key=lambda item: (-item[1], item[0]))
        pairs = [(number, 1.0, True) for number in exact] + [(number, score, False) for number, score in near]
        return [
            Overlap(
                train_id=self._examples[number][0],
                test_id=example.id,
                train_question=self._examples[number][1],
                test_question=example.question,
                score=score,
                exact=is_exact,
            )
            for number, score, is_exact in pairs
        ]

    def _matches_above(self, shingles: np.ndarray, threshold: float) -> list[tuple[int, float]]:
        """(training question, similarity) of those that reach the threshold."""
        if not len(shingles):
            return []
        shingles = shingles[np.argsort(-self._weights[shingles], kind="stable")]
        weights = self._weights[shingles]
        total = weights.sum()
        prefix = int(np.searchsorted(np.cumsum(weights), (1 - threshold) * total + _SLACK, side="right")) + 1
        candidates = np.unique(np.concatenate([self._holders(shingle) for shingle in shingles[:prefix]]))
        totals = self._totals[candidates]
        fitting = (totals >= threshold * total - _SLACK) & (totals * threshold <= total + _SLACK)
        candidates, totals = candidates[fitting], totals[fitting]
        if not len(candidates):
            return []
        common = np.zeros(len(candidates))
        for shingle, weight in zip(shingles, weights):
            holders = self._holders(shingle)
            if len(holders):
                at = np.minimum(np.searchsorted(holders, candidates), len(holders) - 1)
                common += weight * (holders[at] == candidates)
        scores = common / (total + totals - common)
        return [(int(candidates[i]), min(float(scores[i]), 1.0)) for i in np.flatnonzero(scores >= threshold - _SLACK)]

    def _holders(self, shingle: int) -> np.ndarray:
        """Training questions with a shingle."""
        return self._postings[self._bounds[shingle] : self._bounds[shingle + 1]]

    def _shingles(self, example: Example) -> np.ndarray:
        words = words_of(example.question)
        if _pictures(example) or not words:
            return np.empty(0, np.int32)
        last = max(len(words) - self._words, 0)
        texts = dict.fromkeys(" ".join(words[i : i + self._words]) for i in range(last + 1))
        return np.array([self._numbers.setdefault(text, len(self._numbers)) for text in texts], np.int32)


def _key(example: Example) -> str:
    """A key that equal questions share: words (the text, if it has no words), and pictures."""
    text = " ".join(words_of(example.question)) or example.question.strip()
    return "\n".join([text, *map(_picture_key, _pictures(example))])


def _pictures(example: Example) -> Sequence[Any]:
    return example.images or example.metadata.get("image_urls", ())


def _picture_key(image: Any) -> str:
    if isinstance(image, str | pathlib.Path):
        return str(image)
    content = image if isinstance(image, bytes) else np.asarray(image).tobytes()
    return hashlib.sha256(content).hexdigest()
