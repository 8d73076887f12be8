"""`python -m launch.update_kb`: what it prints, and one line for every mistake."""

import json
import pathlib

import pytest

from routerl_jax.knowledge.load import load_kb
from tests.knowledge.helpers import build_words, make_passages, write_jsonl
from tests.programs import launch_here, refusal


@pytest.fixture
def kb(tmp_path: pathlib.Path) -> pathlib.Path:
    build_words(make_passages(10), tmp_path / "kb")
    return tmp_path / "kb"


def test_add_and_delete(kb: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = write_jsonl(tmp_path / "more.jsonl", [{"id": "n", "title": "Zebra", "text": "striped"}])
    (tmp_path / "ids.txt").write_text("p3\n\n p4 \n")
    launch_here("update_kb", f"--workdir={kb}", f"--add={more}", f"--delete={tmp_path / 'ids.txt'}", "--json")
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["added"], report["deleted"], report["count"], report["compacted"]) == (1, 2, 9, True)
    assert [p.id for p in load_kb(kb).search(["zebra"], 3)[0]] == ["n"]
    assert "| passages | 9 |" in (kb / "README.md").read_text().splitlines()


def test_mistakes(kb: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert "--delete=" in refusal("update_kb", f"--workdir={kb}", f"--delete={tmp_path / 'nowhere'}")
    (tmp_path / "ids.txt").write_text("nobody\n")
    assert "has no passage 'nobody'" in refusal("update_kb", f"--workdir={kb}", f"--delete={tmp_path / 'ids.txt'}")
    assert "is missing" in refusal("update_kb", f"--workdir={tmp_path}")
