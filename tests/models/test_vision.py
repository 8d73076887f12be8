"""Vision towers beside transformers' on random weights, and what batching, padding and sharding must not change."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from routerl_jax.models import attention as attention_module
from routerl_jax.models.attention import Attention
from routerl_jax.models.config import UnsupportedModelError, VisionConfig
from routerl_jax.models.families.qwen_vl import vision_from_hf, vision_rules, vision_to_hf
from routerl_jax.models.images import ImageProcessor
from routerl_jax.models.patches import VisionInputs, blank, concatenate
from routerl_jax.models.safetensors_files import Checkpoint, TensorWriter
from routerl_jax.models.vision_language import VisionTower, full_attention, window_attention
from routerl_jax.parallel.mesh import batch_sharding, make_mesh
from routerl_jax.parallel.sharding import shardings

torch.set_num_threads(1)

# Sizes are distinct, so that a wrong transposition can't fit. Windows are 4 x 4 groups of 2 x 2 patches of 4 pixels.
_COMMON = {"depth": 4, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_WINDOWED = {**_COMMON, "hidden_size": 48, "intermediate_size": 88, "out_hidden_size": 40, "window_size": 32}
# Learned positions of 5 x 5 are stretched over up to 37 columns of patches.
_STRETCHED = {
    **_COMMON,
    "hidden_size": 32,
    "intermediate_size": 88,
    "out_hidden_size": 40,
    "num_position_embeddings": 25,
}
_TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "full_layers_inside": ("qwen2_5_vl", {**_WINDOWED, "fullatt_block_indexes": [1, 2]}),
    "full_layer_last": ("qwen2_5_vl", {**_WINDOWED, "fullatt_block_indexes": [3], "num_heads": 2}),
    "windows_only": ("qwen2_5_vl", {**_WINDOWED, "fullatt_block_indexes": [], "depth": 3}),
    "all_full": ("qwen2_5_vl", {**_WINDOWED, "fullatt_block_indexes": [0, 1, 2, 3]}),
    "smaller_window": ("qwen2_5_vl", {**_WINDOWED, "fullatt_block_indexes": [0, 2], "window_size": 20}),
    "qwen2_vl": ("qwen2_vl", {**_COMMON, "embed_dim": 32, "mlp_ratio": 3, "hidden_size": 40}),
    "qwen3_vl": ("qwen3_vl", {**_STRETCHED, "deepstack_visual_indexes": [0, 2]}),
    "no_deep_layer": ("qwen3_vl", {**_STRETCHED, "deepstack_visual_indexes": []}),
}
# Height and width: smaller than a window, exactly two, ends inside a window on both axes, a strip.
_SIZES = [(17, 9), (64, 32), (75, 43), (8, 150)]


def _hf_tower(name: str) -> torch.nn.Module:
    kind, settings = _TOWERS[name]
    torch.manual_seed(0)
    if kind == "qwen2_vl":
        model = Qwen2VisionTransformerPretrainedModel(Qwen2VLVisionConfig(**settings))
    elif kind == "qwen3_vl":
        model = Qwen3VLVisionModel(Qwen3VLVisionConfig(**settings))
    else:
        model = Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLVisionConfig(**settings))
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim > 1:  # attention far from uniform, features of order one
                parameter.normal_(0, 1.2 / np.prod(parameter.shape[1:]) ** 0.5)
            elif path.endswith("bias"):
                parameter.normal_(0, 0.3)
            else:
                parameter.uniform_(0.5, 1.5)
    return model.eval()


def _stacked(values: dict[str, np.ndarray], tower: VisionTower) -> nnx.State:
    """Tensors by transformers' names as our parameters."""
    rules, filled = vision_rules(tower.config), []
    for path, variable in nnx.to_flat_state(nnx.state(tower, nnx.Param)):
        rule, shape = rules[path], variable.get_value().shape
        name = rule.name.removeprefix("visual.")
        if "{}" in name:
            value = np.stack([rule.to_ours(values[name.format(layer)], shape[1:]) for layer in range(shape[0])])
        else:
            value = rule.to_ours(values[name], shape)
        assert value.shape == shape
        filled.append((path, variable.replace(jnp.asarray(value))))
    return nnx.from_flat_state(filled)


def _our_tower(name: str, hf: torch.nn.Module, compute_dtype: Any = jnp.float32) -> VisionTower:
    kind, settings = _TOWERS[name]
    config = vision_from_hf({"model_type": kind, "vision_config": settings})
    tower = nnx.eval_shape(lambda: VisionTower(config, jax.random.key(0), compute_dtype=compute_dtype))
    nnx.update(tower, _stacked({path: value.detach().numpy() for path, value in hf.named_parameters()}, tower))
    return tower


