"""M-RoPE beside transformers' get_rope_index and rotary embedding, and in pieces."""

from __future__ import annotations

import itertools
import types

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel, Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from routerl_jax.models.config import DecoderConfig
from routerl_jax.models.image_tokens import mrope_positions
from routerl_jax.models.layers import rope_angles

_IMAGE, _TEXT = 99, 7
# Rows of (text tokens or a grid of patches): image first, last, alone, one after another, text only, a strip.
_ROWS = [
    [3, (1, 4, 6), 2, (1, 10, 4), 5],
    [(1, 2, 2), 1, (1, 6, 6)],
    [11],
    [1, (1, 2, 30), 1],
    [(1, 8, 4)],
]


def _tokens(row: list) -> list[int]:
    parts = [[_TEXT] * part if isinstance(part, int) else [_IMAGE] * (part[1] * part[2] // 4) for part in row]
    return list(itertools.chain(*parts))


def _grids(row: list) -> list[tuple[int, int, int]]:
    return [part for part in row if not isinstance(part, int)]


def _positions(tokens, grids, **options):
    return mrope_positions(np.asarray(tokens), grids, image_token_id=_IMAGE, merge=2, **options)


@pytest.mark.parametrize("model", [Qwen2VLModel, Qwen2_5_VLModel])
@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_equal_those_of_transformers(model, side):
    length = max(len(_tokens(row)) for row in _ROWS) + 3
    tokens = np.full((len(_ROWS), length), 0)
    mask = np.zeros((len(_ROWS), length), bool)
    for i, row in enumerate(_ROWS):
        ids = _tokens(row)
        part = slice(length - len(ids), length) if side == "left" else slice(0, len(ids))
        tokens[i, part], mask[i, part] = ids, True
    vision = types.SimpleNamespace(spatial_merge_size=2, tokens_per_second=4)
    # The method reads two numbers of the configuration and no weight.
    owner = types.SimpleNamespace(config=types.SimpleNamespace(vision_config=vision))
    owner.get_vision_position_ids = types.MethodType(model.get_vision_position_ids, owner)
    expected, deltas = model.get_rope_index(
        owner,
        torch.as_tensor(tokens),
        torch.as_tensor((tokens == _IMAGE).astype(np.int32)),
        image_grid_thw=torch.as_tensor([grid for row in _ROWS for grid in _grids(row)]),
        attention_mask=torch.as_tensor(mask.astype(np.int64)),
    )
    for i, row in enumerate(_ROWS):
        found, after = _positions(tokens[i], _grids(row), mask=mask[i])
        np.testing.assert_array_equal(found, expected[:, i])
        assert after == int(deltas[i, 0]) + mask[i].sum()
        unpadded, same = _positions(_tokens(row), _grids(row))
        np.testing.assert_array_equal(unpadded, found[:, mask[i]])
        assert same == after


def test_a_sequence_in_pieces_has_the_positions_of_the_whole():
    """Prompt, sampled tokens one by one, an observation with images, more tokens."""
    pieces = [[4, (1, 6, 4), 2], [1], [1], [1], [2, (1, 2, 8), (1, 4, 4), 1], [1], []]
    row = list(itertools.chain(*pieces))
    whole, after = _positions(_tokens(row), _grids(row))
    start, parts = 0, []
    for piece in pieces:
        part, start = _positions(_tokens(piece), _grids(piece), start=start)
        parts.append(part)
    np.testing.assert_array_equal(np.concatenate(parts, 1), whole)
    assert start == after
    assert whole.dtype == np.int32


def test_a_hand_computed_prompt():
    """Two tokens, an image of 2 x 3 merged patches, one token: the text goes on at 2 + max(2, 3)."""
    found, after = _positions([_TEXT, _TEXT, *[_IMAGE] * 6, _TEXT], [(1, 4, 6)])
    assert found.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]
    assert after == 6


def test_images_side_by_side_are_told_apart_by_their_grids():
    found, after = _positions([_IMAGE] * 3, [(1, 2, 2), (1, 2, 4)])
    assert found.tolist() == [[0, 1, 1], [0, 1, 1], [0, 1, 2]]
    assert after == 3


@pytest.mark.parametrize(
    ("tokens", "grids", "message"),
    [
        ([_TEXT, _IMAGE], [], "1 image tokens, but the grids .* of 0 images take 0"),
        ([_TEXT], [(1, 2, 2)], "0 image tokens"),
        ([_IMAGE] * 3, [(1, 4, 4)], "never cut an image's tokens"),
        ([_IMAGE, _TEXT, _IMAGE], [(1, 2, 4)], "image 0 of grid .* needs 2 image tokens in a row from token 0"),
    ],
)
def test_tokens_that_do_not_fit_the_grids_are_refused(tokens, grids, message):
    with pytest.raises(ValueError, match=message):
        _positions(tokens, grids)


@pytest.mark.parametrize("sections", [(16, 24, 24), (2, 3, 3)])
def test_angles_equal_those_of_transformers(sections):
    half = sum(sections)
    config = Qwen2_5_VLTextConfig(
        hidden_size=4 * 2 * half,
        num_attention_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(sections)},
    )
    theirs = Qwen2_5_VLRotaryEmbedding(config)
    positions = np.random.default_rng(0).integers(0, 3000, (3, 2, 17)).astype(np.int32)
    cos, sin = theirs(torch.zeros(1), torch.as_tensor(positions, dtype=torch.int64))
    found = rope_angles(jnp.asarray(positions), _decoder(sections))
    for ours, expected in zip(found, (cos, sin)):
        assert ours.shape == (2, 17, half)
        # Frequencies are equal but for a bit in one of 64, by which position 3000 turns 2e-4 further at most.
        np.testing.assert_allclose(ours, expected[..., :half].numpy(), atol=2e-4)
        # transformers repeats the half for the two halves of a head
        np.testing.assert_array_equal(expected[..., :half], expected[..., half:])


def test_equal_axes_are_the_rotation_of_text_bit_by_bit():
    positions = jnp.asarray(np.random.default_rng(1).integers(0, 40_000, (2, 9)), jnp.int32)
    config = _decoder((16, 24, 24))
    for ours, text in zip(rope_angles(jnp.broadcast_to(positions, (3, 2, 9)), config), rope_angles(positions, config)):
        np.testing.assert_array_equal(ours, text)


def _decoder(sections: tuple[int, ...]) -> DecoderConfig:
    width = 2 * sum(sections)
    return DecoderConfig(
        model_type="qwen2",
        vocab_size=8,
        embed=4 * width,
        layers=1,
        heads=4,
        kv_heads=4,
        head_dim=width,
        mlp=8,
        max_length=64,
        rope_theta=1e6,
        mrope_sections=sections,
        qkv_bias=True,
    )
