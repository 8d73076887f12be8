"""One search for several callers, in which a bad query of one caller does not harm the others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from routerl_jax.core.types import Query

T = TypeVar("T")


async def search_together(
    search: Callable[[Sequence[Query]], Awaitable[Sequence[T]]],
    parts: Sequence[Sequence[Query]],
    *,
    is_wanted: Callable[[int], bool] = lambda part: True,
    lost: type[Exception] | tuple[type[Exception], ...] = (),
) -> AsyncIterator[tuple[int, Sequence[T] | Exception]]:
    """Searches for the queries of all parts at once. If that raises, it searches for each part separately.

    Args:
      search: returns one result per query.
      parts: queries of different callers.
      is_wanted: called before a part is searched separately; False skips the part.
      lost: errors after which a separate search would not help either, such as that of a time limit.

    Yields:
      (part, its results or the error), as soon as they are known; nothing for a skipped part.
    """
    try:
        results = await search([query for part in parts for query in part])
    except Exception as error:
        failure = error
    else:
        start = 0
        for number, part in enumerate(parts):
            yield number, results[start : start + len(part)]
            start += len(part)
        return
    if len(parts) == 1 or isinstance(failure, lost):
        for number in range(len(parts)):
            yield number, failure
        return
    for number, part in enumerate(parts):
        if is_wanted(number):
            try:
                yield number, await search(part)
            except Exception as error:
                yield number, error
