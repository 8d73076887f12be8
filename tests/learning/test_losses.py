"""Losses, KL estimators and aggregation: their defining properties (for their values: test_equations.py)."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routerl_jax.learning.logprobs import Scores
from routerl_jax.learning.losses import POLICY_LOSSES, LossConfig, kl_estimate, objective, token_weights

RNG = np.random.default_rng(0)
LOGPROBS, OLD = (RNG.uniform(-6, -0.1, 400) for _ in range(2))
ADVANTAGES = RNG.normal(size=400)


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


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'"):
        kl_estimate(jnp.zeros(1), jnp.zeros(1), "k4")
    with pytest.raises(ValueError, match="unknown aggregation"):
        token_weights([np.ones(2, bool)], "mean", 1.0)


def test_a_loss_of_one_s_own_must_return_the_loss_and_the_clipped_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("strange_losses")
    module.one = lambda new, old, advantages, low, high: -advantages * new  # type: ignore[attr-defined]
    module.sums = lambda new, old, advantages, low, high: ((-advantages * new).sum(), new > 0)  # type: ignore[attr-defined]
    module.fine = lambda new, old, advantages, low, high: (-advantages * new, new > 0)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "strange_losses", module)
    ones = jnp.ones((1, 3))
    scores = Scores(logprobs=-ones, entropies=ones, divergences=ones)
    fields: dict[str, jax.Array] = dict.fromkeys(("weights", "advantages", "old_logprobs", "ref_logprobs"), ones)
    assert float(objective(LossConfig(kind="strange_losses:fine"), scores, fields)[0]) == 3
    for name in ("one", "sums"):
        with pytest.raises(ValueError, match=f"loss.kind='strange_losses:{name}' must return two arrays of the shape"):
            objective(LossConfig(kind=f"strange_losses:{name}"), scores, fields)


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


def test_only_trained_tokens_have_weights():
    masks = [np.asarray([0, 1, 1, 0], bool), np.asarray([0, 1, 1, 1, 1, 1, 1], bool), np.zeros(3, bool)]
    for kind, sums in (
        ("token", [2 / 8, 6 / 8, 0]),
        ("sequence", [1 / 2, 1 / 2, 0]),
        ("constant", [2 / 20, 6 / 20, 0]),
    ):
        weights = token_weights(masks, kind, 10.0)
        np.testing.assert_allclose([w.sum() for w in weights], sums, rtol=1e-6)
        assert all((w[~m] == 0).all() for w, m in zip(weights, masks))