def _processor(config: VisionConfig) -> ImageProcessor:
    return ImageProcessor(patch_size=config.patch, min_pixels=64, max_pixels=10**5, window=config.window)


@functools.cache
def _pictures() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 256, (*size, 3), np.uint8) for size in _SIZES]


@functools.cache
def _hf_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    processor = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=10**5)
    result = processor(_pictures(), return_tensors="pt")
    return result["pixel_values"], result["image_grid_thw"]


def _hf_features(hf: torch.nn.Module) -> torch.Tensor:
    """Of the last layer, [tokens, D]; of a tower with deep layers theirs, too, [tokens, N, D]."""
    found = hf(*_hf_inputs())
    deep = getattr(found, "deepstack_features", None)
    return torch.stack([found.pooler_output, *deep], 1) if deep else found.pooler_output


def _our_inputs(config: VisionConfig, pictures: list[np.ndarray], patches: int = 16 * 64) -> VisionInputs:
    """In an array that is larger than all the pictures."""
    return concatenate([_processor(config)(picture) for picture in pictures], patches)


_run = nnx.jit(lambda tower, inputs: tower(inputs))


def _features(tower: VisionTower, inputs: VisionInputs) -> np.ndarray:
    """Features of the image tokens in order."""
    slots = np.asarray(inputs.slots)
    return np.asarray(_run(tower, inputs), np.float32)[slots[slots >= 0]]


@functools.cache
def _pair(name: str) -> tuple[torch.nn.Module, VisionTower]:
    hf = _hf_tower(name)
    return hf, _our_tower(name, hf)


@pytest.mark.parametrize("name", list(_TOWERS))
def test_features_of_several_pictures_equal_those_of_transformers(name):
    hf, tower = _pair(name)
    with torch.no_grad():
        expected = _hf_features(hf).numpy()
    found = _features(tower, _our_inputs(tower.config, _pictures()))
    assert found.shape == expected.shape
    assert np.abs(expected).max() > 1  # or the bound would say little
    assert np.abs(found - expected).max() <= 1e-4


@pytest.mark.parametrize(
    ("name", "remat"),
    [
        ("full_layers_inside", "none"),
        pytest.param("full_layer_last", "full", marks=pytest.mark.slow),
        pytest.param("qwen2_vl", "dots", marks=pytest.mark.slow),
        ("qwen3_vl", "full"),
    ],
)
def test_gradients_equal_those_of_transformers(name, remat):
    hf, tower = _pair(name)
    hf.zero_grad()
    theirs = torch.tanh(_hf_features(hf))
    weights = np.random.default_rng(5).normal(size=theirs.shape).astype(np.float32)
    (theirs * torch.as_tensor(weights)).mean().backward()
    expected = _stacked({path: value.grad.numpy() for path, value in hf.named_parameters()}, tower)
    inputs = _our_inputs(tower.config, _pictures())
    slots = np.asarray(inputs.slots)

    def loss(tower: VisionTower) -> jax.Array:
        features = tower(inputs, remat=remat)[slots[slots >= 0]]
        return (jnp.tanh(features) * weights).mean()

    found = nnx.jit(nnx.grad(loss))(tower)
    for (path, ours), (_, theirs) in zip(nnx.to_flat_state(found), nnx.to_flat_state(expected), strict=True):
        ours, theirs = np.asarray(ours.get_value()), np.asarray(theirs.get_value())
        assert np.abs(ours - theirs).max() <= 1e-3 * np.abs(theirs).max(), path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full_layers_inside", "qwen2_vl"])
def test_bfloat16_is_as_near_to_float32_as_transformers_bfloat16(name):
    hf = _hf_tower(name)
    with torch.no_grad():
        exact = hf(*_hf_inputs()).pooler_output.numpy()
        theirs = hf.bfloat16()(_hf_inputs()[0].bfloat16(), _hf_inputs()[1]).pooler_output.float().numpy()
    ours = _our_tower(name, _hf_tower(name), jnp.bfloat16)
    found = _features(ours, _our_inputs(ours.config, _pictures()))
    ulp = 2.0**-7 * np.abs(exact).max()  # at the scale of the largest feature, over which the errors of a layer spread
    assert np.abs(found - exact).max() <= 2 * ulp
    ours_rms, theirs_rms = (np.sqrt(np.mean((value - exact) ** 2)) for value in (found, theirs))
    assert ours_rms <= 1.1 * theirs_rms


