"""`python -m launch.build_kb` as a user runs it: its table, its JSON, and one line for every mistake."""

import gzip
import json
import pathlib
import shlex
import subprocess
import sys

import pytest

from routerl_jax.core.config import from_config_dict
from routerl_jax.knowledge.build import BuildConfig
from routerl_jax.knowledge.load import load_kb
from tests.programs import ROOT, fine, launch, refusal

CONFIG = "--config=configs/build_kb.py"

ROWS = [
    {"id": "1", "contents": '"Paris"\nThe capital of France lies on the Seine.'},
    {"id": "2", "contents": '"Rome"\nThe capital of Italy lies on the Tiber.'},
]


@pytest.fixture
def corpus(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "corpus.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS)
    return path


def test_build_search_and_rebuild(corpus: pathlib.Path, tmp_path: pathlib.Path) -> None:
    settings = (f"--config.corpus={corpus}", "--config.name=the capitals", "--json")
    report = json.loads(fine(launch("build_kb", CONFIG, f"--workdir={tmp_path / 'kb'}", *settings)))
    assert (report["name"], report["count"], report["recall"]) == ("the capitals", 2, 1.0)
    assert report["numbers"]["embedded"] == 2
    card = (tmp_path / "kb" / "README.md").read_text().splitlines()
    for line in ("# the capitals", "| kind | dense_text |", "| passages | 2 |", "| corpus | corpus.jsonl.gz |"):
        assert line in card, line
    assert any(line.startswith("| encoder | all-MiniLM-L6-v2, 384 wide, float32 |") for line in card)
    assert 'name = "the capitals"' in card
    assert str(tmp_path) not in "\n".join(card)
    kb = load_kb(tmp_path / "kb")
    assert [found[0].title for found in kb.search(["Which city is on the Tiber?", "France"], k=1)] == ["Rome", "Paris"]
    (tmp_path / "kb" / "embeddings" / "c" / "0" / "0").unlink()
    with pytest.raises(ValueError, match="Rebuild it: ") as caught:
        load_kb(tmp_path / "kb")
    command = shlex.split(str(caught.value).partition("Rebuild it: ")[2])  # what the error says works as it stands
    again = subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert again.returncode == 0, again.stderr
    assert "the capitals (dense_text)" in again.stdout
    assert "2; 2 embedded" in again.stdout
    assert "recall 1.0000" in again.stdout
    assert len(load_kb(tmp_path / "kb")) == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "corpus must be set"),
        (("--config=configs/nowhere.py",), "--config=configs/nowhere.py: there is no such file"),
        (("--config.corpus=nowhere.jsonl",), "nowhere.jsonl does not exist"),
        (("--config.corpus=x.jsonl", "--config.kind=text"), "unknown kind of knowledge base to build 'text'"),
    ],
)
def test_mistakes_are_one_line(tmp_path: pathlib.Path, arguments: tuple[str, ...], expected: str) -> None:
    assert expected in refusal("build_kb", CONFIG, f"--workdir={tmp_path / 'kb'}", *arguments)
    assert not (tmp_path / "kb").exists()


def test_an_unknown_key_is_an_error(tmp_path: pathlib.Path) -> None:
    assert "corpsu" in refusal("build_kb", CONFIG, f"--workdir={tmp_path / 'kb'}", "--config.corpsu=x")


def test_the_config_is_the_defaults() -> None:
    from configs.build_kb import get_config

    assert from_config_dict(BuildConfig, get_config()) == BuildConfig()
