"""Layouts on eight devices: what is split, what stays whole, and that it changes nothing but where numbers lie."""

import functools
import math
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from routerl_jax.models import layers
from routerl_jax.models.config import EncoderConfig
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.families.bert import Encoder
from routerl_jax.models.family import FAMILIES as model_families
from routerl_jax.models.family import Family, family_of
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.parallel import sharding
from routerl_jax.parallel.mesh import AXES, batch_sharding, make_mesh
from routerl_jax.parallel.sharding import LAYOUTS, Axes, create_sharded, partition_spec, shardings
from tests.models.families import hf_logits, random_decoder
from tests.models.published import PUBLISHED, abstract_model

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
        ("qwen3_moe", {"data": 2, "fsdp": 2, "tensor": 2}, "fsdp+tensor"),
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


class Pair(nnx.Module):
    """A matrix of 3072 entries, a vector, and a number that is no parameter."""

    def __init__(self) -> None:
        init = layers.Initializer(jax.random.key(3), 0.5, jnp.dtype("float32"))
        self.matrix = init.normal((2, 32, 48), ("layers", "embed", "mlp"))
        self.scale = init.ones((32,), (None,))
        self.bias = init.normal((2, 48), ("layers", "mlp"))
        self.width = 48


def test_create_sharded_draws_the_same_numbers_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the mesh, by one program or by several; but for the last bit of a product, what the model alone draws."""
    found = []
    for sizes, layout, least in (({"fsdp": 4, "tensor": 2}, "fsdp+tensor", 2**26), ({"data": 8}, "replicated", 3000)):
        monkeypatch.setattr(sharding, "_ALONE_FROM", least)
        model = create_sharded(Pair, make_mesh(sizes), layout)
        assert model.width == 48
        found.append(leaves(model))
    assert found[0]["matrix"].sharding.spec == PartitionSpec(None, "fsdp", "tensor")
    assert found[0]["bias"].sharding.spec == PartitionSpec(None, "tensor")
    for name, value in leaves(Pair()).items():
        np.testing.assert_array_equal(found[0][name], found[1][name])
        np.testing.assert_allclose(found[0][name], value, rtol=0, atol=1e-7)  # of numbers up to 2


def test_large_stacks_are_drawn_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_AT_ONCE", 1000)
    init = layers.Initializer(jax.random.key(0), 0.5, jnp.dtype("float32"))
    stack = np.asarray(init.normal((4, 50, 100), ("layers", "embed", "mlp"))[...])
    assert abs(stack.std() - 0.5) < 0.02  # 20,000 draws: 8 standard errors
    assert np.abs(np.corrcoef(stack.reshape(4, -1)) - np.eye(4)).max() < 0.06  # layers differ: 4 standard errors


def spec(shape: tuple[int, ...], axes: Axes, layout: str, **sizes: int) -> tuple[PartitionSpec, list[str]]:
    shape_of_mesh = tuple(sizes.get(axis, 1) for axis in AXES)
    return partition_spec(shape, axes, AbstractMesh(shape_of_mesh, AXES), layout)


def test_partition_spec() -> None:
    matrix = ("layers", "embed", "mlp")
    assert spec((3, 8, 6), matrix, "fsdp+tensor", fsdp=4, tensor=2) == (PartitionSpec(None, "fsdp", "tensor"), [])
    assert spec((8, 6), (None, None), "fsdp+tensor", fsdp=4, tensor=2) == (PartitionSpec(None, None), [])
    assert spec((8, 6), ("embed", "embed"), "fsdp", fsdp=2) == (PartitionSpec("fsdp", None), [])
    assert spec((5, 7), ("embed", "vocab"), "fsdp+tensor", data=8) == (PartitionSpec(None, None), [])
    with pytest.raises(ValueError, match=r"array of shape \(3, 4\) was given axes \('embed',\)"):
        spec((3, 4), ("embed",), "fsdp", fsdp=2)
    with pytest.raises(ValueError, match=r"unknown layout 'zero3'; layouts are replicated, fsdp, tensor, fsdp\+tensor"):
        spec((4,), ("embed",), "zero3", fsdp=2)


def test_what_the_first_axis_does_not_divide_spills_onto_another() -> None:
    q, o, up = (
        ("layers", *axes) for axes in (("embed", "heads", "head_dim"), ("heads", "head_dim", "embed"), ("embed", "mlp"))
    )
    # SmolLM2-135M: 576 are not 128 times anything, 1536 and 49152 are
    assert spec((30, 576, 1536), up, "fsdp", fsdp=128) == (
        PartitionSpec(None, None, "fsdp"),
        ["embed=576 can't be divided by fsdp=128: split along mlp=1536 instead"],
    )
    assert spec((49152, 576), ("vocab", "embed"), "fsdp", fsdp=128)[0] == PartitionSpec("fsdp", None)
    # the mlp axis belongs to tensor already: fsdp takes a part of each part
    assert spec((30, 576, 1536), up, "fsdp+tensor", fsdp=128, tensor=4)[0] == PartitionSpec(
        None, None, ("tensor", "fsdp")
    )
    assert spec((30, 576, 128 * 3), up, "fsdp+tensor", fsdp=128, tensor=2)[0] == PartitionSpec(None, None, "tensor")
    # heads before their width
    assert spec((30, 576, 128, 128), q, "fsdp", fsdp=128)[0] == PartitionSpec(None, None, "fsdp", None)
    assert spec((30, 576, 9, 128), q, "fsdp", fsdp=128)[0] == PartitionSpec(None, None, None, "fsdp")
    # Qwen2.5-7B has 28 heads
    assert spec((28, 3584, 28, 128), q, "tensor", tensor=8) == (
        PartitionSpec(None, "tensor", None, None),
        ["heads=28 can't be divided by tensor=8: split along embed=3584 instead"],
    )
    assert spec((28, 28, 128, 3584), o, "fsdp+tensor", tensor=8, fsdp=16)[0] == PartitionSpec(
        None, None, None, ("tensor", "fsdp")
    )
    # a LoRA matrix without an embed axis
    assert spec((28, 16, 28, 128), ("layers", None, "heads", "head_dim"), "fsdp", fsdp=8) == (
        PartitionSpec(None, None, None, "fsdp"),
        ["no embed axis: split along head_dim=128 instead"],
    )


def test_what_stays_whole_is_told() -> None:
    kv = ("layers", "embed", "kv_heads", "head_dim")
    assert spec((28, 3584, 4, 128), kv, "fsdp+tensor", fsdp=4, tensor=8) == (
        PartitionSpec(None, "fsdp", None, None),
        ["kv_heads=4 can't be divided by tensor=8: whole on every device of that axis, by design"],
    )
    small, said = spec((30, 9, 64), ("layers", "heads", "head_dim"), "tensor", tensor=8)
    assert small == PartitionSpec(None, None, None)
    assert said == ["heads=9 can't be divided by tensor=8: small, and whole"]
    nothing, said = spec((30, 577, 1537), ("layers", "embed", "mlp"), "fsdp", fsdp=8)
    assert nothing == PartitionSpec(None, None, None)
    assert said == [
        "embed=577 can't be divided by fsdp=8, nor is there another axis that can be: WHOLE on every device of that axis"
    ]


def test_parameters_of_one_reason_share_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logged once, at a level that programs show where memory is lost and nobody wanted that."""
    lines: list[tuple[str, str]] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(logging, level, lambda text, *values, level=level: lines.append((level, text % values)))
    sharding._say.cache_clear()
    params = nnx.state(abstract_model("SmolLM2-135M"), nnx.Param)
    mesh = AbstractMesh((1, 256, 1), AXES)
    for _ in range(2):
        shardings(params, mesh, "fsdp")
    fault = "layout fsdp: embed=576 can't be divided by fsdp=256"
    assert sorted(lines) == [
        ("info", f"{fault}: split along mlp=1536 instead: blocks.down, blocks.gate, blocks.up"),
        ("info", f"{fault}: split along vocab=49152 instead: embedding"),
        (
            "warning",
            f"{fault}, nor is there another axis that can be: WHOLE on every device of that axis: "
            "blocks.k, blocks.o, blocks.q, blocks.v",
        ),
    ]


