"""Losses, weights, advantages and whole updates beside the papers' equations in float64 (tests.learning.equations)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from routerl_jax.learning.advantages import (
    ADVANTAGES,
    advantage_named,
    log_ratio_sums,
    outside,
    per_token,
    truncated_importance,
    whiten,
)
from routerl_jax.learning.batch import BatchLayout
from routerl_jax.learning.learner import Learner
from routerl_jax.learning.logprobs import Scores
from routerl_jax.learning.losses import LossConfig, objective, token_weights
from routerl_jax.parallel.mesh import make_mesh
from tests import tiny
from tests.learning import equations

CONSTANT = 24.0


def ragged(count: int, seed: int, *, whole: bool = False) -> list[equations.Tokens]:
    """Sequences of 2 to 29 tokens, about half of them trained, and one without any that is.

    Args:
      whole: a sequence has one advantage, and a probability so near to the old one that some ratios are clipped, some not.
    """
    rng = np.random.default_rng(seed)
    result = []
    for i in range(count):
        length = int(rng.integers(2, 30))
        trained = rng.random(length) < (0.0 if i == 1 else 0.5)
        made = equations.Tokens(
            trained=trained,
            logprobs=rng.uniform(-4, -0.05, length),
            old=rng.uniform(-4, -0.05, length),
            reference=rng.uniform(-4, -0.05, length),
            entropies=rng.uniform(0, 2, length),
            advantages=rng.normal(size=length),
        )
        if whole:
            near = np.asarray(made.logprobs) + rng.normal(size=length) * 0.3 / np.sqrt(max(trained.sum(), 1))
            made = dataclasses.replace(made, old=near, advantages=np.full(length, rng.normal()))
        result.append(made)
    return result


def as_rows(sequences: list[equations.Tokens], weights: list[np.ndarray], dtype: type) -> dict[str, jax.Array]:
    """Sequences one per row, padded with numbers that must not matter."""
    longest = max(len(s.trained) for s in sequences)
    segments = jnp.asarray([np.arange(longest) < len(s.trained) for s in sequences], jnp.int32)

    def rows(values: list[np.ndarray], padding: float) -> jax.Array:
        return jnp.asarray([np.pad(v, (0, longest - len(v)), constant_values=padding) for v in values], dtype)

    names = {"advantages": "advantages", "old_logprobs": "old", "ref_logprobs": "reference"}
    fields = {field: rows([getattr(s, name) for s in sequences], 7.0) for field, name in names.items()}
    fields |= {name: rows([getattr(s, name) for s in sequences], -3.0) for name in ("logprobs", "entropies")}
    return fields | {"weights": rows(weights, 0.0), "segment_ids": segments}


def check_objective(terms: equations.Terms, aggregation: str, dtype: type, tolerance: float) -> None:
    """Value and gradient of the learner's objective, tolerance relative to the largest number of either."""
    sequences = ragged(9, seed=len(repr(terms)), whole=terms.ratio != "token")
    if dtype is np.float32:
        weights = token_weights([s.trained for s in sequences], aggregation, CONSTANT)
    else:  # token_weights are float32
        lengths = [int(s.trained.sum()) for s in sequences]
        each = equations.weights(aggregation, lengths, CONSTANT)
        weights = [np.where(s.trained, weight, 0.0) for s, weight in zip(sequences, each)]
    fields = as_rows(sequences, weights, dtype)
    (value, metrics), slopes = jax.jit(
        jax.value_and_grad(
            lambda *scored: objective(LossConfig(**dataclasses.asdict(terms)), Scores(*scored, scored[0]), fields),
            argnums=(0, 1),
            has_aux=True,
        )
    )(fields["logprobs"], fields["entropies"])
    expected, *expected_slopes = equations.objective(terms, sequences, aggregation, CONSTANT)
    assert value.dtype == dtype
    np.testing.assert_allclose(value, expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(metrics["loss"], value)
    for found, wanted in zip(slopes, expected_slopes):
        scale = max(max(map(abs, row)) for row in wanted) or 1.0
        for row, wanted_row in zip(np.asarray(found), wanted):
            np.testing.assert_allclose(row[: len(wanted_row)], wanted_row, rtol=0, atol=tolerance * scale)
            assert not row[len(wanted_row) :].any()


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@pytest.mark.parametrize("kind", ["clip", "reinforce", "cispo"])
def test_objective_and_gradient(kind: str, kl: str, aggregation: str) -> None:
    """In float32 to 1e-5; in float64, where the code is the same, to 1e-12."""
    made = functools.partial(equations.Terms, kind=kind, kl=kl)
    everything = made(clip_high=0.28, kl_coef=0.3, entropy_coef=0.1, min_entropy=0.8)
    for terms in (made(), made(kl_coef=0.3), made(clip_high=0.28, entropy_coef=0.1), everything):
        check_objective(terms, aggregation, np.float32, 1e-5)
    with jax.enable_x64(True):
        check_objective(everything, aggregation, np.float64, 1e-12)


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_the_ratio_of_a_whole_sequence(kl: str) -> None:
    """RouteRAG's equation 5 and its gradient: in float32 to 1e-5, in float64 to 1e-12."""
    terms = equations.Terms(ratio="sequence", clip_high=0.28, kl=kl, kl_coef=0.3, entropy_coef=0.1)
    for seed_of in (terms, dataclasses.replace(terms, kl_coef=0.0)):
        check_objective(seed_of, "sequence", np.float32, 1e-5)
    with jax.enable_x64(True):
        check_objective(terms, "sequence", np.float64, 1e-12)


@pytest.mark.parametrize("kl", ["k1", "k3"])
def test_the_geometric_mean_of_a_sequence_s_ratios(kl: str) -> None:
    """GSPO's objective and its gradient, some sequences clipped: in float32 to 1e-5, in float64 to 1e-12."""
    terms = equations.Terms(ratio="geometric", clip_low=3e-2, clip_high=4e-2, kl=kl, kl_coef=0.3, entropy_coef=0.1)
    for seed_of in (terms, dataclasses.replace(terms, kl_coef=0.0)):
        check_objective(seed_of, "sequence", np.float32, 1e-5)
    with jax.enable_x64(True):
        check_objective(terms, "sequence", np.float64, 1e-12)


def test_the_geometric_mean_where_tokens_have_advantages_of_their_own() -> None:
    """GSPO-token: two sequences in one row, by numpy. The first's ratio, e^0.15, counts as 1.1 where the advantage is positive;
    the second's, e^-0.1, as it is. With CISPO the clipped tokens keep their gradients."""
    log_ratios = np.asarray([[0.1, 9.0, 0.2, -0.3, 0.4, -0.4, 0.0]], np.float32)
    trained = np.asarray([[1, 0, 1, 1, 1, 1, 0]], bool)
    old = -np.arange(1.0, 8.0, dtype=np.float32)[None]
    advantages = np.asarray([[1.0, 1, -1, 2, 0.5, -3, 0]], np.float32)
    fields = {
        "weights": jnp.where(trained, 0.2, 0.0),
        "advantages": jnp.asarray(advantages),
        "old_logprobs": jnp.asarray(old),
        "ref_logprobs": jnp.zeros((1, 7)),
        "segment_ids": jnp.asarray([[4, 4, 4, 7, 7, 7, 0]]),
    }
    ratios = np.exp(np.asarray([0.15] * 3 + [-0.1] * 3 + [0]))[None]
    held = np.minimum(ratios, 1.1)
    free = ~((advantages > 0) & (ratios > 1.1))
    wanted = {
        "clip": (-np.where(free, ratios, 1.1) * advantages, -np.where(free, ratios, 0) * advantages),
        "cispo": (-held * advantages * (old + log_ratios), -held * advantages),
    }
    for kind, (losses, slopes) in wanted.items():
        loss = LossConfig(kind=kind, ratio="geometric", clip_low=0.2, clip_high=0.1)
        value, found = jax.jit(jax.value_and_grad(lambda x, loss=loss: objective(loss, Scores(x, x, x), fields)[0]))(
            jnp.asarray(old + log_ratios)
        )
        assert float(value) == pytest.approx(0.2 * losses[trained].sum(), rel=1e-6)
        np.testing.assert_allclose(found, np.where(trained, 0.2 * slopes, 0), rtol=1e-6)


@pytest.mark.parametrize("ratio", ["token", "geometric"])
def test_dual_clip(ratio: str) -> None:
    """Ratios of the ragged sequences reach 50; above the bound, tokens with a negative advantage have no gradient."""
    terms = equations.Terms(ratio=ratio, clip_high=0.01, dual_clip=1.02, kl_coef=0.3)
    check_objective(terms, "sequence", np.float32, 1e-5)
    with jax.enable_x64(True):
        check_objective(terms, "sequence", np.float64, 1e-12)
    x, old = jnp.asarray([[-0.1, -0.1, -0.1]]), jnp.asarray([[-3.0, -0.2, -3.0]])
    fields = {"weights": jnp.ones((1, 3)), "advantages": jnp.asarray([[-2.0, -2.0, 2.0]]), "old_logprobs": old}
    fields["segment_ids"] = jnp.asarray([[1, 2, 3]])
    (value, metrics), slopes = jax.jit(
        jax.value_and_grad(
            lambda x: objective(LossConfig(ratio=ratio, dual_clip=3.0), Scores(x, x, x), fields), has_aux=True
        )
    )(x)
    assert float(value) == pytest.approx(6 + 2 * np.exp(0.1) - 2.4, rel=1e-6)
    np.testing.assert_allclose(slopes, [[0, 2 * np.exp(0.1), 0]], rtol=1e-6)
    assert metrics["clip_fraction"] == 2


def test_measured_entropy_is_no_part_of_the_loss() -> None:
    sequences = ragged(5, seed=3)
    fields = as_rows(sequences, token_weights([s.trained for s in sequences], "token", CONSTANT), np.float32)

    def measured(loss: LossConfig) -> tuple[float, float, np.ndarray]:
        (value, metrics), slopes = jax.jit(
            jax.value_and_grad(lambda x, y: objective(loss, Scores(x, y, x), fields), argnums=(0, 1), has_aux=True)
        )(fields["logprobs"], fields["entropies"])
        assert not np.asarray(slopes[1]).any()
        return float(value), metrics.get("entropy"), np.asarray(slopes[0])

    plain, none, slopes = measured(LossConfig())
    value, entropy, same = measured(LossConfig(measure_entropy=True))
    assert (value, none) == (plain, None)
    np.testing.assert_array_equal(same, slopes)
    every = np.concatenate([np.asarray(s.entropies)[s.trained] for s in sequences])
    assert float(entropy) == pytest.approx(every.mean(), rel=1e-5)


def test_the_ratio_of_a_whole_sequence_by_hand() -> None:
    """Two sequences in one row, A = 1 and -2. Their ratios: e^(0.1 + 0.2) is clipped to 1.28, e^(0.3 - 0.1 - 0.3) = e^-0.1 is
    not; by tokens, none of the first is clipped."""
    log_ratios = jnp.asarray([[0.1, 9.0, 0.2, 0.3, -0.1, -0.3, 0.0]])
    trained = jnp.asarray([[1, 0, 1, 1, 1, 1, 0]], bool)
    old = -jnp.arange(1.0, 8.0)[None]
    fields = {
        "weights": jnp.where(trained, jnp.asarray([[1 / 4, 0, 1 / 4, 1 / 6, 1 / 6, 1 / 6, 0]]), 0.0),
        "advantages": jnp.asarray([[1.0, 1, 1, -2, -2, -2, 0]]),
        "old_logprobs": old,
        "ref_logprobs": jnp.zeros((1, 7)),
        "segment_ids": jnp.asarray([[4, 4, 4, 7, 7, 7, 0]]),
    }
    loss = LossConfig(ratio="sequence", clip_high=0.28)
    (value, metrics), slopes = jax.jit(
        jax.value_and_grad(lambda logprobs: objective(loss, Scores(logprobs, logprobs, logprobs), fields), has_aux=True)
    )(old + log_ratios)
    second = float(np.exp(-0.1))
    assert value == pytest.approx((-1.28 + 2 * second) / 2, rel=1e-6)
    assert metrics["clip_fraction"] == pytest.approx(0.5)
    np.testing.assert_allclose(slopes, [[0, 0, 0, second, second, second, 0]], rtol=1e-6)


def test_where_sequences_lie_in_rows_changes_nothing() -> None:
    """Each alone in a row, and all in one row, in any order: the same loss, the same slopes."""
    sequences = ragged(7, seed=11, whole=True)
    weights = token_weights([s.trained for s in sequences], "sequence", CONSTANT)
    loss = LossConfig(ratio="sequence", clip_high=0.28, kl_coef=0.3)
    alone = as_rows(sequences, weights, np.float32)
    found = jax.jit(jax.value_and_grad(lambda x: objective(loss, Scores(x, x, x), alone)[0]))(alone["logprobs"])
    for order in (range(7), [3, 1, 6, 0, 5, 2, 4]):
        lengths = [len(sequences[i].trained) for i in order]
        packed = {
            name: jnp.concatenate([values[i, :n] for i, n in zip(order, lengths)])[None]
            for name, values in alone.items()
        }
        packed["segment_ids"] = jnp.asarray(np.repeat([9 + i for i in order], lengths))[None]
        value, slopes = jax.jit(
            jax.value_and_grad(lambda x, packed=packed: objective(loss, Scores(x, x, x), packed)[0])
        )(packed["logprobs"])
        assert float(value) == pytest.approx(float(found[0]), rel=1e-5)
        expected = np.concatenate([np.asarray(found[1])[i, :n] for i, n in zip(order, lengths)])
        np.testing.assert_allclose(slopes[0], expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("ratio", ["token", "sequence", "geometric"])
def test_slopes_of_the_equations_are_those_of_their_values(ratio: str) -> None:
    """Central differences; no token lies within the step of a kink."""
    least = 0.8 if ratio == "token" else 0.0
    terms = equations.Terms(ratio=ratio, clip_high=0.28, dual_clip=3, kl_coef=0.3, entropy_coef=0.1, min_entropy=least)
    sequences = ragged(3, seed=4, whole=ratio != "token")
    _, by_logprob, by_entropy = equations.objective(terms, sequences, "sequence", CONSTANT)
    step = 1e-5
    for name, slopes in (("logprobs", by_logprob), ("entropies", by_entropy)):
        for i, sequence in enumerate(sequences):
            for t, slope in enumerate(slopes[i]):
                values = []
                for moved in (step, -step):
                    numbers = np.array(getattr(sequence, name))
                    numbers[t] += moved
                    changed = [*sequences[:i], dataclasses.replace(sequence, **{name: numbers}), *sequences[i + 1 :]]
                    values.append(equations.objective(terms, changed, "sequence", CONSTANT)[0])
                assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, abs=1e-8)


# --- advantages --------------------------------------------------------------------------------------------------------

REWARDS = {
    "mixed": np.random.default_rng(0).normal(size=23),
    "right or wrong": np.random.default_rng(1).integers(0, 2, 23).astype(float),
    "all equal": np.full(23, 0.7),
}
UNEQUAL = np.asarray([0] * 5 + [3] * 1 + [1] * 8 + [2] * 2 + [0] * 3 + [9] * 1 + [4] * 3)  # two groups of one
GROUPS = {"unequal": UNEQUAL, "one group": np.zeros(23, int), "groups of one": np.arange(23)}


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@pytest.mark.parametrize("rewards", sorted(REWARDS))
@pytest.mark.parametrize("groups", sorted(GROUPS))
def test_advantages(name: str, rewards: str, groups: str) -> None:
    """The 1e-9 is for groups of equal rewards, whose float64 mean is off by an ulp that grpo divides by 1e-6."""
    for floor in (0.0, 0.3) if advantage_named(name).scaled else (0.0,):
        found = ADVANTAGES.get(name)(REWARDS[rewards], GROUPS[groups], **({"std_floor": floor} if floor else {}))
        wanted = equations.advantages(name, REWARDS[rewards].tolist(), GROUPS[groups].tolist(), floor)
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-9)


