"""Devices out of memory, and conversations that are cancelled: no token changes, no row is lost."""

import asyncio
import concurrent.futures
import dataclasses
import logging
import time
from typing import Any

import jax
import pytest

from routerl_jax.engine import device_calls
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.loop import EngineLoop
from routerl_jax.engine.sampling import Sampling
from routerl_jax.parallel.devices import OutOfMemory, with_less
from tests import tiny
from tests.memory import needs_too_much

FREE = Sampling()


def limit(monkeypatch: pytest.MonkeyPatch, program: str, rows: int) -> None:
    """From now on a program of engines with more rows than this needs more memory than there is."""
    whole = device_calls.jit_programs

    def limited(graph: Any, mesh: Any, cache: Any) -> Any:
        programs = whole(graph, mesh, cache)
        if cache.rows <= rows:
            return programs

        def fails(**arguments: Any) -> Any:
            return needs_too_much(arguments["cache"])

        fails._cache_size = getattr(programs, program)._cache_size  # pyright: ignore[reportFunctionMemberAccess]
        return dataclasses.replace(programs, **{program: fails})

    monkeypatch.setattr(device_calls, "jit_programs", limited)


@pytest.mark.parametrize("program", ["extend", "decode"])
def test_out_of_memory_the_engine_goes_on_with_fewer_rows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, program: str
) -> None:
    texts = [[5 + i, 6, 7, 8 + i] for i in range(9)]
    expected = Engine(tiny.model(), rows=8, max_length=96).generate(texts, max_tokens=6, sampling=FREE)
    limit(monkeypatch, program, 2)
    engine = Engine(tiny.model(), rows=8, max_length=96)
    with caplog.at_level(logging.WARNING):
        turns = engine.generate(texts, max_tokens=6, sampling=FREE)
    assert [turn.tokens for turn in turns] == [turn.tokens for turn in expected]
    assert engine.rows == engine._table.free() == 2
    assert engine._streams == []
    for rows in (4, 2):
        assert f"going on with config.engine.rows={rows}; set it, and the run begins so" in caplog.text


def test_with_one_row_left_it_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, "decode", 0)
    engine = Engine(tiny.model(), rows=2, max_length=96)
    stream = engine.open([5, 6, 7])
    engine.request(stream, max_tokens=3)
    with pytest.raises(
        OutOfMemory, match=r"out of device memory in rollouts \(RESOURCE_EXHAUSTED.*lower config.engine"
    ):
        engine.step()
    engine.close(stream)
    assert engine._table.free() == engine.rows == 1


def test_other_errors_and_jobs_of_several_processes_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def work(error: Exception | None) -> None:
        tried.append("once")
        if error:
            raise error
        needs_too_much()

    def less() -> str:
        return "config.engine.rows=1"

    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        with_less(lambda: work(jax.errors.JaxRuntimeError("INTERNAL: broken")), less, "rollouts", "lower it")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(OutOfMemory, match=r"out of device memory in rollouts .*: lower it"):
        with_less(lambda: work(None), less, "rollouts", "lower it")
    assert len(tried) == 2


def test_cancelled_conversations_give_their_rows_back() -> None:
    """Three in four are cancelled at different moments: before a row was free, while they decode, between their turns."""
    engine = Engine(tiny.model(), rows=4, max_length=96, segment=2)
    texts = [[5 + i, 6, 7] for i in range(24)]
    expected = Engine(tiny.model(), rows=4, max_length=96).generate(texts, max_tokens=20, sampling=FREE)
    loop = EngineLoop(engine)

    async def converse(i: int) -> list[int]:
        stream = engine.open(texts[i], str(i))
        try:
            engine.request(stream, max_tokens=20, sampling=FREE)
            turn = await loop.turn(stream)
            assert turn is not None
            if i % 4 == 3:
                await asyncio.sleep(60)
            return turn.tokens
        finally:
            engine.close(stream)

    futures = [loop.submit(converse(i)) for i in range(24)]
    for i, future in enumerate(futures):
        if i % 4:
            time.sleep(0.02)
            future.cancel()
    kept = concurrent.futures.wait([future for i, future in enumerate(futures) if i % 4 == 0], timeout=120)
    assert not kept.not_done
    assert [future.result() for future in futures[::4]] == [turn.tokens for turn in expected[::4]]
    loop.close()
    assert engine._streams == []
    assert engine._table.free() == engine.rows
