"""Golden trajectories without a language model: what data sets say, looked up."""

from __future__ import annotations

import json
import pathlib

import pytest

from routerl_jax.core.types import Passage
from routerl_jax.data.trajectories import AnswerStep, FinalStep, RouteStep, Trajectory, read_trajectories
from routerl_jax.extras.curation.attempts import AttemptConfig
from routerl_jax.extras.curation.golden import ConstructConfig, construct
from routerl_jax.training.config import KnowledgeConfig

TRIPLES = [["Aida", "composer", "Giuseppe Verdi"], ["Giuseppe Verdi", "place of birth", "Le Roncole"]]
TEXT = {
    "composer of Aida": Passage(id="p1", title="Aida", text="An opera by Giuseppe Verdi."),
    "place of birth of Giuseppe Verdi": Passage(id="p2", title="Giuseppe Verdi", text="Born in Le Roncole."),
}
VOTES = Passage(id="t9", title="Votes", text="yes votes: 198563")
ROW = Passage(id="t1:3", title="Rivers", text="River: Volta; Length: 1,500 km")


class Found:
    """Finds what it has been given for a query; else something else."""

    def __init__(self, known: dict[str, Passage]) -> None:
        self.known = known

    def search(self, queries, k):
        other = Passage(id="x", title="X", text="Nothing of use.")
        return [[other, *([self.known[query]] if query in self.known else [])][-k:] for query in queries]


def made(
    tmp_path: pathlib.Path, rows: dict[str, list[dict]], default_kb: str = "hops=text, cells=table", **options
) -> tuple[dict[str, Trajectory], dict[str, str]]:
    """Trajectories by id, and the outcome of every question."""
    tmp_path.mkdir(exist_ok=True)
    for name, of_file in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_file))
    config = ConstructConfig(
        data=",".join(str(tmp_path / f"{name}.jsonl") for name in rows),
        teacher="annotations",
        knowledge={"text": KnowledgeConfig(), "table": KnowledgeConfig()},
        attempt=AttemptConfig(k=2, **options),
        default_kb=default_kb,
    )
    tools = {"text": Found(TEXT), "table": Found({"How long is the Volta?": ROW, "Is it in Ghana?": VOTES})}
    construct(config, tmp_path / "job", lambda: (None, tools), progress=False)
    files = [tmp_path / "job" / f"{name}.jsonl" for name in ("train", "validation")]
    found = {t.id: t for file in files for _, t in read_trajectories(file)}
    journal = [json.loads(line) for line in (tmp_path / "job" / "questions.jsonl").read_text().splitlines()]
    return found, {record["id"].split("/")[-1]: record["outcome"] for record in journal}


def question(name: str, text: str, *answers: str, **more) -> dict:
    return {"id": name, "question": text, "golden_answers": list(answers), **more}


def test_hops_and_questions_of_one_step(tmp_path: pathlib.Path) -> None:
    hops = [
        question("verdi", "Where was the composer of Aida born?", "Le Roncole", evidence_triples=TRIPLES),
        question("lost", "Who wrote Fidelio?", "Beethoven", evidence_triples=[["Fidelio", "composer", "Beethoven"]]),
        question("too long", "?", "x", evidence_triples=[*TRIPLES, *TRIPLES]),
    ]
    cells = [
        question("volta", "How long is the Volta?", "1500", "1,500 km"),
        question("short", "How long is the Volta?", "km"),
        question("elsewhere", "How long is the Niger?", "4,180 km"),
    ]
    found, outcomes = made(tmp_path, {"hops": hops, "cells": cells})
    assert outcomes == {
        "verdi": "accepted",
        "lost": "gold passage not found",
        "too long": "no gold path",
        "volta": "accepted",
        "short": "gold passage not found",
        "elsewhere": "gold passage not found",
    }
    by_name = {trajectory.question: trajectory.steps for trajectory in found.values()}
    steps = by_name["Where was the composer of Aida born?"]
    assert [s.query for s in steps if isinstance(s, RouteStep)] == [*TEXT, "none"]
    assert [s.retrievers for s in steps if isinstance(s, RouteStep)] == [("text retriever",)] * 2 + [("none",)]
    answers = [s for s in steps if isinstance(s, AnswerStep)]
    assert [s.answer for s in answers] == ["Giuseppe Verdi", "Le Roncole"]
    assert "An opera by Giuseppe Verdi." in answers[0].documents[-1].text
    assert isinstance(steps[-1], FinalStep)
    route, answer, none, final = by_name["How long is the Volta?"]
    assert (route.query, route.retrievers) == ("How long is the Volta?", ("table retriever",))
    assert answer.answer == "1,500 km"
    assert none.query == "none"
    assert final.answers == ("1500", "1,500 km")


