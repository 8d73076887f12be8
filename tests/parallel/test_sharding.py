"""Layouts on eight devices: what is split, what stays whole, and that it changes nothing but where numbers lie."""

import functools
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging
from flax import nnx
from jax.sharding import PartitionSpec

from routerl_jax.models.config import EncoderConfig
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.encoder import Encoder
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.parallel.mesh import batch_sharding, make_mesh
from routerl_jax.parallel.sharding import LAYOUTS, partition_spec, shardings
from tests.models.families import hf_logits, random_decoder

# Every axis of these can be divided by 8.
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 6,
}
NORMS = {"attention_norm", "mlp_norm", "final_norm"}
BIASES = {"q_bias", "k_bias", "v_bias"}
# family -> (small parameters that no layout splits, biases that only `tensor` splits)
FAMILIES: dict[str, tuple[set[str], set[str]]] = {
    "llama": (NORMS, set()),
    "llama_bias": (NORMS | {"o_bias"}, BIASES),
    "qwen2_tied": (NORMS, BIASES),
    "qwen3": (NORMS | {"q_norm", "k_norm"}, set()),
}
MESHES = [
    ({"fsdp": 8}, "fsdp"),
    ({"data": 2, "fsdp": 4}, "fsdp"),
    ({"tensor": 8}, "tensor"),
    ({"fsdp": 2, "tensor": 4}, "fsdp+tensor"),
    ({"data": 2, "fsdp": 2, "tensor": 2}, "fsdp+tensor"),
]
TOKENS = np.random.default_rng(0).integers(0, 128, (8, 12))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(family: str) -> tuple[pathlib.Path, np.ndarray]:
        directory = tmp_path_factory.mktemp(family)
        hf, _ = random_decoder(family, directory, **SIZES)
        return directory, hf_logits(hf, TOKENS)

    return make


def leaves(model: nnx.Module) -> dict[str, jax.Array]:
    return {path[-1]: leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("sizes", "layout"), MESHES, ids=lambda value: str(value).replace(" ", ""))
