"""LightRAG's package behind our interface: what the model is asked, what is found, failures. Skipped without the package."""

from __future__ import annotations

import itertools
import json
import pathlib
import re
import sys
from typing import Any

import numpy as np
import pytest

from routerl_jax.knowledge import light_rag
from routerl_jax.knowledge.light_rag import GRAPH, LightRAGConfig, LightRAGKB, build_lightrag
from routerl_jax.knowledge.load import load_kb
from routerl_jax.llms.config import ChatModelConfig
from tests.data.original_rows import as_json
from tests.web_servers import Chats, serving

ROWS = (
    {"id": "a", "title": "Ada", "text": "Ada met Boris in Kyoto."},
    {"id": "b", "title": "Boris", "text": "Boris built the mill of Carlow."},
    {"id": "b-again", "title": "Boris", "text": "Boris built the mill of Carlow."},
    {"id": "d", "title": "Dora", "text": "Dora painted Carlow."},
)
NAME = re.compile(r"\b[A-Z][a-z]+\b")


class NameEncoder:
    """A text's vector counts the names in it."""

    def embed(self, texts: Any, *, prefix: str | None = None, batch_size: int = 32) -> np.ndarray:
        vectors = np.full((len(texts), 16), 1e-3, np.float32)
        for row, text in zip(vectors, texts):
            for name in NAME.findall(text):
                row[sum(map(ord, name)) % 16] += 1
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def reply(messages: list[dict[str, Any]]) -> str:
    """Extracts names, each related to the next; the keywords of a query are its names."""
    prompt = messages[-1]["content"]
    if "User Query:" in prompt:
        names = NAME.findall(prompt.rpartition("User Query:")[2].partition("\n")[0])
        return json.dumps({"high_level_keywords": ["knows"], "low_level_keywords": names})
    names = list(dict.fromkeys(NAME.findall(prompt.rpartition("---Input Text---")[2].split("```")[1])))
    rows = [f"entity<|#|>{name}<|#|>Person<|#|>{name} is a name." for name in names]
    rows += [
        f"relation<|#|>{one}<|#|>{other}<|#|>knows<|#|>{one} knows {other}." for one, other in itertools.pairwise(names)
    ]
    return "\n".join([*rows, "<|COMPLETE|>"])


def config(directory: pathlib.Path, url: str, **changes: Any) -> LightRAGConfig:
    llm = ChatModelConfig(model="m", base_url=f"{url}/v1", retries=0)
    given = {"corpus": str(as_json(directory / "corpus.jsonl", *ROWS)), "llm": llm, "gleanings": 0, "encoder": "names"}
    return LightRAGConfig(**{**given, **changes})


def opened(directory: pathlib.Path) -> LightRAGKB:
    kb = load_kb(directory, encoder=NameEncoder())  # type: ignore[arg-type]
    assert isinstance(kb, LightRAGKB)
    return kb


def test_finds_passages_and_what_the_graph_says(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("lightrag", reason='LightRAG is not installed: pip install -e ".[lightrag]"')
    with serving(handler := Chats(reply)) as server:
        given = config(tmp_path, server.url)
        made = build_lightrag(given, tmp_path / "kb", progress=False, encoder=NameEncoder())
        assert (made.count, len(made.failed), len(handler.bodies)) == (4, 0, 3)  # equal texts are extracted once
        assert {body["model"] for body in handler.bodies} == {"m"}
        kb = opened(tmp_path / "kb")
        ((graph, *passages),) = kb.search(["Where is Boris?"], 3)
        assert graph.id == GRAPH
        assert "Boris: Boris is a name." in graph.text
        assert re.search(r"(Ada and Boris|Boris and Ada): Ada knows Boris\.", graph.text)
        assert {passage.id for passage in passages} <= {"a", "b", "d"}
        assert passages[0].text == {row["id"]: row["text"] for row in ROWS}[passages[0].id]
        assert len(handler.bodies) == 4  # the keywords of the query
        assert "User Query: Where is Boris?" in handler.bodies[-1]["messages"][-1]["content"]
        again = opened(tmp_path / "kb").search(["Where is Boris?", "Bo"], 3)
        assert [one.id for one in again[0]] == [one.id for one in (graph, *passages)]
        assert len(handler.bodies) == 5  # only of the other query
        done = build_lightrag(given, tmp_path / "kb", progress=False, encoder=NameEncoder())
        assert (done.count, len(handler.bodies)) == (4, 5)


def test_without_the_graph_and_without_the_model(tmp_path: pathlib.Path) -> None:
    """The mode `naive` compares vectors of passages, and asks the model for nothing."""
    pytest.importorskip("lightrag", reason='LightRAG is not installed: pip install -e ".[lightrag]"')
    with serving(handler := Chats(reply)) as server:
        given = config(tmp_path, server.url, mode="naive", graph_words=0)
        build_lightrag(given, tmp_path / "kb", progress=False, encoder=NameEncoder())
        asked = len(handler.bodies)
        ((first, *_),) = opened(tmp_path / "kb").search(["Dora Carlow"], 2)
        assert (first.id, first.score, len(handler.bodies)) == ("d", 1.0, asked)


def test_failures_are_said_and_asked_again(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("lightrag", reason='LightRAG is not installed: pip install -e ".[lightrag]"')
    with serving(handler := Chats(reply)) as server:
        given = config(tmp_path, server.url)
        handler.refuse = lambda body: "no Dora" if "Dora painted" in body["messages"][-1]["content"] else ""
        with pytest.raises(
            ValueError, match=r"1 of 4 extractions failed, more than max_failures=0.05 allows \(.*no Dora"
        ):
            build_lightrag(given, tmp_path / "kb", progress=False, encoder=NameEncoder())
        assert not (tmp_path / "kb").exists()
        handler.refuse = lambda body: ""
        before = len(handler.bodies)
        build_lightrag(given, tmp_path / "kb", progress=False, encoder=NameEncoder())
        assert len(handler.bodies) == before + 1  # the others' answers were kept
        kb = opened(tmp_path / "kb")
        handler.refuse = lambda body: "no keywords"
        with pytest.raises(ValueError, match="no keywords"):
            kb.search(["Where is Kyoto?"], 2)


def test_a_missing_package_is_named(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightrag", None)
    light_rag._package.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"LightRAG needs packages that can't be imported .*\[lightrag\]"):
            build_lightrag(config(tmp_path, "http://127.0.0.1:1"), tmp_path / "kb", encoder=NameEncoder())
    finally:
        light_rag._package.cache_clear()
