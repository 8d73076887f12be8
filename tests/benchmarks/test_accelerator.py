"""What benchmarks.accelerator counts is what programs have and do; its small form runs; its table says the right shares."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import accelerator, accelerator_ours
from routerl_jax.generation.segments import SegmentCache
from routerl_jax.models.config import DecoderConfig
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.published import architecture_of
from routerl_jax.models.work import Work
from routerl_jax.parallel.mesh import single_device_mesh

QWEN3 = {"model_type": "qwen3", "qkv_bias": False, "qk_norm": True}


@pytest.fixture
def config() -> DecoderConfig:
    """Wide enough for matrices to be nearly all of the work."""
    small = {"vocab_size": 1000, "embed": 256, "layers": 2, "heads": 8, "kv_heads": 2, "head_dim": 32, "mlp": 1024}
    return dataclasses.replace(architecture_of("Qwen/Qwen2.5-1.5B-Instruct"), **small)


@pytest.mark.parametrize("changes", [{}, {"tied_embeddings": False}, QWEN3])
def test_entries_are_those_of_the_model(config: DecoderConfig, changes: dict[str, Any]) -> None:
    config = dataclasses.replace(config, **changes)
    params = nnx.state(nnx.eval_shape(lambda: Decoder(config, jax.random.key(0))), nnx.Param)
    sizes = [int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params)]
    assert Work(config=config).stored == sum(sizes)


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
    cost = forward.lower(params, jnp.zeros((1, length), jnp.int32)).compile().cost_analysis()
    unseen = 4 * config.layers * config.heads * config.head_dim * length * (length - 1) / 2
    # the layers run in a scan, whose body XLA counts once
    layers = work.forward_flops([length], unembedded=0) + unseen
    counted = work.forward_flops([length]) + unseen - layers * (config.layers - 1) / config.layers
    assert cost["flops"] == pytest.approx(counted, rel=0.03)
    assert work.forward_flops([length, length]) == 2 * work.forward_flops([length])
    assert work.update_flops([length]) == 3 * work.forward_flops([length])


def test_the_small_form_runs(config: DecoderConfig) -> None:
    """A rollout and an update; what they report is what was done."""
    small = dataclasses.replace(config, vocab_size=512, embed=32, heads=4, head_dim=8, mlp=64)
    shapes = dataclasses.replace(accelerator_ours.TINY, turns=2)
    lines: list[dict[str, Any]] = []

    def report(what: str, **numbers: Any) -> None:
        lines.append(json.loads(json.dumps({"size": "1.5B", "part": what, "what": what, **numbers})))

    accelerator_ours.rollout(report, small, shapes)
    accelerator_ours.update(report, small, shapes, "float32", "none")
    rollout, update = lines
    assert rollout["sampled_per_s"] * rollout["seconds"] == pytest.approx(4 * 2 * shapes.sampled)
    assert 0 <= rollout["idle_share"] < 1
    assert update["tokens"] == shapes.sequences * shapes.length
    assert update["flops_per_s"] * update["seconds"] == pytest.approx(Work(config=small).update_flops([32] * 4))


def test_the_table_says_shares() -> None:
    lines = [
        {"size": "7B", "part": "limits", "what": "memory", "bytes_per_s": 4e12},
        {"size": "7B", "part": "limits", "what": "products", "flops_per_s": {"64": 1e14, "128": 8e14}},
        {
            "size": "7B",
            "what": "decode",
            "rows": 8,
            "seconds_per_step": 0.01,
            "tokens_per_s": 800.0,
            "bytes_per_s": 1e12,
        },
        {"size": "7B", "what": "update", "side": "torch", "seconds": 2.0, "tokens_per_s": 9.0, "flops_per_s": 4e14},
        {"size": "7B", "part": "rollout", "failed": "out of memory"},
    ]
    text = accelerator.table(lines)
    assert "| 7B | decode | ours | 8 rows | 800 | 0.01 | 25% of the copy |" in text
    assert "| 7B | update | torch |  | 9 | 2 | 50% of the product |" in text
    assert "| 7B | rollout | | failed |" in text
