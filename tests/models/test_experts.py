"""Layers with experts: on meshes, replayed, balanced, in the engine; their parity with transformers is in test_parity.py."""

import copy
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from routerl_jax.core.types import FREE
from routerl_jax.engine.engine import Engine
from routerl_jax.models import experts
from routerl_jax.models.config import DecoderConfig, ExpertsConfig
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.experts import Experts, balance_loss
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.models.layers import Initializer
from routerl_jax.models.lora import LoraConfig, adapters, apply_lora, merged
from routerl_jax.models.peft import load_adapter, save_adapter
from routerl_jax.parallel.mesh import make_mesh
from tests import tiny
from tests.models.families import Saved

Models = Callable[[str], Saved]
TOKENS = np.random.default_rng(0).integers(0, 131, (2, 12))
SPARSE = {
    "model_type": "qwen3_moe",
    "qk_norm": True,
    "experts": ExpertsConfig(count=8, chosen=2, mlp=24, normalized=True),
}


def load(directory: pathlib.Path) -> Decoder:
    model = load_pretrained(str(directory))
    assert isinstance(model, Decoder)
    return model


def one_layer(config: ExpertsConfig, embed: int = 16) -> Experts:
    layer = Experts(config, 1, embed, Initializer(jax.random.key(0), 0.4, jnp.dtype(jnp.float32)))
    graph, stacked = nnx.split(layer)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[0], stacked))


@pytest.fixture(params=[0, 256], ids=["grouped", "all_held"])
def few_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Both ways to compute experts: grouped products, and every expert for every token."""
    monkeypatch.setattr(experts, "_FEW_TOKENS", request.param)
    return request.param


def test_few_tokens_get_the_same_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every expert for every token is the sum over those that were chosen, with its gradients; 1e-5: another order."""
    layer = one_layer(ExpertsConfig(count=6, chosen=3, mlp=8))
    graph, params = nnx.split(layer)
    x, probe = (jax.random.normal(jax.random.key(i), (4, 5, 16)) for i in (1, 2))

    def gradients(few: int) -> Any:
        monkeypatch.setattr(experts, "_FEW_TOKENS", few)

        def loss(params: nnx.State, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            y, _ = nnx.merge(graph, params)(x, jnp.dtype(jnp.float32))
            return (y * probe).sum(), y

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)

    for one, other in zip(jax.tree.leaves(gradients(20)), jax.tree.leaves(gradients(19))):  # 20 tokens
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


@pytest.mark.usefixtures("few_tokens")
@pytest.mark.parametrize(
    ("count", "channels", "sizes"),
    [
        (8, 6, {"data": 2, "tensor": 4}),  # every device has two experts
        (6, 8, {"fsdp": 2, "tensor": 4}),  # six experts on four devices: every one has two channels of each
        (6, 7, {"tensor": 4, "data": 2}),  # neither can be divided: every device computes all
    ],
)
def test_a_mesh_changes_nothing(count: int, channels: int, sizes: dict[str, int]) -> None:
    """Outputs and gradients, of inputs and of every matrix, are those of one device; 1e-5: sums in another order."""
    layer = one_layer(ExpertsConfig(count=count, chosen=3, mlp=channels))
    graph, params = nnx.split(layer)
    x = jax.random.normal(jax.random.key(1), (4, 5, 16))
    probe = jax.random.normal(jax.random.key(2), x.shape)

    def gradients(mesh: Any) -> Any:
        def loss(params: nnx.State, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            y, _ = nnx.merge(graph, params)(x, jnp.dtype(jnp.float32), mesh=mesh)
            return (y * probe).sum(), y

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)

    spread, single = gradients(make_mesh(sizes)), gradients(None)
    for one, other in zip(jax.tree.leaves(spread), jax.tree.leaves(single)):
        assert np.abs(other).max() > 0.01
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_moe_mixed"])
def test_the_balance_loss_is_that_of_transformers(saved: Models, family: str) -> None:
    """Over the tokens that are no padding, with its gradient at the routers."""
    hf, directory = saved(family)
    model = load(directory)
    mask = np.ones(TOKENS.shape, int)
    mask[1, 7:] = 0
    out = hf(torch.as_tensor(TOKENS), attention_mask=torch.as_tensor(mask), output_router_logits=True)
    expected = load_balancing_loss_func(
        out.router_logits, hf.config.num_experts, hf.config.num_experts_per_tok, torch.as_tensor(mask)
    )
    hf.zero_grad()
    expected.backward()
    theirs = [layer.mlp.gate.weight.grad.numpy().T for layer in hf.model.layers if hasattr(layer.mlp, "experts")]
    hf.zero_grad()
    graph, params = nnx.split(model, nnx.Param)

    def loss(params: nnx.State) -> jax.Array:
        routing = nnx.merge(graph, params).forward(TOKENS, segment_ids=mask).routing
        assert routing is not None
        return balance_loss(routing)

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    ours = np.asarray(gradients["blocks"]["experts"]["router"].get_value())
    np.testing.assert_allclose(ours, np.stack(theirs), rtol=0, atol=1e-4 * np.abs(ours).max())


