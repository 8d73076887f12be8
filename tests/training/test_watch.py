"""A run that goes wrong stops, and leaves the weights from before."""

import dataclasses
import json
import math
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from configs import quickstart
from routerl_jax.core.config import from_config_dict
from routerl_jax.core.types import Episode
from routerl_jax.learning.learner import Learner
from routerl_jax.parallel import multihost
from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.training import rl
from routerl_jax.training import step as step_module
from routerl_jax.training.config import (
    CheckpointConfig,
    EvaluationConfig,
    KnowledgeConfig,
    ModelConfig,
    StageConfig,
    TrainConfig,
    WatchConfig,
)
from routerl_jax.training.load import load_policy
from routerl_jax.training.run import Run
from routerl_jax.training.watch import RunStopped, Watch
from tests.training.small_run import make_config
from tests.training.test_controls import small_config

CONFIG = WatchConfig(patience=2, least={"share": 0.1}, most={"norm": 5.0}, falls={"format": 0.5})


def seen(watch: Watch, *rows: dict[str, Any]) -> list[str | None]:
    alarms = [watch.see(step, row.pop("stage", "one"), row) for step, row in enumerate(rows)]
    return [alarm and alarm.metric for alarm in alarms]


def test_the_quickstart_stops_where_searches_are_repeated() -> None:
    """310 of 313 questions: what a policy does that has lost its judgement of what it read. It begins at one in seven."""
    watch = Watch(from_config_dict(TrainConfig, quickstart.get_config()).watch)
    healthy, lost = {"rollout/repeated_search_rate": 1 / 7}, {"rollout/repeated_search_rate": 310 / 313}
    assert seen(watch, *(dict(healthy) for _ in range(9))) == [None] * 9
    assert seen(watch, *(dict(lost) for _ in range(5))) == [*[None] * 4, "rollout/repeated_search_rate"]


def test_by_default_a_run_stops_where_every_search_fails() -> None:
    """A server is down. Where one of three is down, the run goes on."""
    rates = {"all": 1.0, "a third": 1 / 3, "none": 0.0}
    stops = {
        name: seen(Watch(WatchConfig()), *({"rollout/tool_error_rate": rate} for _ in range(6)))
        for name, rate in rates.items()
    }
    assert stops["all"][:5] == [*[None] * 4, "rollout/tool_error_rate"]
    assert stops["a third"] == stops["none"] == [None] * 6


def test_by_default_a_run_stops_where_one_of_its_sources_always_fails() -> None:
    """Though the share of all searches is low; steps in which nobody asks it do not count."""
    row, quiet = {"tools/facts/error_rate": 1.0, "tools/text/error_rate": 0.2}, {"tools/text/error_rate": 0.2}
    alarms = seen(Watch(WatchConfig()), *(dict(r) for r in (row, row, quiet, row, quiet, row, row)))
    assert alarms == [*[None] * 6, "tools/facts/error_rate"]
    assert seen(Watch(WatchConfig()), *({"tools/facts/error_rate": 0.9} for _ in range(9))) == [None] * 9


def test_a_bound_of_one_source_goes_before_that_of_all_and_both_survive_a_checkpoint() -> None:
    watch = Watch(WatchConfig(patience=2, most={"tools/*/error_rate": 0.5, "tools/web/error_rate": 0.9}))
    row = {"tools/web/error_rate": 0.8, "tools/text/error_rate": 0.6}
    assert seen(watch, dict(row)) == [None]
    resumed = Watch(WatchConfig(patience=2, most={"tools/*/error_rate": 0.5, "tools/web/error_rate": 0.9}))
    resumed.restore(watch.state())
    assert seen(resumed, {**row, "stage": "one"}) == ["tools/text/error_rate"]


def test_bad_values_in_a_row_are_an_alarm() -> None:
    good, low, high = {"share": 0.5, "norm": 1.0}, {"share": 0.05}, {"norm": 6.0}
    assert seen(Watch(CONFIG), low, good, low, low) == [None, None, None, "share"]
    assert seen(Watch(CONFIG), low, {"share": math.nan}) == [None, "share"]
    assert seen(Watch(CONFIG), low, high, good, high, low, high) == [None] * 5 + ["norm"]
    assert seen(Watch(dataclasses.replace(CONFIG, patience=0)), *[low] * 5) == [None] * 5
    watch = Watch(CONFIG)
    assert [(watch.see(step, "one", row), watch.worried)[1] for step, row in enumerate((good, low, good))] == [
        False,
        True,
        False,
    ]


