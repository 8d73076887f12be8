"""A run of two stages that takes seconds: credit by turns, then counterfactual credit in forked attempts."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest
from rich.console import Console

from routerl_jax.core.rows import RowLocation
from routerl_jax.data.atlas.questions import real_questions
from routerl_jax.evaluation.records import episode_of
from routerl_jax.evaluation.trajectory import render
from routerl_jax.knowledge import encoders
from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.training import config as schema
from routerl_jax.training import rl
from routerl_jax.training.loggers import read_metrics
from tests.training.small_run import make_config, write_rows


@pytest.mark.slow
def test_both_kinds_of_finer_credit_train(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "_loaded", {})
    monkeypatch.setattr(encoders, "local_mesh", lambda mesh: single_device_mesh())
    monkeypatch.setattr(rl, "build_mesh", lambda _: single_device_mesh())
    whole = make_config(tmp_path / "home")
    questions = {question.id: question for question in real_questions("train")}
    path = pathlib.Path(whole.data.train)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["metadata"] = {"path": [dataclasses.asdict(hop) for hop in questions[row["id"]].hops]}
    write_rows(path, rows)
    route = {"r1_router.turn_route": {"weight": 0.5, "encoder": str(tmp_path / "home" / "encoder")}}
    config = dataclasses.replace(
        whole,
        steps=2,
        stages={
            "turns": schema.StageConfig(reward={"em": 1.0, **route}),
            "forks": schema.StageConfig(
                start=1,
                reward={"em": 1.0, "searches": -0.1},
                rollout={"forks": 1, "samples": 2},
                learner={"credit": "counterfactual", "drop_no_signal": False},
            ),
        },
        learner=dataclasses.replace(whole.learner, credit="turn", minibatches=1, share_prefixes=True),
        evaluation=dataclasses.replace(whole.evaluation, every=0, final_examples=2),
        checkpoint=schema.CheckpointConfig(every=2),
        log_episodes=12,
        log_tokens=True,
    )
    rl.train_rl(config, tmp_path / "run")
    turns, forks = read_metrics(tmp_path / "run")
    assert turns["reward/r1_router.turn_route"] > 0
    assert forks["sampler_gap/max"] < 1e-3  # the choices' log-probabilities among them
    assert forks["forks/decisions"] > 0.5
    assert 0 <= forks["forks/best_rate"] <= 1
    assert forks["perf/shared_prompt_tokens"] > 0
    assert 0 < forks["perf/trained_tokens"] < forks["perf/trained_tokens_unshared"]
    lines = (tmp_path / "run" / "episodes" / "step-000001.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    forked = [record for record in records if record["branches"]]
    assert {record["branches"][0]["tool"] for record in forked} == {"text", "table", "elements"}
    assert all(call["tool"] == r["branches"][0]["tool"] for r in forked for call in r["turns"][0]["calls"])
    for record in records:
        assert record["trained"] == any(
            any(tokens["sampled"]) for tokens in record["tokens"]
        )  # each past is learnt once
        for turn in record["turns"]:
            tokens = record["tokens"][turn["sequence"]]
            span = slice(turn["start"], turn["start"] + turn["tokens"])
            assert "".join(tokens["text"][span]) == turn["text"]
            assert not any(lp for lp, sampled in zip(tokens["logprob"], tokens["sampled"]) if not sampled)
    again = episode_of(forked[0], RowLocation(path=path, number=1, unit="line"))
    assert dataclasses.asdict(again.branches[0]) == forked[0]["branches"][0]
    console = Console(record=True, width=160)
    console.print(render(forked[0]))
    assert f"a fork: {forked[0]['branches'][0]['tool']} was chosen for the policy" in console.export_text()
