"""Training an adapter alone: what moves, what it takes, on eight devices as on one, and the engine that serves it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from routerl_jax.engine.engine import Engine
from routerl_jax.engine.sampling import Sampling
from routerl_jax.learning.batch import BatchLayout
from routerl_jax.learning.checkpoints import Checkpoints, model_fields
from routerl_jax.learning.learner import Learner
from routerl_jax.learning.losses import LossConfig, token_weights
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.models.lora import LoraConfig, apply_lora, lora_fields, merge_state, merged
from routerl_jax.parallel.mesh import make_mesh
from tests import tiny

SEQUENCES = tiny.random_sequences(9)
LOSS = LossConfig(kind="reinforce", kl_coef=0.1)


def lora_model(devices=1, layout="replicated", **settings):
    mesh = make_mesh({"data": 1, "fsdp": -1}, devices=jax.devices()[:devices])
    model = tiny.model(mesh=mesh, layout=layout)
    apply_lora(model, LoraConfig(**{"rank": 3, "tile_size": 8, **settings}).build(), jax.random.key(7))
    return model


def make_learner(model, lr=1e-2, loss=LOSS, **options):
    mesh = model.blocks.q[...].sharding.mesh
    optimizer = OptimizerConfig(lr=lr).build(10)
    return Learner(model, optimizer, loss, BatchLayout(mesh, (128,), 512), **options)


def train(learner, updates):
    """Every sampled token of some random conversations is made likelier; returns the loss before each update."""
    weights = token_weights([s.loss_mask for s in SEQUENCES], "token", 1.0)
    reference = learner.logprobs(SEQUENCES, learner.reference) if learner.reference is not None else None
    batch, _ = learner.layout.build(SEQUENCES, weights, [1.0] * len(SEQUENCES), reference)
    return [learner.update(batch)[0]["loss"] for _ in range(updates)]


def flat(state):
    return {str(path[-1]): np.asarray(value.get_value()) for path, value in nnx.to_flat_state(state)}


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def moved(before, learner):
    """The parameters that are not bit for bit as they were."""
    return {name for name, value in flat(learner.params).items() if (value != before[name]).any()}


def test_the_adapter_alone_is_trained():
    """The objective falls; A and B move in every module, the base does not; Adam keeps two moments of A and B; the
    reference, an adapter whose B is 0, is the model that training started from."""
    model = lora_model()
    before = flat(nnx.state(model))
    learner = make_learner(model)
    adapter = sum(value.nbytes for name, value in before.items() if "_lora_" in name)
    assert nbytes(learner.state.params) == adapter
    assert 2 * adapter <= nbytes(learner.state.opt_state) < 2 * adapter + 64  # and a few counters
    assert nbytes(learner.reference) == adapter  # the base is not copied
    losses = train(learner, 8)
    assert losses[-1] < losses[0] - 0.3
    assert moved(before, learner) == {name for name in before if "_lora_" in name}
    expected = make_learner(tiny.model(mesh=model.blocks.q[...].sharding.mesh)).logprobs(SEQUENCES)
    for values, base, now in zip(learner.logprobs(SEQUENCES, learner.reference), expected, learner.logprobs(SEQUENCES)):
        np.testing.assert_array_equal(values, base)
        assert np.abs(values - now).max() > 1e-3


@pytest.mark.slow
def test_eight_devices_do_the_same():
    """After two updates, with the weights cut over all eight; float32 adds up in another order."""
    one, eight = make_learner(lora_model(), lr=1e-3), make_learner(lora_model(8, "fsdp"), lr=1e-3)
    assert len(eight.state.params["blocks"]["q_lora_a"].get_value().sharding.device_set) == 8
    np.testing.assert_allclose(train(one, 2), train(eight, 2), rtol=1e-5)
    ours, theirs = flat(one.params), flat(eight.params)
    for name, value in ours.items():
        np.testing.assert_allclose(theirs[name], value, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("serving", "qtype"), [("merged", ""), ("adapter", "nf4")])
def test_the_engine_samples_what_the_learner_scores(serving, qtype):
    """After updates, at 1e-4 in float32: merging rounds the weights once, the side branch is the learner's own sum."""
    model = lora_model(base_qtype=qtype)
    before = flat(nnx.state(model))
    learner = make_learner(model)
    train(learner, 3)
    if qtype:
        half = lora_model(base_qtype=qtype)
        half.compute_dtype = jnp.dtype("bfloat16")
        copied = Engine(half, rows=8, max_length=128, layout="tensor")._calls.params
        assert copied is not None
        kept = flat(copied)
        assert (kept["q_lora_a"].dtype, kept["q"].dtype, kept["q_scale"].dtype) == (jnp.bfloat16, np.uint8, np.float32)
    assert moved(before, learner) == {name for name in before if "_lora_" in name}
    served = learner.params
    if serving == "merged":
        model, served = merged(model), merge_state(served)
    engine = Engine(model, rows=8, max_length=128, segment=8)
    engine.update(served, 3)
    prompts = [sequence for sequence in SEQUENCES if len(sequence) > 20][: engine.rows]
    streams = [engine.open(sequence.tokens[:20].tolist(), str(i)) for i, sequence in enumerate(prompts)]
    for stream in streams:
        engine.request(stream, max_tokens=16, sampling=Sampling(temperature=1.0))
    while engine.busy:
        engine.step()
    sequences = [stream.ledger.sequence() for stream in streams]

    def gaps(scored):
        return np.concatenate([np.abs(v - s.logprobs)[s.loss_mask] for s, v in zip(sequences, scored)])

    assert gaps(learner.logprobs(sequences)).max() < 1e-4
    assert gaps(learner.logprobs(sequences, learner.reference)).max() > 0.05  # which is what was there before


