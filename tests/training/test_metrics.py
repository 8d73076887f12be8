"""What a run writes down about itself."""

import json
import pathlib

import numpy as np
import pytest

from routerl_jax.training.health import gap_metrics, memory_metrics, ratio_metrics, rollout_metrics
from routerl_jax.training.loggers import MetricWriter, read_metrics
from tests.evaluation.episodes import call, episode


def test_rows_are_appended_and_a_resumed_run_drops_its_future(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = MetricWriter(tmp_path)
    for step in range(4):
        writer.write(step, {"loss": float(step)})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed in the middle of a line
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2, 3]
    assert "metrics.jsonl, line 5 is cut off" in caplog.text
    writer = MetricWriter(tmp_path, resume_at=2)
    writer.write(2, {"loss": 20.0})
    writer.close()
    assert [(row["step"], row["loss"]) for row in read_metrics(tmp_path)] == [(0, 0.0), (1, 1.0), (2, 20.0)]


def test_a_damaged_row_is_named_and_none_is_lost(tmp_path: pathlib.Path) -> None:
    """Only the last may be incomplete. A text may have any separators in it."""
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 0, "stage": "a\u2028b\x85c"}, {"step": 1}]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    assert read_metrics(tmp_path) == rows
    damaged = '{"step": 0}\n{"st\n{"step": 2}\n'
    path.write_text(damaged)
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not JSON .*; delete the line"):
        MetricWriter(tmp_path, resume_at=3)
    assert path.read_text() == damaged


def test_values_that_are_not_finite_are_null(tmp_path: pathlib.Path) -> None:
    writer = MetricWriter(tmp_path)
    writer.write(0, {"a": float("nan"), "b": float("inf"), "c": 1.0})
    writer.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 0, "a": None, "b": None, "c": 1.0}


def test_other_processes_write_nothing(tmp_path: pathlib.Path) -> None:
    writer = MetricWriter(tmp_path, enabled=False)
    writer.write(0, {"a": 1.0})
    writer.close()
    assert not list(tmp_path.iterdir())


def test_gap_and_ratio() -> None:
    old = [np.log(np.array([0.5, 0.25])), np.log(np.array([0.5]))]
    new = [np.log(np.array([0.5, 0.5])), np.log(np.array([0.5]))]
    gap = gap_metrics(old, new)
    assert gap["sampler_gap/max"] == pytest.approx(np.log(2))
    assert gap["sampler_gap/mean"] == pytest.approx(np.log(2) / 3)
    ratio = ratio_metrics(old, new)
    assert ratio["ratio/mean"] == pytest.approx(4 / 3)
    assert ratio["ratio/max"] == pytest.approx(2)
    assert ratio["ratio/effective_sample_share"] == pytest.approx(16 / (3 * 6))  # (sum r)^2 / (n sum r^2)


def test_rollout_metrics() -> None:
    episodes = [episode(call("table", "t1"), call("text", "x1")), episode(answer="no"), episode(), episode()]
    for e, total in zip(episodes, (1.0, 0.0, 0.5, 0.5)):
        e.rewards = {"em": total, "total": total}
    metrics = rollout_metrics(episodes, np.array([0, 0, 1, 1]), "search_r1")
    assert metrics["rollout/em"] == pytest.approx(0.75)
    assert metrics["rollout/frac_reward_zero_std"] == pytest.approx(0.5)  # the second group is flat
    assert metrics["reward/total"] == pytest.approx(0.5)
    assert metrics["reward/std"] == pytest.approx(np.std([1, 0, 0.5, 0.5]))
    assert metrics["rollout/kb/table"] == pytest.approx(0.5)
    assert metrics["rollout/entropy"] == pytest.approx(1.0)  # every sampled token has log-probability -1
    assert metrics["rollout/sequence_length/max"] == 3 + 6
    for e in episodes[2:]:
        e.turns = []  # their prompts were too long: that is no form
    for t in episodes[0].turns:
        t.well_formed = True
    again = rollout_metrics(episodes, np.array([0, 0, 1, 1]), "search_r1")
    assert again["rollout/well_formed_rate"] == pytest.approx(0.25)


def test_memory_is_measured() -> None:
    assert 0.05 < memory_metrics()["memory/host_peak_gib"] < 1000
