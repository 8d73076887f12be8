"""Sequences whose beginnings are computed once: who sees whom, and equality with sequences that are computed apart."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
import pytest

from routerl_jax.core.ledger import Ledger
from routerl_jax.core.types import Sequence
from routerl_jax.learning import batch as batches
from routerl_jax.learning.batch import BatchLayout, Bundle, bundles
from routerl_jax.learning.learner import Learner
from routerl_jax.learning.losses import LossConfig
from routerl_jax.parallel.mesh import make_mesh
from tests import tiny


def forked(
    rng: np.random.Generator, prompt: int = 12, prefix: int = 9, rest: int = 14, ways: int = 3
) -> list[Sequence]:
    """An attempt that was forked: the first way owns what was sampled before; one way forks once more."""
    trunk = Ledger()
    trunk.feed(rng.integers(0, tiny.VOCABULARY, prompt).tolist())
    asked = rng.integers(0, tiny.VOCABULARY, prefix).tolist()

    def sample(ledger: Ledger, tokens: list[int]) -> None:
        ledger.sample(tokens, rng.uniform(-7, -4, len(tokens)).tolist(), 0)

    result = []
    for way in range(ways):
        ledger = trunk.copy()
        if way:
            ledger.feed(asked)
        else:
            sample(ledger, asked)
        sample(ledger, [way, 3])
        ledger.feed(rng.integers(0, tiny.VOCABULARY, rest).tolist())
        if way == 1:
            again = Ledger()
            again.feed(ledger.tokens)
            sample(again, [7, *rng.integers(0, tiny.VOCABULARY, 4).tolist()])
            sample(ledger, [8, *rng.integers(0, tiny.VOCABULARY, 6).tolist()])
            result.append(again.sequence())
        else:
            sample(ledger, rng.integers(0, tiny.VOCABULARY, 5).tolist())
        result.append(ledger.sequence())
    return result


def seen_by(bundle: Bundle, slot: int) -> set[int]:
    ids, ends, _ = bundle.segments(first=5)
    return {key for key in range(slot + 1) if ids[key] <= ids[slot] < ends[key]}


def test_a_token_sees_its_own_sequence_and_nothing_else() -> None:
    """Random tries, deep ones among them: every token of every member sees just the slots of the tokens before it."""
    rng = np.random.default_rng(3)
    nested = 0
    for _ in range(30):
        paths = [rng.integers(0, 2, rng.integers(4, 9)) for _ in range(6)]
        sequences = [of_tokens(np.concatenate([np.full(3, 9), path])) for path in paths]
        made = bundles(sequences, [np.zeros(len(s)) for s in sequences], longest=60, least=2)
        assert sorted(i for bundle in made for i in bundle.members) == list(range(6))
        for bundle in made:
            nested += sum(parent > 0 for parent in bundle.parents)
            assert len(bundle) == len({slot for slots in bundle.slots for slot in slots.tolist()})
            for member, slots in zip(bundle.members, bundle.slots):
                for at, slot in enumerate(slots):
                    assert seen_by(bundle, slot) == set(slots[: at + 1].tolist()), (member, at)
    assert nested > 10


def of_tokens(tokens: np.ndarray) -> Sequence:
    ledger = Ledger()
    ledger.feed(tokens.tolist())
    return ledger.sequence()


def test_what_is_shared() -> None:
    """All but the last common token, unless two are trained on the same token, or positions or the row's length forbid it."""
    long, other = np.arange(20), np.concatenate([np.arange(15), [77, 78]])
    pair = [of_tokens(long), of_tokens(other)]
    nothing = [np.zeros(20), np.zeros(17)]
    (bundle,) = bundles(pair, nothing, longest=64)
    assert (bundle.starts, len(bundle)) == ([0, 14], 20 + 3)
    both = [np.where(np.arange(len(w)) >= 12, 1.0, 0.0) for w in nothing]
    assert bundles(pair, both, longest=64)[0].starts == [0, 11]
    one = [both[0], nothing[1]]
    assert bundles(pair, one, longest=64)[0].starts == [0, 14]
    assert len(bundles(pair, nothing, longest=22)) == 2
    assert len(bundles(pair, nothing, longest=64, least=15)) == 2
    moved = dataclasses.replace(pair[1], positions=pair[1].positions + 1)
    assert len(bundles([pair[0], moved], nothing, longest=64)) == 2
    (whole,) = bundles([pair[0], of_tokens(long[:10])], [np.zeros(20), np.zeros(10)], longest=64)
    assert (whole.starts, len(whole)) == ([0, 9], 21)


