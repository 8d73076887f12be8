"""What a step's tokens are reinforced by: masks, whitening and KL together, by hand."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from routerl_jax.core.types import Action, Episode, Example, Sequence, Turn
from routerl_jax.learning.advantages import ADVANTAGES
from routerl_jax.learning.losses import LossConfig
from routerl_jax.training.config import LearnerConfig
from routerl_jax.training.credit import assign, correct, portions, sequences_of, with_logprobs
from tests.learning import equations

GROUPS = np.asarray([4, 4, 9, 9])


def sequence(mask: list[bool], logprob: float) -> Sequence:
    trained = np.asarray(mask)
    return Sequence(
        tokens=np.arange(len(mask), dtype=np.int32),
        loss_mask=trained,
        logprobs=np.where(trained, logprob, 0).astype(np.float32),
        positions=np.zeros((3, len(mask)), np.int32),
        versions=np.where(trained, 0, -1).astype(np.int32),
    )


def episode(reward: float, *sequences: Sequence, invalid: bool = False, truncated: bool = False) -> Episode:
    turn = Turn(text="?", stop_reason="stop", tokens=1, action=Action(kind="invalid") if invalid else None)
    return Episode(
        example=Example(id="e", question="?", answers=("a",)),
        sample=0,
        answer=None,
        turns=[turn],
        sequences=list(sequences),
        truncated=truncated,
        rewards={"total": reward},
    )


SHORT, LONG = sequence([False, True], -1.0), sequence([False, True, False, True, True], -0.5)
EPISODES = [episode(1, SHORT, LONG), episode(0, SHORT), episode(1, LONG), episode(1, SHORT)]


def above_the_group(rewards: np.ndarray, groups: np.ndarray) -> list[float]:
    """A user's advantage: r - least reward of the group."""
    return [reward - rewards[groups == group].min() for reward, group in zip(rewards, groups)]


def test_groups_of_equal_rewards_are_dropped_only_where_attempts_are_compared() -> None:
    assert assign(LearnerConfig(advantage="dr_grpo"), EPISODES, GROUPS).keep.tolist() == [0, 1, 2]
    assert assign(LearnerConfig(advantage="dr_grpo", drop_no_signal=False), EPISODES, GROUPS).keep.tolist() == [
        *range(5)
    ]
    assert assign(LearnerConfig(advantage="reinforce_pp"), EPISODES, GROUPS).keep.tolist() == [*range(5)]
    mine = LearnerConfig(advantage="tests.training.test_credit:above_the_group")
    assert assign(mine, EPISODES, GROUPS).keep.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("drop", "flat"), [(True, 0), (False, 4)])
def test_reinforce_pp_baseline_is_white_over_all_tokens_that_are_learned_from(drop: bool, flat: int) -> None:
    credit = assign(LearnerConfig(advantage="reinforce_pp_baseline", drop_no_signal=drop), EPISODES, GROUPS)
    masks = [s.loss_mask for e in EPISODES for s in e.sequences]
    trained = np.concatenate([values[mask] for values, mask in zip(credit.advantages, masks)])
    # Four tokens of +1/2, one of -1/2, and four of the flat group, which are 0 before where they are learned from.
    raw = np.asarray([0.5] * 4 + [-0.5] + [0.0] * flat)
    np.testing.assert_allclose(trained[: 5 + flat], (raw - raw.mean()) / raw.std(), rtol=1e-5)
    assert not trained[5 + flat :].any()
    assert credit.keep.tolist() == ([0, 1, 2] if drop else [*range(5)])


def test_episodes_that_are_left_out_count_in_their_group() -> None:
    episodes = [EPISODES[0], episode(0, SHORT, invalid=True), episode(0, LONG, truncated=True), EPISODES[3]]
    settings = LearnerConfig(advantage="dr_grpo", leave_out=("void_turns", "overlong"))
    credit = assign(settings, episodes, GROUPS)
    assert credit.keep.tolist() == [0, 1, 4]
    assert [values.max() for values in credit.advantages] == [0.5, 0.5, 0, 0, 0.5]
    assert credit.metrics["actor/left_out/void_turns"] == credit.metrics["actor/left_out/overlong"] == 0.25
    white = assign(dataclasses.replace(settings, advantage="reinforce_pp"), episodes, GROUPS)
    assert not white.advantages[2].any()  # neither in the mean nor in the result
    with pytest.raises(ValueError, match="unknown episode mask 'void'"):
        LearnerConfig(leave_out=("void",))


