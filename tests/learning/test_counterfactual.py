"""Counterfactual advantages against numbers by hand and against the gradient that they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routerl_jax.learning.advantages import choice_advantages, probabilities, try_weights

VALUES, SHARE = np.asarray([1.0, 0.0, 0.5]), np.asarray([0.5, 0.25, 0.25])
LOGPROBS = np.log(SHARE) - 3.0  # e**-3 of all that the policy may write are names


def test_by_hand() -> None:
    """b = 0.625 under the policy, 0.5 in the mean."""
    assert probabilities(LOGPROBS) == pytest.approx(SHARE)
    differences = np.asarray([0.375, -0.625, -0.125])
    assert choice_advantages(VALUES, LOGPROBS) == pytest.approx(differences)
    assert choice_advantages(VALUES, LOGPROBS, "mean") == pytest.approx([0.5, -0.5, 0.0])
    assert choice_advantages(VALUES, LOGPROBS, "worst") == pytest.approx([1.0, 0.0, 0.5])
    assert choice_advantages(VALUES + 0.1, LOGPROBS, "worst") == pytest.approx([1.0, 0.0, 0.5])
    assert try_weights(LOGPROBS) == pytest.approx(SHARE)
    assert try_weights(LOGPROBS, "even") == pytest.approx([1 / 3] * 3)


def test_it_is_the_gradient_of_the_expected_value() -> None:
    """The sum of pi_r A_r grad log p_r is the gradient of sum pi_r V_r, pi over names; and a baseline changes nothing in it."""
    logits = jnp.asarray([0.3, -1.0, 0.8])
    values = jnp.asarray(VALUES, jnp.float32)
    expected = jax.grad(lambda x: jax.nn.softmax(x) @ values)(logits)
    log_p = np.asarray(jax.nn.log_softmax(logits), np.float64)
    for baseline in ("policy", "mean", "worst"):
        weights = jnp.asarray(try_weights(log_p) * choice_advantages(VALUES, log_p, baseline), jnp.float32)
        found = jax.grad(lambda x, w=weights: w @ jax.nn.log_softmax(x))(logits)
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_where_one_alternative_is_right_even_tries_end_at_choosing_it() -> None:
    """With the worst as the baseline. A choice that is all but never made is learnt at once; one that is certain, no more."""
    for right, expected in ((1e-4, 1 / 3), (0.5, 1 / 6), (1 - 1e-4, 0.0)):
        log_p = np.log([right, (1 - right) * 0.7, (1 - right) * 0.3])
        values = np.asarray([1.1, 0.1, 0.1])
        weights = try_weights(log_p, "even") * choice_advantages(values, log_p, "worst")
        found = jax.grad(lambda x, w=weights: w @ jax.nn.log_softmax(x))(jnp.asarray(log_p))
        assert found[0] == pytest.approx(expected, abs=1e-3)
        assert found.sum() == pytest.approx(0.0, abs=1e-6)


def test_equal_values_teach_nothing_and_far_odds_are_finite() -> None:
    assert choice_advantages(np.full(3, 0.7), LOGPROBS) == pytest.approx(0.0, abs=1e-12)
    far = choice_advantages(VALUES, np.asarray([-1e4, -1.0, -2.0]))
    assert np.isfinite(far).all()
    assert far[0] > 0.8
    assert try_weights(np.asarray([-1e4, -1.0, -2.0]))[0] == 0.0  # the policy never goes there
