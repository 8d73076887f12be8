"""Builds that are killed, repeated, or meet something in their way."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from routerl_jax.core.types import Passage
from routerl_jax.knowledge import writer as writer_module
from routerl_jax.knowledge.build import BuildConfig, build_from_passages
from routerl_jax.knowledge.builds import BuildReport
from routerl_jax.knowledge.store import open_array
from routerl_jax.knowledge.writer import StoreWriter
from tests.knowledge import killed_build
from tests.knowledge.helpers import HashEncoder, files_of, make_passages

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = BuildConfig(name="kb", shard_size=32)


def build(
    directory: pathlib.Path, config: BuildConfig = CONFIG, n: int = 100, encoder: HashEncoder | None = None
) -> BuildReport:
    return build_from_passages(make_passages(n), config, directory, progress=False, encoder=encoder or HashEncoder())


@pytest.mark.parametrize(
    ("stage", "again"), [("embed", killed_build.KILLED_AT % killed_build.SHARD), ("index", 0), ("piece", 0)]
)
def test_kill_9(tmp_path: pathlib.Path, stage: str, again: int) -> None:
    """After SIGKILL nothing is at the place of the knowledge base; the next run embeds only what was not finished."""
    place, log = tmp_path / "kb", tmp_path / "log"
    command = [sys.executable, "-m", "tests.knowledge.killed_build", str(place), str(log), stage]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert not place.exists()
    finished = len(log.read_text().splitlines()) - again

    second = tmp_path / "second"
    second.touch()
    killed_build.build(place, second, "none")
    assert len(second.read_text().splitlines()) == killed_build.COUNT - finished
    counts = Counter(log.read_text().splitlines() + second.read_text().splitlines())
    assert len(counts) == killed_build.COUNT
    assert sum(count == 2 for count in counts.values()) == again  # the shard that was being embedded

    killed_build.build(tmp_path / "uninterrupted" / "kb", tmp_path / "third", "none")
    assert files_of(place) == files_of(tmp_path / "uninterrupted" / "kb")
    assert not list(tmp_path.glob("*.tmp-*"))


class Crash(BaseException):
    pass


class CrashingArray:
    """An array whose writes may crash."""

    def __init__(self, array: Any, crash_at: Callable) -> None:
        self.array, self.crash_at = array, crash_at

    def __getitem__(self, index: slice) -> "CrashingArray":
        return CrashingArray(self.array[index], self.crash_at)

    def write(self, values: np.ndarray) -> Any:
        return self.crash_at(self.array.write)(values)


@pytest.mark.parametrize("step", range(24))
def test_a_crash_at_any_step(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Whatever marker, file or rename the crash comes before, the next run ends with the same files."""
    steps = 0

    def crash_at(function):
        def wrapped(*arguments, **options):
            nonlocal steps
            steps += 1
            if steps == step + 1:
                raise Crash
            return function(*arguments, **options)

        return wrapped

    with monkeypatch.context() as patch:
        for name in ("finish", "create_array"):
            patch.setattr(writer_module, name, crash_at(getattr(writer_module, name)))
        patch.setattr(writer_module, "open_array", lambda path: CrashingArray(open_array(path), crash_at))
        patch.setattr(StoreWriter, "commit", crash_at(StoreWriter.commit))
        for move in ("rename", "replace"):
            patch.setattr(pathlib.Path, move, crash_at(getattr(pathlib.Path, move)))
        try:
            build(tmp_path / "kb")
        except Crash:
            assert not (tmp_path / "kb").exists()
        else:
            assert steps <= step  # the build has fewer steps than this
    build(tmp_path / "kb")
    build(tmp_path / "whole" / "kb")
    assert files_of(tmp_path / "kb") == files_of(tmp_path / "whole" / "kb")


