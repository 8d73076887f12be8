"""Question files as spreadsheets, pandas and other trainers write them: read where there is no doubt, else refused."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from routerl_jax.core.types import Example
from routerl_jax.data.gold_paths import gold_passages
from routerl_jax.data.readers import open_dataset
from routerl_jax.knowledge.corpus import read_corpus
from routerl_jax.knowledge.tables import read_tables


def only(path: pathlib.Path) -> Example:
    source = open_dataset(str(path))
    assert len(source) == 1
    return source[0]


def row_file(folder: pathlib.Path, **fields: Any) -> pathlib.Path:
    path = folder / "q.jsonl"
    path.write_text(json.dumps({"question": "Who?", **fields}) + "\n")
    return path


@pytest.mark.parametrize(
    ("value", "answers"),
    [
        ('["Marie", "Curie"]', ("Marie", "Curie")),
        ("['Marie', 'O\\'Hara']", ("Marie", "O'Hara")),
        ("['Marie Curie' \"O'Hara\"\n 'x']", ("Marie Curie", "O'Hara", "x")),  # numpy
        ("array(['Marie', 'Curie'], dtype=object)", ("Marie", "Curie")),
        ("[np.str_('Marie'), np.str_('Curie')]", ("Marie", "Curie")),
        ("('Marie', 'Curie')", ("Marie", "Curie")),
        ("['Marie', None, nan, 1903.0]", ("Marie", "1903")),
        ('[["Marie"], ["Curie"]]', ("Marie", "Curie")),
        (["['Marie', 'Curie']"], ("Marie", "Curie")),
        ('"[\\"Marie\\", \\"Curie\\"]"', ("Marie", "Curie")),  # written as JSON twice
        (1903, ("1903",)),
        (1903.0, ("1903",)),
        (0, ("0",)),
        (2.5, ("2.5",)),
        (["Marie", 1903, None], ("Marie", "1903")),
        # texts, although they have brackets
        ("[Fe/H]", ("[Fe/H]",)),
        ('"[REC]"', ('"[REC]"',)),
        ("[Xe] 6s2", ("[Xe] 6s2",)),
        ("('Heroes') and Low", ("('Heroes') and Low",)),
        (["[4, 6]"], ("[4, 6]",)),
        ('["[4, 6]"]', ("[4, 6]",)),
        ("[\"['a', 'b']\"]", ("['a', 'b']",)),
    ],
)
def test_answers_in_the_forms_of_other_programs(tmp_path: pathlib.Path, value: Any, answers: tuple[str, ...]) -> None:
    assert only(row_file(tmp_path, golden_answers=value)).answers == answers
    verl = {"reward_model": {"ground_truth": {"target": value}}, "question": "Who?"}
    assert only(row_file(tmp_path, **verl)).answers == answers


@pytest.mark.parametrize(
    "value", ["[4, 6]", "[1903]", "['a' ... 'z']", "['a', ", "[Marie, Curie]", '{"target": ["a"]}']
)
def test_what_may_be_a_list_is_refused_with_the_fix(tmp_path: pathlib.Path, value: str) -> None:
    with pytest.raises(ValueError, match=r"q\.jsonl, line 1: key 'answer' .* as a list"):
        open_dataset(str(row_file(tmp_path, answer=value)))


@pytest.mark.parametrize(
    "truth",
    [
        r'"{\"target\": [\"Marie\", \"Curie\"]}"',
        '{"target": ["Marie", "Curie"]}',
        "{'target': array(['Marie', 'Curie'], dtype=object)}",
        "['Marie' 'Curie']",
    ],
)
def test_the_truth_of_verl_in_a_string(tmp_path: pathlib.Path, truth: str) -> None:
    assert only(row_file(tmp_path, reward_model={"ground_truth": truth})).answers == ("Marie", "Curie")
    packed = row_file(tmp_path, reward_model=json.dumps({"ground_truth": truth}), extra_info="{'index': 3}")
    assert (only(packed).answers, only(packed).id) == (("Marie", "Curie"), "3")


@pytest.mark.parametrize("in_a_string", [False, True])
def test_a_range_of_infoseek_as_one_object(tmp_path: pathlib.Path, in_a_string: bool) -> None:
    accepted = {"wikidata": 170.0, "range": [153.0, 187.0]}
    example = only(row_file(tmp_path, answer=["170"], answer_eval=str(accepted) if in_a_string else accepted))
    assert (example.answers, example.metadata["answer_ranges"]) == (("170",), [[153.0, 187.0]])
    assert only(row_file(tmp_path, answer="170", answer_eval="Ada")).answers == ("170", "Ada")


def test_an_example_with_half_a_surrogate_pair_is_refused() -> None:
    for fields in ({"question": "Who \ud83d?", "answers": ("x",)}, {"question": "Who?", "answers": ("\ude00",)}):
        with pytest.raises(ValueError, match=r"example 'q7': .*half of a surrogate pair"):
            Example(id="q7", **fields)


def test_lists_of_gold_passages_in_strings(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "q.csv"
    path.write_text('question,answer,supporting,metadata\nWho?,Marie,"[\'p1\' \'p2\']","{""hops"": 2}"\n')
    example = only(path)
    assert (list(gold_passages(example.metadata)), example.metadata["hops"]) == (["p1", "p2"], 2)
    assert list(gold_passages(only(row_file(tmp_path, answer="x", supporting="p1")).metadata)) == ["p1"]
    path.write_text(
        'question,answer,paragraphs,question_decomposition\nWho?,Marie,"[{""title"": ""T"", ""paragraph_text"": ""t"", '
        "\"\"is_supporting\"\": true}]\",\"[{'question': 'q', 'answer': 'a', 'paragraph_support_idx': 0}]\"\n"
    )
    example = only(path)
    (title,) = gold_passages(example.metadata).values()
    assert (title, example.metadata["decomposition"][0]["answer"]) == ("T", "a")


def test_supporting_facts_as_the_hub_has_them_need_no_context(tmp_path: pathlib.Path) -> None:
    for facts in ({"title": ["Accra"], "sent_id": [2]}, "[['Accra', 2]]"):
        metadata = only(row_file(tmp_path, answer="x", metadata={"supporting_facts": facts})).metadata
        assert metadata["supporting_facts"] == [["Accra", 2]]


@pytest.mark.parametrize("key", ["evidence_pages", "reference_page", "hard_positive_idx"])
def test_gold_that_no_score_would_see_is_refused(tmp_path: pathlib.Path, key: str) -> None:
    for fields in ({key: [3]}, {"metadata": {key: "[3]"}}):
        with pytest.raises(ValueError, match=f"line 1: key '{key}' .*'supporting'"):
            open_dataset(str(row_file(tmp_path, answer="x", **fields)))


CSV = "id,question,golden_answers\n7,Who?,Marie\n"


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + CSV.replace("\n", "\r\n").encode(),
        CSV.encode("utf-16"),
        CSV.replace(",", ";").encode(),
        ("sep=;\r\n" + CSV.replace(",", ";")).encode(),
        CSV.replace(",", "\t").encode(),
        CSV.replace("\n", ",,\n").encode() + b",,,,\n\n",
        b",id,question,golden_answers\n0,7,Who?,Marie\n",
        CSV.replace("\n", "\r").encode(),
    ],
)
def test_tables_as_spreadsheets_write_them(tmp_path: pathlib.Path, content: bytes) -> None:
    path = tmp_path / "q.csv"
    path.write_bytes(content)
    assert only(path) == Example(id="7", question="Who?", answers=("Marie",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"question,answer,answer\na,b,c\n", "line 1: two columns are called 'answer'. Rename"),
        (b"question,answer,\na,b,c\n", "line 2: column 3 has no name"),
        (b"question;answer\na,b;c\nd,e\n", "line 3: 1 columns, but line 1 names 2"),
        ("question,answer\na,Zoë\n".encode("cp1252"), "not UTF-8 text here or soon after"),
    ],
)
def test_tables_in_doubt_are_refused(tmp_path: pathlib.Path, content: bytes, message: str) -> None:
    path = tmp_path / "q.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        open_dataset(str(path))


def test_corpora_and_tables_of_the_world(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "c.csv"
    path.write_bytes("id;title;text;\r\n1;T;a, b;\r\n;;;\r\n".encode("utf-16"))
    assert [(passage.id, passage.text) for passage in read_corpus(path)] == [("1", "a, b")]
    path = tmp_path / "c.jsonl"
    path.write_bytes('{"id": 1, "text": "a"}\r\n'.encode("utf-16"))
    assert [passage.text for passage in read_corpus(path)] == ["a"]
    path.write_text('{"id": NaN, "text": "a"}\n')
    with pytest.raises(ValueError, match="line 1: key 'id' holds nan"):
        list(read_corpus(path))
    path.write_text('{"id": 1, "text": "a", "text": "b"}\n')
    with pytest.raises(ValueError, match="line 1: key 'text' occurs twice"):
        list(read_corpus(path))
    path = tmp_path / "links.json"
    path.write_text('{"/wiki/A": "half \\ud83d"}')
    with pytest.raises(ValueError, match=r"links\.json, .*'/wiki/A' holds half of a surrogate pair"):
        list(read_corpus(path))
    path = tmp_path / "cities.csv"
    path.write_text("City,Year,,\nOslo,1048,,\n,,,\n")
    (table,) = read_tables(path)
    assert (table.header, table.rows) == (("City", "Year"), (("Oslo", "1048"),))