def test_what_is_measured_now_and_then_is_counted_where_it_is() -> None:
    """Validation's metrics, every third step here; between two bad ones no checkpoint is written."""
    watch = Watch(WatchConfig(patience=2, least={"validation/em": 0.5}, most={}, falls={}))
    values = [0.6, 0.4, 0.6, 0.4, 0.4]
    rows = [{"validation/em": values[step // 3]} if step % 3 == 0 else {} for step in range(13)]
    alarms, worried = [], []
    for step, row in enumerate(rows):
        alarms.append(watch.see(step, "one", row))
        worried.append(watch.worried)
    assert [alarm and alarm.metric for alarm in alarms] == [None] * 12 + ["validation/em"]
    assert worried == [False] * 3 + [True] * 3 + [False] * 3 + [True] * 4


def test_bad_validations_count_on_in_the_next_stage() -> None:
    """Of which the first steps do not validate."""
    bad = {"validation/em": 0.4}
    watch = Watch(WatchConfig(patience=2, least={"validation/em": 0.5}, most={}, falls={}))
    assert seen(watch, bad, {"stage": "two"}) == [None, None]
    assert watch.worried
    assert seen(watch, {"stage": "two", **bad}) == ["validation/em"]


def test_a_drop_is_measured_in_the_metric_s_own_units() -> None:
    """The likelihood of what is reinforced is below 0 throughout; means of two: -1, -0.75, -1.25, -2.75, -3.5."""
    values = (-1.0, -0.5, -2.0, -3.5, -3.5)
    rows = [{"actor/promoted_logprob": value} for value in values]
    config = WatchConfig(patience=2, least={}, most={}, falls={}, drops={"actor/promoted_logprob": 1.5})
    assert seen(Watch(config), *map(dict, rows)) == [None] * 4 + ["actor/promoted_logprob"]
    watch, resumed = Watch(config), Watch(config)
    assert seen(watch, *map(dict, rows[:4])) == [None] * 4
    resumed.restore(json.loads(json.dumps(watch.state())))
    assert resumed.worried
    assert seen(resumed, *map(dict, rows[4:])) == ["actor/promoted_logprob"]


def test_what_is_no_longer_watched_is_forgotten() -> None:
    watch = Watch(CONFIG)
    watch.restore({"stage": "one", "recent": {"format": [1.0, 0.8]}, "best": {"format": 0.9}, "bad": {"gone": 1}})
    assert not watch.worried
    assert seen(watch, {"format": 0.0}, {"format": 0.0}) == [None, "format"]  # means of 0.4 and 0


def test_a_name_that_is_no_metric_is_refused_once_there_are_others_of_its_kind() -> None:
    learned = {"actor/loss": 1.0, "ratio/effective_sample_share": 0.9}
    config = WatchConfig(least={"ratio/efective_sample_share": 0.1, "validation/em_": 0.1}, most={}, falls={})
    watch = Watch(config)
    assert watch.see(0, "one", {"reward/total": 0.0}) is None  # a step without signal
    with pytest.raises(ValueError, match=r"bounds ratio/efec.* did you mean ratio/effective_sample_share\?"):
        watch.see(1, "one", learned)
    watch = Watch(dataclasses.replace(config, least={"validation/ems": 0.1}, most={"reward/f1": 2.0}))
    assert watch.see(0, "one", learned) is None  # nothing was validated yet, and a later stage may be paid for F1
    with pytest.raises(ValueError, match=r"bounds validation/ems, and .* did you mean validation/em\?"):
        watch.see(1, "one", {"validation/em": 0.5})


def test_what_is_never_measured_cannot_be_watched() -> None:
    fields = {"model": ModelConfig(path="somewhere"), "knowledge": {"text": KnowledgeConfig()}}
    watch = WatchConfig(least={"canary/em": 0.0})
    for evaluation, setting in ((EvaluationConfig(every=0, canary=True), "every"), (EvaluationConfig(), "canary")):
        with pytest.raises(ValueError, match=rf"bounds canary/em, .* set config.evaluation.{setting}"):
            TrainConfig(watch=watch, evaluation=evaluation, **fields)
    assert TrainConfig(watch=watch, evaluation=EvaluationConfig(canary=True), **fields).watch == watch


def test_a_fall_is_measured_from_the_best_mean_of_its_stage() -> None:
    values = [0.2, 1.0, 0.8, 0.4, 0.3, 0.3]  # means of two: 0.2, 0.6, 0.9, 0.6, 0.35, 0.3
    rows = [{"format": value} for value in values]
    assert seen(Watch(CONFIG), *map(dict, rows)) == [None] * 5 + ["format"]
    other = [{"format": value, "stage": "two" if i >= 3 else "one"} for i, value in enumerate(values)]
    assert seen(Watch(CONFIG), *other) == [None] * 6
    watch, resumed = Watch(CONFIG), Watch(CONFIG)
    assert seen(watch, *map(dict, rows[:4])) == [None] * 4
    resumed.restore(json.loads(json.dumps(watch.state())))
    assert seen(resumed, *map(dict, rows[4:])) == [None, "format"]


def test_a_metric_that_the_next_stage_lacks_no_longer_holds_checkpoints_back() -> None:
    """Of those that both have, bad values are counted on."""
    watch = Watch(dataclasses.replace(CONFIG, least={"share": 0.1, "forks/spread": 0.1}))
    assert watch.see(0, "one", {"share": 0.5, "forks/spread": 0.05}) is None
    assert watch.worried
    assert watch.see(1, "two", {"share": 0.5}) is None
    assert not watch.worried
    assert watch.see(2, "two", {"share": 0.05}) is None
    alarm = watch.see(3, "three", {"share": 0.05})
    assert alarm is not None
    assert alarm.metric == "share"


def test_what_was_never_above_zero_has_not_fallen() -> None:
    """R1-Searcher's reward begins near -2: half of that is no level to fall below."""
    rising = [{"format": value} for value in (-2.0, -1.8, -1.5, -1.0, -0.2, 0.0)]
    assert seen(Watch(CONFIG), *rising) == [None] * 6


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stops_at_once(value: float) -> None:
    assert seen(Watch(CONFIG), {"actor/loss": value}) == ["actor/loss"]
    assert seen(Watch(CONFIG), {"validation/em": value}) == [None]


def test_all_processes_see_what_the_main_one_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two, whose host is slow: it neither worries nor stops by itself."""
    watch = Watch(WatchConfig(patience=2, least={}, most={"timing_s/step": 5.0}, falls={}))
    monkeypatch.setattr(multihost, "exchange", lambda own: [{"timing_s/step": seconds}, own])
    for seconds, own, stopped in ((1.0, 9.0, False), (1.0, 9.0, False), (9.0, 1.0, False), (9.0, 1.0, True)):
        alarm = watch.see(0, "one", {"timing_s/step": own})
        assert (alarm is not None, watch.worried) == (stopped, seconds > 5)


def no_number(_: Episode) -> float:
    """A reward term that went wrong."""
    return math.nan


def troubled(steps: set[int]) -> Any:
    """What measures rollouts, with `trouble` at these steps (counted from the first)."""
    measure, calls = step_module.rollout_metrics, iter(range(100))
    return lambda *arguments: measure(*arguments) | {"trouble": float(next(calls) in steps)}


def test_a_reward_that_is_no_number_stops_a_run_with_what_it_has(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second stage's, whether or not anything is watched: what is left is the first stage's policy, evaluated."""
    monkeypatch.setattr(rl, "build_mesh", lambda _: single_device_mesh())
    config = small_config(tmp_path / "home", watch=WatchConfig(patience=0))
    broken = StageConfig(start=1, reward={f"{__name__}:no_number": 1.0})
    config = dataclasses.replace(config, stages={**config.stages, "second": broken})
    workdir = tmp_path / "run"
    with pytest.raises(
        RunStopped, match=r"after step 2: the reward of attempt \d at .* is nan.*; policy/ is that of 1"
    ):
        rl.train_rl(config, workdir)
    results = json.loads((workdir / "results.json").read_text())
    assert (results["stopped"]["metric"], results["stopped"]["steps"]) == ("reward/total", 1)
    assert results["agents"].keys() == {"first", "trained"}
    assert results["agents"]["first"] == results["agents"]["trained"]


@pytest.mark.slow
def test_weights_that_are_no_numbers_stop_a_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the second and last step, whose loss was fine: what is left is the first step's policy."""
    update, calls = Learner.update, iter(range(100))

    def broken(self: Learner, batch: Any) -> Any:
        found = update(self, batch)
        if next(calls) >= 1:
            leaves, tree = jax.tree.flatten(self.state.params)
            leaves[-1] = leaves[-1].at[0].set(np.nan)
            self.state = dataclasses.replace(self.state, params=jax.tree.unflatten(tree, leaves))
        return found

    monkeypatch.setattr(Learner, "update", broken)
    monkeypatch.setattr(rl, "build_mesh", lambda _: single_device_mesh())
    config = small_config(tmp_path / "home", watch=WatchConfig(patience=0))
    with pytest.raises(RunStopped, match=r"after step 2: some weights .* NaN or infinite; policy/ is that of 1 steps"):
        rl.train_rl(config, tmp_path / "run")
    weights = load_file(tmp_path / "run" / "policy" / "model.safetensors")
    assert all(np.isfinite(weight).all() for weight in weights.values())


def test_a_run_without_room_for_its_questions_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before knowledge bases are made and config.json is written, which would hold a mended configuration off."""
    monkeypatch.setattr(rl, "build_mesh", lambda _: single_device_mesh())
    monkeypatch.setattr(rl, "open_knowledge", lambda *_, **__: pytest.fail("knowledge bases were opened"))
    config = small_config(tmp_path / "home")
    for length, reason in (
        (10, r"the prompt of example .* has \d+ tokens, but"),
        (40, "a turn does not fit beside it"),
    ):
        engine = dataclasses.replace(config.engine, max_length=length)
        with pytest.raises(
            ValueError, match=rf"config.engine.max_length={length} leaves no room for a turn .*{reason}"
        ):
            rl.train_rl(dataclasses.replace(config, engine=engine), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_before_the_first_checkpoint_a_run_leaves_no_policy(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are those that were stopped."""
    monkeypatch.setattr(rl, "build_mesh", lambda _: single_device_mesh())
    monkeypatch.setattr(step_module, "rollout_metrics", troubled({0, 1}))
    watch = WatchConfig(patience=2, most={"trouble": 0.5})
    config = small_config(tmp_path / "home", watch=watch)
    config = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, stages=False))
    with pytest.raises(
        RunStopped, match=r"before the first checkpoint; no policy was written\. Start again with other"
    ):
        rl.train_rl(config, tmp_path / "run")
    assert not (tmp_path / "run" / "policy").exists()
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["agents"], results["stopped"]["metric"], results["stopped"]["steps"]) == ({}, "trouble", 0)


