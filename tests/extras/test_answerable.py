"""Which questions a corpus can't answer, by a program that reads it once, and scores of both kinds of questions."""

from __future__ import annotations

import json
import pathlib
import random
from collections.abc import Callable

import pytest

from routerl_jax.core.types import Episode, Example, Passage
from routerl_jax.data.overlap import examples_of
from routerl_jax.data.readers import open_dataset
from routerl_jax.evaluation import report
from routerl_jax.evaluation.metrics import summarize
from routerl_jax.evaluation.records import episode_record
from routerl_jax.extras.answerable import AnswerCheck
from routerl_jax.rewards.metrics import NORMALIZERS
from tests.knowledge.helpers import build_words, write_jsonl
from tests.programs import launch_here, refusal

PASSAGES = [
    Passage(id="p1", title="Grey Gate (film)", text="Grey Gate was directed by John Roe in 1951."),
    Passage(id="p2", title="John Roe", text="The director was born in Saint-Denis, U.S.A."),
    Passage(id="p3", title="Art", text="A party has art in it, and 12 guests."),
    Passage(id="t1#4", title="Rivers", text="River: Don | Length: 1,870 km"),
]


def question(name: str, *answers: str, **metadata: object) -> Example:
    return Example(id=name, question=f"What of {name}?", answers=answers, metadata=metadata)


def reasons(examples: list[Example], passages: list[Passage], normalizer: str = "search_r1") -> list[tuple[str, str]]:
    check = AnswerCheck(examples, normalizer)
    assert check.read(passages) == len(passages)
    return [(finding.kind, finding.reason()) for finding in check.findings]


def test_answers_and_gold_passages() -> None:
    examples = [
        question("spelling", "the JOHN ROE!"),
        question("any", "Nobody", "saint-denis"),  # one of several answers is enough
        question("part of a word", "arty"),
        question("order", "Roe John"),
        question("over two fields", "Roe The director"),
        question("number", "12"),
        question("another number", "13"),
        question("short", "Don"),
        question("closed", "Yes"),
        question("closed, gold there", "no", supporting=["p1"], supporting_titles=["Grey Gate (film)"]),
        question("closed, gold absent", "no", supporting=["p1", "p9"], supporting_titles=["Grey Gate (film)", "Mill"]),
        question("gold absent", "John Roe", supporting=["x"], supporting_titles=["Mill"]),
        question("gold by title", "John Roe", supporting=["x"], supporting_titles=["John Roe"]),
        question("gold table", "John Roe", supporting=["t1"]),
        question("erased", "The The"),
        question("range", "1900", answer_ranges=[[1800, 1890]]),
        question("range missed", "1900", answer_ranges=[[2800, 2890]]),
    ]
    assert reasons(examples, PASSAGES) == [
        ("words", ""),
        ("words", ""),
        ("words", "answer"),
        ("words", "answer"),
        ("words", ""),
        ("number", ""),
        ("number", "answer"),
        ("short", ""),
        ("yes/no", ""),
        ("yes/no", ""),
        ("yes/no", "gold"),
        ("words", "gold"),
        ("words", ""),
        ("words", ""),
        ("short", ""),
        ("number", ""),
        ("number", "answer"),
    ]


def test_scripts_without_spaces() -> None:
    passages = [
        Passage(id="1", title="日本", text="東京都は日本の首都である。"),
        Passage(id="2", title="", text="ภาษาไทยในกรุงเทพฯ"),
    ]
    examples = [question("a", "東京都"), question("b", "京都府"), question("c", "กรุงเทพ"), question("d", "東")]
    assert reasons(examples, passages) == [("words", ""), ("words", "answer"), ("words", ""), ("short", "")]


def test_answers_in_other_code_points() -> None:
    """An answer that scores as right is found: composed accents, signs and wide digits."""
    passages = [Passage(id="1", title="Go\u0308del", text="It was \u221240 degrees in \uff11\uff19\uff13\uff11.")]
    examples = [
        question("a", "G\u00f6del"),
        question("b", "-40 degrees"),
        question("c", "1931"),
        question("d", "Godel"),
    ]
    assert reasons(examples, passages) == [("words", ""), ("words", ""), ("number", ""), ("words", "answer")]


