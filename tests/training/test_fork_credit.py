"""Credit in a tree of attempts, by hand: whose tokens are whose, and what each is reinforced by."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routerl_jax.core.types import Branch, Episode, Example, Sequence
from routerl_jax.learning.logprobs import Scores
from routerl_jax.learning.losses import LossConfig, objective
from routerl_jax.training.config import (
    ForkCreditConfig,
    KnowledgeConfig,
    LearnerConfig,
    ModelConfig,
    RolloutConfig,
    TrainConfig,
)
from routerl_jax.training.credit import Credit, assign, sequences_of
from routerl_jax.training.finer_credit import fork_metrics, sample_branches, trees

HALF = np.log(0.5)


def leaf(sample: int, reward: float, way: tuple[str, ...], trained: tuple[int, ...], question: str = "q") -> Episode:
    """An episode of 12 tokens: 2 of the prompt, 2 before each decision, 1 for each choice; `trained` are its own.

    0 1 | 2 3 (4) | 5 6 (7) | 8 9 10 11, or with one decision 0 1 | 2 3 (4) | 5 .. 11. `text` has probability 1/2 at the first
    decision and 1/5 at the second, each out of 1/2 and 1/5 + 4/5 that names have.
    """
    odds = [{"text": HALF, "table": HALF}, {"text": np.log(0.2), "table": np.log(0.8)}]
    branches = [
        Branch(tool=tool, turn=i, sequence=0, start=4 + 3 * i, tokens=1, logprob=float(odds[i][tool]))
        for i, tool in enumerate(way)
    ]
    mask = np.isin(np.arange(12), trained)
    sequence = Sequence(
        tokens=np.arange(12, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -1.0, 0).astype(np.float32),
        positions=np.zeros((3, 12), np.int32),
        versions=np.where(mask, 0, -1).astype(np.int32),
    )
    example = Example(id=question, question="?", answers=("a",))
    return Episode(
        example=example,
        sample=sample,
        answer=None,
        turns=[],
        sequences=[sequence],
        rewards={"total": reward},
        branches=tuple(branches),
    )


ALL, REST, LAST = tuple(range(2, 12)), tuple(range(4, 12)), tuple(range(7, 12))
# Attempt 0: values of the second decisions are 0.2 * 1 + 0.8 * 0 = 0.2 and 0.2 * 0.5 + 0.8 * 1 = 0.9; of the first 0.55.
TREE = [
    leaf(0, 1.0, ("text", "text"), ALL),
    leaf(0, 0.0, ("text", "table"), LAST),
    leaf(0, 0.5, ("table", "text"), REST),
    leaf(0, 1.0, ("table", "table"), LAST),
]
# Attempt 1 is forked once: its first segment is worth 0.25.
OTHER = [leaf(1, 0.5, ("text",), ALL), leaf(1, 0.0, ("table",), REST)]
GROUPS = np.zeros(6, int)


def settings(**forks: str) -> LearnerConfig:
    return LearnerConfig(advantage="dr_grpo", credit="counterfactual", forks=ForkCreditConfig(**forks))  # type: ignore[arg-type]


def counted(credit: Credit) -> list[np.ndarray]:
    """Advantages as the loss counts them."""
    assert credit.reach is not None
    return [values * reach for values, reach in zip(credit.advantages, credit.reach, strict=True)]


def test_values_are_the_policy_s_expectations() -> None:
    first, second = trees([*TREE, *OTHER], np.asarray([e.rewards["total"] for e in (*TREE, *OTHER)]))
    assert first.value == pytest.approx(0.55)
    assert second.value == pytest.approx(0.25)
    assert {s.choices: s.value for s in first} == pytest.approx(
        {
            (): 0.55,
            ("text",): 0.2,
            ("text", "text"): 1.0,
            ("text", "table"): 0.0,
            ("table",): 0.9,
            ("table", "text"): 0.5,
            ("table", "table"): 1.0,
        }
    )


def test_every_token_s_advantage_by_hand() -> None:
    """Each times the probability of getting there: a half after the first decision, then a fifth or four fifths of it."""
    credit = assign(settings(compare="question"), [*TREE, *OTHER], GROUPS)
    mean = (0.55 + 0.2 + 1 + 0 + 0.9 + 0.5 + 1 + 0.25 + 0.5 + 0) / 10  # over all ten segments of the question
    expected = [
        [
            0,
            0,
            *[0.55 - mean] * 2,
            *[0.5 * x for x in (-0.35, 0.2 - mean, 0.2 - mean)],
            *[0.1 * x for x in (0.8, *[1 - mean] * 4)],
        ],
        [*[0] * 7, *[0.4 * x for x in (-0.2, *[0 - mean] * 4)]],
        [*[0] * 4, *[0.5 * x for x in (0.35, 0.9 - mean, 0.9 - mean)], *[0.1 * x for x in (-0.4, *[0.5 - mean] * 4)]],
        [*[0] * 7, *[0.4 * x for x in (0.1, *[1 - mean] * 4)]],
        [0, 0, *[0.25 - mean] * 2, *[0.5 * x for x in (0.25, *[0.5 - mean] * 7)]],
        [*[0] * 4, *[0.5 * x for x in (-0.25, *[0 - mean] * 7)]],
    ]
    for found, values in zip(counted(credit), expected):
        assert found == pytest.approx(np.asarray(values), abs=1e-6)
    # Shared tokens are in one sequence each: 10 + 5 + 8 + 5 in the first tree.
    assert [int((a != 0).sum()) for a in credit.advantages[:4]] == [10, 5, 8, 5]


def test_the_sum_over_a_tree_is_the_gradient_of_its_expected_reward() -> None:
    """By the logits of the three decisions, which the choices' tokens alone depend on."""
    credit = assign(settings(), TREE, np.zeros(4, int))
    rewards = jnp.asarray([[1.0, 0.0], [0.5, 1.0]])
    logits = jnp.log(
        jnp.asarray([[0.5, 0.5], [0.2, 0.8], [0.2, 0.8]])
    )  # the first decision, after `text`, after `table`

    def expected(logits: jax.Array) -> jax.Array:
        first, *second = jax.nn.softmax(logits)
        return sum(first[i] * (second[i] @ rewards[i]) for i in range(2))  # type: ignore[return-value]

    def weighted(logits: jax.Array) -> jax.Array:
        log = jax.nn.log_softmax(logits)
        text, after_text, table, after_table = counted(credit)
        first = text[4] * log[0, 0] + table[4] * log[0, 1]
        second = text[7] * log[1, 0] + after_text[7] * log[1, 1] + table[7] * log[2, 0] + after_table[7] * log[2, 1]
        return first + second

    np.testing.assert_allclose(jax.grad(weighted)(logits), jax.grad(expected)(logits), atol=1e-6)


