"""Rate limits: waits, order, time-outs; one limit for two processes in Redis; Redis killed.

Rates are so low that the seconds that a busy machine takes do not count: a token takes a hundred.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading

import pytest

from routerl_jax.services import limits
from routerl_jax.services.limits import LocalRateLimiter, RedisRateLimiter, acquire_async
from tests.clock import Clock


@pytest.fixture(params=["local", "redis"])
def limiter(request):
    def make(rate: float, burst: float):
        if request.param == "local":
            return LocalRateLimiter(rate, burst)
        return RedisRateLimiter(request.getfixturevalue("redis_server").url, rate, burst)

    return make


def test_rate_and_burst(limiter):
    limit = limiter(0.01, 5)
    waits = [limit.reserve("key") for _ in range(8)]
    assert waits == [*[0] * 5, *(pytest.approx(100 * n, abs=50) for n in (1, 2, 3))]
    assert limit.acquire("another key", 5, timeout=0)


def test_who_acquires_sleeps_as_long_as_the_reservation_says(monkeypatch):
    clock = Clock(monkeypatch, limits)
    limit = LocalRateLimiter(50, 5)
    assert all(limit.acquire("key") for _ in range(20))
    assert clock.slept == [pytest.approx(0.02)] * 15  # 5 at once, 15 more at 50 a second


def test_too_long_a_wait_takes_nothing(limiter):
    limit = limiter(0.01, 2)
    assert limit.acquire("key", 2)
    assert not limit.acquire("key", 1, timeout=0.01)
    assert limit.reserve("key") == pytest.approx(100, abs=50)
    assert limit.reserve("key") == pytest.approx(200, abs=50)  # behind the one before


def test_threads_together_keep_the_rate(limiter):
    limit, waits = limiter(0.01, 1), []
    threads = [threading.Thread(target=lambda: waits.append(limit.reserve("key"))) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(waits) == [pytest.approx(100 * n, abs=50) for n in range(30)]


def test_coroutines_wait_without_threads(limiter, monkeypatch):
    """Of forty, one goes at once and twenty wait; those that would have to wait longer than 2050 s are told so at once."""
    limit, clock = limiter(0.01, 1), Clock(monkeypatch, limits)
    clock.sleep = clock.slept.append  # all at one moment

    async def main():
        return await asyncio.gather(*(acquire_async(limit, "key", timeout=2050) for _ in range(40)))

    assert sum(asyncio.run(main())) == 21
    assert sorted(clock.slept) == [pytest.approx(100 * n, abs=50) for n in range(1, 21)]


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (-1, 1), (1, 0), (float("nan"), 1)])
def test_impossible_limits_are_refused(rate, burst):
    with pytest.raises(ValueError, match="above 0"):
        LocalRateLimiter(rate, burst)


def test_full_buckets_are_forgotten(monkeypatch):
    monkeypatch.setattr("routerl_jax.services.limits._MANY_KEYS", 10)
    limit = LocalRateLimiter(1e6, 1)
    for i in range(1000):
        limit.acquire(str(i))
    assert len(limit._buckets) <= 12


_RESERVE = """
import json, sys
from routerl_jax.services.limits import RedisRateLimiter
limit = RedisRateLimiter(sys.argv[1], 0.01, 1)
limit.reserve("warm up")
print("ready", flush=True)
sys.stdin.readline()
print(json.dumps([limit.reserve("key") for _ in range(20)]))
"""


def test_two_processes_share_one_limit(redis_server):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", _RESERVE, redis_server.url], **pipes) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    waits = [wait for process in processes for wait in json.loads(process.communicate(timeout=30)[0])]
    assert sorted(waits) == [pytest.approx(100 * n, abs=50) for n in range(40)]


def test_redis_killed_in_the_middle(redis_server, caplog, monkeypatch):
    clock = Clock(monkeypatch, limits)
    limit = RedisRateLimiter(redis_server.url, 100, 1, timeout=0.5, retry_after=15)
    assert limit.acquire("key")
    redis_server.kill()
    with caplog.at_level("INFO"):
        assert all(limit.acquire("key") for _ in range(20))
        assert sum(clock.slept) == pytest.approx(0.19)  # still limited, by itself
        redis_server.start()
        clock.now += 15
        assert limit.acquire("key")
    said = [record.message for record in caplog.records]
    assert sum("limits itself to 100 a second" in message for message in said) == 1
    assert sum("works again" in message for message in said) == 1
