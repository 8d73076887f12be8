"""The experts that the sampler chose, recorded for every token that it read."""

import jax
import numpy as np
import pytest

from routerl_jax.core.types import FREE
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.sampling import Sampling
from routerl_jax.models.config import ExpertsConfig
from routerl_jax.parallel.mesh import make_mesh
from tests import tiny

SPARSE = {
    "model_type": "qwen3_moe",
    "qk_norm": True,
    "layers": 3,
    "experts": ExpertsConfig(count=8, chosen=2, mlp=24, normalized=True, dense_layers=(1,)),
}


def conversations(engine: Engine, count: int = 5) -> list:
    """Two turns each, with a group of two on one prompt, and fewer rows than conversations."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, tiny.VOCABULARY, n).tolist() for n in rng.integers(3, 30, count)]
    prompts[1] = prompts[0]
    streams = [engine.open(prompt, str(i)) for i, prompt in enumerate(prompts)]
    for _ in range(2):
        for stream in streams:
            engine.request(stream, max_tokens=9, sampling=Sampling())
        while engine.busy:
            engine.step()
        for stream in streams:
            engine.feed(stream, rng.integers(0, tiny.VOCABULARY, 7).tolist())
    for stream in streams:  # reads what was fed last
        engine.request(stream, max_tokens=1, sampling=Sampling())
    while engine.busy:
        engine.step()
    return [stream.ledger.sequence() for stream in streams]


@pytest.mark.parametrize("kind", ["segment", pytest.param("paged", marks=pytest.mark.slow)])
def test_every_token_that_was_read_has_the_experts_of_a_whole_forward_pass(kind: str, interpreted: None) -> None:
    """Prompts, observations, sampled tokens; shared prompts, rows that were lost. Only the last token is unread."""
    mesh = make_mesh({"data": 2}, jax.devices()[:2])
    model = tiny.model(mesh=mesh, **SPARSE)
    engine = Engine(model, rows=4, max_length=96, segment=4, routes=True, cache=kind)
    sequences = conversations(engine)
    assert engine.stats.evictions > 0
    assert engine.stats.forked_tokens > 0
    alone = jax.jit(tiny.model(**SPARSE).forward)
    for sequence in sequences:
        padded = np.pad(sequence.tokens, (0, 96 - len(sequence)))
        expected = np.asarray(alone(padded[None]).routing.chosen[0])
        assert sequence.routes.dtype == np.int16
        assert sequence.routes.shape == (len(sequence), 2, 2)  # two layers with experts, two of eight
        np.testing.assert_array_equal(sequence.routes[:-1], expected[: len(sequence) - 1])
        assert (sequence.routes[-1] == FREE).all()
    plain = conversations(Engine(model, rows=4, max_length=96, segment=4, cache=kind))
    for one, other in zip(plain, sequences):
        assert one.routes is None
        np.testing.assert_array_equal(one.tokens, other.tokens)
