"""Data sets of questions about pictures: what becomes of a row, its picture and its URLs, and errors that name the row."""

from __future__ import annotations

import base64
import gzip
import io
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from routerl_jax.core.types import Example
from routerl_jax.data.formats.known import format_of, read_passages
from routerl_jax.data.readers import FileExamples, open_dataset
from tests.data import original_rows as rows
from tests.data.original_rows import as_json, as_parquet, only, png

RED, BLUE = png("red"), png("blue", 5)


def encoded(form: str, size: tuple[int, int]) -> bytes:
    """A picture of many colours, so that its end is far from its beginning."""
    buffer = io.BytesIO()
    Image.effect_noise(size, 80).convert("RGB").save(buffer, form)
    return buffer.getvalue()


URL = "https://example.org/a.png"


def fvqa(content: bytes | None = RED, **columns: Any) -> dict[str, Any]:
    return {**rows.FVQA, "images": [{"bytes": content, "path": None}], **columns}


def mmsearch(content: bytes | None = RED, **columns: Any) -> dict[str, Any]:
    return {**rows.MMSEARCH, "query_image": {"bytes": content, "path": None}, **columns}


def all_of(path: pathlib.Path | str) -> list[Example]:
    source = open_dataset(str(path))
    return [source[i] for i in range(len(source))]


# --- FVQA --------------------------------------------------------------------------------------------------------------


def test_fvqa(tmp_path: pathlib.Path) -> None:
    """Aliases come after the ground truth, which the released code counts as right too."""
    example = only(as_parquet(tmp_path / "fvqa_train.parquet", fvqa()))
    assert example == Example(
        id="fvqa_train_67",
        question="Which ship is shown?",
        answers=("gull", "Grey Gull", "the gull", "1931"),
        images=(RED,),
        metadata={"data_source": "mmsearch_r1/fvqa_train", "kind": "search_required"},
    )


def test_fvqa_of_the_repository_has_no_ids_and_no_labels(tmp_path: pathlib.Path) -> None:
    plain = {key: value for key, value in rows.FVQA.items() if key not in ("data_id", "category")}
    plain["data_source"] = "mmsearch_r1/infoseek_train_split"
    given = [{**plain, "images": [{"bytes": picture, "path": None}]} for picture in (RED, BLUE)]
    first, second = all_of(as_parquet(tmp_path / "mini_data.pq", *given))
    assert (first.id, second.id) == tuple(f"mmsearch_r1/infoseek_train_split/{number}" for number in (1, 2))
    assert (first.images, second.images) == ((RED,), (BLUE,))
    assert first.metadata == {"data_source": "mmsearch_r1/infoseek_train_split"}


@pytest.mark.parametrize(
    ("column", "urls"),
    [([URL, "http://b.org/b.png"], [URL, "http://b.org/b.png"]), (URL, [URL]), (json.dumps([URL, URL]), [URL])],
)
def test_urls_are_what_an_image_search_is_asked_with(tmp_path: pathlib.Path, column: Any, urls: list[str]) -> None:
    example = only(as_parquet(tmp_path / "a.parquet", fvqa(image_urls=column)))
    assert example.metadata["image_urls"] == urls
    assert example.images == (RED,)


@pytest.mark.parametrize("column", [None, [], "[]", ""])
def test_no_urls_leave_no_key(tmp_path: pathlib.Path, column: Any) -> None:
    assert (
        "image_urls"
        not in only(as_json(tmp_path / "a.jsonl", {**rows.FVQA, "images": [], "image_urls": column})).metadata
    )


