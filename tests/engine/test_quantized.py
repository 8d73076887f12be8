"""An engine with int8 weights and an int8 cache: what it computes, what it takes, and that nothing else changes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from routerl_jax.engine.cache import Codes, quantize_tokens
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.sampling import GREEDY, Sampling
from routerl_jax.engine.segments import blockwise_attention
from routerl_jax.engine.weights import WeightCopier
from routerl_jax.models.lora import LoraConfig, apply_lora, merged, quantized
from routerl_jax.models.projection import MODULES
from routerl_jax.parallel.mesh import make_mesh
from tests import seeing, tiny
from tests.engine import reference
from tests.engine.test_images import ids
from tests.engine.test_images import logprobs as logprobs_with_pictures

SAMPLED = Sampling()
LEARNER = "fsdp+tensor"


def policy(**changes):
    """Weights of the size of a trained model's: int8's error is a share of the largest."""
    return tiny.model(**{"layers": 1, "init_scale": 0.05, **changes})


def engine(model, **changes):
    return Engine(model, **{"rows": 4, "max_length": 128, "segment": 4, **changes})


def prompts(count=3, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, tiny.VOCABULARY, rng.integers(5, 30)).tolist() for _ in range(count)]


def finish(made):
    while made.busy:
        made.step()


def turn(made, streams, tokens=8, sampling=SAMPLED):
    for stream in streams:
        made.request(stream, max_tokens=tokens, sampling=sampling)
    finish(made)
    return [stream.ledger.sequence() for stream in streams]


def converse(made, sampling=SAMPLED):
    streams = [made.open(prompt, str(i)) for i, prompt in enumerate(prompts())]
    sequences = turn(made, streams, sampling=sampling)
    for stream in streams:
        made.close(stream)
    return sequences


def assert_same(a, b, atol=0.0):
    for one, other in zip(a, b, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=atol)


def test_codes_are_steps_of_the_largest_entry_and_scores_take_the_scales() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 5, 3, 8)).astype(np.float32) * rng.uniform(0.1, 2, (2, 5, 3, 1)).astype(np.float32)
    found = quantize_tokens(jnp.asarray(x))
    assert found.codes.dtype == jnp.int8
    np.testing.assert_allclose(found.scale, np.abs(x).max(-1, keepdims=True) / 127, rtol=1e-6)
    values = np.asarray(found.codes * found.scale)
    assert (np.abs(values - x) <= np.asarray(found.scale) * 0.5001).all()
    assert not np.asarray(quantize_tokens(jnp.zeros((1, 4))).codes).any()
    major = jax.tree.map(lambda leaf: leaf.swapaxes(1, 2), found)
    q, mask = jnp.asarray(rng.normal(size=(2, 4, 6, 8)).astype(np.float32)), jnp.ones((1, 4, 5), bool)
    held = jnp.asarray(values.swapaxes(1, 2))
    keys = jax.tree.map(lambda leaf: leaf.swapaxes(2, 3), major)
    assert isinstance(major, Codes)
    np.testing.assert_allclose(
        blockwise_attention(q, [(keys, major, mask)]),
        blockwise_attention(q, [(held.swapaxes(2, 3), held, mask)]),
        atol=1e-4,
    )


def test_int8_weights_are_those_of_the_rounded_model_on_any_mesh_and_follow_updates() -> None:
    """1e-4: float32 sums in another order. A code is at most half a step off; the largest entry of a channel is 127.5 steps."""
    grid = make_mesh({"data": 1, "fsdp": 2, "tensor": 2}, jax.devices()[:4])
    made = engine(policy(mesh=grid, layout=LEARNER), layout="tensor", weight_qtype="int8")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(made._calls.params)} == {"int8", "float32"}
    assert made._calls.params["blocks"]["gate"].get_value().sharding.spec == P(None, None, "tensor")
    for seed in (0, 1):
        given = policy(mesh=grid, layout=LEARNER, seed=seed)
        made.update(nnx.state(given), version=seed)
        floating = policy(seed=seed)
        held = merged(quantized(floating, "int8"))
        assert_same(converse(made), converse(engine(held)), atol=1e-4)
        for name, inputs in MODULES.items():
            exact, near = (np.asarray(getattr(one.blocks, name).get_value()) for one in (floating, held))
            assert (np.abs(near - exact) <= 0.5001 * np.abs(exact).max(axis=inputs, keepdims=True) / 127.5).all()


@pytest.mark.parametrize("as_on", ["cpu", "old gpu", "gpu"])
def test_greedy_turns_are_the_learners_up_to_a_small_gap(as_on: str, as_on_cpu) -> None:
    """2e-2 nats: int8 rounds by up to 1/255 of the largest entry. A float engine's gap here is below 1e-5."""
    as_on_cpu(as_on == "cpu")
    model = policy(head_dim=16)
    settings = {"cache": "fused" if as_on == "gpu" else "segment", "weight_qtype": "int8", "cache_qtype": "int8"}
    gap = []
    for sequence in converse(engine(model, layout="replicated", **settings), GREEDY):
        sampled = sequence.loss_mask[1:]
        gap.append(np.abs(sequence.logprobs[1:] - reference.logprobs(model, sequence.tokens))[sampled])
        for i in np.flatnonzero(sampled):
            assert reference.scores(model, sequence.tokens[: i + 1]).argmax() == sequence.tokens[i + 1]
    assert np.concatenate(gap).max() < 2e-2
    assert np.concatenate(gap).mean() > 1e-5


