"""What a finished run left, by the program that shows it."""

import dataclasses
import json
import pathlib
import re
from typing import Any

import pytest

from configs import mmsearch_r1_small
from routerl_jax.core.config import from_config_dict
from routerl_jax.core.types import Example
from routerl_jax.data.atlas.known import known_questions
from routerl_jax.training import config as schema
from routerl_jax.training.load import policy_records, training_rows, workflow_records
from tests.programs import launch_here
from tests.training.analysed_run import KINDS, Behaviour, curve, records, write_run

NAMES = {"warm_start": "base", "rag_workflow": "rag"}


def questions() -> list[Example]:
    return known_questions("test", 20)


def behaviour(*shares: tuple[float, float]) -> Behaviour:
    return dict(zip(KINDS, shares))


EPISODES: dict[
    str, tuple[Behaviour, int]
] = {  # shares of each kind of five questions, and searches where there are some
    "warm_start": (behaviour((0.4, 0.6), (0.2, 0.6), (0.2, 0.6), (0.0, 0.6)), 2),
    "warm_start_direct": (behaviour((0.8, 0), (0, 0), (0, 0), (0, 0)), 0),
    "warm_start_rag_workflow": (behaviour((0.8, 1), (0.6, 1), (0.6, 1), (0.4, 1)), 2),
    "trained": (behaviour((0.8, 0), (0.8, 1), (0.6, 1), (0.6, 1)), 2),
    "direct": (behaviour((0.8, 0), (0, 0), (0, 0), (0, 0)), 0),
    "rag_workflow": (behaviour((0.8, 1), (0.8, 1), (0.8, 1), (0.6, 1)), 2),
    "no_penalty": (behaviour((0.8, 1), (0.8, 1), (0.8, 1), (0.8, 1)), 2),
    "sft": (behaviour((0.6, 0.4), (0.6, 0.8), (0.4, 0.8), (0.4, 1)), 1),
}


@pytest.fixture
def run(tmp_path: pathlib.Path) -> tuple[schema.TrainConfig, pathlib.Path]:
    small = from_config_dict(schema.TrainConfig, mmsearch_r1_small.get_config())
    controls = {
        "no_penalty": schema.ControlConfig(stages={"free": small.stages["main"]}),
        "sft": schema.ControlConfig(supervised=small.warm_start),
    }
    price = schema.CalibrationConfig(kind="search_free", penalty=0.2)
    config = dataclasses.replace(
        small,
        controls=controls,
        data=dataclasses.replace(small.data, test=f"{__name__}:questions"),
        evaluation=dataclasses.replace(small.evaluation, names=NAMES, calibration=price),
    )
    episodes = {name: records(questions(), of, searches) for name, (of, searches) in EPISODES.items()}
    metrics = {
        "trained": curve(0.7, 0.5, 4),
        "no_penalty": curve(0.7, 1.0, 4),
        "sft": [{"step": 0, "actor/loss": 1.0}],
    }
    calibration = {"search_free": {"closed_book": 0.8, "open_book": 0.8, "n": 5}}
    write_run(tmp_path / "run", config, episodes, metrics, calibration)
    return config, tmp_path / "run"


def test_policies_and_workflows_are_apart(run: tuple[schema.TrainConfig, pathlib.Path]) -> None:
    config, workdir = run
    assert list(policy_records(config, workdir)) == ["warm_start", "trained", "no_penalty", "sft"]
    found = workflow_records(config, workdir)
    assert {name: list(of) for name, of in found.items()} == {
        name: ["warm_start", "trained"] for name in ("direct", "rag_workflow")
    }
    assert [len(row["turns"]) for row in found["direct"]["trained"]] == [1] * 20
    (workdir / "evaluation" / "warm_start_direct.jsonl").unlink()
    (workdir / "evaluation" / "rag_workflow.jsonl").unlink()
    left = {name: list(of) for name, of in workflow_records(config, workdir).items()}
    assert left == {"direct": ["trained"], "rag_workflow": ["warm_start"]}
    assert {name: len(rows) for name, rows in training_rows(config, workdir).items()} == {
        "trained": 4,
        "no_penalty": 4,
        "sft": 1,
    }
    (workdir / "evaluation" / "trained.jsonl").unlink()
    with pytest.raises(ValueError, match="the run is not finished"):
        policy_records(config, workdir)


def test_the_program_tells_all_of_it(
    run: tuple[schema.TrainConfig, pathlib.Path], capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = run[1]
    assert not launch_here("analyze", f"--workdir={workdir}", "--top_k=")
    analysis: dict[str, Any] = json.loads((workdir / "analysis" / "analysis.json").read_text())
    policies = analysis["policies"]
    assert list(policies) == ["base", "trained", "no_penalty", "sft"]
    assert policies["trained"]["em"] == pytest.approx(0.7)
    assert policies["trained"]["search_ratio"] == pytest.approx(0.75)  # 15 of 20 questions, both of two searches
    assert (policies["sft"]["searched_rate"], policies["sft"]["search_ratio"]) == pytest.approx((0.75, 0.375))
    assert policies["trained"]["breakdown"]["correct_without_search"] == pytest.approx(4 / 20)
    assert {name: row["searched_rate"] for name, row in policies["trained"]["by"]["kind"].items()} == {
        "image": 1,
        "mixed": 1,
        "search_free": 0,
        "text": 1,
    }
    em = {name: {policy: row["em"] for policy, row in of.items()} for name, of in analysis["workflows"].items()}
    assert em == {"direct": {"base": 0.2, "trained": 0.2}, "rag_workflow": {"base": 0.6, "trained": 0.75}}
    assert analysis["workflows"]["direct"]["base"]["search_ratio"] == 0
    assert analysis["calibration"] == {
        "penalty": 0.2,
        "kinds": {"search_free": {"closed_book": 0.8, "open_book": 0.8, "n": 5, "em": 0.8, "searched_rate": 0.0}},
    }
    assert {name: len(rows) for name, rows in analysis["training"].items()} == {"trained": 4, "no_penalty": 4}
    assert (workdir / "analysis" / "analysis.png").stat().st_size > 100_000
    assert re.search(r"rag_workflow +base +60\.0 .*\n +after RL +75\.0 .* 20 ", capsys.readouterr().out)
