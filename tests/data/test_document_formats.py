"""Data sets of questions about documents: what becomes of a row, its pages and labels, and errors that name the row."""

from __future__ import annotations

import collections
import gzip
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from routerl_jax.core.types import Example, Passage
from routerl_jax.data.formats.known import format_of
from routerl_jax.data.gold_paths import gold_path
from routerl_jax.data.readers import FileExamples, open_dataset
from tests.data import original_rows as rows
from tests.data.original_rows import as_json, as_parquet, only, png


def test_vidoseek(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "vidoseek.json"
    path.write_text(json.dumps({"examples": [rows.VIDOSEEK]}))
    assert only(path) == Example(
        id="04d8_2",
        question="Which mill grinds most?",
        answers=("The Blue Mill",),
        metadata={
            "query_type": "logic_reasoning",
            "type": "logic",
            "source_type": ["layout"],
            "document": "mills.pdf",
            "pages": [11, 3],
            "supporting": ["mills.pdf#11", "mills.pdf#3"],
        },
    )


@pytest.mark.parametrize(
    ("info", "type", "sources"),
    [
        ({"query_type": "content_extraction", "source_type": "text"}, "extraction", ["text"]),
        ({"query_type": "Single-Hop_Single-Span"}, "single_hop", None),
        ({"query_type": "Multi-Hop_Non-Span", "source_type": []}, "multi_hop", None),
        ({"doc_type": "Brochure", "source_type": ["Chart", "Pure-text (Plain-text)"]}, None, ["chart", "text"]),
        ({"query_type": "guesswork", "source_type": "map"}, "guesswork", ["map"]),
        ({"source_type": ["Table", "table"]}, None, ["table"]),
    ],
)
def test_labels_in_one_vocabulary(
    tmp_path: pathlib.Path, info: dict[str, Any], type: str | None, sources: list[str] | None
) -> None:
    """SlideVQA and MMLongBench-Doc as VRAG-RL writes them, too."""
    meta = {"file_name": "mills.pdf", "reference_page": [1], **info}
    found = only(as_json(tmp_path / "a.json", {**rows.VIDOSEEK, "uid": 0, "meta_info": meta}))
    assert (found.id, found.metadata.get("type"), found.metadata.get("source_type")) == ("0", type, sources)


@pytest.mark.parametrize(
    ("source", "labels", "found"),
    [
        ("slidevqa_test", ("SingleSpan", "MultiHop"), {"type": "multi_hop", "query_type": "MultiHop"}),
        (
            "mmlongdoc",
            ("Table####Chart", "Guidebook"),
            {"source_type": ["table", "chart"], "doc_type": "Guidebook"},
        ),
        (
            "vidoseek",
            ("2d_layout", "content_extraction"),
            {"type": "extraction", "query_type": "content_extraction", "source_type": ["layout"]},
        ),
        ("slidevqa_train", ("Nan", "Nan"), {}),
    ],
)
def test_vrag_rl_s_parquet(tmp_path: pathlib.Path, source: str, labels: tuple[str, str], found: dict[str, Any]) -> None:
    info = {**rows.VRAG["extra_info"], "content_type": labels[0], "reason_type": labels[1]}
    example = only(as_parquet(tmp_path / "a.parquet", {**rows.VRAG, "data_source": source, "extra_info": info}))
    assert (example.id, example.question) == (f"{source}/test/4", "Which mill grinds most?")
    assert example.answers == ("The Blue Mill",)
    assert example.metadata == {
        "data_source": source,
        "split": "test",
        "index": 4,
        "document": "mills_95.pdf",
        "pages": [5, 7],
        "supporting": ["mills_95.pdf#5", "mills_95.pdf#7"],
        **found,
    }


def test_slidevqa(tmp_path: pathlib.Path) -> None:
    expected = {
        "deck_url": "https://example.org/mills",
        "arithmetic_expression": "9-5",
        "reasoning_type": "Multi-Hop",
        "answer_type": "Non-Span",
        "type": "multi_hop",
        "page_urls": rows.SLIDEVQA["image_urls"],
        "document": "mills-of-ems",
        "pages": [2, 6],
        "supporting": ["mills-of-ems#2", "mills-of-ems#6"],
    }
    example = only(as_json(tmp_path / "dev.jsonl", rows.SLIDEVQA))
    assert (example.id, example.answers, example.images, example.metadata) == ("17", ("4",), (), expected)
    slides = {f"page_{number}": {"bytes": png("red"), "path": None} for number in (1, 2)}
    hub = {key: value for key, value in rows.SLIDEVQA.items() if key not in ("deck_url", "image_urls")} | slides
    del expected["deck_url"], expected["page_urls"]
    found = only(as_parquet(tmp_path / "dev.parquet", {**hub, "arithmetic_expression": "None"}))
    del expected["arithmetic_expression"]
    assert (found.answers, found.images, found.metadata) == (("4",), (), expected)


def test_a_slide_is_found_however_it_is_called(tmp_path: pathlib.Path) -> None:
    path = gold_path(only(as_json(tmp_path / "dev.jsonl", rows.SLIDEVQA)))
    assert path is not None
    for name in (
        "mills-of-ems_2.jpg#1",
        "dev/mills-of-ems/mills-2-1024.jpg#1",
        "mills-of-ems.pdf#2",
        "mills-of-ems_02",
    ):
        assert [hop.found_in((Passage(id=name, title="", text=""),)) for hop in path] == [True, False], name


def test_mmlongbench_doc(tmp_path: pathlib.Path) -> None:
    """Lists in strings, a page that is named twice, an answer of several items, and one that there is not."""
    absent = {**rows.MMLONGBENCH, "answer": "Not answerable", "evidence_pages": "[]", "evidence_sources": "[]"}
    source = FileExamples(as_json(tmp_path / "samples.json", rows.MMLONGBENCH, {**absent, "answer_format": "None"}))
    first, second = source[0], source[1]
    assert first == Example(
        id="1",
        question="Which mills are left?",
        answers=("Blue Mill, Tin Mill",),
        metadata={
            "doc_type": "Tutorial/Workshop",
            "answer_format": "List",
            "source_type": ["chart", "layout", "text"],
            "document": "mills.v2.pdf",
            "pages": [8, 12],
            "supporting": ["mills.v2.pdf#8", "mills.v2.pdf#12"],
            "answerable": True,
        },
    )
    assert (second.answers, second.metadata["answerable"]) == (("Not answerable",), False)
    assert (second.metadata["supporting"], gold_path(second)) == ([], None)
    assert "source_type" not in second.metadata


@pytest.mark.parametrize(
    ("answer", "form", "accepted"),
    [
        ("['a, b', \"c\"]", "List", "a, b, c"),
        (["a", "b"], "List", "a, b"),
        ('["a", 2]', "List", "a, 2"),
        ("a", "List", "a"),
        ("['a', 'b']", "Str", "a, b"),
        ("[4, 6]", "List", "4, 6"),
        (8, "Int", "8"),
    ],
)
def test_answers_that_are_lists(tmp_path: pathlib.Path, answer: Any, form: str, accepted: str) -> None:
    row = {**rows.MMLONGBENCH, "answer": answer, "answer_format": form}
    assert only(as_json(tmp_path / "a.json", row)).answers == (accepted,)


def test_each_row_is_told_by_its_keys() -> None:
    named = {"ViDoSeek": rows.VIDOSEEK, "VragRows": rows.VRAG, "SlideVQA": rows.SLIDEVQA}
    named |= {"MMLongBenchDoc": rows.MMLONGBENCH, "Verl": rows.VERL}
    assert {name: type(format_of(row)).__name__ for name, row in named.items()} == {name: name for name in named}


def meta(**fields: Any) -> dict[str, Any]:
    return {**rows.VIDOSEEK, "meta_info": {**rows.VIDOSEEK["meta_info"], **fields}}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**rows.VIDOSEEK, "meta_info": "mills.pdf"}, "key 'meta_info' must be an object {file_name, reference_page"),
        ({**rows.VIDOSEEK, "query": " "}, "key 'query' is missing or empty"),
        ({**rows.VIDOSEEK, "reference_answer": None}, "key 'reference_answer' is missing or empty; give the answer"),
        ({**rows.VIDOSEEK, "reference_answer": {"a": 1}}, "key 'reference_answer' must be a string, a number"),
        (meta(file_name=""), "key 'meta_info.file_name' is missing or empty; give the document's name"),
        (meta(reference_page=[0]), "key 'meta_info.reference_page' must hold numbers of pages, from 1, found '0'"),
        (
            meta(reference_page=["five"]),
            "key 'meta_info.reference_page' must hold numbers of pages, from 1, found 'five'",
        ),
        (meta(reference_page=[2.5]), "must hold numbers of pages, from 1, found '2.5'"),
        (
            meta(reference_page=[True]),
            "must hold numbers of pages, from 1, found 'True'|key 'meta_info.reference_page' must be",
        ),
        (meta(source_type={"a": 1}), "key 'meta_info.source_type' must be a string"),
        ({**rows.SLIDEVQA, "deck_name": None}, "key 'deck_name' is missing or empty"),
        ({**rows.SLIDEVQA, "evidence_pages": "[2, x]"}, "key 'evidence_pages' may be a list in a string"),
        ({**rows.SLIDEVQA, "answer": " "}, "key 'answer' is missing or empty"),
        ({**rows.MMLONGBENCH, "doc_id": 7}, "key 'doc_id' is missing or empty"),
        ({**rows.MMLONGBENCH, "evidence_pages": "[-1]"}, "must hold numbers of pages, from 1, found '-1'"),
        ({**rows.MMLONGBENCH, "supporting": [{"id": 3}]}, "key 'supporting' must be a string, a number or a list"),
        ({**rows.MMLONGBENCH, "answer": "['a', "}, "key 'answer' may be a list in a string"),
        ({**rows.MMLONGBENCH, "answer": []}, "key 'answer' is missing or empty"),
        (
            {**rows.VRAG, "extra_info": {**rows.VRAG["extra_info"], "file_name": None}},
            "key 'extra_info.file_name' is missing or empty",
        ),
    ],
)
def test_errors_name_file_row_and_key(tmp_path: pathlib.Path, row: dict[str, Any], message: str) -> None:
    path = as_json(tmp_path / "rows.jsonl", {"question": "fine?", "answer": "yes"}, row)
    with pytest.raises(ValueError, match=message) as error:
        FileExamples(path)
    assert str(error.value).startswith(f"{path}, line 2: ")


