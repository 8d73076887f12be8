"""Gold paths of questions as several data sets write them, and of the real files; pages by whatever name."""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from routerl_jax.core.types import Episode, Example, Passage
from routerl_jax.data.gold_paths import GoldHop, PageName, gold_passages, gold_path, page_id, page_of
from routerl_jax.data.readers import open_dataset
from routerl_jax.evaluation.metrics import routing_accuracy


def path_of(**metadata: Any) -> tuple[GoldHop, ...] | None:
    return gold_path(Example(id="q", question="?", answers=("a",), metadata=metadata))


def passage(id: str, title: str, text: str = "") -> Passage:
    return Passage(id=id, title=title, text=text)


GOLD = {"supporting": ["m2", "m1"], "supporting_titles": ["Togo", "Lome"]}


def test_musique_s_decomposition() -> None:
    """Sub-questions with the answers before them in place, and the passages by their ids, whatever their order."""
    steps = [
        {"question": "Ewe >> capital", "answer": "Lome", "support": "m1"},
        {"question": "what country is #1 in, #7?", "answer": "Togo", "support": "m2"},
    ]
    path = path_of(**GOLD, decomposition=steps)
    assert path == (
        GoldHop(query="Ewe, capital", value="Lome", passage_id="m1", title="Lome"),
        GoldHop(query="what country is Lome in, ?", value="Togo", passage_id="m2", title="Togo", needs=(0,)),
    )
    assert path[0].found_in((passage("m1", "another title"),))
    assert path[0].found_in((passage("wiki/7", "Lome"),))  # another corpus
    assert not path[0].found_in((passage("m2", "Togo"),))


def test_two_wiki_s_triples() -> None:
    """Values are the triples', sub-questions the data set's where there are as many; subjects lack what stands in brackets."""
    triples = [["Amico", "director", "Gerhard Buchholz"], ["gerhard buchholz", "died in", "Berlin"]]
    gold = {
        "supporting": ["w1", "w2"],
        "supporting_titles": ["Amico (film)", "Gerhard Buchholz"],
        "evidence_triples": triples,
    }
    questions = ("Who directed Amico?", "Where did he die?")
    asked = [{"question": question, "answer": "A whole sentence."} for question in questions]
    hops = path_of(**gold)
    assert hops == (
        GoldHop(query="director of Amico", value="Gerhard Buchholz", passage_id="w1", title="Amico (film)"),
        GoldHop(
            query="died in of gerhard buchholz", value="Berlin", passage_id="w2", title="Gerhard Buchholz", needs=(0,)
        ),
    )
    whole = path_of(**gold, decomposition=asked)
    assert whole == tuple(dataclasses.replace(hop, query=question) for hop, question in zip(hops, questions))
    assert path_of(**gold, decomposition=asked[:1]) == hops


def test_what_a_hop_needs() -> None:
    """Atlas's hops follow each other; a comparison's do not."""
    hop = {"kb": "text", "passage_id": "p"}
    atlas = path_of(
        path=[{**hop, "query": query} for query in ("where?", "what is its capital?", "how many live there?")]
    )
    compared = path_of(evidence_triples=[["Aida", "year", "1871"], ["Nabucco", "year", "1842"]])
    assert atlas is not None
    assert compared is not None
    assert [hop.needs for hop in atlas] == [(), (0,), (1,)]
    assert [hop.needs for hop in compared] == [(), ()]


@pytest.mark.parametrize("path", ["img/1.jpg", ["a", "b"], [{"url": "x"}], {"kb": "text"}])
def test_what_else_is_called_a_path_is_none(path: Any) -> None:
    """A column of somebody's data: neither a gold path nor the end of a run."""
    assert path_of(path=path) is None
    example = Example(id="q", question="?", answers=("a",), metadata={"path": path})
    assert routing_accuracy([Episode(example=example, sample=0, answer="a", turns=[], sequences=[])]) is None


def test_a_subject_is_the_title_that_it_equals_most() -> None:
    titles = {"supporting": ["a", "b"], "supporting_titles": ["Amico (film)", "Amico"]}
    [hop] = path_of(**titles, evidence_triples=[["Amico", "director", "Buchholz"]]) or ()
    assert hop.passage_id == "b"
    [hop] = path_of(evidence_triples=[["Amico (Film)", "director", "Buchholz"]]) or ()  # no gold passages are named
    assert hop.found_in((passage("x", "Amico"),))
    assert hop.found_in((passage("x", "Amico (film)"),))
    assert not hop.found_in((passage("x", "Amigo"),))
    [hop] = path_of(**titles, evidence_triples=[["The friend", "director", "Buchholz"]]) or ()  # not by this name
    assert hop.found_in((passage("a", "Amico", "Directed by BUCHHOLZ."),))
    assert not hop.found_in((passage("a", "Amico", "Directed by others."),))


