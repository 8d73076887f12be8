"""The time of one query is the same alone, in company, joined, recorded and served: by a clock that only searches move."""

import asyncio
import math
import pathlib
import types
from collections.abc import Sequence
from typing import Any

import pytest

from routerl_jax.agents.calls import search_calls
from routerl_jax.core.types import Call, Episode, Example, Passage, Turn
from routerl_jax.extras.kb_server.mcp import http_app
from routerl_jax.extras.mcp_tools import McpTool
from routerl_jax.knowledge import base as timing
from routerl_jax.knowledge.base import KnowledgeBase, TimedResults, timed_search
from routerl_jax.knowledge.cassette import Cassette
from routerl_jax.knowledge.client.kb import HttpKB
from routerl_jax.knowledge.hybrid import HybridKB
from routerl_jax.recipes.routerag import efficiency
from routerl_jax.services.cache import MemoryCache
from tests.extras.kb_server.servers import EchoKB, scripted, search, serving

FOUND = [Passage(id="1", title="", text="found")]


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


class Slow(KnowledgeBase):
    """Takes so many seconds for a query, one after the other."""

    name = "slow"

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def __len__(self) -> int:
        return 1

    def _search(self, queries: list[Any], k: int) -> list[list[Passage]]:
        self.clock.now += len(queries) * self.seconds
        return [FOUND for _ in queries]


class Told(EchoKB):
    """Says itself that query "7" took 7 seconds."""

    def _search(self, queries: list[Any], k: int) -> TimedResults:
        return TimedResults(super()._search(queries, k), map(float, queries))


def calls(kb: Any, *queries: str) -> list[Call]:
    return asyncio.run(search_calls({"kb": kb}, "kb", queries, 1, 60.0))


@pytest.mark.parametrize("count", [1, 4, 120])
def test_company_does_not_make_a_query_dearer(clock: Clock, count: int) -> None:
    found = calls(Slow(clock, 0.25), *map(str, range(count)))
    assert [call.seconds for call in found] == [0.25] * count


def test_the_dearer_mode_is_not_rewarded_for_being_rare(clock: Clock) -> None:
    """120 queries at 2 ms beside 4 at 6 ms: s is 1/6 and 1/2 where T is 12 ms."""

    def answered(found: Call) -> Episode:
        turn = Turn(text="", stop_reason="stop", tokens=1, calls=[found])
        return Episode(
            example=Example(id="1", question="q", answers=("a",)), sample=0, answer="a", turns=[turn], sequences=[]
        )

    found = calls(Slow(clock, 0.002), *map(str, range(120))) + calls(Slow(clock, 0.006), *map(str, range(4)))
    earned = efficiency([answered(call) for call in found], by="seconds", scale=0.012)
    mean = (120 / 6 + 4 / 2) / 124
    assert earned == pytest.approx([mean - 1 / 6] * 120 + [mean - 1 / 2] * 4)


def test_failures_have_their_part_of_the_time() -> None:
    class Faulty:
        def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
            if "bad" in queries:
                raise OSError("the disk is gone")
            return TimedResults([FOUND] * len(queries), [3.0] * len(queries))

    good, bad = calls(Faulty(), "good", "bad")
    assert (good.seconds, good.error) == (3.0, None)
    assert (bad.error, 0 <= bad.seconds < 60) == ("OSError: the disk is gone", True)


def test_blank_queries_take_no_time(clock: Clock) -> None:
    assert Slow(clock, 2.0).search(["a", " ", "b"], 1).seconds == [2.0, 0.0, 2.0]


def test_a_hybrid_takes_as_long_as_its_members_together() -> None:
    kb = HybridKB([Told(), Told()])
    assert kb.search(["1", "0.5"], 1).seconds == [2.0, 1.0]
    assert [call.seconds for call in calls(kb, "1", "0.5")] == [2.0, 1.0]


def test_times_that_make_no_sense_are_refused() -> None:
    for seconds in ([], [1.0, 2.0], [-1.0], [math.inf], [math.nan]):
        with pytest.raises(ValueError, match=r"times for 1 results|that took"):
            TimedResults([FOUND], seconds)


def test_a_result_that_was_changed_is_timed_anew(clock: Clock) -> None:
    def changed(queries: Sequence[Any], k: int) -> TimedResults:
        clock.now += 6.0
        found = TimedResults([FOUND], [1.0])
        found.append(FOUND)
        return found

    assert timed_search(changed, ["a", "b"], 1)[1] == [3.0, 3.0]


def test_a_tape_knows_the_time(tmp_path: pathlib.Path) -> None:
    tape = tmp_path / "tape.jsonl"
    Cassette(tape, "record").wrap("kb", Told()).search(["1", "2"], 1)
    assert Cassette(tape, "replay").wrap("kb").search(["2", "1", "2"], 1).seconds == [2.0, 1.0, 2.0]
    tape.write_text(tape.read_text().replace('"seconds"', '"others"'))
    assert Cassette(tape, "replay").wrap("kb").search(["2"], 1).seconds == [0.0]


def test_a_served_one_says_what_each_query_took() -> None:
    cache = MemoryCache(10)
    with serving(Told()) as url:
        assert search(url, {"queries": ["2", " ", "3"]}).json()["query_seconds"] == [2.0, 0.0, 3.0]
        routerag = {"queries": ["[passage] 4", "5"], "return_times": True}
        assert search(url, routerag, "/search").json()["time"] == [4.0, 5.0]
        kb = HttpKB(url, batch=2, cache=cache)
        for _ in range(2):  # the second time from the cache
            assert kb.search(["2", "3", "2", "4", "5"], 1).seconds == [2.0, 3.0, 2.0, 4.0, 5.0]
        assert [call.seconds for call in calls(kb, "6", "2")] == [6.0, 2.0]


def test_a_server_that_does_not_say_is_timed_from_here() -> None:
    about = {"name": "x", "default_mode": "d", "modes": {"d": {"size": 1, "cost": 1.0, "reads": ["text"]}}}
    passage = {"id": "1", "title": "", "text": "", "score": 1.0, "image": ""}
    with scripted((200, {}, about), (200, {}, {"results": [[passage], [passage]]})) as (url, _):
        first, second = HttpKB(url).search(["a", "b"], 1).seconds
    assert first == second > 0


def test_mcp_hands_it_on() -> None:
    kb = Told()
    with serving(kb, mcp=http_app) as url:
        tool = McpTool(f"{url}/mcp")
        assert [call.seconds for call in calls(tool, "2", "3")] == [2.0, 3.0]
        tool.close()
