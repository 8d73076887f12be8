"""Runs with a judge: its verdicts as a reward and in the tables, a judge that is gone, and settings that it may not have."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Any

import pytest

from routerl_jax.core.config import from_config_dict
from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.training import config as schema
from routerl_jax.training import rl
from routerl_jax.training.setup import build_judge, build_recipe
from routerl_jax.training.sft import supervised
from tests.programs import launch_here
from tests.training.small_run import make_config
from tests.web_servers import Chats, serving


def lenient(messages: list[dict[str, Any]]) -> str:
    """A judge that finds answers right that begin with a letter of the alphabet's first half, as an example."""
    answer = json.loads(re.findall(r"^Answer to grade: (.*)$", messages[-1]["content"], re.MULTILINE)[-1])
    return f"<judge>{'True' if answer[:1].lower() < 'n' else 'False'}</judge>"


def small_config(home: pathlib.Path, judge: schema.JudgeConfig, **changes: Any) -> schema.TrainConfig:
    return make_config(
        home,
        steps=2,
        rollout=schema.RolloutConfig(examples=4, samples=2),
        stages={"main": schema.StageConfig(reward={"judge": 0.7, "format": 0.1})},
        judge=judge,
        evaluation=schema.EvaluationConfig(
            every=2, examples=2, final_examples=4, baselines=False, judge=True, headline=("judge", "em")
        ),
        **changes,
    )