def test_what_routers_did(saved: Models) -> None:
    """Loads and entropies over counted tokens, by hand from the router's own probabilities."""
    layer = one_layer(ExpertsConfig(count=4, chosen=2, mlp=8))
    x = jax.random.normal(jax.random.key(1), (1, 6, 16))
    counted = jnp.arange(6)[None] < 4
    _, routing = layer(x, jnp.dtype(jnp.float32), counted=counted)
    p = np.asarray(jax.nn.softmax(x[0] @ layer.router[...]))
    np.testing.assert_array_equal(routing.chosen[0], np.argsort(-p)[:, :2])
    np.testing.assert_array_equal(routing.load, np.bincount(np.argsort(-p)[:4, :2].ravel(), minlength=4))
    np.testing.assert_allclose(routing.entropy, -(p[:4] * np.log(p[:4])).sum(), rtol=1e-5)
    np.testing.assert_allclose(routing.mass, p[:4].sum(0), rtol=1e-5)
    assert routing.tokens == 4


def test_replayed_experts_have_this_router_s_weights(saved: Models) -> None:
    """R3 (arXiv 2510.11370): the choice is the sampler's; weights, and so the gradient, are those of the router at hand."""
    model = load(saved("qwen3_moe").directory)
    free = model.forward(TOKENS)
    assert free.routing is not None
    chosen = free.routing.chosen
    assert chosen.shape == (2, 12, 3, 2)
    replay = jax.jit(lambda ids: model.forward(TOKENS, replayed=ids))
    np.testing.assert_allclose(replay(chosen).hidden, free.hidden, rtol=0, atol=1e-5)
    np.testing.assert_allclose(replay(jnp.full_like(chosen, FREE)).hidden, free.hidden, rtol=0, atol=1e-5)
    others = (chosen + 1) % 8
    forced = replay(others)
    np.testing.assert_array_equal(forced.routing.chosen, others)
    assert np.abs(np.asarray(forced.hidden - free.hidden)).max() > 0.1
    layer = one_layer(ExpertsConfig(count=4, chosen=2, mlp=8, normalized=True))
    graph, params = nnx.split(layer)
    x, ids = jax.random.normal(jax.random.key(1), (1, 1, 16)), jnp.asarray([[[3, 0]]])

    def expert(i: int) -> jax.Array:
        gate, up = x[0, 0] @ layer.gate[...][i], x[0, 0] @ layer.up[...][i]
        return (jax.nn.silu(gate) * up) @ layer.down[...][i]

    p = jax.nn.softmax(x[0, 0] @ layer.router[...])
    expected = (p[3] * expert(3) + p[0] * expert(0)) / (p[3] + p[0])
    y, _ = layer(x, jnp.dtype(jnp.float32), replayed=ids)
    np.testing.assert_allclose(y[0, 0], expected, rtol=0, atol=1e-5)
    summed = jax.jit(
        jax.grad(lambda params: nnx.merge(graph, params)(x, jnp.dtype(jnp.float32), replayed=ids)[0].sum())
    )
    gradient = summed(params)
    assert np.abs(gradient["router"].get_value()).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_moe_mixed"])
