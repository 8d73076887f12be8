"""Requests to web services, with bounded time, size, concurrency and retries. No message contains a key."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import email.utils
import functools
import json
import random
import re
import time
import urllib.parse
import zlib
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from routerl_jax.core.background import shared_loop
from routerl_jax.core.files import parse_json
from routerl_jax.core.packages import needs
from routerl_jax.core.secrets import MASK, masked
from routerl_jax.services import faults

T = TypeVar("T")

# --- what a reply asks of its client -----------------------------------------------------------------------------------
# What an HTTP reply asks of its client: to try again, when, at another path, or to read an error under status 200.

# Timeouts, overload, and gateway failures (52x: Cloudflare).
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})
LONGEST_PAUSE = 60.0  # seconds; if a server asks for a longer pause, it is still asked again after this
MOST_REDIRECTS = 3  # of one request

# What errors are called in `code`, `type` or `status`, and the HTTP status that each stands for. The first that fits counts.
_NAMES = (
    (402, r"insufficient.?(quota|credit|balance|fund)|not enough credit|payment|billing.(hard|not|err)"),
    (429, r"rate.?limit|too.?many.?requests|throttl|resource.?exhausted|quota.?exceeded"),
    (401, r"api.?key|unauthori[sz]ed|unauthenticated|authentication"),
    (403, r"permission|forbidden|access.?denied"),
    (404, r"not.?found"),
    (503, r"overload|unavailable|capacity|busy|time.?d?.?out|server.?error|internal|gateway|api.?error|upstream"),
    (400, r"invalid|bad.?request|unsupported|context.?length|content.?(policy|filter)|too.?(long|large)|validation"),
)
_UNNAMED = 502  # an error without a name that is known: it may be passing
_CODES = ("type", "code", "status", "status_code", "statusCode")
_BESIDE = ("error", "errors", "detail", "metadata")  # keys that hold no results


class ReplyError(NamedTuple):
    """An error that a reply carries.

    Attributes:
      status: the HTTP status that it stands for.
      fault: its kind (`services.faults`), where it is not that of the status; then the reply is no error in itself, but of no
        use.
    """

    status: int
    message: str
    fault: str = ""


def retry_after(header: str) -> float | None:
    """Seconds to wait by a Retry-After header, which is a number or a date (RFC 9110, 10.2.3), at most LONGEST_PAUSE; None if
    it is neither."""
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
        except (TypeError, ValueError, OverflowError):
            return None
    return min(max(0.0, seconds), LONGEST_PAUSE)


def may_pass(status: int, message: str) -> bool:
    """Whether the same request may succeed later. Spent money has the status of a rate limit at OpenAI, but does not pass."""
    return status in RETRIED and not re.search("insufficient.?quota", message, re.IGNORECASE)


def error_of(reply: Any) -> ReplyError | None:
    """The error of a parsed JSON reply whose HTTP status says success; None if it carries none.

    That is a value under `error`; or, if nothing else in the reply holds anything, one under `errors` or `detail`, or a
    `message` beside a code of 400 or more, an error's name, or another sign of failure. A list around the one object is
    ignored. An error counts as 502, which is tried again, if its code and name say nothing that is known.
    """
    if isinstance(reply, list) and len(reply) == 1:
        reply = reply[0]
    if not isinstance(reply, dict):
        return None
    error = reply.get("error")
    if not error and not any(
        value and isinstance(value, list | dict) and key not in _BESIDE for key, value in reply.items()
    ):
        failed = (
            "error" in (reply.get("status"), reply.get("object"), reply.get("type")) or reply.get("success") is False
        )
        said, code = reply.get("message") or reply.get("msg"), reply.get("code")
        failed |= (_number(reply) or 0) >= 400 or (isinstance(code, str) and _stands_for(code) is not None)
        error = reply.get("errors") or reply.get("detail") or (said if failed else None)
    if error is True:
        error = reply.get("message") or "an error without a message"
    while isinstance(error, list) and error:
        error = error[0]
    if not error:
        return None
    fields = error if isinstance(error, dict) else {"message": str(error)}
    text = str(next((fields[key] for key in ("message", "msg", "detail") if fields.get(key)), fields))
    message = " ".join(text.split())[:300]
    fields = {**{key: reply.get(key) for key in _CODES}, **fields}
    names = " ".join(str(fields[key]) for key in _CODES if isinstance(fields.get(key), str))
    number = _number(fields) or 0
    if number >= 400 and may_pass(429, names):
        return ReplyError(number, message)
    return ReplyError(_stands_for(names) or _stands_for(text) or _UNNAMED, message)


def _stands_for(text: str) -> int | None:
    """The HTTP status of an error's name."""
    return next((status for status, pattern in _NAMES if re.search(pattern, text, re.IGNORECASE)), None)


