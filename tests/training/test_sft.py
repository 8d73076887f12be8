"""Supervised runs: what they train on, with which weights, and that they resume bit for bit."""

import dataclasses
import json
import pathlib
import shutil
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from routerl_jax.agents.demonstrated import demonstrated
from routerl_jax.data.atlas.demonstrations import DemonstrationSource, ReadingDrills
from routerl_jax.learning.learner import Learner
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.parallel.workdir import directory_lock
from routerl_jax.training import sft
from routerl_jax.training.config import EngineConfig, EvaluationConfig, LearnerConfig, RolloutConfig, WatchConfig
from routerl_jax.training.loggers import read_metrics
from routerl_jax.training.run import Run
from routerl_jax.training.setup import build_recipe
from routerl_jax.training.watch import RunStopped
from tests import tiny
from tests.training.small_run import STEPS, make_sft_config
from tests.training.test_resume import assert_same_run, metric_lines


class Killed(BaseException):
    pass


@pytest.fixture(scope="module", autouse=True)
def _small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft, "_HELD_OUT", 8)
        patch.setattr(sft, "_VOCABULARY_EXAMPLES", 40)
        patch.setattr(sft, "build_mesh", lambda _: single_device_mesh())
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[list[dict[str, np.ndarray]]]]:
    """An uninterrupted run, and the sequences of its batches."""
    workdir, batches, update = tmp_path_factory.mktemp("sft") / "whole", [], Learner.update

    def recorded(self: Learner, batch: Any) -> Any:
        batches.append(tiny.unpack(batch))
        return update(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "update", recorded)
        sft.train_sft(make_sft_config(), workdir)
    return workdir, batches


def test_what_is_learnt(whole: tuple[pathlib.Path, list[list[dict[str, np.ndarray]]]]) -> None:
    """Half of every step's four items are drills; written tokens share a weight of 1, all others one of 0.3."""
    workdir, batches = whole
    config = make_sft_config()
    tokenizer = load_pretrained(str(workdir / "policy")).tokenizer
    assert tokenizer is not None
    agent = build_recipe(config).agent
    demonstrations = DemonstrationSource(size=12, seed=config.seed, k=1, max_searches=2)
    drills = ReadingDrills(seed=config.seed)
    assert len(batches) == STEPS
    for step, batch in enumerate(batches):
        first = 4 * step
        expected = [demonstrated((), drills[i], tokenizer) for i in (first, first + 1)]
        for one in (demonstrations[first + 2], demonstrations[first + 3]):
            expected.append(demonstrated(agent.opening(one.example, tokenizer), agent.pieces(one), tokenizer))
        written = sum(int(s.loss_mask.sum()) for s in expected)
        shown = sum(int((~s.loss_mask).sum()) for s in expected)
        assert written > 20
        assert shown > 100
        for one, sequence in zip(batch, expected, strict=True):
            np.testing.assert_array_equal(one["tokens"], sequence.tokens)
            weights = np.where(sequence.loss_mask[1:], 1 / written, 0.3 / shown)
            np.testing.assert_allclose(one["weights"], weights, rtol=1e-5)
            assert (one["advantages"] == 1).all()


def test_the_constant_of_a_dr_grpo_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in reinforcement: tokens count 1 / (constant * sequences), whatever the lengths; what is fed 0.3 of it."""
    batches, update = [], Learner.update
    monkeypatch.setattr(
        Learner, "update", lambda self, batch: (batches.append(tiny.unpack(batch)), update(self, batch))[1]
    )
    config = make_sft_config(steps=1, evaluation=EvaluationConfig(every=0))
    learner = dataclasses.replace(config.learner, aggregation="constant", aggregation_tokens=500)
    assert (config.aggregation_constant, dataclasses.replace(config, learner=learner).aggregation_constant) == (
        1024,
        500,
    )
    sft.train_sft(dataclasses.replace(config, learner=learner), tmp_path / "run")
    (batch,) = batches
    weights = np.concatenate([one["weights"] for one in batch])
    np.testing.assert_allclose(np.unique(weights), np.asarray([0.3, 1.0]) / (500 * len(batch)), rtol=1e-5)


def test_drills_that_are_all_too_long_are_not_measured() -> None:
    """What is held out and fits still is."""
    (sequence,) = tiny.random_sequences(1)
    learner = types.SimpleNamespace(logprobs=lambda sequences, portion: [np.full(len(s), -0.5) for s in sequences])
    run = types.SimpleNamespace(config=make_sft_config(), learner=learner)
    fitting = types.SimpleNamespace(worked=lambda *given: [sequence], drills=lambda *given: [])
    assert run.config.warm_start.drills
    assert sft._validate(run, fitting, [sequence]) == {"held_out/nll": 0.5}


def test_the_temperature_of_rollouts_is_none_of_its_business(
    whole: tuple[pathlib.Path, Any], tmp_path: pathlib.Path
) -> None:
    config = make_sft_config(rollout=RolloutConfig(temperature=0.3), steps=1, evaluation=EvaluationConfig(every=0))
    last = sft.train_sft(config, tmp_path / "run")
    first = json.loads(metric_lines(whole[0])[0])
    assert last["actor/loss"] == first["actor/loss"]


@pytest.mark.slow
def test_a_killed_run_continues_bit_for_bit(
    whole: tuple[pathlib.Path, Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception stands for the kill: what survives it is on the disk (real kills are in test_resume)."""
    save = Run.save

    def deadly_save(self: Run, step: int, **extra: Any) -> None:
        if step == 2:
            self.checkpoints.wait()
            raise Killed
        save(self, step, **extra)

    config, workdir = make_sft_config(), tmp_path / "killed"
    with monkeypatch.context() as patch:
        patch.setattr(Run, "save", deadly_save)
        with pytest.raises(Killed):
            sft.train_sft(config, workdir)
    before = metric_lines(workdir)
    assert len(before) == 2
    last = sft.train_sft(config, workdir, resume=True)
    assert metric_lines(workdir)[0] == before[0]  # from the checkpoint of step 1, not from the start
    assert metric_lines(workdir)[1] != before[1]
    assert_same_run(whole[0], workdir)
    results = json.loads((workdir / "results.json").read_text())
    assert results == {"sft": last, "seed": config.seed}
    assert {"held_out/nll", "held_out/drill_nll", "actor/loss"} <= last.keys()
    # Killed once more, after the last checkpoint: there is nothing left to train, and the results are the same.
    (workdir / "results.json").unlink()
    sft.train_sft(config, workdir, resume=True)
    assert json.loads((workdir / "results.json").read_text()) == results


