"""One device, eight devices, sharded weights and two processes give the same run: words, calls, rewards, weights."""

import json
import pathlib
import re
import signal
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from routerl_jax.learning.checkpoints import saved_steps
from routerl_jax.models.pretrained import PACKAGED_MODELS
from tests.buckets import free_port
from tests.programs import finish, start, two_processes
from tests.training.small_run import STEPS

INITIAL = PACKAGED_MODELS["atlas-warm-start"]


def launch(home: pathlib.Path, workdir: pathlib.Path, devices: int, *options: Any, **environment: str):
    return start("tests.training.small_run", home, workdir, *options, JAX_NUM_CPU_DEVICES=str(devices), **environment)


def placement(output: str) -> dict[str, int]:
    """Pieces of batches and weights, devices that hold weights: the program's last line."""
    return json.loads(output.splitlines()[-1])


def episodes(workdir: pathlib.Path) -> list[list[Any]]:
    """What was said, asked for, found and rewarded, by step (a tool's time and its scores' last bits left out)."""

    def calls(turn: dict[str, Any]) -> list[Any]:
        return [(c["tool"], c["query"], c["error"], [p["id"] for p in c["passages"]]) for c in turn["calls"]]

    return [
        [
            (r["id"], r["sample"], [(t["text"], calls(t), t["observation"]) for t in r["turns"]], r["rewards"])
            for r in map(json.loads, path.open())
        ]
        for path in sorted((workdir / "episodes").glob("*.jsonl"))
    ]


def weights(directory: pathlib.Path) -> dict[str, np.ndarray]:
    return load_file(directory / "model.safetensors")


def check(first: pathlib.Path, second: pathlib.Path) -> None:
    """The same but for float32 sums over shards in another order.

    Adam makes whole steps of rounding where a gradient is almost zero, so single weights may differ by a tenth of a step;
    per tensor that is 5e-4 of the way from the initial weights (measured), and gradient norms differ by 3e-6.
    """
    assert episodes(first) == episodes(second)
    rows = [[json.loads(line) for line in (path / "metrics.jsonl").open()] for path in (first, second)]
    for a, b in zip(*rows):
        assert b["actor/grad_norm"] == pytest.approx(a["actor/grad_norm"], rel=3e-5)
        assert b["actor/loss"] == pytest.approx(a["actor/loss"], abs=1e-6)
    initial, a, b = (weights(path) for path in (INITIAL, first / "policy", second / "policy"))
    for name in a:
        assert np.linalg.norm(b[name] - a[name]) < 2e-3 * np.linalg.norm(a[name] - initial[name]), name
    results = [json.loads((path / "results.json").read_text())["agents"]["trained"] for path in (first, second)]
    assert results[0] == results[1]


def test_the_run_is_worth_comparing(small_run: pathlib.Path) -> None:
    """It searches, finds, is rewarded unevenly and learns: otherwise the other tests here would compare nothing."""
    workdir = small_run / "whole"
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == len(episodes(workdir)) == STEPS
    assert all(row["rollout/tool_calls"] > 4 and row["rollout/tool_errors"] == 0 for row in rows)
    assert all(row["reward/std"] > 0 and row["actor/grad_norm"] > 0 for row in rows)
    assert {tool for step in episodes(workdir) for e in step for t in e[2] for tool, *_ in t[1]} > {"text"}
    before, after = weights(INITIAL), weights(workdir / "policy")
    assert all(np.abs(after[name] - before[name]).max() > 1e-5 for name in before)


@pytest.mark.slow
def test_eight_devices(small_run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    output = finish(launch(small_run, tmp_path / "eight", 8))
    assert placement(output) == {"batch": 8, "devices": 8, "weights": 1}
    check(small_run / "whole", tmp_path / "eight")


@pytest.mark.slow
def test_sharded_weights(small_run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Four devices: the batch is cut in four, the weights in two."""
    output = finish(launch(small_run, tmp_path / "fsdp", 4, "--fsdp", 2))
    assert placement(output) == {"batch": 4, "devices": 4, "weights": 2}
    check(small_run / "whole", tmp_path / "fsdp")


def test_two_processes_of_four_devices(small_run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    workdir = tmp_path / "two processes"
    main, other = two_processes(
        "tests.training.small_run", small_run, workdir, workdir=workdir, JAX_NUM_CPU_DEVICES="4"
    )
    assert placement(main) == placement(other) == {"batch": 8, "devices": 8, "weights": 1}
    check(small_run / "whole", workdir)


@pytest.mark.slow
def test_a_peer_that_dies_ends_the_job_which_goes_on_from_its_checkpoint(
    small_run: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """The main process is left alone at its next collective. It must say which process is lost and where it was, end, and leave
    nothing that is in a new job's way."""
    workdir, module = tmp_path / "two processes", "tests.training.small_run"
    job = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2", "JAX_NUM_CPU_DEVICES": "1"}
    main = start(module, small_run, workdir, "--peer-timeout", "20", JAX_PROCESS_ID="0", **job)
    try:
        peer = start(
            module, small_run, workdir, "--kill", "after-save:2", "--peer-timeout", "20", JAX_PROCESS_ID="1", **job
        )
        finish(peer, status=-signal.SIGKILL)
        output, _ = main.communicate(timeout=400)
    finally:
        main.kill()
    assert main.returncode == 1, output[-3000:]
    assert re.search(rf"process 1 \(host .*, process id {peer.pid}\) is lost: it was at step 1", output), output[-3000:]
    assert not (workdir / "policy").exists()
    first = (workdir / "metrics.jsonl").read_text().splitlines()
    two_processes(module, small_run, workdir, "--resume", workdir=tmp_path / "no retry", JAX_NUM_CPU_DEVICES="1")
    assert (workdir / "metrics.jsonl").read_text().splitlines()[:2] == first[:2]
    check(small_run / "whole", workdir)


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_with_a_checkpoint(small_run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    workdir, module = tmp_path / "two processes", "tests.training.small_run"
    job = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": "2", "JAX_NUM_CPU_DEVICES": "1"}
    main = start(module, small_run, workdir, "--every", "0", JAX_PROCESS_ID="0", **job)
    try:
        asked = start(module, small_run, workdir, "--every", "0", "--kill", "in-update:1", JAX_PROCESS_ID="1", **job)
        finish(asked, status=130)
        finish(main, status=130)
    finally:
        main.kill()
    assert saved_steps(workdir / "checkpoints") == [1]
    two_processes(module, small_run, workdir, "--resume", workdir=tmp_path / "no retry", JAX_NUM_CPU_DEVICES="1")
    check(small_run / "whole", workdir)
