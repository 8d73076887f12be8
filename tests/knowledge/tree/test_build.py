"""A tree of summaries: what is summarised, what is found, what a killed build asks again, and failures of the model."""

from __future__ import annotations

import itertools
import json
import pathlib
from typing import Any

import numpy as np
import pytest

from routerl_jax.knowledge.builds import KB_BUILDERS
from routerl_jax.knowledge.load import load_kb
from routerl_jax.knowledge.tree import TreeConfig, TreeKB, build_tree
from routerl_jax.services.config import ChatModelConfig
from routerl_jax.training.config import KnowledgeConfig
from routerl_jax.training.knowledge import open_knowledge_bases
from tests.data.original_rows import as_json
from tests.web_servers import Chats, serving

TOPICS = ("mill", "ship", "lake")
EACH = 8


class TopicEncoder:
    """A text's vector is the topic that it names, and a little of its own."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def embed(self, texts: Any, *, prefix: str | None = None, batch_size: int = 32) -> np.ndarray:
        self.seen += texts
        vectors = np.zeros((len(texts), 8), np.float32)
        for row, text in zip(vectors, texts):
            words = text.lower()
            row[:3] = [words.count(topic) for topic in TOPICS]
            row[3:] = np.random.default_rng(len(text) + sum(map(ord, text))).normal(size=5) * 0.05
            if "overview" in words:
                row[3] += 3
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)


def corpus(directory: pathlib.Path) -> str:
    rows = [
        {"id": f"{topic}{i}", "title": f"{topic} {i}", "text": f"The {topic} number {i} is {i * 7} years old."}
        for topic in TOPICS
        for i in range(EACH)
    ]
    return str(as_json(directory / "corpus.jsonl", *rows))


def summary(messages: list[dict[str, Any]]) -> str:
    """Names the topics of what it was shown."""
    text = str(messages[-1]["content"]).partition("reply with the summary alone.")[2]
    return f"An overview of {' and '.join(topic for topic in TOPICS if topic in text)} things, {len(text)} letters."


def config(directory: pathlib.Path, url: str, **changes: Any) -> TreeConfig:
    given: dict[str, Any] = {
        "corpus": corpus(directory),
        "llm": ChatModelConfig(model="m", base_url=f"{url}/v1", retries=0),
        "dimensions": 3,
        "levels": 3,
        "index": "exact",
        "encoder": "topics",
        "shard_size": 16,
    }
    return TreeConfig(**{**given, **changes})


def test_leaves_and_summaries_are_found_together(tmp_path: pathlib.Path) -> None:
    with serving(handler := Chats(summary)) as server:
        report = build_tree(config(tmp_path, server.url), tmp_path / "kb", progress=False, encoder=TopicEncoder())
        asked = len(handler.bodies)
        kb = load_kb(tmp_path / "kb", encoder=TopicEncoder())  # type: ignore[arg-type]
        assert isinstance(kb, TreeKB)
        leaves = len(TOPICS) * EACH
        assert report.count == len(kb) == leaves + asked
        assert report.numbers["summaries"] == asked
        levels = kb.store.manifest.settings["levels"]
        assert levels[0] == leaves
        assert sum(levels[1:]) == asked
        assert all(less < more for more, less in itertools.pairwise(levels))
        for name, children in kb.children.items():  # each prompt held its children, and nothing else
            assert name.startswith("summary#")
            assert children
        first = [name for name in kb.children if name.startswith("summary#1.")]
        below = {leaf for name in first for leaf in kb.leaves(name)}
        assert below == {f"{topic}{i}" for topic in TOPICS for i in range(EACH)}
        assert all(len({leaf[:4] for leaf in kb.children[name]}) == 1 for name in first)  # groups are the topics
        (found,) = kb.search(["mill mill overview"], 3)
        assert found[0].id.startswith("summary#")
        assert "mill" in found[0].text
        (plain,) = kb.search(["ship ship ship"], 3)
        assert {passage.id[:4] for passage in plain} == {"ship"}
        prompts = [body["messages"][-1]["content"] for body in handler.bodies]
        assert any("The mill number 3 is 21 years old." in prompt for prompt in prompts)
        assert all(
            body["max_tokens"] == 200 and "at most 100 words" in body["messages"][-1]["content"]
            for body in handler.bodies
        )
        again = build_tree(config(tmp_path, server.url), tmp_path / "kb", progress=False, encoder=TopicEncoder())
        assert (again.numbers["embedded"], len(handler.bodies)) == (0, asked)
        assert not list((tmp_path / "kb").glob("level-*"))


def test_a_failed_build_asks_for_the_rest_alone(tmp_path: pathlib.Path) -> None:
    """The endpoint refuses one topic: the others' summaries are kept, and so are the leaves' vectors."""
    with serving(handler := Chats(summary)) as server:
        handler.refuse = lambda body: "no ships" if "The ship" in body["messages"][-1]["content"] else ""
        encoder = TopicEncoder()
        given = config(tmp_path, server.url)
        with pytest.raises(ValueError, match=r"of level 1 failed, more than max_failures=0.05 allows \(.*no ships"):
            build_tree(given, tmp_path / "kb", progress=False, encoder=encoder)
        assert not (tmp_path / "kb").exists()
        done, embedded = len(handler.bodies), len(encoder.seen)
        handler.refuse = lambda body: ""
        report = build_tree(given, tmp_path / "kb", progress=False, encoder=encoder)
        prompts = [body["messages"][-1]["content"] for body in handler.bodies[done:]]
        first = [prompt for prompt in prompts if "years old" in prompt]
        assert first
        assert all("The ship" in prompt for prompt in first)
        assert not any("years old" in text for text in encoder.seen[embedded:])
        assert report.failed == {}


def test_failures_that_are_allowed_leave_a_gap(tmp_path: pathlib.Path) -> None:
    with serving(handler := Chats(summary)) as server:
        handler.reply = lambda messages: " " if "The lake" in str(messages) else summary(messages)
        given = config(tmp_path, server.url, max_failures=0.9, levels=1)
        report = build_tree(given, tmp_path / "kb", progress=False, encoder=TopicEncoder())
        assert report.failed
        assert all("an answer without text" in reason for reason in report.failed.values())
        kb: Any = load_kb(tmp_path / "kb", encoder=TopicEncoder())  # type: ignore[arg-type]
        assert not any(leaf.startswith("lake") for name in kb.children for leaf in kb.leaves(name))
        assert {passage.id[:4] for passage in kb.search(["lake"], 3)[0]} == {"lake"}


def test_another_corpus_needs_another_place(tmp_path: pathlib.Path) -> None:
    """Before a summary is paid for."""
    with serving(handler := Chats(summary)) as server:
        given = config(tmp_path, server.url, levels=1)
        build_tree(given, tmp_path / "kb", progress=False, encoder=TopicEncoder())
        asked = len(handler.bodies)
        (tmp_path / "corpus.jsonl").open("a").write(json.dumps({"id": "x", "text": "A mill."}) + "\n")
        other = TreeConfig(**{**vars(given)})
        with pytest.raises(ValueError, match="already holds a knowledge base"):
            build_tree(other, tmp_path / "kb", progress=False, encoder=TopicEncoder())
        assert len(handler.bodies) == asked


def test_as_a_runs_knowledge_base(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its kind, with the model in `settings`; without one the message names what is missing."""
    monkeypatch.setenv("ROUTERL_CACHE", str(tmp_path / "cache"))
    assert KB_BUILDERS.get("tree").config is TreeConfig
    with pytest.raises(ValueError, match="kind='graph' is not 'tree'"):
        TreeConfig(kind="graph")
    spec = KnowledgeConfig(source=corpus(tmp_path), kind="tree", index="exact")
    with pytest.raises(ValueError, match="`model` is not set"):
        open_knowledge_bases({"text": spec}, progress=False)
    with serving(Chats(summary)) as server:
        llm = {"model": "m", "base_url": f"{server.url}/v1", "retries": 0}
        spec = KnowledgeConfig(source=spec.source, kind="tree", index="exact", settings={"llm": llm, "levels": 1})
        tools: Any = open_knowledge_bases({"text": spec}, progress=False)
        found = tools["text"].search(["How old is ship number 5?"], 20)[0]
        assert "ship5" in [passage.id for passage in found[:3]]
        assert len(tools["text"]) > len(TOPICS) * EACH
