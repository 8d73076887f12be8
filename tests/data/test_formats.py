"""Each data set's own files: what becomes of a row, what is left out, and errors that name file, row and key."""

from __future__ import annotations

import base64
import gzip
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from routerl_jax.core.types import Example
from routerl_jax.data.formats.format import passage_id
from routerl_jax.data.formats.known import format_of, read_passages
from routerl_jax.data.readers import FileExamples, open_dataset
from tests.data import original_rows as rows
from tests.data.original_rows import as_json, as_parquet, as_table, only, png

ADA = passage_id("Ada Pell", "Ada Pell was born in Moss Town. She sails.")
MOSS = passage_id("Moss Town", "Moss Town lies on a fjord. It is in Norway.")


def test_hotpotqa(tmp_path: pathlib.Path) -> None:
    example = only(as_json(tmp_path / "hotpot_dev_distractor_v1.json", rows.HOTPOT))
    assert (example.id, example.answers) == ("5a8b57f2", ("Norway",))
    assert example.metadata == {
        "type": "bridge",
        "level": "hard",
        "supporting_facts": [["Ada Pell", 0], ["Moss Town", 1]],
        "supporting": [ADA, MOSS],
        "supporting_passages": [
            {"id": ADA, "title": "Ada Pell", "text": "Ada Pell was born in Moss Town. She sails."},
            {"id": MOSS, "title": "Moss Town", "text": "Moss Town lies on a fjord. It is in Norway."},
        ],
    }


def test_hotpotqa_in_columns_is_the_same(tmp_path: pathlib.Path) -> None:
    """As the hub has it, and as FlashRAG has it under `metadata`."""
    inner: dict[str, Any] = {key: rows.HOTPOT[key] for key in ("type", "level")}
    titles, sentences = zip(*rows.HOTPOT["context"])  # type: ignore[arg-type]
    facts, numbers = zip(*rows.HOTPOT["supporting_facts"])  # type: ignore[arg-type]
    inner["supporting_facts"] = {"title": list(facts), "sent_id": list(numbers)}
    inner["context"] = {"title": list(titles), "sentences": list(sentences)}
    original = only(as_json(tmp_path / "a.json", rows.HOTPOT))
    asked = {"id": "5a8b57f2", "question": rows.HOTPOT["question"]}
    hub = as_parquet(tmp_path / "b.parquet", asked | {"answer": "Norway"} | inner)
    assert only(hub) == original
    flash = as_json(tmp_path / "c.jsonl", asked | {"golden_answers": ["Norway"], "metadata": inner})
    assert only(flash) == original


def test_what_flashrag_keeps_under_metadata_is_metadata(tmp_path: pathlib.Path) -> None:
    """Else a question's type, its data set and its gold passages would be nowhere to be found: launch.select_data writes so."""
    inner = {"type": "bridge", "dataset": "hotpotqa", "supporting": ["p1"], "id": "inner"}
    row = {"id": "a", "question": "?", "golden_answers": ["x", "", "x"], "level": "hard", "metadata": inner}
    example = only(as_json(tmp_path / "a.jsonl", row))
    assert (example.id, example.answers) == ("a", ("x",))
    assert example.metadata == {
        "level": "hard",
        "type": "bridge",
        "dataset": "hotpotqa",
        "supporting": ["p1"],
        "id": "inner",
    }
    assert only(as_json(tmp_path / "b.jsonl", {**row, "metadata": "none"})).metadata == {
        "level": "hard",
        "metadata": "none",
    }