@pytest.mark.parametrize("name", ["full_layers_inside", "qwen2_vl", "qwen3_vl"])
def test_what_shares_the_array_changes_nothing(name):
    """Alone in the bucket, or between other pictures."""
    _, tower = _pair(name)
    together = _features(tower, _our_inputs(tower.config, _pictures()))
    start = 0
    for picture in _pictures():
        alone = _features(tower, _our_inputs(tower.config, [picture]))
        np.testing.assert_allclose(alone, together[start : start + len(alone)], atol=2e-5)  # sums in another order
        start += len(alone)
    assert start == len(together)


def test_rows_are_independent_and_rows_without_pictures_are_finite():
    _, tower = _pair("full_layers_inside")
    alone = _our_inputs(tower.config, _pictures())
    size = alone.patches.shape[0]
    rows = jax.tree.map(lambda *parts: np.stack(parts), blank(size, tower.config.patch_dim), alone)
    features = np.asarray(_run(tower, rows))
    assert features.shape == (2, size // 4, 40)
    assert np.isfinite(features).all()
    np.testing.assert_allclose(features[1], np.asarray(_run(tower, alone)), atol=2e-5)


def test_padding_has_no_gradient():
    _, tower = _pair("full_layers_inside")
    inputs = _our_inputs(tower.config, _pictures())
    slots = inputs.slots[inputs.slots >= 0]

    def loss(patches: jax.Array) -> jax.Array:
        changed = VisionInputs(
            patches=patches, positions=inputs.positions, segments=inputs.segments, slots=inputs.slots
        )
        return jnp.square(tower(changed)[slots]).sum()

    gradient = np.abs(np.asarray(jax.jit(jax.grad(loss))(inputs.patches))).sum(-1)
    padding = np.asarray(inputs.segments) == 0
    assert padding.any()
    assert gradient[padding].max() == 0
    assert gradient[~padding].min() > 0


@pytest.mark.slow
def test_blocks_equal_one_product(monkeypatch):
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 2, 200, 3, 8)).astype(np.float32)
    segments = np.repeat([[1, 1, 2, 3, 0], [1, 2, 2, 2, 2]], 40, axis=1)
    real = segments > 0  # what padding gives means nothing
    logits = np.einsum("bqnh,bsnh->bnqs", q.astype(np.float64), k) / np.sqrt(8)
    logits = np.where((segments[:, :, None] == segments[:, None])[:, None], logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    expected = np.einsum("bnqs,bsnh->bqnh", weights / weights.sum(-1, keepdims=True), v)
    for most, size in ((200, 200), (80, 67)):  # the last of three tiles is padded
        monkeypatch.setattr(attention_module, "_CPU_TILES", (most, most))
        text = str(jax.make_jaxpr(lambda *args: full_attention(*args))(q, k, v, segments))
        assert f"{size},{size}" in text
        assert ("200,200" in text) == (most == 200)  # no product of all with all
        np.testing.assert_allclose(full_attention(q, k, v, segments)[real], expected[real], atol=1e-5)
        blockwise = jax.grad(lambda *qkv: jnp.sin(full_attention(*qkv, segments))[real].sum(), argnums=(0, 1, 2))
        whole = jax.grad(
            lambda *qkv: jnp.sin(window_attention(*qkv, segments, qkv[0].shape[1]))[real].sum(), argnums=(0, 1, 2)
        )
        gradient, again = jax.jit(blockwise)(q, k, v), jax.jit(whole)(q, k, v)
        for found, wanted in zip(gradient, again):
            np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_pictures_that_share_no_block_are_not_multiplied(monkeypatch):
    """What is not computed can't be spoilt: a product with another picture's numbers, masked or not, would carry their nan on.
    In another row of the batch the same blocks belong together, and padding lies among a picture's patches."""
    monkeypatch.setattr(attention_module, "_CPU_TILES", (16, 16))
    q, k, v = np.random.default_rng(2).normal(size=(3, 1, 96, 2, 4)).astype(np.float32)
    segments = np.repeat([[1, 2, 3]], 32, axis=1)
    segments[0, 5:9] = 0
    spoilt = v.copy()
    spoilt[0, 32:64] = np.nan
    found = np.asarray(full_attention(q, k, spoilt, segments))
    assert np.isnan(found[0, 32:64]).all()
    own = [patch for patch in range(96) if segments[0, patch] in (1, 3)]
    np.testing.assert_allclose(found[0, own], window_attention(q, k, v, segments, 96)[0, own], atol=1e-6)
    both = np.concatenate([segments, np.ones_like(segments)])
    q, k, v = (np.concatenate([part, part]) for part in (q, k, v))
    np.testing.assert_allclose(full_attention(q, k, v, both)[1], window_attention(q, k, v, both, 96)[1], atol=1e-6)


def test_a_large_page_needs_no_memory_for_all_its_logits():
    """16,384 patches, forward and backward: the logits of 16 heads would be 17 GB, in float32, and again their softmax."""
    shape = jax.ShapeDtypeStruct((1, 16_384, 16, 80), jnp.bfloat16)
    segments = jax.ShapeDtypeStruct((1, 16_384), jnp.int32)
    gradient = jax.grad(lambda q, k, v, ids: full_attention(q, k, v, ids).astype(jnp.float32).sum(), argnums=(0, 1, 2))
    compiled = jax.jit(gradient).lower(shape, shape, shape, segments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2e9


def test_full_layers_go_through_splash_where_it_is_given():
    """In Pallas's interpreter; rows lie on two devices, heads on two."""
    _, tower = _pair("full_layers_inside")
    inputs = [_our_inputs(tower.config, [picture], 3 * 64) for picture in _pictures()[:2]]
    rows = jax.tree.map(lambda *parts: np.stack(parts), *inputs)
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4])
    splash = Attention(kind="splash", mesh=mesh, interpret=True)
    found = nnx.jit(lambda tower, rows: tower(rows, attention=splash))(tower, rows)
    expected = np.asarray(_run(tower, rows))
    for row, inputs_of_row in enumerate(inputs):
        slots = np.asarray(inputs_of_row.slots)
        used = slots[slots >= 0]  # splash pads rows to its lanes, which padding attends to
        np.testing.assert_allclose(np.asarray(found)[row, used], expected[row, used], atol=1e-4)


