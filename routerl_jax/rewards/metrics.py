"""Answer metrics: pure functions of a prediction and its accepted answers, each a float in [0, 1].

All take the gold answers (one string or a sequence of strings) and the name of a normaliser. The best gold answer counts. A
prediction of None (no answer) scores 0. A text that a normaliser would erase ("The", "A") is compared by its lower-cased words.
So an empty prediction never matches, and not every prediction covers such a gold answer. No gold answer at all, or an unknown
normaliser, is a ValueError.

Released scorers compare code points. Here texts are also compared as they look (`core.words.folded`: accents in one or two
code points, curly quotation marks, dashes, wide digits, characters without width), before any normaliser, and the better score
counts. So no score is lower than the released one. Signs of numbers stay when texts are compared as they look: "−5", with a
minus sign, is "-5" and not "5". Text in scripts without spaces between words (Chinese, Japanese, Thai, ..)
has its characters for words, as in MLQA's scorer (arXiv 1910.07475).
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

import numpy as np

from routerl_jax.core.words import folded, is_unspaced, split
from routerl_jax.rewards.normalize import NORMALIZERS, r1_searcher

Golds = str | Sequence[str]
Words = tuple[str, ...]

_MOST_EDITED = 0.5  # ANLS: share of edited characters of the longer text from which on the score is 0
# R1-Searcher (and HotpotQA): one of these answers gets no partial credit against a different text.
_CLOSED_ANSWERS: frozenset[Words] = frozenset({("yes",), ("no",), ("noanswer",)})


# Signs within numbers, and forms of them that no normaliser deletes or makes a space.
_NUMBER_SIGN = re.compile(r"(?<=\d)[-./](?=\d)|(?<!\w)-(?=[$€£¥.]?\d)|^-(?= \d)")
_KEPT_SIGNS = {"-": "−", ".": "․", "/": "⁄"}

_Metric = TypeVar("_Metric", bound=Callable[..., float])


def _in_any_form(metric: _Metric) -> _Metric:
    """The metric of the texts as they are or, if it is better, as they look."""

    @functools.wraps(metric)
    def best(prediction: str | None, golds: Golds, normalizer: str = "search_r1") -> float:
        score = metric(prediction, golds, normalizer)
        written = (prediction or "", *_as_tuple(golds))
        if score == 1 or all(map(str.isascii, written)):
            return score
        said, *accepted = (_NUMBER_SIGN.sub(lambda sign: _KEPT_SIGNS[sign[0]], folded(text)) for text in written)
        return max(score, metric(said, accepted, normalizer))

    return cast(_Metric, best)


@_in_any_form
def exact_match(prediction: str | None, golds: Golds, normalizer: str = "search_r1") -> float:
    """EM: 1 if the normalised prediction equals a normalised gold answer, else 0 (SQuAD, Rajpurkar et al. 2016)."""
    predicted, accepted = _normalized(prediction, golds, normalizer)
    return float(bool(predicted) and predicted in accepted)


@_in_any_form
def f1(prediction: str | None, golds: Golds, normalizer: str = "search_r1") -> float:
    """F1 of the two bags of words, the best over gold answers, in [0, 1] (SQuAD, Rajpurkar et al. 2016).

    With `r1_searcher`, yes, no and noanswer score 0 against anything else, on either side, as in its released scorer.
    """
    return _best_overlap(prediction, golds, normalizer)[0]


@_in_any_form
def cover_em(prediction: str | None, golds: Golds, normalizer: str = "search_r1") -> float:
    """CEM (ACC_R of R1-Searcher, section 3.1): 1 if every word of a gold answer is among the predicted words, else 0.

    Order, adjacency and repetition don't count. In text without spaces between words, a run of characters counts as one word,
    which the prediction must hold as it is.
    """
    predicted, accepted = _normalized(prediction, golds, normalizer)
    said = "".join(predicted)

    def covers(gold: Words) -> bool:
        runs = [(unspaced, list(run)) for unspaced, run in itertools.groupby(gold, is_unspaced)]
        covered = ["".join(run) in said if unspaced else set(run) <= set(predicted) for unspaced, run in runs]
        return bool(gold) and all(covered)

    return float(any(map(covers, accepted)))


@_in_any_form
def substring_em(prediction: str | None, golds: Golds, normalizer: str = "search_r1") -> float:
    """SubEM (Search-R1, MMSearch-R1): 1 if a normalised gold answer is a substring of the prediction, else 0.

    Characters are compared: "art" is in "party", as in the released scorers.
    """
    predicted, accepted = _normalized(prediction, golds, normalizer)
    return float(any(gold and " ".join(gold) in " ".join(predicted) for gold in accepted))


@_in_any_form
def f1_recall(prediction: str | None, golds: Golds, normalizer: str = "search_r1") -> float:
    """F1-Recall (R1-Router, eq. 23): the share of a gold answer's words that were predicted, in [0, 1].

    Among several gold answers the one with the best F1 (the first of equals) counts, not the one with the best recall.
    Extra words are free, so compare outputs of like length only. R1-Router itself normalises with `vqa`.
    """
    return _best_overlap(prediction, golds, normalizer)[1]


def accuracy(prediction: str | None, golds: Golds, normalizer: str = "search_r1") -> float:
    """R1-Router's released answer reward: 1 if `f1_recall` is 1, else 0; a single gold answer of more than five
    space-separated words gives `f1_recall` itself. In [0, 1]; R1-Router itself normalises with `vqa`.
    """
    recall = f1_recall(prediction, golds, normalizer)
    accepted = _as_tuple(golds)
    graded = len(accepted) == 1 and len(accepted[0].split()) > 5
    return recall if graded else float(recall == 1.0)


@_in_any_form
def anls(prediction: str | None, golds: Golds, normalizer: str = "search_r1") -> float:
    """Average normalised Levenshtein similarity of one answer (ST-VQA, arXiv 1905.13648, section 5), in [0, 1].

    1 less the share of the longer text's characters that must be edited; 0 if that share is a half or more. The best gold
    answer counts. Texts are compared in lower case with single spaces, whatever the normaliser, as in other papers.
    """
    NORMALIZERS.get(normalizer)
    predicted, *accepted = (" ".join(text.lower().split()) for text in (prediction or "", *_as_tuple(golds)))
    return max(_similarity(predicted, gold) for gold in accepted)


# The metrics that `launch.score` reports and recipes reward, by short name.
ANSWER_METRICS: Mapping[str, Callable[[str | None, Golds, str], float]] = {
    "em": exact_match,
    "cover_em": cover_em,
    "substring_em": substring_em,
    "f1": f1,
    "f1_recall": f1_recall,
    "anls": anls,
}


def _as_tuple(golds: Golds) -> tuple[str, ...]:
    accepted = (golds,) if isinstance(golds, str) else tuple(golds)
    if not accepted:
        raise ValueError("golds is empty: give at least one accepted answer")
    for gold in accepted:
        if not isinstance(gold, str):
            raise TypeError(f"golds must be strings, got {gold!r}")
    return accepted


def _normalized(prediction: str | None, golds: Golds, normalizer: str) -> tuple[Words, list[Words]]:
    return _words(prediction or "", normalizer), [_words(gold, normalizer) for gold in _as_tuple(golds)]


@functools.lru_cache(maxsize=4096)
def _words(text: str, normalizer: str) -> Words:
    return tuple(split(NORMALIZERS.get(normalizer)(text)) or split(text.lower()))


def _best_overlap(prediction: str | None, golds: Golds, normalizer: str) -> tuple[float, float]:
    """(F1, recall) against the gold answer with the best F1, the first of equals."""
    predicted, accepted = _normalized(prediction, golds, normalizer)
    guarded = NORMALIZERS.get(normalizer) is r1_searcher
    return max((_overlap(predicted, gold, guarded) for gold in accepted), key=lambda scores: scores[0])


def _overlap(predicted: Words, gold: Words, guarded: bool) -> tuple[float, float]:
    if guarded and predicted != gold and (predicted in _CLOSED_ANSWERS or gold in _CLOSED_ANSWERS):
        return 0.0, 0.0
    common = (Counter(predicted) & Counter(gold)).total()
    if not common:
        return 0.0, 0.0
    return 2 * common / (len(predicted) + len(gold)), common / len(gold)


def _similarity(predicted: str, gold: str) -> float:
    longer, shorter = max(len(predicted), len(gold)), min(len(predicted), len(gold))
    if not shorter or longer - shorter >= _MOST_EDITED * longer:  # at least that many characters are missing
        return 0.0
    edited = _levenshtein(predicted, gold) / longer
    return 1 - edited if edited < _MOST_EDITED else 0.0


def _levenshtein(first: str, second: str) -> int:
    """Smallest number of insertions, deletions and replacements of characters that turn one text into the other."""
    letters = np.frombuffer(second.encode("utf-32-le", "surrogatepass"), np.uint32)
    columns = np.arange(len(second) + 1)
    row = columns
    for number, letter in enumerate(first, 1):
        new = np.empty_like(row)
        new[0] = number
        new[1:] = np.minimum(row[1:] + 1, row[:-1] + (letters != ord(letter)))
        row = np.minimum.accumulate(new - columns) + columns  # insertions, one after the other
    return int(row[-1])
