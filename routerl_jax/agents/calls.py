"""Calls of search tools. Batches run in threads of their own with a time limit, and a failure is a reply, not an exception."""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import itertools
import numbers
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
from absl import logging

from routerl_jax.agents.agent import SearchTool
from routerl_jax.agents.conversation import Request, Want
from routerl_jax.core.background import in_thread
from routerl_jax.core.secrets import masked, masked_known
from routerl_jax.core.text import replace_surrogates
from routerl_jax.core.time_limit import seconds_left, time_limit
from routerl_jax.core.types import Call, Passage, Query, Walk
from routerl_jax.knowledge.base import (
    KnowledgeBase,
    TimedResults,
    as_read,
    query_image,
    query_text,
    search_together,
    timed_search,
)
from routerl_jax.parallel import multihost


async def calls_of_all(tools: Mapping[str, SearchTool], requests: Sequence[Request], timeout: float) -> list[Call]:
    """Runs requests to any tools, in one batch per tool, number of passages and kind.

    With several processes this is a collective call: all must make the same requests. Each process runs its share, and all
    get all replies.

    Args:
      timeout: seconds; see `search_calls`.

    Returns:
      One call per request, in order.

    Raises:
      TypeError: a tool's cost is no number.
      RuntimeError: another process raised.
    """
    processes, process = jax.process_count(), jax.process_index()
    batches: dict[tuple[str, int, Want], list[int]] = {}
    for i in range(process, len(requests), processes):
        batches.setdefault((requests[i].tool, requests[i].k, requests[i].want), []).append(i)
    calls: dict[int, Call] = {}

    async def run_batch(tool: str, k: int, want: Want, indices: list[int]) -> None:
        queries = [requests[i].query for i in indices]
        calls.update(zip(indices, await search_calls(tools, tool, queries, k, timeout, want)))

    error: Exception | None = None
    try:
        await asyncio.gather(*(run_batch(*batch, indices) for batch, indices in batches.items()))
    except Exception as raised:  # exceptions raised by a tool do not come here: they are failed calls
        error = raised
    if processes > 1:
        own = {str(i): dataclasses.asdict(call) for i, call in calls.items()}
        shared = multihost.exchange([own, None if error is None else f"{type(error).__name__}: {error}"])
        if error is None and (messages := [message for _, message in shared if message is not None]):
            error = RuntimeError(f"another process failed: {messages[0]}")
        calls = {int(i): _call_from_json(fields) for part, _ in shared for i, fields in part.items()}
    if error is not None:
        raise error
    return [calls[i] for i in range(len(requests))]


def settle(future: asyncio.Future[Any], reply: Any) -> None:
    """Gives a reply, or an error, to the agent that waits for it, if it still does: it may have cancelled its request."""
    if future.done():
        return
    if isinstance(reply, Exception):
        future.set_exception(reply)
    else:
        future.set_result(reply)


def _call_from_json(fields: dict[str, Any]) -> Call:
    passages: Iterable[dict[str, Any]] = fields.pop("passages")
    walk = Walk(facts=tuple(fields.pop("facts")), nodes=tuple(fields.pop("nodes")))
    return Call(passages=tuple(Passage(**passage) for passage in passages), **walk._asdict(), **fields)


async def search_calls(
    tools: Mapping[str, SearchTool],
    tool: str,
    queries: Sequence[Query],
    k: int,
    timeout: float,
    want: Want = "passages",
) -> list[Call]:
    """Runs one batch on one tool. If it raises, its queries are tried one by one, so that one bad query harms no other.

    Args:
      k: passages per query.
      timeout: seconds after which the batch counts as failed. The tool knows this limit (core.time_limit), so that it can give
        up a little sooner and say why. If the batch fails, the single queries have the same time again, all together.
      want: see `Request`.

    Returns:
      One call per query, in order. A failed call has `error` set.

    Raises:
      TypeError: a query's cost is no number.
    """
    cost, clock = getattr(tools.get(tool), "cost", 1.0), _Clock(timeout)
    if not isinstance(cost, numbers.Real):  # NumPy's numbers pass, too
        raise TypeError(f"tool {tool!r} has cost={cost!r}; give a number, or no `cost`, which is 1")
    replies_by_index: dict[int, _Reply] = {}
    async for i, outcome in search_together(
        lambda some: _search(tools, tool, some, k, want, clock),
        [[query] for query in queries],
        is_wanted=lambda _: clock.again(),
        lost=_Late,
    ):
        if isinstance(outcome, Exception) and not isinstance(outcome, _Failed):
            raise outcome
        replies_by_index[i] = (
            _Reply(error=str(outcome), seconds=outcome.seconds) if isinstance(outcome, _Failed) else outcome[0]
        )
    reason = (
        f"TimeoutError: the batch failed, and {len(queries) - len(replies_by_index)} of its {len(queries)} queries could not "
        f"be tried by themselves within {timeout:g} s; mend the tool, or raise config.rollout.tool_timeout"
    )
    replies = [_told(replies_by_index.get(i, _Reply(error=reason))) for i in range(len(queries))]
    failures = [reply.error for reply in replies if reply.error is not None]
    if failures:
        shown = failures[0][:_LONGEST_LOGGED]
        logging.warning("tool %s failed on %d of %d queries: %s", tool, len(failures), len(queries), shown)
    return [_call(tool, query, reply, float(cost)) for query, reply in zip(queries, replies)]