def test_rows_with_urls_alone_have_no_picture(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are examples; `[pictures]` leaves them out and counts them, with those whose picture can't be read."""
    absent = [fvqa(None, data_id="b", image_urls=[URL]), fvqa(None, data_id="c")]
    path = as_parquet(tmp_path / "a.parquet", fvqa(data_id="a"), *absent)
    whole = all_of(path)
    assert [example.images for example in whole] == [(RED,), (), ()]
    assert [example.metadata.get("image_urls") for example in whole] == [None, [URL], None]
    named = {**rows.FVQA, "images": [{"bytes": None, "path": URL}]}
    assert only(as_json(tmp_path / "path.jsonl", named)).metadata["image_urls"] == [URL]
    broken = as_parquet(tmp_path / "b.parquet", fvqa(data_id="a"), *absent, fvqa(RED[:9], data_id="d"))
    with caplog.at_level("WARNING", logger="absl"):
        assert [example.id for example in all_of(f"{broken}[pictures]")] == ["a"]
    assert "3 of 4 rows have no picture and are left out" in caplog.text


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"<html>not found</html>", "not an image"),
        (RED[:9], "not an image"),
        (b"\xff\xd8\xff", "not an image"),
        (RED[:-20], "damaged or incomplete"),  # the header is whole, and the pixels are not
        (encoded("JPEG", (64, 64))[:-40], "damaged or incomplete"),
        (encoded("GIF", (64, 64))[:-40], "damaged or incomplete"),
        (encoded("PNG", (402, 2)), "402x2 pixels; one side may be at most 200 times the other"),
    ],
)
def test_a_picture_that_cannot_be_read_is_named(tmp_path: pathlib.Path, content: bytes, fault: str) -> None:
    """In the row itself, and in a file that it names, which is left out with `[pictures]` as well."""
    path = as_parquet(tmp_path / "a.parquet", fvqa(data_id="a"), fvqa(content, data_id="b"))
    with pytest.raises(ValueError, match=rf"key 'images': the picture can't be read: {fault}.*\[pictures\]") as error:
        open_dataset(str(path))
    assert str(error.value).startswith(f"{path}, row 2: ")
    (tmp_path / "whole.png").write_bytes(RED)
    (tmp_path / "broken.png").write_bytes(content)
    named = [{"id": name, "question": "?", "answer": "x", "image": f"{name}.png"} for name in ("whole", "broken")]
    path = as_json(tmp_path / "named.jsonl", *named)
    with pytest.raises(ValueError, match=rf"line 2: key 'image': the picture can't be read: {fault}.*\[pictures\]"):
        open_dataset(str(path))
    assert [example.id for example in all_of(f"{path}[pictures]")] == ["whole"]


@pytest.mark.parametrize(
    ("label", "metadata"),
    [
        ("search_free", {"kind": "search_free"}),
        ("Search-Required", {"kind": "search_required"}),
        ("infoseek", {"category": "infoseek"}),
    ],
)
def test_one_vocabulary_of_kinds(tmp_path: pathlib.Path, label: str, metadata: dict[str, str]) -> None:
    found = only(as_parquet(tmp_path / "a.parquet", fvqa(category=label))).metadata
    assert found == {"data_source": "mmsearch_r1/fvqa_train", **metadata}
    plain = {"question": "?", "golden_answers": ["x"], "category": label}
    assert only(as_json(tmp_path / "a.jsonl", plain)).metadata == metadata


def test_the_mark_of_a_picture_is_no_part_of_a_question(tmp_path: pathlib.Path) -> None:
    marked = fvqa(prompt=[{"content": "<image>\nWhich ship is shown?", "role": "user"}])
    assert only(as_parquet(tmp_path / "a.parquet", marked)).question == "Which ship is shown?"


# --- MMSearch, SimpleVQA, LiveVQA, Dyn-VQA -----------------------------------------------------------------------------


def test_mmsearch(tmp_path: pathlib.Path) -> None:
    pictured, plain = all_of(
        as_parquet(tmp_path / "end2end.parquet", mmsearch(), mmsearch(None, sample_id="b", alternative_gt_answers=[]))
    )
    assert pictured == Example(
        id="news_001",
        question="When was this bridge closed?",
        answers=("4 July 2024", "July 4, 2024"),
        images=(RED,),
        metadata={
            "area": "news",
            "subfield": "paris",
            "timestamp": "2024-07-15",
            "golden_query": "blue bridge closure date",
        },
    )
    assert (plain.id, plain.answers, plain.images) == ("b", ("4 July 2024",), ())
    assert [example.id for example in all_of(f"{tmp_path / 'end2end.parquet'}[pictures]")] == ["news_001"]