def _number(fields: Mapping[str, Any]) -> int | None:
    """The HTTP status among the codes of an error, as a number or a string of digits."""
    codes = (str(fields.get(key)) for key in _CODES)
    return next((int(code) for code in codes if re.fullmatch(r"[1-5]\d\d", code)), None)


def redirect_target(url: str, status: int, location: str) -> str:
    """Where a redirect leads, as a whole URL; "" if the reply is none."""
    return urllib.parse.urljoin(url, location) if 300 <= status < 400 and location else ""


def may_follow(url: str, status: int, target: str) -> bool:
    """Whether a redirect keeps method and body (307, 308) and scheme, host and port, so that no key is sent elsewhere."""
    return status in (307, 308) and _origin(url) == _origin(target) is not None


def _origin(url: str) -> tuple[str, str, int | None] | None:
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return None
    return (parts.scheme, parts.hostname, port) if parts.hostname else None


ACCEPTED = "gzip, deflate"  # Accept-Encoding of all clients; `decompressed` reads no other compression
_PIECE = 1 << 16  # most bytes that are decompressed at once
_MOST_VALUES = 2_000_000  # most values of a JSON text: an empty list takes two bytes there, and 56 in memory
_LARGE = 1 << 18  # bytes of a reply that is parsed on a thread


class Damaged(ValueError):
    """The compressed data of a reply are damaged. Another attempt may help."""


async def decompressed(chunks: AsyncIterable[bytes], encoding: str) -> AsyncIterator[bytes]:
    """A reply's body in pieces. A compressed one grows in small pieces, so that whoever counts them may stop in time.

    Args:
      chunks: the body as it was sent: `aiter_raw()` of httpx2, the content of an aiohttp session from `open_session`.
      encoding: the reply's Content-Encoding.

    Raises:
      Damaged: the data are damaged, or end too early.
      ValueError: the compression is none of ACCEPTED.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        async for chunk in chunks:
            yield chunk
        return
    if name not in ("gzip", "x-gzip", "deflate"):
        raise ValueError(
            f"the reply is compressed by {name[:40]!r}, which was not asked for (Accept-Encoding: {ACCEPTED})"
        )
    inflater: Any = None
    try:
        async for data in chunks:
            while data:
                if inflater is not None and inflater.eof and data[0] != 0x1F:  # padding, and no further part
                    break
                if inflater is None or inflater.eof:
                    # some servers send deflate without the header of zlib, whose lowest bits are 8
                    raw = name == "deflate" and data[0] & 15 != 8
                    inflater = zlib.decompressobj(-zlib.MAX_WBITS if raw else zlib.MAX_WBITS | 32)
                piece = inflater.decompress(data, _PIECE)
                data = inflater.unconsumed_tail
                while piece:
                    yield piece
                    await asyncio.sleep(0)  # let others in, and the time limit
                    piece = inflater.decompress(data, _PIECE)
                    data = inflater.unconsumed_tail
                if inflater.eof:
                    data = inflater.unused_data
    except zlib.error as error:
        raise Damaged(f"the reply's {name} data are damaged ({error})") from error
    if inflater is not None and not inflater.eof:
        raise Damaged(f"the reply's {name} data end too early")


async def bounded(chunks: AsyncIterable[bytes], most: int, encoding: str = "") -> bytes:
    """The body of a reply (`decompressed`). Raises ValueError at once if it has more than `most` bytes."""
    content = bytearray()
    async for piece in decompressed(chunks, encoding):
        content += piece
        if len(content) > most:
            raise ValueError(f"the reply is larger than {most} bytes")
    return bytes(content)


def parse_reply(content: bytes) -> Any:
    """The JSON value of a reply. Raises ValueError like `parse_json`, and for more values than memory should be spent on."""
    check_values(content)
    return parse_json(content)


def check_values(content: bytes) -> None:
    """Raises ValueError for a JSON text that may have more than two million values, without parsing it."""
    if len(content) > _MOST_VALUES and sum(map(content.count, (b",", b"[", b"{"))) > _MOST_VALUES:
        raise ValueError(f"it has more than {_MOST_VALUES:,} values")


async def apart(work: Callable[[], T], size: int) -> T:
    """The result of work on a reply of `size` bytes. On a large one it is done on a thread, so that the clients of the shared
    loop, and the time limit, do not wait for it."""
    return work() if size < _LARGE else await asyncio.to_thread(work)


# --- the client --------------------------------------------------------------------------------------------------------

_MOST_BYTES = 16 << 20  # most bytes of a reply


class HttpError(Exception):
    """A request that failed for good. The message says where and why; `status` is 0 if there was no reply. `fault` is as in
    `ReplyError`, and `tries` the number of attempts."""

    def __init__(self, message: str, status: int = 0, fault: str = "", tries: int = 1) -> None:
        super().__init__(message)
        self.status, self.fault, self.tries = status, fault, tries


@dataclasses.dataclass(frozen=True)
class Reply:
    """A service's reply with a 2xx status, after `tries` attempts."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    tries: int = 1

    def json(self) -> Any:
        """The body as JSON. Raises ValueError if it is not JSON; the message shows its beginning."""
        return self._parsed

    @functools.cached_property
    def _parsed(self) -> Any:
        try:
            return parse_reply(self.body)
        except ValueError as error:
            start = self.body[:120].decode(errors="replace")
            raise ValueError(f"the reply is not JSON that can be used ({error}): {start!r}") from error


