"""Question files as tfds data sources, and several sources as one."""

from __future__ import annotations

import pathlib

import pytest

from routerl_jax.data.readers import FileExamples, open_dataset
from tests.data import original_rows as rows
from tests.data.original_rows import as_json


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("ROUTERL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_prepared_questions_are_those_of_the_file(tmp_path: pathlib.Path, cache: pathlib.Path) -> None:
    path = as_json(tmp_path / "mixed.json", rows.HOTPOT, rows.TWO_WIKI, rows.MUSIQUE, rows.POPQA)
    prepared, direct = open_dataset(f"tfds/{path}"), FileExamples(path)
    assert len(prepared) == len(direct) == 4
    assert [prepared[i] for i in (3, 0, 2, 1)] == [direct[i] for i in (3, 0, 2, 1)]
    before = sorted(cache.rglob("*.array_record*"))
    assert before
    open_dataset(f"tfds/{path}")
    assert sorted(cache.rglob("*.array_record*")) == before  # nothing is written twice
    as_json(path, rows.HOTPOT)
    assert len(open_dataset(f"tfds/{path}")) == 1  # another content, another cache entry
    with pytest.raises(IndexError):
        open_dataset(f"tfds/{path}")[1]


def test_prepared_questions_raise_what_their_file_does(tmp_path: pathlib.Path, cache: pathlib.Path) -> None:
    path = as_json(tmp_path / "bad.jsonl", rows.HOTPOT, {"question": "?"})
    for _ in range(2):  # a half-written attempt must not pass for a prepared one
        with pytest.raises(ValueError, match=r"bad\.jsonl, line 2: no answers"):
            open_dataset(f"tfds/{path}")
    with pytest.raises(ValueError, match="No such file"):
        open_dataset("tfds/hotpotqa:absent.json")


def test_named_formats(tmp_path: pathlib.Path) -> None:
    path = as_json(tmp_path / "rows.json", rows.HOTPOT)
    assert open_dataset(f"hotpotqa:{path}")[0] == FileExamples(path)[0]
    plain = open_dataset(f"flashrag:{path}")[0]
    assert plain.metadata["context"] == rows.HOTPOT["context"]
    with pytest.raises(ValueError, match=r"unknown question format 'hotpot'; did you mean 'hotpotqa'\?"):
        open_dataset(f"hotpot:{path}")


def test_joined(tmp_path: pathlib.Path) -> None:
    for name, row in {"nq": rows.NQ_REAR, "wiki": rows.TWO_WIKI}.items():
        (tmp_path / name).mkdir()
        as_json(tmp_path / name / "train.json", {**row, "id": "train_0", "_id": "train_0"})
    both = open_dataset(f"{tmp_path}/nq/train.json, 2wikimultihopqa:{tmp_path}/wiki/train.json")
    assert len(both) == 2
    assert [both[i].id for i in range(2)] == ["nq-train/train_0", "wiki-train/train_0"]
    assert both[1].metadata["dataset"] == "wiki-train"
    assert both[1].question == rows.TWO_WIKI["question"]
    for index in (-1, 2):
        with pytest.raises(IndexError):
            both[index]
    with pytest.raises(ValueError, match="two of the joined data sets are called"):
        open_dataset(f"{tmp_path}/nq/train.json,{tmp_path}/nq/train.json")
