"""Answer metrics: pure functions of a prediction and its accepted answers, each a float in [0, 1].

All take the gold answers (one string or a sequence of strings) and the name of a normaliser. The best gold answer counts. A
prediction of None (no answer) scores 0. A text that a normaliser would erase ("The", "A") is compared by its lower-cased words.
So an empty prediction never matches, and not every prediction covers such a gold answer. No gold answer at all, or an unknown
normaliser, is a ValueError.

Released scorers compare code points. Here texts are also compared as they look (`core.text.folded`: accents in one or two
code points, curly quotation marks, dashes, wide digits, characters without width), before any normaliser, and the better score
counts. So no score is lower than the released one. Signs of numbers stay when texts are compared as they look: "−5", with a
minus sign, is "-5" and not "5". Text in scripts without spaces between words (Chinese, Japanese, Thai, ..)
has its characters for words, as in MLQA's scorer (arXiv 1910.07475).
"""

from __future__ import annotations

import functools
import itertools
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

import numpy as np

from routerl_jax.core.registry import Registry
from routerl_jax.core.text import folded, is_unspaced, split
from routerl_jax.core.types import Example

# --- normalisers -------------------------------------------------------------------------------------------------------
# The three common answer normalisers. They are not interchangeable: results differ by points between them.

Normalizer = Callable[[str], str]
NORMALIZERS: Registry[Normalizer] = Registry("normalizer")

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DELETE_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SPACE_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation + "‘’´`", " "))
_BOOLEANS = {"True": "yes", "False": "no"}


def _squeeze(text: str) -> str:
    return " ".join(text.split())


@NORMALIZERS.register("search_r1")
def search_r1(text: str) -> str:
    """SQuAD style (Search-R1, RouteRAG, MMSearch-R1): lower case, punctuation deleted, then a/an/the, then spaces."""
    return _squeeze(_ARTICLES.sub(" ", text.lower().translate(_DELETE_PUNCTUATION)))


@NORMALIZERS.register("r1_searcher")
def r1_searcher(text: str) -> str:
    """HotpotQA style as in R1-Searcher: punctuation becomes a space before articles are removed, so "a.k.a." is "k".

    A text that is exactly `True` or `False` becomes yes or no first.
    """
    text = _BOOLEANS.get(text.strip(), text)
    return _squeeze(_ARTICLES.sub(" ", text.lower().translate(_SPACE_PUNCTUATION)))


_VQA_MARKS = ';/[]"{}()=+\\_-><@`,?!'
_VQA_ARTICLES = frozenset({"an", "the"})
_NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_VQA_NUMBERS = {word: str(number) for number, word in enumerate(_NUMBER_WORDS)}
_DIGIT_COMMA = re.compile(r"\d,\d")
# The released pattern looks for a digit before the period too, but a typo disables that: "in 1990." becomes "in 1990".
_PERIOD = re.compile(r"\.(?!\d)")
_COLON = re.compile(r":(?!\d)")

# Forms whose bare spelling is another word (she'll, it's, let's) are left out as in VQA; so is i'm, which would rewrite
# the German "im" (VQA's table has it with a capital, so it never matched the lower-cased text).
_CONTRACTION_TABLE = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't
    he'd he'd've he's how'd how'll how's isn't it'd it'd've it'll ma'am might've mightn't mightn't've
    must've mustn't needn't not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've
    somebody'd somebody'd've somebody'll somebody's someone'd someone'd've someone'll someone's
    something'd something'd've something'll that's there'd there'd've there're there's
    they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've
    when's where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't
    wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""
_CONTRACTIONS = frozenset(_CONTRACTION_TABLE.split())


def _without_apostrophes(word: str) -> Iterator[str]:
    """The spellings of a contraction without one or more of its apostrophes."""
    first, *rest = word.split("'")
    for marks in itertools.product(("", "'"), repeat=len(rest)):
        if not all(marks):
            yield first + "".join(mark + part for mark, part in zip(marks, rest))


_RESTORED = {bare: word for word in _CONTRACTIONS for bare in _without_apostrophes(word)}


