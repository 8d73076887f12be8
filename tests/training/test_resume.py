"""kill -9 at any moment and --resume continues bit for bit."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from routerl_jax.training.rl import train_rl
from tests.training.small_run import make_config

ROOT = pathlib.Path(__file__).parents[2]
# What a clock or the memory of the process says may differ; all the rest must not.
TIMED = ("timing_s/", "perf/rollout_tokens_per_s", "perf/update_tokens_per_s", "perf/compilations", "memory/")


def start(home, workdir, *options):
    command = [sys.executable, "-m", "tests.training.small_run", str(home), str(workdir), *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-3000:]


def rows(workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in lines]


def wait_for(process, condition, seconds=200):
    deadline = time.time() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.time() < deadline, "the run did not get there in time"
        time.sleep(0.01)


def same(first, second):
    a, b = (load_file(workdir / "policy" / "model.safetensors") for workdir in (first, second))
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    assert rows(first) == rows(second)
    records = [sorted((workdir / "episodes").glob("*.jsonl")) for workdir in (first, second)]
    assert [path.name for path in records[0]] == [path.name for path in records[1]]
    for x, y in zip(*records):
        x, y = ([_untimed(json.loads(line)) for line in path.read_text().splitlines()] for path in (x, y))
        assert x == y


def _untimed(record):
    for turn in record["turns"]:
        for call in turn["calls"]:
            del call["seconds"]
    return record


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    make_config(home)
    finish(start(home, home / "whole"))
    return home


@pytest.mark.parametrize("moment", ["after a step", pytest.param("while saving", marks=pytest.mark.slow)])
def test_a_killed_run_continues_bit_for_bit(uninterrupted, moment):
    home = uninterrupted
    workdir = home / f"killed {moment}"
    process = start(home, workdir)
    if moment == "after a step":
        wait_for(process, lambda: (workdir / "metrics.jsonl").exists() and len(rows(workdir)) >= 2)
    else:  # a temporary directory of a checkpoint that is being written
        wait_for(process, lambda: any(path.name.startswith("2.") for path in workdir.glob("checkpoints/2*")))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (workdir / "policy").exists()
    finish(start(home, workdir, "--resume"))
    same(home / "whole", workdir)


@pytest.mark.slow
def test_several_kills_at_random_moments(uninterrupted):
    home = uninterrupted
    workdir = home / "killed often"
    rng = np.random.default_rng(0)
    for _ in range(4):
        process = start(home, workdir, "--resume")
        time.sleep(float(rng.uniform(6, 25)))
        process.send_signal(signal.SIGKILL)
        process.wait()
    finish(start(home, workdir, "--resume"))
    same(home / "whole", workdir)


def test_resuming_something_else_is_refused(uninterrupted, tmp_path):
    home = uninterrupted
    with pytest.raises(ValueError, match="holds a run already; pass --resume"):
        train_rl(make_config(home), home / "whole")
    import dataclasses

    from routerl_jax.learning.optimizer import OptimizerConfig

    config = make_config(home)
    learner = dataclasses.replace(config.learner, optimizer=OptimizerConfig(lr=1.0))
    with pytest.raises(ValueError, match="section 'learner' differs"):
        train_rl(dataclasses.replace(config, learner=learner), home / "whole", resume=True)