@pytest.mark.slow
def test_a_checkpoint_that_was_due_at_a_bad_step_is_made_up_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Due after every second step: bad are the second and third, then the second alone."""
    saved: list[int] = []
    save = Run.save
    monkeypatch.setattr(Run, "save", lambda self, step, **extra: (saved.append(step), save(self, step, **extra)))
    monkeypatch.setattr(rl, "build_mesh", lambda _: single_device_mesh())
    monkeypatch.setattr(step_module, "rollout_metrics", troubled({1, 2}))
    config = small_config(tmp_path / "home", watch=WatchConfig(patience=3, most={"trouble": 0.5}))
    config = dataclasses.replace(config, steps=6, checkpoint=CheckpointConfig(every=2))
    rl.train_rl(config, tmp_path / "run")
    assert saved == [4, 6]
    monkeypatch.setattr(step_module, "rollout_metrics", troubled({1}))
    saved.clear()
    rl.train_rl(config, tmp_path / "other")
    assert saved == [3, 4, 6]


def test_a_run_stops_with_its_last_good_checkpoint(
    small_run: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad from the second step on, and stopped after the third: what it leaves is the first checkpoint, exported."""
    rows: list[dict[str, Any]] = []
    measure = step_module.rollout_metrics

    def measured(*arguments: Any) -> dict[str, Any]:
        rows.append(measure(*arguments) | {"trouble": float(len(rows) > 0)})
        return rows[-1]

    monkeypatch.setattr(step_module, "rollout_metrics", measured)
    watch = WatchConfig(patience=2, most={"trouble": 0.5})
    config = make_config(small_run, steps=3, watch=watch)
    with pytest.raises(
        RunStopped, match=r"after step 3: trouble is 1 .* 2 bad values in a row; policy/ is that of 1 steps"
    ):
        rl.train_rl(config, tmp_path / "run")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (results["stopped"]["step"], results["stopped"]["steps"], results["stopped"]["metric"]) == (2, 1, "trouble")
    assert results["agents"]["trained"]["n"] == 4
    steps = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.is_dir()]
    assert steps == ["1"]
    exported = nnx.state(load_policy(tmp_path / "run", config), nnx.Param)
    saved = nnx.state(load_policy(tmp_path / "run", config, step=1), nnx.Param)
    jax.tree.map(np.testing.assert_array_equal, exported, saved)


