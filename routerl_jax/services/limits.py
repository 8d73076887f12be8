"""Rate limits for paid and shared services: token buckets in this process, or in Redis for all processes together.

A caller reserves its tokens at once and is told how long to wait for them. So callers are served in the order of their
requests, no caller polls, and one round trip to Redis is enough.
"""

from __future__ import annotations

import abc
import asyncio
import threading
import time
from typing import Any

from absl import logging

from routerl_jax.services.cache import connect_redis, redis_address

_MANY_KEYS = 10_000  # above this number, full buckets are dropped


class RateLimiter(abc.ABC):
    """Allows `rate` tokens per second and key, and `burst` at once after a pause. It is safe to use from several threads."""

    @abc.abstractmethod
    def reserve(self, key: str, n: float = 1, timeout: float | None = None) -> float | None:
        """Reserves n tokens and returns the seconds until they may be used. Over `timeout`: reserves none, returns None."""

    def acquire(self, key: str, n: float = 1, timeout: float | None = None) -> bool:
        """Waits for n tokens. Returns False at once if they are not available within `timeout` seconds."""
        wait = self.reserve(key, n, timeout)
        if wait:
            time.sleep(wait)
        return wait is not None


async def acquire_async(limiter: RateLimiter, key: str, n: float = 1, timeout: float | None = None) -> bool:
    """The same as `limiter.acquire` for coroutines. The wait blocks no thread."""
    wait = await asyncio.to_thread(limiter.reserve, key, n, timeout)
    if wait:
        await asyncio.sleep(wait)
    return wait is not None


class LocalRateLimiter(RateLimiter):
    """Token buckets in this process.

    Args:
      rate: tokens per second and key.
      burst: most tokens that a bucket can hold.

    Raises:
      ValueError: rate or burst is not above zero.
    """

    def __init__(self, rate: float, burst: float = 1) -> None:
        _check(rate, burst)
        self.rate, self.burst = float(rate), float(burst)
        # key -> tokens (below zero: reserved), time of the last change
        self._buckets: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def reserve(self, key: str, n: float = 1, timeout: float | None = None) -> float | None:
        """Reserves n tokens and returns the seconds until they may be used; None if that is over `timeout`."""
        with self._lock:
            now = time.monotonic()
            tokens, then = self._buckets.get(key, (self.burst, now))
            tokens = min(self.burst, tokens + (now - then) * self.rate) - n
            wait = max(0.0, -tokens / self.rate)
            if timeout is not None and wait > timeout:
                return None
            self._buckets[key] = (tokens, now)
            if len(self._buckets) > _MANY_KEYS:
                self._buckets = {
                    key: (tokens, then)
                    for key, (tokens, then) in self._buckets.items()
                    if tokens + (now - then) * self.rate < self.burst
                }
            return wait


# KEYS[1]: bucket; ARGV: rate, burst, n, longest wait (-1: any). Returns microseconds to wait, or -1 if that is too long.
_BUCKET = """
local rate, burst, n, longest = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6
local state = redis.call('HMGET', KEYS[1], 'tokens', 'at')
local tokens, at = tonumber(state[1] or burst), tonumber(state[2] or now)
tokens = math.min(burst, tokens + math.max(0, now - at) * rate) - n
local wait = math.max(0, -tokens / rate)
if longest >= 0 and wait > longest then return -1 end
redis.call('HSET', KEYS[1], 'tokens', string.format('%.9f', tokens), 'at', string.format('%.6f', now))
redis.call('PEXPIRE', KEYS[1], math.ceil((burst - tokens) / rate * 1000) + 1000)
return math.ceil(wait * 1e6)
"""


class RedisRateLimiter(RateLimiter):
    """Token buckets in Redis: one limit for all processes and machines, by the clock of the server.

    While Redis is not available, each process uses a bucket of its own with the whole rate. This is logged once. Redis is tried
    again after `retry_after` seconds.

    Args:
      url: as for `cache.RedisCache`.
      rate: tokens per second and key, for all processes together.
      burst: most tokens that a bucket can hold.
      timeout: seconds for one command.

    Raises:
      ValueError: rate or burst is not above zero, or the URL is not one of Redis.
    """

    def __init__(
        self,
        url: str,
        rate: float,
        burst: float = 1,
        *,
        timeout: float = 1.0,
        retry_after: float = 15.0,
    ) -> None:
        _check(rate, burst)
        self.rate, self.burst = float(rate), float(burst)
        self._redis = connect_redis(url, timeout)
        self._script: Any = self._redis.register_script(_BUCKET)
        self._address, self._retry_after = redis_address(url), retry_after
        self._fallback = LocalRateLimiter(rate, burst)
        self._down_until: float | None = None

    def reserve(self, key: str, n: float = 1, timeout: float | None = None) -> float | None:
        """Reserves n tokens and returns the seconds until they may be used; None if that is over `timeout`."""
        down_until = self._down_until
        if down_until is not None and time.monotonic() < down_until:
            return self._fallback.reserve(key, n, timeout)
        longest = -1 if timeout is None else timeout
        try:
            wait = int(self._script(keys=[f"routerl:rate:{key}"], args=[self.rate, self.burst, n, longest]))
        except Exception as error:
            self._down_until = time.monotonic() + self._retry_after
            if down_until is None:
                logging.warning(
                    "the rate limit in Redis at %s does not work (%s: %s): this process limits itself to %g a second",
                    self._address,
                    type(error).__name__,
                    error,
                    self.rate,
                )
            return self._fallback.reserve(key, n, timeout)
        if down_until is not None:
            self._down_until = None
            logging.info("the rate limit in Redis at %s works again", self._address)
        return None if wait < 0 else wait / 1e6

    def close(self) -> None:
        """Closes the connections."""
        self._redis.close()


def _check(rate: float, burst: float) -> None:
    if not (rate > 0 and burst > 0):
        raise ValueError(f"a rate limit needs a rate and a burst above 0, got rate={rate!r}, burst={burst!r}")


def open_limiter(rate: float, redis: str = "") -> RateLimiter:
    """A limit in Redis if there is a URL, else in this process. Its burst is the tokens of one second, at least 1."""
    burst = max(1.0, rate)
    return RedisRateLimiter(redis, rate, burst) if redis else LocalRateLimiter(rate, burst)
