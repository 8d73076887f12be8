"""The engine's own copy of the weights: another layout than the learner's, another dtype, none where they agree."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from routerl_jax.engine.engine import Engine
from routerl_jax.engine.sampling import Sampling
from routerl_jax.parallel.mesh import make_mesh
from tests import tiny

LEARNER = "fsdp+tensor"


def policy(**changes):
    return tiny.model(layers=1, **changes)


def mesh(**sizes):
    return make_mesh({"data": 1, **sizes}, jax.devices()[: int(np.prod(list(sizes.values())))])


def converse(engine):
    """A sampled turn of five conversations."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, tiny.VOCABULARY, rng.integers(3, 30)).tolist() for _ in range(5)]
    streams = [engine.open(prompt, str(i)) for i, prompt in enumerate(prompts)]
    for stream in streams:
        engine.request(stream, max_tokens=8, sampling=Sampling())
    while engine.busy:
        engine.step()
    sequences = [stream.ledger.sequence() for stream in streams]
    for stream in streams:
        engine.close(stream)
    return sequences


def assert_same(a, b):
    """Tokens equal; log-probs to 1e-4: partial sums over devices are added in another order, in float32."""
    for one, other in zip(a, b, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def axes_of(array):
    """Mesh axes that an array is split over."""
    parts = [(entry,) if isinstance(entry, str) else entry or () for entry in array.sharding.spec]
    return {axis for part in parts for axis in part}


def test_a_layout_of_its_own_samples_as_one_device_does_and_follows_updates():
    grid = mesh(data=2, fsdp=2, tensor=2)
    engine = Engine(policy(mesh=grid, layout=LEARNER), rows=8, max_length=128, layout="tensor")
    weights = jax.tree.leaves(engine._calls.params)
    assert set().union(*map(axes_of, weights)) == {"tensor"}
    assert axes_of(engine._calls.cache.k) == {"data", "fsdp", "tensor"}  # its heads too
    before = converse(engine)
    alone = Engine(policy(), rows=8, max_length=128)
    assert_same(before, converse(alone))
    other = policy(mesh=grid, layout=LEARNER, seed=1)
    engine.update(nnx.state(other, nnx.Param), version=1)
    after = converse(engine)
    assert any(one.tokens.tolist() != two.tokens.tolist() for one, two in zip(before, after))
    alone.update(nnx.state(policy(seed=1), nnx.Param), version=1)
    assert_same(after, converse(alone))


def test_kv_heads_that_do_not_divide_stay_whole():
    engine = Engine(policy(mesh=mesh(fsdp=2, tensor=4), layout=LEARNER), rows=8, max_length=128, layout="tensor")
    assert axes_of(engine._calls.cache.k) == {"data", "fsdp"}
    assert_same(converse(engine), converse(Engine(policy(), rows=8, max_length=128)))


def test_nothing_is_copied_where_layouts_agree():
    for learner, own in ((LEARNER, ""), ("tensor", "tensor"), ("fsdp", "fsdp")):
        model = policy(mesh=mesh(fsdp=2, tensor=2), layout=learner)
        engine = Engine(model, rows=4, max_length=64, layout=own)
        for seed in (0, 1):
            params = nnx.state(policy(mesh=mesh(fsdp=2, tensor=2), layout=learner, seed=seed), nnx.Param)
            engine.update(params, version=1)
            for mine, theirs in zip(jax.tree.leaves(engine._calls.params), jax.tree.leaves(params), strict=True):
                assert mine is theirs


def test_a_copy_is_kept_in_the_compute_dtype():
    model = policy()
    model.compute_dtype = jnp.dtype(jnp.bfloat16)
    plain = Engine(model, rows=4, max_length=128)
    engine = Engine(model, rows=4, max_length=128, layout="replicated")
    assert {leaf.dtype for leaf in jax.tree.leaves(plain._calls.params)} == {jnp.dtype(jnp.float32)}
    assert {leaf.dtype for leaf in jax.tree.leaves(engine._calls.params)} == {jnp.dtype(jnp.bfloat16)}
    for one, other in zip(converse(plain), converse(engine)):  # the cast is the one that every layer makes
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