def test_passages_alone() -> None:
    given = [{"id": "p", "title": "Aida", "text": ".."}]
    assert path_of(supporting=["p"], supporting_passages=given) == (GoldHop(passage_id="p", title="Aida"),)
    assert path_of(**GOLD) == (GoldHop(passage_id="m2", title="Togo"), GoldHop(passage_id="m1", title="Lome"))
    assert path_of(supporting=["Table_0"], supporting_passages=["/wiki/Togo"]) == (
        GoldHop(passage_id="Table_0"),
        GoldHop(passage_id="/wiki/Togo"),
    )
    assert GoldHop(passage_id="Table_0").found_in((passage("Table_0#3-5", "Rivers"),))  # rows of the table
    assert not GoldHop(passage_id="Table_0").found_in((passage("Table_1", ""),))
    assert path_of(supporting=[{"doc_id": "x", "doc_part": "table"}]) is None  # MultiModalQA has none of its passages
    assert path_of(supporting=None, decomposition=["Who?"]) is None


@pytest.mark.parametrize(
    ("name", "hops", "asked"), [("musique", 787, 787), ("2wikimultihopqa", 1188, 1150), ("hotpotqa", 1112, 0)]
)
def test_every_hop_of_real_files_is_found_in_its_gold_passages(
    shared_data: Callable[[str], pathlib.Path], name: str, hops: int, asked: int
) -> None:
    with gzip.open(shared_data(f"{name}/corpus.jsonl.gz"), "rt") as file:
        corpus = {row["id"]: passage(row["id"], row["title"], row["text"]) for row in map(json.loads, file)}
    source = open_dataset(str(shared_data(f"{name}/questions_dev.jsonl.gz")))
    found = []
    for example in (source[i] for i in range(len(source))):
        gold = tuple(corpus[id] for id in gold_passages(example.metadata))
        found += [(hop, hop.found_in(gold)) for hop in gold_path(example) or ()]
    assert len(found) == hops
    assert all(right for _, right in found)
    assert sum(bool(hop.query and hop.value) for hop, _ in found) == asked


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("report.pdf#3", ("report", 3)),
        ("a/b/report.PDF#3", ("report", 3)),
        ("report_3.jpg#1", ("report", 3)),
        ("img/report_003.png", ("report", 3)),
        ("report_003", ("report", 3)),
        ("report.v1.2_3", ("report.v1.2", 3)),
        ("deck-phpapp02_95.pdf#7", ("deck-phpapp02_95", 7)),  # the document's own number is no page
        ("deck-phpapp02_95_7.jpg#1", ("deck-phpapp02_95", 7)),
        ("deck#5", ("deck", 5)),
        ("dev/my-deck/on-its-title-5-1024.jpg#1", ("my-deck", 5)),
        ("on-its-title-5-1024.jpg#1", None),  # of which deck?
        ("scan.tiff#2", ("scan", 2)),
        ("report.pdf", None),
        ("deck_95.pdf", None),
        ("photo.jpg#1", None),
        ("wiki#history", None),
        ("", None),
    ],
)
def test_what_an_id_says(name: str, page: tuple[str, int] | None) -> None:
    assert page_of(name) == (page and PageName(*page))


def test_a_made_id_says_what_it_was_made_of() -> None:
    assert page_of(page_id("a_2.pdf", 11)) == PageName("a_2", 11)


@pytest.mark.parametrize(
    ("gold", "found", "same"),
    [
        ("report.pdf#3", "report_3.jpg#1", True),
        ("report.pdf#3", "report_003", True),
        ("report.pdf#3", "report.pdf#3", True),
        ("report.pdf#3", "report.pdf#13", False),
        ("report.pdf#3", "other_3.jpg#1", False),
        ("report_3", "report_03", False),  # lists' own ids are what they are
        ("TABLE", "TABLE#3", True),
    ],
)
def test_a_gold_page_is_found_by_any_of_its_names(gold: str, found: str, same: bool) -> None:
    assert GoldHop(passage_id=gold).found_in((Passage(id=found, title="", text=""),)) is same