def test_pictures_of_questions(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the file or in images/, data URIs as they are, URLs left to the metadata; a missing file is named."""
    monkeypatch.setenv("ROUTERL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "images").mkdir()
    for place in ("a.jpg", "images/b.jpg"):
        (tmp_path / place).write_bytes(png())
    plain = {"question": "What is this?", "golden_answers": ["x"]}
    uri = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    path = as_json(
        tmp_path / "vqa.jsonl",
        {**plain, "id": "1", "image": "a.jpg"},
        {**plain, "id": "2", "images": ["b.jpg", uri], "image": None},
        {**plain, "id": "3", "image": "https://example.org/c.jpg"},
        {**plain, "id": "4", "image": None},
    )
    examples = open_dataset(str(path))
    found = [examples[i].images for i in range(4)]
    assert found == [(tmp_path / "a.jpg",), (tmp_path / "images" / "b.jpg", uri), (), ()]
    assert "image" not in examples[0].metadata
    assert examples[2].metadata["image"] == "https://example.org/c.jpg"
    with pytest.raises(ValueError, match="question '1' has pictures; name the file without tfds/"):
        open_dataset(f"tfds/{path}")
    for image, message in (
        ("c.jpg", "image 'c.jpg' is neither in .* take 'image' out of the row, or leave out such rows"),
        (3, "must be a path"),
    ):
        path = as_json(tmp_path / "bad.jsonl", {**plain, "image": image})
        with pytest.raises(ValueError, match=rf"bad\.jsonl, line 1: .*{message}"):
            open_dataset(str(path))


def test_two_wiki_and_its_aliases(tmp_path: pathlib.Path) -> None:
    path = as_json(tmp_path / "dev.json", rows.TWO_WIKI)
    example = only(path)
    assert example.answers == ("Jane Roe",)
    assert example.metadata["evidence_triples"] == rows.TWO_WIKI["evidences"]
    film = passage_id("Grey Gate", "Grey Gate is a film by John Roe. It was made in 1931.")
    assert example.metadata["supporting"][0] == film
    aliased = tmp_path / "with"
    aliased.mkdir()
    (aliased / "id_aliases.json").write_text("".join(json.dumps(row) + "\n" for row in rows.ALIASES))
    assert only(as_json(aliased / "dev.json", rows.TWO_WIKI)).answers == ("Jane Roe", "Jane R. Roe", "Roean")
    inner = {key: value for key, value in rows.TWO_WIKI.items() if key not in ("_id", "question", "answer")}
    flash = {"id": "f", "question": "?", "golden_answers": ["Jane Roe"], "metadata": inner}
    assert only(as_json(aliased / "flash.jsonl", flash)).answers == ("Jane Roe", "Jane R. Roe", "Roean")
    triples = rows.TWO_WIKI["evidences"]
    columns = dict(zip(("fact", "relation", "entity"), map(list, zip(*triples))))  # type: ignore[call-overload]
    each = [dict(zip(columns, triple)) for triple in triples]  # type: ignore[call-overload]
    for evidences in (columns, each, json.dumps(triples)):
        found = only(as_json(tmp_path / "hub.jsonl", rows.TWO_WIKI | {"evidences": evidences}))
        assert found.metadata["evidence_triples"] == triples
    for wrong in ({"fact": ["a"]}, {**columns, "fact": []}, [["a", "b"]], "x", 3):
        path = as_json(tmp_path / "wrong.jsonl", rows.TWO_WIKI | {"evidences": wrong})
        with pytest.raises(ValueError, match=r"wrong.jsonl, line 1: .*key 'evidences'"):
            open_dataset(str(path))


def test_infoseek(tmp_path: pathlib.Path) -> None:
    """The rows as R1-Router released them: ranges, and texts that are accepted besides."""
    row = {"data_id": "val_7", "image_id": "oven_1", "question": "How long is it?", "answer": ["51.97"]}
    measured = only(as_json(tmp_path / "a.jsonl", {**row, "answer_eval": [{"wikidata": 51.97, "range": [46.773, 57]}]}))
    assert (measured.id, measured.answers) == ("val_7", ("51.97",))
    assert measured.metadata["answer_ranges"] == [[46.773, 57.0]]
    assert measured.metadata["image_id"] == "oven_1"
    named = only(as_json(tmp_path / "b.jsonl", {**row, "answer": ["India"], "answer_eval": ["IN", "India"]}))
    assert named.answers == ("India", "IN")
    assert "answer_ranges" not in named.metadata
    for wrong in ({"range": [2, 1]}, {"range": "1-2"}, {"wikidata": 3}):
        path = as_json(tmp_path / "c.jsonl", {**row, "answer_eval": [wrong]})
        with pytest.raises(ValueError, match=r"c.jsonl, line 1: key 'answer_eval' must hold strings or \{range: "):
            open_dataset(str(path))


def test_musique(tmp_path: pathlib.Path) -> None:
    example = only(as_json(tmp_path / "musique_ans_v1.0_dev.jsonl", rows.MUSIQUE))
    mill, ems = (passage_id(p["title"], p["paragraph_text"]) for p in rows.MUSIQUE["paragraphs"][1:])  # type: ignore[index]
    assert example.answers == ("Kim Ott", "K. Ott")
    assert example.metadata["type"] == "2hop"
    assert example.metadata["supporting"] == [mill, ems]
    assert example.metadata["decomposition"] == [
        {"question": "Blue Mill >> located in", "answer": "Ems", "support": mill},
        {"question": "Who governs #1 ?", "answer": "Kim Ott", "support": ems},
    ]


def test_rows_without_answers_are_left_out_where_a_data_set_has_them(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """MuSiQue-Full repeats an id with `answerable` false; test sets have no answers."""
    full = as_json(tmp_path / "full.jsonl", rows.MUSIQUE, {**rows.MUSIQUE, "answerable": False})
    with caplog.at_level("WARNING", logger="absl"):
        assert only(full).id == "2hop__12_34"
    assert "1 of 2 rows have no answer" in caplog.text
    unanswered = {key: value for key, value in rows.HOTPOT.items() if key != "answer"}
    blank = {**unanswered, "_id": "y", "answer": " "}
    path = as_json(tmp_path / "test.json", {**unanswered, "_id": "x"}, blank, rows.HOTPOT)
    assert only(path).id == "5a8b57f2"
    bare = {key: value for key, value in unanswered.items() if key in ("question", "context")}
    assert only(as_json(tmp_path / "hotpot_test.json", {**bare, "_id": "x"}, rows.HOTPOT)).id == "5a8b57f2"
    as_flash = {key: value for key, value in unanswered.items() if key != "_id"} | {"id": "x"}
    assert only(as_json(tmp_path / "flash.json", as_flash, rows.HOTPOT)).id == "5a8b57f2"
    asked = {key: rows.MUSIQUE[key] for key in ("question", "question_decomposition")}
    assert only(as_json(tmp_path / "asked.jsonl", {**asked, "id": "x"}, rows.MUSIQUE)).id == "2hop__12_34"
    bare = {key: rows.MUSIQUE[key] for key in ("id", "question", "paragraphs")}
    assert only(as_json(tmp_path / "musique_test.jsonl", {**bare, "id": "x"}, rows.MUSIQUE)).id == "2hop__12_34"
    with pytest.raises(ValueError, match=r"holds no questions \(1 rows have no answer\)"):
        FileExamples(as_json(tmp_path / "none.json", unanswered))


@pytest.mark.parametrize("name", ["popQA.tsv", "popqa.json"])
def test_popqa_parses_its_aliases(tmp_path: pathlib.Path, name: str) -> None:
    """The peers' readers put the JSON text itself among the answers."""
    example = only((as_table if name.endswith("tsv") else as_json)(tmp_path / name, rows.POPQA))
    assert example.id == "4222362"
    assert example.answers == ("politician", "political leader", "polit.")
    assert example.metadata["s_aliases"] == ["Anna Doe"]
    assert example.metadata["type"] == "occupation"
    assert int(example.metadata["s_pop"]) == 142


def test_nq(tmp_path: pathlib.Path) -> None:
    opened = as_json(tmp_path / "NQ-open.train.jsonl", {"question": "who is it", "answer": ["Bo", "Bo Lee"]})
    assert only(opened) == Example(id="1", question="who is it", answers=("Bo", "Bo Lee"))
    rear = only(as_json(tmp_path / "nq_rear.json", rows.NQ_REAR))
    assert rear.answers == ("Bo Lee", "Bo")
    assert rear.metadata["supporting"] == [passage_id("Songs", "Bo Lee sings the last song.")]


def test_hipporag_paragraphs_that_say_nothing_are_gold(tmp_path: pathlib.Path) -> None:
    paragraphs = [{"title": "A", "text": "a", "idx": 4}, {"title": "B", "text": "b", "is_supporting": False, "idx": 9}]
    row = {"id": "q", "question": "?", "answer": ["x"], "paragraphs": paragraphs}
    assert only(as_json(tmp_path / "custom.json", row)).metadata["supporting"] == [passage_id("A", "a")]
    as_musique = [{"title": "A", "paragraph_text": "a", "is_supporting": True, "idx": 0}]
    row = {"id": "q", "question": "?", "gold_ans": ["x"], "paragraphs": as_musique}
    assert only(as_json(tmp_path / "named.json", row)).answers == ("x",)


def test_bamboogle(tmp_path: pathlib.Path) -> None:
    path = as_table(tmp_path / "bamboogle.csv", {"Question": "Who, and when?", "Answer": "Ann, in 1900"})
    example = only(path)
    assert (example.question, example.answers) == ("Who, and when?", ("Ann, in 1900",))


def test_r1_searcher(tmp_path: pathlib.Path) -> None:
    example = only(as_json(tmp_path / "stage_1.jsonl", rows.R1_SEARCHER))
    expected = {"pred_anses": ["oak", "elm"]}
    assert example == Example(id="hotpot_17", question="Which is older?", answers=("the oak",), metadata=expected)


def test_verl(tmp_path: pathlib.Path) -> None:
    """The prompt's instructions go; the question after its last mark stays, unless a column says it."""
    example = only(as_parquet(tmp_path / "train.parquet", rows.VERL))
    assert (example.id, example.question) == ("nq/train/3", "Who wrote Tin Boats?")
    assert example.answers == ("Lou Ash", "L. Ash")
    assert example.metadata["supporting_facts"] == [["Tin Boats", 0]]
    named = {**rows.VERL, "id": "train_0", "question": "who wrote tin boats?"}
    merged = as_parquet(tmp_path / "merged.parquet", named, {**named, "data_source": "hotpotqa"})
    both = FileExamples(merged)
    assert [both[i].id for i in range(2)] == ["nq/train_0", "hotpotqa/train_0"]
    assert both[0].question == "who wrote tin boats?"


def test_verl_rows_with_pictures_and_columns_of_their_data_set(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    seen = only(as_json(tmp_path / "seen.jsonl", {**rows.VERL, "images": ["a.png"], "difficulty": "hard"}))
    assert seen.images == (tmp_path / "a.png",)
    assert seen.metadata["difficulty"] == "hard"
    held = as_parquet(tmp_path / "seen.parquet", {**rows.VERL, "images": [{"bytes": png()}]})
    assert only(held).images == (png(),)
    assert only(as_json(tmp_path / "b.jsonl", {**rows.VERL, "images": [{"bytes": None, "path": "a.png"}]})).images == (
        tmp_path / "a.png",
    )
    alike = {**rows.VERL, "context": "plain text", "supporting_facts": ["s1"]}  # only called like HotpotQA's
    assert only(path := as_json(tmp_path / "alike.jsonl", alike)).metadata["context"] == "plain text"
    assert [found for _, found in read_passages(path)] == [[]]
    broken = as_json(tmp_path / "broken.jsonl", {**alike, "data_source": "hotpotqa"})
    with pytest.raises(ValueError, match=r"broken.jsonl, line 1: "):
        only(broken)
    twins = as_json(tmp_path / "twins.jsonl", rows.VERL, {**rows.VERL, **rows.MUSIQUE, "answerable": False})
    assert only(twins).id == "nq/train/3"
    inner = {key: value for key, value in rows.HOTPOT.items() if key not in ("_id", "question", "answer")}
    path = as_json(tmp_path / "hotpot.jsonl", {**rows.VERL, "metadata": inner})
    original = only(as_json(tmp_path / "hotpot.json", rows.HOTPOT))
    found = only(path)
    assert found.answers == ("Lou Ash", "L. Ash")
    assert {key: found.metadata[key] for key in ("supporting", "type", "level")} == {
        key: original.metadata[key] for key in ("supporting", "type", "level")
    }
    assert "context" not in found.metadata
    same = tmp_path / "hotpot.json"
    assert [item for _, item in read_passages(path)] == [item for _, item in read_passages(same)]


def test_each_row_is_told_by_its_keys() -> None:
    names = {
        "HotpotQA": rows.HOTPOT,
        "TwoWiki": rows.TWO_WIKI,
        "Musique": rows.MUSIQUE,
        "PopQA": rows.POPQA,
        "HippoRag": rows.NQ_REAR,
        "R1Searcher": rows.R1_SEARCHER,
        "Verl": rows.VERL,
        "FlashRag": {"id": "1", "question": "?", "golden_answers": ["x"], "idx": 3, "metadata": {"level": "easy"}},
        "Bamboogle": {"Question": "?", "Answer": "x"},
    }
    assert {name: type(format_of(row)).__name__ for name, row in names.items()} == {name: name for name in names}


def test_passages_come_with_their_questions(tmp_path: pathlib.Path) -> None:
    ((_, found),) = read_passages(as_json(tmp_path / "a.json", rows.HOTPOT))
    assert [passage.title for passage in found] == ["Ada Pell", "Elsewhere", "Moss Town"]
    assert found[0].id == ADA
    ((_, none),) = read_passages(as_json(tmp_path / "b.jsonl", rows.R1_SEARCHER))
    assert none == []


def without(row: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != key}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**rows.HOTPOT, "context": [["A", "text"]]}, r"key 'context' must be a list of \[title, \[sentence, \.\.\]\]"),
        ({**rows.HOTPOT, "supporting_facts": [["A"]]}, r"key 'supporting_facts' must be a list of \[title, number"),
        (
            {**rows.HOTPOT, "context": {"title": ["A"], "sentences": []}},
            "two lists of one length, 'title' and 'sentences'",
        ),
        (
            {**rows.TWO_WIKI, "evidences": [["a", "b"]]},
            r"key 'evidences' must be a list of \[subject, relation, object\]",
        ),
        ({**rows.TWO_WIKI, "evidences": "[[1"}, "key 'evidences' is a string that is not JSON"),
        ({"question": "?", "golden_answers": [" "]}, "key 'golden_answers' holds no answer but blanks"),
        (
            {**rows.NQ_REAR, "contexts": [{"title": "A", "text": "a", "idx": 1}, {"title": "B", "text": "b"}]},
            "key 'contexts', item 2: idx 1 is that of another item too",
        ),
        ({**rows.MUSIQUE, "question_decomposition": [{"paragraph_support_idx": 9}]}, "no paragraph with idx 9"),
        (
            {**rows.MUSIQUE, "paragraphs": [{"title": "A"}]},
            "key 'paragraphs', item 1: 'title' and 'text' must be strings",
        ),
        ({**rows.POPQA, "possible_answers": "['politician'"}, "key 'possible_answers' may be a list in a string"),
        ({**rows.POPQA, "possible_answers": "[]"}, "key 'possible_answers' holds no answer"),
        (without(rows.NQ_REAR, "reference"), "no answers; give them under 'answer'"),
        (without(rows.R1_SEARCHER, "answer"), "key 'answer' is missing or empty"),
        ({**rows.VERL, "reward_model": {"ground_truth": {}}}, "'reward_model.ground_truth.target' is missing"),
        ({**rows.VERL, "prompt": []}, "'prompt' has no user message"),
        ({**rows.VERL, "prompt": [{"role": "user", "content": "word " * 200}]}, "add a column 'question'"),
    ],
)
def test_errors_name_file_row_and_key(tmp_path: pathlib.Path, row: dict[str, Any], message: str) -> None:
    path = as_json(tmp_path / "rows.jsonl", {"question": "fine?", "answer": "yes"}, row)
    with pytest.raises(ValueError, match=message) as error:
        FileExamples(path)
    assert str(error.value).startswith(f"{path}, line 2: ")