def test_checkpoints_hold_the_adapter_alone(tmp_path):
    """Restored into a fresh learner on the same base, training goes on bit for bit."""
    model = lora_model(base_qtype="int8")
    learner = make_learner(model)
    train(learner, 2)
    checkpoints = Checkpoints(tmp_path, keep=2)
    extra = {"model": model_fields(model.config), "lora": lora_fields(model)}
    checkpoints.save(2, learner.state, learner.reference, extra)
    checkpoints.wait()
    stored = b"".join(
        path.read_bytes() for path in (tmp_path / "2").rglob("*") if path.is_file() and "extra" not in path.parts
    )
    assert b"q_lora_a" in stored
    assert b"embedding" not in stored
    assert b"q_scale" not in stored
    expected = train(learner, 2)

    again = make_learner(lora_model(base_qtype="int8"))
    fields = lora_fields(lora_model(base_qtype="int8"))
    assert fields is not None
    again.state, again.reference, _ = checkpoints.restore(2, again.state, again.reference, model.config, fields)
    assert train(again, 2) == expected
    for name, value in flat(learner.params).items():
        np.testing.assert_array_equal(flat(again.params)[name], value, err_msg=name)

    def refused(message, fields):
        with pytest.raises(ValueError, match=message):
            checkpoints.restore(2, again.state, again.reference, model.config, fields)

    refused(r"another adapter \(down: {'rank': 3, 'alpha': 16.0} there, {'rank': 4", lora_fields(lora_model(rank=4)))
    refused("another quantisation .down: int8 there, nf4 here", lora_fields(lora_model(base_qtype="nf4")))
    refused("holds a LoRA adapter, but the run trains all weights", None)
    refused("an adapter on other weights than these", {**fields, "base": "0" * 64})


def test_a_filter_says_what_is_trained():
    """Any part of a model may be frozen, such as a vision tower."""
    model = tiny.model()
    before = flat(nnx.state(model))
    learner = make_learner(model, loss=LossConfig(kind="reinforce"), trainable=nnx.PathContains("blocks"))
    train(learner, 1)
    frozen = {"embedding", "final_norm"}
    for name, value in flat(learner.params).items():
        assert (value == before[name]).all() == (name in frozen), name
    with pytest.raises(ValueError, match="no parameter of the model is trainable"):
        make_learner(model, trainable=nnx.PathContains("vision"))


def test_codes_are_expanded_anew_in_the_backward_pass():
    """Kept for it, the matrices in float32 would be several times the codes."""
    mesh = make_mesh(devices=jax.devices()[:1])
    sizes = {}
    for qtype in ("", "int8"):
        model = tiny.model(mesh=mesh, layers=12, embed=64, mlp=256)
        apply_lora(model, LoraConfig(rank=1, modules="q", base_qtype=qtype, tile_size=8).build(), jax.random.key(0))
        graph, trained, frozen = nnx.split(model, nnx.LoRAParam, ...)

        def loss(trained, frozen, tokens, graph=graph):
            return nnx.merge(graph, trained, frozen)(tokens).sum()

        tokens = jnp.zeros((1, 8), jnp.int32)
        compiled = jax.jit(jax.grad(loss)).lower(trained, frozen, tokens).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        sizes[qtype] = analysis.temp_size_in_bytes
        weights = sum(4 * getattr(model.blocks, name)[...].size for name in ("gate", "up", "down"))
    assert sizes["int8"] < sizes[""] + weights / 4
