"""The three common answer normalisers. They are not interchangeable: results differ by points between them."""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Callable, Iterator

from routerl_jax.core.registry import Registry

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
