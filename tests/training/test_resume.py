"""kill -9 at the worst moments, and --resume continues bit for bit."""

import contextlib
import dataclasses
import gc
import json
import pathlib
import signal
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from routerl_jax.core.buckets import fetched, read_object
from routerl_jax.learning.checkpoints import Checkpoints
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.parallel.workdir import directory_lock
from routerl_jax.training import config as schema
from routerl_jax.training.checks import check_workdir
from routerl_jax.training.controls import run_controls
from routerl_jax.training.rl import train_rl
from routerl_jax.training.run import Run
from tests import tiny
from tests.buckets import environment
from tests.programs import fine, finish, launch, start
from tests.training.small_run import STEPS, make_config
from tests.training.test_rl import make_run

# What a clock or the memory of the process says may differ; all the rest must not.
TIMED = (
    "timing_s/",
    "perf/rollout_tokens_per_s",
    "perf/update_tokens_per_s",
    "perf/tokens_per_s",
    "perf/compilations",
    "memory/",
)


def metric_lines(workdir: pathlib.Path) -> list[str]:
    return (workdir / "metrics.jsonl").read_text().splitlines()


def untimed_rows(workdir: pathlib.Path) -> list[dict]:
    rows = map(json.loads, metric_lines(workdir))
    return [{name: value for name, value in row.items() if not name.startswith(TIMED)} for row in rows]


def untimed_episodes(workdir: pathlib.Path) -> dict[str, list[dict]]:
    files = {}
    for path in sorted((workdir / "episodes").glob("*.jsonl")):
        files[path.name] = [json.loads(line) for line in path.read_text().splitlines()]
        for call in (call for record in files[path.name] for turn in record["turns"] for call in turn["calls"]):
            del call["seconds"]
    return files


def assert_same_run(first: pathlib.Path, second: pathlib.Path) -> None:
    a, b = (load_file(workdir / "policy" / "model.safetensors") for workdir in (first, second))
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    assert untimed_rows(first) == untimed_rows(second)
    assert untimed_episodes(first) == untimed_episodes(second)


def checkpoints(workdir: pathlib.Path) -> list[str]:
    return sorted(path.name for path in (workdir / "checkpoints").iterdir() if path.is_dir())