# --- real files --------------------------------------------------------------------------------------------------------


def real(path: pathlib.Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_real_questions_of_mmlongbench_doc(shared_data: Callable[[str], pathlib.Path], tmp_path: pathlib.Path) -> None:
    """All 164, their gold pages among the 536; and put back into the columns of the repository's samples.json."""
    path = shared_data("mmlongbench_doc/questions_dev.jsonl.gz")
    source, originals = open_dataset(str(path)), real(path)
    pages = {row["id"] for row in real(shared_data("mmlongbench_doc/pages.jsonl.gz"))}
    examples = [source[i] for i in range(len(source))]
    assert [example.id for example in examples] == [row["id"] for row in originals]
    assert all(set(example.metadata["supporting"]) <= pages for example in examples)
    assert sum(not example.metadata["answerable"] for example in examples) == 37
    counted = collections.Counter(name for one in examples for name in one.metadata.get("source_type", ()))
    assert counted == {"text": 53, "figure": 42, "layout": 28, "chart": 26, "table": 24}
    for example, row in zip(examples, originals):
        assert example.metadata["pages"] == list(dict.fromkeys(row["evidence_pages"]))
        assert example.metadata["answer_format"] == row["type"]
        assert [row["golden_answers"][0]] == list(example.answers) or row["type"] == "List"
    made = [
        {
            **{key: row[key] for key in ("doc_id", "doc_type", "question")},
            "answer": row["golden_answers"][0],
            "evidence_pages": str(row["evidence_pages"]),
            "evidence_sources": str(row["evidence_sources"]),
            "answer_format": row["type"],
        }
        for row in originals
    ]
    original = FileExamples(as_json(tmp_path / "samples.json", *made))
    for i, example in enumerate(examples):
        back = original[i]
        assert (back.question, back.answers) == (example.question, example.answers)
        own = [f"{back.metadata['document']}#{page}" for page in back.metadata["pages"]]
        assert back.metadata == {**example.metadata, "supporting": own}


def test_real_questions_of_vrag_rl_s_demo(shared_data: Callable[[str], pathlib.Path]) -> None:
    source = open_dataset(str(shared_data("vrag_demo_pages/questions_dev.jsonl.gz")))
    found = {source[i].id: source[i].metadata for i in range(len(source))}
    assert {name: (fields.get("type"), fields.get("source_type")) for name, fields in found.items()} == {
        "vrag_1": (None, ["table"]),
        "vidorag_00a76e3a9a36255616e2dc14a6eb5dde598b321f_1": ("extraction", None),
        "vrag_3": ("multi_hop", None),
    }
    assert found["vrag_3"]["supporting"] == [
        f"2012-02-20fy11roadshow-120221022442-phpapp02_95.pdf#{page}" for page in (5, 7)
    ]
