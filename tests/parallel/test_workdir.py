"""A directory is one process's: while it lives, after it was killed, and where the file system ignores locks."""

import fcntl
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from routerl_jax.parallel import workdir
from routerl_jax.parallel.workdir import directory_lock
from tests.programs import ROOT, two_processes

_HOLDER = """
import pathlib, sys, time
from routerl_jax.parallel import workdir
workdir._BEAT = 0.05
with workdir.directory_lock(pathlib.Path(sys.argv[1])):
    print("in", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: pathlib.Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which is in tmp_path / "run"."""
    command = [sys.executable, "-c", _HOLDER, str(tmp_path / "run")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "in\n"
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that grants every lock to everybody."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    monkeypatch.setattr(workdir, "_BEAT", 0.05)
    monkeypatch.setattr(workdir, "_SETTLE", 0.2)


def enter(directory: pathlib.Path) -> None:
    with directory_lock(directory):
        pass


def record(directory: pathlib.Path, **fields: object) -> dict[str, object]:
    """Leaves the record of a process that is not there."""
    left = {"host": "elsewhere", "boot": "1", "process": 7, "since": "noon", "token": "t", "seen": "one", **fields}
    directory.mkdir()
    (directory / ".lock").write_text(json.dumps(left))
    return left


def test_a_second_process_is_told_who_is_there(holder: subprocess.Popen[str], tmp_path: pathlib.Path) -> None:
    who = re.escape(f"process {holder.pid} on {socket.gethostname()} since")
    with pytest.raises(ValueError, match=rf"run is in use by {who} .*stop it \(kill {holder.pid}, on that host\)"):
        enter(tmp_path / "run")
    with directory_lock(tmp_path / "other"):
        pass
    assert holder.poll() is None


def test_what_a_killed_process_leaves_is_taken_over_with_a_line(
    holder: subprocess.Popen[str], tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At once: flock says that it is gone. The defaults hold here: two and a half minutes would be the test's timeout."""
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with caplog.at_level("WARNING", logger="absl"), directory_lock(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / ".lock").read_text())["process"] == os.getpid()
    (line,) = caplog.messages
    assert f"was in use by process {holder.pid} on" in line
    assert line.endswith("it is taken over")


def test_nothing_is_left_behind(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """A directory that was made for nothing goes, too; what is in one stays."""
    for error in (ZeroDivisionError, KeyboardInterrupt):
        with pytest.raises(error), directory_lock(tmp_path / "made"):
            raise error
        assert not (tmp_path / "made").exists()
    with directory_lock(tmp_path / "made"):
        (tmp_path / "made" / "file").touch()
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["file"]
    (tmp_path / "there").mkdir()
    with directory_lock(tmp_path / "there"), pytest.raises(ValueError, match="is in use by process"):
        enter(tmp_path / "there")
    assert (tmp_path / "there").is_dir()
    assert not caplog.messages


@pytest.mark.usefixtures("no_flock")
def test_without_flock_signs_of_life_keep_others_out(holder: subprocess.Popen[str], tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=f"is in use by process {holder.pid} on"):
        enter(tmp_path / "run")


@pytest.mark.usefixtures("no_flock")
def test_without_flock_silence_frees_the_directory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record(tmp_path / "run")
    monkeypatch.setattr(workdir, "_SILENCE", 0.3)
    with caplog.at_level("WARNING", logger="absl"), directory_lock(tmp_path / "run"):
        pass
    waiting, taken = caplog.messages
    assert "process 7 on elsewhere was in it, last seen one; waiting" in waiting
    assert "it is taken over" in taken


def test_where_locks_end_at_the_machine_signs_of_life_count(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flock works here, but the record is of another host: it may be alive, and is."""
    left, sleep = record(tmp_path / "run"), time.sleep

    def elsewhere(seconds: float) -> None:
        (tmp_path / "run" / ".lock").write_text(json.dumps({**left, "seen": "two"}))
        sleep(0.01)

    monkeypatch.setattr(time, "sleep", elsewhere)
    with pytest.raises(ValueError, match=r"is in use by process 7 on elsewhere since noon \(last seen two\)"):
        enter(tmp_path / "run")


@pytest.mark.usefixtures("no_flock")
def test_of_two_that_claim_at_once_one_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The later writer has it: the earlier one looks again before it goes on."""
    sleep = time.sleep

    def claimed(seconds: float) -> None:
        (tmp_path / "run" / ".lock").write_text(json.dumps({"host": "elsewhere", "process": 7, "token": "other"}))
        sleep(0.01)

    monkeypatch.setattr(time, "sleep", claimed)
    with pytest.raises(ValueError, match="is in use by process 7 on elsewhere"):
        enter(tmp_path / "run")


@pytest.mark.parametrize("ignored", [False, True], ids=["in front", "in the background"])
def test_who_was_taken_over_stops(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, ignored: bool
) -> None:
    """A machine that slept for longer than the silence, say. What is there by then is the other's. What a script starts in the
    background ignores SIGINT."""
    monkeypatch.setattr(workdir, "_BEAT", 0.05)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, handler))

    def be_taken_over() -> None:
        with directory_lock(tmp_path / "run"):
            record = json.dumps({"host": "elsewhere", "process": 7, "token": "other"}).ljust(2000).encode()
            file = os.open(tmp_path / "run" / ".lock", os.O_WRONLY)
            for _ in range(3000):  # the other's heart beats, too: one beat may be overwritten
                os.pwrite(file, record, 0)
                time.sleep(0.02)

    with pytest.raises(ValueError, match="run was taken over by process 7 on elsewhere"):
        be_taken_over()
    assert json.loads((tmp_path / "run" / ".lock").read_text())["token"] == "other"


def test_a_job_of_two_processes_holds_it_once(holder: subprocess.Popen[str], tmp_path: pathlib.Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "taken").symlink_to(tmp_path / "run")
    outputs = two_processes(
        "tests.parallel.two_in_a_job", tmp_path / "job", workdir=tmp_path / "none", JAX_NUM_CPU_DEVICES="1"
    )
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    assert found[0] == found[1]
    assert f"is in use by process {holder.pid} on" in found[0]["taken"]
    assert found[0]["free"] == ""
