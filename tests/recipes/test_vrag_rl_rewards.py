"""VRAG-RL's reward, by hand: terms, presets, the released gate, and a judge in trouble."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from routerl_jax.core.types import Episode, Verdict
from routerl_jax.recipes.vrag_rl.rewards import AFTER_SFT, FROM_INSTRUCT, RELEASED, Preset, reward
from routerl_jax.rewards.terms import RewardFunction, judged
from tests.evaluation.episodes import looked
from tests.rewards.test_verdicts import OUT, RIGHT, UNASKED, WRONG, Given

A, C, X = "doc.pdf#1", "doc.pdf#3", "doc.pdf#8"
THIRD = 0.6309298  # 1 / log2(3)


def total(preset: Preset, episode: Episode, verdict: Verdict) -> float:
    (row,) = RewardFunction(dict(preset.reward), judge=Given(verdict))([episode])
    return row["total"]


FOUND_LATE = looked(X, A)  # NDCG 0.6309298
UNSEARCHED = looked()
TOTALS = [  # episode, verdict, after SFT, from the instruct model, released
    (looked(A, "crop"), RIGHT, 1.0, 1.0, 1.0),
    (looked(A), WRONG, 2 / 9, 0.3, 0.3),
    (FOUND_LATE, RIGHT, 2 / 9 * THIRD + 7 / 9, 0.2 * THIRD + 0.8, 0.2 * THIRD + 0.8),
    (looked(X), RIGHT, 7 / 9, 0.8, 0.8),
    (looked(A, C, gold=(A, X)), RIGHT, 2 / 9 / (1 + THIRD) + 7 / 9, 0.2 / (1 + THIRD) + 0.8, 0.2 / (1 + THIRD) + 0.8),
    (UNSEARCHED, RIGHT, 7 / 9, 0.7, 0.0),  # the gate takes all from a right answer without a search
    (looked(A, answer=None), UNASKED, 2 / 9, 0.2, 0.0),
    (looked(answer=None), UNASKED, 0.0, 0.0, 0.0),
    (looked(A, gold=()), RIGHT, 7 / 9, 0.8, 0.8),  # no gold page: no order to reward
]


@pytest.mark.parametrize("row", TOTALS, ids=[str(i) for i in range(len(TOTALS))])
def test_totals_by_hand(row: tuple[Episode, Verdict, float, float, float]) -> None:
    episode, verdict, *expected = row
    found = [total(preset, episode, verdict) for preset in (AFTER_SFT, FROM_INSTRUCT, RELEASED)]
    assert found == pytest.approx(expected, abs=1e-6)


def test_what_goes_with_the_rewards() -> None:
    assert (AFTER_SFT.kl_coef, FROM_INSTRUCT.kl_coef, RELEASED.kl_coef) == (0.01, 0.0, 0.01)
    assert "vrag_rl.pattern" not in AFTER_SFT.reward
    assert FROM_INSTRUCT.reward == pytest.approx({"vrag_rl.ndcg": 0.2, "judge": 0.7, "vrag_rl.pattern": 0.1})


def one_turn(**fields: Any) -> Episode:
    """An episode with a search and an answer, whose last turn is another."""
    episode = looked(A)
    episode.turns[-1] = dataclasses.replace(episode.turns[-1], **fields)
    return episode


@pytest.mark.parametrize(
    ("episode", "paper", "released"),
    [
        (looked(A), 1, 1),
        (looked("crop", A), 1, 1),
        (UNSEARCHED, 0, 0),
        (looked(A, answer=None), 0, 0),
        (one_turn(text="<answer>lion</answer> and more", well_formed=False), 0, 1),
        (one_turn(text="lion</answer>", forced="<answer>", well_formed=False), 0, 1),  # begun for it
        (one_turn(text="lion</answer>"), 1, 0),  # what is well formed is the agent's to say
        (one_turn(text="<answer>lion"), 1, 0),
    ],
)
def test_the_pattern(episode: Episode, paper: int, released: int) -> None:
    for variant, expected in (("paper", paper), ("released", released)):
        terms = {"vrag_rl.pattern": {"variant": variant}}
        assert RewardFunction(terms)([episode])[0]["total"] == expected


def test_tags_of_two_turns_are_no_action() -> None:
    """The released loop keeps closed tags alone before it looks."""
    episode = looked(A)
    episode.turns[0].text, episode.turns[1].text = "<search>q", "</search><answer>lion</answer>"
    assert RewardFunction({"vrag_rl.pattern": {"variant": "released"}})([episode])[0]["total"] == 0


def test_repeated_pages_by_variant() -> None:
    """X, X, A: A's place is the second, or the third as released."""
    episode = looked(X, X, A)
    found = [
        RewardFunction({"vrag_rl.ndcg": {"variant": variant}})([episode])[0]["total"]
        for variant in ("paper", "released")
    ]
    assert found == pytest.approx([THIRD, 0.5], abs=1e-6)


