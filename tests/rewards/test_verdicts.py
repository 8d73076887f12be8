"""What verdicts are worth: as a reward, to a group's advantages, and as metrics, by hand."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence

import numpy as np
import pytest

from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Episode, Example, Verdict
from routerl_jax.evaluation.metrics import averages, summarize
from routerl_jax.evaluation.records import episode_of, episode_record
from routerl_jax.evaluation.report import rows
from routerl_jax.rewards.terms import RewardFunction, StepTerm, TurnTerm, judged
from routerl_jax.training.config import LearnerConfig
from routerl_jax.training.credit import assign
from tests.training.test_credit import SHORT

RIGHT, WRONG = Verdict(kind="right", counts=1.0), Verdict(kind="wrong", counts=0.0)
UNASKED, OUT = Verdict(kind="unasked", counts=0.0), Verdict(kind="failed", counts=None, said="HTTP 500")


class Given:
    """A judge whose verdicts are written down; counts how often it is asked."""

    def __init__(self, *verdicts: Verdict) -> None:
        self.verdicts, self.asked = list(verdicts), 0

    def __call__(self, episodes: Sequence[Episode]) -> list[Verdict]:
        self.asked += 1
        return self.verdicts


def attempts(*questions: str, answers: Sequence[str | None] = ()) -> list[Episode]:
    """One at each question, with an accepted answer or that which is given."""
    return [
        Episode(
            example=Example(id=question, question="Which?", answers=("lion",)),
            sample=i,
            answer=answer,
            turns=[],
            sequences=[SHORT],
        )
        for i, (question, answer) in enumerate(zip(questions, answers or ["lion"] * len(questions)))
    ]


def test_the_reward_is_what_verdicts_count() -> None:
    episodes = attempts("a", "a", "a")
    reward = RewardFunction({"judge": 0.5, "em": 1.0}, judge=Given(RIGHT, WRONG, UNASKED))
    assert [row["judge"] for row in reward(episodes)] == [0.5, 0.0, 0.0]
    assert [row["total"] for row in reward(episodes)] == [1.5, 1.0, 1.0]
    assert [episode.verdict for episode in episodes] == [RIGHT, WRONG, UNASKED]


def test_one_that_is_left_out_moves_nobody() -> None:
    """Question a: 1, 0, 0 and one unknown, which gets their mean, 1/3; of b nothing is known; c is as usual."""
    episodes = attempts(*"aaaabbcc")
    judge = Given(RIGHT, WRONG, OUT, WRONG, OUT, OUT, WRONG, RIGHT)
    for episode, row in zip(episodes, RewardFunction({"judge": 1.0}, judge=judge)(episodes)):
        episode.rewards = row
    totals = [episode.rewards["total"] for episode in episodes]
    assert totals == pytest.approx([1, 0, 1 / 3, 0, 0, 0, 0, 1])
    assert judged("judge", episodes) == [episodes[i] for i in (0, 1, 3, 6, 7)]  # whose mean is reward/judge
    credit = assign(LearnerConfig(advantage="dr_grpo"), episodes, np.asarray([0, 0, 0, 0, 1, 1, 2, 2]))
    assert [float(values.max() + values.min()) for values in credit.advantages] == pytest.approx(
        [2 / 3, -1 / 3, 0, -1 / 3, 0, 0, -0.5, 0.5]
    )
    assert credit.keep.tolist() == [0, 1, 3, 6, 7]
    assert credit.metrics["actor/left_out/unjudged"] == 3 / 8


def test_one_that_is_left_out_is_not_learned_from_whatever_else_it_earned() -> None:
    """Without comparison, whitened: neither its tokens nor its made-up reward are in the mean of those that are learned."""
    episodes = attempts(*"abcd")
    for episode, verdict, total in zip(episodes, (RIGHT, WRONG, OUT, RIGHT), (1.0, 0.0, 7.0, 1.0)):
        episode.verdict, episode.rewards = verdict, {"total": total}
    credit = assign(LearnerConfig(advantage="reinforce_pp", drop_no_signal=False), episodes, np.arange(4))
    assert credit.keep.tolist() == [0, 1, 3]
    learned = np.asarray([credit.advantages[i].sum() for i in credit.keep])
    np.testing.assert_allclose(learned, (np.asarray([1, 0, 1]) - 2 / 3) / np.std([1, 0, 1]), rtol=1e-6)


def test_all_are_learned_from_where_every_verdict_counts() -> None:
    episodes = attempts(*"aa")
    for episode, verdict in zip(episodes, (RIGHT, WRONG)):
        episode.verdict, episode.rewards = verdict, {"total": verdict.counts or 0.0}
    credit = assign(LearnerConfig(), episodes, np.zeros(2, int))
    assert credit.keep.tolist() == [0, 1]
    assert "actor/left_out/unjudged" not in credit.metrics


def gated(episode: Episode, verdict: Verdict, penalty: float = 0.0) -> float:
    """A term of one's own: what the verdict counts, less a penalty."""
    return (verdict.counts or 0.0) - penalty