def test_the_same_build_again_is_free(tmp_path: pathlib.Path) -> None:
    first, encoder = build(tmp_path / "kb"), HashEncoder()
    second = build(tmp_path / "kb", encoder=encoder)
    assert (first.numbers["embedded"], second.numbers["embedded"]) == (100, 0)
    assert encoder.seen == []
    assert (second.count, second.recall, second.bytes) == (first.count, first.recall, first.bytes)


def test_another_index_reuses_the_embeddings_of_a_killed_build(tmp_path: pathlib.Path, monkeypatch) -> None:
    def crash(*_: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "commit", crash)
        with pytest.raises(Crash):
            build(tmp_path / "kb")
    assert build(tmp_path / "kb", BuildConfig(name="kb", shard_size=32, index="exact")).numbers["embedded"] == 0


@pytest.mark.parametrize(
    "change", [{"passage_prefix": "x "}, {"query_prefix": "q "}, {"index": "exact"}, {"name": "other"}, {"n": 99}]
)
def test_another_build_needs_leave_to_overwrite(tmp_path: pathlib.Path, change: dict) -> None:
    build(tmp_path / "kb")
    before = files_of(tmp_path / "kb")
    n = change.pop("n", 100)
    with pytest.raises(ValueError, match=r"kb already holds a knowledge base.*config\.overwrite=True"):
        build(tmp_path / "kb", BuildConfig(**{"name": "kb", "shard_size": 32, **change}), n)
    assert files_of(tmp_path / "kb") == before
    build(tmp_path / "kb", BuildConfig(**{"name": "kb", "shard_size": 32, "overwrite": True, **change}), n)
    assert files_of(tmp_path / "kb") != before
    assert sorted(path.name for path in tmp_path.iterdir()) == [".kb.lock", "kb"]


@pytest.mark.parametrize("damaged", ["embeddings/c/0/0", "kb.json"])
def test_a_damaged_knowledge_base_is_rebuilt_with_overwrite(tmp_path: pathlib.Path, damaged: str) -> None:
    build(tmp_path / "kb")
    before = files_of(tmp_path / "kb")
    (tmp_path / "kb" / damaged).write_bytes(b"{}")
    with pytest.raises(ValueError, match=r"kb already holds a knowledge base|bytes of 1,060"):
        build(tmp_path / "kb")
    build(tmp_path / "kb", BuildConfig(name="kb", shard_size=32, overwrite=True))
    assert files_of(tmp_path / "kb") == before


def test_markers_that_lost_their_data_are_made_again(tmp_path: pathlib.Path) -> None:
    """As after a crash of the machine: a marker is there, and empty. Its part is done again."""
    with StoreWriter(tmp_path / "kb", "f" * 64) as writer:
        writer.passages(make_passages(3))
        writer.once("stage", lambda: {"turn": 1})
        for marker in writer.progress.iterdir():
            marker.write_bytes(b"")
        assert writer.passages(make_passages(3)) == 3
        assert writer.once("stage", lambda: {"turn": 2}) == {"turn": 2}
        assert writer.once("stage", lambda: {"turn": 3}) == {"turn": 2}


def test_a_mount_point_is_noticed_before_the_work(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kb").mkdir()
    monkeypatch.setattr(pathlib.Path, "is_mount", lambda path: path.name == "kb" and path.parent == tmp_path)
    encoder = HashEncoder()
    with pytest.raises(ValueError, match=r"kb is a mount point.*give a directory inside it, such as .*kb/kb"):
        build(tmp_path / "kb", encoder=encoder)
    assert encoder.seen == []
    assert build(tmp_path / "kb" / "kb").count == 100


@pytest.mark.parametrize("in_place", [False, True])
def test_what_was_replaced_does_not_stay_after_a_crash(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    """The crash comes before the new knowledge base is in its place, or when it is, before the old one is deleted."""
    build(tmp_path / "kb")
    before, rename = files_of(tmp_path / "kb"), pathlib.Path.rename

    def crash(path: pathlib.Path, target: pathlib.Path) -> None:
        if target != tmp_path / "kb" or in_place:
            rename(path, target)
        if target == tmp_path / "kb":
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "rename", crash)
        with pytest.raises(Crash):
            build(tmp_path / "kb", BuildConfig(name="new", shard_size=32, overwrite=True))
    assert files_of(tmp_path / ".kb.replaced") == before
    assert build(tmp_path / "kb", BuildConfig(name="new", shard_size=32)).numbers["embedded"] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".kb.lock", "kb"]


