"""The comparison of kinds of credit: its configurations, and its table on made-up runs."""

import pathlib

import numpy as np
import pytest

from benchmarks.counterfactual_routing import comparison, curves, figures
from configs import credit, quickstart
from routerl_jax.core.config import from_config_dict
from routerl_jax.training.config import TrainConfig


def run(rise: float, tokens: int) -> list[dict]:
    """Twenty steps whose routing accuracy rises linearly."""
    return [
        {
            "rollout/routing_accuracy": min(1.0, rise * step),
            "reward/em": rise * step,
            "reward/format": 0.1,
            "reward/searches": -0.05,
            "perf/decoded_tokens": tokens,
            "perf/trained_tokens": tokens,
            "perf/trained_tokens_unshared": 2 * tokens,
            "timing_s/step": 2.0,
            "forks/spread": 0.5,
            "forks/regret": 0.1,
        }
        for step in range(20)
    ]


def test_the_table_by_hand(tmp_path: pathlib.Path) -> None:
    """0.1 a step, 1 from the eleventh row on: the mean of rows 9 to 13, 0.94, is the first of at least 0.9."""
    fast, slow = run(0.1, 2000), run(0.01, 1000)
    found = figures(fast, budget=20_000)
    assert (found["step"], found["tokens"], found["seconds"]) == (13, 26.0, 26.0)
    assert found["routing"] == pytest.approx(70.0)  # ten rows: the mean of 0.5 to 0.9
    assert found["reward"] == pytest.approx(0.7 + 0.05)
    assert (found["per_step"], found["trained"], found["unshared"]) == (2.0, 2.0, 4.0)
    assert np.isnan(figures(slow, budget=20_000)["step"])
    table = comparison({"episode": [slow], "turn": [fast, slow]})
    assert "| episode | 1 | - | - | - | 17.0 |" in table
    assert "| turn | 2 | - (13, -) |" in table
    assert "20 thousand generated" in table
    curves({"episode": [slow], "turn": [fast, slow]}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize("kind", credit.KINDS)
def test_kinds_differ_in_credit_alone(kind: str) -> None:
    config = from_config_dict(TrainConfig, credit.get_config(kind))
    assert config.learner.credit == {"episode": "episode", "turn": "turn"}.get(
        kind, "counterfactual" if kind.startswith("c") else "episode"
    )
    assert config.rollout.examples * config.rollout.samples * 3**config.rollout.forks in (16 * 8, 16 * 12)
    assert dict(quickstart.REWARD).items() <= dict(config.stages["main"].reward).items()
    with pytest.raises(ValueError, match="none of episode, episode_turns, turn"):
        credit.get_config("mine")
