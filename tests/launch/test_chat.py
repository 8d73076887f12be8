"""`python -m launch.chat` as a user runs it: two questions to the shipped policy through a pipe, and the page."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys

import httpx2
import pytest

from routerl_jax.training import config as schema
from tests.launch.test_ask import left_by_a_run
from tests.programs import ROOT, start
from tests.training.small_run import make_config

QUESTION = "What is the capital of the country that produces the most Ruthenium?"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    config = make_config(tmp_path_factory.mktemp("home"))
    config = dataclasses.replace(config, mesh=schema.MeshConfig(cpu_devices=1))
    return left_by_a_run(tmp_path_factory.mktemp("runs") / "router", config)


@pytest.mark.slow
def test_in_the_terminal(workdir: pathlib.Path) -> None:
    """With the packaged model in the place of the run's, which is the same one."""
    command = [
        sys.executable,
        "-m",
        "launch.chat",
        f"--workdir={workdir}",
        "--policy=atlas-warm-start",
        "--temperature=1",
    ]
    typed = f"/kb\n{QUESTION}\n{QUESTION}\n/quit\n"
    done = subprocess.run(
        command, input=typed, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True, env={**os.environ}
    )
    assert "atlas-warm-start (text alone) searches" in done.stdout
    assert "every question stands by itself" in done.stdout
    assert re.search(r"table: dense_text, [\d,]+ passages", done.stdout)
    assert done.stdout.count("answers   ") == 2
    assert re.search(r"searches  \[(text|table|elements)\] \w", done.stdout)
    assert re.search(r"source 1: (text|table|elements): ", done.stdout)


@pytest.mark.slow
def test_on_the_page(workdir: pathlib.Path) -> None:
    process = start("launch.chat", f"--workdir={workdir}", "--page", "--port=0", "--rows=2")
    assert process.stdout is not None
    try:
        said = ""
        while not said.startswith("talk with"):
            said = process.stdout.readline()
            assert said, "it ended without a word"
        url = said.split()[-1]
        lines = httpx2.post(f"{url}api/ask", json={"question": QUESTION}, timeout=300).text.splitlines()
        assert '"going":true' in lines[0]
        assert '"going":false' in lines[-1]
        assert '"sources":[{' in lines[-1]
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        assert process.returncode in (0, -signal.SIGTERM)
    finally:
        process.kill()