def test_bytes_that_are_held() -> None:
    """Per token, head and layer: H bytes and a scale of 4, instead of 4 H. Per matrix: a byte an entry, and its scales."""
    sizes = {"embed": 64, "mlp": 128}
    plain = engine(policy(**sizes), layout="replicated")
    made = engine(policy(**sizes), layout="replicated", weight_qtype="int8", cache_qtype="int8")
    whole, small = (sum(leaf.nbytes for leaf in jax.tree.leaves(one._calls.cache)) for one in (plain, made))
    assert small / whole == (8 + 4) / (4 * 8)
    blocks = made._calls.params["blocks"]
    for name in MODULES:
        assert blocks[name].get_value().nbytes == plain._calls.params["blocks"][name].get_value().size
    assert sum(blocks[f"{name}_scale"].get_value().size for name in MODULES) == 32 + 16 + 16 + 4 * 64 + 128 + 128 + 64


def test_forks_hold_what_their_source_holds() -> None:
    """Exact: a fork continues as the conversation itself does, whose row was filled by feeding and by decoding."""
    made = engine(policy(), cache_qtype="int8")
    stream = made.open(prompts(1)[0], "a")
    turn(made, [stream])
    made.feed(stream, [5, 6, 7])
    copy = made.fork(stream, 0)  # the same sample: what it draws depends on nothing but its row
    fed = made.stats.prefilled_tokens
    mine, other = turn(made, [stream, copy])
    assert made.stats.prefilled_tokens - fed == 2 * 3  # of each, the newest sampled token and two of the three after it
    assert made.stats.forked_tokens > 0
    assert_same([mine], [other])


def test_suspended_turns_go_on_as_if_they_had_not_been() -> None:
    """2e-3: their keys are computed anew, by another program. Its float32 sums differ, so some codes are the next ones."""
    finals = []
    for interrupted in (False, True):
        made = engine(policy(), cache_qtype="int8", leave_fraction=0)
        streams = [made.open(prompt, str(i)) for i, prompt in enumerate(prompts())]
        for stream in streams:
            made.request(stream, max_tokens=10, sampling=SAMPLED)
        made.step()  # four of ten tokens
        if interrupted:
            made.resume(made.suspend())
        finish(made)
        finals.append([stream.ledger.sequence() for stream in streams])
    assert_same(*finals, atol=2e-3)


@pytest.mark.slow
def test_pictures_are_seen() -> None:
    """2e-2 as for text. Without its picture the same conversation is far from that."""
    model = seeing.model()
    made = engine(model, max_length=64, layout="replicated", weight_qtype="int8", cache_qtype="int8")
    stream = made.open(ids(f"{seeing.MARKER}what?"), "a", images=[seeing.picture(0)])
    sequence = turn(made, [stream], tokens=4)[0]
    mask = sequence.loss_mask[1:]
    gap = np.abs(sequence.logprobs[1:] - logprobs_with_pictures(model, sequence))[mask]
    blind = np.abs(sequence.logprobs[1:] - reference.logprobs(model, sequence.tokens))[mask]
    assert gap.max() < 0.1 * blind.max()


def test_a_copy_for_other_devices_is_quantised_where_it_comes_from() -> None:
    home, away = (make_mesh({"data": 1, "fsdp": 2, "tensor": 1}, jax.devices()[i : i + 2]) for i in (0, 2))
    model = policy(mesh=home, layout="fsdp")
    copier = WeightCopier(model, away, "replicated", jnp.bfloat16, "int8")
    there = copier(nnx.state(model))
    here = WeightCopier(model, home, "replicated", jnp.bfloat16, "int8")(nnx.state(model))
    for leaf, other in zip(jax.tree.leaves(there), jax.tree.leaves(here), strict=True):
        assert leaf.sharding.device_set == set(away.devices.flat)
        np.testing.assert_array_equal(leaf, other)


def test_an_adapter_beside_quantised_weights_is_kept() -> None:
    model = policy()
    apply_lora(model, LoraConfig(rank=2, modules="q|v").build(), jax.random.key(0))
    copied = WeightCopier(model, make_mesh(devices=jax.devices()[:1]), "replicated", jnp.float32, "int8")(
        nnx.state(model)
    )
    names = {path[-1]: leaf.get_value().dtype.name for path, leaf in nnx.to_flat_state(copied)}
    assert (names["q"], names["q_scale"], names["q_lora_a"], names["o"]) == ("int8", "float32", "float32", "int8")


def test_what_int8_can_not_do() -> None:
    with pytest.raises(ValueError, match=r"weight_qtype='int8' is of a copy .* give layout"):
        engine(policy(), weight_qtype="int8")
    with pytest.raises(ValueError, match=r"the paged kernel .* no scale per token.*set cache='segment'"):
        engine(policy(), cache="paged", cache_qtype="int8")