def _compared(episodes: Sequence[Episode], verdicts: Sequence[Verdict]) -> list[float]:
    return [float(verdict == verdicts[0]) for verdict in verdicts]


def _of_turns(episodes: Sequence[Episode], verdicts: Sequence[Verdict]) -> list[list[float]]:
    return [[(verdict.counts or 0.0)] * len(e.turns) for e, verdict in zip(episodes, verdicts)]


COMPARED, OF_TURNS = StepTerm(_compared), TurnTerm(_of_turns)


def test_any_term_may_ask_for_verdicts_and_the_judge_is_asked_once() -> None:
    names = [f"{__name__}:{name}" for name in ("gated", "COMPARED", "OF_TURNS")]
    judge = Given(RIGHT, WRONG)
    reward = RewardFunction({names[0]: {"penalty": 0.25}, names[1]: 2.0, names[2]: 1.0, "judge": 1.0}, judge=judge)
    assert reward.asks == (*names, "judge")
    found = reward(attempts("a", "a"))
    assert [[row[name] for name in (*names, "judge")] for row in found] == [
        [0.75, 2.0, 0.0, 1.0],
        [-0.25, 0.0, 0.0, 0.0],
    ]
    assert judge.asked == 1
    with pytest.raises(ValueError, match=r"unknown config key .*penalties; did you mean"):
        RewardFunction({names[0]: {"penalties": 1.0}})
    with pytest.raises(ValueError, match=r"unknown config key .*\.verdict"):
        RewardFunction({names[0]: {"verdict": 1.0}})


def test_a_reward_without_its_judge_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match=re.escape("'judge' asks a judge, and there is none: set config.judge.model")):
        RewardFunction({"em": 1.0, "judge": 1.0})(attempts("a"))
    idle = Given()
    assert RewardFunction({"em": 1.0}, judge=idle)(attempts("a"))[0]["total"] == 1.0
    assert idle.asked == 0


def test_metrics_by_hand() -> None:
    """Eight answers; exact match finds 0, 1, 4, 5 and 7 right, the judge 0, 2 and 5."""
    episodes = attempts(*"abcdefgh", answers=["lion", "lion", "the king", "cat", "lion", "lion", None, "lion"])
    verdicts = [
        RIGHT,
        Verdict(kind="wrong", counts=0.0, kept=True),
        RIGHT,
        WRONG,
        OUT,
        Verdict(kind="right", counts=1.0, kept=True),
        UNASKED,
        Verdict(kind="unreadable", counts=1.0),
    ]
    for episode, verdict in zip(episodes, verdicts):
        episode.verdict = verdict
    found = averages(episodes)
    assert {key: value for key, value in found.items() if key.startswith("judge")} == pytest.approx(
        {
            "judge": 4 / 7,  # of 0 to 3 and 5 to 7
            "judge/right": 3 / 8,
            "judge/unreadable": 1 / 8,
            "judge/failed": 1 / 8,
            "judge/asked": 7 / 8,
            "judge/from_cache": 2 / 8,
            "judge/em_agreement": 3 / 5,  # 0, 3 and 5 of 0, 1, 2, 3 and 5
            "judge/cover_em_agreement": 3 / 5,  # the same ones
            "judge/right_where_cover_em": 2 / 3,  # 0 and 5 of 0, 1 and 5
            "judge/right_where_not_cover_em": 1 / 2,  # 2 of 2 and 3
        }
    )
    low, high = summarize(episodes)["judge_interval"]
    assert 0 < low < 4 / 7 < high < 1
    headings, cells = rows({"trained": summarize(episodes)}, ("judge", "em"))
    assert headings[:3] == ["agent", "judge %", "EM %"]
    assert cells[0][1].startswith("57.1 (")


def test_metrics_where_nothing_counts_or_nobody_was_asked() -> None:
    (lost,) = attempts("a")
    lost.verdict = OUT
    found = summarize([lost])
    assert found["judge/failed"] == 1.0
    assert not {"judge", "judge_interval", "judge/em_agreement"} & found.keys()
    assert not [key for key in summarize(attempts("a")) if key.startswith("judge")]


def test_a_record_keeps_the_verdict() -> None:
    told, silent = attempts("a", "b")
    told.verdict = OUT
    record = episode_record(told)
    assert record["verdict"] == {"kind": "failed", "counts": None, "kept": False, "said": "HTTP 500"}
    place = RowLocation(pathlib.Path("x"), "line", 1)
    assert episode_of(record, place).verdict == OUT
    assert "verdict" not in episode_record(silent)
    assert episode_of(episode_record(silent), place).verdict is None
