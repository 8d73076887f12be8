"""Rate limits: measured rates, order, time-outs; one limit for two processes in Redis; Redis killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from routerl_jax.remote.limits import LocalRateLimiter, RedisRateLimiter, acquire_async


@pytest.fixture(params=["local", "redis"])
def limiter(request):
    def make(rate: float, burst: float):
        if request.param == "local":
            return LocalRateLimiter(rate, burst)
        return RedisRateLimiter(request.getfixturevalue("redis_server").url, rate, burst)

    return make


def test_rate_and_burst(limiter):
    limit = limiter(50, 5)
    started = time.monotonic()
    assert all(limit.acquire("key") for _ in range(20))
    assert 0.28 < time.monotonic() - started < 3  # 5 at once, 15 more at 50 a second
    assert limit.acquire("another key", 5, timeout=0)


def test_too_long_a_wait_takes_nothing(limiter):
    limit = limiter(0.1, 2)  # a token in ten seconds: what a busy machine takes between two lines doesn't count
    assert limit.acquire("key", 2)
    started = time.monotonic()
    assert not limit.acquire("key", 1, timeout=0.01)
    assert time.monotonic() - started < 5
    assert limit.reserve("key") == pytest.approx(10, abs=5)
    assert limit.reserve("key") == pytest.approx(20, abs=5)  # behind the one before


def test_threads_together_keep_the_rate(limiter):
    limit = limiter(100, 1)
    started = time.monotonic()
    threads = [threading.Thread(target=limit.acquire, args=("key",)) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.27 < time.monotonic() - started < 3


def test_coroutines_wait_without_threads(limiter):
    limit = limiter(100, 1)

    async def main():
        return await asyncio.gather(*(acquire_async(limit, "key", timeout=0.2) for _ in range(40)))

    started = time.monotonic()
    served = sum(asyncio.run(main()))
    # those that would have to wait longer are told so at once; what comes in while they ask is one token per 10 ms
    assert 18 <= served <= 2 + 100 * (0.2 + time.monotonic() - started)


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (-1, 1), (1, 0), (float("nan"), 1)])
def test_impossible_limits_are_refused(rate, burst):
    with pytest.raises(ValueError, match="above 0"):
        LocalRateLimiter(rate, burst)


def test_full_buckets_are_forgotten(monkeypatch):
    monkeypatch.setattr("routerl_jax.remote.limits._MANY_KEYS", 10)
    limit = LocalRateLimiter(1e6, 1)
    for i in range(1000):
        limit.acquire(str(i))
    assert len(limit._buckets) <= 12


_COUNT = """
import sys, time
from routerl_jax.remote.limits import RedisRateLimiter
limit = RedisRateLimiter(sys.argv[1], 40, 1)
limit.reserve("warm up")
print("ready", flush=True)
sys.stdin.readline()
end, count = time.monotonic() + 1.0, 0
while limit.acquire("key", timeout=max(0.0, end - time.monotonic())):
    count += 1
print(count)
"""


def test_two_processes_share_one_limit(redis_server):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", _COUNT, redis_server.url], **pipes) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    counts = [int(process.communicate(timeout=30)[0]) for process in processes]
    assert (
        30 <= sum(counts) <= 60
    )  # 40 a second, give or take the difference of their starts; 80 if they shared nothing
    assert min(counts) >= 5  # and neither starves


def test_redis_killed_in_the_middle(redis_server, caplog):
    limit = RedisRateLimiter(redis_server.url, 100, 1, timeout=0.5, retry_after=0.2)
    assert limit.acquire("key")
    redis_server.kill()
    with caplog.at_level("INFO"):
        started = time.monotonic()
        assert all(limit.acquire("key") for _ in range(20))
        assert 0.15 < time.monotonic() - started < 3  # still limited, by itself
        redis_server.start()
        time.sleep(0.25)
        assert limit.acquire("key")
    said = [record.message for record in caplog.records]
    assert sum("limits itself to 100 a second" in message for message in said) == 1
    assert sum("works again" in message for message in said) == 1