def test_livevqas_preview_is_written_as_mmsearch(tmp_path: pathlib.Path) -> None:
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "a.jpg").write_bytes(RED)
    row = {"sample_id": "Movies_2_2", "query": "Who?", "query_image": "/mnt/bench/image/a.jpg", "gt_answer": "Ann"}
    path = as_json(tmp_path / "qa.json", row, {**row, "sample_id": "b", "query_image": URL})
    first, second = all_of(path)
    assert (first.id, first.answers, first.images) == ("Movies_2_2", ("Ann",), (tmp_path / "image" / "a.jpg",))
    assert (second.images, second.metadata) == ((), {"image_urls": [URL]})


def test_simplevqa(tmp_path: pathlib.Path) -> None:
    """A picture in base64, with or without the head of a URI, as bytes, and beside the file."""
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "0.webp").write_bytes(RED)
    text = base64.b64encode(BLUE).decode()
    pictures = (text, f"data:image/png;base64,{text}")
    given = [{**rows.SIMPLEVQA, "data_id": number, "image": picture} for number, picture in enumerate(pictures)]
    held = all_of(as_parquet(tmp_path / "test.parquet", *given))
    assert [example.images for example in held] == [(BLUE,), (pictures[1],)]
    assert (held[1].id, held[1].question, held[1].answers) == ("1", "Which family is this flower of?", ("Rosaceae",))
    told = (
        "image_description",
        "language",
        "original_category",
        "source",
        "atomic_question",
        "atomic_fact",
        "vqa_category",
    )
    assert held[0].metadata == {key: rows.SIMPLEVQA[key] for key in told}
    column = as_parquet(tmp_path / "column.parquet", {**rows.SIMPLEVQA, "image": {"bytes": BLUE, "path": None}})
    assert only(column).images == (BLUE,)
    beside = as_json(tmp_path / "test.jsonl", {**rows.SIMPLEVQA, "image": "images/0.webp"})
    assert only(beside).images == (tmp_path / "images" / "0.webp",)


def test_livevqa_asks_two_questions_about_a_picture(tmp_path: pathlib.Path) -> None:
    (tmp_path / "News_imgs").mkdir()
    (tmp_path / "News_imgs" / "cnn_1.jpg").write_bytes(RED)
    path = as_json(tmp_path / "benchmark.json", rows.LIVEVQA)
    first, second = all_of(path)
    common = {"source": "CNN World", "time": "2024-10-02T01:38:01.679Z"}
    assert first == Example(
        id="0_20250507/level1",
        question="Based on the provided image, what event is taking place?",
        answers=("a regatta", "boat race"),
        images=(tmp_path / "News_imgs" / "cnn_1.jpg",),
        metadata={
            **common,
            "level": "level1",
            "type": "event",
            "options": ["A. a regatta", "B. a fair"],
            "correct_option": "A",
            "image_urls": ["https://example.org/1.jpg?c=16x9"],
        },
    )
    assert (second.id, second.answers, second.images) == ("0_20250507/level2", ("Bo",), first.images)
    assert second.metadata == {**common, "level": "level2", "options": ["A. Ann", "B. Bo"], "correct_option": "B"}
    absent = as_json(
        tmp_path / "more.json", rows.LIVEVQA, {**rows.LIVEVQA, "id": "b", "img_path": "", "level1_qa": None}
    )
    assert [example.id for example in all_of(absent)] == ["0_20250507/level1", "0_20250507/level2", "b/level2"]
    assert [found for _, found in read_passages(path)] == [[]]


