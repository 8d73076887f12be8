"""Builds of graph knowledge bases: where triples come from, reports, kills, and what is refused."""

import dataclasses
import gzip
import json
import pathlib
import signal

import pytest

from routerl_jax.core.config import from_config_dict, to_config_dict
from routerl_jax.core.types import Passage
from routerl_jax.knowledge.builds import KB_BUILDERS, changes
from routerl_jax.knowledge.graph.build import GraphConfig, build_graph, build_graph_from_passages
from routerl_jax.knowledge.graph.triples import PrecomputedTriples, names, rule_extraction
from routerl_jax.knowledge.load import load_kb
from routerl_jax.services.base import Completion
from tests.knowledge.graph import killed
from tests.knowledge.graph.helpers import PASSAGES, TRIPLES, Scripted, knowing, write_triples
from tests.knowledge.helpers import HashEncoder, files_of, write_jsonl
from tests.programs import finish, start


def test_report(tmp_path: pathlib.Path) -> None:
    rows = [{"id": p.id, "title": p.title, "text": p.text} for p in PASSAGES]
    corpus = str(write_jsonl(tmp_path / "corpus.jsonl", rows))
    config = GraphConfig(corpus=corpus, extractor="given", triples=write_triples(tmp_path / "triples.jsonl"))
    assert KB_BUILDERS.get("graph").config is GraphConfig
    report = build_graph(config, tmp_path / "kb", progress=False, encoder=HashEncoder(32))
    assert (report.kind, report.count) == ("graph", 5)
    counted = {"entities": 7, "facts": 6, "edges": 6 + 10, "isolated": 1, "failures": 0, "dropped": 0}
    assert report.numbers.items() >= counted.items()
    assert set(report.seconds) == {"read", "extract", "embed", "graph", "total"}
    assert set(report.bytes) == {"passages", "embeddings", "entities", "facts", "index"}
    json.dumps(dataclasses.asdict(report))
    assert "7 entities, 6 facts, 16 edges" in str(report)
    again = build_graph(config, tmp_path / "kb", progress=False, encoder=HashEncoder(32))
    assert again.count == 5
    assert "embed" not in again.seconds
    store = load_kb(tmp_path / "kb", encoder=HashEncoder(32)).store  # pyright: ignore[reportAttributeAccessIssue]
    assert "configs/build_kb.py:graph" in store.hint
    other = dataclasses.replace(config, extractor="rules", triples="")
    with pytest.raises(ValueError, match="already holds a knowledge base"):
        build_graph(other, tmp_path / "kb", progress=False, encoder=HashEncoder())
    # what was extracted can be given to another build
    reused = dataclasses.replace(config, triples=str(tmp_path / "kb" / "triples.jsonl.gz"))
    build_graph(reused, tmp_path / "kb2", progress=False, encoder=HashEncoder(32))
    ours, theirs = files_of(tmp_path / "kb"), files_of(tmp_path / "kb2")
    assert {name for name in ours if ours[name] != theirs[name]} == {"kb.json"}


def test_language_model(tmp_path: pathlib.Path) -> None:
    """Failures beyond the allowed share stop the build; the next run asks for those alone, and the graph is complete."""
    config = GraphConfig(extractor="llm")

    def refusing(messages):
        if messages[-1].content.startswith("Jedburgh"):
            return Completion(error="503", finish="error")
        return knowing(messages)

    def build(model: Scripted, config: GraphConfig, name: str = "kb"):
        return build_graph_from_passages(
            PASSAGES, config, tmp_path / name, progress=False, encoder=HashEncoder(), llm=model
        )

    with pytest.raises(ValueError, match=r"1 of 5 passages failed, more than max_failures=0.05 allows \('p2': 503\)"):
        build(Scripted(refusing), config)
    assert not (tmp_path / "kb").exists()
    lenient = build(Scripted(refusing), dataclasses.replace(config, max_failures=0.2), "lenient")
    assert (lenient.numbers["failures"], lenient.failed, lenient.numbers["isolated"]) == (1, {"p2": "503"}, 2)
    model = Scripted(knowing)
    report = build(model, config)
    assert {text.partition("\n")[0] for text in model.asked} == {"Jedburgh"}
    assert report.numbers.items() >= {"failures": 0, "facts": 6, "isolated": 1}.items()
    with gzip.open(tmp_path / "kb" / "triples.jsonl.gz", "rt") as file:
        assert {row["passage_id"]: row["triples"] for row in map(json.loads, file)} == TRIPLES


@pytest.mark.parametrize("where", ["extract", "embed", "graph"])
def test_kill_9(tmp_path: pathlib.Path, where: str) -> None:
    """After SIGKILL the next run does what is left, and ends in the same files as an uninterrupted one."""
    first, whole = tmp_path / "first", tmp_path / "whole"
    first.mkdir()
    whole.mkdir()
    finish(start("tests.knowledge.graph.killed", "build", first, where), status=-signal.SIGKILL)
    assert not (first / "kb").exists()
    killed.build(first, "none")
    killed.build(whole, "none")
    assert files_of(first / "kb") == files_of(whole / "kb")
    asked = (first / "asked").read_text().splitlines()
    assert len(asked) == (130 + 200 - 128 if where == "extract" else 200)
    embedded = (first / "embedded").read_text().splitlines()
    assert len(embedded) - len(set(embedded)) <= 32  # at most the shard that was being embedded
    assert not list(tmp_path.glob("*/*.tmp-*"))


