"""One decoder for Llama 3, SmolLM2, Mistral, Qwen2.5 and Qwen3.

Parameters of all layers are stacked on a leading `layers` axis: scanned in training and prefill, indexed in decoding.
Dimensions: B batch, T time, D residual stream, L layers, N query heads, K key/value heads, H head width, F feed-forward,
V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.models.attention import Attention, self_attention
from routerl_jax.models.config import DecoderConfig
from routerl_jax.models.layers import Initializer, matmul_precision, rms_norm
from routerl_jax.models.projection import project
from routerl_jax.models.rope import rope_angles, rotate

# attend(q [B,T,N,H], k [B,T,K,H], v [B,T,K,H], cache of this layer, its window in tokens or None for all)
# -> (output [B,T,N,H], new cache of this layer)
Attend = Callable[[Array, Array, Array, Any, int | None], tuple[Array, Any]]
LayerAttend = Callable[[Array, Array, Array, Any], tuple[Array, Any]]  # the same, with the window of one layer bound
Remat = Literal["none", "full", "dots"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Features:
    """Embeddings that replace those of some tokens: the outputs of a vision tower for images.

    The rows of a batch are in S consecutive shards. Each shard has its own features, so that no feature moves between devices.

    Attributes:
      values: F features of every shard.
      index: for each token, the index of its feature within its shard; -1: the token keeps its own embedding.
    """

    values: Float[Array, "S F D"]
    index: Int[Array, "B T"]

    def instead_of(self, x_BTD: Array) -> Array:
        """The tokens' embeddings, with the features inserted."""
        index = self.index.reshape(self.values.shape[0], -1, 1)
        taken = jnp.take_along_axis(self.values, jnp.maximum(index, 0), axis=1)
        return jnp.where(self.index[..., None] >= 0, taken.reshape(x_BTD.shape).astype(x_BTD.dtype), x_BTD)


_REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Blocks(nnx.Module):
    """All transformer blocks. `__call__` runs the block whose parameters it currently holds (one slice of the stack)."""

    def __init__(self, config: DecoderConfig, init: Initializer) -> None:
        layers, embed, heads, kv_heads, width = (
            config.layers,
            config.embed,
            config.heads,
            config.kv_heads,
            config.head_dim,
        )
        self.config = config
        self.attention_norm = init.ones((layers, embed), ("layers", None))
        self.q = init.normal((layers, embed, heads, width), ("layers", "embed", "heads", "head_dim"))
        self.k = init.normal((layers, embed, kv_heads, width), ("layers", "embed", "kv_heads", "head_dim"))
        self.v = init.normal((layers, embed, kv_heads, width), ("layers", "embed", "kv_heads", "head_dim"))
        self.o = init.normal((layers, heads, width, embed), ("layers", "heads", "head_dim", "embed"))
        if config.qkv_bias:
            self.q_bias = init.zeros((layers, heads, width), ("layers", "heads", "head_dim"))
            self.k_bias = init.zeros((layers, kv_heads, width), ("layers", "kv_heads", "head_dim"))
            self.v_bias = init.zeros((layers, kv_heads, width), ("layers", "kv_heads", "head_dim"))
        if config.output_bias:
            self.o_bias = init.zeros((layers, embed), ("layers", None))
        if config.qk_norm:
            self.q_norm = init.ones((layers, width), ("layers", None))
            self.k_norm = init.ones((layers, width), ("layers", None))
        self.mlp_norm = init.ones((layers, embed), ("layers", None))
        self.gate = init.normal((layers, embed, config.mlp), ("layers", "embed", "mlp"))
        self.up = init.normal((layers, embed, config.mlp), ("layers", "embed", "mlp"))
        self.down = init.normal((layers, config.mlp, embed), ("layers", "mlp", "embed"))

    def __call__(
        self,
        x_BTD: Array,
        rope: tuple[Array, Array],
        attend: LayerAttend,
        cache: Any,
        dtype: jnp.dtype,
    ) -> tuple[Array, Any]:
        config = self.config
        h = rms_norm(x_BTD, self.attention_norm[...], config.norm_eps)
        q, k, v = (project(self, name, h, dtype) for name in ("q", "k", "v"))
        if config.qkv_bias:
            q, k, v = (
                q + self.q_bias[...].astype(dtype),
                k + self.k_bias[...].astype(dtype),
                v + self.v_bias[...].astype(dtype),
            )
        if config.qk_norm:
            q, k = rms_norm(q, self.q_norm[...], config.norm_eps), rms_norm(k, self.k_norm[...], config.norm_eps)
        out, cache = attend(rotate(q, rope), rotate(k, rope), v, cache)
        out = project(self, "o", out, dtype)
        if config.output_bias:
            out = out + self.o_bias[...].astype(dtype)
        x_BTD = x_BTD + out
        h = rms_norm(x_BTD, self.mlp_norm[...], config.norm_eps)
        h = jax.nn.silu(project(self, "gate", h, dtype)) * project(self, "up", h, dtype)
        return x_BTD + project(self, "down", h, dtype), cache


