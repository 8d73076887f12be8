"""Builds by two processes, builds without room, and shards that lost something in a crash."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from routerl_jax.knowledge.build import BuildConfig, build_from_passages
from routerl_jax.knowledge.exact_index import ExactIndex
from tests.knowledge.helpers import HashEncoder, files_of, make_passages, write_jsonl
from tests.programs import ROOT, two_processes


def corpus(tmp_path: pathlib.Path, count: int = 200) -> pathlib.Path:
    rows = [{"id": p.id, "title": p.title, "text": p.text} for p in make_passages(count)]
    return write_jsonl(tmp_path / "corpus.jsonl", rows)


def test_two_processes(tmp_path: pathlib.Path) -> None:
    """Each embeds its shards, none twice; the files are those of a build by one process."""
    arguments = (corpus(tmp_path), tmp_path / "job" / "kb", -1)
    outputs = two_processes(
        "tests.knowledge.two_builders", *arguments, workdir=tmp_path / "job", JAX_NUM_CPU_DEVICES="2"
    )
    results = [json.loads(output.splitlines()[-1]) for output in outputs]
    parts = [result["embedded"] for result in results]
    assert [len(part) for part in parts] == [4 * 32 - 24, 3 * 32]  # 7 shards of 32, the last of 8, dealt out in turn
    assert len({*parts[0], *parts[1]}) == 200
    assert [result["report"]["numbers"]["embedded"] for result in results] == [104, 96]
    assert all(result["report"]["recall"] == 1.0 for result in results)
    build_from_passages(
        make_passages(200),
        BuildConfig(name="kb", shard_size=32),
        tmp_path / "one" / "kb",
        progress=False,
        encoder=HashEncoder(),
    )
    together, alone = files_of(tmp_path / "job" / "kb"), files_of(tmp_path / "one" / "kb")
    assert {name: data for name, data in together.items() if name != "kb.json"} == {
        name: data for name, data in alone.items() if name != "kb.json"
    }


def test_one_of_two_fails(tmp_path: pathlib.Path) -> None:
    """The other does not wait for it, and what it did is kept."""
    job = tmp_path / "job"
    path = corpus(tmp_path)
    outputs = two_processes("tests.knowledge.two_builders", path, job / "kb", 1, workdir=job, JAX_NUM_CPU_DEVICES="2")
    results = [json.loads(output.splitlines()[-1]) for output in outputs]
    assert "process 1 of the build failed: the device is gone" in results[0]["error"]
    assert "the device is gone" in results[1]["error"]
    assert not (job / "kb").exists()
    outputs = two_processes("tests.knowledge.two_builders", path, job / "kb", -1, workdir=job, JAX_NUM_CPU_DEVICES="2")
    results = [json.loads(output.splitlines()[-1]) for output in outputs]
    assert [len(result["embedded"]) for result in results] == [0, 96]


def limited(directory: pathlib.Path, limit: int, count: int, dim: int) -> dict:
    command = [sys.executable, "-m", "tests.knowledge.full_disk", directory, limit, count, dim]
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("stage", "limit", "count", "dim", "kept"),
    [
        ("passages", 200, 100, 4, 0),
        ("embeddings", 20_000, 100, 128, 0),
        ("index", 40_000, 100, 128, 100),  # two shards of 25.6 kB fit, ScaNN's copy of all of them does not
    ],
)
def test_no_room(tmp_path: pathlib.Path, stage: str, limit: int, count: int, dim: int, kept: int) -> None:
    """The message names the place and the way on; the next run, with room, embeds only what is missing."""
    first = limited(tmp_path / "kb", limit, count, dim)
    said = "I/O error" if stage == "index" else "File too large"  # ScaNN does not say more
    assert f"no room to write ({said}" in first["error"]
    assert stage in first["error"] or stage == "passages"
    assert "run the same command again" in first["error"]
    assert not (tmp_path / "kb").exists()
    second = limited(tmp_path / "kb", 0, count, dim)
    assert second == {"embedded": count - kept, "error": ""}
    assert (tmp_path / "kb" / "kb.json").is_file()


def test_a_full_file_system(tmp_path: pathlib.Path) -> None:
    """A real one, of 200 kB, where this machine lets us mount it."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        first = limited(place / "kb", 0, 400, 256)
        assert "No space left on device" in first["error"]
        assert "GB are free there" in first["error"]
        subprocess.run(["mount", "-o", "remount,size=20m", str(place)], check=True)
        second = limited(place / "kb", 0, 400, 256)
        assert second["error"] == ""
        assert second["embedded"] <= 400
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize(
    ("file", "said", "embedded"),
    [
        ("embeddings/c/1/0", "its rows are embedded again", 32),
        ("passages/bytes/c/0", "the passages are written again", 0),
        ("passages/offsets/c/0", "the passages are written again", 0),
    ],
)
def test_a_shard_that_lost_its_end(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog, file: str, said: str, embedded: int
) -> None:
    """Between two runs a file became shorter than it was written: what it held is made again, the rest is not."""
    config = BuildConfig(name="kb", shard_size=32, index="exact")

    def build(directory: pathlib.Path) -> HashEncoder:
        encoder = HashEncoder()
        build_from_passages(make_passages(100), config, directory, progress=False, encoder=encoder)
        return encoder

    with monkeypatch.context() as patch:
        patch.setattr(ExactIndex, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path / "kb")
    [shard] = tmp_path.glob(f"kb.tmp-*/{file}")
    os.truncate(shard, shard.stat().st_size - 100)
    with caplog.at_level("WARNING", logger="absl"):
        encoder = build(tmp_path / "kb")
    assert said in caplog.text
    assert sum(text != "width" for text in encoder.seen) == embedded
    build(tmp_path / "whole" / "kb")
    assert files_of(tmp_path / "kb") == files_of(tmp_path / "whole" / "kb")