def test_windows_attend_inside_themselves_and_their_picture():
    rng = np.random.default_rng(1)
    q, k, v = rng.normal(size=(3, 1, 12, 2, 4)).astype(np.float32)
    segments = np.array([[1, 1, 1, 0, 2, 2, 2, 2, 0, 0, 0, 0]])
    inside = np.arange(12) // 4 + 10 * segments[0]  # a window's part of one picture is a segment of its own
    found = window_attention(q, k, v, segments, 4)
    np.testing.assert_allclose(found, full_attention(q, k, v, inside[None]), atol=1e-6)


# As published: Qwen2.5-VL-3B's and Qwen2-VL-2B's towers.
_PUBLISHED = {
    "qwen2_5_vl": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 2048},
    "qwen2_vl": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "hidden_size": 1536},
}


@pytest.mark.parametrize(
    ("layout", "sizes"), [("fsdp", {"fsdp": 8}), ("fsdp+tensor", {"fsdp": 2, "tensor": 4}), ("tensor", {"tensor": 4})]
)
@pytest.mark.parametrize("kind", list(_PUBLISHED))
def test_layouts_split_every_matrix_of_the_published_towers(kind, layout, sizes):
    config = vision_from_hf({"model_type": kind, "vision_config": _PUBLISHED[kind]})
    params = nnx.state(nnx.eval_shape(lambda: VisionTower(config, jax.random.key(0))), nnx.Param)
    mesh = make_mesh(sizes, jax.devices()[: math.prod(sizes.values())])
    targets = dict(nnx.to_flat_state(shardings(params, mesh, layout)))
    for path, variable in nnx.to_flat_state(params):
        shape, target = variable.get_value().shape, targets[path].get_value()
        ways = math.prod(shape) // math.prod(target.shard_shape(shape))
        if path == ("patch",):  # has the tower's width, but neither heads nor feed-forward
            assert ways == sizes.get("fsdp", 1)
        elif not path[-1].endswith(("norm", "bias")):
            assert ways == mesh.size, f"{path} is split {ways} ways by {target.spec}"


@pytest.mark.slow
def test_sharded_weights_and_rows_give_the_same_features():
    _, tower = _pair("full_layers_inside")
    inputs = [_our_inputs(tower.config, [picture]) for picture in _pictures()]
    expected = np.stack([np.asarray(_run(tower, row)) for row in inputs])
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    params = nnx.state(tower, nnx.Param)
    sharded = nnx.merge(nnx.graphdef(tower), jax.device_put(params, shardings(params, mesh, "fsdp+tensor")))
    rows = jax.device_put(jax.tree.map(lambda *parts: np.stack(parts), *inputs), batch_sharding(mesh))
    np.testing.assert_allclose(np.asarray(_run(sharded, rows)), expected, atol=2e-5)  # sums in another order


