"""LightRAG's and GraphRAG's packages behind our interface: questions to the model, results, failures. Skipped without them."""

from __future__ import annotations

import json
import pathlib
import re
import sys
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import pytest

from routerl_jax.extras.graph_packages import graph_rag, light_rag
from routerl_jax.extras.graph_packages.graph_rag import GraphRAGConfig, GraphRAGKB, build_graphrag
from routerl_jax.extras.graph_packages.light_rag import LightRAGConfig, LightRAGKB, build_lightrag
from routerl_jax.knowledge.base import KnowledgeBase
from routerl_jax.knowledge.load import load_kb
from routerl_jax.services.config import ChatModelConfig
from tests.data.original_rows import as_json
from tests.web_servers import Chats, serving

ROWS = (
    {"id": "a", "title": "Ada", "text": "Ada met Boris in Kyoto."},
    {"id": "b", "title": "Boris", "text": "Boris built the mill of Carlow."},
    {"id": "b-again", "title": "Boris", "text": "Boris built the mill of Carlow."},
    {"id": "d", "title": "Dora", "text": "Dora painted Carlow."},
)
NAME = re.compile(r"\b[A-Z][a-z]+\b")
Kind = TypeVar("Kind", LightRAGConfig, GraphRAGConfig)


class NameEncoder:
    """A text's vector counts the names in it."""

    def embed(self, texts: Any, *, prefix: str | None = None, batch_size: int = 32) -> np.ndarray:
        vectors = np.full((len(texts), 16), 1e-3, np.float32)
        for row, text in zip(vectors, texts):
            for name in NAME.findall(text):
                row[sum(map(ord, name)) % 16] += 1
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def lightrag_reply(messages: list[dict[str, Any]]) -> str:
    """Extracts names, each related to the next; the keywords of a query are its names."""
    prompt = messages[-1]["content"]
    if "User Query:" in prompt:
        names = NAME.findall(prompt.rpartition("User Query:")[2].partition("\n")[0])
        return json.dumps({"high_level_keywords": ["knows"], "low_level_keywords": names})
    names = list(dict.fromkeys(NAME.findall(prompt.rpartition("---Input Text---")[2].split("```")[1])))
    rows = [f"entity<|#|>{name}<|#|>Person<|#|>{name} is a name." for name in names]
    rows += [f"relation<|#|>{one}<|#|>{other}<|#|>knows<|#|>{one} knows {other}." for one, other in pairwise(names)]
    return "\n".join([*rows, "<|COMPLETE|>"])


def graphrag_reply(messages: list[dict[str, Any]]) -> str:
    """Extracts names, each related to the next, and reports on communities."""
    prompt = messages[-1]["content"]
    if "-Goal-" not in prompt:
        report = {"title": "People", "summary": "They know each other.", "rating": 5.0, "rating_explanation": "few"}
        return json.dumps({**report, "findings": [{"summary": "Mill", "explanation": "Boris built it."}]})
    names = list(dict.fromkeys(NAME.findall(prompt.rpartition("Text:")[2].partition("###")[0])))
    rows = [f'("entity"<|>{name.upper()}<|>PERSON<|>{name} is a name.)' for name in names]
    for one, other in pairwise(names):
        rows.append(f'("relationship"<|>{one.upper()}<|>{other.upper()}<|>{one} knows {other}.<|>5)')
    return "\n##\n".join(rows) + "\n<|COMPLETE|>"


def config(kind: type[Kind], directory: pathlib.Path, url: str, **changes: Any) -> Kind:
    llm = ChatModelConfig(model="m", base_url=f"{url}/v1", retries=0)
    given = {"corpus": str(as_json(directory / "corpus.jsonl", *ROWS)), "llm": llm, "gleanings": 0, "encoder": "names"}
    return kind(**{**given, **changes})


def opened(directory: pathlib.Path) -> KnowledgeBase:
    return load_kb(directory, encoder=NameEncoder())  # type: ignore[arg-type]