class HttpClient:
    """A client of one service, for coroutines of one event loop.

    Temporary failures (no connection, no reply in time, half a JSON reply, and the statuses of `RETRIED`, also in the body of
    a reply with status 200) are retried after a growing, random pause, or after the time in `Retry-After`. After a 429 with
    `Retry-After`, all requests of the client wait that long. A redirect is followed if it keeps the method and stays at the
    server; others are errors, because a key must not be sent elsewhere.

    Args:
      timeout: seconds for one attempt.
      retries: attempts after the first.
      concurrency: most requests in progress at once; others wait.
      turn: awaited before each attempt, for a rate limit. False ends the request.
      secret: a text that is never shown in messages.
      backoff: approximate seconds of the first pause; each further pause is twice as long.

    Raises:
      ValueError: `timeout` or `concurrency` is not above zero, or `retries` is negative.
    """

    def __init__(
        self,
        *,
        timeout: float,
        retries: int = 3,
        concurrency: int = 32,
        turn: Callable[[], Awaitable[bool]] | None = None,
        secret: str = "",
        backoff: float = 0.5,
    ) -> None:
        if not (timeout > 0 and concurrency >= 1 and retries >= 0):
            raise ValueError(
                f"timeout={timeout} must be above 0, concurrency={concurrency} at least 1, retries={retries} at least 0"
            )
        self._timeout, self._retries, self._concurrency = timeout, retries, concurrency
        self._turn, self._secret, self._backoff = turn, secret, backoff
        self._session: Any = None
        self._slots: asyncio.Semaphore | None = None
        self._paused_until = 0.0

    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        failure: Callable[[Any], ReplyError | None] = error_of,
        only_json: bool = False,
    ) -> Reply:
        """The reply to a request. Raises HttpError.

        Args:
          body: sent as JSON, or, if it is bytes, as it is.
          failure: reads the error of a JSON reply with a 2xx status.
          only_json: a reply that is not JSON has failed, too, whatever its type says.
        """
        address = _without_secrets(url)
        for attempt in range(self._retries + 1):
            while (pause := self._paused_until - time.monotonic()) > 0:
                await asyncio.sleep(pause * random.uniform(1.0, 1.1))
            if self._turn is not None and not await self._turn():
                raise HttpError(f"{address}: the rate limit leaves no turn in time")
            judge = functools.partial(_judge, failure=failure, only_json=only_json, tries=attempt + 1)
            outcome = await self._attempt(method, url, headers, params, body, judge)
            if isinstance(outcome, Reply):
                return outcome
            if not outcome.passing or attempt == self._retries:
                tried = f" (tried {attempt + 1} times)" if attempt else ""
                message = self.redact(f"{address}: {outcome.message}{tried}")
                raise HttpError(message, outcome.status, outcome.fault, attempt + 1)
            pause = outcome.retry_after
            if pause is None:
                pause = self._backoff * 2**attempt * random.uniform(0.5, 1.5)
            elif outcome.status == 429:
                self._paused_until = max(self._paused_until, time.monotonic() + pause)
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")

    def redact(self, message: str) -> str:
        """The message without the secret, and without others that were read or have the form of one."""
        for form in {self._secret, urllib.parse.quote(self._secret, safe="")} - {""}:
            message = message.replace(form, MASK)
        return masked(message)

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _attempt(
        self, method: str, url: str, headers: Any, params: Any, body: Any, judge: Callable[..., Reply | _Failed]
    ) -> Reply | _Failed:
        aiohttp = import_aiohttp()
        if self._session is None or self._session.closed:
            connector = aiohttp.TCPConnector(limit=self._concurrency)
            self._session = open_session(connector=connector, trust_env=True, timeout=aiohttp.ClientTimeout(total=None))
            self._slots = asyncio.Semaphore(self._concurrency)
        assert self._slots is not None
        content: dict[str, Any] = {"data" if isinstance(body, bytes) else "json": body}
        try:
            async with self._slots, asyncio.timeout(self._timeout):
                for redirects in range(MOST_REDIRECTS + 1):
                    async with self._session.request(
                        method, url, headers=headers, params=params, allow_redirects=False, **content
                    ) as reply:
                        target = redirect_target(str(reply.url), reply.status, reply.headers.get("Location", ""))
                        if redirects == MOST_REDIRECTS or not may_follow(url, reply.status, target):
                            encoding = reply.headers.get("Content-Encoding", "")
                            read = await bounded(reply.content.iter_chunked(1 << 16), _MOST_BYTES, encoding)
                            return await apart(functools.partial(judge, reply, read, target), len(read))
                    url, params = target, None  # the target has the parameters
        except TimeoutError:
            return _Failed(f"no reply within {self._timeout:g} s", passing=True)
        except aiohttp.InvalidURL as error:
            return _Failed(f"not a URL ({error})")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            passing = isinstance(error, Damaged) or not isinstance(error, ValueError)
            return _Failed(f"{type(error).__name__}: {error}", passing=passing)
        raise AssertionError("unreachable")