def test_ways_may_count_alike() -> None:
    """A half at each decision, whatever the policy's probabilities."""
    credit = assign(settings(compare="question", weights="even"), [*TREE, *OTHER], GROUPS)
    found = counted(credit)
    assert found[1][7] == pytest.approx(0.25 * -0.2)
    assert found[3][7] == pytest.approx(0.25 * 0.1)
    assert found[2][4] == pytest.approx(0.5 * 0.35)


@pytest.mark.parametrize("kind", ["policy", "even"])
def test_the_kl_of_a_tree_is_the_policy_s(kind: str) -> None:
    """However ways count: the gradient of k2 over all choices' tokens is that of KL(pi, reference) at the decisions, each as
    often as the policy gets there."""
    credit = assign(settings(weights=kind), TREE, np.zeros(4, int))
    probabilities = jnp.asarray([[0.5, 0.5], [0.2, 0.8], [0.2, 0.8]])  # the first decision, after `text`, after `table`
    places = [(0, 4, (0, 0)), (2, 4, (0, 1)), (0, 7, (1, 0)), (1, 7, (1, 1)), (2, 7, (2, 0)), (3, 7, (2, 1))]
    sequences, _ = sequences_of(TREE)
    weights = credit.token_weights(sequences, np.arange(4), "constant", 0.25)  # 1 / (0.25 * 4), times the reach
    reference = jnp.log(jnp.asarray([[0.9, 0.1], [0.5, 0.5], [0.3, 0.7]]))

    def loss(logits: jax.Array) -> jax.Array:
        log = jax.nn.log_softmax(logits)
        fields = {
            "weights": jnp.asarray([weights[which][at] for which, at, _ in places]),
            "advantages": jnp.zeros(len(places)),
            "old_logprobs": jnp.zeros(len(places)),
            "ref_logprobs": jnp.stack([reference[place] for *_, place in places]),
        }
        logprobs = jnp.stack([log[place] for *_, place in places])
        return objective(LossConfig(kl="k2", kl_coef=1.0), Scores(logprobs, logprobs, logprobs), fields)[0]

    def divergence(logits: jax.Array) -> jax.Array:
        log = jax.nn.log_softmax(logits)
        each = (jnp.exp(log) * (log - reference)).sum(axis=1)
        return each @ jnp.asarray([1.0, 0.5, 0.5])

    np.testing.assert_allclose(
        jax.grad(loss)(jnp.log(probabilities)), jax.grad(divergence)(jnp.log(probabilities)), atol=1e-6
    )