def test_every_matrix_is_split(saved: Any, family: str, sizes: dict[str, int], layout: str) -> None:
    """By its bytes on one device: 1 / (fsdp * tensor) of every matrix, all of every norm scale."""
    mesh = make_mesh(sizes)
    model = load_pretrained(str(saved(family)[0]), mesh=mesh, layout=layout)
    whole, biases = FAMILIES[family]
    found = leaves(model)
    assert whole | biases < set(found)
    split = math.prod(size for axis, size in sizes.items() if axis != "data")
    for name, array in found.items():
        parts = {math.prod(shard.data.shape) for shard in array.addressable_shards}
        ways = 1 if name in whole else sizes.get("tensor", 1) if name in biases else split
        assert parts == {array.size // ways}, name
        if name in whole | biases:  # a vector per layer, or of a head's width per head
            assert array.size <= 2 * 16 * 6, name
        else:
            assert array.size >= 64 * 96, name


@pytest.mark.parametrize(
    ("family", "sizes", "layout"),
    [
        ("llama_bias", {"fsdp": 8}, "fsdp"),
        ("qwen3", {"fsdp": 2, "tensor": 4}, "fsdp+tensor"),
        ("qwen2_tied", {"data": 2, "fsdp": 2, "tensor": 2}, "fsdp+tensor"),
        ("llama", {"tensor": 8}, "tensor"),
        ("llama", {"data": 8}, "replicated"),
    ],
)
def test_logits_do_not_depend_on_the_layout(saved: Any, family: str, sizes: dict[str, int], layout: str) -> None:
    """1e-5 from one device: partial sums of a split axis are added in another order; 1e-4 from transformers."""
    directory, expected = saved(family)
    mesh = make_mesh(sizes)
    model = load_pretrained(str(directory), mesh=mesh, layout=layout)
    run = nnx.jit(Decoder.__call__)
    spread = run(model, jax.device_put(TOKENS, batch_sharding(mesh)))
    single = run(load_pretrained(str(directory)), TOKENS)
    assert len(spread.sharding.device_set) == 8
    np.testing.assert_allclose(spread, single, rtol=0, atol=1e-5)
    np.testing.assert_allclose(spread, expected, rtol=0, atol=1e-4)


def test_values_shapes_and_loading_agree(saved: Any) -> None:
    """`shardings` of values, of abstract shapes, and what load_pretrained did with the checkpoint, are one thing."""
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    directory, _ = saved("qwen3")
    model = load_pretrained(str(directory), mesh=mesh, layout="fsdp+tensor")
    values = nnx.state(model, nnx.Param)
    shapes = nnx.state(nnx.eval_shape(lambda: Decoder(model.config, jax.random.key(0))), nnx.Param)
    plain = nnx.state(load_pretrained(str(directory)), nnx.Param)
    moved = jax.tree.map(jax.device_put, plain, shardings(plain, mesh, "fsdp+tensor"))
    for one, two, value, other in zip(
        *(jax.tree.leaves(t) for t in (shardings(values, mesh, "fsdp+tensor"), shardings(shapes, mesh, "fsdp+tensor"))),
        *(jax.tree.leaves(t) for t in (values, moved)),
        strict=True,
    ):
        assert one == two
        assert value.sharding.is_equivalent_to(one, value.ndim)
        assert other.sharding.is_equivalent_to(one, value.ndim)
        np.testing.assert_array_equal(value, other)


def test_encoders_too() -> None:
    config = EncoderConfig(model_type="bert", vocab_size=64, embed=64, layers=2, heads=8, mlp=96, max_length=16)
    params = nnx.state(nnx.eval_shape(lambda: Encoder(config, jax.random.key(0))), nnx.Param)
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    flat = dict(nnx.to_flat_state(shardings(params, mesh, "fsdp+tensor")))
    for path, leaf in nnx.to_flat_state(params):
        shape = leaf.get_value().shape
        ways = math.prod(shape) // math.prod(flat[path].get_value().shard_shape(shape))
        vector = path[-1].endswith(("norm", "norm_bias", "o_bias", "down_bias"))
        assert ways == (1 if vector else {"qkv_bias": 2, "up_bias": 2, "position": 4, "token_type": 4}.get(path[-1], 8))


def test_partition_spec() -> None:
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    rules = LAYOUTS["fsdp+tensor"]
    assert partition_spec((3, 8, 6), ("layers", "embed", "mlp"), mesh, rules) == PartitionSpec(None, "fsdp", "tensor")
    assert partition_spec((8, 6), (None, None), mesh, rules) == PartitionSpec(None, None)
    both = {"embed": ("fsdp", "tensor")}
    assert partition_spec((16,), ("embed",), mesh, both) == PartitionSpec(("fsdp", "tensor"))
    with pytest.raises(ValueError, match=r"array of shape \(3, 4\) was given axes \('embed',\)"):
        partition_spec((3, 4), ("embed",), mesh, rules)


def test_what_can_not_be_divided_stays_whole_and_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = []
    monkeypatch.setattr(logging, "info", lambda text, *values: lines.append(text % values))
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    rules = LAYOUTS["fsdp+tensor"]
    assert partition_spec((6, 8, 5), ("embed", "mlp", "kv_heads"), mesh, rules) == PartitionSpec(None, "tensor", None)
    assert lines == [
        "axis embed of size 6 is not divisible by ('fsdp',)=4 and stays whole",
        "axis kv_heads of size 5 is not divisible by ('tensor',)=2 and stays whole",
    ]
    lines.clear()
    one = make_mesh(devices=jax.devices()[:1])
    partition_spec((5, 7), ("embed", "vocab"), one, rules)
    assert not lines  # one device divides everything


def test_undividable_heads(saved: Any, tmp_path: pathlib.Path) -> None:
    """Fewer key/value heads than `tensor` devices: they are kept whole on this axis, and logits stay what they are."""
    hf, _ = random_decoder("llama_mqa", tmp_path)  # one key/value head, 131 words
    model = load_pretrained(str(tmp_path), mesh=make_mesh({"data": 2, "tensor": 4}), layout="tensor")
    found = leaves(model)
    assert found["k"].sharding.is_fully_replicated
    assert found["embedding"].sharding.is_fully_replicated
    assert not found["q"].sharding.is_fully_replicated
    tokens = jnp.asarray(TOKENS[:2])
    np.testing.assert_allclose(nnx.jit(Decoder.__call__)(model, tokens), hf_logits(hf, tokens), rtol=0, atol=1e-4)


def test_unknown_layout(saved: Any) -> None:
    with pytest.raises(ValueError, match=r"unknown layout 'zero3'; layouts are replicated, fsdp, tensor, fsdp\+tensor"):
        load_pretrained(str(saved("llama")[0]), layout="zero3")
