"""Directories that stand for places in buckets, against servers that speak their protocols."""

import json
import os
import pathlib
import socket
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from routerl_jax.core import buckets
from routerl_jax.learning.checkpoints import Checkpoints, model_fields, saved_steps
from routerl_jax.learning.learner import LearnerState
from routerl_jax.parallel import mirrors, workdir
from routerl_jax.parallel.mirrors import mirrored, send
from routerl_jax.parallel.workdir import directory_lock
from tests import tiny
from tests.buckets import bucket  # noqa: F401 (a fixture)


def write(directory: pathlib.Path, **files: str) -> None:
    for name, content in files.items():
        path = directory / name.replace("__", "/").replace("_json", ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def uploads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keeps a list of what is written and removed from now on, by its last part."""
    done: list[str] = []
    upload, remove = buckets.upload, buckets.remove
    monkeypatch.setattr(
        buckets, "upload", lambda path, place: (done.append(place.rpartition("/")[2]), upload(path, place))
    )
    monkeypatch.setattr(buckets, "remove", lambda place: (done.append(f"-{place.rpartition('/')[2]}"), remove(place)))
    return done


def test_a_local_place_is_itself(tmp_path: pathlib.Path) -> None:
    with mirrored(str(tmp_path / "x")) as path:
        assert path == tmp_path / "x"
        send(path)
    assert not path.exists()


def test_what_changes_is_uploaded_and_marks_come_last(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    with mirrored(bucket) as path:
        assert not path.exists()
        assert path.name == bucket.rpartition("/")[2]
        write(path, policy__config_json="{}", policy__model="weights", metrics="1\n", _lock="", policy__half="")
        (path / "policy" / "half").rename(path / "policy" / ".model.part")
    assert set(buckets.listing(bucket)) == {"policy/config.json", "policy/model", "metrics", "_lock"}
    assert not path.exists()
    done = uploads(monkeypatch)
    with mirrored(bucket) as path:
        assert (path / "policy" / "model").read_text() == "weights"
        assert done == []
        with (path / "metrics").open("a") as file:
            file.write("2\n")
        send(path)
        assert done == ["metrics"]
        done.clear()
        write(path, policy__config_json="{ }", policy__model="others")
        (path / "_lock").unlink()
        send(path / "policy")
        assert done == ["-_lock", "model", "config.json"]
        done.clear()
    assert done == []
    assert buckets.read_object(f"{bucket}/metrics") == b"1\n2\n"


def test_a_file_is_mirrored_too(bucket: str) -> None:  # noqa: F811
    for content in ("old", "new"):
        with mirrored(f"{bucket}/corpus.jsonl") as path:
            assert path.exists() == (content == "new")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    assert buckets.read_object(f"{bucket}/corpus.jsonl") == b"new"


def test_what_could_not_be_uploaded_is_kept(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def broken(*_: Any) -> None:
        raise buckets.NotWritten("the bucket is full")

    def work() -> None:
        with mirrored(bucket) as path:
            write(path, results_json="{}")
            monkeypatch.setattr(buckets, "upload", broken)

    with pytest.raises(ValueError, match=r"the bucket is full. What is missing there is kept in (.*)") as refused:
        work()
    kept = str(refused.value).rpartition(" kept in ")[2]
    assert list(pathlib.Path(kept).rglob("results.json"))


def state(seed: int) -> LearnerState:
    params, moments = tiny.model(seed=seed), np.random.default_rng(seed).normal(size=8)
    return LearnerState(params=nnx.state(params, nnx.Param), opt_state=(jnp.asarray(moments),), updates=jnp.int32(seed))


def test_checkpoints_are_in_the_bucket_when_they_are_complete(bucket: str) -> None:  # noqa: F811
    model = tiny.model().config
    with mirrored(bucket) as path:
        assert saved_steps(path / "checkpoints") == []
        checkpoints = Checkpoints(path / "checkpoints", keep=2)
        for step in (1, 2, 3):
            checkpoints.save(step, state(step), None, {"model": model_fields(model), "at": step})
        checkpoints.wait()
        assert saved_steps(path / "checkpoints") == [2, 3]
        checkpoints.close()
        (path / "checkpoints" / "4.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
        write(path / "checkpoints" / "4.orbax-checkpoint-tmp", half="")
    names = buckets.listing(bucket)
    assert {name.split("/")[1] for name in names} == {"2", "3"}
    # a step of which an upload was killed, or that is being removed
    for name in [name for name in names if name.startswith("checkpoints/3/")]:
        if name.rpartition("/")[2] in (mirrors.MARK, "commit_success.txt") and name.count("/") == 2:
            buckets.remove(f"{bucket}/{name}")
    with mirrored(bucket) as path:
        assert saved_steps(path / "checkpoints") == [2]
        checkpoints = Checkpoints(path / "checkpoints", keep=2)
        assert checkpoints.latest() == 2
        restored, _, extra = checkpoints.restore(2, state(0), None, model)
        checkpoints.close()
    assert extra["at"] == 2
    assert int(restored.updates) == 2
    np.testing.assert_array_equal(restored.opt_state[0], state(2).opt_state[0])


def test_a_place_in_a_bucket_has_one_owner(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    for name in ("_SETTLE", "_BEAT"):
        monkeypatch.setattr(workdir, name, 0.05)
    with mirrored(bucket) as path, mirrored(bucket) as other:
        with (
            directory_lock(path),
            pytest.raises(ValueError, match=rf"in use by process {os.getpid()} on"),
            directory_lock(other),
        ):
            pass
        with directory_lock(other):
            assert buckets.read_object(f"{bucket}/.lock")
    assert buckets.read_object(f"{bucket}/.lock") is None
    assert buckets.listing(bucket) == {}


def test_who_has_lost_the_place_uploads_nothing_more(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    for name in ("_SETTLE", "_BEAT"):
        monkeypatch.setattr(workdir, name, 0.05)
    other = {"host": "elsewhere", "process": 7, "token": "other"}

    def work(path: pathlib.Path) -> None:
        with directory_lock(path):
            write(path, metrics="1")
            for _ in range(600):  # again and again: the owner may write after the first time
                buckets.write_object(f"{bucket}/.lock", json.dumps(other).encode())
                time.sleep(0.1)

    with mirrored(bucket) as path:
        with pytest.raises(ValueError, match="was taken over by process 7 on elsewhere"):
            work(path)
        send(path)
    assert buckets.listing(bucket) == {}
    assert json.loads(buckets.read_object(f"{bucket}/.lock") or b"") == other


def test_what_a_killed_process_left_in_a_bucket_is_taken_over_at_once(
    bucket: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(workdir, "_SETTLE", 0.05)
    dead = {"host": socket.gethostname(), "boot": workdir._boot(), "process": 2**22 + 1, "token": "other"}
    buckets.write_object(f"{bucket}/.lock", json.dumps(dead).encode())
    with mirrored(bucket) as path, directory_lock(path):
        assert "ended without giving it back" in caplog.text
    assert buckets.read_object(f"{bucket}/.lock") is None