def test_greedy_generation_is_that_of_transformers(saved: Models, family: str, tmp_path: pathlib.Path) -> None:
    """Through the engine, with an observation in between; and a second time on a mesh with two experts a device."""
    hf = copy.deepcopy(saved(family).hf)
    hf.resize_token_embeddings(tiny.VOCABULARY)
    hf.save_pretrained(tmp_path)
    for mesh in (None, make_mesh({"data": 2, "tensor": 4})):
        model = load_pretrained(str(tmp_path), mesh=mesh)
        engine = Engine(
            model, rows=2, max_length=64, tokenizer=tiny.tokenizer(), layout="" if mesh is None else "tensor"
        )
        stream = engine.open(TOKENS[0].tolist())
        for observation in ([], [5, 17, 99]):
            engine.feed(stream, observation)
            before = list(stream.ledger.tokens)
            engine.request(stream, max_tokens=6)
            while engine.busy:
                engine.step()
            with torch.no_grad():
                expected = hf.generate(torch.as_tensor([before]), max_new_tokens=6, do_sample=False)[0].tolist()
            assert stream.ledger.tokens == expected


@pytest.mark.slow
def test_adapters_leave_experts_alone(saved: Models, tmp_path: pathlib.Path) -> None:
    """Attention (and the feed-forward of layers without experts) gets one; peft's directory goes there and back."""
    model = load(saved("qwen3_moe_mixed").directory)
    experts = nnx.state(model.blocks.experts)
    apply_lora(model, LoraConfig(rank=2).build(), jax.random.key(0))
    assert list(adapters(model)) == ["q", "k", "v", "o", "gate", "up", "down"]
    for name in adapters(model):
        b = getattr(model.blocks, f"{name}_lora_b")
        b.set_value(0.3 * jax.random.normal(jax.random.key(1), b.shape))
    assert model.blocks.gate_lora_a.shape[0] == 1
    run = nnx.jit(Decoder.__call__)
    logits = run(model, TOKENS)
    assert np.abs(np.asarray(logits - run(load(saved("qwen3_moe_mixed").directory), TOKENS))).max() > 0.1
    np.testing.assert_allclose(run(merged(model), TOKENS), logits, rtol=0, atol=1e-4)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), experts, nnx.state(model.blocks.experts)))
    save_adapter(model, tmp_path / "adapter", str(saved("qwen3_moe_mixed").directory))
    again = load(saved("qwen3_moe_mixed").directory)
    load_adapter(again, tmp_path / "adapter")
    np.testing.assert_allclose(run(again, TOKENS), logits, rtol=0, atol=1e-5)
    sparse = load(saved("qwen3_moe").directory)
    with pytest.raises(ValueError, match=r"applies to nothing: it matches no module; modules are q, k, v, o, as"):
        apply_lora(sparse, LoraConfig(rank=2, modules="gate|up|down").build(), jax.random.key(0))
    apply_lora(sparse, LoraConfig(rank=2, base_qtype="int8", tile_size=0).build(), jax.random.key(0))
    assert list(adapters(sparse)) == ["q", "k", "v", "o"]


def test_configurations_that_make_no_model() -> None:
    with pytest.raises(ValueError, match="chosen=9 experts of a token must be from 1 to count=8"):
        ExpertsConfig(count=8, chosen=9, mlp=4)
    config = tiny.config(**SPARSE)
    for change, message in (
        ({"experts": None}, "makes no qwen3_moe"),
        ({"model_type": "qwen3"}, "makes no qwen3; qwen3_moe has experts"),
        ({"experts": dataclasses.replace(config.experts, dense_layers=(5,))}, r"dense_layers \[5\]: the decoder has 2"),
        ({"experts": dataclasses.replace(config.experts, dense_layers=(0, 1))}, "dense_layers are all layers"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(config, **change)
    assert isinstance(config, DecoderConfig)
