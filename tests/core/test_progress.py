"""Bars in a terminal, lines elsewhere, and what others write meanwhile."""

import fcntl
import gc
import os
import pathlib
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from routerl_jax.core import progress
from routerl_jax.core.progress import Bar, be_quiet, note, waiting
from routerl_jax.parallel import devices

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    streams = sys.stdout, sys.stderr
    yield
    be_quiet(False)
    assert (sys.stdout, sys.stderr) == streams


def test_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with Bar(range(3), desc="training", unit="step", mininterval=0) as bar:
        for step in bar:
            bar.set_postfix_str(f"reward {step}", refresh=False)
    written = capsys.readouterr().err
    assert "\r" not in written
    lines = [re.sub(r"\d\d:\d\d|[\d.]+(?=step/s)", "#", line) for line in written.splitlines()]
    assert lines[0] == "training: 0/3 [#<?, ?step/s]"
    assert lines[-1] == "training: 3/3 [#<#, #step/s, reward 2]"
    assert [line.split()[1] for line in lines] == ["0/3", "1/3", "2/3", "3/3"]


def test_lines_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    """At the beginning, at the end, and not for each of many short steps."""
    for _ in Bar(range(1000), desc="reading", mininterval=0, miniters=1):
        pass
    with Bar(desc="unknown", unit="page") as bar:
        bar.update(5)
    Bar(total=3, desc="left open", leave=False).close()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" [")[0] for line in lines] == [
        "reading: 0/1000",
        "reading: 1000/1000",
        "unknown: 0page",
        "unknown: 5page",
        "left open: 0/3",
    ]


def test_a_bar_that_comes_late_shows_nothing_before(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in Bar(range(3), desc="scoring", delay=5.0):
        pass
    assert capsys.readouterr().err == ""


def test_what_is_waited_for_is_told_where_nothing_moves(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.05)
    monkeypatch.setattr(progress, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(progress, "_PULSE", 0.02)
    monkeypatch.setattr(progress, "_SHOW_WAITING", 0.0)
    with Bar(total=2, desc="training", unit="step"), waiting("rollout"):
        with waiting("tools"):
            time.sleep(0.5)
        time.sleep(0.5)
    lines = capsys.readouterr().err.splitlines()
    told = [re.match(r"training(?: \((\w+) \d+ s\))?: 0/2 \[", line) for line in lines]
    assert all(told), lines
    said = [one[1] for one in told if one]
    assert said[0] is None
    assert list(dict.fromkeys(said[1:])) == ["tools", "rollout"]
    assert len(said) < 8  # and not ten times a second


def test_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    be_quiet()
    with Bar(range(3), desc="training") as bar:
        assert list(bar) == [0, 1, 2]
        note("about ten minutes to go")
    be_quiet(False)
    note("heard")
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out == "heard\n"


def test_a_bar_that_is_forgotten_leaves_nothing() -> None:
    bar = Bar(total=3, desc="never closed")
    assert any(thread.name == "progress" for thread in threading.enumerate())
    del bar
    gc.collect()
    deadline = time.monotonic() + 10
    while any(thread.name == "progress" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(thread.name == "progress" for thread in threading.enumerate())
    assert not progress._open


def test_compilations_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []
    monkeypatch.setattr(devices, "compiling", heard.append)
    devices.tell_compilations()
    jax.jit(lambda x: jnp.sin(x) * 12345.678)(jnp.ones(7)).block_until_ready()
    assert heard[-2:] == [True, False]


def test_a_failed_compilation_is_over_with_what_asked_for_it() -> None:
    with waiting("update"):
        progress.compiling(True)
    assert progress._compiling is None


SCRIPT = """
import sys, time, warnings
from absl import logging
from routerl_jax.core import progress
from routerl_jax.core.progress import Bar, note, waiting
progress._PULSE, progress._SHOW_WAITING = 0.02, 0.0
with Bar(range(3), desc="training", unit="step") as bar:
    for step in bar:
        with waiting("tools"):
            time.sleep(0.2)
        logging.warning("careful %d", step)
        warnings.warn(f"mind the step {step}")
        print("piece", end=" ", file=sys.stderr)
        print("by piece", step, file=sys.stderr)
        note(f"note {step}")
        with Bar(total=2, desc="inner") as inner:
            inner.update(2)
        bar.set_postfix_str(f"reward {step}")
print("the end")
"""


def in_a_terminal(script: str, columns: int = 100) -> tuple[str, list[str]]:
    """What a program writes to a terminal, and the lines that stand there at the end."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    command = [sys.executable, "-c", script]
    child = subprocess.Popen(command, cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, close_fds=True)
    os.close(slave)
    written = b""
    while True:
        try:
            piece = os.read(master, 4096)
        except OSError:  # Linux, once nobody holds the other end
            break
        if not piece:
            break
        written += piece
    os.close(master)
    assert child.wait(60) == 0
    lines, row, column = [""], 0, 0
    for sign in re.findall(r"\x1b\[A|.|\n|\r", written.decode()):
        if sign == "\r":
            column = 0
        elif sign == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif sign == "\x1b[A":
            row -= 1
        else:
            padded = lines[row].ljust(column)
            lines[row] = f"{padded[:column]}{sign}{padded[column + 1 :]}"
            column += 1
    return written.decode(), [line.rstrip() for line in lines]


def test_a_terminal_has_whole_lines_above_one_bar() -> None:
    written, lines = in_a_terminal(SCRIPT)
    for step in range(3):
        assert f"WARNING:absl:careful {step}" in lines
        assert f"piece by piece {step}" in lines
        assert f"note {step}" in lines
        assert any(line.endswith(f"UserWarning: mind the step {step}") for line in lines)
    assert "the end" in lines
    (bar,) = [line for line in lines if line.startswith("training")]
    assert re.match(r"training: 100%\|.*\| 3/3 \[\d\d:\d\d<00:00, .*, reward 2\]$", bar)
    assert not any("inner" in line for line in lines)  # those within are taken away at their end
    assert re.search(r"\rtraining \(tools \d s\): +\d+%", written)
