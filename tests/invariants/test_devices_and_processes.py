"""One device, eight devices and two processes give the same run."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.training.small_run import make_config

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 3


def launch(home, workdir, devices, **environment):
    command = [sys.executable, "-m", "tests.training.small_run", str(home), str(workdir)]
    command += ["--steps", str(STEPS), "--devices", str(devices)]
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(*processes):
    for process in processes:
        output, _ = process.communicate(timeout=400)
        assert process.returncode == 0, output[-3000:]


def episodes(workdir):
    return [
        [(r["id"], r["sample"], [t["text"] for t in r["turns"]], r["rewards"]) for r in map(json.loads, path.open())]
        for path in sorted((workdir / "episodes").glob("*.jsonl"))
    ]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    make_config(home)
    finish(launch(home, home / "one", 1))
    return home


def check(home, workdir):
    """The same words and rewards at every step; weights equal to float32's reordering of sums over shards."""
    assert episodes(workdir) == episodes(home / "one")
    assert len(episodes(workdir)) == STEPS
    a, b = (load_file(path / "policy" / "model.safetensors") for path in (home / "one", workdir))
    for name in a:
        np.testing.assert_allclose(b[name], a[name], atol=2e-4, err_msg=name)
    results = [json.loads((path / "results.json").read_text())["agents"]["trained"] for path in (home / "one", workdir)]
    assert results[0]["em"] == results[1]["em"]
    assert results[0]["searches_per_question"] == results[1]["searches_per_question"]


def test_eight_devices(one_device):
    finish(launch(one_device, one_device / "eight", 8))
    check(one_device, one_device / "eight")


def test_two_processes(one_device):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workdir = one_device / "two processes"
    processes = [
        launch(
            one_device,
            workdir,
            2,
            JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{port}",
            JAX_NUM_PROCESSES="2",
            JAX_PROCESS_ID=str(i),
        )
        for i in range(2)
    ]
    finish(*processes)
    check(one_device, workdir)