def test_questions_without_gold_pages_are_not_in_the_mean_of_the_metrics() -> None:
    known, unknown = looked(A), looked(A, gold=())
    assert judged("vrag_rl.ndcg", [known, unknown]) == [known]


@pytest.mark.parametrize("preset", [AFTER_SFT, FROM_INSTRUCT, RELEASED])
def test_a_judge_that_fails_ends_nothing(preset: Preset) -> None:
    """All dead: the rest of the reward stays. One dead: it gets the mean of the others at its question, here 1/2."""
    episodes = [looked(A), looked(A), looked(A)]
    dead = RewardFunction(dict(preset.reward), judge=Given(OUT, OUT, OUT))(episodes)
    assert [row["total"] for row in dead] == pytest.approx([total(preset, looked(A), WRONG)] * 3)
    rows = RewardFunction(dict(preset.reward), judge=Given(RIGHT, WRONG, OUT))(episodes)
    assert rows[2]["total"] == pytest.approx((rows[0]["total"] + rows[1]["total"]) / 2)


def test_the_gate_is_in_the_mean_of_the_judge_s_others() -> None:
    """Two right answers, one without a search: the third, which has no verdict, has the mean of 0.7 and 0."""
    rows = RewardFunction({"vrag_rl.gated_judge": 0.7}, judge=Given(RIGHT, RIGHT, OUT))(
        [looked(A), UNSEARCHED, looked(A)]
    )
    assert [row["total"] for row in rows] == pytest.approx([0.7, 0.0, 0.35])


def test_ablations() -> None:
    """Table 2 without the retrieval reward, exact match in the judge's place, and nobody is asked who weighs nothing."""
    assert reward(0.0, alpha=0.0) == {"judge": 1.0}
    assert reward(0.1, alpha=0.3) == pytest.approx({"vrag_rl.ndcg": 0.3, "judge": 0.6, "vrag_rl.pattern": 0.1})
    assert reward(0.1, beta=0.3) == pytest.approx({"vrag_rl.ndcg": 0.6, "judge": 0.3, "vrag_rl.pattern": 0.1})
    by_rule = RewardFunction(dict(reward(0.0, outcome="em")))
    assert by_rule.asks == ()
    assert by_rule([looked(A)])[0]["total"] == pytest.approx(1.0)


@pytest.mark.parametrize("weights", [(1.1, None, None), (0.1, 0.5, 0.5), (0.0, -0.1, None), (0.0, None, 1.2)])
def test_weights_that_are_no_shares(weights: Sequence[float | None]) -> None:
    with pytest.raises(ValueError, match="must be at least 0 and add up to 1"):
        reward(*weights)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["vrag_rl.ndcg", "vrag_rl.pattern"])
def test_a_variant_that_there_is_not(name: str) -> None:
    with pytest.raises(ValueError, match=r"variant='code' is not known; use one of paper, released"):
        RewardFunction({name: {"variant": "code"}})([looked(A)])