def groups(questions: int, samples: int, system: int = 40) -> list[Sequence]:
    """Samples of several questions under one system prompt, in random order; token 40 names the question."""
    rng = np.random.default_rng(5)
    common = rng.integers(0, tiny.VOCABULARY, system).tolist()
    result = []
    for question in range(questions):
        for _ in range(samples):
            ledger = Ledger()
            ledger.feed([*common, question, *range(12)])
            answer = rng.integers(0, tiny.VOCABULARY, rng.integers(10, 20)).tolist()
            ledger.sample(answer, [-1.0] * len(answer), 0)
            result.append(ledger.sequence())
    return [result[i] for i in rng.permutation(len(result))]


def test_siblings_stay_together_under_a_common_system_prompt() -> None:
    """Four attempts fit a row, twenty questions begin alike: a row has one question's, its prompt once."""
    sequences = groups(questions=20, samples=4)
    made = bundles(sequences, [s.loss_mask for s in sequences], longest=53 + 4 * 20)
    assert sorted(i for bundle in made for i in bundle.members) == list(range(80))
    assert [len({int(sequences[i].tokens[40]) for i in bundle.members}) for bundle in made] == [1] * 20
    for bundle in made:
        assert len(bundle) == 52 + sum(len(sequences[i]) - 52 for i in bundle.members)
    everything = bundles(sequences, [s.loss_mask for s in sequences], longest=10_000)
    assert len(everything) == 1
    assert len(everything[0]) == 39 + 20 * 13 + sum(len(s) - 52 for s in sequences)


def test_a_row_that_other_training_fills_is_cut() -> None:
    """Neighbours could share, but not with all of a row: what does not fit then begins a row of its own."""
    first, middle, last = (of_tokens(np.append(np.arange(30), end)) for end in (50, 51, 52))
    weights = [np.where(np.arange(31) >= 12, one, 0.0) for one in (1.0, 0.0, 1.0)]
    (whole,) = bundles([first, middle, last], weights, longest=64)
    assert (whole.starts, len(whole)) == ([0, 29, 11], 31 + 2 + 20)
    assert [len(bundle) for bundle in bundles([first, middle, last], weights, longest=52)] == [33, 31]


def test_comparisons_grow_with_the_number_of_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, shared = [], batches._shared

    def counted(*args: Any) -> int:
        compared.append(args)
        return shared(*args)

    monkeypatch.setattr(batches, "_shared", counted)
    for questions in (16, 64):
        sequences = groups(questions, samples=8)
        compared.clear()
        bundles(sequences, [s.loss_mask for s in sequences], longest=256)
        assert len(compared) <= 2 * len(sequences)


def test_log_probabilities_and_gradients_are_those_of_sequences_apart() -> None:
    """Two trees and three sequences of a group with one prompt, in one update; float32, so 1e-5 of the largest gradient."""
    rng = np.random.default_rng(0)
    sequences = [*forked(rng), *forked(rng, prompt=20, ways=4), *tiny.random_sequences(3, seed=2)]
    weights = [s.loss_mask / sum(t.loss_mask.sum() for t in sequences) for s in sequences]
    advantages = [rng.normal(size=len(s)).astype(np.float32) * s.loss_mask for s in sequences]
    mesh = make_mesh(devices=jax.devices()[:1])
    found = {}
    for share in (False, True):
        layout = BatchLayout(mesh, (160,), 320, tiny.model(), share=share)
        learner = Learner(tiny.model(), optax.sgd(1.0), LossConfig(), layout)
        before = jax.tree.map(np.asarray, learner.state.params)
        batch, index = layout.build(sequences, weights, advantages)
        metrics, logprobs = learner.update(batch)
        gradient = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), before, learner.state.params)
        found[share] = (index.split(logprobs), jax.tree.leaves(gradient), metrics["loss"], index.tokens)
    for apart, together in zip(found[False][0], found[True][0]):
        np.testing.assert_allclose(together, apart, atol=1e-5)
    for apart, together in zip(found[False][1], found[True][1]):
        np.testing.assert_allclose(together, apart, atol=1e-5 * max(1.0, float(np.abs(apart).max())))
    assert max(np.abs(leaf).max() for leaf in found[False][1]) > 1e-2
    assert found[True][2] == pytest.approx(found[False][2], abs=1e-6)
    assert found[False][3] == sum(map(len, sequences))
    assert found[True][3] < 0.7 * found[False][3]


