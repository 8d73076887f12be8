"""Which Hugging Face tensor holds which of our parameters, and how its axes lie."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from routerl_jax.models.config import DecoderConfig

# Layouts: for each axis of their tensor, the axes of ours that it runs over, the last one fastest.
_VECTOR = ((0,),)
_MATRIX = ((0,), (1,))
_TRANSPOSED = ((1,), (0,))
_TO_HEADS = ((1, 2), (0,))  # ours [embed, heads, width], theirs [heads * width, embed]
_FROM_HEADS = ((2,), (0, 1))  # ours [heads, width, embed], theirs [embed, heads * width]
_HEADS_BIAS = ((0, 1),)


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one of our parameters is stored by Hugging Face.

    Attributes:
      name: tensor name; `{}` stands for the layer number. Several names (joined by `|`) fill our second axis.
      axes: for each axis of their tensor, the axes of ours (of one layer) that it runs over, the last one fastest.
    """

    name: str
    axes: tuple[tuple[int, ...], ...]

    @property
    def names(self) -> list[str]:
        return self.name.split("|")

    def their_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of their tensor, from ours."""
        return tuple(math.prod(shape[axis] for axis in merged) for merged in self.axes)

    def their_slices(self, block: Sequence[tuple[int, int]], shape: Sequence[int]) -> tuple[slice, ...]:
        """Where a block of ours, given as (start, stop) per axis, lies in their tensor."""
        slices = []
        for first, *inner in self.axes:
            assert all(block[axis] == (0, shape[axis]) for axis in inner), "no layout splits the width of heads"
            size = math.prod(shape[axis] for axis in inner)
            slices.append(slice(block[first][0] * size, block[first][1] * size))
        return tuple(slices)

    def to_ours(self, tensor: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Their tensor, or a block of it, in our shape."""
        order = sum(self.axes, ())
        return tensor.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))

    def read(self, tensor: Any, block: Sequence[tuple[int, int]], shape: Sequence[int]) -> np.ndarray:
        """A block of ours, given as (start, stop) per axis, out of their tensor (anything that takes slices).

        Where a layout splits an axis that is not the first of those merged into one of theirs (the heads in a fused
        query-key-value matrix), more than the block is read, and cut.
        """
        slices, sizes, cut = [], [], [slice(None)] * len(shape)
        for first, *inner in self.axes:
            start, stop = block[first]
            size = math.prod(shape[axis] for axis in inner)
            slices.append(slice(start * size, stop * size))
            sizes += [stop - start, *(shape[axis] for axis in inner)]
            for axis in inner:
                cut[axis] = slice(*block[axis])
        part = tensor[tuple(slices)].reshape(sizes)
        return part.transpose(np.argsort(sum(self.axes, ())))[tuple(cut)]

    def to_theirs(self, value: np.ndarray) -> np.ndarray:
        """Our parameter (of one layer) in their shape."""
        return value.transpose(sum(self.axes, ())).reshape(self.their_shape(value.shape))


# our parameter path (as flax.nnx gives it) -> rule
Rules = dict[Any, Rule]


def decoder_rules(config: DecoderConfig) -> Rules:
    """Our parameter path -> Hugging Face tensor, for the Llama and Qwen families."""
    layer = "model.layers.{}."
    rules = {
        ("embedding",): Rule("model.embed_tokens.weight", _MATRIX),
        ("final_norm",): Rule("model.norm.weight", _VECTOR),
        ("blocks", "attention_norm"): Rule(layer + "input_layernorm.weight", _VECTOR),
        ("blocks", "mlp_norm"): Rule(layer + "post_attention_layernorm.weight", _VECTOR),
        ("blocks", "q"): Rule(layer + "self_attn.q_proj.weight", _TO_HEADS),
        ("blocks", "k"): Rule(layer + "self_attn.k_proj.weight", _TO_HEADS),
        ("blocks", "v"): Rule(layer + "self_attn.v_proj.weight", _TO_HEADS),
        ("blocks", "o"): Rule(layer + "self_attn.o_proj.weight", _FROM_HEADS),
        ("blocks", "gate"): Rule(layer + "mlp.gate_proj.weight", _TRANSPOSED),
        ("blocks", "up"): Rule(layer + "mlp.up_proj.weight", _TRANSPOSED),
        ("blocks", "down"): Rule(layer + "mlp.down_proj.weight", _TRANSPOSED),
    }
    if config.qkv_bias:
        for part in "qkv":
            rules[("blocks", f"{part}_bias")] = Rule(layer + f"self_attn.{part}_proj.bias", _HEADS_BIAS)
    if config.output_bias:
        rules[("blocks", "o_bias")] = Rule(layer + "self_attn.o_proj.bias", _VECTOR)
    if config.qk_norm:
        rules[("blocks", "q_norm")] = Rule(layer + "self_attn.q_norm.weight", _VECTOR)
        rules[("blocks", "k_norm")] = Rule(layer + "self_attn.k_norm.weight", _VECTOR)
    if not config.tied_embeddings:
        rules[("head",)] = Rule("lm_head.weight", _TRANSPOSED)
    return rules


def encoder_rules() -> Rules:
    """Our parameter path -> Hugging Face tensor, for BERT."""
    layer = "encoder.layer.{}."
    qkv = [f"{layer}attention.self.{part}." for part in ("query", "key", "value")]
    return {
        ("word",): Rule("embeddings.word_embeddings.weight", _MATRIX),
        ("position",): Rule("embeddings.position_embeddings.weight", _MATRIX),
        ("token_type",): Rule("embeddings.token_type_embeddings.weight", _MATRIX),
        ("embedding_norm",): Rule("embeddings.LayerNorm.weight", _VECTOR),
        ("embedding_norm_bias",): Rule("embeddings.LayerNorm.bias", _VECTOR),
        ("blocks", "qkv"): Rule("|".join(part + "weight" for part in qkv), _TO_HEADS),
        ("blocks", "qkv_bias"): Rule("|".join(part + "bias" for part in qkv), _HEADS_BIAS),
        ("blocks", "o"): Rule(layer + "attention.output.dense.weight", _FROM_HEADS),
        ("blocks", "o_bias"): Rule(layer + "attention.output.dense.bias", _VECTOR),
        ("blocks", "attention_norm"): Rule(layer + "attention.output.LayerNorm.weight", _VECTOR),
        ("blocks", "attention_norm_bias"): Rule(layer + "attention.output.LayerNorm.bias", _VECTOR),
        ("blocks", "up"): Rule(layer + "intermediate.dense.weight", _TRANSPOSED),
        ("blocks", "up_bias"): Rule(layer + "intermediate.dense.bias", _VECTOR),
        ("blocks", "down"): Rule(layer + "output.dense.weight", _TRANSPOSED),
        ("blocks", "down_bias"): Rule(layer + "output.dense.bias", _VECTOR),
        ("blocks", "mlp_norm"): Rule(layer + "output.LayerNorm.weight", _VECTOR),
        ("blocks", "mlp_norm_bias"): Rule(layer + "output.LayerNorm.bias", _VECTOR),
    }
