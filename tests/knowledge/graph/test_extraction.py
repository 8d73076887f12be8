"""Extraction by a chat model: calls, failures, and a cache that survives a kill."""

import contextlib
import pathlib
import signal
import sqlite3

from routerl_jax.knowledge.graph.triples import ModelExtractor
from routerl_jax.services.base import Completion
from routerl_jax.services.cache import MemoryCache, SqliteCache
from tests.knowledge.graph.helpers import PASSAGES, TRIPLES, Scripted, knowing
from tests.programs import finish, start


def as_lists(triples) -> list[list[str]]:
    return [list(triple) for triple in triples]


def test_two_calls_a_passage() -> None:
    model = Scripted(knowing)
    found = ModelExtractor(model).extract(PASSAGES)
    assert [as_lists(extraction.triples) for extraction in found] == list(TRIPLES.values())
    assert found[1].entities == ("Jedburgh", "Mary Somerville")
    assert len(model.asked) == 2 * len(PASSAGES)
    assert 'Names: ["Jedburgh", "Mary Somerville"]' in model.asked[-4]
    assert not any(extraction.error for extraction in found)


def test_one_call_a_passage() -> None:
    model = Scripted(lambda messages: '{"triples": [["a", "is", "b"]]}')
    found = ModelExtractor(model, entities_first=False).extract(PASSAGES[:2])
    assert [extraction.triples for extraction in found] == [(("a", "is", "b"),)] * 2
    assert found[0].entities == ("a", "b")
    assert model.asked == [f"{p.title}\n{p.text}" for p in PASSAGES[:2]]


def test_failures_are_asked_once_more_then_listed_and_not_kept() -> None:
    def answer(messages):
        text = messages[-1].content
        if text.startswith("London"):
            return Completion(error="429 too many requests", finish="error")
        if text.startswith("Jedburgh") and "Names:" in text:
            return "I would rather not."
        return knowing(messages)

    cache = MemoryCache()
    model = Scripted(answer)
    found = ModelExtractor(model, cache).extract(PASSAGES)
    assert {one.id: extraction.error for one, extraction in zip(PASSAGES, found) if extraction.error} == {
        "p2": "no list of triples in 'I would rather not.'",
        "p3": "429 too many requests",
    }
    assert [bool(extraction.triples) for extraction in found] == [True, True, False, False, False]
    assert set(model.temperatures) == {0.0, 0.5}
    again = Scripted(knowing)
    found = ModelExtractor(again, cache).extract(PASSAGES)
    assert [as_lists(extraction.triples) for extraction in found] == list(TRIPLES.values())
    assert {text.partition("\n")[0] for text in again.asked} == {"Jedburgh", "London"}


def test_cache_depends_on_model_prompts_and_text() -> None:
    cache = MemoryCache()
    ModelExtractor(Scripted(knowing), cache).extract(PASSAGES)
    known = Scripted(knowing)
    ModelExtractor(known, cache).extract(PASSAGES[::-1] + PASSAGES)
    assert known.asked == []
    other = Scripted(knowing)
    other.name = "other"
    ModelExtractor(other, cache).extract(PASSAGES)
    assert len(other.asked) == 2 * len(PASSAGES)
    for count in (2 * len(PASSAGES), 0):
        seeded = Scripted(knowing)
        seeded.settings = {"seed": 1}
        ModelExtractor(seeded, cache).extract(PASSAGES)
        assert len(seeded.asked) == count


def test_cache_of_an_earlier_version_is_taken_over(tmp_path: pathlib.Path) -> None:
    """Its answers are asked for again."""
    with contextlib.closing(sqlite3.connect(tmp_path / "cache.sqlite")) as file, file:
        file.execute("CREATE TABLE extraction (key TEXT PRIMARY KEY, row TEXT NOT NULL) WITHOUT ROWID")
    for asked in (2 * len(PASSAGES), 0):
        model = Scripted(knowing)
        with contextlib.closing(SqliteCache(tmp_path / "cache.sqlite", max_bytes=None)) as cache:
            found = ModelExtractor(model, cache).extract(PASSAGES)
        assert [as_lists(extraction.triples) for extraction in found] == list(TRIPLES.values())
        assert len(model.asked) == asked


def test_resume_after_kill(tmp_path: pathlib.Path) -> None:
    """The program dies in the third batch of 64; the next run asks for what the first two did not hold."""
    finish(start("tests.knowledge.graph.killed", "extract", tmp_path, "130"), status=-signal.SIGKILL)
    finish(start("tests.knowledge.graph.killed", "extract", tmp_path, "0"))
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 130 + 200 - 128
    assert len(set(asked)) == 200
