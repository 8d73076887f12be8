"""Names of the hub, against a server that speaks the part of its protocol that files are had by, and without a network."""

from __future__ import annotations

import collections
import hashlib
import io
import json
import os
import pathlib
import subprocess
import sys
import urllib.parse
from collections.abc import Mapping
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from aiohttp import web

from routerl_jax.data.formats.known import read_examples
from routerl_jax.data.hub import on_this_machine
from routerl_jax.data.readers import open_dataset
from tests.data.original_rows import as_parquet
from tests.web_servers import serving

NOBODY = "http://127.0.0.1:9"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROOT = pathlib.Path(__file__).parents[2]


def table(*rows: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), buffer)
    return buffer.getvalue()


def row(number: int, **more: Any) -> dict[str, Any]:
    return {"question": f"Which {number}?", "answer": f"{number}", **more}


FILES = {
    "README.md": b"# A data set",
    "nq/test.jsonl": b"".join(json.dumps(row(i, id=f"nq{i}")).encode() + b"\n" for i in range(3)),
    "data/train-00000-of-00002.parquet": table(row(1), row(2)),
    "data/train-00001-of-00002.parquet": table(row(3)),
    "data/test-00000-of-00001.parquet": table(row(4)),
    "plain/0000.parquet": table(row(5, id="p5")),
}


class Hub:
    """`GET /api/datasets/ORG/NAME/tree/REVISION` and `HEAD`, `GET /datasets/ORG/NAME/resolve/REVISION/FILE`, as the hub answers
    them for files that are in the repository itself. `org/set` has the branch `main`, all else is not there."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files
        self.asked: collections.Counter[str] = collections.Counter()

    async def __call__(self, request: Any) -> web.StreamResponse:
        path = urllib.parse.unquote(request.path)
        self.asked[f"{request.method} {path}"] += 1
        for known in ("main", COMMIT):
            if path == f"/api/datasets/org/set/tree/{known}":
                return web.json_response([self.entry(name) for name in self.files])
            if path.startswith(f"/datasets/org/set/resolve/{known}/"):
                return self.file(path.removeprefix(f"/datasets/org/set/resolve/{known}/"))
        missing = "RevisionNotFound" if "/org/set/" in path else "RepoNotFound"
        return web.json_response({"error": missing}, status=404, headers={"X-Error-Code": missing})

    def entry(self, name: str) -> dict[str, Any]:
        digest = hashlib.sha1(self.files[name]).hexdigest()
        return {"type": "file", "oid": digest, "size": len(self.files[name]), "path": name}

    def file(self, name: str) -> web.Response:
        if name not in self.files:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
            return web.json_response({"error": "Entry not found"}, status=404, headers=headers)
        digest = hashlib.sha1(self.files[name]).hexdigest()
        return web.Response(body=self.files[name], headers={"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT})


def read(home: pathlib.Path, endpoint: str, *names: str, **more: str) -> list[dict[str, Any]]:
    """In a process of its own: the client reads its environment once."""
    given = {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    command = [sys.executable, "-m", "tests.data.hub_reader", *names]
    done = subprocess.run(command, cwd=ROOT, env={**kept, **given, **more}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


SET = "hf://datasets/org/set"


def test_files_of_the_hub(tmp_path: pathlib.Path) -> None:
    """Fetched once, found without a network afterwards; what is not there, or not whole, is said."""
    with serving(hub := Hub(FILES)) as server:
        one, part, shards, folder, several, no_file, no_set, no_match = read(
            *(tmp_path, server.url),
            f"{SET}/nq/test.jsonl",
            f"flashrag:{SET}/nq/test.jsonl[1:]",
            f"{SET}/data/train-*.parquet",
            f"{SET}@main/plain",
            SET,
            f"{SET}/nq/dev.jsonl",
            "hf://datasets/org/other/a.jsonl",
            f"{SET}/data/dev-*.parquet",
        )
        assert one["ids"] == ["nq0", "nq1", "nq2"]
        assert part["ids"] == ["nq1", "nq2"]
        assert shards["answers"] == [["1"], ["2"], ["3"]]
        assert shards["ids"] == [
            "train-00000-of-00002/1",
            "train-00000-of-00002/2",
            "train-00001-of-00002/1",
        ]
        assert folder["ids"] == ["p5"]
        assert f"several splits; name one: {SET}/data/test*.parquet, {SET}/data/train*.parquet" in several["error"]
        assert no_file["error"].startswith(f"{SET}/nq/dev.jsonl: could not be fetched (")
        assert no_set["error"].startswith("hf://datasets/org/other/a.jsonl: could not be fetched (")
        assert f"no file of org/set is called so; there are {', '.join(sorted(FILES))}" in no_match["error"]
        got = [asked for asked in hub.asked if asked.startswith("GET /datasets") and asked.endswith("test.jsonl")]
        assert [hub.asked[asked] for asked in got] == [1]
    without_a_network(tmp_path, HF_HUB_OFFLINE="1")
    (shard,) = tmp_path.rglob("train-00001-of-00002.parquet")
    shard.unlink()
    (partial,) = read(tmp_path, NOBODY, f"{SET}/data/train*.parquet", HF_HUB_OFFLINE="1")
    assert "data/train-00001-of-00002.parquet is missing; fetch it with a network" in partial["error"]


@pytest.mark.slow  # the client waits, and tries again
def test_a_hub_that_is_not_reached(tmp_path: pathlib.Path) -> None:
    with serving(Hub(FILES)) as server:
        read(tmp_path, server.url, f"{SET}/nq/test.jsonl", f"{SET}/data/train-*.parquet")
    without_a_network(tmp_path)


def without_a_network(home: pathlib.Path, **settings: str) -> None:
    """What was fetched is found, and nothing else."""
    names = (f"{SET}/nq/test.jsonl", f"{SET}/data/train*.parquet", f"{SET}/README.md")
    one, shards, absent = read(home, NOBODY, *names, **settings)
    assert one["ids"] == ["nq0", "nq1", "nq2"]
    assert shards["answers"] == [["1"], ["2"], ["3"]]
    assert "could not be fetched" in absent["error"]


def test_names_that_are_none(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"'hf://datasets/squad' is no data set of the hub: write hf://datasets/ORG"):
        open_dataset("hf://datasets/squad")
    assert on_this_machine("atlas/train") == "atlas/train"
    assert on_this_machine(str(tmp_path / "a.jsonl[0:2]")) == str(tmp_path / "a.jsonl[0:2]")


def test_several_files_as_one(tmp_path: pathlib.Path) -> None:
    as_parquet(tmp_path / "train-1.parquet", row(1), row(2, id="two"))
    as_parquet(tmp_path / "train-2.parquet", row(3))
    as_parquet(tmp_path / "test-1.parquet", row(4))
    source = open_dataset(f"{tmp_path}/train-*.parquet")
    assert [source[i].answers for i in range(len(source))] == [("1",), ("2",), ("3",)]
    assert len(open_dataset(f"flashrag:{tmp_path}/t*-?.parquet[1:3]")) == 2
    ids = [example.id for _, example in read_examples(f"{tmp_path}/t*.parquet") if example and hasattr(example, "id")]
    assert len(set(ids)) == 4
    with pytest.raises(ValueError, match=r"dev-\*.parquet: no file is called so"):
        open_dataset(f"{tmp_path}/dev-*.parquet")