def test_segments_may_be_compared_after_the_same_choices() -> None:
    """First segments 0.55 and 0.25; after `text` 0.2 and 0.5, after `table` 0.9 and 0; all deeper ones are alone."""
    credit = assign(settings(), [*TREE, *OTHER], GROUPS)
    first, _, third, _, fifth, sixth = counted(credit)
    half, fifth_of_it = 0.5, 0.1
    after = half * np.asarray([-0.35, -0.15, -0.15])
    assert first == pytest.approx(np.asarray([0, 0, 0.15, 0.15, *after, fifth_of_it * 0.8, 0, 0, 0, 0]), abs=1e-6)
    assert third[4:8] == pytest.approx([half * 0.35, half * 0.45, half * 0.45, fifth_of_it * -0.4], abs=1e-6)
    assert fifth[2:6] == pytest.approx([-0.15, -0.15, half * 0.25, half * 0.15], abs=1e-6)
    assert sixth[4:6] == pytest.approx([half * -0.25, half * -0.45], abs=1e-6)


def test_where_advantages_are_divided_choices_are_too() -> None:
    """batch_std: by the deviation of the rewards within their question, sqrt(mean((r - 0.5)**2)) = sqrt(1 / 6)."""
    plain = assign(settings(weights="even"), [*TREE, *OTHER], GROUPS).advantages
    scaled = assign(dataclasses.replace(settings(weights="even"), advantage="batch_std"), [*TREE, *OTHER], GROUPS)
    assert scaled.advantages[1][7] == pytest.approx(plain[1][7] / np.sqrt(1 / 6), rel=1e-4)


def test_the_deviation_may_be_the_question_s_own() -> None:
    """One whose ways differ by 0.1 counts as much as one whose ways differ by 1, down to the floor."""
    episodes = [
        leaf(i, reward, (tool,), own, question=f"{i}")
        for i, rewards in enumerate([(1.0, 0.0), (1.0, 0.9), (1.0, 0.98)])
        for tool, reward, own in zip(("text", "table"), rewards, (ALL, REST))
    ]
    config = dataclasses.replace(settings(weights="even", scale="question"), advantage="grpo", std_floor=0.02)
    groups = np.repeat(np.arange(3), 2)
    chosen = [values[4] for values in assign(config, episodes, groups).advantages]
    assert chosen == pytest.approx([1, -1, 1, -1, 0.5, -0.5], rel=1e-3)  # deviations of 0.5, 0.05, 0.01
    alike = dataclasses.replace(config, forks=ForkCreditConfig(weights="even"))
    deviation = np.sqrt(np.mean([0.5**2, 0.05**2, 0.01**2]))
    chosen = [values[4] for values in assign(alike, episodes, groups).advantages]
    assert chosen == pytest.approx([x / deviation for x in (0.5, -0.5, 0.05, -0.05, 0.01, -0.01)], rel=1e-3)


