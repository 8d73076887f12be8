"""Cassettes record every tool call and its reply on a tape, so that a run can be repeated without the tool.

A tape is a JSON Lines file with `{tool, query, k, cost, seconds, passages, walk}` or
`{tool, query, k, cost, error: {type, message}}` per line. `seconds` is the time of the query alone (0 if the tape has none),
and `walk` its walk over a graph (absent if there was none). A call is identified by tool, query (`query.query_key`) and k.
Equal calls get equal replies, in whatever order they come.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args

from routerl_jax.core.files import parse_json
from routerl_jax.core.types import Passage, Query, Walk
from routerl_jax.knowledge.base import TimedResults, as_read, query_key, query_text, timed_search

Mode = Literal["record", "replay", "auto"]
_Key = tuple[str, str, int]
_NO_WALK = Walk()
_ALL = frozenset({"text", "image", "question", "url"})


class Failure(NamedTuple):
    """An exception that a tool raised."""

    type: str
    message: str

    def exception(self) -> Exception:
        """A RuntimeError under the original class name and with its message."""
        return type(self.type, (RuntimeError,), {})(self.message)


class Reply(NamedTuple):
    """A recorded reply: the passages or the failure, the seconds of the search (0: unknown), and its walk over a graph."""

    content: list[Passage] | Failure
    seconds: float = 0.0
    walk: Walk = _NO_WALK


class Searchable(Protocol):
    """Anything with the `search` of a knowledge base."""

    def search(self, queries: Sequence[Any], k: int) -> list[list[Passage]]:
        """Up to k passages per query, best first."""
        ...


class Cassette:
    """A tape of tool calls. Safe to use from several threads; several processes need a tape each.

    Args:
      path: the tape, usually `*.jsonl`.
      mode: "record" starts a new tape. "replay" answers from the tape alone. "auto" answers from the tape if it can, and
        otherwise asks the tool and records the reply. A repeated call gets the recorded reply in all modes.
      timeout: seconds. A reply that takes longer is recorded and raised as a TimeoutError. Set it to the driver's
        `tool_timeout`: the driver has given up by then, so a replay of the reply itself would change the run.

    An exception of the tool is recorded if the call had one query; so is a wrong number of results. A timeout is always
    recorded. A replay raises the error again, as a RuntimeError under the original class name and with its message. A call that
    never returns is not on the tape. Each reply is on the tape before it is returned.

    Raises:
      ValueError: the mode is unknown, the tape to replay is missing, the tape to record exists already, or the tape is damaged.
    """

    def __init__(self, path: str | pathlib.Path, mode: Mode = "auto", *, timeout: float = math.inf) -> None:
        self.path = pathlib.Path(path).expanduser()
        self.mode = mode
        self.timeout = timeout
        self._replies: dict[_Key, Reply] = {}
        self._costs: dict[str, float] = {}
        self._lock = threading.Lock()
        if mode not in get_args(Mode):
            raise ValueError(f"mode={mode!r} is not one of {', '.join(get_args(Mode))}")
        has_recording = self.path.is_file() and self.path.stat().st_size > 0
        if mode == "replay" and not self.path.is_file():
            raise ValueError(f"{self.path} does not exist: there is nothing to replay. Record it first (mode='record')")
        if mode == "record" and has_recording:
            raise ValueError(f"{self.path} holds a recording. Use mode='auto' to go on with it, or another path")
        if has_recording:
            self._read()
        if mode != "replay":
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab")

    def __len__(self) -> int:
        return len(self._replies)

    def __contains__(self, key: _Key) -> bool:
        return key in self._replies

    def wrap(self, name: str, kb: Searchable | None = None) -> RecordedTool:
        """The tool `name` behind this tape. `kb` may be None in replay mode."""
        if kb is None and self.mode != "replay":
            raise ValueError(f"tool {name!r}: mode={self.mode!r} needs the knowledge base that it records")
        return RecordedTool(self, name, kb)

    def reply(self, key: _Key) -> Reply | None:
        """The recorded reply for (tool, query, k); None if there is none."""
        return self._replies.get(key)

    def cost(self, name: str) -> float:
        """The recorded cost of a query of the tool `name`; 1 if nothing was recorded."""
        return self._costs.get(name, 1.0)

    def record(self, key: _Key, reply: Reply, cost: float = 1.0) -> None:
        """Writes a reply to the tape, unless it already has one for the same call."""
        fields: dict[str, Any] = {"tool": key[0], "query": key[1], "k": key[2], "cost": cost}
        if isinstance(reply.content, Failure):
            fields["error"] = reply.content._asdict()
        else:
            fields["seconds"] = reply.seconds
            fields["passages"] = [dataclasses.asdict(passage) for passage in reply.content]
            if any(reply.walk):
                fields["walk"] = reply.walk._asdict()
        with self._lock:
            if key not in self._replies:
                self._file.write(json.dumps(fields).encode() + b"\n")
                self._costs.setdefault(key[0], cost)
                self._file.flush()
                self._replies[key] = reply

    def close(self) -> None:
        """Closes the tape. Nothing can be recorded after that."""
        if self.mode != "replay":
            self._file.close()

    def _read(self) -> None:
        lines = self.path.read_bytes().splitlines(keepends=True)
        if not lines[-1].endswith(b"\n"):  # the process was killed while it wrote this line
            torn = lines.pop()
            if self.mode != "replay":
                os.truncate(self.path, self.path.stat().st_size - len(torn))
        for number, line in enumerate(lines, 1):
            try:
                fields = parse_json(line)
                key = (str(fields["tool"]), str(fields["query"]), int(fields["k"]))
                if "error" in fields:
                    content = Failure(**fields["error"])
                else:
                    content = [Passage(**passage) for passage in fields["passages"]]
                walk = Walk.from_json(fields.get("walk", {}))
                reply = Reply(content, float(fields.get("seconds", 0.0)), walk)
                self._costs.setdefault(key[0], float(fields.get("cost", 1.0)))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                raise ValueError(f"{self.path}, line {number}: not a recorded call ({error!r}). Record anew") from error
            self._replies.setdefault(key, reply)


class RecordedTool:
    """A search tool behind a cassette."""

    def __init__(self, cassette: Cassette, name: str, kb: Searchable | None) -> None:
        self.name = name
        self._cassette = cassette
        self._kb = kb
        # unknown if there is only the tape: its entries show whether the user's question or the picture's URL mattered
        self.reads = _ALL if kb is None else frozenset(getattr(kb, "reads", {"text", "image"}))
        self.cost = cassette.cost(name) if kb is None else float(getattr(kb, "cost", 1.0))

    def search(self, queries: Sequence[Query], k: int = 5) -> TimedResults:
        """Like `search` of a knowledge base. Raises LookupError with tool and query if a replayed tape lacks the reply."""
        queries = [self._as_recorded(query, k) for query in queries]
        keys = [query_key(query) for query in queries]
        unknown = {key: query for key, query in zip(keys, queries) if (self.name, key, k) not in self._cassette}
        if unknown:
            self._ask(unknown, k)
        replies = [self._cassette.reply((self.name, key, k)) or Reply([]) for key in keys]
        results = []
        for content, _, _ in replies:
            if isinstance(content, Failure):
                raise content.exception()
            results.append(list(content))
        return TimedResults(results, (reply.seconds for reply in replies), (reply.walk for reply in replies))

    def _as_recorded(self, query: Query, k: int) -> Query:
        """The query reduced to the parts on which the reply depends."""
        if self._kb is not None:
            return as_read(query, self.reads)
        variants = (as_read(query, reads) for reads in (_ALL, {"question"}, {"url"}))
        recorded = (variant for variant in variants if (self.name, query_key(variant), k) in self._cassette)
        return next(recorded, as_read(query, ()))

    def _ask(self, unknown: dict[str, Query], k: int) -> None:
        keys, queries = list(unknown), list(unknown.values())
        if self._kb is None or self._cassette.mode == "replay":
            raise LookupError(
                f"{self._cassette.path} holds no reply of tool {self.name!r} to query {query_text(queries[0])!r} (k={k}). "
                f"The run differs from the recorded one; use mode='auto' to record what is missing"
            )
        started = time.monotonic()
        try:
            results, seconds = timed_search(self._kb.search, queries, k)
            if len(results) != len(queries):
                raise ValueError(f"tool {self.name!r} gave {len(results)} results for {len(queries)} queries")
        except Exception as error:
            self._check_time(started, keys, k)
            if len(queries) == 1:
                failure = Failure(type(error).__name__, str(error))
                self._cassette.record((self.name, keys[0], k), Reply(failure), self.cost)
            raise
        self._check_time(started, keys, k)
        walks = results.walks if isinstance(results, TimedResults) else [_NO_WALK] * len(results)
        for key, passages, elapsed, walk in zip(keys, results, seconds, walks):
            self._cassette.record((self.name, key, k), Reply(list(passages), elapsed, walk), self.cost)

    def _check_time(self, started: float, keys: list[str], k: int) -> None:
        """Records and raises a timeout of all queries if they took too long."""
        if time.monotonic() - started > self._cassette.timeout:
            failure = Failure("TimeoutError", f"no reply within {self._cassette.timeout:g} s")
            for key in keys:
                self._cassette.record((self.name, key, k), Reply(failure), self.cost)
            raise failure.exception()