@pytest.mark.parametrize("name", ["full_layers_inside", "qwen2_vl"])
def test_blocks_of_a_sharded_parameter_are_read_from_their_tensor(name, tmp_path):
    """Every block of every split, heads of the fused matrix included, and back to their tensor bit by bit."""
    kind, settings = _TOWERS[name]
    config = vision_from_hf({"model_type": kind, "vision_config": settings})
    tower = nnx.eval_shape(lambda: VisionTower(config, jax.random.key(0)))
    for path, variable in nnx.to_flat_state(nnx.state(tower, nnx.Param)):
        rule = vision_rules(config)[path]
        shape = variable.get_value().shape[path[0] == "blocks" :]
        theirs = np.arange(np.prod(shape), dtype=np.float32).reshape(rule.their_shape(shape))
        whole = rule.to_ours(theirs, shape)
        np.testing.assert_array_equal(rule.to_theirs(whole), theirs)
        with TensorWriter(tmp_path / "model.safetensors", {"x": (theirs.shape, theirs.dtype)}) as writer:
            writer.write(theirs)
        checkpoint = Checkpoint(tmp_path)
        halves = [[(0, size), (0, size // 2), (size // 2, size)] if size % 2 == 0 else [(0, size)] for size in shape]
        for axis, choices in enumerate(halves):
            for choice in choices:
                bounds = [(0, size) for size in shape]
                bounds[axis] = choice
                expected = whole[tuple(slice(*pair) for pair in bounds)]
                found = np.full(expected.shape, np.nan, np.float32)
                checkpoint.read("x", rule, shape, [(tuple(bounds), found)])
                np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", list(_TOWERS))
def test_rules_name_every_tensor_and_configs_survive_the_round_trip(name):
    kind, settings = _TOWERS[name]
    config = vision_from_hf({"model_type": kind, "vision_config": settings})
    rules = vision_rules(config).values()
    names = {
        rule.name.format(layer)
        for rule in rules
        for layer in range(len(config.deep_layers) if "deepstack" in rule.name else config.depth)
    }
    assert names == {f"visual.{path}" for path, _ in _hf_tower(name).named_parameters()}
    written = vision_to_hf(config)
    assert vision_from_hf({"model_type": kind, "vision_config": written}) == config
    make = Qwen2VLVisionConfig if kind == "qwen2_vl" else Qwen2_5_VLVisionConfig
    theirs = make(**written).to_dict()
    assert {key: theirs[key] for key in settings} == settings


def test_published_configs_are_read():
    """What stands in Qwen2.5-VL-3B-Instruct and Qwen2-VL-2B-Instruct, where several keys are left to defaults."""
    newer = {"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
    newer |= {"in_chans": 3, "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2}
    newer |= {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "temporal_patch_size": 2}
    config = vision_from_hf({"model_type": "qwen2_5_vl", "vision_config": newer})
    assert (config.embed, config.mlp, config.out, config.window_patches, config.head_dim) == (1280, 3420, 2048, 64, 80)
    older = {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 1536}
    config = vision_from_hf({"model_type": "qwen2_vl", "vision_config": older})
    assert (config.embed, config.mlp, config.out, config.window, config.norm) == (1280, 5120, 1536, None, "layer")
    assert vision_from_hf({"model_type": "qwen2_5_vl"}).mlp == Qwen2_5_VLVisionConfig().intermediate_size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"in_channels": 1}, "in_channels=1"),
        ({"patch_size": [14, 14]}, "patch_size"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_type='default'"),
    ],
)
def test_unsupported_features_are_refused(change, message):
    with pytest.raises(UnsupportedModelError, match=message):
        vision_from_hf({"model_type": "qwen2_5_vl", "vision_config": change}, "config.json")


def test_impossible_configs_are_refused():
    good = {"model_type": "qwen2_5_vl", "depth": 2, "embed": 48, "heads": 4, "mlp": 8, "out": 8, "window": 112}
    VisionConfig(**good)
    for change, message in [
        ({"heads": 5}, "multiple of 4"),
        ({"window": 20}, "smaller than a merge group"),
        ({"window": None}, "has windows"),
        ({"full_layers": (2,)}, "depth 2"),
        ({"norm": "layer"}, "norm='rms'"),
        ({"model_type": "qwen2_vl"}, "norm='layer'"),
    ]:
        with pytest.raises(ValueError, match=message):
            VisionConfig(**{**good, **change})
    with pytest.raises(UnsupportedModelError, match="qwen2_vl, qwen2_5_vl"):
        vision_from_hf({"model_type": "qwen4_vl"})
    _, tower = _pair("windows_only")
    with pytest.raises(ValueError, match="multiples of 64"):
        tower(blank(96, tower.config.patch_dim))