def test_an_attempt_that_was_not_forked_is_one_segment() -> None:
    episodes = [leaf(0, 1.0, (), ALL), leaf(1, 0.0, (), ALL)]
    credit = assign(settings(), episodes, np.zeros(2, int))
    assert credit.advantages[0][2:] == pytest.approx(0.5)
    assert credit.advantages[1][2:] == pytest.approx(-0.5)
    assert credit.metrics["forks/decisions"] == 0.0


def test_a_chat_that_is_all_past_is_not_learned_from() -> None:
    episodes = [dataclasses.replace(e, sequences=list(e.sequences)) for e in OTHER]
    past = dataclasses.replace(episodes[0].sequences[0], loss_mask=np.zeros(12, bool))
    episodes[1].sequences = [past, *episodes[1].sequences]
    episodes[1].branches = (dataclasses.replace(episodes[1].branches[0], sequence=1),)
    credit = assign(settings(weights="even"), episodes, np.zeros(2, int))
    assert credit.keep.tolist() == [0, 2]
    assert counted(credit)[2][4] == pytest.approx(0.5 * -0.25)


def test_a_question_on_which_no_way_differs_is_left_out() -> None:
    flat = [dataclasses.replace(e, rewards={"total": 0.5}) for e in (*TREE, *OTHER)]
    assert assign(settings(), flat, GROUPS).keep.tolist() == []


def test_what_forks_show() -> None:
    """Spreads 0.7, 1, 0.5 and 0.5; the best way has probability 1/2, 1/5, 4/5 and 1/2."""
    metrics = fork_metrics([*TREE, *OTHER], np.asarray([e.rewards["total"] for e in (*TREE, *OTHER)]))
    assert metrics == pytest.approx(
        {
            "forks/decisions": 2.0,
            "forks/spread": 2.7 / 4,
            "forks/best_rate": 2.0 / 4,
            "forks/regret": (0.35 + 0.8 + 0.1 + 0.25) / 4,
            "forks/even_rate": 0.0,
        }
    )


def test_one_way_is_drawn_as_the_policy_goes() -> None:
    drawn = np.asarray([sample_branches([*TREE, *OTHER], [0, i]) for i in range(2000)])
    share = [(drawn[:, 0] == i).mean() for i in range(4)]
    assert share == pytest.approx([0.1, 0.4, 0.1, 0.4], abs=0.04)  # three deviations of 2000 draws
    assert set(drawn[:, 1]) == {4, 5}
    assert sample_branches(TREE, [3, 1]) == sample_branches(TREE, [3, 1])


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match=r"advantage='reinforce_pp' does not go with credit='counterfactual'"):
        LearnerConfig(advantage="reinforce_pp", credit="counterfactual")
    with pytest.raises(ValueError, match=r"leave_out=\('void_turns',\) does not go with credit='counterfactual'"):
        LearnerConfig(leave_out=("void_turns",), credit="counterfactual")
    with pytest.raises(ValueError, match=r"reward_kl_coef does not go with credit='counterfactual'"):
        LearnerConfig(reward_kl_coef=0.1, credit="counterfactual")
    parts = {"model": ModelConfig(path="x"), "knowledge": {"text": KnowledgeConfig()}}
    with pytest.raises(ValueError, match=r"credit='counterfactual' and config.rollout.forks=0: attempts are forked"):
        TrainConfig(learner=LearnerConfig(credit="counterfactual"), **parts)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"credit='episode' and config.rollout.forks=1"):
        TrainConfig(rollout=RolloutConfig(forks=1), **parts)  # type: ignore[arg-type]
