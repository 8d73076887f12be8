"""Reciprocal rank fusion against sums by hand, and knowledge bases that are made of others."""

import pathlib
from typing import Any

import pytest

from routerl_jax.core.types import Passage, TextAndImage
from routerl_jax.extras.kb_server.app import ServeConfig, open_served
from routerl_jax.knowledge.base import KnowledgeBase
from routerl_jax.knowledge.build import BuildConfig, build_from_passages
from routerl_jax.knowledge.hybrid import HybridConfig, HybridKB, build_hybrid, reciprocal_rank_fusion
from routerl_jax.knowledge.load import load_kb
from tests.knowledge.helpers import HashEncoder, build_words, make_passages


def passages(names: str) -> list[Passage]:
    return [Passage(id=name, title="", text=name) for name in names]


def test_fusion() -> None:
    found = reciprocal_rank_fusion([passages("abc"), passages("cad"), passages("e")], 10)
    expected = {"a": 1 / 61 + 1 / 62, "c": 1 / 63 + 1 / 61, "e": 1 / 61, "b": 1 / 62, "d": 1 / 63}
    assert {p.id: p.score for p in found} == pytest.approx(expected)
    assert [p.id for p in found] == list(expected)
    weighted = reciprocal_rank_fusion([passages("ab"), passages("ba")], 1, weights=[1, 2], constant=0)
    assert [(p.id, p.score) for p in weighted] == [("b", 0.5 + 2)]
    tied = reciprocal_rank_fusion([passages("ab"), passages("ba")], 2)
    assert [p.id for p in tied] == ["a", "b"]
    other = [Passage(id="a", title="", text="another corpus's a")]
    assert len(reciprocal_rank_fusion([passages("a"), other], 5)) == 2


class Fixed(KnowledgeBase):
    """Finds what it is told to; remembers what it was asked."""

    def __init__(self, names: str, *, cost: float = 1.0, reads: str = "text") -> None:
        self.name, self.names, self.cost, self.reads = names, names, cost, frozenset(reads.split())
        self.asked: list[object] = []

    def __len__(self) -> int:
        return len(self.names)

    def _search(self, queries, k):
        self.asked += [(query, k) for query in queries]
        return [passages(self.names)[:k] for _ in queries]


def test_members(monkeypatch: pytest.MonkeyPatch) -> None:
    text, pictures = Fixed("abc"), Fixed("cb", cost=2.5, reads="text image")
    kb = HybridKB([text, pictures], depth=3)
    assert (kb.cost, len(kb), kb.reads) == (3.5, 5, {"text", "image"})
    assert [p.id for p in kb.search(["q"], 2)[0]] == ["b", "c"] or [p.id for p in kb.search(["q"], 2)[0]] == ["c", "b"]
    assert text.asked[0] == ("q", 6)
    both, alone = TextAndImage(text="q", image=b"x"), TextAndImage(image=b"x")
    monkeypatch.setattr("routerl_jax.knowledge.base.image_digest", lambda image: "digest")
    text.asked, pictures.asked = [], []
    found = kb.search([both, alone, "  "], 1)
    assert text.asked == [("q", 3)]
    assert pictures.asked == [(both, 3), (alone, 3)]
    assert [len(row) for row in found] == [1, 1, 0]
    bad: Any
    for bad in ({"weights": [1.0]}, {"weights": [1.0, -1.0]}, {"depth": 0}, {"constant": -1}):
        with pytest.raises(ValueError, match=r"weights|depth"):
            HybridKB([text, pictures], **bad)
    with pytest.raises(ValueError, match="at least one member"):
        HybridKB([])


def test_directories(tmp_path: pathlib.Path) -> None:
    """Dense and BM25 of one corpus; the fused ranking is that of its members' own; all may be moved together."""
    corpus, encoder = make_passages(50), HashEncoder()
    build_from_passages(corpus, BuildConfig(), tmp_path / "a" / "dense", progress=False, encoder=encoder)
    build_words(corpus, tmp_path / "a" / "words")
    config = HybridConfig(members=(str(tmp_path / "a" / "dense"), str(tmp_path / "a" / "words")), weights=(1.0, 0.5))
    report = build_hybrid(config, tmp_path / "a" / "both")
    assert report.notes["members"] == "../dense, ../words"
    (tmp_path / "a").rename(tmp_path / "b")
    kb = load_kb(tmp_path / "b" / "both", encoder=encoder)
    query = "Text № 7"
    assert load_kb(tmp_path / "b" / "both", encoder=encoder, index="exact").search([query], 5)
    places = {"words": str(tmp_path / "b" / "words")}
    assert open_served(ServeConfig(knowledge_bases=places, index="exact", warm_up=False))
    with pytest.raises(ValueError, match=r"port=70000 must be in"):
        ServeConfig(port=70_000)
    parts = [load_kb(tmp_path / "b" / "dense", encoder=encoder), load_kb(tmp_path / "b" / "words")]
    expected = reciprocal_rank_fusion([part.search([query], 10)[0] for part in parts], 5, weights=[1, 0.5])
    assert kb.search([query], 5) == [expected]
    assert kb.cost == pytest.approx(1.1)

    with pytest.raises(ValueError, match="already holds a knowledge base"):
        build_hybrid(HybridConfig(members=(str(tmp_path / "b" / "dense"),)), tmp_path / "b" / "both")
    with pytest.raises(ValueError, match=r"already holds a knowledge base \(dense_text\)"):
        build_hybrid(HybridConfig(members=(str(tmp_path / "b" / "words"),), overwrite=True), tmp_path / "b" / "dense")
    with pytest.raises(ValueError, match="is not a knowledge base"):
        build_hybrid(HybridConfig(members=(str(tmp_path),)), tmp_path / "x")
    with pytest.raises(ValueError, match="members must be set"):
        build_hybrid(HybridConfig(), tmp_path / "x")
    (tmp_path / "b" / "words" / "kb.json").unlink()
    with pytest.raises(ValueError, match="is missing"):
        load_kb(tmp_path / "b" / "both", encoder=encoder)