_TEXTS = ("id", "title", "text")  # fields of a passage that must be strings
_MOST_LETTERS = 1 << 20  # of the passages of one query; they are kept with the episode, whatever is shown of them
_LONGEST_TITLE = 1000  # letters of a title, or an id, where even one passage has more than that
_MOST_PICTURES = 64 << 20  # bytes of the passages' pictures, in base64
_LONGEST_LOGGED = 4000  # characters of an error that are logged
_LONGEST_ERROR = 300  # characters of an error that are shown: a stack trace must not fill a conversation
_LONGEST_MESSAGE = 10_000  # .. and of those that are looked through for secrets
_TIME_SHARE = 0.95  # share of the time limit that a tool is given, so that it can give up by itself and say why


class _Reply(NamedTuple):
    """A tool's result for one query: its passages, or the reason why it has none."""

    passages: tuple[Passage, ...] = ()
    error: str | None = None
    seconds: float = 0.0
    walk: Walk = Walk()


class _Failed(Exception):
    """A batch failed. `seconds` is the time per query: the batch's time divided by its number of queries."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class _Late(_Failed):
    """A batch failed because its time was up."""


class _Clock:
    """The time limit of a batch, and the one of its single queries if the batch fails."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._ends: float | None = None  # end of the time for single queries; None while the batch runs

    def again(self) -> bool:
        """Whether one more query may be tried by itself. The first call starts the time of the single queries."""
        if self._ends is None:
            self._ends = time.perf_counter() + self.timeout
        return time.perf_counter() < self._ends

    @property
    def remaining(self) -> float:
        """Seconds for the next search."""
        return self.timeout if self._ends is None else self._ends - time.perf_counter()


async def _search(
    tools: Mapping[str, SearchTool], tool: str, queries: Sequence[Query], k: int, want: Want, clock: _Clock
) -> list[_Reply]:
    """Searches a batch; per query its passages, or the reason why this query alone has none.

    Raises:
      _Failed: the tool raised, or did not return a list with one result per query.
    """
    if tool not in tools:
        return [_Reply(error=f"there is no tool {tool!r}")] * len(queries)
    started, limit = time.perf_counter(), clock.remaining
    reads = getattr(tools[tool], "reads", ())
    read = list(queries) if want == "pictures" else [as_read(query, reads) for query in queries]

    def part() -> float:
        return (time.perf_counter() - started) / len(queries)

    def work() -> list[_Reply]:
        with time_limit(_TIME_SHARE * limit):
            try:
                reply, seconds = timed_search(_request_function(tools[tool], want), read, k)
                results = _checked(tool, reply, len(queries))
                walks = reply.walks if isinstance(reply, TimedResults) else [Walk()] * len(results)
                return [result._replace(seconds=s, walk=walk) for result, s, walk in zip(results, seconds, walks)]
            except BaseException as error:  # SystemExit of a library, a Rust panic: it is the tool's thread that ends
                kind = _Failed if seconds_left() else _Late
                raise kind(f"{type(error).__name__}: {error}", part()) from error

    working = asyncio.ensure_future(in_thread(work, f"tool-{tool}"))
    try:
        # wait_for would drop a reply that came in time while the loop rested (attempts that are under way during an update)
        await asyncio.wait([working], timeout=limit)
        if working.done():
            return working.result()
    finally:
        working.cancel()
    raise _Late(f"TimeoutError: no reply within {limit:g} s", part())