def test_divergence_of_tokens() -> None:
    """Against a reference that finds every token 0.5 less likely, a token pays for itself and what follows."""
    settings = LearnerConfig(advantage="dr_grpo", reward_kl_coef=0.1, reward_kl="token")
    reference = [s.logprobs - 0.5 for e in EPISODES for s in e.sequences]
    credit = assign(settings, EPISODES, GROUPS, reference)
    np.testing.assert_allclose(credit.advantages[1], [0, 0.5 - 0.15, 0, 0.5 - 0.1, 0.5 - 0.05], rtol=1e-5)
    np.testing.assert_allclose(credit.advantages[3], [0, -0.15, 0, -0.1, -0.05], rtol=1e-5)
    assert credit.keep.tolist() == [*range(5)]  # equal rewards, and yet something to learn
    assert credit.metrics["reward/kl"] == pytest.approx((4 + 1 + 3 + 1) * 0.5 / 4)
    whole = assign(dataclasses.replace(settings, reward_kl="episode"), EPISODES, GROUPS, reference)
    np.testing.assert_allclose(whole.advantages[1][1], 0.5 - 0.1 * (2.0 - 1.25), rtol=1e-5)


@pytest.mark.parametrize("leave_out", [(), ("void_turns", "overlong")])
@pytest.mark.parametrize("reward_kl", ["off", "episode", "token"])
@pytest.mark.parametrize("advantage", sorted(ADVANTAGES))
def test_credit_is_that_of_the_equations(advantage: str, reward_kl: str, leave_out: tuple[str, ...]) -> None:
    """Twenty ragged episodes in groups of unequal size, each with every setting at once; float32 results, so 2e-5."""
    rng = np.random.default_rng(7)
    groups = np.sort(rng.integers(0, 6, 20))
    episodes = [
        episode(
            float(rng.integers(0, 3)),
            *(sequence([False, *(rng.random(rng.integers(1, 9)) < 0.6)], -rng.uniform(0.1, 2)) for _ in range(i % 3)),
            invalid=i in (3, 11),
            truncated=i in (3, 16),
        )
        for i in range(20)
    ]
    sequences, owner = sequences_of(episodes)
    reference, current = ([s.logprobs + rng.normal(size=len(s)) for s in sequences] for _ in range(2))
    settings = LearnerConfig(
        advantage=advantage,
        reward_kl_coef=0.0 if reward_kl == "off" else 0.1,
        reward_kl="token" if reward_kl == "token" else "episode",
        leave_out=leave_out,
        importance_cap=1.5,
    )
    found = assign(settings, episodes, groups, reference)
    found = correct(settings, found, sequences, [current[i] for i in found.keep])

    to_go = [equations.divergence_to_go(s.logprobs, r, s.loss_mask) for s, r in zip(sequences, reference)]
    rewards = [e.rewards["total"] for e in episodes]
    if reward_kl == "episode":
        for i, kl in zip(owner, to_go):
            rewards[i] -= 0.1 * kl[0]
    numbers = equations.advantages(advantage, rewards, groups.tolist())
    out = {3, 11, 16} if leave_out else set()
    if advantage != "reinforce_pp" and reward_kl != "token":
        out |= {i for i in range(20) if np.ptp([r for r, g in zip(rewards, groups) if g == groups[i]]) == 0}
    values = {
        (i, t): numbers[owner[i]] - (0.1 * to_go[i][t] if reward_kl == "token" else 0.0)
        for i, s in enumerate(sequences)
        for t in np.flatnonzero(s.loss_mask)
        if owner[i] not in out
    }
    if advantage.startswith("reinforce_pp"):
        values = dict(zip(values, equations.whitened(list(values.values()))))
    for (i, t), value in values.items():
        factor = min(np.exp(current[i][t] - sequences[i].logprobs[t]), 1.5)
        assert found.advantages[i][t] == pytest.approx(value * factor, rel=2e-5, abs=2e-5)
    for s, given in zip(sequences, found.advantages):
        assert not given[~s.loss_mask].any()
    # without a token of the policy there is nothing to train on
    assert found.keep.tolist() == [i for i, s in enumerate(sequences) if owner[i] not in out and s.loss_mask.any()]