def searching(rng: np.random.Generator, samples: int) -> list[Sequence]:
    """Samples of one question of which some write the same query, read the same passages, and answer differently."""
    question, queries = rng.integers(0, tiny.VOCABULARY, 12).tolist(), rng.integers(0, tiny.VOCABULARY, (2, 10))
    passages, odds = rng.integers(0, tiny.VOCABULARY, (2, 30)), rng.uniform(-7, -4, (2, 10))
    result = []
    for sample in range(samples):
        ledger, chosen = Ledger(), int(sample % 3 == 2)
        ledger.feed(question)
        ledger.sample(queries[chosen].tolist(), odds[chosen].tolist(), 0)
        ledger.feed(passages[chosen].tolist())
        ledger.sample(rng.integers(0, tiny.VOCABULARY, 3).tolist(), rng.uniform(-7, -4, 3).tolist(), 0)
        result.append(ledger.sequence())
    return result


@pytest.mark.parametrize(
    "loss",
    [
        LossConfig(clip_low=0.2, clip_high=0.28, kl_coef=0.1, entropy_coef=0.01),
        LossConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0, min_entropy=1.0),
        LossConfig(kind="cispo"),
        LossConfig(kind="reinforce"),
    ],
)
def test_sequences_that_are_trained_on_the_same_tokens(loss: LossConfig) -> None:
    """A query that several sampled, some with success: gradients are those of sequences apart, in two fifths of the tokens.

    The ratios are from 1/20 to 20, so clips take effect on both sides.
    """
    rng = np.random.default_rng(2)
    sequences = searching(rng, samples=9)
    weights = [s.loss_mask * rng.uniform(0.5, 1.0) / 100 for s in sequences]
    advantages = [(rng.normal(size=len(s)) + rng.normal()).astype(np.float32) * s.loss_mask for s in sequences]
    reference = [np.where(s.loss_mask, s.logprobs + 0.3, 0.0).astype(np.float32) for s in sequences]
    found = {}
    for share in (False, True):
        layout = BatchLayout(make_mesh(devices=jax.devices()[:1]), (256,), 512, tiny.model(), share=share)
        learner = Learner(tiny.model(), optax.sgd(1.0), loss, layout)
        before = jax.tree.map(np.asarray, learner.state.params)
        batch, index = layout.build(sequences, weights, advantages, reference, merge=loss.merges)
        metrics, logprobs = learner.update(batch)
        gradient = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), before, learner.state.params)
        found[share] = (index.split(logprobs), jax.tree.leaves(gradient), metrics, index.tokens)
    for apart, together in zip(found[False][0], found[True][0]):
        np.testing.assert_allclose(together, apart, atol=1e-5)
    for apart, together in zip(found[False][1], found[True][1]):
        np.testing.assert_allclose(together, apart, atol=1e-5 * max(1.0, float(np.abs(apart).max())))
    assert max(np.abs(leaf).max() for leaf in found[False][1]) > 1e-2
    assert loss.kind == "reinforce" or found[False][2]["clip_fraction"] > 0.1
    counted = {"clip_fraction"}  # a shared token counts as clipped if one of its sequences is
    for name in found[False][2].keys() - counted:
        assert found[True][2][name] == pytest.approx(found[False][2][name], abs=1e-5), name
    assert found[True][3] < 0.4 * found[False][3]


def test_tokens_of_another_policy_are_not_merged() -> None:
    """One token that was sampled at another log-probability parts the sequences there. So does a loss of one's own."""
    sequences = searching(np.random.default_rng(2), samples=2)
    moved = dataclasses.replace(sequences[1], logprobs=sequences[1].logprobs + np.where(np.arange(55) == 15, 0.01, 0.0))
    weights = [s.loss_mask.astype(float) for s in sequences]
    (whole,) = bundles(sequences, weights, longest=256, merge=True)
    assert whole.starts == [0, 51]
    (parted,) = bundles([sequences[0], moved], weights, longest=256, merge=True)
    assert parted.starts == [0, 14]
    (apart,) = bundles(sequences, weights, longest=256)
    assert apart.starts == [0, 11]
    assert not LossConfig(kind="clip", ratio="geometric").merges


def test_windows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"share_prefixes: layers of a mistral model see a window of 16 tokens"):
        BatchLayout(
            make_mesh(devices=jax.devices()[:1]), (64,), 64, tiny.model(model_type="mistral", window=16), share=True
        )