def test_foreign_files_are_left_alone(tmp_path: pathlib.Path) -> None:
    (tmp_path / "kb").mkdir()
    (tmp_path / "kb" / "thesis.txt").write_text("important")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="is not a knowledge base; give a new or empty directory"):
            build(tmp_path / "kb", BuildConfig(overwrite=overwrite))
    assert (tmp_path / "kb" / "thesis.txt").read_text() == "important"
    (tmp_path / "empty").mkdir()
    assert build(tmp_path / "empty").count == 100


def test_a_bad_corpus_leaves_nothing_behind(tmp_path: pathlib.Path) -> None:
    bad = {
        "occurs twice": [*make_passages(50), make_passages(1)[0]],
        "is empty": [*make_passages(50), Passage(id="x", title="t", text=" ")],
        "no passages": [],
    }
    for message, passages in bad.items():
        with pytest.raises(ValueError, match=message):
            build_from_passages(passages, CONFIG, tmp_path / "kb", progress=False, encoder=HashEncoder())
    assert [path.name for path in tmp_path.iterdir()] == [".kb.lock"]


def test_bad_vectors(tmp_path: pathlib.Path) -> None:
    class Broken(HashEncoder):
        def embed(self, texts: Sequence[str], *, prefix: str | None = None, batch_size: int = 32) -> np.ndarray:
            vectors = super().embed(texts)
            vectors[["Text № 40 " in text for text in texts]] = np.nan
            return vectors

    with pytest.raises(ValueError, match="not finite for passage 'p40'"):
        build(tmp_path / "kb", encoder=Broken())


def test_two_builds_at_once_make_one(tmp_path: pathlib.Path) -> None:
    """The second waits for the first and then has nothing to do."""

    class Slow(HashEncoder):
        def embed(self, texts: Sequence[str], *, prefix: str | None = None, batch_size: int = 32) -> np.ndarray:
            time.sleep(0.1)
            return super().embed(texts)

    reports: list[BuildReport] = []
    threads = [
        threading.Thread(target=lambda: reports.append(build(tmp_path / "kb", encoder=Slow()))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(report.numbers["embedded"] for report in reports) == [0, 100]


def test_a_knowledge_base_is_on_the_disk_before_it_takes_anothers_place(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "kb")
    done: list[tuple[str, str]] = []
    fsync, rename, rmtree = os.fsync, pathlib.Path.rename, shutil.rmtree

    def noted_rename(self: pathlib.Path, target: Any) -> Any:
        done.append(("rename", str(self)))
        return rename(self, target)

    def noted_rmtree(path: Any, **options: Any) -> None:
        done.append(("remove", str(path)))
        rmtree(path, **options)

    def noted_fsync(handle: int) -> None:
        done.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(pathlib.Path, "rename", noted_rename)
    monkeypatch.setattr(shutil, "rmtree", noted_rmtree)
    build(tmp_path / "kb", BuildConfig(name="other", shard_size=32, overwrite=True))
    scratch = next(path for what, path in done if what == "rename" and ".tmp-" in path)
    first, last = done.index(("rename", str(tmp_path / "kb"))), done.index(("rename", scratch))
    files = {str(file.relative_to(tmp_path / "kb")) for file in (tmp_path / "kb").rglob("*")}
    synced = {os.path.relpath(path, scratch) for what, path in done[:first] if what == "sync"}
    assert files <= synced
    removed = max(i for i, one in enumerate(done) if one == ("remove", str(tmp_path / ".kb.replaced")))
    assert last < done.index(("sync", str(tmp_path)), last) < removed
