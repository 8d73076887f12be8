"""Recorded rounds: the schema, round trips, errors by row, round and key, and the real traces counted by hand."""

from __future__ import annotations

import collections
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest

from routerl_jax.core.types import Example
from routerl_jax.data.rounds import RecordedRounds, Round, read_rounds, write_rounds
from routerl_jax.rewards.metrics import exact_match
from routerl_jax.rewards.retrieval import gold_passages_of
from tests.data.mmsearch_traces import FILE, traces, write_recorded
from tests.data.original_rows import as_json, png

ROW: dict[str, Any] = {
    "id": "q1",
    "question": "Where is this?",
    "golden_answers": ["Azores", "Açores"],
    "images": ["a.png"],
    "category": "search_required",
    "rounds": [
        {"text": "<search><img></search>", "tool": "image_search", "observation": "1. title: Pico", "error": None},
        {"text": "<text_search>Pico</text_search>", "tool": "text_search", "error": "timed out"},
        {"text": "<answer>Azores</answer>"},
    ],
}


def read(path: pathlib.Path) -> list[RecordedRounds]:
    return [recorded for _, recorded in read_rounds(path)]


def test_rows_of_any_format_keep_their_gold_passages(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    question = {key: ROW[key] for key in ("id", "question", "golden_answers", "rounds", "images")}
    by_document = {"doc_id": "mills.pdf", "evidence_pages": "[3, 5]"}
    by_deck = {"deck_name": "mills", "evidence_pages": [3, 5]}
    for number, fields in enumerate((by_document, by_deck)):
        (recorded,) = read(as_json(tmp_path / f"r{number}.jsonl", {**question, **fields}))
        name = fields.get("doc_id", "mills")
        assert [hop.passage_id for hop in gold_passages_of(recorded.example)] == [f"{name}#3", f"{name}#5"]
        assert recorded.example.answers == ("Azores", "Açores")
        assert recorded.example.images == (tmp_path / "a.png",)
        write_rounds(tmp_path / "again.jsonl", [recorded])
        assert read(tmp_path / "again.jsonl") == [recorded]
    with pytest.raises(ValueError, match=r"line 1: key 'evidence_pages' .* without 'doc_id'"):
        read(as_json(tmp_path / "alone.jsonl", {**question, "evidence_pages": [3]}))


def test_rows_and_back(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    (recorded,) = read(as_json(tmp_path / "rounds.jsonl", ROW))
    assert recorded == RecordedRounds(
        example=Example(
            id="q1",
            question="Where is this?",
            answers=("Azores", "Açores"),
            images=(tmp_path / "a.png",),
            metadata={"kind": "search_required"},
        ),
        rounds=(
            Round(text="<search><img></search>", tool="image_search", observation="1. title: Pico"),
            Round(text="<text_search>Pico</text_search>", tool="text_search", error="timed out"),
            Round(text="<answer>Azores</answer>"),
        ),
    )
    write_rounds(tmp_path / "again.jsonl", [recorded])
    assert read(tmp_path / "again.jsonl") == [recorded]
    (plain,) = read(as_json(tmp_path / "plain.jsonl", {**ROW, "images": [], "category": None}))
    write_rounds(tmp_path / "again.jsonl", [plain])
    assert read(tmp_path / "again.jsonl") == [plain]
    assert plain.example.images == ()


def test_pictures_in_memory_are_not_written(tmp_path: pathlib.Path) -> None:
    example = Example(id="a", question="?", answers=("x",), images=(png(),))
    with pytest.raises(ValueError, match="question 'a': picture 1 is in memory alone"):
        write_rounds(tmp_path / "a.jsonl", [RecordedRounds(example=example, rounds=(Round(text="x"),))])
    assert not (tmp_path / "a.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounds": []}, "key 'rounds' must be a list of {text, tool, observation, error}, and not empty"),
        ({"rounds": None}, "key 'rounds' must be a list"),
        ({"rounds": ["x"]}, "key 'rounds', round 1: expected an object, found str"),
        ({"rounds": [{"text": "a"}, {"tool": "b"}]}, "key 'rounds', round 2: 'text' must be a string"),
        ({"rounds": [{"text": "a", "observation": ["b"]}]}, "round 1: 'observation' must be a string"),
        ({"rounds": [{"text": "a", "error": True}]}, "round 1: 'error' must say why the call failed, or be null"),
        ({"rounds": [{"text": "a", "error": ""}]}, "round 1: 'error' must say why the call failed, or be null"),
        (
            {"rounds": [{"text": "a", "result": "b"}]},
            "round 1: no key 'result'; there are: text, tool, observation, passages, error",
        ),
        ({"golden_answers": []}, "no answers; give them under 'golden_answers'"),
        ({"images": ["b.png"]}, "image 'b.png' is neither in "),
    ],
)
def test_errors_name_file_row_and_round(tmp_path: pathlib.Path, change: dict[str, Any], message: str) -> None:
    path = as_json(tmp_path / "rounds.jsonl", {**ROW, "images": []}, {**ROW, "images": [], **change})
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read(path)
    assert str(error.value).startswith(f"{path}, line 2: ")


def test_real_traces(shared_data: Callable[[str], pathlib.Path], tmp_path: pathlib.Path) -> None:
    """35 traces of MMSearch-R1-7B. The expected numbers were counted over the original file."""
    path = shared_data(FILE)
    originals = traces(path)
    recorded = read(write_recorded(path, tmp_path / "rounds.jsonl"))
    assert [item.example.id for item in recorded] == [trace["id"] for trace in originals]
    assert len(recorded) == 35
    assert collections.Counter(item.example.metadata["kind"] for item in recorded) == {
        "search_free": 20,
        "search_required": 15,
    }
    assert collections.Counter(tuple(turn.tool for turn in item.rounds) for item in recorded) == {
        ("",): 8,
        ("image_search", ""): 4,
        ("image_search", "text_search", ""): 15,
        ("image_search",): 3,
        ("image_search", "text_search"): 5,
    }
    failed = [item for item in recorded if item.rounds[-1].error]
    assert collections.Counter(item.rounds[-1].tool for item in failed) == {"image_search": 3, "text_search": 5}
    assert not any(turn.error for item in recorded for turn in item.rounds[:-1])
    assert all(turn.observation for item in recorded for turn in item.rounds if turn.tool and not turn.error)
    assert all(item.example.images[0].is_file() for item in recorded)
    right: dict[str, set[str]] = {"any": set(), "first": set(), "recorded": set()}
    for item, trace in zip(recorded, originals):
        answers = re.findall(r"<answer>(.*?)</answer>", item.rounds[-1].text, re.DOTALL)
        answer = answers[-1].strip() if answers else None
        assert answer == trace["final"]["final_answer"]
        name, golds = item.example.id, item.example.answers
        right["any"] |= {name} if exact_match(answer, golds, "search_r1") else set()
        right["first"] |= {name} if exact_match(answer, golds[:1], "search_r1") else set()
        right["recorded"] |= {name} if trace["final"]["exact_match"] else set()
    assert {key: len(names) for key, names in right.items()} == {"any": 13, "first": 12, "recorded": 12}
    # Its answer, "September 26, 2003", is an alias once the comma is gone, which the run's own score takes for wrong.
    assert right["any"] - right["recorded"] == right["any"] - right["first"] == {"fvqa_train_3112"}