def test_tokens_pay_for_the_divergence_from_them_on() -> None:
    sequences = ragged(12, seed=2)
    numbers, masks = np.random.default_rng(3).normal(size=12), [s.trained for s in sequences]
    found = per_token(numbers, masks, [s.old - s.reference for s in sequences], 0.2)
    for values, number, s in zip(found, numbers, sequences):
        to_go = equations.divergence_to_go(s.old, s.reference, s.trained)
        np.testing.assert_allclose(
            values[s.trained], (number - 0.2 * np.asarray(to_go))[s.trained], rtol=1e-6, atol=1e-6
        )
        assert not values[~s.trained].any()


def test_whitening() -> None:
    """Over the trained tokens of all sequences; what is fed gets 0."""
    sequences = ragged(12, seed=5)
    masks = [s.trained for s in sequences]
    found = whiten([np.asarray(s.advantages) for s in sequences], masks)
    wanted = equations.whitened(np.concatenate([s.advantages[s.trained] for s in sequences]).tolist())
    np.testing.assert_allclose(np.concatenate(found)[np.concatenate(masks)], wanted, rtol=1e-6, atol=1e-6)
    assert not np.concatenate(found)[~np.concatenate(masks)].any()
    equal = whiten([np.full(len(mask), 0.3) for mask in masks], masks)
    assert np.abs(np.concatenate(equal)).max() < 1e-6
    assert whiten([np.ones(2)], [np.zeros(2, bool)])[0].tolist() == [0, 0]
    assert whiten([], []) == []


