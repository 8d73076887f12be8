"""One time limit for all that works for a caller: by a clock of the test's."""

import asyncio
import contextvars
import threading
import types

import pytest

from routerl_jax.core import time_limit as module
from routerl_jax.core.time_limit import DEFAULT_SECONDS, seconds_left, time_limit


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [100.0]
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


def test_what_is_left(now: list[float]) -> None:
    assert (seconds_left(), seconds_left(5.0)) == (DEFAULT_SECONDS, 5.0)
    with time_limit(10.0):
        assert (seconds_left(), seconds_left(5.0), seconds_left(20.0)) == (10.0, 5.0, 10.0)
        now[0] += 4
        with time_limit(100.0):  # nobody waits longer than the one who waits for him
            assert seconds_left() == 6.0
        with time_limit(1.0):
            assert seconds_left() == 1.0
        now[0] += 7
        assert seconds_left() == 0.0
    assert seconds_left() == DEFAULT_SECONDS


def test_it_is_known_on_other_loops_and_where_the_context_is_handed_on(now: list[float]) -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def there() -> float:
        return seconds_left()

    with time_limit(3.0):
        assert asyncio.run_coroutine_threadsafe(there(), loop).result() == 3.0
        context = contextvars.copy_context()
    assert context.run(seconds_left) == 3.0
    assert asyncio.run_coroutine_threadsafe(there(), loop).result() == DEFAULT_SECONDS
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
