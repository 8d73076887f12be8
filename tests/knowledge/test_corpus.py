"""Corpus readers: every accepted format, real files, and an error with file, line, key and fix for every bad one."""

import gzip
import json
import pathlib
import re

import pytest

from routerl_jax.core.types import Passage
from routerl_jax.knowledge.bm25 import Bm25Config, build_bm25
from routerl_jax.knowledge.corpus import Split, corpus_sha256, passages_sha256, read_corpus
from routerl_jax.knowledge.hybrid import HybridConfig, build_hybrid
from routerl_jax.knowledge.update import update
from tests.knowledge.helpers import write_jsonl

EIFFEL = {"id": "a", "title": "Eiffel Tower", "text": "A tower in Paris.\nIt is tall."}
FLASHRAG = {"id": "a", "contents": '"Eiffel Tower"\nA tower in Paris.\nIt is tall.'}


@pytest.mark.parametrize("row", [EIFFEL, FLASHRAG, {**EIFFEL, "url": "x", "contents": None}])
def test_json_lines(tmp_path: pathlib.Path, row: dict) -> None:
    (tmp_path / "c.jsonl").write_text(json.dumps(row) + "\n")
    expected = [Passage(id="a", title="Eiffel Tower", text="A tower in Paris.\nIt is tall.")]
    assert list(read_corpus(tmp_path / "c.jsonl")) == expected


@pytest.mark.parametrize(
    ("contents", "title", "text"),
    [
        ("Paris\ncapital", "Paris", "capital"),
        ('"The "Big" One"\nx', 'The "Big" One', "x"),
        ("no title at all", "", "no title at all"),
        ('""\nuntitled', "", "untitled"),
        ('"\nquote', '"', "quote"),
    ],
)
def test_titles_in_contents(tmp_path: pathlib.Path, contents: str, title: str, text: str) -> None:
    (tmp_path / "c.jsonl").write_text(json.dumps({"id": 7, "contents": contents}))
    assert list(read_corpus(tmp_path / "c.jsonl")) == [Passage(id="7", title=title, text=text)]


def test_hipporag_lists(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "corpus.json"
    path.write_text(json.dumps([{"title": "A", "text": "x", "idx": 5}, {"title": "B", "text": "y", "idx": 3}]))
    assert [p.id for p in read_corpus(path)] == ["5", "3"]
    path.write_text(json.dumps([{"title": "A", "text": "x"}, {"title": None, "text": "ÿ — 東京"}]))
    assert list(read_corpus(path)) == [Passage(id="0", title="A", text="x"), Passage(id="1", title="", text="ÿ — 東京")]


def test_csv(tmp_path: pathlib.Path) -> None:
    """As a spreadsheet writes it: a byte order mark, quotes, a line break in a field, a column of its own."""
    path = tmp_path / "c.csv"
    path.write_bytes('\ufefftitle,year,id,text\r\n"A, B",1999,x,"He said ""no"".\nNever."\r\n'.encode())
    assert list(read_corpus(path)) == [Passage(id="x", title="A, B", text='He said "no".\nNever.')]
    path.write_text("id,text\n1,a\n")
    assert list(read_corpus(path)) == [Passage(id="1", title="", text="a")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name,capital\nGhana,Accra\n", "line 1: no column is called 'text' (columns: name, capital)"),
        ("title,text\na,b\n", "line 2: key 'id' is missing (keys: title, text)"),
        ("id,title,text\n1,a,b\n2,c\n", "line 3: 2 columns, but line 1 names 3 (id, title, text)"),
        ("id,text\n1,a\n2, \n", "line 3: empty passage"),
    ],
)
def test_bad_csv(tmp_path: pathlib.Path, content: str, message: str) -> None:
    path = tmp_path / "c.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(f"{path}, {message}")):
        list(read_corpus(path))


@pytest.mark.parametrize(
    ("name", "count"), [("hotpotqa", 7795), ("musique_ketrag", 6760), ("kilt_wiki_sample", 99), ("searchr1_sample", 10)]
)
def test_real_corpora(shared_data, name: str, count: int) -> None:
    path = shared_data(f"{name}/corpus.jsonl.gz")
    passages = list(read_corpus(path))
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert len(passages) == count
    assert [(p.id, p.title, p.text) for p in passages] == [(r["id"], r["title"] or "", r["text"]) for r in rows]


