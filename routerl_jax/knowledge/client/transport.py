"""JSON over HTTP to any of several equal servers: time limits, retries with jitter, fail-over, circuit breakers, hedging."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import httpx2

from routerl_jax.core.background import shared_loop
from routerl_jax.core.config import NonNegative, Positive, Size, checked
from routerl_jax.core.secrets import masked
from routerl_jax.core.time_limit import seconds_left
from routerl_jax.services.http import (
    ACCEPTED,
    MOST_REDIRECTS,
    Damaged,
    apart,
    bounded,
    error_of,
    may_follow,
    may_pass,
    parse_reply,
    redirect_target,
    retry_after,
)


class Unavailable(RuntimeError):
    """No replica answered. The message says what was tried, and has the last error, without secrets."""

    def __init__(self, message: str) -> None:
        super().__init__(masked(message))


class RequestRefused(ValueError):
    """The server understood the request and refused it (4xx). Another attempt would not help. Secrets are masked."""

    def __init__(self, message: str) -> None:
        super().__init__(masked(message))


class Failed(Exception):
    """One attempt failed in a way that another may not.

    Attributes:
      retry_after: seconds for which the server asked for no requests; 0 if it did not.
      overload: the server works, but is overloaded.
    """

    def __init__(self, message: str, *, retry_after: float = 0.0, overload: bool = False) -> None:
        super().__init__(message)
        self.retry_after, self.overload = retry_after, overload


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Timeouts:
    """Seconds: to connect, between two pieces of a reply, and for a whole call with all its attempts. A call never takes longer
    than its caller waits (core.time_limit)."""

    connect: Positive = 5.0
    read: Positive = 30.0
    total: Positive | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Retries:
    """Attempts, and the pauses between them: uniform in [0, min(cap, base 2^n)] ("full jitter", AWS Architecture Blog 2015).

    Attributes:
      attempts: number of attempts, the first included.
      base, cap: seconds.
      seed: seed of the jitter, for tests.
    """

    attempts: Size = 5
    base: NonNegative = 0.1
    cap: NonNegative = 5.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.cap < self.base:
            raise ValueError(f"retries need base <= cap: {self}")

    def pause(self, failures: int, rng: random.Random) -> float:
        """Seconds to wait after this number of failures."""
        return rng.uniform(0, min(self.cap, self.base * 2 ** min(failures, 30)))


State = Literal["closed", "open", "half_open"]


class CircuitBreaker:
    """Closed: requests pass. Open: no request passes for `cool_down` seconds. Half open: one request passes as a trial.

    Each failed trial doubles the time until the next one, up to `longest`. Not thread-safe: one event loop uses it.

    Args:
      threshold: number of failures in a row that open it.
      clock: returns seconds; for tests.
    """

    def __init__(
        self,
        *,
        threshold: int = 5,
        cool_down: float = 2.0,
        longest: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if threshold < 1 or not 0 < cool_down <= longest:
            raise ValueError(
                f"threshold={threshold} must be at least 1, and 0 < cool_down={cool_down} <= longest={longest}"
            )
        self._threshold, self._cool_down, self._longest, self._clock = threshold, cool_down, longest, clock
        self._failures = 0
        self._pause = cool_down
        self._until: float | None = None  # open until this time; None: closed
        self._trial = False

    @property
    def state(self) -> State:
        """The present state."""
        if self._until is None:
            return "closed"
        return "half_open" if self._clock() >= self._until else "open"

    @property
    def wait(self) -> float:
        """Seconds until a request may pass; 0 if no waiting time is left."""
        return 0.0 if self._until is None else max(0.0, self._until - self._clock())

    @property
    def passes(self) -> bool:
        """Whether a request may pass now. Call `begin` when it is sent."""
        return self.state == "closed" or (self.state == "half_open" and not self._trial)

    def begin(self) -> None:
        """Reports that a request is sent."""
        if self.state == "half_open":
            self._trial = True

    def succeeded(self) -> None:
        """Reports that the request was answered. Closes the breaker."""
        self._failures, self._pause, self._until, self._trial = 0, self._cool_down, None, False

    def failed(self) -> None:
        """Reports that the request failed."""
        if self._trial:
            self._pause = min(2 * self._pause, self._longest)
        self._failures += 1
        if self._trial or self._failures >= self._threshold:
            self._until = self._clock() + self._pause
        self._trial = False

    def dropped(self) -> None:
        """Reports that the request was cancelled before its outcome was known."""
        self._trial = False


_SAMPLES = 20  # smallest number of latencies for a percentile
_MOST_BYTES = 64 << 20  # most bytes of a reply, decompressed; it may hold pictures of some pages


@dataclasses.dataclass(eq=False)
class Replica:
    """One of the servers. `rest_until`: until then it wants no requests (monotonic seconds)."""

    url: str
    breaker: CircuitBreaker
    rest_until: float = 0.0


class Transport:
    """Sends requests that can safely be repeated. All methods run on one event loop.

    Args:
      urls: URLs of the replicas, which get the requests in turn. A request's path is put behind them as they are.
      token: for `Authorization: Bearer`; "" for none.
      hedge: if a reply takes longer than 95 % of the recent ones, send a second request and use the first reply.
      connections: most connections that are kept open.
      breaker: makes the circuit breaker of a replica.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str = "",
        timeouts: Timeouts,
        retries: Retries,
        hedge: bool = False,
        connections: int = 32,
        breaker: Callable[[], CircuitBreaker] = CircuitBreaker,
    ) -> None:
        self.replicas = [Replica(url, breaker()) for url in urls]
        self._timeouts, self._retries, self._hedge = timeouts, retries, hedge
        self._rng = random.Random(retries.seed)
        self._turn = itertools.count()
        self._latencies: collections.deque[float] = collections.deque(maxlen=200)
        self.hedged = 0
        headers = {"Accept-Encoding": ACCEPTED} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._client = httpx2.AsyncClient(
            headers=headers,
            timeout=httpx2.Timeout(timeouts.read, connect=timeouts.connect),
            limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=connections),
            follow_redirects=False,
        )

    async def request(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of the reply.

        Raises:
          RequestRefused: status 4xx; has the server's message.
          Unavailable: all attempts failed, the time is up, or no server takes requests now.
        """
        started = time.monotonic()
        deadline = started + seconds_left(self._timeouts.total)
        content = None if body is None else json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        last: Exception | None = None
        names = " or ".join(replica.url for replica in self.replicas)
        for attempt in range(self._retries.attempts):
            replica = self._pick()
            if replica is None:
                wait = min(candidate.breaker.wait for candidate in self.replicas)
                if attempt == 0 or time.monotonic() + wait >= deadline:
                    reason = f"; the last error: {last}" if last else ""
                    raise Unavailable(f"{names}: failed too often, not asked again for {wait:.1f} s{reason}")
                await asyncio.sleep(max(wait, 0.05))
                continue
            try:
                return await self._attempt(replica, method, path, content, deadline)
            except Failed as error:
                last = error
            if attempt + 1 == self._retries.attempts:
                break
            pause = self._pause(attempt)
            if time.monotonic() + pause >= deadline:
                break
            await asyncio.sleep(pause)
        seconds = time.monotonic() - started
        raise Unavailable(f"{names}{path}: no answer after {attempt + 1} attempts in {seconds:.1f} s; the last: {last}")

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.aclose()

    def _pick(self, but: Replica | None = None) -> Replica | None:
        """The next replica in turn among those that take requests. Those that asked for a rest are used only if all did."""
        ready = [replica for replica in self.replicas if replica.breaker.passes and replica is not but]
        now = time.monotonic()
        rested = [replica for replica in ready if replica.rest_until <= now]
        choice = rested or ready
        return choice[next(self._turn) % len(choice)] if choice else None

    def _pause(self, failures: int) -> float:
        """Seconds to pause: jittered, and at least until one replica's rest is over."""
        now = time.monotonic()
        rest = min(
            (max(0.0, replica.rest_until - now) for replica in self.replicas if replica.breaker.passes), default=0.0
        )
        return rest + self._retries.pause(failures, self._rng)

    async def _attempt(self, replica: Replica, method: str, path: str, content: bytes | None, deadline: float) -> Any:
        if not self._hedge or len(self._latencies) < _SAMPLES:
            return await self._send(replica, method, path, content, deadline)
        first = asyncio.ensure_future(self._send(replica, method, path, content, deadline))
        try:
            # the 95th percentile of recent latencies
            patience = sorted(self._latencies)[int(0.95 * (len(self._latencies) - 1))]
            done, _ = await asyncio.wait({first}, timeout=patience)
            other = None if done else self._pick(but=replica) or self._pick()
            if other is None:
                return await first
            self.hedged += 1
            second = asyncio.ensure_future(self._send(other, method, path, content, deadline))
            return await _first_success(first, second)
        finally:
            first.cancel()

    async def _send(self, replica: Replica, method: str, path: str, content: bytes | None, deadline: float) -> Any:
        """Sends one request to one replica, and reports the outcome to its circuit breaker."""
        started = time.monotonic()
        remaining = deadline - started
        if remaining <= 0:
            raise Failed("the time was up")
        replica.breaker.begin()
        try:
            async with asyncio.timeout(remaining):
                value = await self._reply(method, replica.url + path, path, content, remaining)
        except RequestRefused:
            replica.breaker.succeeded()
            raise
        except Failed as error:
            if error.overload:
                replica.rest_until = time.monotonic() + error.retry_after
                replica.breaker.dropped()
            else:
                replica.breaker.failed()
            raise
        except (httpx2.RequestError, TimeoutError) as error:
            replica.breaker.failed()
            problem = (
                "no answer in time"
                if isinstance(error, httpx2.TimeoutException | TimeoutError)
                else "connection failed"
            )
            raise Failed(
                f"{replica.url}: {problem} ({type(error).__name__}{': ' if str(error) else ''}{error})"
            ) from error
        except BaseException:
            replica.breaker.dropped()
            raise
        replica.breaker.succeeded()
        self._latencies.append(time.monotonic() - started)
        return value

    async def _reply(self, method: str, url: str, path: str, content: bytes | None, seconds: float) -> Any:
        """A reply's JSON, after the redirects that stay at the server. Raises Failed if another attempt may help,
        RequestRefused if not."""
        headers = {"Content-Type": "application/json", "X-Timeout-Seconds": f"{seconds:.3f}"}
        for redirects in range(MOST_REDIRECTS + 1):
            async with self._client.stream(method, url, content=content, headers=headers) as reply:
                target = redirect_target(url, reply.status_code, reply.headers.get("location", ""))
                if redirects == MOST_REDIRECTS or not may_follow(url, reply.status_code, target):
                    encoding = reply.headers.get("content-encoding", "")
                    try:
                        body = await bounded(reply.aiter_raw(), _MOST_BYTES, encoding)
                    except Damaged as error:
                        raise Failed(f"{url}: {error}") from error
                    except ValueError as error:
                        raise RequestRefused(
                            f"{url}: {error}; ask for fewer passages, or in smaller batches"
                        ) from error
                    base = target.rstrip("/").removesuffix(path) if path else target
                    return await apart(functools.partial(_read, reply, body, base), len(body))
            url = target
        raise AssertionError("unreachable")


class Connection:
    """A transport that is opened at the first request, and again after a process fork, because that needs its own sockets.

    Args:
      urls, settings: see `Transport`.
    """

    def __init__(self, urls: Sequence[str], settings: Mapping[str, Any]) -> None:
        self._urls, self._settings = urls, settings
        self._transport: Transport | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # event loop of the transport
        self._lock = threading.Lock()

    async def request(self, method: str, path: str, body: Any = None) -> Any:
        """`Transport.request` on the running event loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._transport is None or self._loop is not loop:
                self._transport, self._loop = Transport(self._urls, **self._settings), loop
            transport = self._transport
        return await transport.request(method, path, body)

    def close(self) -> None:
        """Closes the sockets. The next request opens new ones."""
        with self._lock:
            transport, self._transport = self._transport, None
        if transport is not None:
            shared_loop().run(transport.close())


def _read(reply: httpx2.Response, body: bytes, target: str) -> Any:
    url, status = str(reply.request.url), reply.status_code
    try:
        value = parse_reply(body)
    except ValueError as error:
        if reply.is_success:
            raise Failed(f"{url}: the reply is not JSON that can be used ({error}): {body[:80]!r}") from error
        value = None
    carried = error_of(value)
    if reply.is_success and carried is None:
        return value
    said = carried.message if carried else body[:200].decode(errors="replace").strip() or reply.reason_phrase
    message = f"{url}: HTTP {status}: {said}"
    if reply.is_success and carried:
        status = carried.status
        message = f"{url}: an error under HTTP {reply.status_code} ({status}): {said}"
    if target:
        raise RequestRefused(f"{url}: HTTP {status} to {target}: give that URL instead")
    if may_pass(status, said):
        after = retry_after(reply.headers.get("retry-after", ""))
        overload = status == 429 or (status == 503 and after is not None)
        raise Failed(message, retry_after=after or 0.0, overload=overload)
    if status in (401, 403):
        message += " (the token: ROUTERL_KB_TOKEN in the environment, or token=..)"
    raise RequestRefused(message)


async def _first_success(*tasks: asyncio.Task[Any]) -> Any:
    """The result of the first task that succeeds; the others are cancelled. If all fail, the first failure is raised."""
    waiting, failure = set(tasks), None
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.exception() is None:
                    return task.result()
                failure = failure or task.exception()
        assert failure is not None
        raise failure
    finally:
        for task in tasks:
            task.cancel()