def nothing(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """A user's advantage with 0 / 0 in it."""
    return (rewards - rewards) / np.zeros(len(rewards))


def one(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """A user's advantage that is one number for all."""
    return rewards.mean()


def test_what_can_t_be_learned_from_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"the reward of attempt 0 at question 'e' is nan, where its rewards are \{'total'"
    ):
        assign(LearnerConfig(), [*EPISODES[:3], episode(float("nan"), SHORT)], GROUPS)
    with pytest.raises(ValueError, match="the reward of attempt 0 at question 'e' is inf"):
        assign(LearnerConfig(), [*EPISODES[:3], episode(float("inf"), SHORT)], GROUPS)
    module = "tests.training.test_credit"
    with (
        np.errstate(invalid="ignore"),
        pytest.raises(ValueError, match=rf"the advantage \({module}:nothing\) of attempt 0"),
    ):
        assign(LearnerConfig(advantage=f"{module}:nothing"), EPISODES, GROUPS)
    with pytest.raises(
        ValueError, match=r"gave an array of shape \(\) for 4 rewards: it must give one number for each"
    ):
        assign(LearnerConfig(advantage=f"{module}:one"), EPISODES, GROUPS)
    with pytest.raises(ValueError, match="reward_kl_coef is set, which takes the reference's log-probabilities"):
        assign(LearnerConfig(reward_kl_coef=0.1), EPISODES, GROUPS)


@pytest.mark.parametrize("advantage", sorted(ADVANTAGES))
def test_steps_without_a_trained_token(advantage: str) -> None:
    """Episodes of fed tokens alone, or of nothing at all (a prompt that was too long)."""
    fed = sequence([False, False], 0.0)
    for episodes in ([episode(1, fed), episode(0, fed)], [episode(1), episode(0)]):
        sequences, _ = sequences_of(episodes)
        logprobs = [s.logprobs for s in sequences]
        settings = LearnerConfig(advantage=advantage, reward_kl_coef=0.1, importance_cap=2.0, mask_mean_ratio=1.5)
        credit = assign(settings, episodes, np.zeros(2, int), logprobs)
        credit = correct(settings, credit, sequences, [logprobs[i] for i in credit.keep])
        assert not len(credit.keep)
        assert not any(values.any() for values in credit.advantages)
        assert "importance/mean" not in credit.metrics


def test_sequences_too_far_off_the_policy_are_left_out() -> None:
    """Tokens of ratio 2, 4 and 1 each: of LONG's three tokens the product is 8, 64 and 1, the geometric mean 2, 4 and 1."""
    episodes = [episode(reward, LONG) for reward in (1.0, 0.0, 1.0)] + [episode(0.0, SHORT)]
    sequences, _ = sequences_of(episodes)
    current = [s.logprobs + np.log(ratio) for s, ratio in zip(sequences, (2.0, 4.0, 1.0, 4.0))]
    plain = assign(LearnerConfig(advantage="dr_grpo"), episodes, np.zeros(4, int))
    for settings, kept, masked in (
        ({"mask_sequence_ratio": 10.0}, [0, 2, 3], {"sequence": 1 / 4}),
        ({"mask_mean_ratio": 3.0}, [0, 2], {"mean": 2 / 4}),
        ({"mask_sequence_ratio": 5.0, "mask_mean_ratio": 3.0}, [2], {"sequence": 2 / 4, "mean": 2 / 4}),
    ):
        credit = correct(LearnerConfig(importance_cap=3.0, **settings), plain, sequences, current)
        assert credit.keep.tolist() == kept
        assert {name: credit.metrics[f"importance/masked/{name}"] for name in masked} == masked
        tokens = [3, 3, 3, 1]
        left = sum(tokens[i] for i in kept)
        assert credit.metrics["importance/masked_tokens"] == pytest.approx(1 - left / 10)
        factors = [2.0, 3.0, 1.0, 3.0]  # at the cap: the second and the last
        assert credit.metrics["importance/mean"] == pytest.approx(sum(tokens[i] * factors[i] for i in kept) / left)
        capped = sum(tokens[i] for i in kept if i in (1, 3))
        assert credit.metrics["importance/capped_share"] == pytest.approx(capped / left)
        logs = 3 * np.log(2) + 3 * np.log(4) + np.log(4)
        assert credit.metrics["importance/kl"] == pytest.approx(-logs / 10, rel=1e-5)
        for i, factor in enumerate(factors):
            np.testing.assert_allclose(credit.advantages[i], plain.advantages[i] * factor, rtol=1e-5)


def test_limits_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match=r"config.learner.mask_mean_ratio=0.99 is the largest ratio, above 1"):
        LearnerConfig(mask_mean_ratio=0.99)
    with pytest.raises(ValueError, match=r"mask_sequence_ratio does not go with credit='counterfactual'"):
        LearnerConfig(credit="counterfactual", advantage="dr_grpo", mask_sequence_ratio=2.0)
    with pytest.raises(ValueError, match=r"aggregation_tokens=64 is of aggregation='constant', and it is 'token'"):
        LearnerConfig(aggregation_tokens=64)
    with pytest.raises(ValueError, match=r"loss.ratio='geometric' does not go with config.learner.share_prefixes"):
        LearnerConfig(loss=LossConfig(ratio="geometric"), share_prefixes=True)