def test_ratios_of_sequences_and_their_limits() -> None:
    sequences = ragged(12, seed=13)
    learner, sampler = ([np.asarray(getattr(s, name)) for s in sequences] for name in ("logprobs", "old"))
    found = log_ratio_sums(learner, sampler, [s.trained for s in sequences])
    products = [np.prod((np.exp(p) / np.exp(q))[s.trained]) for s, p, q in zip(sequences, learner, sampler)]
    np.testing.assert_allclose(np.exp(found), products, rtol=1e-9)
    far = [not 1 / 10 <= product <= 10 for product in products]
    assert 0 < sum(far) < 12
    assert outside(found, 10.0).tolist() == far
    assert outside(np.asarray([np.nan, np.inf, 0.0]), 10.0).tolist() == [True, True, False]


def test_truncated_importance() -> None:
    s = ragged(1, seed=6)[0]
    wanted = [min(np.exp(p) / np.exp(q), 2.0) for p, q in zip(s.logprobs, s.old)]
    assert 0 < sum(value == 2 for value in wanted) < len(wanted)
    np.testing.assert_allclose(truncated_importance([s.logprobs], [s.old], 2.0)[0], wanted, rtol=1e-6)


# --- the learner -------------------------------------------------------------------------------------------------------

SEQUENCES = tiny.random_sequences(24, seed=8, turns=2, longest=12)
ROW, TEMPERATURE = 48, 0.7
UPDATES = {
    "token": equations.Terms(clip_high=0.28, kl_coef=0.05),
    "sequence": equations.Terms(kl="k2", kl_coef=0.1, entropy_coef=0.02, min_entropy=4.0),
    "constant": equations.Terms(kind="reinforce", kl="k1", kl_coef=0.1),
    "sequence, of whole sequences": equations.Terms(ratio="sequence", clip_high=0.28, kl_coef=0.05),
    "sequence, of geometric means": equations.Terms(ratio="geometric", clip_low=0.02, clip_high=0.03, kl_coef=0.05),
    "token, CISPO": equations.Terms(kind="cispo", clip_low=1.0, clip_high=1.0),
}