def metric_rows(workdir: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(rl, "build_mesh", lambda _: single_device_mesh())
    monkeypatch.setenv("ROUTERL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("JUDGE_KEY", "secret-7")


@pytest.mark.slow
def test_a_run_with_a_judge(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards, validation and the table are made of its verdicts; it may move while the run pauses, and not change its mind."""
    workdir, chats = tmp_path / "run", Chats(lenient, key="secret-7")
    with serving(chats) as server:
        judge = schema.JudgeConfig(model="m", base_url=f"{server.url}/v1", api_key_env="JUDGE_KEY", style="vrag")
        config = small_config(tmp_path / "home", judge)
        results = rl.train_rl(config, workdir)
        asked = len(chats.bodies)
        assert asked
        assert (tmp_path / "cache" / "llms.sqlite").is_file()
        rows = metric_rows(workdir)
        for row in rows:
            assert 0 < row["rollout/judge/asked"] <= 1
            assert row["rollout/judge/failed"] == row["rollout/judge/unreadable"] == 0
            assert row["rollout/judge"] == row["rollout/judge/right"]
            assert row["reward/judge"] == pytest.approx(0.7 * row["rollout/judge"])
            assert row["timing_s/reward"] > 0
        assert rows[-1]["validation/judge"] == rows[-1]["validation/judge/right"]
        row = results["agents"]["trained"]
        records = [json.loads(line) for line in (workdir / "evaluation" / "trained.jsonl").read_text().splitlines()]
        verdicts = [record["verdict"] for record in records]
        assert row["judge"] == sum(verdict["counts"] for verdict in verdicts) / 4
        assert {"judge_interval", "judge/asked", "judge/em_agreement"} <= row.keys()
        assert results["agents"]["warm_start"]["n"] == 4
        again = [json.loads(line) for line in (workdir / "episodes" / "step-000000.jsonl").read_text().splitlines()]
        assert {record["verdict"]["kind"] for record in again} <= {"right", "wrong", "unasked"}

        evaluate = ("evaluate", f"--workdir={workdir}", "--agents=trained", "--json")
        assert not launch_here(*evaluate)
        table = json.loads((workdir / "benchmarks" / "questions" / "results.json").read_text())
        assert table["agents"]["trained"]["judge"] == row["judge"]
        assert table["judge"]["style"] == "vrag"
        assert len(chats.bodies) == asked  # all of it was kept

    moved = dataclasses.replace(judge, base_url="http://127.0.0.1:9/v1", seconds=7.0)
    resumed = rl.train_rl(dataclasses.replace(config, judge=moved), workdir, resume=True)["agents"]["trained"]
    assert resumed == row | {"judge/from_cache": resumed["judge/asked"]}
    other = dataclasses.replace(config, judge=dataclasses.replace(judge, style="default"))
    with pytest.raises(ValueError, match=r"config\.judge\.style was 'vrag', and now it is 'default'"):
        rl.train_rl(other, workdir, resume=True)
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ValueError, match=r"config\.judge: the environment variable JUDGE_KEY is not set"):
        rl.train_rl(config, tmp_path / "another")


def test_a_judge_that_is_gone_ends_no_run(tmp_path: pathlib.Path) -> None:
    """Not even one whose metrics are watched and lead the table."""
    judge = schema.JudgeConfig(model="m", base_url="http://127.0.0.1:9/v1", retries=0, failed="leave_out")
    watch = schema.WatchConfig(least={"validation/judge": 0.0, "rollout/judge": 0.0})
    config = small_config(tmp_path / "home", judge, watch=watch)
    config = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, before=False))
    trained = rl.train_rl(config, tmp_path / "run")["agents"]["trained"]
    assert trained["judge/failed"] == trained["judge/asked"] > 0
    for row in metric_rows(tmp_path / "run"):
        assert row["rollout/judge/failed"] == row["rollout/judge/asked"] == row["actor/left_out/unjudged"] > 0


KB = {"text": {"source": "atlas/text"}}
REWARD = {"main": {"reward": {"em": 1.0, "judge": 1.0}}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": REWARD}, "config.stages.main.reward.judge asks a judge, and config.judge.model is empty"),
        ({"evaluation": {"judge": True}}, "config.evaluation.judge is on, and config.judge.model is empty"),
        ({"judge": {"style": "vrga"}}, "config.judge: unknown judge style 'vrga'; did you mean 'vrag'?"),
        (
            {"judge": {"failed": "ignore"}},
            "config.judge.failed='ignore' is not one of 'zero', 'em', 'leave_out', 'refuse'",
        ),
        ({"judge": {"seconds": 0.0}}, "config.judge.seconds=0.0 must be above 0"),
        ({"judge": {"asks": 0}}, "config.judge.asks=0 must be at least 1"),
        ({"judge": {"modle": "m"}}, "unknown config key config.judge.modle; did you mean config.judge.model?"),
        ({"evaluation": {"headline": ("judge",)}}, "config.evaluation.headline: 'judge' is never measured"),
        (
            {
                "stages": REWARD,
                "judge": {"model": "m", "failed": "leave_out"},
                "learner": {"credit": "counterfactual"},
                "rollout": {"forks": 1},
            },
            "config.judge.failed='leave_out' does not go with config.learner.credit='counterfactual'",
        ),
        (
            {
                "controls": {"judged": {"stages": REWARD}},
                "judge": {"model": "m", "base_url": "nowhere"},
            },
            "",
        ),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], message: str) -> None:
    fields = {"model": {"path": "somewhere"}, "knowledge": KB, **changes}
    if not message:
        assert build_recipe(from_config_dict(schema.TrainConfig, fields))
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        build_recipe(from_config_dict(schema.TrainConfig, fields))


def test_a_judge_is_opened_where_somebody_asks_it() -> None:
    def opened(**changes: Any) -> Any:
        fields = {"model": {"path": "somewhere"}, "knowledge": KB, "judge": {"model": "m"}, **changes}
        config = from_config_dict(schema.TrainConfig, fields)
        return build_judge(config, build_recipe(config))

    assert opened() is None
    assert opened(stages=REWARD) is not None
    assert opened(evaluation={"judge": True}) is not None
    with pytest.raises(ValueError, match=r"config\.judge: base_url='nowhere' must begin with"):
        opened(stages=REWARD, judge={"model": "m", "base_url": "nowhere"})


def test_a_supervised_start_of_a_judged_run_is_a_configuration(tmp_path: pathlib.Path) -> None:
    judge = schema.JudgeConfig(model="m")
    config = small_config(tmp_path / "home", judge, warm_start=schema.WarmStartConfig(steps=1))
    assert supervised(config).judge == judge
