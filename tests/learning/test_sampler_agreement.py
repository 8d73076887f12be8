"""The learner recomputes the log-probabilities that the engine recorded while sampling."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from routerl_jax.generation.engine import Engine
from routerl_jax.generation.sampling import Sampling
from routerl_jax.learning.batch import BatchLayout
from routerl_jax.learning.learner import Learner
from routerl_jax.learning.objective import LossConfig
from routerl_jax.parallel.mesh import make_mesh
from tests import tiny


def rollouts(model, temperature):
    """Conversations of two turns each, some with truncated sampling."""
    rng = np.random.default_rng(0)
    engine = Engine(model, rows=8, max_length=128, segment=8)
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