def test_dynvqa(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its answers are numbers, null and lists of lists; a question without any answer is left out."""
    (tmp_path / "mars.jpeg").write_bytes(RED)
    later = {"question_id": "en35", "answer": [None]}
    newer = {**rows.DYNVQA, "question_id": "en36", "golden_query": "how many?", "image": "mars.jpeg"}
    path = as_json(tmp_path / "DynVQA_en.202410.jsonl", rows.DYNVQA, {**rows.DYNVQA, **later}, newer)
    with caplog.at_level("WARNING", logger="absl"):
        first, second = all_of(path)
    assert "1 of 3 rows have no answer" in caplog.text
    assert first == Example(
        id="en34",
        question="How many people have landed on this planet?",
        answers=("nobody yet", "0", "zero"),
        metadata={
            "golden_query": "How many people have landed on Mars?",
            "image_urls": ["https://example.org/image_1.jpeg"],
        },
    )
    assert second.images == (tmp_path / "mars.jpeg",)
    assert second.metadata["golden_query"] == "how many?"
    assert [example.id for example in all_of(f"{path}[pictures]")] == ["en36"]


def test_each_row_is_told_by_its_keys() -> None:
    names = {
        "Fvqa": rows.FVQA,
        "Verl": {**rows.FVQA, "reward_model": {"ground_truth": "x"}},
        "MMSearch": rows.MMSEARCH,
        "SimpleVQA": rows.SIMPLEVQA,
        "LiveVQA": rows.LIVEVQA,
        "DynVQA": rows.DYNVQA,
        "FlashRag": {"id": "1", "question": "?", "answer": "x", "image_url": URL},
    }
    assert {name: type(format_of(row)).__name__ for name, row in names.items()} == {name: name for name in names}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {**rows.FVQA, "images": [], "reward_model": {"candidate_answers": "[", "ground_truth": "x"}},
            "candidate_answers",
        ),
        ({**rows.FVQA, "images": [], "reward_model": {"candidate_answers": "['a' ...", "ground_truth": "x"}}, "a list"),
        ({**rows.FVQA, "images": [], "reward_model": {"candidate_answers": "[]", "ground_truth": " "}}, "ground_truth"),
        ({**rows.FVQA, "images": [], "image_urls": ["a.png"]}, "key 'image_urls' must hold URLs, found 'a.png'"),
        ({**rows.FVQA, "images": [], "image_urls": [3]}, "key 'image_urls' must hold URLs, found '3'"),
        ({**rows.FVQA, "images": [], "prompt": []}, "'prompt' has no user message"),
        ({**rows.MMSEARCH, "query_image": None, "query": ""}, "key 'query' is missing or empty"),
        ({**rows.MMSEARCH, "query_image": None, "gt_answer": None}, "key 'gt_answer' is missing or empty"),
        (
            {**rows.MMSEARCH, "query_image": "a.png"},
            "image 'a.png' is neither in .*image; put it there, or take 'query_image'",
        ),
        ({**rows.SIMPLEVQA, "image": "AAAA"}, "key 'image': the picture can't be read"),
        ({**rows.SIMPLEVQA, "image": "A"}, "key 'image': the picture can't be read"),
        ({**rows.SIMPLEVQA, "answer": ""}, "no answers"),
        (rows.LIVEVQA, "image 'cnn_1.jpg' is neither in "),
        ({**rows.LIVEVQA, "level1_qa": "?"}, "key 'level1_qa' must be an object"),
        ({"id": "a", "level1_qa": {}}, "no question: keys 'level1_qa' and 'level2_qa' are empty"),
        (
            {"id": "a", "level2_qa": {"question": "?", "Ground_Truth_List": []}},
            "key 'level2_qa.Ground_Truth_List' is missing",
        ),
        ({"id": "a", "level2_qa": {"Ground_Truth_List": ["x"]}}, "key 'question' is missing or empty"),
        ({**rows.DYNVQA, "answer": [{"a": 1}]}, "key 'answer' must be a string, a number or a list of these"),
        ({**rows.DYNVQA, "answer": [True]}, "key 'answer' must be a string, a number or a list of these"),
        (
            {**rows.DYNVQA, "image_url": "a.png"},
            "key 'image_url' must hold URLs, found 'a.png'; put paths under 'image'",
        ),
    ],
)
def test_errors_name_file_row_and_key(tmp_path: pathlib.Path, row: dict[str, Any], message: str) -> None:
    kept = {key: value for key, value in row.items() if key != "image_search_result"}
    path = as_json(tmp_path / "rows.jsonl", {"question": "fine?", "answer": "yes"}, kept)
    with pytest.raises(ValueError, match=message) as error:
        FileExamples(path)
    assert str(error.value).startswith(f"{path}, line 2: ")


# --- real files --------------------------------------------------------------------------------------------------------


def shared_rows(path: pathlib.Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize(
    ("name", "source", "pictured"),
    [("fvqa50", "mmsearch_r1/fvqa_train", 35), ("infoseek", "mmsearch_r1/infoseek_train_split", 4)],
)
def test_real_questions_put_back_into_fvqas_columns(
    shared_data: Callable[[str], pathlib.Path], tmp_path: pathlib.Path, name: str, source: str, pictured: int
) -> None:
    """FVQA's real questions and pictures, and those of mini_data.pq, as a parquet file with the released columns."""
    path = shared_data(f"{name}/questions_dev.jsonl.gz")
    originals = [row for row in shared_rows(path) if row["image"]]
    made = [rows.as_fvqa(row, path.parent, source) for row in originals]
    examples = all_of(f"{as_parquet(tmp_path / 'fvqa.parquet', *made)}[pictures]")
    assert len(examples) == len(originals) == pictured
    for example, row in zip(examples, originals):
        assert (example.id, example.question) == (row["id"], row["question"])
        assert list(example.answers) == row["golden_answers"]
        assert example.images == ((path.parent / row["image"]).read_bytes(),)
        assert example.metadata.get("kind") == (row["type"] if name == "fvqa50" else None)


def test_real_questions_of_livevqa(shared_data: Callable[[str], pathlib.Path], tmp_path: pathlib.Path) -> None:
    """As they lie here, and put back into the two questions of a benchmark.json."""
    path = shared_data("livevqa/questions_dev.jsonl.gz")
    originals = shared_rows(path)
    examples = all_of(f"{path}[pictures]")
    assert len(examples) == len(originals) == 229
    assert all(example.metadata["options"] for example in examples)
    (tmp_path / "images").symlink_to(path.parent)
    made: dict[str, dict[str, Any]] = {}
    for row in originals:
        asked = {"question": row["question"], "options": row["options"], "question_type": row["type"]}
        asked |= {
            "Ground_Truth": row["correct_option"],
            "Ground_Truth_List": row["golden_answers"],
            "img_path": row["image"],
        }
        made.setdefault(row["image_id"], {"id": row["image_id"]})[f"{row['level']}_qa"] = asked
    read = {example.id: example for example in all_of(as_json(tmp_path / "benchmark.json", *made.values()))}
    assert len(read) == 229
    for row in originals:
        example = read[f"{row['image_id']}/{row['level']}"]
        assert (example.question, list(example.answers)) == (row["question"].strip(), row["golden_answers"])
        assert example.images[0].resolve() == (path.parent / row["image"]).resolve()
        assert example.metadata["correct_option"] == row["correct_option"]


def test_real_questions_of_dynvqa(shared_data: Callable[[str], pathlib.Path]) -> None:
    path = shared_data("dynvqa/questions_dev.jsonl.gz")
    originals = shared_rows(path)
    for example, row in zip(all_of(path), originals, strict=True):
        assert (example.id, example.question, example.images) == (row["id"], row["question"], ())
        assert list(example.answers) == list(dict.fromkeys(map(str, row["golden_answers"])))  # some are numbers
        assert example.metadata["image_urls"] == [row["image_url"]]
        assert example.metadata["golden_query"] == row["golden_query"]
    with pytest.raises(ValueError, match=r"holds no questions \(494 rows have no picture\)"):
        open_dataset(f"{path}[pictures]")