def test_config() -> None:
    config = to_config_dict(GraphConfig())
    config.walk.link_facts = 3
    config.synonyms.threshold = 0.9
    typed = from_config_dict(GraphConfig, config)
    assert changes(typed) == {"kind": "graph", "walk.link_facts": 3, "synonyms.threshold": 0.9}
    for wrong, message in (
        ({"extractor": "spacy"}, "extractor='spacy' is not one of"),
        ({"extractor": "given"}, "a file of triples goes with 'given'"),
        ({"triples": "x.jsonl"}, "a file of triples goes with 'given'"),
        ({"entities_first": False}, "it needs 'llm'"),
        ({"llm": {"model": "x"}}, "llm is set, but extractor='rules'"),
        ({"max_failures": 2.0}, "max_failures"),
        ({"synonyms": {"threshold": 0.0}}, "threshold"),
        ({"synonyms": {"most": 0}}, "most"),
        ({"walk": {"dampingg": 0.5}}, "did you mean"),
        ({"kind": "dense_text"}, "kind="),
    ):
        with pytest.raises(ValueError, match=message):
            from_config_dict(GraphConfig, wrong)


def test_bad_input(tmp_path: pathlib.Path) -> None:
    def build(config: GraphConfig, passages=PASSAGES):
        return build_graph_from_passages(passages, config, tmp_path / "kb", progress=False, encoder=HashEncoder())

    with pytest.raises(ValueError, match="corpus must be set"):
        build_graph(GraphConfig(), tmp_path / "kb")
    with pytest.raises(ValueError, match="must be empty"):
        build(GraphConfig(corpus="x"))
    with pytest.raises(ValueError, match="'p0' occurs twice"):
        build(GraphConfig(), PASSAGES + PASSAGES[:1])
    with pytest.raises(ValueError, match="the chat model's `model` is not set"):
        build(GraphConfig(extractor="llm"))
    foreign = write_triples(tmp_path / "foreign.jsonl", {"z9": [["a", "b", "c"]]})
    with pytest.raises(ValueError, match="has triples for none of the 5 passages"):
        build(GraphConfig(extractor="given", triples=foreign))
    with pytest.raises(ValueError, match=r"absent\.jsonl does not exist"):
        build(GraphConfig(extractor="given", triples=str(tmp_path / "absent.jsonl")))
    assert not (tmp_path / "kb").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"passage_id": "p0"}', "line 1: key 'triples' must hold a list"),
        ("a.jsonl", '{"triples": []}', "line 1: key 'passage_id' is missing"),
        ("a.jsonl", '{"passage_id": "p", "triples": []}\n{"passage_id": "p", "triples": []}', "line 2: a second row"),
        ("a.jsonl", "", "holds no rows"),
        ("a.json", '{"docs": [{"passage": "t", "extracted_triples": 3}]}', "item 1: key 'extracted_triples'"),
        ("a.json", '{"docs": [7]}', "item 1: expected an object, found int"),
        ("a.json", '{"x": 1}', "an object without a list under 'docs'"),
        ("a.json", '{"docs": [', "not JSON, or damaged .*; copy it again"),
    ],
)
def test_files_of_triples_that_are_refused(tmp_path: pathlib.Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        PrecomputedTriples(tmp_path / name)


def test_hipporags_file(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "openie.json"
    row = {
        "idx": "chunk-1",
        "passage": f"{PASSAGES[0].title}\n{PASSAGES[0].text}",
        "extracted_entities": ["Ada"],
        "extracted_triples": [["Ada", "was", "here"], ["broken"], ["a", "b"]],
    }
    path.write_text(json.dumps({"docs": [row], "avg_ent_chars": 3}))
    found = PrecomputedTriples(path).of(PASSAGES[0])
    assert found is not None
    assert (found.entities, found.triples, found.dropped) == (("Ada",), (("Ada", "was", "here"),), 2)
    assert PrecomputedTriples(path).of(PASSAGES[1]) is None


def test_rules() -> None:
    text = (
        "The film was directed by Scott Derrickson in 2016. It stars J. R. Smith of New York City, born on 3 May 1990."
    )
    found = rule_extraction(Passage(id="1", title="Doctor Strange (2016 film)", text=text))
    assert ("Doctor Strange", "The film was directed by", "Scott Derrickson") in found.triples
    assert ("Doctor Strange (2016 film)", "is", "Doctor Strange") in found.triples
    assert ("Scott Derrickson", "in", "2016") in found.triples
    assert "3 May 1990" in found.entities
    assert [name for _, _, name in names("The University of the West was in the Alps.")] == [
        "University of the West",
        "Alps",
    ]
    nothing = rule_extraction(Passage(id="2", title="", text="it rains"))
    assert (nothing.triples, nothing.entities) == ((), ())
    rule_extraction(Passage(id="3", title="()", text="A" * 50_000 + " A b" * 5000))  # in a moment
