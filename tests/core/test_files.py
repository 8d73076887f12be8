"""Files that appear whole, and where things are kept."""

import json
import pathlib

import pytest

from routerl_jax.core.files import (
    atomic_file,
    cache_directory,
    check_same,
    read_json,
    read_json_lines,
    write_atomic,
    write_json_lines,
)


def test_a_failed_writer_changes_nothing(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "made" / "file.txt"
    write_atomic(path, "æ", sync=True)
    assert path.read_bytes() == "æ".encode()

    def write_and_fail() -> None:
        with atomic_file(path) as file:
            file.write(b"half")
            assert path.read_text() == "æ"  # until it is whole
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_and_fail()
    assert path.read_text() == "æ"
    write_atomic(path, b"new", shared=True)
    assert path.read_bytes() == b"new"
    assert [found.name for found in path.parent.iterdir()] == ["file.txt"]


def test_json_lines(tmp_path: pathlib.Path) -> None:
    write_json_lines(tmp_path / "rows.jsonl", ({"n": n, "text": "Füße\n"} for n in range(3)))
    lines = (tmp_path / "rows.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["n"] for line in lines] == [0, 1, 2]
    assert "Füße" in lines[0]


def test_two_writers_of_one_file(tmp_path: pathlib.Path) -> None:
    """Each writes its own, and the last one that ends stays."""
    path = tmp_path / "file"
    with atomic_file(path, shared=True) as first:
        first.write(b"first")
        write_atomic(path, "second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"


def test_damaged_settings_of_a_job_are_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "settings.json"
    assert not check_same({"k": 1}, path, "take another directory")
    assert check_same({"k": 1}, path, "take another directory")
    path.write_text('{"k"')
    with pytest.raises(ValueError, match=r"settings\.json is not JSON \(.*\)\. Take another directory$"):
        check_same({"k": 1}, path, "take another directory")


@pytest.mark.parametrize("content", ["", '{"k"', "\xff", "[" * 100_000])
def test_a_damaged_file_is_named_with_the_fix(tmp_path: pathlib.Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"config\.json is not JSON \(.*\)\. Copy or download it again$"):
        read_json(path)


def test_a_damaged_line_is_named_and_an_unfinished_one_left_out(tmp_path: pathlib.Path) -> None:
    path, rows = tmp_path / "rows.jsonl", [{"a": "b\u2028c"}, [1, "x"]]
    write_json_lines(path, rows)
    assert list(read_json_lines(path)) == rows
    with path.open("a") as file:
        file.write('{"a": ')  # a writer was killed here
    assert list(read_json_lines(path)) == rows
    with path.open("a") as file:
        file.write("\n1")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 3: not JSON .*; delete the line"):
        list(read_json_lines(path))


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("ROUTERL_CACHE", "/somewhere")
    assert cache_directory() == pathlib.Path("/somewhere")
    monkeypatch.setenv("ROUTERL_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "routerl_jax"