class Decoder(nnx.Module):
    """A causal language model. `model(tokens)` gives float32 logits; `hidden` and `unembed` are its two halves.

    Weights may be stored in one dtype, and computations use another (`compute_dtype`). Logits and softmax are float32.
    """

    def __init__(
        self,
        config: DecoderConfig,
        key: jax.Array,
        *,
        param_dtype: jnp.dtype = jnp.float32,
        compute_dtype: jnp.dtype | None = None,
    ) -> None:
        init = Initializer(key, config.init_scale, param_dtype)
        self.config = config
        self.tokenizer: Tokenizer | None = None
        self.base_identity = ""  # with an adapter: digest of the weights that it was put on (models/lora.py)
        self.compute_dtype = jnp.dtype(param_dtype if compute_dtype is None else compute_dtype)
        self.embedding = init.normal((config.vocab_size, config.embed), ("vocab", "embed"))
        self.blocks = Blocks(config, init)
        self.final_norm = init.ones((config.embed,), (None,))
        if not config.tied_embeddings:
            self.head = init.normal((config.embed, config.vocab_size), ("embed", "vocab"))

    @property
    def architecture(self) -> DecoderConfig:
        """The configuration that its config.json describes."""
        return self.config

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits, float32.

        Args:
          tokens: ids.
          positions: rotary positions; default 0, 1, 2, ... in every row.
          segment_ids: packed sequences; a token sees only its own segment. Default: one segment.
        """
        return self.unembed(self.hidden(tokens, positions, segment_ids))

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        *,
        segment_ends: Int[Array, "B T"] | None = None,
        remat: Remat = "none",
        attention: Attention | None = None,
        features: Features | None = None,
    ) -> Float[Array, "B T D"]:
        """Normed hidden states before the output projection.

        Args:
          positions: rotary; [3, B, T] (time, row, column) for vision-language models.
          segment_ends: ends of segments, for sequences with shared prefixes (learning/prefixes.py).
          features: features of images among the tokens.
          remat: trades compute for memory in the backward pass.
          attention: the implementation of attention; default: the best for the weights' devices. Inside jit these are unknown,
            so pass it there.
        """
        backend = attention or Attention.where(self.embedding[...])
        tokens = jnp.asarray(tokens)
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        def attend(q: Array, k: Array, v: Array, cache: None, window: int | None) -> tuple[Array, None]:
            ends = segment_ends
            return self_attention(q, k, v, segment_ids, segment_ends=ends, window=window, attention=backend), cache

        return self.run(tokens, positions, attend, None, remat=remat, features=features)[0]

    def run(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Attend,
        caches: Any,
        *,
        unroll: bool = False,
        layers: Sequence[nnx.State] | None = None,
        shared: bool = False,
        remat: Remat = "none",
        features: Features | None = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Runs all blocks with a given attention, which may read and replace a per-layer cache.

        Args:
          attend: see `Attend`.
          caches: None, or per-layer caches: a tree whose leaves have a leading layer axis; with `unroll`, a list of trees.
          features: features of images among the tokens.
          unroll: a Python loop over the layers instead of a scan (decoding: no copies of stacked caches).
          layers: with `unroll`, the result of `layer_weights`. A caller with its own loop calls it once before the loop.
          shared: `caches` is one tree for all layers, passed from layer to layer. `attend` gets (index of the layer, tree) and
            returns the tree (caches that are written in place).

        Returns:
          Normed hidden states [B, T, D], and the new caches in the same form.
        """
        with matmul_precision(self.compute_dtype):
            return self._run(tokens, positions, attend, caches, unroll, layers, shared, remat, features)

    def layer_weights(self) -> list[nnx.State]:
        """The blocks' weights by layer, as slices of the stacked weights. Slices are free on TPUs, and copies on CPUs and
        GPUs."""
        _, stacked = nnx.split(self.blocks)
        return [jax.tree.map(lambda p, i=i: p[i], stacked) for i in range(len(self.config.windows))]

    def _run(
        self,
        tokens: Array,
        positions: Array,
        attend: Attend,
        caches: Any,
        unroll: bool,
        layers: Sequence[nnx.State] | None,
        shared: bool,
        remat: Remat,
        features: Features | None,
    ) -> tuple[Array, Any]:
        dtype = self.compute_dtype
        x = self.embedding[...][tokens].astype(dtype)  # in this order, gradients of a repeated token add up in float32
        if features is not None:
            x = features.instead_of(x)
        rope = rope_angles(positions, self.config)
        graph, stacked = nnx.split(self.blocks)

        def block(x: Array, params: nnx.State, cache: Any, attend_here: LayerAttend) -> tuple[Array, Any]:
            def call(x: Array, params: nnx.State, cache: Any) -> tuple[Array, Any]:
                return nnx.merge(graph, params)(x, rope, attend_here, cache, dtype)

            if remat != "none":
                call = jax.checkpoint(call, policy=_REMAT_POLICIES[remat], prevent_cse=unroll)
            return call(x, params, cache)

        windows = self.config.windows
        alike = len(set(windows)) == 1
        if unroll or (shared and not alike):  # layers of two kinds can't share a branch if both write one cache
            new_caches: Any = []
            for i, (window, params) in enumerate(zip(windows, layers or self.layer_weights())):
                here = functools.partial(_attend_in_window, attend, window)
                if shared:
                    x, caches = block(x, params, (i, caches), here)
                    continue
                x, cache = block(x, params, None if caches is None else caches[i], here)
                new_caches.append(cache)
            new_caches = caches if shared else new_caches
        elif shared:
            here = functools.partial(_attend_in_window, attend, windows[0])

            def pass_on(carry: tuple[Array, Any], layer: tuple[nnx.State, Array]) -> tuple[tuple[Array, Any], None]:
                params, i = layer
                return block(carry[0], params, (i, carry[1]), here), None

            (x, new_caches), _ = jax.lax.scan(pass_on, (x, caches), (stacked, jnp.arange(len(windows))))
        elif alike:
            here = functools.partial(_attend_in_window, attend, windows[0])
            x, new_caches = jax.lax.scan(lambda x, layer: block(x, *layer, here), x, (stacked, caches))
        else:  # layers of both kinds: the one body of the scan holds both attentions, and selects one

            def either(x: Array, layer: tuple[nnx.State, Any, Array]) -> tuple[Array, Any]:
                params, cache, windowed = layer
                return block(x, params, cache, functools.partial(_attend_by_flag, attend, self.config.window, windowed))

            flags = jnp.asarray([window is not None for window in windows])
            x, new_caches = jax.lax.scan(either, x, (stacked, caches, flags))
        return rms_norm(x, self.final_norm[...], self.config.norm_eps), new_caches

    def unembed(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Float32 logits of normed hidden states."""
        flat = hidden.reshape(-1, hidden.shape[-1]).astype(self.compute_dtype)
        if self.config.tied_embeddings:
            weight, spec = self.embedding[...], "TD,VD->TV"
        else:
            weight, spec = self.head[...], "TD,DV->TV"
        with matmul_precision(self.compute_dtype):
            logits = jnp.einsum(spec, flat, weight.astype(self.compute_dtype), preferred_element_type=jnp.float32)
        return logits.reshape(*hidden.shape[:-1], -1)


def _attend_in_window(
    attend: Attend, window: int | None, q: Array, k: Array, v: Array, cache: Any
) -> tuple[Array, Any]:
    return attend(q, k, v, cache, window)


def _attend_by_flag(
    attend: Attend, window: int | None, windowed: Array, q: Array, k: Array, v: Array, cache: Any
) -> tuple[Array, Any]:
    """Attention with a window if the flag is set. Kernels need the window at compile time, so there are two calls."""
    return jax.lax.cond(
        windowed,
        lambda: attend(q, k, v, cache, window),
        lambda: attend(q, k, v, cache, None),
    )
