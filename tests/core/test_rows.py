"""The reader of data files: both layouts, plain and gzip, and an error with file, row and fix for every bad one."""

import gzip
import json
import pathlib
import zlib

import pytest

from routerl_jax.core.rows import RowLocation, checked_path, read_rows

ROWS = [{"id": 1, "text": "東京"}, {"text": "a\u2028b\x85c", "more": [None, {"x": 1.5}]}, {}]  # not newlines, to JSON
GOOD = '{"id": 1}\n'
LINES = b"".join(b'{"id": %d}\n' % zlib.crc32(b"%d" % i) for i in range(5000))  # hashes are hard to compress


def write(path: pathlib.Path, content: str | bytes) -> pathlib.Path:
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("start", ["", "\ufeff"])  # a byte order mark
def test_formats(tmp_path: pathlib.Path, start: str, suffix: str) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    for name in ("r.jsonl", "r.txt"):
        path = write(tmp_path / f"{name}{suffix}", start + "\n" + lines[0] + "\r\n  \n\n" + "\n".join(lines[1:]))
        assert list(read_rows(path)) == [(RowLocation(path, "line", n), row) for n, row in zip((2, 5, 6), ROWS)]
    path = write(tmp_path / f"r.json{suffix}", start + json.dumps(ROWS, ensure_ascii=False, indent=1))
    assert list(read_rows(str(path))) == [(RowLocation(path, "item", n), row) for n, row in enumerate(ROWS, 1)]


@pytest.mark.parametrize("content", ["", "\n \n", "\ufeff\n"])
def test_no_rows(tmp_path: pathlib.Path, content: str) -> None:
    assert list(read_rows(write(tmp_path / "r.jsonl", content))) == []


def test_home_directory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write(tmp_path / "r.jsonl", GOOD)
    assert list(read_rows("~/r.jsonl")) == [(RowLocation(path, "line", 1), {"id": 1})]
    assert checked_path("~/r.jsonl") == path


def test_a_list_may_be_all_there_is_in_an_object(tmp_path: pathlib.Path) -> None:
    """As ViDoSeek has it."""
    path = write(tmp_path / "r.json", '{"examples": [{"id": 1}, {"id": 2}]}')
    assert [(place.unit, place.number, row["id"]) for place, row in read_rows(path)] == [("item", 1, 1), ("item", 2, 2)]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("r.jsonl", GOOD + '{"k": ' + "9" * 5000 + "}\n", ", line 2: not JSON (Exceeds the limit (4300 digits)"),
        ("r.jsonl", GOOD + '{"k": ' + "[" * 100_000 + "\n", ", line 2: not JSON (nested too deeply)"),
        ("r.jsonl", GOOD + "{broken\n", ", line 2: not JSON (Expecting property name"),
        ("r.jsonl", GOOD + '\n{"id": \n' + GOOD, ", line 3: not JSON (Expecting value, column 7). Put one JSON object"),
        ("r.jsonl", GOOD + '"text"\n', ", line 2: expected an object, found str"),
        ("r.jsonl", GOOD + "[1]\n", ", line 2: expected an object, found list"),
        ("r.jsonl", GOOD + "null\n", ", line 2: expected an object, found NoneType"),
        ("r.jsonl", GOOD.encode() + b'{"x": "\xe9"}\n', ", line 2: not UTF-8 text (invalid continuation byte)"),
        ("r.jsonl", GOOD.encode() + b'"\xed\xa0\x80"', ", line 2: not UTF-8 text"),  # half of a surrogate pair
        ("r.jsonl", GOOD + '{"id": 1, "t": ["\\ud83d"]}\n', ", line 2: key 't[0]' holds half of a surrogate pair"),
        ("r.jsonl", GOOD + '{"t\\ud83d": 1}\n', ", line 2: key 't\\ud83d' holds half of a surrogate pair"),
        ("r.json", '[{},\n {"a" "x"}]', ", line 2: not JSON (Expecting ':' delimiter, column 7). Rename it to .jsonl"),
        ("r.json", GOOD + GOOD, ", line 2: not JSON (Extra data, column 1). Rename it to .jsonl if it holds one JSON"),
        ("r.json", b'[{},\n "caf\xe9"]', ", line 2: not UTF-8 text"),
        ("r.json", '[{}, "x"]', ", item 2: expected an object, found str"),
        ("r.json", '{"id": 1}', ": expected a JSON list, found dict. Rename it"),
        ("r.json", '{"examples": [{}], "version": 2}', ": expected a JSON list, found dict. Rename it"),
        ("r.json", '{"examples": [{}, "x"]}', ", item 2: expected an object, found str"),
    ],
)
def test_bad_rows(tmp_path: pathlib.Path, name: str, content: str | bytes, message: str, suffix: str) -> None:
    path = write(tmp_path / f"{name}{suffix}", content)
    with pytest.raises(ValueError) as caught:
        list(read_rows(path))
    assert str(caught.value).startswith(f"{path}{message}")


@pytest.mark.parametrize("name", ["r.jsonl.gz", "r.json.gz"])
def test_damaged_gzip(tmp_path: pathlib.Path, name: str) -> None:
    whole = gzip.compress(LINES)
    path = tmp_path / name
    cases = {
        "ended before the end-of-stream": whole[:-9],
        "Error -3 while decompressing": whole[:10] + b"\xff" * 4 + whole[14:],  # the first block after the header
        "CRC check failed": whole[:-8] + bytes(4) + whole[-4:],
        "Not a gzipped file": LINES,
    }
    for what, content in cases.items():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"^{path}: damaged or not gzip after line \d+ \(.*{what}.*drop \.gz"):
            list(read_rows(path))


def test_damage_is_placed(tmp_path: pathlib.Path) -> None:
    """The line that is named is the last that was handed out, and little before the damage is lost."""
    whole = gzip.compress(LINES)
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(whole[: len(whole) * 3 // 4])
    rows = []
    with pytest.raises(ValueError) as caught:
        any(map(rows.append, read_rows(path)))
    assert 2500 < len(rows) < 4500
    assert f"after line {len(rows)} " in str(caught.value)


def test_files_that_can_not_be_read(tmp_path: pathlib.Path) -> None:
    for path, what in ((tmp_path / "absent.jsonl", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(ValueError, match=rf"^{path}: {what}\. Give a file that can be read"):
            list(read_rows(path))


def test_checked_path(tmp_path: pathlib.Path) -> None:
    for name in ("r.jsonl", "r.jsonl.gz", "r.json", "r.json.gz"):
        assert checked_path(str(write(tmp_path / name, ""))) == tmp_path / name
    for path, what in (
        (tmp_path / "absent.jsonl", "does not exist"),
        (tmp_path, "is a directory"),
        (write(tmp_path / "r.tsv", ""), r": unknown extension\. Rename it: \.jsonl"),
    ):
        with pytest.raises(ValueError, match=rf"^{path} ?{what}"):
            checked_path(path)
