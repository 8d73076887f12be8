"""Counts the work of code that reads texts: steps of its regular expressions, as a backtracking matcher takes them, and lines
of Python. Counts are the same on every machine, so tests of how work grows need no clock."""

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator
from re import _compiler, _constants, _parser  # type: ignore[attr-defined]
from types import FrameType
from typing import Any

_METHODS = ("search", "match", "fullmatch", "findall", "finditer", "sub", "split")
_DEPTH = 200_000


def growth(work: Callable[[str], Any], text_of: Callable[[int], str], sizes: tuple[int, int] = (8, 32)) -> float:
    """Steps for the longer text divided by those for the shorter one. Of linear work it is about the ratio of the sizes."""
    counted, ends = _Count(), [0]
    with _counting(counted):
        for size in sizes:
            work(text_of(size))
            ends.append(counted.steps)
    return (ends[2] - ends[1]) / ends[1]


class _Count:
    def __init__(self) -> None:
        self.steps = 0

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if "routerl_jax" not in frame.f_code.co_filename:
            return None
        self.steps += event == "line"
        return self.trace


@contextlib.contextmanager
def _counting(count: _Count) -> Iterator[None]:
    """Replaces the patterns of the package's modules and classes, and the functions of `re`, by ones that count."""
    replaced = list(_patterns(sum(name.startswith("routerl_jax") for name in sys.modules)))
    for holder, name, pattern in replaced:
        setattr(holder, name, _Counting(pattern, count))
    for name in _METHODS:
        replaced.append((re, name, getattr(re, name)))
    limit, real_compile = sys.getrecursionlimit(), re.compile

    def counting(name: str) -> Callable[..., Any]:
        def call(pattern: Any, *args: Any, flags: int = 0) -> Any:
            at = 2 if name == "sub" else 1
            *args, flags = args if len(args) > at else (*args, flags)
            return getattr(_Counting(real_compile(pattern, flags), count), name)(*args)

        return call

    for name in _METHODS:
        setattr(re, name, counting(name))
    tracing = sys.gettrace()
    sys.setrecursionlimit(_DEPTH)
    sys.settrace(count.trace)
    try:
        yield
    finally:
        sys.settrace(tracing)
        sys.setrecursionlimit(limit)
        for holder, name, item in replaced:
            setattr(holder, name, item)


@functools.lru_cache(1)
def _patterns(modules: int) -> list[tuple[Any, str, Any]]:
    """The patterns that modules and classes of the package hold, with their holders; anew if more `modules` are imported."""
    holders = [module for name, module in list(sys.modules.items()) if name.startswith("routerl_jax")]
    holders += [item for module in holders for item in vars(module).values() if isinstance(item, type)]
    ours = {id(holder): holder for holder in holders if "routerl_jax" in getattr(holder, "__module__", holder.__name__)}
    return [
        (holder, name, item)
        for holder in ours.values()
        for name, item in vars(holder).items()
        if isinstance(item, re.Pattern)
    ]


class _Counting:
    """A pattern that gives the results of `re`, and counts the steps to them."""

    def __init__(self, pattern: re.Pattern[str], count: _Count) -> None:
        self._pattern, self._count = pattern, count
        self._groups: dict[int, tuple[int, int]] = {}

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._pattern, name)
        if name not in _METHODS:
            return method

        def call(*args: Any) -> Any:
            text, *span = args[1:2] if name == "sub" else args
            tracing = sys.gettrace()
            sys.settrace(None)
            try:
                self._walk(name, text[: span[1]] if len(span) > 1 else text, span[0] if span else 0)
            finally:
                sys.settrace(tracing)
            return method(*args)

        return call

    def _walk(self, name: str, text: str, at: int) -> None:
        """Takes the steps of a call: an attempt at every position up to the match, or the end."""
        items = _parsed(self._pattern)
        while at <= len(text):
            self._groups.clear()
            if (end := self._attempt(items, text, at, name == "fullmatch")) is not None:
                if name in ("search", "match", "fullmatch"):
                    return
                at = max(end, at + 1)
            elif name in ("match", "fullmatch"):
                return
            else:
                at += 1

    def _attempt(self, items: list[Any], text: str, at: int, whole: bool) -> int | None:
        """The end of a match that begins here."""
        ends: list[int] = []
        self._sequence(items, 0, text, at, lambda j: (not whole or j == len(text)) and _put(ends, j))
        return ends[0] if ends else None

    def _sequence(self, items: list[Any], n: int, text: str, i: int, then: Callable[[int], bool]) -> bool:
        self._count.steps += 1
        if n == len(items):
            return then(i)
        operation, value = items[n]

        def rest(j: int) -> bool:
            return self._sequence(items, n + 1, text, j, then)

        if operation is _constants.SUBPATTERN:
            group, _, _, inner = value

            def closed(j: int) -> bool:
                if group is not None:
                    self._groups[group] = (i, j)
                return rest(j)

            return self._sequence(list(inner), 0, text, i, closed)
        if operation is _constants.BRANCH:
            for branch in value[1]:  # noqa: SIM110 - `any` would count against the limit of nested calls in C
                if self._sequence(list(branch), 0, text, i, rest):
                    return True
            return False
        if operation in (_constants.ASSERT, _constants.ASSERT_NOT):
            direction, inner = value
            begin = i if direction > 0 else i - inner.getwidth()[0]
            holds = begin >= 0 and self._sequence(list(inner), 0, text, begin, lambda j: direction > 0 or j == i)
            return holds == (operation is _constants.ASSERT) and rest(i)
        if operation is _constants.GROUPREF:
            begin, end = self._groups.get(value, (0, 0))
            return text.startswith(text[begin:end], i) and rest(i + end - begin)
        if operation in (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT):
            return self._repeat(operation, value, text, i, rest)
        if operation is _constants.AT:
            return _compiled(self._pattern.flags, items[n]).match(text, i) is not None and rest(i)
        return _compiled(self._pattern.flags, items[n]).match(text, i, i + 1) is not None and rest(i + 1)

    def _repeat(self, operation: Any, value: Any, text: str, i: int, rest: Callable[[int], bool]) -> bool:
        least, most, inner = value
        ends = [i]

        def once(j: int) -> bool:
            found: list[int] = []
            return (
                self._sequence(list(inner), 0, text, j, lambda end: _put(found, end))
                and found[0] > j
                and _put(ends, found[0])
            )

        # what is repeated here matches in one way at a place, so that its ends are a list
        if operation is _constants.MIN_REPEAT:
            while True:
                if len(ends) > least and rest(ends[-1]):
                    return True
                if len(ends) > most or not once(ends[-1]):
                    return False
        while len(ends) <= most and once(ends[-1]):
            pass
        if operation is _constants.POSSESSIVE_REPEAT:
            return len(ends) > least and rest(ends[-1])
        while len(ends) > least:
            if rest(ends.pop()):
                return True
            self._count.steps += 1
        return False


@functools.cache
def _parsed(pattern: re.Pattern[str]) -> list[Any]:
    return list(_parser.parse(pattern.pattern, pattern.flags))


_SINGLE: dict[int, tuple[Any, re.Pattern[str]]] = {}  # by the identity of an item, which is kept


def _compiled(flags: int, item: Any) -> re.Pattern[str]:
    """The pattern of one item, for one letter or one place."""
    if id(item) not in _SINGLE:
        state = _parser.State()
        state.flags, state.str = flags, ""
        _SINGLE[id(item)] = item, _compiler.compile(_parser.SubPattern(state, [item]), flags)
    return _SINGLE[id(item)][1]


def _put(ends: list[int], end: int) -> bool:
    ends.append(end)
    return True