@NORMALIZERS.register("vqa")
def vqa(text: str) -> str:
    """VQA / OK-VQA style as in R1-Router: zero..ten become digits, an/the are removed, "a" stays, "dont" becomes "don't".

    A punctuation mark is deleted throughout the text if it touches a space anywhere or the text has a comma between digits;
    otherwise it becomes a space. Differences from the released scorer: "none" is not 0, the table of numbers does not grow,
    periods beyond the 32nd are removed too, and words are split at spaces (without colons and outer quotes) instead of by NLTK.
    """
    text = re.sub(r"\s", " ", text).strip()
    has_digit_comma = _DIGIT_COMMA.search(text) is not None
    spaces = {
        ord(mark): "" if has_digit_comma or f"{mark} " in text or f" {mark}" in text else " " for mark in _VQA_MARKS
    }
    text = _COLON.sub(" ", _PERIOD.sub("", text.translate(spaces)))
    words = (word if word in _CONTRACTIONS else word.strip("'") for word in text.lower().split())
    words = (_VQA_NUMBERS.get(word, word) for word in words if word not in _VQA_ARTICLES)
    return _squeeze(" ".join(_RESTORED.get(word, word) for word in words))


# --- metrics -----------------------------------------------------------------------------------------------------------

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


# --- numerical answers within a range ----------------------------------------------------------------------------------
# Numerical answers within a range, as InfoSeek accepts them.

_SCALES = {"hundred": 1e2, "thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}
_NUMBER = re.compile(  # the hyphen of "18-28" is no minus sign, and the 2 of "km2" no number
    r"(?:\b(?:minus|negative) |(?<![\w.])-)?(?<![\w.])(?:(?:\d{1,3}(?:[, ]\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:e[+-]?\d+)?"
    rf"(?:[ -](?:{'|'.join(_SCALES)})s?\b)?",
    re.IGNORECASE,
)
_JOINT = re.compile(r"[^\d.,;]*?(?:-|~|\bto\b|\band\b)[^\d.,;]*")  # between the ends of a range
_LEAST_SHARED = 0.5  # share of a predicted range and the accepted one together that must be in both


def accepted_answers(example: Example, prediction: str | None) -> tuple[str, ...]:
    """The accepted answers for a prediction: the example's own, and what of the prediction lies in one of the ranges
    `[low, high]` of `metadata["answer_ranges"]` (ends included), as the prediction writes it.

    Every number in a range is accepted. The prediction as a whole is accepted, too, as in InfoSeek's released scorer, if its
    only number is ("about 170 metres", "11 million"); or if it is a range ("160-190 m", "between 160 and 190") that lies in
    the accepted one, or shares with it at least half of what both cover. So every metric treats it like an exact answer.
    Units are not converted.
    """
    ranges = example.metadata.get("answer_ranges") or ()
    text = folded(prediction or "") if ranges else ""
    matches = list(_NUMBER.finditer(text))
    values = [_value(match[0]) for match in matches]
    accepted = [match[0] for match, value in zip(matches, values) if any(low <= value <= high for low, high in ranges)]
    if len(values) == 2 and _JOINT.fullmatch(text[matches[0].end() : matches[1].start()]):
        if (scale := _scale(matches[1][0])) > 1 == _scale(matches[0][0]) and values[0] < values[1] / scale:
            values[0] *= scale  # "10 to 12 million"
        whole = any(_alike(min(values), max(values), low, high) for low, high in ranges)
    else:
        whole = len(values) == len(accepted) == 1
    return tuple(dict.fromkeys((*example.answers, *accepted, *([prediction] if prediction and whole else ()))))


def _scale(number: str) -> float:
    return next((scale for name, scale in _SCALES.items() if name in number.lower()), 1.0)


def _value(number: str) -> float:
    digits = re.search(r"[\d.][\d, ]*(?:\.\d+)?(?:e[+-]?\d+)?", number, re.IGNORECASE)
    assert digits is not None
    sign = 1 if digits.start() == 0 else -1
    return sign * float(digits[0].replace(",", "").replace(" ", "")) * _scale(number)


def _alike(first: float, last: float, low: float, high: float) -> bool:
    shared, covered = min(last, high) - max(first, low), max(last, high) - min(first, low)
    return low <= first <= last <= high or (shared > 0 and shared >= _LEAST_SHARED * covered)