def killed(home: pathlib.Path, workdir: pathlib.Path, moment: str, *options: str) -> None:
    """Runs into a kill; finish fails if it did not hit."""
    finish(
        start("tests.training.small_run", home, workdir, "--kill", moment, *options, JAX_NUM_CPU_DEVICES="1"),
        status=-signal.SIGKILL,
    )
    assert not (workdir / "policy").exists()


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_starts_again(small_run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    home, workdir = small_run, tmp_path / "killed"
    killed(home, workdir, "before-save:1")
    assert checkpoints(workdir) == []
    (first,) = metric_lines(workdir)
    finish(start("tests.training.small_run", home, workdir, "--resume", JAX_NUM_CPU_DEVICES="1"))
    assert metric_lines(workdir)[0] != first
    assert_same_run(home / "whole", workdir)


def test_a_run_killed_twice_continues_bit_for_bit(small_run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Lines of metrics.jsonl, times included, show which steps a resumed run has taken from its checkpoint."""
    home, workdir = small_run, tmp_path / "killed"
    killed(home, workdir, "in-commit:2")
    second = metric_lines(workdir)
    assert len(second) == 2
    assert checkpoints(workdir)[0] == "1"
    assert all("tmp" in name for name in checkpoints(workdir)[1:])
    assert len(checkpoints(workdir)) == 2

    killed(home, workdir, "after-save:2", "--resume")  # from step 1, past the half-written checkpoint
    third = metric_lines(workdir)
    assert len(third) == 2
    assert third[0] == second[0]
    assert third[1] != second[1]
    assert "2" in checkpoints(workdir)

    before = json.loads((workdir / "checkpoints" / "2" / "extra" / "metadata").read_text())["seconds"]
    finish(start("tests.training.small_run", home, workdir, "--resume", JAX_NUM_CPU_DEVICES="1"))  # from step 2
    last = metric_lines(workdir)
    assert len(last) == STEPS
    assert last[:2] == third
    assert_same_run(home / "whole", workdir)
    results = [json.loads((path / "results.json").read_text())["agents"] for path in (home / "whole", workdir)]
    assert results[0] == results[1]
    seconds = json.loads((workdir / "results.json").read_text())["seconds"]
    assert seconds["setup"] > before["setup"] > 0  # of all sessions
    assert seconds["total"] > max(before["total"], seconds["setup"] + seconds["training"])


@pytest.mark.slow
def test_a_run_with_rollouts_ahead_continues_bit_for_bit(small_run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Killed after the checkpoint of step 1 and, with rollouts of the second stage that wait, of step 2; or asked to stop in an
    update, while another thread samples the next rollouts."""
    home, whole, workdir = small_run, tmp_path / "whole", tmp_path / "killed"
    devices = {"JAX_NUM_CPU_DEVICES": "2"}
    finish(start("tests.training.small_run", home, whole, "--ahead", **devices))
    for moment, options in (("after-save:1", ()), ("after-save:2", ("--resume",))):
        kill = ("--kill", moment, "--ahead", *options)
        finish(start("tests.training.small_run", home, workdir, *kill, **devices), status=-signal.SIGKILL)
    finish(start("tests.training.small_run", home, workdir, "--ahead", "--resume", **devices))
    assert_same_run(whole, workdir)
    asked = tmp_path / "asked"
    kill = ("--kill", "in-update:1", "--ahead", "--every", "0")
    finish(start("tests.training.small_run", home, asked, *kill, **devices), status=130)
    assert checkpoints(asked) == ["1"]
    finish(start("tests.training.small_run", home, asked, "--ahead", "--resume", **devices))
    assert_same_run(whole, asked)
    rows = untimed_rows(workdir)
    assert [row["rollout/staleness/max"] for row in rows] == [0, 1, 1]
    assert [row["stage"] for row in rows] == ["first", "first", "second"]


def test_what_is_restored_takes_the_place_of_what_there_was(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a checkpoint is read, the run holds no weights, neither when it resumes nor when it goes back to one."""
    restore, found = Checkpoints.restore, []

    def held() -> int:
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    def watched(self: Checkpoints, *args: Any) -> Any:
        found.append(held() - before)
        return restore(self, *args)

    learner = schema.LearnerConfig(micro_tokens=256, reward_kl_coef=0.1)
    _, _, first, _ = make_run(tmp_path, "given", learner)
    first.learner.logprobs(tiny.random_sequences(1))
    first.save(1, streams={}, stage="main")
    first.checkpoints.wait()
    expected = jax.device_get((first.learner.state, first.learner.reference))
    config = first.config
    del first
    monkeypatch.setattr(Checkpoints, "restore", watched)
    before = held()
    run_ = Run(config, tmp_path, tiny.model(seed=1), single_device_mesh(), config.learner.loss, 4, resume=True)
    assert (run_.start, run_.back_to_checkpoint()) == (1, 1)
    assert max(found) < 1000  # bytes; the weights are 100,000
    jax.tree.map(np.testing.assert_array_equal, expected, jax.device_get((run_.learner.state, run_.learner.reference)))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(run_.policy(), nnx.Param), run_.learner.params)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The line names step and file. The run that goes on writes that step again. Without an earlier one, the error says what
    to do."""
    _, _, first, _ = make_run(tmp_path, "given", schema.LearnerConfig(micro_tokens=256))
    for step in (1, 2):
        first.save(step, streams={"main": {"position": step}}, stage="main")
    first.checkpoints.close()
    weights = max((tmp_path / "checkpoints" / "2").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])

    def resumed() -> Run:
        config = first.config
        return Run(config, tmp_path, tiny.model(seed=1), single_device_mesh(), config.learner.loss, 4, resume=True)

    second = resumed()
    assert (second.start, second.restored["streams"]) == (1, {"main": {"position": 1}})
    (line,) = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
    assert all(text in line for text in ("checkpoints/2", weights.name, "bytes of", "step 1"))
    second.save(2, streams={"main": {"position": 20}}, stage="main")
    second.checkpoints.close()
    third = resumed()
    assert (third.start, third.restored["streams"]) == (2, {"main": {"position": 20}})
    third.checkpoints.close()
    for step in (1, 2):
        (tmp_path / "checkpoints" / str(step) / "extra" / "metadata").write_bytes(b"")
    with pytest.raises(ValueError, match=r"checkpoints/1 is damaged: extra/metadata has .* remove .*checkpoints/1"):
        resumed()


def test_a_run_and_its_controls_are_one_process_s(small_run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """While the main run goes on, or is evaluated again, and while a control does."""
    with directory_lock(small_run / "whole"), pytest.raises(ValueError, match=r"whole is in use by process \d+ on"):
        train_rl(make_config(small_run), small_run / "whole", resume=True)
    controls = {"first_only": schema.ControlConfig(without="second")}
    config = make_config(small_run, controls=controls)
    results: dict[str, Any] = {"agents": {}, "seconds": {"total": 0.0}}
    with (
        directory_lock(tmp_path / "controls" / "first_only"),
        pytest.raises(ValueError, match=r"first_only is in use by process"),
    ):
        run_controls(config, tmp_path, results, lambda *_, **__: pytest.fail("trained beside another"))


def test_resuming_something_else_is_refused(small_run: pathlib.Path) -> None:
    config = make_config(small_run)
    with pytest.raises(ValueError, match="holds a run already; pass --resume"):
        train_rl(config, small_run / "whole")
    learner = dataclasses.replace(config.learner, optimizer=OptimizerConfig(lr=1.0))
    with pytest.raises(ValueError, match=r"\(config.learner.optimizer.lr was 0.0001, and now it is 1.0\)"):
        train_rl(dataclasses.replace(config, learner=learner), small_run / "whole", resume=True)
    stages = {**config.stages, "third": schema.StageConfig(start=3, reward={"em": 1.0})}
    with pytest.raises(ValueError, match=r"\(config.stages.third was None, and now it is \{'start': 3, "):
        train_rl(dataclasses.replace(config, stages=stages), small_run / "whole", resume=True)
    evaluation = dataclasses.replace(config.evaluation, normalizer="r1_searcher")
    with pytest.raises(
        ValueError, match=r"made with config.evaluation.normalizer='search_r1', and now it is 'r1_searcher'"
    ):
        train_rl(dataclasses.replace(config, evaluation=evaluation), small_run / "whole", resume=True)


def test_the_index_before_auto_is_the_same_index(tmp_path: pathlib.Path) -> None:
    """Runs of the time when "scann" was the default go on; those that named another index are still held to it."""
    config = schema.TrainConfig(
        model=schema.ModelConfig(path="atlas-warm-start"), knowledge={"text": schema.KnowledgeConfig()}
    )
    saved = json.loads(json.dumps(dataclasses.asdict(config)))
    for index, same in (("scann", True), ("auto", True), ("exact", False)):
        saved["knowledge"]["text"]["index"] = index
        (tmp_path / "config.json").write_text(json.dumps(saved))
        with contextlib.nullcontext() if same else pytest.raises(ValueError, match="knowledge"):
            check_workdir(config, tmp_path, resume=True)
    saved["knowledge"] = {}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="knowledge"):
        check_workdir(config, tmp_path, resume=True)


def test_what_fits_a_run_into_memory_may_change(tmp_path: pathlib.Path) -> None:
    config = schema.TrainConfig(
        model=schema.ModelConfig(path="atlas-warm-start"), knowledge={"text": schema.KnowledgeConfig()}
    )
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    learner = dataclasses.replace(config.learner, micro_tokens=512, remat="full")
    smaller = dataclasses.replace(config, engine=dataclasses.replace(config.engine, rows=2), learner=learner)
    check_workdir(smaller, tmp_path, resume=True)
    longer = dataclasses.replace(smaller, engine=dataclasses.replace(config.engine, max_length=99))
    with pytest.raises(ValueError, match=r"config\.engine\.max_length was"):
        check_workdir(longer, tmp_path, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_run_in_a_bucket_goes_on_elsewhere_bit_for_bit(
    small_run: pathlib.Path, tmp_path: pathlib.Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the checkpoint of step 2 was complete, and resumed by a process that has none of its files: all that it
    knows is in the bucket."""
    place = f"{scheme}://bucket/{tmp_path.name}"
    options = environment(scheme) | {"JAX_NUM_CPU_DEVICES": "1"}
    for name, value in options.items():
        monkeypatch.setenv(name, value)
    module = "tests.training.small_run"
    caches = [{"ROUTERL_CACHE": str(tmp_path / name)} for name in ("first", "second", "third")]
    finish(start(module, small_run, place, "--kill", "after-save:2", **caches[0]), status=-signal.SIGKILL)
    first = (read_object(f"{place}/metrics.jsonl") or b"").decode().splitlines()
    assert len(first) == 2
    finish(start(module, small_run, place, "--resume", **caches[1]))
    monkeypatch.setenv("ROUTERL_CACHE", caches[2]["ROUTERL_CACHE"])
    here = fetched(place)
    kept = {"gs": 2, "s3": 1}[scheme]  # a checkpoint goes to s3 at the next upload after it is complete here
    assert metric_lines(here)[:kept] == first[:kept]
    assert len(metric_lines(here)) == STEPS
    assert_same_run(small_run / "whole", here)
    results = [json.loads((path / "results.json").read_text())["agents"] for path in (small_run / "whole", here)]
    assert results[0] == results[1]
    assert not list((tmp_path / "second" / "mirrors").iterdir())
    printed = fine(launch("export_hf", f"--workdir={place}", f"--output={place}-exported", f"--step={STEPS}"))
    assert printed.startswith(f"wrote {place}-exported")
    weights = [load_file(path / "model.safetensors") for path in (here / "policy", fetched(f"{place}-exported"))]
    assert weights[0].keys() == weights[1].keys()
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
