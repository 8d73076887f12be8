"""Questions about Atlas's pages. Some need a small view of a page, some a closer look, some two pages.

    coarse    whose flag a page shows, or which of its bars is the longest
    fine      a value in small print
    two_page  which of two countries has more of something: two searches, and two values in small print

The three types take turns. The questions are about the countries of a split of Atlas. Each names the page by its country and
topic, or by a fact on it, because a search finds only titles.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from routerl_jax.core.types import Example
from routerl_jax.data.atlas import known, world
from routerl_jax.data.atlas.pages import FACTS, PRINT, TOPICS, Box, Fact, Page, Topic, number, page, printed

Type = Literal["coarse", "fine", "two_page"]
Make = Callable[[int], Example]

TYPES: tuple[Type, ...] = ("coarse", "fine", "two_page")
FLAG = (
    "Whose flag is on the page about the {topic} of {name}?",
    "{name}, {topic}: which country's flag is shown there?",
)
BAR = (
    "Which colour is the longest bar on the page about the {topic} of {name}?",
    "{name}, {topic}: what is the colour of the longest bar?",
)
VALUE = ("What is the {noun} of {name}?", "{name}: what is its {noun}?")
MORE = ("Which has the greater {noun}, {one} or {other}?", "{one} or {other}: whose {noun} is greater?")
_PAIRS = 4  # for every fact, the number of countries that each country is compared with


def page_questions(split: world.Split, count: int, start: int = 0, print_size: int = PRINT) -> list[Example]:
    """Questions; the three types take turns. They are the same in every call, and all are different.

    `metadata` has the `type`, the `topic`, the `relation` (key of the fact, "flag" or "bar"), `supporting` and
    `supporting_titles` (the gold pages), `boxes` (by page what must be seen there: left, top, right, bottom in
    pixels of the picture), `print` (`print_size`) and, as other questions of Atlas, `entities`.

    Args:
      start: index of the first question.
      print_size: print size of the pages (`pages.page`). It moves the plates, and changes nothing else.

    Raises:
      ValueError: `count` or `start` is no multiple of three, or there are fewer questions.
    """
    each = len(TYPES)
    if count % each or start % each:
        wrong = f"{count} questions, the first at {start}, are no {each} equal types"
        raise ValueError(f"{wrong}; ask for multiples of {each}")
    indices = range(start // each, (start + count) // each)
    makers = _makers(split)
    most = min(map(len, makers.values()))
    if indices.stop > most:
        raise ValueError(f"Atlas's {split} split has {each * most} questions about pages, fewer than {start + count}")
    return [makers[kind][index](print_size) for index in indices for kind in TYPES]


@functools.cache
def _makers(split: world.Split) -> dict[Type, list[Make]]:
    """All questions of each type, in the order of a hash. Every second coarse question is about a flag."""
    names = [name for name, entity in known.countries().items() if entity.split == split]
    about = list(itertools.product(names, TOPICS, (0, 1)))
    flags = [functools.partial(_flag, *arguments) for arguments in about]
    bars = [functools.partial(_bar, *arguments) for arguments in about]
    values = [
        functools.partial(_value, name, fact, wording)
        for name in names
        for fact in FACTS.values()
        for wording in (0, 1)
        if _is_unique(name, fact)
    ]
    pairs = [
        functools.partial(_more, *arguments)
        for fact in FACTS.values()
        if not fact.whole
        for arguments in _pairs(names, fact)
    ]
    coarse = itertools.chain.from_iterable(zip(_shuffled(flags), _shuffled(bars), strict=True))
    return {"coarse": list(coarse), "fine": _shuffled(values), "two_page": _shuffled(pairs)}


def _shuffled(makers: Sequence[functools.partial[Example]]) -> list[Make]:
    return sorted(makers, key=lambda make: zlib.crc32(f"pages/{make.func.__name__}/{_group_name(make.args)}".encode()))


def _group_name(parts: Sequence[object]) -> str:
    return "/".join(part.key if isinstance(part, Fact) else str(part) for part in parts)


def _is_unique(country: str, fact: Fact) -> bool:
    """Whether the fact's plate has a value that no other plate of the page has."""
    texts = [plate.text for plate in page(country, fact.topic).plates]
    return texts.count(value := printed(country, fact.key)) == 1 and bool(value)


def _pairs(names: Sequence[str], fact: Fact) -> list[tuple[str, str, Fact, int]]:
    """Pairs of countries with different values, in the order of a hash. Their ranks are a tenth to a third of all countries
    apart."""
    ordered = sorted(
        (name for name in names if _is_unique(name, fact)), key=lambda name: (number(name, fact.key) or 0.0, name)
    )
    pairs = []
    for rank, low in enumerate(ordered):
        rng = np.random.default_rng([12, zlib.crc32(f"{fact.key}/{low}".encode())])
        apart = range(max(1, len(ordered) // 10), len(ordered) // 3 + 1)
        for step in sorted(rng.permutation(apart)[:_PAIRS].tolist()):
            if rank + step < len(ordered) and printed(low, fact.key) != printed(high := ordered[rank + step], fact.key):
                first, second = (low, high) if rng.random() < 0.5 else (high, low)
                pairs.append((first, second, fact, int(rng.integers(2))))
    return pairs


def _flag(country: str, topic: Topic, wording: int, print_size: int) -> Example:
    shown = page(country, topic, print_size)
    text = FLAG[wording].format(topic=topic, name=country)
    return _question("coarse", "flag", text, shown.flag, [(shown, shown.flag_box)])


def _bar(country: str, topic: Topic, wording: int, print_size: int) -> Example:
    shown = page(country, topic, print_size)
    text = BAR[wording].format(topic=topic, name=country)
    return _question("coarse", "bar", text, shown.bars[0], [(shown, shown.bars_box)])


def _value(country: str, fact: Fact, wording: int, print_size: int) -> Example:
    shown = page(country, fact.topic, print_size)
    plate = shown.plate(fact.key)
    return _question(
        "fine", fact.key, VALUE[wording].format(noun=fact.noun, name=country), plate.text, [(shown, plate.box)]
    )


def _more(first: str, second: str, fact: Fact, wording: int, print_size: int) -> Example:
    pages = [page(name, fact.topic, print_size) for name in (first, second)]
    text = MORE[wording].format(noun=fact.noun, one=first, other=second)
    answer = max(first, second, key=lambda name: number(name, fact.key) or 0.0)
    return _question("two_page", fact.key, text, answer, [(item, item.plate(fact.key).box) for item in pages])


def _question(kind: Type, relation: str, text: str, answer: str, gold: Sequence[tuple[Page, Box]]) -> Example:
    return Example(
        id=f"pages/{text}",
        question=text,
        answers=(answer,),
        metadata={
            "type": kind,
            "topic": gold[0][0].topic,
            "relation": relation,
            "supporting": [gold_page.id for gold_page, _ in gold],
            "supporting_titles": [gold_page.title for gold_page, _ in gold],
            "boxes": {gold_page.id: list(box) for gold_page, box in gold},
            "print": gold[0][0].print_size,
            "entities": [gold_page.country for gold_page, _ in gold],
        },
    )