def test_a_run_in_use_is_left_as_it_is(whole: tuple[pathlib.Path, Any], tmp_path: pathlib.Path) -> None:
    """A second `--resume` beside the first would train on, and the rows of one would be those of the other."""
    workdir = tmp_path / "run"
    shutil.copytree(whole[0], workdir)
    more, before = make_sft_config(steps=STEPS + 1), metric_lines(workdir)
    with directory_lock(workdir), pytest.raises(ValueError, match=r"run is in use by process \d+ on"):
        sft.train_sft(more, workdir, resume=True)
    assert metric_lines(workdir) == before
    assert (workdir / "policy").is_dir()
    assert not (workdir / ".lock").exists()


def test_weights_that_are_no_numbers_are_neither_kept_nor_exported(tmp_path: pathlib.Path) -> None:
    """The loss of the last update is that of the weights before it, and fine; its step is larger than float32 goes."""
    learner = LearnerConfig(optimizer=OptimizerConfig(lr=3e38, weight_decay=3e38))
    with pytest.raises(
        RunStopped, match=r"after update 1: some weights .* are NaN or infinite.*holds no checkpoint and"
    ):
        sft.train_sft(make_sft_config(steps=1, learner=learner), tmp_path / "run")
    (row,) = read_metrics(tmp_path / "run")
    assert np.isfinite(row["actor/loss"])
    assert not (tmp_path / "run" / "policy").exists()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.is_dir()] == []


@pytest.mark.slow
def test_a_run_that_goes_wrong_stops_with_its_last_good_checkpoint(tmp_path: pathlib.Path) -> None:
    """The gradient's norm is above 0 from the first update on. Loosened, the run goes on to its end."""
    watch = WatchConfig(patience=2, least={}, most={"actor/grad_norm": 0.0}, falls={})
    config, workdir = make_sft_config(steps=3), tmp_path / "run"
    with pytest.raises(
        RunStopped, match=r"after update 2: actor/grad_norm is .* 2 bad values in a row.*no checkpoint and"
    ):
        sft.train_sft(dataclasses.replace(config, watch=watch), workdir)
    assert len(read_metrics(workdir)) == 2
    assert not (workdir / "policy").exists()
    falling = dataclasses.replace(
        watch, most={"held_out/nll": 0.0}
    )  # is measured after the second and the third update
    with pytest.raises(
        RunStopped, match=r"after update 3: held_out/nll is .* the checkpoint of update 1 and no policy"
    ):
        sft.train_sft(dataclasses.replace(config, watch=falling), workdir, resume=True)
    sft.train_sft(config, workdir, resume=True)
    assert [row["step"] for row in read_metrics(workdir)] == [0, 1, 2]
    assert (workdir / "policy").is_dir()


def test_what_no_supervised_run_measures_is_not_watched(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"bounds validation/em, which no run of kind='sft' measures"):
        make_sft_config(watch=WatchConfig(least={"validation/em": 0.5}))
    config = make_sft_config(steps=1, watch=WatchConfig(most={"actor/grad_nrom": 5.0}))
    with pytest.raises(ValueError, match=r"no such metric; did you mean actor/grad_norm\?"):
        sft.train_sft(config, tmp_path / "run")


