"""The learner recomputes the log-probabilities that the engine recorded while sampling."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from routerl_jax.engine.engine import Engine
from routerl_jax.engine.sampling import Sampling
from routerl_jax.learning.batch import BatchLayout
from routerl_jax.learning.learner import Learner
from routerl_jax.learning.losses import LossConfig, token_weights
from routerl_jax.parallel.mesh import make_mesh
from tests import tiny


def rollouts(model, temperature, **options):
    """Conversations of two turns each, some with truncated sampling."""
    rng = np.random.default_rng(0)
    engine = Engine(model, rows=8, max_length=128, segment=8, **options)
    streams = [engine.open(rng.integers(0, tiny.VOCABULARY, 20).tolist(), f"q{i}") for i in range(8)]
    for _ in range(2):
        for i, stream in enumerate(streams):
            sampling = Sampling(temperature=temperature, top_p=1.0 if i % 2 else 0.8, top_k=0 if i % 4 else 20)
            engine.request(stream, max_tokens=20, sampling=sampling)
        while engine.busy:
            engine.step()
        for stream in streams:
            engine.feed(stream, rng.integers(0, tiny.VOCABULARY, 10).tolist())
    return [stream.ledger.sequence() for stream in streams]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("temperature", "architecture"),
    [(1.0, {}), (0.7, {}), (1.0, {"model_type": "mistral", "window": 13, "windowed": (False, True)})],
)
def test_log_probs_agree(dtype, temperature, architecture):
    """Of the full softmax at the temperature, whatever top_p and top_k left out; sliding windows in all three programs."""
    model = tiny.model(dtype=jnp.dtype(dtype), **architecture)
    sequences = rollouts(model, temperature)
    layout = BatchLayout(make_mesh(devices=jax.devices()[:1]), (128,), 512)
    learner = Learner(model, optax.sgd(0.1), LossConfig(), layout, temperature=temperature)
    pairs = zip(sequences, learner.logprobs(sequences))
    gaps = np.concatenate([np.abs(values - s.logprobs)[s.loss_mask] for s, values in pairs])
    assert len(gaps) > 200
    # float32 adds up in another order. bfloat16 rounds hidden states to 2^-9 of themselves, in both programs after other
    # sums: measured .008 and .04 here; a wrong temperature or a renormalised nucleus is off by tenths.
    mean, largest = {"float32": (2e-6, 2e-5), "bfloat16": (0.02, 0.1)}[dtype]
    assert gaps.mean() < mean
    assert gaps.max() < largest


def padded(model):
    """A model with the weights of another one and 64 rows more, whose logits are large."""
    vocabulary = model.config.vocab_size + 64
    made = tiny.model(vocab_size=vocabulary, mesh=make_mesh({"data": 1, "tensor": 2}, jax.devices()[:2]))
    rows = 3 * np.asarray(made.embedding[...])
    rows[: model.config.vocab_size] = model.embedding[...]
    weights = nnx.state(model, nnx.Param)
    weights["embedding"] = weights["embedding"].replace(jnp.asarray(rows))
    placed = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), weights, nnx.state(made, nnx.Param))
    nnx.update(made, placed)
    return made


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(LossConfig(kl="forward", kl_coef=0.1), marks=pytest.mark.slow),
        LossConfig(kl="reverse", kl_coef=0.1),
    ],
)
def test_rows_without_a_token_are_no_part_of_the_policy(loss, monkeypatch):
    """Sampled tokens, log-probs, entropies, divergences and gradients are those of the model without the rows, also in chunks
    and with the vocabulary split; the engine's log-probs, with drafts too, are the learner's."""
    monkeypatch.setattr("routerl_jax.learning.logprobs._CHUNK_BYTES", 100_000)
    plain = tiny.model()
    made = padded(plain)
    sampled = [rollouts(plain, 1.5), rollouts(made, 1.5), rollouts(made, 1.5, drafts=2)]
    for one, *others in zip(*sampled):
        for other in others:
            np.testing.assert_array_equal(other.tokens, one.tokens)
            np.testing.assert_allclose(other.logprobs, one.logprobs, atol=2e-5)
    sequences = rollouts(made, 1.0)
    results = []
    for model in (plain, made):
        mesh = (
            make_mesh({"data": 1, "tensor": 2}, jax.devices()[:2])
            if model is made
            else make_mesh(devices=jax.devices()[:1])
        )
        learner = Learner(model, optax.sgd(1.0), loss, BatchLayout(mesh, (128,), 512), keep_reference=True)
        weights = token_weights([s.loss_mask for s in sequences], "token", 10.0)
        for _ in range(2):  # from the second step on, the reference is another model
            metrics, _ = learner.update(learner.layout.build(sequences, weights, [1.0] * len(sequences))[0])
        results.append((metrics, learner.logprobs(sequences), np.asarray(learner.params["embedding"].get_value())))
    (metrics, logprobs, rows), (others, same, more) = results
    assert metrics.keys() == others.keys()
    for name, value in metrics.items():
        assert others[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    for one, other in zip(logprobs, same):
        np.testing.assert_allclose(other, one, atol=1e-4)
    np.testing.assert_allclose(more[: len(rows)], rows, atol=1e-4)
    np.testing.assert_array_equal(more[len(rows) :], np.asarray(made.embedding[...])[len(rows) :])