def test_the_learner_s_logprobs_replace_the_sampler_s_on_trained_tokens() -> None:
    other, replaced = with_logprobs([LONG, LONG], np.asarray([1]), [np.full(5, -2.0, np.float32)])
    assert replaced.logprobs.tolist() == [0, -2, 0, -2, -2]
    assert other is LONG
    assert LONG.logprobs[1] == -0.5


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match=r"std_floor=0\.1: advantage='rloo' divides by no standard deviation"):
        LearnerConfig(advantage="rloo", std_floor=0.1)
    with pytest.raises(ValueError, match=r"importance_cap=-1\.0 must not be negative"):
        LearnerConfig(importance_cap=-1.0)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"aggregation": "token"}, "aggregation='token': a sequence is one term"),
        ({"aggregation": "constant"}, "aggregation='constant': a sequence is one term"),
        ({"credit": "turn"}, "credit='turn': its tokens have advantages of their own"),
        ({"credit": "counterfactual"}, "credit='counterfactual': its tokens have"),
        ({"reward_kl_coef": 0.1, "reward_kl": "token"}, "reward_kl='token': its tokens have"),
        ({"importance_cap": 2.0}, r"importance_cap=2.0: it weighs tokens one by one; set it to 0"),
        ({"share_prefixes": True}, "share_prefixes=True: the tokens of a sequence then lie apart"),
    ],
)
def test_what_does_not_go_with_the_ratio_of_a_sequence(settings: dict[str, Any], complaint: str) -> None:
    whole = LossConfig(ratio="sequence")
    with pytest.raises(
        ValueError, match=rf"config.learner.loss.ratio='sequence' does not go with config.learner.{complaint}"
    ):
        LearnerConfig(**{"loss": whole, "aggregation": "sequence", **settings})
    assert LearnerConfig(loss=whole, aggregation="sequence", reward_kl_coef=0.1).loss.ratio == "sequence"


def test_losses_without_a_ratio_of_sequences() -> None:
    with pytest.raises(ValueError, match=r"ratio='sequence' with loss.kind='reinforce', which has no ratio"):
        LossConfig(ratio="sequence", kind="reinforce")
    with pytest.raises(ValueError, match=r"ratio='sequence' with loss.kind='cispo'"):
        LossConfig(ratio="sequence", kind="cispo")
    with pytest.raises(ValueError, match=r"loss.dual_clip=3.0 bounds the loss of kind='clip', not of 'cispo'"):
        LossConfig(kind="cispo", dual_clip=3.0)
    with pytest.raises(ValueError, match=r"loss.dual_clip=1.1 is a ratio above 1 \+ loss.clip_high=1.2"):
        LossConfig(dual_clip=1.1)
    with pytest.raises(ValueError, match=r"min_entropy=0.2 leaves tokens out"):
        LossConfig(ratio="sequence", min_entropy=0.2)
    with pytest.raises(ValueError, match="ratio='turn' must be 'token', 'sequence' or 'geometric'"):
        LossConfig(ratio="turn")  # type: ignore[arg-type]


def test_what_belongs_together_is_in_one_mini_batch() -> None:
    """Groups of unequal sizes, of which some sequences are left out: each kept one is in one portion, with all of its group."""
    rng = np.random.default_rng(0)
    groups = rng.integers(0, 12, 90)
    keep = np.flatnonzero(rng.random(90) < 0.8)
    parts = portions(keep, 3, np.random.default_rng(1), groups)
    assert sorted(np.concatenate(parts)) == sorted(keep)
    assert sum(len(set(groups[part])) for part in parts) == len(set(groups[keep]))
    assert all(len(keep) / 3 - 12 < len(part) < len(keep) / 3 + 12 for part in parts)
