"""Losses, KL estimators and aggregation against float64 numpy and their defining properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routerl_jax.learning.losses import POLICY_LOSSES, kl_estimate, token_weights

RNG = np.random.default_rng(0)
LOGPROBS, OLD, REF = (RNG.uniform(-6, -0.1, 400) for _ in range(3))
ADVANTAGES = RNG.normal(size=400)


def clip_reference(logprobs, old, advantages, low, high):
    ratio = np.exp(logprobs - old)
    return -np.minimum(ratio * advantages, np.clip(ratio, 1 - low, 1 + high) * advantages)


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.1, 5.0)])
def test_clipped_loss_and_its_gradient(low, high):
    def loss(logprobs):
        return POLICY_LOSSES.get("clip")(logprobs, jnp.asarray(OLD), jnp.asarray(ADVANTAGES), low, high)

    values, clipped = loss(jnp.asarray(LOGPROBS))
    np.testing.assert_allclose(values, clip_reference(LOGPROBS, OLD, ADVANTAGES, low, high), rtol=2e-5, atol=1e-6)
    gradient = np.asarray(jax.grad(lambda x: loss(x)[0].sum())(jnp.asarray(LOGPROBS)))
    ratio = np.exp(LOGPROBS - OLD)
    outside = ((ratio > 1 + high) & (ADVANTAGES > 0)) | ((ratio < 1 - low) & (ADVANTAGES < 0))
    assert (np.asarray(clipped) == outside).all()
    assert (gradient[outside] == 0).all()
    np.testing.assert_allclose(gradient[~outside], (-ratio * ADVANTAGES)[~outside], rtol=2e-5)
    assert 0 < outside.mean() < 1


def test_on_policy_gradient_is_the_policy_gradient():
    gradient = jax.grad(
        lambda x: POLICY_LOSSES.get("clip")(x, jnp.asarray(OLD), jnp.asarray(ADVANTAGES), 0.2, 0.2)[0].sum()
    )
    np.testing.assert_allclose(gradient(jnp.asarray(OLD)), -ADVANTAGES, rtol=1e-6)
    reinforce = POLICY_LOSSES.get("reinforce")
    gradient = jax.grad(lambda x: reinforce(x, jnp.asarray(OLD), jnp.asarray(ADVANTAGES), 0.2, 0.2)[0].sum())
    np.testing.assert_allclose(gradient(jnp.asarray(LOGPROBS)), -ADVANTAGES, rtol=1e-6)


def test_extreme_ratios_stay_finite():
    logprobs, old = jnp.asarray([0.0, -1e4]), jnp.asarray([-1e4, 0.0])
    loss = POLICY_LOSSES.get("clip")(logprobs, old, jnp.asarray([-1.0, 1.0]), 0.2, 0.2)[0]
    assert np.isfinite(np.asarray(loss)).all()
    assert np.isfinite(np.asarray(kl_estimate(logprobs, old, "k3"))).all()


def test_kl_estimators():
    difference = LOGPROBS - REF
    expected = {"k1": difference, "k2": difference**2 / 2, "k3": np.minimum(np.exp(-difference) - 1 + difference, 10.0)}
    for kind, values in expected.items():
        np.testing.assert_allclose(
            kl_estimate(jnp.asarray(LOGPROBS), jnp.asarray(REF), kind), values, rtol=1e-4, atol=1e-5
        )
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'"):
        kl_estimate(jnp.zeros(1), jnp.zeros(1), "k4")


def test_k1_and_k3_estimate_the_true_kl():
    """Averaged over samples of p, both equal KL(p || q) (to sampling error); k3 with a smaller spread."""
    p, q = (np.exp(x) / np.exp(x).sum() for x in (RNG.normal(size=50) * 0.4, RNG.normal(size=50) * 0.4))
    true = (p * np.log(p / q)).sum()
    ids = RNG.choice(50, 200_000, p=p)
    logp, logq = jnp.asarray(np.log(p)[ids]), jnp.asarray(np.log(q)[ids])
    k1, k3 = np.asarray(kl_estimate(logp, logq, "k1")), np.asarray(kl_estimate(logp, logq, "k3"))
    assert abs(k1.mean() - true) < 5 * k1.std() / np.sqrt(len(k1))
    assert abs(k3.mean() - true) < 5 * k3.std() / np.sqrt(len(k3))
    assert k3.std() < k1.std()


def test_token_weights():
    masks = [np.asarray([0, 1, 1, 0], bool), np.asarray([0, 1, 1, 1, 1, 1, 1], bool), np.zeros(3, bool)]
    token = token_weights(masks, "token")
    np.testing.assert_allclose(np.concatenate(token)[np.concatenate(masks)], 1 / 8)
    sequence = token_weights(masks, "sequence")
    np.testing.assert_allclose(
        [w.sum() for w in sequence], [0.5, 0.5, 0.0]
    )  # a sequence without trained tokens has no share
    constant = token_weights(masks, "constant", 10.0)
    np.testing.assert_allclose([w.sum() for w in constant], [2 / 20, 6 / 20, 0])
    for weights in (token, sequence, constant):
        assert all((w[~m] == 0).all() for w, m in zip(weights, masks))
    with pytest.raises(ValueError, match="unknown aggregation"):
        token_weights(masks, "mean")
