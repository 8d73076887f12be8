"""Triples without a language model: names and dates in a passage's sentences, joined with its title and with each other.

This is a simple extraction for use without a language model: the predicate is the text between two names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from routerl_jax.core.types import Passage
from routerl_jax.knowledge.graph.triples import Extraction, Triple, checked_triples, normalised

_MONTH = "January|February|March|April|May|June|July|August|September|October|November|December"
_DATE = rf"\d{{1,2}} (?:{_MONTH})(?: \d{{4}})?|(?:{_MONTH}) \d{{1,2}}(?:, ?\d{{4}})?|(?:{_MONTH}) \d{{4}}"
_NUMBER = r"\d[\d,.]*\d(?:st|nd|rd|th|s|%)?|\d+(?:st|nd|rd|th|s|%)?"
_WORD = r"[^\W\d_a-zß-öø-ÿ][\w'’&-]*(?:\.(?=\w\.|[ ]?[A-Z]))?"  # begins with a capital
_JOINT = r"(?:of|the|de|di|da|von|van|der|den|la|le|du|del|al|el|bin|ibn|&)"
_NAME = rf"{_WORD}(?:[ ]{_WORD}|(?:[ ]{_JOINT}){{1,2}}[ ]{_WORD}|[ ]\d{{1,4}}(?=\W))*"
_SPAN = re.compile(rf"(?P<date>\b(?:{_DATE})\b)|(?P<name>\b{_NAME})|(?P<number>\b{_NUMBER}\b)")
_SENTENCE = re.compile(r"(?<=[.!?])(?<![ .][A-Z]\.)(?<!\b(?:Mr|Dr|St|Jr|Sr|vs|No)\.)(?<!\bMrs\.)\s+(?=[\"'(A-Z\d])")
_BRACKETS = re.compile(r"\s*\([^)]*\)\s*$")
_SPACES = re.compile(r"\s+")
# Words that begin a sentence or refer to something, but are no names.
_EMPTY = frozenset(
    """
    a an the this that these those he she it they we you i his her its their our my your him them in on at by for
    from with after before during since until when while where which who whose what as although though because but
    and or nor so yet if however then there here also both each some many most other several all no not one two
    three four five six seven eight nine ten first second third early later following according despite along
    together under over between among through to of is was are were be been being has had have do does did may might
    can could will would once initially currently today now such like unlike upon within without about
    """.split()  # noqa: SIM905 - as a list it would fill a page
)
_LONGEST = 8  # words of a predicate


class RuleExtractor:
    """Finds names (runs of capitalised words), dates and numbers by their form.

    Each one is joined with the passage's title and with the name before it in the sentence.
    """

    def extract(self, passages: Sequence[Passage], *, progress: bool = False) -> list[Extraction]:
        """One extraction per passage, in order; none fails."""
        return [_extraction(passage) for passage in passages]


def names(sentence: str) -> list[tuple[int, int, str]]:
    """(start, end, text) of the names, dates and numbers of a sentence, in order."""
    spans = []
    for match in _SPAN.finditer(sentence):
        start, end = match.span()
        if match["name"]:
            words = match["name"].split(" ")
            while words and words[0].lower() in _EMPTY:
                start += len(words.pop(0)) + 1
            if not words:
                continue
            end = start + len(" ".join(words))
        text = re.sub(r"['’]s$", "", sentence[start:end].strip(" .,'’&-"))
        if normalised(text):
            spans.append((start, end, text))
    return spans


def _extraction(passage: Passage) -> Extraction:
    title = _SPACES.sub(" ", passage.title).strip()
    subject = _BRACKETS.sub("", title) or title
    triples: list[Triple] = []
    if subject != title:
        triples.append((title, "is", subject))
    entities = dict.fromkeys([subject] if subject else [])
    for sentence in _SENTENCE.split(_SPACES.sub(" ", passage.text)):
        spans = names(sentence)
        entities |= dict.fromkeys(text for _, _, text in spans)
        triples += _triples(sentence, subject, spans)
    return Extraction(entities=tuple(entities), triples=checked_triples(triples)[0])


def _triples(sentence: str, subject: str, spans: list[tuple[int, int, str]]) -> list[Triple]:
    result: list[Triple] = []
    after = 0
    for i, (start, end, name) in enumerate(spans):
        between = _words(sentence[after:start])
        if subject and not _same(name, subject):
            result.append((subject, between or "has", name))
        last = spans[i - 1][2] if i else ""
        if last and not last[0].isdigit() and not _same(last, subject) and not _same(last, name):
            result.append((last, between or "and", name))
        after = end
    return result


def _words(text: str) -> str:
    words = [word for word in re.findall(r"[\w'’-]+", text) if word.strip("'’-")]
    return " ".join(words[-_LONGEST:])


def _same(name: str, other: str) -> bool:
    return normalised(name) == normalised(other)
