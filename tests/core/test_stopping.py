"""A signal stops a job where the job asks for it, and nowhere else."""

import asyncio
import concurrent.futures
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from routerl_jax.core import stopping
from routerl_jax.core.stopping import Interrupted
from tests.programs import ROOT


@pytest.fixture(autouse=True)
def in_front() -> Iterator[None]:
    """What a script starts in the background ignores SIGINT, and so do the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_job_stops_at_its_next_check_that_is_not_held(number: signal.Signals) -> None:
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    with stopping.deferred():
        stopping.check()
        stopping.hold()
        # as `timeout` sends it, to the process and to its group: almost at once
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
        os.kill(os.getpid(), number)
        stopping.check()
        stopping.release()
        with pytest.raises(Interrupted):
            stopping.hold()
        stopping.check()  # what cleans up after it may wait and check
    stopping.check()
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_after_the_last_check_is_not_lost() -> None:
    def work() -> None:
        with stopping.deferred():
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        work()


def test_another_thread_is_stopped_too_unless_held() -> None:
    with stopping.deferred(), concurrent.futures.ThreadPoolExecutor(1) as pool:
        stopping.hold()
        os.kill(os.getpid(), signal.SIGTERM)
        pool.submit(stopping.check).result()
        stopping.release()
        with pytest.raises(Interrupted):
            pool.submit(stopping.check).result()
        with pytest.raises(Interrupted):
            stopping.check()


def test_waits_end() -> None:
    """For tools, on the driver's loop; and for a reply of another loop."""
    ended: list[str] = []

    async def tool() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("tool")

    for wait in (
        lambda: asyncio.run(stopping.awaited(tool())),
        lambda: stopping.result_of(concurrent.futures.Future()),
    ):
        with stopping.deferred():
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
            with pytest.raises(Interrupted):
                wait()
    assert ended == ["tool"]
    with pytest.raises(TimeoutError):
        stopping.result_of(concurrent.futures.Future(), 0.01)

    async def fails() -> None:
        raise ValueError("as without it")

    with pytest.raises(ValueError, match="as without it"):
        asyncio.run(stopping.awaited(fails()))


_STUBBORN = """
import signal
import time
from routerl_jax.core import stopping
signal.signal(signal.SIGINT, signal.default_int_handler)
with stopping.deferred():
    print("ready", flush=True)
    time.sleep(100)
"""


def test_the_second_signal_ends_the_process_at_once() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _STUBBORN], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == "\n"
        assert "once more" in process.stderr.readline()
        while process.poll() is None:  # it is the second when the first one's copies are no longer taken for it
            time.sleep(0.3)
            process.send_signal(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
    finally:
        process.kill()


def test_a_ctrl_c_that_the_garbage_collector_swallows_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: pytest.fail("it was not an interrupt"))
    stopping.keep_interrupts.__wrapped__()

    def swallowing(*_: object) -> None:
        gc.callbacks.remove(swallowing)
        raise KeyboardInterrupt

    def work() -> None:
        for _ in range(1000):
            time.sleep(0.01)

    gc.callbacks.append(swallowing)
    gc.collect()  # raises nothing
    with pytest.raises(KeyboardInterrupt):
        work()