# Devices as (data, fsdp, tensor): 8, 64 and 256 of them.
PODS = {
    "fsdp": [(1, 8, 1), (1, 64, 1), (4, 64, 1), (1, 256, 1)],
    "tensor": [(1, 1, 8), (1, 16, 4), (1, 8, 8), (1, 32, 8), (1, 16, 16)],
    "fsdp+tensor": [(1, 4, 2), (1, 2, 4), (1, 16, 4), (1, 8, 8), (1, 64, 4), (1, 32, 8), (1, 16, 16), (2, 16, 8)],
}


# They have the residual stream alone, which only fsdp splits: neither heads nor channels nor words.
NOT_FOR_TENSOR = {
    "position": "positions (0.5 to 17 MB)",
    "patch": "pixels of a patch (1 to 3 MB)",
    "places": "learned positions of patches (5 MB)",
    "latents": "NV-Embed's latents (4 MB)",
    "router": "routers (0.5 to 1 MB a layer): every device chooses experts for all its tokens",
}


def excuse(name: str, parameter: str, config: dict[str, Any], fsdp: int, tensor: int) -> str | None:
    """Why a parameter of more than 1 MB may be split fewer ways than the mesh has devices for it. The whole list."""
    kv_heads = config.get("vlm_config", config.get("text_config", config)).get("num_key_value_heads", tensor)
    if parameter.endswith(("blocks.k", "blocks.v")) and kv_heads % tensor:
        return "each device computes all key/value heads, as there are fewer than devices on tensor"
    if tensor > 1 and (reason := NOT_FOR_TENSOR.get(parameter.rpartition(".")[-1])):
        return reason
    if name == "SmolLM2-135M" and parameter in ("blocks.q", "blocks.k", "blocks.v", "blocks.o") and fsdp == 256:
        return "neither 576 nor 9 heads nor their width 64 can be divided by 256"
    if name == "Qwen3-VL-8B" and parameter.startswith("visual.") and fsdp == 256:
        return "neither the tower's 1152 nor its 4304 nor its 16 heads can be divided by 256"
    return None


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_parameter_of_a_published_model_stays_whole_by_accident(name: str) -> None:
    params = nnx.to_flat_state(nnx.state(abstract_model(name), nnx.Param))
    spilled = set()
    for layout, sizes in [(layout, sizes) for layout, pods in PODS.items() for sizes in pods]:
        mesh = AbstractMesh(sizes, AXES)
        targets = dict(nnx.to_flat_state(shardings(nnx.from_flat_state(params), mesh, layout)))
        ways = math.prod(mesh.shape[split.over] for split in LAYOUTS[layout])
        fsdp, tensor = (mesh.shape[axis] if axis in layout else 1 for axis in ("fsdp", "tensor"))
        for path, variable in params:
            shape = variable.get_value().shape
            found = math.prod(shape) // math.prod(targets[path].get_value().shard_shape(shape))
            parameter = ".".join(path)
            if math.prod(shape) * 2 > 2**20 and found < ways:
                assert excuse(name, parameter, PUBLISHED[name], fsdp, tensor), (layout, sizes, parameter, shape, found)
                spilled.add(parameter)
            assert found <= ways
    assert len(spilled) <= (8 if name == "Qwen3-VL-8B" else 5)  # the excuses are for few


