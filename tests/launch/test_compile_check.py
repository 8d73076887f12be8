"""launch.compile_check as a program."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import pathlib
import subprocess
import sys

import pytest

from launch.compile_check import as_json
from routerl_jax.extras.compile_check.check import ProgramReport, Report

ROOT = pathlib.Path(__file__).parents[2]


def test_json_and_exit_status(tpu_compiler: None) -> None:
    """Far too many rows: one JSON object on standard output that says so, and status 1."""
    command = [
        *(sys.executable, "-m", "launch.compile_check", "--config=tests/training/small_policy.py", "--json"),
        *("--topology=v5e:2x2", "--programs=decode", "--config.engine.rows=200000"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["fits"] is False
    assert found["topology"] == "v5e:2x2"
    versions = {name: importlib.metadata.version(name) for name in ("libtpu", "jax")}
    assert found["compiler"].startswith(f"libtpu {versions['libtpu']}, jax {versions['jax']}")
    assert set(found["programs"]) == {"decode"}
    decode = found["programs"]["decode"]
    cache = 200000 / 2 * 256 * 2 * 2 * 128 * 2 * 2 / 2 / 2**30  # of the rows alone, GiB per chip
    assert decode["hbm_gib_per_chip"] > cache > found["hbm_gib"]
    assert decode["fits"] is False
    assert decode["problems"]


@pytest.mark.slow
def test_decoding_copies_no_stack_of_matrices(tpu_compiler: None) -> None:
    """A chip has two key heads of the 14B model. XLA copied all layers' key and value matrices at every layer of every step
    (3.3 times the weights and the cache), which smaller models do not show."""
    command = [
        *(sys.executable, "-m", "launch.compile_check", "--config=configs/r1_searcher_qwen25_7b.py", "--json"),
        *("--config.model.path=Qwen/Qwen2.5-14B-Instruct", "--topology=v5e:16x16", "--programs=decode"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["programs"]["decode"]["moved_over_least"] < 1.15


def test_what_is_not_finite_is_null() -> None:
    """The compiler ran out of memory and did not say how much it wants: JSON knows no Infinity."""
    program = ProgramReport(hbm_gib_per_chip=math.inf, resident_gib=1.5, fits=False, problems=("too large",))
    report = Report(
        fits=False,
        topology="v5e:2x2",
        compiler="libtpu 1, jax 2",
        device="TPU",
        devices=4,
        mesh={"fsdp": 4},
        engine_mesh={"fsdp": 4},
        hbm_gib=15.75,
        programs={"a": program},
    )

    def refuse(word: str) -> None:
        raise AssertionError(word)

    found = json.loads(as_json(dataclasses.asdict(report)), parse_constant=refuse)
    expected = {**dataclasses.asdict(program), "hbm_gib_per_chip": None, "problems": ["too large"]}
    assert found["programs"] == {"a": expected}
    assert (found["hbm_gib"], found["fits"], found["mesh"]) == (15.75, False, {"fsdp": 4})
