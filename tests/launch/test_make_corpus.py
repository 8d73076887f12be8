"""A corpus of the passages that questions bring along, and the way from there to the questions' gold passages."""

from __future__ import annotations

import pathlib

import pytest

from routerl_jax.data.readers import open_dataset
from routerl_jax.knowledge.corpus import read_corpus
from tests.data import original_rows as rows
from tests.data.original_rows import as_json
from tests.programs import launch_here, refusal


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
def test_distinct_passages_and_gold_ids(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    hotpot = as_json(tmp_path / "hotpot.json", rows.HOTPOT, {**rows.HOTPOT, "_id": "again"})
    musique = as_json(tmp_path / "musique.jsonl", rows.MUSIQUE)
    output = tmp_path / name
    assert not launch_here("make_corpus", f"--questions={hotpot},musique:{musique}", f"--output={output}")
    assert "6 distinct passages of 9 that came with 3 questions" in capsys.readouterr().out
    corpus = {passage.id: passage for passage in read_corpus(output)}
    assert [p.title for p in corpus.values()] == ["Ada Pell", "Elsewhere", "Moss Town", "Mills", "Blue Mill", "Ems"]
    for path in (hotpot, musique):
        for gold in open_dataset(str(path))[0].metadata["supporting_passages"]:
            assert corpus[gold["id"]].text == gold["text"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["hotpot.json", "musique.jsonl", name])
    assert "exists already" in refusal("make_corpus", f"--questions={hotpot}", f"--output={output}")


def test_refusals_leave_nothing_behind(tmp_path: pathlib.Path) -> None:
    bare = as_json(tmp_path / "bare.jsonl", {"question": "?", "answer": "x"})
    output = tmp_path / "corpus.jsonl"
    assert "no row brings passages along" in refusal("make_corpus", f"--questions={bare}", f"--output={output}")
    assert "must end in .jsonl" in refusal("make_corpus", f"--questions={bare}", f"--output={tmp_path}/corpus.tsv")
    assert [path.name for path in tmp_path.iterdir()] == ["bare.jsonl"]