def test_every_family_has_a_published_model() -> None:
    """Add one to tests/models/published.py together with a family. (Names of one `create` and `rules` share theirs.)"""

    def content(family: Family) -> tuple[Any, Any]:
        return family.create, family.rules

    covered = {content(family_of(config, name)) for name, config in PUBLISHED.items()}
    assert {name for name in model_families if content(model_families.get(name)) not in covered} == set()


@pytest.mark.slow
def test_spilled_weights_compute_the_same(saved: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Six heads on four devices, a residual stream of 60 on eight; 1e-4 from transformers as everywhere.

    What was split for want of a better axis is not put together again: no program gathers a matrix (its spill costs
    sums over activations).
    """
    monkeypatch.setattr(sharding, "_SPILL_FROM", 1)
    sizes = SIZES | {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    hf, _ = random_decoder("qwen2_tied", tmp_path, **sizes | {"intermediate_size": 88})
    tokens = TOKENS[:, :7]
    expected = hf_logits(hf, tokens)
    for mesh, layout, place in [
        ({"data": 2, "tensor": 4}, "tensor", PartitionSpec(None, "tensor", None, None)),
        ({"fsdp": 8}, "fsdp", PartitionSpec(None, None, None, "fsdp")),
        ({"fsdp": 2, "tensor": 4}, "fsdp+tensor", PartitionSpec(None, "tensor", "fsdp", None)),
    ]:
        model = load_pretrained(str(tmp_path), mesh=make_mesh(mesh), layout=layout)
        assert model.blocks.q[...].sharding.spec == place  # type: ignore[union-attr]
        graph, params = nnx.split(model)
        run = jax.jit(lambda params, tokens, graph=graph: nnx.merge(graph, params)(tokens))
        np.testing.assert_allclose(run(params, tokens), expected, rtol=0, atol=1e-4)
        if layout == "tensor":
            text = run.lower(params, tokens).compile().as_text()
            gathered = {tuple(map(int, m.split(","))) for m in re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)}
            assert {math.prod(shape) for shape in gathered} <= {math.prod(tokens.shape) * 60}, gathered


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
    with pytest.raises(ValueError, match=r"unknown layout 'zero3'"):
        load_pretrained(str(saved("llama")[0]), layout="zero3")