IDLE = WatchConfig(patience=2, idle=4, least={}, most={}, falls={})


def test_a_run_that_learns_nothing_is_told_and_then_stopped(caplog: pytest.LogCaptureFixture) -> None:
    """With the most frequent reason. A signal begins the count anew; a checkpoint keeps it."""
    silent = {"rollout/no_signal": 1.0, "why_no_signal": "there is no 'text retriever' (9 of 16 attempts); a remedy"}
    rows = [*(dict(silent) for _ in range(3)), {"rollout/no_signal": 0.0}, {**silent, "why_no_signal": "another"}]
    watch = Watch(IDLE)
    assert seen(watch, *rows) == [None] * 5
    (line,) = [record.getMessage() for record in caplog.records]
    assert "no group has given a signal for 2 steps" in line
    assert "there is no 'text retriever'" in line
    resumed = Watch(IDLE)
    resumed.restore(json.loads(json.dumps(watch.state())))
    assert seen(resumed, *(dict(silent) for _ in range(2))) == [None] * 2
    alarm = resumed.see(8, "one", silent)
    assert alarm is not None
    assert (alarm.metric, alarm.unharmed) == ("rollout/no_signal", True)
    assert "for 4 steps" in alarm.complaint
    assert "there is no 'text retriever'" in alarm.complaint
    for config in (dataclasses.replace(IDLE, idle=0), dataclasses.replace(IDLE, patience=0)):
        assert seen(Watch(config), *(dict(silent) for _ in range(30))) == [None] * 30