def test_lightrag_finds_passages_and_what_the_graph_says(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("lightrag", reason='LightRAG is not installed: pip install -e ".[lightrag]"')
    with serving(handler := Chats(lightrag_reply)) as server:
        given = config(LightRAGConfig, tmp_path, server.url)
        made = build_lightrag(given, tmp_path / "kb", progress=False, encoder=NameEncoder())
        assert (made.count, made.numbers["failed answers"], len(handler.bodies)) == (
            4,
            0,
            3,
        )  # equal texts are extracted once
        assert {body["model"] for body in handler.bodies} == {"m"}
        kb = opened(tmp_path / "kb")
        assert isinstance(kb, LightRAGKB)
        ((graph, *passages),) = kb.search(["Where is Boris?"], 3)
        assert graph.id == "lightrag#graph"
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


def test_lightrag_without_the_graph_and_without_the_model(tmp_path: pathlib.Path) -> None:
    """The mode `naive` compares vectors of passages, and asks the model for nothing."""
    pytest.importorskip("lightrag", reason='LightRAG is not installed: pip install -e ".[lightrag]"')
    with serving(handler := Chats(lightrag_reply)) as server:
        given = config(LightRAGConfig, tmp_path, server.url, mode="naive", graph_words=0)
        build_lightrag(given, tmp_path / "kb", progress=False, encoder=NameEncoder())
        asked = len(handler.bodies)
        ((first, *_),) = opened(tmp_path / "kb").search(["Dora Carlow"], 2)
        assert (first.id, first.score, len(handler.bodies)) == ("d", 1.0, asked)


def test_lightrag_failures_are_said_and_asked_again(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("lightrag", reason='LightRAG is not installed: pip install -e ".[lightrag]"')
    with serving(handler := Chats(lightrag_reply)) as server:
        given = config(LightRAGConfig, tmp_path, server.url)
        handler.refuse = lambda body: "no Dora" if "Dora painted" in body["messages"][-1]["content"] else ""
        with pytest.raises(
            ValueError, match=r"\d of \d answers failed, more than max_failures=0.05 allows \(.*no Dora"
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


def test_graphrag_finds_passages_and_what_the_graph_says(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("graphrag", reason='GraphRAG is not installed: pip install -e ".[graphrag]"')
    with serving(handler := Chats(graphrag_reply)) as server:
        given = config(GraphRAGConfig, tmp_path, server.url)
        made = build_graphrag(given, tmp_path / "kb", progress=False, encoder=NameEncoder())
        assert (made.count, made.numbers["failed answers"], made.numbers["answers"]) == (4, 0, len(handler.bodies))
        prompts = [body["messages"][-1]["content"] for body in handler.bodies]
        assert sum("-Goal-" in prompt and "Dora painted" in prompt for prompt in prompts) == 1
        asked = len(handler.bodies)
        kb = opened(tmp_path / "kb")
        assert isinstance(kb, GraphRAGKB)
        ((graph, *passages),) = kb.search(["Where is Boris?"], 3)
        assert graph.id == "graphrag#graph"
        assert "BORIS: Boris is a name." in graph.text
        assert "They know each other." in graph.text  # the report on a community
        assert {passage.id for passage in passages} <= {"a", "b", "d"}
        assert passages[0].text == {row["id"]: row["text"] for row in ROWS}[passages[0].id]
        assert [one.id for one in opened(tmp_path / "kb").search(["Where is Boris?"], 3)[0]] == [
            one.id for one in (graph, *passages)
        ]
        assert len(handler.bodies) == asked  # a search asks nothing
        handler.refuse = lambda body: "no more"
        with pytest.raises(ValueError, match=r"failed .*no more"):
            build_graphrag(
                config(GraphRAGConfig, tmp_path, server.url, gleanings=2),
                tmp_path / "other",
                progress=False,
                encoder=NameEncoder(),
            )


@pytest.mark.parametrize(
    ("module", "package", "build", "kind"),
    [
        (light_rag, "lightrag", build_lightrag, LightRAGConfig),
        (graph_rag, "graphrag_llm.completion", build_graphrag, GraphRAGConfig),
    ],
)
def test_a_missing_package_is_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, module: Any, package: str, build: Any, kind: Any
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    module._package.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"RAG needs packages that can't be imported .*\[(lightrag|graphrag)\]"):
            build(config(kind, tmp_path, "http://127.0.0.1:1"), tmp_path / "kb", encoder=NameEncoder())
    finally:
        module._package.cache_clear()