def test_a_question_whose_passage_alone_is_known_is_asked_itself(tmp_path: pathlib.Path) -> None:
    """WikiTableQuestions, TabFact: the table is named. Another one that states the answer is not it; rows are parts of it."""
    cells = [
        question("volta", "How long is the Volta?", "1,500 km", supporting=["t1:3"]),
        question("another", "How long is the Volta?", "1,500 km", supporting=["t2"]),
        question("two", "How long is the Volta?", "1,500 km", supporting=["t1:3", "t2"]),
    ]
    claim = [question("claim", "Is it in Ghana?", "yes", supporting=["t9"])]
    found, outcomes = made(tmp_path, {"cells": cells, "more": claim}, default_kb="cells=table, more=table")
    assert outcomes == {
        "volta": "accepted",
        "another": "gold passage not found",
        "two": "no gold path",
        "claim": "gold passage not found",  # a row with the word in it answers nothing
    }
    [trajectory] = found.values()
    assert [(s.query, s.retrievers) for s in trajectory.steps if isinstance(s, RouteStep)] == [
        ("How long is the Volta?", ("table retriever",)),
        ("none", ("none",)),
    ]


def test_what_is_shown_holds_the_answer(tmp_path: pathlib.Path) -> None:
    """Documents are cut to `max_document`: what stands behind that is not found."""
    rows = {"cells": [question("volta", "How long is the Volta?", "1,500 km")]}
    whole = len("Rivers: River: Volta; Length: 1,500 km")
    assert made(tmp_path / "a", rows, max_document=whole)[1] == {"volta": "accepted"}
    assert made(tmp_path / "b", rows, max_document=whole - 1)[1] == {"volta": "gold passage not found"}
    hops = {"hops": [question("verdi", "Where was the composer of Aida born?", "Le Roncole", evidence_triples=TRIPLES)]}
    assert made(tmp_path / "c", hops, max_document=20)[1] == {"verdi": "gold passage not found"}
    [record] = [json.loads(line) for line in (tmp_path / "c" / "job" / "questions.jsonl").read_text().splitlines()]
    assert "it is cut before the answer (max_document)" in json.dumps(record)


def test_a_job_is_not_gone_on_with_when_gold_paths_change(tmp_path: pathlib.Path) -> None:
    row = question("verdi", "Where was the composer of Aida born?", "Le Roncole", evidence_triples=TRIPLES)
    made(tmp_path, {"hops": [row]})
    with pytest.raises(ValueError, match="questions differs"):
        made(tmp_path, {"hops": [row | {"evidence_triples": TRIPLES[:1]}]})


def test_a_question_that_nothing_is_known_of_is_rejected(tmp_path: pathlib.Path) -> None:
    _, outcomes = made(tmp_path, {"others": [question("volta", "How long is the Volta?", "1,500 km")]})
    assert outcomes == {"volta": "no gold path"}


def test_a_home_must_be_a_knowledge_base() -> None:
    with pytest.raises(
        ValueError, match=r"default_kb='cells=tables': 'tables' \(of 'cells'\) is no knowledge base of the job: table"
    ):
        ConstructConfig(data="x", knowledge={"table": KnowledgeConfig()}, default_kb="cells=tables")