@pytest.mark.parametrize("normalizer", ["search_r1", "r1_searcher", "vqa"])
def test_it_finds_what_reading_every_passage_for_every_answer_finds(normalizer: str) -> None:
    """More passages than those whose words are counted beforehand, and answers that come late, early or never."""
    rng = random.Random(3)
    words = [f"w{i}" for i in range(60)] + ["the", "U.S.", "O'Neil", "new-york", "São", "naïve"]
    passages = [
        Passage(id=str(i), title=rng.choice(words), text=" ".join(rng.choices(words[: 20 + i // 60], k=12)))
        for i in range(3000)
    ]
    examples = [question(str(i), " ".join(rng.choices(words, k=rng.randint(1, 4)))) for i in range(300)]
    normalize = NORMALIZERS.get(normalizer)
    texts = [f" {normalize(f'{passage.title} {passage.text}')} " for passage in passages]

    def stated(answer: str) -> bool:
        plain = normalize(answer)
        return not plain or any(f" {plain} " in text for text in texts)  # "the" is nothing that could be missed

    found = [reason == "" for _, reason in reasons(examples, passages, normalizer)]
    assert found == [stated(example.answers[0]) for example in examples]
    assert 50 < sum(found) < 290


def test_what_no_search_finds(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An answer that stands in the corpus, in a passage that shares no word with the question or its sub-questions."""
    pytest.importorskip("bm25s")
    build_words(PASSAGES, tmp_path / "kb")
    capsys.readouterr()
    rows = [
        {"id": "found", "question": "Who directed Grey Gate?", "answer": "John Roe", "type": "one"},
        {"id": "unfound", "question": "Where was he born?", "answer": "Saint-Denis", "type": "one", "dataset": "x"},
        {
            "id": "by steps",
            "question": "Whence came whoever made it?",
            "answer": "Saint-Denis",
            "type": "two",
            "supporting": ["p1", "p2"],
            "supporting_titles": ["Grey Gate (film)", "John Roe"],
            "decomposition": [
                {"question": "Who directed Grey Gate?", "answer": "John Roe", "support": "p1"},
                {"question": "Origin of #1", "answer": "Saint-Denis", "support": "p2"},
            ],
        },
        {"id": "nowhere", "question": "What is Grey Gate?", "answer": "a painting", "type": "two"},
    ]
    rows[1]["question"] = "Whence?"
    questions = write_jsonl(tmp_path / "questions.jsonl", rows)
    arguments = ("check_data", f"--test={questions}", f"--knowledge=films={tmp_path / 'kb'}", "--k=1,2")
    assert not launch_here(*arguments, "--json", f"--output={tmp_path / 'good.jsonl'}")
    found = json.loads(capsys.readouterr().out)["knowledge"]
    assert {finding["id"]: finding["reason"] for finding in found["findings"]} == {
        "found": "",
        "unfound": "search",
        "by steps": "",
        "nowhere": "answer",
    }
    assert (found["passages"], found["searched"], found["answerable"]) == (4, ["films"], 0.5)
    assert found["by"]["type"]["two"] == {
        "questions": 2,
        "answerable": 0.5,
        "unanswerable": {"answer": 1, "gold": 0, "search": 0},
    }
    assert found["recall"]["question"]["answer@2"] == 0.25
    assert found["recall"]["gold queries"] == {
        "answer@1": 1.0,
        "answer@2": 1.0,
        "answer questions": 1,
        "gold@1": 1.0,
        "gold@2": 1.0,
        "gold questions": 1,
    }
    before, after = open_dataset(str(questions)), open_dataset(str(tmp_path / "good.jsonl"))
    assert list(examples_of(after)) == [before[0], before[2]]  # nothing is lost on the way
    assert not launch_here(*arguments, "--mark", f"--output={tmp_path / 'all.jsonl'}")
    shown = capsys.readouterr().out
    assert "4 questions, 4 passages" in shown
    marked = {example.id: example.metadata for example in examples_of(open_dataset(str(tmp_path / "all.jsonl")))}
    assert {name: fields["answerable"] for name, fields in marked.items()} == {
        "found": True,
        "unfound": False,
        "by steps": True,
        "nowhere": False,
    }
    assert marked["unfound"]["unanswerable_because"] == "search"


def test_several_corpora_and_mistakes(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"id": passage.id, "title": passage.title, "text": passage.text} for passage in PASSAGES]
    first, second = write_jsonl(tmp_path / "a.jsonl", rows[:1]), write_jsonl(tmp_path / "b.jsonl", rows[1:])
    questions = write_jsonl(tmp_path / "q.jsonl", [{"id": "1", "question": "Where?", "answer": "Saint-Denis"}] * 1)
    for places, share in ((f"{first}", 0.0), (f"{first},{second}", 1.0), (f"x={first},y={second}", 1.0)):
        assert not launch_here("check_data", f"--test={questions}", f"--knowledge={places}", "--json")
        assert json.loads(capsys.readouterr().out)["knowledge"]["answerable"] == share
    assert "give --train" in refusal("check_data", f"--test={questions}")
    assert "NAME=PLACE" in refusal("check_data", f"--test={questions}", f"--knowledge=x={first},x={second}")
    assert "--k=0" in refusal("check_data", f"--test={questions}", f"--knowledge={first}", "--k=0")
    assert "--mark" in refusal("check_data", f"--test={questions}", f"--knowledge={first}", "--mark")
    assert "nowhere.jsonl" in refusal("check_data", f"--test={questions}", f"--knowledge={tmp_path / 'nowhere.jsonl'}")


def test_reports_score_both_ways() -> None:
    def episode(name: str, answer: str, **metadata: object) -> Episode:
        example = question(name, "right", **metadata)
        return Episode(example=example, sample=0, answer=answer, turns=[], sequences=[])

    episodes = [
        episode("1", "right", answerable=True),
        episode("2", "wrong", answerable=True),
        episode("3", "wrong", answerable=False),
        episode("4", "right"),  # nobody knows
    ]
    summary = summarize(episodes)
    assert (summary["em"], summary["answerable"], summary["em_answerable"]) == (0.5, 2 / 3, 0.5)
    headings, cells = report.rows({"trained": summary})
    assert dict(zip(headings, cells[0]))["answerable %"] == "66.7"
    assert "EM of answerable %" in headings
    assert episode_record(episodes[2])["metadata"] == {"answerable": False}
    assert "answerable" not in summarize(episodes[3:])


def test_real_questions(shared_data: Callable[[str], pathlib.Path], tmp_path: pathlib.Path, capsys) -> None:
    """607 of 608 answers of 2WikiMultihopQA that are texts stand in its corpus, says the one who collected it."""
    questions, corpus = (shared_data(f"2wikimultihopqa/{name}.jsonl.gz") for name in ("questions_dev", "corpus"))
    output = tmp_path / "good.jsonl"
    assert not launch_here("check_data", f"--test={questions}", f"--knowledge={corpus}", "--json", f"--output={output}")
    found = json.loads(capsys.readouterr().out)["knowledge"]
    assert found["unanswerable"] == {"answer": 1, "gold": 0, "search": 0}
    before = open_dataset(str(questions))
    kept = [before[i] for i in range(len(before)) if not found["findings"][i]["reason"]]
    assert list(examples_of(open_dataset(str(output)))) == kept