def _request_function(tool: SearchTool, want: Want) -> Callable[[Any, int], Any]:
    """The function that answers requests of a kind: the tool's search, its listing without pictures, or its pictures."""
    if want == "passages" or not getattr(tool, "has_pictures", False):
        return tool.search if want != "pictures" else lambda ids, k: [[] for _ in ids]
    giver = cast(KnowledgeBase, tool)
    if want == "listing":
        return giver.listing.search
    return lambda ids, k: [
        [Passage(id=id, title="", text="", image=image)] for id, image in zip(ids, giver.pictures(ids))
    ]


def _told(reply: _Reply) -> _Reply:
    """The reply with its error as it is shown: short, without secrets, and with whole letters."""
    if reply.error is None:
        return reply
    error = masked(replace_surrogates(reply.error[:_LONGEST_MESSAGE]))
    return reply._replace(error=error if len(error) <= _LONGEST_ERROR else f"{error[:_LONGEST_ERROR]} ..")


def _call(tool: str, query: Query, reply: _Reply, cost: float) -> Call:
    try:
        image = query_image(query)
    except ValueError:  # the picture is missing; the tool's reply already says so
        image = ""
    return Call(
        tool=tool,
        query=query_text(query),
        image=image,
        passages=reply.passages,
        error=reply.error,
        seconds=reply.seconds,
        cost=cost,
        **reply.walk._asdict(),
    )


def _checked(tool: str, reply: Any, count: int) -> list[_Reply]:
    """Checks a tool's reply to `count` queries. A result that is no list of passages becomes a failure.

    Raises:
      TypeError: the reply is no list.
      ValueError: the reply does not have `count` results.
    """
    if not isinstance(reply, list | tuple):
        raise TypeError(f"tool {tool!r} gave {type(reply).__name__} instead of a list of results")
    if len(reply) != count:
        raise ValueError(f"tool {tool!r} gave {len(reply)} results for {count} queries")
    results: list[_Reply] = []
    for result in reply:
        if not isinstance(result, list | tuple):
            fault = f"{type(result).__name__} instead of a list of Passage"
        elif wrong := [type(item).__name__ for item in result if not isinstance(item, Passage)]:
            fault = f"a list with {wrong[0]} in it instead of Passage"
        elif odd := [
            f"{name}={text!r}" for item in result for name in _TEXTS if not isinstance(text := getattr(item, name), str)
        ]:
            fault = f"a Passage with {odd[0]}, which is no string"
        elif (pictures := sum(len(str(item.image)) for item in result)) > _MOST_PICTURES:
            fault = (
                f"pictures of {pictures:,} bytes for one query, of which {_MOST_PICTURES:,} may be: let it give fewer"
            )
        elif scores := [item.score for item in result if not isinstance(item.score, numbers.Real)]:
            fault = f"a Passage with score={scores[0]!r}, which is no number"
        else:
            results.append(_Reply(tuple(map(_sanitised, _within_bounds(tool, result)))))
            continue
        results.append(_Reply(error=f"tool {tool!r} gave {fault}"))
    return results


def _within_bounds(tool: str, passages: Sequence[Passage]) -> Sequence[Passage]:
    """The passages within _MOST_LETTERS, best first. What is beyond is left out, and this is said; of the first one, a
    beginning stays."""
    ends = list(itertools.accumulate(len(item.id) + len(item.title) + len(item.text) for item in passages))
    if not ends or ends[-1] <= _MOST_LETTERS:
        return passages
    kept = passages[: bisect.bisect_right(ends, _MOST_LETTERS)]
    if not kept:
        best = passages[0]
        title, text = best.title[:_LONGEST_TITLE], best.text[: _MOST_LETTERS - 2 * _LONGEST_TITLE]
        kept = [dataclasses.replace(best, id=best.id[:_LONGEST_TITLE], title=title, text=f"{text} ..")]
    logging.log_first_n(
        logging.WARNING,
        "tool %s gave %d letters for one query; the first %d are kept, as no context holds more (%d of %d passages)",
        20,
        *(tool, ends[-1], _MOST_LETTERS, len(kept), len(passages)),
    )
    return kept


def _sanitised(passage: Passage) -> Passage:
    """The passage with text that every tokenizer takes (no lone surrogates) and without secrets that were read for a tool, and
    a score that JSON takes (no NumPy number)."""
    texts = {name: getattr(passage, name) for name in _TEXTS}
    cleaned = {name: masked_known(replace_surrogates(text)) for name, text in texts.items()}
    if cleaned == texts and type(passage.score) is float:
        return passage
    return dataclasses.replace(passage, **cleaned, score=float(passage.score))