GOOD = json.dumps(EIFFEL) + "\n"
BAD = {
    "no text": ("c.jsonl", '{"id": "a", "title": "t"}\n', ["line 1", "'text'", "missing", "id, title"]),
    "null text": ("c.jsonl", '{"id": "a", "text": null}\n', ["line 1", "'text'", "missing"]),
    "text is a list": ("c.jsonl", '{"id": "a", "text": ["x"]}\n', ["line 1", "'text'", "list", "string"]),
    "empty text": ("c.jsonl", GOOD + '{"id": "b", "text": " \\n "}\n', ["line 2", "empty passage", "'text'"]),
    "empty contents": ("c.jsonl", '{"id": "b", "contents": "\\"T\\"\\n"}\n', ["line 1", "empty passage", "'contents'"]),
    "no id": ("c.jsonl", '{"text": "x"}\n', ["line 1", "'id'", "missing"]),
    "empty id": ("c.jsonl", '{"id": "", "text": "x"}\n', ["line 1", "'id'", "empty"]),
    "repeated id": ("c.jsonl", GOOD + "\n" + GOOD, ["line 3", "'a'", "line 1", "distinct"]),
    "repeated idx": ("c.json", '[{"text": "x", "idx": 1}, {"text": "y", "idx": 1}]', ["item 2", "'1'", "item 1"]),
    "half a surrogate": ("c.jsonl", '{"id": "a", "text": "\\ud800"}\n', ["line 1", "'text'", "surrogate"]),
    "no rows": ("c.jsonl", "\n", ["holds no passages", "{id, title, text}"]),
    "another extension": ("c.rtf", "a\tb\n", ["unknown extension", ".jsonl"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files(tmp_path: pathlib.Path, case: str) -> None:
    name, content, expected = BAD[case]
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError) as caught:
        list(read_corpus(path))
    for part in [str(path), *expected]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("row", "title", "text"),
    [
        (
            {"title": "Accra", "contents": "It is a capital.\nIt lies at the sea."},
            "Accra",
            "It is a capital.\nIt lies at the sea.",
        ),
        ({"title": "Accra", "contents": '"Accra"\nIt lies at the sea.'}, "Accra", "It lies at the sea."),
        ({"title": None, "contents": "Accra\nIt lies at the sea."}, "Accra", "It lies at the sea."),
        ({"title": "Accra", "text": "At the sea.", "contents": "Accra\nAt  the sea."}, "Accra", "At the sea."),
        ({"text": "At the sea.", "contents": '"Accra"\nAt the sea.'}, "Accra", "At the sea."),
        ({"text": None, "contents": "At the sea.", "metadata": {"title": "Accra"}}, "Accra", "At the sea."),
    ],
)
def test_a_title_of_its_own_is_the_title(tmp_path: pathlib.Path, row: dict, title: str, text: str) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [{"_id": "a", **row}])
    assert list(read_corpus(path)) == [Passage(id="a", title=title, text=text)]


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"id": "a", "text": "At the sea.", "contents": "Accra\nIn the hills."}, "'text' and 'contents'"),
        ({"id": "a", "docid": "b", "text": "At the sea."}, "id and docid"),
    ],
)
def test_two_keys_that_disagree_are_refused(tmp_path: pathlib.Path, row: dict, keys: str) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [{"id": "x", "text": "first"}, row])
    with pytest.raises(ValueError, match=rf"c\.jsonl.*line 2.*{keys}.*Keep one"):
        list(read_corpus(path))


def test_missing_files_are_noticed_before_reading(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.jsonl does not exist"):
        read_corpus(tmp_path / "nowhere.jsonl")
    with pytest.raises(ValueError, match="is an empty directory"):
        read_corpus(tmp_path)


def test_a_knowledge_base_is_a_corpus_too(tmp_path: pathlib.Path) -> None:
    """Its passages as they are now, whatever became of the files that it was built from, and not split again."""
    rows = [{"id": f"p{i}", "title": "T", "text": f"passage number {i}"} for i in range(5)]
    build_bm25(Bm25Config(corpus=str(write_jsonl(tmp_path / "c.jsonl", rows))), tmp_path / "kb", progress=False)
    (tmp_path / "c.jsonl").unlink()
    update(tmp_path / "kb", add=[Passage(id="new", title="", text="added")], delete=["p1"])
    found = list(read_corpus(tmp_path / "kb", split=Split(words=1, least=1)))
    assert [passage.id for passage in found] == ["p0", "p2", "p3", "p4", "new"]
    assert found[1] == Passage(id="p2", title="T", text="passage number 2")
    assert corpus_sha256(tmp_path / "kb") == passages_sha256(found)
    assert build_bm25(Bm25Config(corpus=str(tmp_path / "kb")), tmp_path / "again", progress=False).count == 5
    build_hybrid(HybridConfig(members=(str(tmp_path / "kb"),)), tmp_path / "both")
    with pytest.raises(ValueError, match=r"both \(hybrid\) holds no passages of its own"):
        list(read_corpus(tmp_path / "both"))