@pytest.mark.parametrize(
    ("after", "metric"),
    [
        ({"rollout/searches_per_question": 0.0, "rollout/forced_rate": 0.0}, "rollout/searches_per_question"),
        ({"rollout/searches_per_question": 4.0, "rollout/forced_rate": 1.0}, "rollout/forced_rate"),
    ],
)
def test_a_policy_that_stops_searching_or_does_nothing_else_stops_the_run(after: dict[str, Any], metric: str) -> None:
    """Only if EM falls with it: to answer without a search may be right, and so may many searches."""
    before = {"rollout/em": 0.5, "rollout/searches_per_question": 1.5, "rollout/forced_rate": 0.1}
    for em, found in ((0.1, metric), (0.5, None)):
        rows = [*(dict(before) for _ in range(3)), *({**after, "rollout/em": em} for _ in range(12))]
        assert next(filter(None, seen(Watch(IDLE), *rows)), None) == found


def test_the_kept_runs_would_not_have_been_stopped() -> None:
    for file in (pathlib.Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"):
        for run in json.loads(file.read_text()):
            if not isinstance(run, dict) or "searches_per_question" not in run.get("curves", {}):
                continue
            curves = {name: run["curves"][name] for name in ("em", "searches_per_question")}
            rows = [{f"rollout/{k}": v for k, v in zip(curves, row)} for row in zip(*curves.values())]
            assert not any(seen(Watch(WatchConfig(patience=5)), *rows)), (file.name, run["seed"])


def test_a_policy_that_knows_other_names_of_knowledge_bases_stops_the_run(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packaged policy, without a warm start, searches for what is not there. The policy is kept."""
    monkeypatch.setattr(rl, "build_mesh", lambda _: single_device_mesh())
    config = make_config(tmp_path / "home", steps=6, watch=dataclasses.replace(WatchConfig(), patience=1, idle=3))
    specs = list(config.knowledge.values())
    config = dataclasses.replace(
        config,
        knowledge={"passages": specs[0], "tables": specs[1]},
        stages={"main": StageConfig(reward={"em": 1.0})},
        evaluation=EvaluationConfig(every=0, final_examples=2, baselines=False, before=False),
    )
    with pytest.raises(
        RunStopped, match=r"no group has given a signal for 3 steps.*: there is no '.*config\.knowledge"
    ):
        rl.train_rl(config, tmp_path / "run")
    assert (tmp_path / "run" / "policy" / "model.safetensors").is_file()