def test_what_was_refused_may_be_mended_in_the_same_workdir(tmp_path: pathlib.Path) -> None:
    """Nothing of the refused run is left that another configuration would be held against."""
    config = make_sft_config(steps=1, evaluation=EvaluationConfig(every=0))
    wrong = dataclasses.replace(config, model=dataclasses.replace(config.model, freeze=("visual",)))
    with pytest.raises(ValueError, match=r"config.model.freeze"):
        sft.train_sft(wrong, tmp_path / "run")
    longer = dataclasses.replace(config, engine=EngineConfig(max_length=2048))
    with pytest.raises(ValueError, match=r"max_length=2048 exceeds the model's context of 1024 tokens; lower it"):
        sft.train_sft(longer, tmp_path / "run")
    sft.train_sft(config, tmp_path / "run")
    assert (tmp_path / "run" / "config.json").is_file()


def test_fewer_steps_than_there_are_is_refused(whole: tuple[pathlib.Path, Any], tmp_path: pathlib.Path) -> None:
    """Else results would say of a policy that it has learnt for less long than it has."""
    shutil.copytree(whole[0], tmp_path / "run")
    with pytest.raises(ValueError, match=rf"has {STEPS} steps already, more than config.steps=1: raise it"):
        sft.train_sft(make_sft_config(steps=1), tmp_path / "run", resume=True)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["steps"] == STEPS


def test_a_start_that_taught_nothing_is_refused(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three updates of random weights are too few. A run that must not stop goes on, and is told; so is a shorter one."""
    config = make_sft_config(watch=WatchConfig(idle=STEPS))
    with pytest.raises(RunStopped, match=rf"after {STEPS} supervised updates.*a guess by the frequency.*learning rate"):
        sft.train_sft(config, tmp_path / "run")
    assert not (tmp_path / "run" / "policy").exists()
    with pytest.raises(RunStopped):
        sft.train_sft(config, tmp_path / "run", resume=True)
    sft.train_sft(make_sft_config(watch=WatchConfig(idle=0)), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "policy").is_dir()
    sft.train_sft(make_sft_config(watch=WatchConfig(idle=STEPS + 1)), tmp_path / "other")
    assert sum("learnt next to nothing" in record.getMessage() for record in caplog.records) == 2
    monkeypatch.setattr(sft, "_LEARNT", 1e9)
    sft.train_sft(config, tmp_path / "learnt")
    assert sum("learnt next to nothing" in record.getMessage() for record in caplog.records) == 2


def test_unknown_demonstrations(tmp_path: pathlib.Path) -> None:
    config = make_sft_config()
    other = dataclasses.replace(config.warm_start, demonstrations="mine")
    with pytest.raises(
        ValueError,
        match=r"config.warm_start.demonstrations='mine' is neither 'atlas' nor 'annotated' nor 'drawn' nor a .jsonl file",
    ):
        sft.train_sft(dataclasses.replace(config, warm_start=other), tmp_path)
    smaller = dataclasses.replace(config.warm_start, vocabulary=380)
    with pytest.raises(ValueError, match=r"config.warm_start.vocabulary=380 differs from .*vocab_size=400"):
        sft.train_sft(dataclasses.replace(config, warm_start=smaller), tmp_path)


def test_demonstrations_longer_than_a_bucket_are_left_out(
    whole: tuple[pathlib.Path, list[list[dict[str, np.ndarray]]]],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The same batches without them, a warning for the first, and their number among the metrics."""
    workdir, all_batches = whole
    lengths = sorted(len(one["tokens"]) for batch in all_batches for one in batch)
    limit = lengths[len(lengths) * 2 // 3]
    tokenizer = load_pretrained(str(workdir / "policy")).tokenizer
    monkeypatch.setattr(sft, "_vocabulary", lambda *given: tokenizer)
    batches, update = [], Learner.update
    monkeypatch.setattr(
        Learner, "update", lambda self, batch: (batches.append(tiny.unpack(batch)), update(self, batch))[1]
    )
    config = make_sft_config(engine=EngineConfig(max_length=limit), evaluation=EvaluationConfig(every=0))
    sft.train_sft(config, tmp_path / "run")
    for batch, whole_batch in zip(batches, all_batches, strict=True):
        expected = [one["tokens"] for one in whole_batch if len(one["tokens"]) <= limit]
        assert len(batch) == len(expected)
        for one, tokens in zip(batch, expected):
            np.testing.assert_array_equal(one["tokens"], tokens)
    left_out = [row.get("perf/left_out", 0) for row in read_metrics(tmp_path / "run")]
    assert left_out == [sum(len(one["tokens"]) > limit for one in batch) for batch in all_batches]
    assert sum(left_out) > 0
    assert sum("is left out" in record.getMessage() for record in caplog.records) == 1

    shorter = dataclasses.replace(config, engine=EngineConfig(max_length=8))
    with pytest.raises(ValueError, match="all 4 demonstrations of update 0 have more than 8 tokens: raise"):
        sft.train_sft(
            dataclasses.replace(shorter, warm_start=dataclasses.replace(config.warm_start, drills=0.0)),
            tmp_path / "short",
        )