def test_broken_tables(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "q.csv"
    path.write_text("question,answer\nwho?,x\nwhat?\n")
    with pytest.raises(ValueError, match=r"q\.csv, line 3: 1 columns, but line 1 names 2 \(question, answer\)"):
        FileExamples(path)
    broken = tmp_path / "q.parquet"
    broken.write_bytes(b"PAR1 nothing")
    with pytest.raises(ValueError, match=r"q\.parquet: damaged or not parquet"):
        FileExamples(broken)
    with pytest.raises(ValueError, match="No such file"):
        FileExamples(tmp_path / "absent.parquet")


def test_real_rows_of_two_wiki(shared_data: Callable[[str], pathlib.Path]) -> None:
    """Some of them are for retrieval alone and have no answer."""
    path = shared_data("2wikimultihopqa/questions_dev.jsonl.gz")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        answered = [row for row in map(json.loads, file) if row["golden_answers"]]
    examples = open_dataset(f"2wikimultihopqa:{path}")
    assert len(examples) == len(answered) == 557
    assert all(examples[i].metadata["supporting"] == row["supporting"] for i, row in enumerate(answered))


def test_real_rows_of_routerag_as_parquet(shared_data: Callable[[str], pathlib.Path], tmp_path: pathlib.Path) -> None:
    """RouteRAG's RL set is a parquet file of verl's rows: its real questions, put back into that shape, are the same."""
    source = open_dataset(str(shared_data("routerag_rl/questions_dev.jsonl.gz")))
    originals = [source[i] for i in range(0, len(source), 50)]
    made = [
        {
            "data_source": "hotpotqa",
            "prompt": [{"role": "user", "content": f"Say what you need.\nQuestion: {example.question}\n"}],
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": {"target": list(example.answers)}},
            "extra_info": {
                "index": number,
                "split": "train",
                "supporting_facts": json.dumps(example.metadata["supporting_facts"]),
            },
        }
        for number, example in enumerate(originals)
    ]
    read = open_dataset(str(as_parquet(tmp_path / "train.parquet", *made)))
    assert len(read) == len(originals) > 100
    for number, example in enumerate(originals):
        assert read[number].question == example.question.strip()
        assert read[number].answers == example.answers
        assert read[number].metadata["supporting_facts"] == example.metadata["supporting_facts"]