def _judge(
    reply: Any, content: bytes, target: str, failure: Callable[[Any], ReplyError | None], only_json: bool, tries: int
) -> Reply | _Failed:
    status, message, passing = reply.status, f"HTTP {reply.status}: {_reason(content) or reply.reason}", False
    fault = ""
    if 200 <= reply.status < 300:
        answer = Reply(reply.status, reply.headers, content, tries)
        try:
            error = failure(answer.json())
        except ValueError as problem:
            half = only_json or (content.strip() and "json" in reply.headers.get("Content-Type", ""))
            error = ReplyError(_UNNAMED, str(problem), faults.HALF_REPLY) if half else None
        if error is None:
            return answer
        status, message, fault = error
        passing = may_pass(status, message)
        message = message if fault else f"an error under HTTP {reply.status} ({status}): {message}"
    elif target:
        message = f"HTTP {reply.status} to {_without_secrets(target)}: give that URL instead"
    else:
        passing = may_pass(status, content[:4000].decode(errors="replace"))
    return _Failed(message, status, passing, retry_after(reply.headers.get("Retry-After", "")), fault)


@dataclasses.dataclass(frozen=True)
class _Failed:
    message: str
    status: int = 0
    passing: bool = False  # the next attempt may succeed
    retry_after: float | None = None
    fault: str = ""


_sessions: set[Any] = set()  # those that were open when the last one was opened


def open_session(**settings: Any) -> Any:
    """An aiohttp session of the running loop, whose replies `bounded` reads. It is closed at the end of the process, if it is
    still open."""
    headers = {"Accept-Encoding": ACCEPTED, **settings.pop("headers", {})}
    session = import_aiohttp().ClientSession(headers=headers, auto_decompress=False, **settings)
    _sessions.difference_update([earlier for earlier in tuple(_sessions) if earlier.closed])
    _sessions.add(session)  # held here, as aiohttp complains of an open session that is collected
    return session


@atexit.register
def _close_sessions() -> None:
    for session in [session for session in _sessions if not session.closed]:
        with contextlib.suppress(Exception):
            shared_loop().run(session.close(), 1.0)


def import_aiohttp() -> Any:
    """The package aiohttp. Raises ValueError, which says how to install it, if it is missing."""
    with needs("the web", "web"):
        import aiohttp
    return aiohttp


def _reason(content: bytes) -> str:
    """The reason for a failure that a service gives, in one line."""
    text = content[:4000].decode(errors="replace")
    with contextlib.suppress(ValueError, RecursionError):
        value = parse_reply(content)
        for key in ("error", "message", "detail"):
            if isinstance(value, dict) and value.get(key):
                value = value[key]
        text = value if isinstance(value, str) else json.dumps(value)
    return " ".join(text.split())[:300]


def _without_secrets(url: str) -> str:
    """A URL without user, password and query, for messages."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
