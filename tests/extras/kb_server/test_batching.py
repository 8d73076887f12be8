"""Dynamic batching: who is searched with whom, in what order, and what one request's failure means for the others."""

import asyncio
import threading

import pytest

from routerl_jax.extras.kb_server.batching import BatchConfig, Batcher
from routerl_jax.services.asgi import Refusal
from tests.extras.kb_server.servers import EchoKB


def texts(results: list[list]) -> list[str]:
    return [found[0].text for found in results]


async def while_busy(kb: EchoKB, batcher: Batcher, *requests: tuple[list[str], int]) -> list:
    """Results (or exceptions) of requests that arrive, in this order, while the knowledge base is busy with another."""
    kb.open.clear()
    first = asyncio.ensure_future(batcher.search(["first"], 1))
    while not kb.calls:
        await asyncio.sleep(0.001)
    others = [asyncio.ensure_future(batcher.search(queries, k)) for queries, k in requests]
    await asyncio.sleep(0.01)
    kb.open.set()
    await first
    return await asyncio.gather(*others, return_exceptions=True)


def test_a_lone_request_is_searched_at_once_and_alone() -> None:
    kb = EchoKB()
    batcher = Batcher(kb, BatchConfig(max_batch=64))
    assert texts(asyncio.run(batcher.search(["a"], 1))) == ["a (0)"]
    assert kb.calls == [(["a"], 1)]


def test_what_waits_goes_together_by_k_and_up_to_max_batch() -> None:
    kb = EchoKB()
    batcher = Batcher(kb, BatchConfig(max_batch=4))
    requests = [(["a", "b"], 1), (["c"], 2), (["d", "e", "f"], 1), (["g"], 2)]
    results = asyncio.run(while_busy(kb, batcher, *requests))
    assert [texts(found) for found in results] == [[f"{q} (0)" for q in queries] for queries, _ in requests]
    assert [len(found[0]) for found in results] == [1, 2, 1, 2]
    assert kb.calls[1:] == [(["a", "b", "d", "e"], 1), (["c", "g"], 2), (["f"], 1)]


def test_an_idle_knowledge_base_waits_if_told_to() -> None:
    async def work() -> None:
        await asyncio.gather(*(batcher.search([query], 1) for query in "abc"))

    kb = EchoKB()
    batcher = Batcher(kb, BatchConfig(max_batch=3, max_wait_ms=20_000))
    asyncio.run(asyncio.wait_for(work(), 10))  # full before the wait is over
    assert kb.calls == [(["a", "b", "c"], 1)]


def test_one_bad_query_harms_no_other() -> None:
    kb = EchoKB()
    results = asyncio.run(while_busy(kb, Batcher(kb), (["a"], 1), (["boom"], 1), (["odd"], 1), (["b"], 1)))
    assert texts(results[0]) + texts(results[3]) == ["a (0)", "b (0)"]
    assert isinstance(results[1], RuntimeError)
    assert isinstance(results[2], ValueError)


def test_a_failing_piece_of_a_long_request_fails_it_once() -> None:
    kb = EchoKB()
    batcher = Batcher(kb, BatchConfig(max_batch=2))
    results = asyncio.run(while_busy(kb, batcher, (["a", "b", "boom", "c", "d", "e"], 1), (["z"], 1)))
    assert isinstance(results[0], RuntimeError)
    assert texts(results[1]) == ["z (0)"]
    assert batcher.waiting == 0
    assert not any("d" in queries for queries, _ in kb.calls)  # nobody waits for the rest


def test_a_full_queue_refuses_and_says_for_how_long() -> None:
    kb = EchoKB()
    batcher = Batcher(kb, BatchConfig(max_queue=3))
    results = asyncio.run(while_busy(kb, batcher, (["a", "b"], 1), (["c", "d"], 1), (["e"], 1)))
    assert isinstance(results[1], Refusal)
    assert (results[1].status, results[1].kind) == (503, "overloaded")
    assert int(results[1].headers["Retry-After"]) >= 1
    assert texts(results[0]) + texts(results[2]) == ["a (0)", "b (0)", "e (0)"]


def test_a_request_of_more_than_the_queue_holds_is_taken_when_nothing_waits() -> None:
    kb = EchoKB()
    assert len(asyncio.run(Batcher(kb, BatchConfig(max_queue=2, max_batch=2)).search(list("abcde"), 1))) == 5


def test_the_queries_of_a_client_that_left_are_not_searched() -> None:
    async def work() -> None:
        kb.open.clear()
        first = asyncio.ensure_future(batcher.search(["first"], 1))
        while not kb.calls:
            await asyncio.sleep(0.001)
        gone = asyncio.ensure_future(batcher.search(["gone"], 1))
        stays = asyncio.ensure_future(batcher.search(["stays"], 1))
        await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.sleep(0.01)
        assert batcher.waiting == 1
        kb.open.set()
        await asyncio.gather(first, stays)

    kb = EchoKB()
    batcher = Batcher(kb)
    asyncio.run(work())
    assert kb.calls == [(["first"], 1), (["stays"], 1)]


def test_one_thread_searches() -> None:
    class Watching(EchoKB):
        threads: set[int] = set()  # noqa: RUF012

        def _search(self, queries: list, k: int) -> list:
            self.threads.add(threading.get_ident())
            return super()._search(queries, k)

    async def work() -> None:
        await asyncio.gather(*(batcher.search([str(i)], i % 3 + 1) for i in range(30)))
        await batcher.close()

    kb = Watching()
    batcher = Batcher(kb)
    asyncio.run(work())
    assert len(kb.threads) == 1
    assert threading.get_ident() not in kb.threads


def test_a_knowledge_base_that_gives_too_few_results_is_an_error() -> None:
    class Short:
        def search(self, queries: list, k: int) -> list:
            return []

    with pytest.raises(RuntimeError, match="0 results for 2 queries"):
        asyncio.run(Batcher(Short()).search(["a", "b"], 1))


def test_what_is_no_exception_fails_its_request_alone() -> None:
    """pyo3's PanicException is a BaseException; asyncio would end the worker with it."""

    class Panic(BaseException):
        pass

    class Panicking(EchoKB):
        def _search(self, queries: list, k: int) -> list:
            if "panic" in queries:
                raise Panic("index out of bounds")
            return super()._search(queries, k)

    kb = Panicking()
    results = asyncio.run(asyncio.wait_for(while_busy(kb, Batcher(kb), (["panic"], 1), (["b"], 1)), 10))
    assert str(results[0]) == "Panic: index out of bounds"
    assert texts(results[1]) == ["b (0)"]


def test_close_finishes_what_is_searched_and_what_waits() -> None:
    async def work() -> list[list]:
        kb.open.clear()
        requests = [asyncio.ensure_future(batcher.search(["running"], 1))]
        while not kb.calls:
            await asyncio.sleep(0.001)
        requests.append(asyncio.ensure_future(batcher.search(["waiting"], 1)))
        closing = asyncio.ensure_future(batcher.close())
        await asyncio.sleep(0.03)
        assert not closing.done()
        kb.open.set()
        await closing
        return await asyncio.gather(*requests)

    kb = EchoKB()
    batcher = Batcher(kb)
    assert [texts(found) for found in asyncio.run(asyncio.wait_for(work(), 10))] == [["running (0)"], ["waiting (0)"]]


def test_it_works_on_one_event_loop_after_another() -> None:
    batcher = Batcher(EchoKB())
    assert [texts(asyncio.run(batcher.search([query], 1))) for query in "ab"] == [["a (0)"], ["b (0)"]]
