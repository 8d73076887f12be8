"""The sample of real questions that this repository holds."""

import pathlib
import re
from typing import Any

import pytest

from benchmarks.real_data import KINDS, MOST, SAMPLE, SHARES, WORDS, pack, rows, unpack
from routerl_jax.knowledge.bm25 import Bm25Config, build_bm25
from routerl_jax.knowledge.load import load_kb

SPLITS = tuple(name for name, _ in SHARES)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("sample")
    unpack(directory)
    return directory


def words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def test_the_named_passage_states_an_answer(sample: pathlib.Path) -> None:
    """By a comparison of words, which knows nothing of titles, articles or accents."""
    passages = {name: {row["id"]: row for row in rows(sample / f"{name}.jsonl")} for name in WORDS}
    for name in (*SPLITS, "other_sets", "paraphrases"):
        questions = rows(sample / f"{name}.jsonl")
        assert max(sum(row["path"][0]["kb"] == kb for row in questions) for kb in WORDS) <= MOST
        stated = 0
        for row in questions:
            (hop,) = row["path"]
            passage = passages[hop["kb"]][hop["passage_id"]]
            text = f" {words(passage['title'])} {words(passage['text'])} "
            stated += any(f" {words(answer)} " in text for answer in row["golden_answers"])
        assert stated > 0.97 * len(questions), name


def test_one_source_alone_shows_an_answer(sample: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Of 50 questions of each kind that held-out titles ask: by the question itself, or by the recorded query."""
    questions = rows(sample / "test.jsonl")[:50] + rows(sample / "other_sets.jsonl")[:50]
    shown: list[set[str]] = [set() for _ in questions]
    for kb in WORDS:
        build_bm25(Bm25Config(corpus=str(sample / f"{kb}.jsonl")), tmp_path / kb)
        base = load_kb(tmp_path / kb)
        for key in ("question", "query"):
            queries = [row["path"][0]["query"] if key == "query" else row["question"] for row in questions]
            for found, row, results in zip(shown, questions, base.search(queries, k=2)):
                texts = [f" {words(passage.title)} {words(passage.text)} " for passage in results]
                if any(f" {words(answer)} " in text for answer in row["golden_answers"] for text in texts):
                    found.add(kb)
    alone = [found == {row["path"][0]["kb"]} for found, row in zip(shown, questions)]
    assert sum(alone) >= 95


def test_a_bridge_needs_both_of_its_passages(sample: pathlib.Path) -> None:
    """The first names the second, the question does not, and the second alone states the answer."""
    passages = {row["id"]: row for name in ("people", "works") for row in rows(sample / f"{name}.jsonl")}
    titles: dict[str, set[str]] = {}
    for split, (of_source, of_bridge) in KINDS.items():
        questions = rows(sample / f"kinds_{split}.jsonl")
        kinds = [row["kind"] for row in questions]
        assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(WORDS, of_source) | {"bridge": of_bridge}
        bridged = [row for row in questions if row["kind"] == "bridge"]
        titles[split] = {row[key] for row in bridged for key in ("about", "work")}
        for row in bridged:
            first, second = (f" {words(passages[hop['passage_id']]['text'])} " for hop in row["path"])
            (answer,), name = row["golden_answers"], row["path"][1]["query"]
            assert f" {words(name)} " in first
            assert words(name) not in words(row["question"])
            assert f" {words(answer)}" in second  # and on: some passages lack the dash between two years
            assert f" {words(answer)}" not in first
    assert not titles["test"] & (titles["train"] | titles["validation"])


def test_no_title_is_on_two_sides(sample: pathlib.Path) -> None:
    about = {name: {row["about"] for row in rows(sample / f"{name}.jsonl")} for name in (*SPLITS, "other_sets")}
    for name, other in (("train", "test"), ("train", "validation"), ("test", "validation"), ("train", "other_sets")):
        assert not about[name] & about[other]
    sets = {name: {row["set"] for row in rows(sample / f"{name}.jsonl")} for name in ("train", "other_sets")}
    assert not sets["train"] & sets["other_sets"]


def test_a_paraphrase_asks_the_same(sample: pathlib.Path) -> None:
    """It is another text with the same answers and path."""
    kept: tuple[str, ...] = ("golden_answers", "path", "about")
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = list(
        zip(rows(sample / "test.jsonl"), rows(sample / "paraphrases.jsonl"), strict=True)
    )
    for row, again in pairs:
        assert again["question"] != row["question"]
        assert [again[key] for key in kept] == [row[key] for key in kept]


def test_every_set_has_its_licence(sample: pathlib.Path) -> None:
    text = (sample / "LICENCES.md").read_text()
    for path in sample.glob("*.jsonl"):
        for row in rows(path):
            assert "set" not in row or f"`{row['set'].split(',')[0]}`" in text


def test_packing_again_gives_the_same_file(sample: pathlib.Path, tmp_path: pathlib.Path) -> None:
    pack(sample, tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == SAMPLE.read_bytes()
