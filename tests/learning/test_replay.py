"""The experts that the sampler chose, replayed by the learner. (How they are recorded: tests/engine/test_routes.py.)"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from routerl_jax.core.ledger import Ledger
from routerl_jax.core.types import FREE
from routerl_jax.engine.engine import Engine
from routerl_jax.learning.batch import BatchLayout
from routerl_jax.learning.learner import Learner
from routerl_jax.learning.losses import LossConfig, token_weights
from routerl_jax.models.experts import balance_loss
from routerl_jax.parallel.mesh import make_mesh
from tests import tiny
from tests.engine.test_routes import SPARSE, conversations


def test_replay_brings_learner_and_sampler_together() -> None:
    """Sampled in bfloat16, learned in float32: some choices flip, and the worst log-probabilities are those of such tokens.

    With replay, the distance in log-probability falls by more than a third in the mean, and its largest values more.
    """
    config = {**SPARSE, "layers": 4, "init_scale": 0.3}
    config["experts"] = dataclasses.replace(SPARSE["experts"], dense_layers=(), mlp=48)
    sampler = tiny.model(dtype=jnp.bfloat16, **config)
    sequences = conversations(Engine(sampler, rows=8, max_length=96, segment=8, routes=True), count=24)
    model = tiny.model(dtype=jnp.bfloat16, **config)
    model.compute_dtype = jnp.dtype(jnp.float32)  # the same weights

    def distances(replay: bool) -> np.ndarray:
        layout = BatchLayout(make_mesh(devices=jax.devices()[:1]), (96,), 96 * 24, model, replay=replay)
        learner = Learner(model, optax.sgd(0.1), LossConfig(), layout)
        found = learner.logprobs(sequences)
        return np.concatenate(
            [np.abs(one - sequence.logprobs)[sequence.loss_mask] for one, sequence in zip(found, sequences)]
        )

    free, replayed = distances(replay=False), distances(replay=True)
    assert len(free) > 400
    whole = jax.jit(model.forward)
    flips = []
    for sequence in sequences:
        chosen = whole(np.pad(sequence.tokens, (0, 96 - len(sequence)))[None]).routing.chosen[0, : len(sequence) - 1]
        flips.append((np.sort(chosen, -1) != np.sort(sequence.routes[:-1], -1)).any(-1).mean())
    assert 0.002 < np.mean(flips) < 0.2  # bfloat16 flips some choices and not most
    print(
        f"flips {np.mean(flips):.4f} free {free.mean():.5f} {free.max():.4f} replay {replayed.mean():.5f} {replayed.max():.4f}"
    )
    assert replayed.mean() < 0.67 * free.mean()
    assert replayed.max() < 0.5 * free.max()


@pytest.mark.slow
def test_an_update_with_replay_and_balance() -> None:
    """Routes change the gradient, their absence does not matter; the balance loss is added and its metrics are told."""
    model = tiny.model(**SPARSE)
    sequences = tiny.random_sequences(6)
    rng = np.random.default_rng(0)
    routed = [
        dataclasses.replace(s, routes=np.argsort(rng.random((len(s), 2, 8)), -1)[..., :2].astype(np.int16))
        for s in sequences
    ]
    weights = token_weights([s.loss_mask for s in sequences], "token", 10.0)

    def update(sequences: list, replay: bool, **loss: float) -> tuple[dict, np.ndarray]:
        layout = BatchLayout(make_mesh(devices=jax.devices()[:1]), (96,), 192, model, replay=replay)
        learner = Learner(model, optax.sgd(0.1), LossConfig(**loss), layout)
        batch, index = layout.build(sequences, weights, [1.0] * 6)
        metrics, logprobs = learner.update(batch)
        return metrics, np.concatenate(index.split(logprobs))

    plain, logprobs = update(sequences, replay=False)
    unknown, same = update(sequences, replay=True)
    forced, other = update(routed, replay=True, balance_coef=0.5)
    np.testing.assert_allclose(same, logprobs, atol=1e-5)
    assert unknown["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
    assert np.abs(other - logprobs).max() > 0.01
    assert plain["loss"] == pytest.approx(plain["pg_loss"])
    assert forced["loss"] == pytest.approx(forced["pg_loss"] + 0.5 * forced["balance_loss"], rel=1e-5)
    for metrics in (plain, forced):
        assert 0 < metrics["router_entropy"] < np.log(8)
        assert 1 <= metrics["expert_load"] <= 4
        assert metrics["balance_loss"] > 1.5
    assert forced["expert_load"] < plain["expert_load"]  # chosen at random


def test_the_balance_loss_of_even_routing() -> None:
    from routerl_jax.models.experts import Routing

    even = Routing(
        chosen=jnp.zeros((1, 8, 2)),
        load=jnp.full((3, 4), 4.0),
        mass=jnp.full((3, 4), 2.0),
        entropy=jnp.zeros(3),
        tokens=jnp.full(3, 8.0),
    )
    assert balance_loss(even) == pytest.approx(2.0)


def test_what_needs_experts() -> None:
    with pytest.raises(ValueError, match="a llama model has no experts whose choice could be recorded"):
        Engine(tiny.model(), max_length=64, routes=True)
    with pytest.raises(ValueError, match=r"config\.learner\.replay_routing: a llama model has no experts"):
        BatchLayout(make_mesh(), (64,), 64, tiny.model(), replay=True)


def test_what_is_recorded_stays() -> None:
    """A row that is fed again (perhaps with new weights) changes nothing; a copy has a record of its own."""
    ledger = Ledger()
    ledger.feed([1, 2, 3])
    assert ledger.sequence().routes is None
    one, other = (np.full((2, 2), value, np.int16) for value in (4, 5))
    ledger.route(1, [one])
    ledger.route(0, [other, other])
    copy = ledger.copy()
    copy.route(2, [one])
    np.testing.assert_array_equal(ledger.sequence().routes[:, 0, 0], [5, 4, FREE])
    np.testing.assert_array_equal(copy.sequence().routes[:, 0, 0], [5, 4, 4])
