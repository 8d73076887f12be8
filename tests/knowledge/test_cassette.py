"""Cassettes: replay equals the recording, without the tool, in any order, from threads, and after a kill."""

import json
import pathlib
import random
import threading
import types
from collections.abc import Sequence

import pytest

from routerl_jax.core.types import Passage, Walk
from routerl_jax.knowledge import cassette
from routerl_jax.knowledge.base import TimedResults
from routerl_jax.knowledge.cassette import Cassette


class Moody:
    """A tool whose every reply is different, and that fails on some queries."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], int]] = []
        self._lock = threading.Lock()

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        with self._lock:
            self.calls.append((list(queries), k))
            number = len(self.calls)
        if any("fail" in query for query in queries):
            raise TimeoutError(f"no reply to {queries[-1]!r}")
        return [
            [Passage(id=f"{number}.{i}", title="Ünï", text=f"{query}\n{i}", score=1 / (3 + i)) for i in range(k)]
            for query in queries
        ]


def test_replay_equals_the_recording(tmp_path: pathlib.Path) -> None:
    tape, tool = tmp_path / "run" / "tape.jsonl", Moody()
    recorder = Cassette(tape, "record")
    text, web = recorder.wrap("text", tool), recorder.wrap("web", tool)
    first = text.search(["a", "b", "a"], 2), text.search(["a"], 3), web.search(["a", ""], 2)
    assert first[0][0] == first[0][2] != first[2][0]
    assert text.search(["b", "c"], 2)[0] == first[0][1]  # a repeated call gets the recorded reply
    assert tool.calls == [(["a", "b"], 2), (["a"], 3), (["a", ""], 2), (["c"], 2)]
    assert len(recorder) == len(tape.read_text().splitlines()) == 6

    player = Cassette(tape, "replay")
    assert player.wrap("web").search(["", "a"], 2) == first[2][::-1]
    assert player.wrap("text", tool).search(["a"], 3) == first[1]
    assert player.wrap("text").search(["a", "b", "a"], 2) == first[0]
    assert len(tool.calls) == 4


def test_walks_over_a_graph_are_on_the_tape(tmp_path: pathlib.Path) -> None:
    class Graph:
        def search(self, queries: Sequence[str], k: int) -> TimedResults:
            walks = [Walk(facts=("a | is | b",), nodes=(query,)) if query else Walk() for query in queries]
            return TimedResults([[]] * len(queries), [0.5] * len(queries), walks)

    tape = tmp_path / "tape.jsonl"
    recorded = Cassette(tape, "record").wrap("graph", Graph()).search(["b", ""], 2)
    assert recorded.walks == [Walk(facts=("a | is | b",), nodes=("b",)), Walk()]
    assert [sorted(json.loads(line)).count("walk") for line in tape.read_text().splitlines()] == [1, 0]
    replayed = Cassette(tape, "replay").wrap("graph").search(["", "b"], 2)
    assert (replayed.walks, replayed.seconds) == (recorded.walks[::-1], recorded.seconds[::-1])
    tape.write_text(tape.read_text().replace('"walk": {', '"walk": [{').replace('["b"]}', '["b"]}]'))
    with pytest.raises(ValueError, match=r"line 1: not a recorded call .*not a walk"):
        Cassette(tape, "replay")


def test_a_missing_reply_names_tool_and_query(tmp_path: pathlib.Path) -> None:
    Cassette(tmp_path / "t.jsonl", "record").wrap("text", Moody()).search(["a"], 2)
    tool = Cassette(tmp_path / "t.jsonl", "replay").wrap("text", Moody())
    for query, k in (("b", 2), ("a", 3)):
        with pytest.raises(LookupError, match=rf"t\.jsonl holds no reply of tool 'text' to query '{query}' \(k={k}\)"):
            tool.search(["a", query], k)


def test_failures_are_replayed(tmp_path: pathlib.Path) -> None:
    tool = Moody()
    recorder = Cassette(tmp_path / "t.jsonl", "record").wrap("text", tool)
    with pytest.raises(TimeoutError):
        recorder.search(["a", "fail"], 1)  # whose fault it was isn't known: not recorded
    reply = recorder.search(["a"], 1)
    with pytest.raises(TimeoutError):
        recorder.search(["fail"], 1)
    player = Cassette(tmp_path / "t.jsonl", "replay").wrap("text")
    assert player.search(["a"], 1) == reply
    for queries in (["fail"], ["a", "fail"]):
        with pytest.raises(RuntimeError) as caught:
            player.search(queries, 1)
        assert (type(caught.value).__name__, str(caught.value)) == ("TimeoutError", "no reply to 'fail'")
    assert len(tool.calls) == 3


def test_a_wrong_number_of_results_is_recorded(tmp_path: pathlib.Path) -> None:
    class Generous(Moody):
        def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
            return [*super().search(queries, k), []]

    tape = tmp_path / "t.jsonl"
    message = "tool 'text' gave 2 results for 1 queries"
    with pytest.raises(ValueError, match=message):
        Cassette(tape, "record").wrap("text", Generous()).search(["a"], 1)
    with pytest.raises(RuntimeError, match=message):
        Cassette(tape, "replay").wrap("text").search(["a"], 1)


@pytest.mark.parametrize("query", ["a", "fail"])
def test_a_late_reply_is_a_timeout_on_the_tape(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    now = iter([0.0, 4.0, 10.0, 16.0])  # before and after the first and the second call of the tool
    monkeypatch.setattr(cassette, "time", types.SimpleNamespace(monotonic=lambda: next(now)))
    tape = tmp_path / "t.jsonl"
    recorder = Cassette(tape, "record", timeout=5).wrap("text", Moody())
    reply = recorder.search(["in time"], 1)
    with pytest.raises(RuntimeError, match="no reply within 5 s"):
        recorder.search([query, "b"], 1)
    player = Cassette(tape, "replay").wrap("text")
    assert player.search(["in time"], 1) == reply
    for late in (query, "b"):  # the driver has given up on both
        with pytest.raises(RuntimeError, match="no reply within 5 s") as caught:
            player.search([late], 1)
        assert type(caught.value).__name__ == "TimeoutError"


def test_auto_asks_only_what_is_missing(tmp_path: pathlib.Path) -> None:
    tape, tool = tmp_path / "t.jsonl", Moody()
    first = Cassette(tape).wrap("text", tool).search(["a", "b"], 1)
    again = Cassette(tape).wrap("text", tool).search(["b", "c", "a"], 1)
    assert [again[0], again[2]] == first[::-1]
    assert tool.calls[1:] == [(["c"], 1)]
    assert Cassette(tape, "replay").wrap("text").search(["b", "c", "a"], 1) == again


def test_replies_are_on_the_tape_at_once_and_it_only_grows(tmp_path: pathlib.Path) -> None:
    tape = tmp_path / "t.jsonl"
    tool = Cassette(tape, "record").wrap("text", Moody())
    before = b""
    for i in range(5):
        tool.search([f"q{i}"], 1)
        now = tape.read_bytes()  # another process could read it here
        assert now.startswith(before)
        assert now.count(b"\n") == i + 1
        before = now


def test_a_torn_last_line_is_recorded_anew(tmp_path: pathlib.Path) -> None:
    tape = tmp_path / "t.jsonl"
    first = Cassette(tape, "record").wrap("text", Moody()).search(["a", "b"], 1)
    tape.write_bytes(tape.read_bytes()[:-9])
    assert len(Cassette(tape, "replay")) == 1
    second = Cassette(tape).wrap("text", Moody()).search(["a", "b"], 1)
    assert second[0] == first[0]
    assert Cassette(tape, "replay").wrap("text").search(["a", "b"], 1) == second


def test_threads(tmp_path: pathlib.Path) -> None:
    recorder, tool = Cassette(tmp_path / "t.jsonl", "record"), Moody()
    replies: list[tuple[str, list[Passage]]] = []

    def work(seed: int) -> None:
        kb, rng = recorder.wrap("text", tool), random.Random(seed)
        for _ in range(50):
            queries = [f"q{rng.randrange(60)}" for _ in range(3)]
            replies.extend(zip(queries, kb.search(queries, 2)))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    player = Cassette(tmp_path / "t.jsonl", "replay").wrap("text")
    assert len(replies) == 1200
    assert all(player.search([query], 2) == [reply] for query, reply in replies)  # every caller saw what was recorded
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert len({line["query"] for line in lines}) == len(lines)


def test_errors(tmp_path: pathlib.Path) -> None:
    tape = tmp_path / "t.jsonl"
    with pytest.raises(ValueError, match="does not exist: there is nothing to replay"):
        Cassette(tape, "replay")
    with pytest.raises(ValueError, match="mode='play' is not one of record, replay, auto"):
        Cassette(tape, "play")  # type: ignore[arg-type]
    Cassette(tape, "record").wrap("text", Moody()).search(["a"], 1)
    with pytest.raises(ValueError, match=r"holds a recording\. Use mode='auto'"):
        Cassette(tape, "record")
    with pytest.raises(ValueError, match="tool 'web': mode='auto' needs the knowledge base"):
        Cassette(tape).wrap("web")
    tape.write_text('{"tool": "text"}\n' + tape.read_text())
    with pytest.raises(ValueError, match=r"t\.jsonl, line 1: not a recorded call"):
        Cassette(tape, "replay")
