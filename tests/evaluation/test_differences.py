"""What moves numbers: settings one by one with a scripted policy, the same answers under other metrics, the page's tables."""

import dataclasses
import json
import pathlib
from typing import Any

import pytest

from benchmarks import differences
from routerl_jax.services.config import PolicyModelConfig
from routerl_jax.training.config import ModelConfig
from tests.web_servers import Chats, serving

TOWNS = ("Arlo", "Bexley", "Corin", "Dunmore")


@pytest.fixture
def data(tmp_path: pathlib.Path) -> str:
    """A corpus for each name, and questions of HotpotQA's about it."""
    for number, name in enumerate(("hotpotqa", "2wikimultihopqa", "musique")):
        (tmp_path / name).mkdir()
        passages = [
            {"id": f"p{i}", "title": town, "text": f"The mayor of {town} is Mayor{number}{i}."}
            for i, town in enumerate(TOWNS)
        ]
        _write(tmp_path / name / "corpus.jsonl.gz", passages)
    questions = [
        {
            "id": f"q{i}",
            "question": f"Who is the mayor of {town}?",
            "golden_answers": [f"Mayor0{i}"],
            "supporting": [f"p{i}"],
            "supporting_titles": [town],
        }
        for i, town in enumerate(TOWNS[:3])
    ]
    _write(tmp_path / "hotpotqa" / "questions_dev.jsonl", questions)
    return str(tmp_path)


def _write(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    import gzip

    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def first_mayor(messages: list[dict[str, Any]]) -> str:
    """Answers in a sentence with the first document's mayor."""
    words = str(messages[-1]["content"]).replace(".", " ").split()
    return next((f"It is {word}" for word in words if word.startswith("Mayor")), "Nobody knows")


def test_settings_one_by_one(tmp_path: pathlib.Path, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With other corpora in it, the first document may name another mayor; EM is 0 for sentences, and CEM is not."""
    monkeypatch.setenv("ROUTERL_CACHE", str(tmp_path / "cache"))  # replies are kept there
    saved: list[str] = []
    with serving(handler := Chats(first_mayor)) as server:
        base, settings = differences.hotpotqa(tmp_path / "work", data, 3)
        policy = PolicyModelConfig(model="m", base_url=f"{server.url}/v1")
        base = dataclasses.replace(base, model=ModelConfig(), chat_model=policy)
        chosen = [one for one in settings if one.name in ("k=1", "a shorter instruction") or one.group == "corpus"]
        differences.measured(base, chosen, tmp_path / "work", lambda part: saved.append(json.dumps(part)))
        prompts = [str(body["messages"]) for body in handler.bodies]
    parts = [json.loads(text) for text in saved]
    part = parts[-1]
    rows = {row["name"]: row for row in part["settings"]}
    assert [len(one["settings"]) for one in parts] == [1, 2, 3, 4, 5]  # saved after every setting
    assert [name for name in rows if "passages" in name] == [
        "3 passages: gold passages alone",
        "12 passages: with 2WikiMultihopQA's and MuSiQue's",
    ]
    assert rows[differences.BASE]["recall"] == 1
    assert {row["em"] for row in rows.values()} == {0}
    assert part["metrics"]["cover_em"]["search_r1"][0] == 1
    assert part["answered"] == {"n": 3, "em": 0}
    assert rows["k=1"]["from_base"]["f1"]["difference"] == 0
    assert any("Answer the question.'" in prompt for prompt in prompts)  # the shorter instruction
    lines = differences.tables({"hotpotqa": part}).splitlines()
    assert lines[0].startswith("| hotpotqa, n=3 |")
    # Of three equal scores: Wilson's interval ends at z^2 / (3 + z^2); so does Tango's of three differences of 0, on both sides
    assert any(line.startswith("| k | k=1 | 0.0 (0.0 to 56.1) | +0.0 (-56.1 to +56.1) | 50.0 (") for line in lines)
    rows = [
        {
            "dataset": "d",
            "question": f"q{i}",
            "model": model,
            "pred_answer": answer,
            "golden_answers": ["Ems"],
            "judge": judge,
        }
        for i in range(2)
        for model, answer, judge in (("large", "Ems", "True"), ("small", "in Ems", "True"))
    ]
    (tmp_path / "r1searcher_traces").mkdir()
    _write(tmp_path / "r1searcher_traces" / "traces_dev.jsonl.gz", rows)
    found = differences.released(data)
    assert (found["pairs"], found["judge"]) == (
        2,
        [1, pytest.approx(4 / (4 + 1.96**2), abs=1e-3), 1],
    )  # Wilson's, n = 4
    assert [found["systems"][name]["difference"] for name in ("em", "cover_em", "judge")] == [1, 0, 0]
    # Tango's of two differences of 1 begins at 1 - 2 z^2 / (2 + z^2)
    assert "| `em` | +100.0 (-31.5 to +100.0) | 0.5 |" in differences.tables({"released": found})
    differences.picture({"hotpotqa": part, "released": found}, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_retrieval_alone(tmp_path: pathlib.Path, data: str) -> None:
    numbers = differences.retrieval(tmp_path / "work", data)
    assert numbers["n"] == 3
    (_, small), (_, own), (_, large) = numbers["recall"].items()
    assert small["1"][0] == own["1"][0] == large["3"][0] == 1


def test_the_same_answers_under_every_metric() -> None:
    answers = [
        {"prediction": "It is the U.S.", "golds": ["US"]},
        {"prediction": None, "golds": ["yes"]},
    ]
    table = differences.rescored(answers)["metrics"]
    assert {metric: by["search_r1"][0] for metric, by in table.items()} == pytest.approx(
        {"em": 0, "cover_em": 0.5, "substring_em": 0.5, "f1": 0.25, "f1_recall": 0.5, "anls": 0}
    )
    assert table["cover_em"]["r1_searcher"][0] == 0  # "U.S." becomes "u s"