def one_per_row(params: nnx.State, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of every token but the first, log-probability and entropy under the policy, [rows, time - 1]."""
    full = jax.nn.log_softmax(nnx.merge(GRAPH, params)(tokens) / TEMPERATURE)[:, :-1]
    return jnp.take_along_axis(full, tokens[:, 1:, None], axis=2)[..., 0], -(jnp.exp(full) * full).sum(axis=-1)


GRAPH = nnx.split(tiny.model())[0]


def from_second(rows: list[np.ndarray] | list[list[float]]) -> jax.Array:
    """Values of every token but the first, padded, [rows, time - 1]."""
    return jnp.asarray([np.pad(np.asarray(row, np.float32)[1:], (0, ROW - len(row))) for row in rows])


@pytest.mark.parametrize("objective_of", sorted(UPDATES))
def test_an_update_is_a_step_down_the_equations(objective_of: str) -> None:
    """Packed on eight devices, in two micro-batches: the parameters move by minus the gradient, which is here the
    equations' slopes, pulled back through the model with one sequence in a row. 3e-6: float32 sums of 300 tokens."""
    terms, rng = UPDATES[objective_of], np.random.default_rng(9)
    aggregation = objective_of.split(",")[0]
    masks = [s.loss_mask for s in SEQUENCES]
    references = [np.where(m, s.logprobs + rng.normal(size=len(m)), 0) for s, m in zip(SEQUENCES, masks)]
    advantages = [rng.normal(size=len(m)) for m in masks]
    if terms.ratio != "token":
        advantages = [np.full(len(values), values[0]) for values in advantages]
    made = Learner(
        tiny.model(8),
        optax.sgd(1.0),
        LossConfig(**dataclasses.asdict(terms)),
        BatchLayout(make_mesh(devices=jax.devices()), (ROW,), 8 * ROW),
        temperature=TEMPERATURE,
    )
    given = SEQUENCES
    if terms.ratio != "token":  # as after a few updates, so that some ratios are clipped and some are not
        moved = [values + rng.normal(size=len(values)) * 0.1 for values in made.logprobs(SEQUENCES)]
        given = [
            dataclasses.replace(s, logprobs=np.where(m, values, 0).astype(np.float32))
            for s, m, values in zip(SEQUENCES, masks, moved)
        ]
    start = jax.tree.map(np.asarray, made.params)
    batch, _ = made.layout.build(given, token_weights(masks, aggregation, CONSTANT), advantages, references)
    assert int(batch.count) == 2
    metrics, _ = made.update(batch)

    tokens = jnp.asarray([np.pad(s.tokens, (0, ROW - len(s))) for s in SEQUENCES])
    scored, pull = jax.vjp(jax.jit(lambda params: one_per_row(params, tokens)), nnx.state(tiny.model(), nnx.Param))
    logprobs, entropies = (np.pad(np.asarray(values, np.float64), ((0, 0), (1, 0))) for values in scored)
    sequences = [
        equations.Tokens(
            trained=s.loss_mask,
            logprobs=logprobs[i],
            old=s.logprobs.astype(np.float64),
            reference=references[i],
            entropies=entropies[i],
            advantages=advantages[i],
        )
        for i, s in enumerate(given)
    ]
    loss, by_logprob, by_entropy = equations.objective(terms, sequences, aggregation, CONSTANT)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4, atol=1e-5)
    (gradient,) = pull((from_second(by_logprob), from_second(by_entropy)))
    size = float(optax.global_norm(gradient))
    np.testing.assert_allclose(metrics["grad_norm"], size, rtol=1e-4)
    jax.tree.map(
        lambda old, new, down: np.testing.assert_allclose(
            old - np.asarray(new), down, rtol=0, atol=3e-6 * max(1, size)
        ),
        start,
        made.params,
        gradient,
    )
