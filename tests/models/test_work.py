"""What a decoder's work is counted to be is what programs have and do."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from routerl_jax.engine.segments import SegmentCache
from routerl_jax.extras.compile_check.hlo_costs import count
from routerl_jax.models.config import DecoderConfig, ExpertsConfig
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.published import architecture_of
from routerl_jax.models.work import Work
from routerl_jax.parallel.mesh import single_device_mesh

QWEN3 = {"model_type": "qwen3", "qkv_bias": False, "qk_norm": True}
SPARSE = QWEN3 | {"model_type": "qwen3_moe", "experts": ExpertsConfig(count=8, chosen=2, mlp=128, dense_layers=(1,))}


@pytest.fixture
def config() -> DecoderConfig:
    """Wide enough for matrices to be nearly all of the work."""
    small = {"vocab_size": 1000, "embed": 256, "layers": 2, "heads": 8, "kv_heads": 2, "head_dim": 32, "mlp": 1024}
    return dataclasses.replace(architecture_of("Qwen/Qwen2.5-1.5B-Instruct"), **small)


@pytest.mark.parametrize("changes", [{}, {"tied_embeddings": False}, QWEN3, SPARSE])
def test_entries_are_those_of_the_model(config: DecoderConfig, changes: dict[str, Any]) -> None:
    config = dataclasses.replace(config, **changes)
    params = nnx.state(nnx.eval_shape(lambda: Decoder(config, jax.random.key(0))), nnx.Param)
    sizes = [int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params)]
    assert Work(config=config).stored == sum(sizes)


def test_a_step_reads_the_experts_that_its_rows_take(config: DecoderConfig) -> None:
    """One row its own two of eight; many rows nearly all."""
    work = Work(config=dataclasses.replace(config, **SPARSE))
    expert = 2 * 3 * 256 * 128  # bytes
    assert work.decode_bytes(1, 0) == 2 * work.matrices
    assert work.decode_bytes(2, 0) - work.decode_bytes(1, 0) == pytest.approx(
        1.5 * expert
    )  # each of the other six by 1/4
    assert work.decode_bytes(100, 0) - work.decode_bytes(1, 0) == pytest.approx(6 * expert)


def test_published_sizes() -> None:
    """Parameters as the model cards say: 0.49 B, 1.54 B, 7.61 B."""
    names = ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct")
    sizes = [Work(config=architecture_of(name)).stored / 1e9 for name in names]
    assert sizes == pytest.approx([0.494, 1.544, 7.616], abs=5e-4)


def test_bytes_of_a_step(config: DecoderConfig) -> None:
    work, tokens = Work(config=config), 128
    cache = SegmentCache.abstract(config, single_device_mesh(), 1, 1, tokens, jnp.bfloat16)
    keys = sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert work.key_bytes(tokens) == keys
    assert work.decode_bytes(3, tokens) - work.decode_bytes(1, tokens) == 2 * keys
    assert work.decode_bytes(0, tokens) == 2 * work.matrices


def test_flops_are_those_that_xla_counts(config: DecoderConfig) -> None:
    """XLA computes the whole square of a short row, of which we count the half that is seen."""
    work, length = Work(config=config), 32
    model = Decoder(config, jax.random.key(0))
    graph, params = nnx.split(model)
    forward = jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens))
    cost: Any = forward.lower(params, jnp.zeros((1, length), jnp.int32)).compile().cost_analysis()
    unseen = 4 * config.layers * config.heads * config.head_dim * length * (length - 1) / 2
    # the layers run in a scan, whose body XLA counts once
    layers = work.forward_flops([length], unembedded=0) + unseen
    counted = work.forward_flops([length]) + unseen - layers * (config.layers - 1) / config.layers
    assert cost["flops"] == pytest.approx(counted, rel=0.03)
    assert work.forward_flops([length, length]) == 2 * work.forward_flops([length])
    assert work.update_flops([length]) == 3 * work.forward_flops([length])


def test_parts_of_a_sequence_add_up(config: DecoderConfig) -> None:
    """Feeding and decoding a sequence token by token is the whole of it, and a frozen matrix has no gradient."""
    work, length = Work(config=config), 40
    whole, shorter = work.forward_flops([length]), work.forward_flops([length - 1])
    assert work.decode_flops(1, length) == whole - shorter
    assert work.decode_flops(3, length) == 3 * work.decode_flops(1, length)
    fed = work.forward_flops([length], unembedded=0) - work.forward_flops([length - 16], unembedded=0)
    assert work.prefill_flops(2, 16, length) == 2 * fed
    assert work.update_flops([length], adapter=True) == 3 * whole - 2 * work.matrices * length


def test_flops_of_a_gradient_are_those_of_the_compiled_program(config: DecoderConfig) -> None:
    """Counted with the scan over layers multiplied out; of the square of each row we count the half that is seen."""
    work, length = Work(config=config), 32
    graph, params = nnx.split(Decoder(config, jax.random.key(0)))
    gradient = jax.jit(jax.grad(lambda params, tokens: (nnx.merge(graph, params)(tokens) ** 2).sum()))
    text = gradient.lower(params, jnp.zeros((1, length), jnp.int32)).compile().as_text()
    assert text is not None
    unseen = 3 * 4 * config.layers * config.heads * config.head_dim * length * (length - 1) / 2
    assert count(text).flops == pytest.approx(work.update_flops([length]) + unseen, rel=0.02)
