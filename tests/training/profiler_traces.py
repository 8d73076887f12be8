"""Traces that JAX's profiler really makes; test_profiler.py runs this file in a Python of its own.

Where the TPU compiler has been loaded and there is no TPU, as after tests of compile_check, the profiler ends the process.
"""

import contextlib
import fnmatch
import gzip
import json
import pathlib
import re
import time
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

from routerl_jax.training import config as schema
from routerl_jax.training import sft
from routerl_jax.training.callbacks import Step, Training, running
from routerl_jax.training.loggers import read_metrics
from routerl_jax.training.profiler import Clock, Profiler, report
from routerl_jax.training.rl import train_rl
from tests.programs import ROOT
from tests.training.small_run import make_config, make_sft_config


def undocumented(workdir: pathlib.Path) -> list[str]:
    """Metrics of a run that docs/runs.md#metrics does not name; words in capitals and `..` stand for any there."""
    text = (ROOT / "docs" / "runs.md").read_text().partition("\n## Metrics\n")[2]
    named = [re.sub(r"[A-Z]{3,}|\.\.", "*", name) for name in re.findall(r"`([\w/.]+)`", text)]
    named += [f"{name.rpartition('/')[0]}/max" for name in named if name.endswith("/mean")]
    rows = read_metrics(workdir)
    assert rows
    return sorted({name for row in rows for name in row if not any(fnmatch.fnmatchcase(name, one) for one in named)})


def session(profiler: Profiler, workdir: pathlib.Path) -> Any:
    return running([profiler], Training(config=None, workdir=workdir, learner=cast(Any, None)), {}, {})


@contextlib.contextmanager
def taken(profiler: Profiler, step: int) -> Iterator[None]:
    profiler.on_step_begin(step)
    yield
    profiler.on_step_end(Step(number=step, metrics={}))


def test_a_trace_of_our_own(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps 1 and 2 of 4: what slept longest on the host comes first, and a matrix product is the devices'."""
    work = jax.jit(lambda x: jnp.tanh(x @ x))
    matrix = jnp.ones((300, 300))
    work(matrix).block_until_ready()
    profiler = Profiler(range(1, 3))
    with session(profiler, tmp_path):
        for step in range(4):
            clock = Clock()
            with taken(profiler, step):
                with clock("rollout"):
                    time.sleep(0.2)
                    with clock("tools"):
                        time.sleep(0.5)
                with clock("update"):
                    work(matrix).block_until_ready()
    text = (tmp_path / "profile" / "profile.txt").read_text()
    assert text in capsys.readouterr().out
    assert text.startswith("Profile of 2 steps, ")
    parts, rest = text.split("The longest things on the devices")
    first, second = re.findall(r"^ +(\w+) +([\d.]+) +([\d.]+) +(\d+) ", parts, re.MULTILINE)[:2]
    assert (first[0], second[0]) == ("tools", "rollout")
    assert (first[3], second[3]) == ("2", "2")  # of two steps, not of four
    assert 1.0 <= float(first[1]) < 3.0
    assert 0.4 <= float(second[1]) < float(second[2]) - 1.0 + 0.01
    devices, host = rest.split("The longest things on the host")
    assert "jit__lambda: " in devices
    assert re.search(r"^ +tools ", host, re.MULTILINE)
    (found,) = (tmp_path / "profile").rglob("*.trace.json.gz")
    with gzip.open(found) as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("tools") == 2
    (file,) = (tmp_path / "profile").rglob("*.xplane.pb")
    assert report(file, 2) == text


def test_an_error_within_a_step_ends_the_trace(tmp_path: pathlib.Path) -> None:
    for _ in range(2):  # a trace that were still open would refuse the second one
        profiler = Profiler(range(5))
        with pytest.raises(KeyError), session(profiler, tmp_path), taken(profiler, 0):
            raise KeyError
    assert not (tmp_path / "profile" / "profile.txt").exists()


def test_a_run_that_ends_within_tells_what_there_is(tmp_path: pathlib.Path) -> None:
    profiler = Profiler(range(0, 5))
    with session(profiler, tmp_path), taken(profiler, 0):
        time.sleep(0.01)
    assert (tmp_path / "profile" / "profile.txt").read_text().startswith("Profile of 1 step, ")


def test_a_supervised_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sft, "_HELD_OUT", 8)
    monkeypatch.setattr(sft, "_VOCABULARY_EXAMPLES", 40)
    sft.train_sft(make_sft_config(profile="1:2"), tmp_path)
    text = (tmp_path / "profile" / "profile.txt").read_text()
    assert text.startswith("Profile of 1 step, ")
    assert re.search(r"^ +(demonstrations|update) ", text, re.MULTILINE)
    assert undocumented(tmp_path) == []


def test_a_run(tmp_path: pathlib.Path) -> None:
    evaluation = schema.EvaluationConfig(every=2, examples=2, final_examples=2, baselines=False, before=False)
    stages = {"main": schema.StageConfig(reward={"em": 1.0, "searches": -0.1})}
    config = make_config(tmp_path / "home", profile="1:2", steps=2, evaluation=evaluation, stages=stages)
    train_rl(config, tmp_path / "rl")
    assert undocumented(tmp_path / "rl") == []
    text = (tmp_path / "rl" / "profile" / "profile.txt").read_text()
    assert re.search(r"^ +jit_\w+: ", text, re.MULTILINE)
    (found,) = (tmp_path / "rl" / "profile").rglob("*.trace.json.gz")
    with gzip.open(found) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"rollout", "reward", "update"} <= names
