"""One decoder for Llama 3, SmolLM2, Mistral, Qwen2.5, Qwen3 and Qwen3-MoE.

Parameters of all layers are stacked on a leading `layers` axis: scanned in training and prefill, indexed in decoding.
Dimensions: B batch, T time, D residual stream, L layers, N query heads, K key/value heads, H head width, F feed-forward,
V vocabulary, C experts of a token.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.models.attention import Attention, self_attention
from routerl_jax.models.config import DecoderConfig
from routerl_jax.models.experts import Experts, Routing
from routerl_jax.models.layers import Initializer, check_ids, logits_of, matmul_precision, rms_norm, rope_angles, rotate
from routerl_jax.models.projection import cast_matrices, project

# attend(q [B,T,N,H], k [B,T,K,H], v [B,T,K,H], cache of this layer, its window in tokens or None for all)
# -> (output [B,T,N,H], new cache of this layer)
Attend = Callable[[Array, Array, Array, Any, int | None], tuple[Array, Any]]
LayerAttend = Callable[[Array, Array, Array, Any], tuple[Array, Any]]  # the same, with the window of one layer bound
Remat = Literal["none", "full", "dots"]
_NEVER = -1e30  # a logit that is finite at any temperature, so that 0 times it is 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Features:
    """Embeddings that replace those of some tokens: the outputs of a vision tower for images.

    The rows of a batch are in S consecutive shards. Each shard has its own features, so that no feature moves between devices.

    Attributes:
      values: F features of every shard. With a further axis, the first entry of a feature is the embedding, and the others are
        added to the outputs of the first layers, one each (DeepStack, arXiv 2406.04334).
      index: for each token, the index of its feature within its shard; -1: the token keeps its own embedding.
    """

    values: Float[Array, "S F D"] | Float[Array, "S F N D"]
    index: Int[Array, "B T"]

    def instead_of(self, x_BTD: Array) -> Array:
        """The tokens' embeddings, with the features inserted."""
        values = self.values if self.values.ndim == 3 else self.values[:, :, 0]
        return jnp.where(self.index[..., None] >= 0, self._features(values, x_BTD), x_BTD)

    def added_to(self, x_BTD: Array, layer: Int[Array, ""] | int) -> Array:
        """The output of a layer, with its deep features added."""
        depth = 0 if self.values.ndim == 3 else self.values.shape[2] - 1
        if not depth:
            return x_BTD

        def add(x: Array) -> Array:
            added = jax.lax.dynamic_index_in_dim(self.values, layer + 1, axis=2, keepdims=False)
            return x + jnp.where(self.index[..., None] >= 0, self._features(added, x), 0)

        if isinstance(layer, int):
            return add(x_BTD) if layer < depth else x_BTD
        return jax.lax.cond(layer < depth, add, lambda x: x, x_BTD)

    def _features(self, values: Array, x_BTD: Array) -> Array:
        """The feature of each token; any for tokens without one."""
        index = self.index.reshape(values.shape[0], -1, 1)
        features = jnp.take_along_axis(values, jnp.maximum(index, 0), axis=1)
        return features.reshape(x_BTD.shape).astype(x_BTD.dtype)


class DecoderOutput(NamedTuple):
    """The result of `Decoder.run`."""

    hidden: Float[Array, "B T D"]  # normed
    caches: Any
    routing: Routing | None  # None without experts


REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Blocks(nnx.Module):
    """All transformer blocks. `__call__` runs the block whose parameters it currently holds (one slice of the stack)."""

    def __init__(self, config: DecoderConfig, init: Initializer) -> None:
        layers, embed = config.layers, config.embed
        heads, kv_heads, width = config.heads, config.kv_heads, config.head_dim
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
        if dense := config.sparse.count(False):
            self.gate = init.normal((dense, embed, config.mlp), ("layers", "embed", "mlp"))
            self.up = init.normal((dense, embed, config.mlp), ("layers", "embed", "mlp"))
            self.down = init.normal((dense, config.mlp, embed), ("layers", "mlp", "embed"))
        if config.experts is not None:
            self.experts = Experts(config.experts, config.sparse.count(True), embed, init)

    def __call__(
        self,
        x_BTD: Array,
        rope: tuple[Array, Array],
        attend: LayerAttend,
        cache: Any,
        dtype: jnp.dtype,
        sparse: bool,
        **routing: Any,
    ) -> tuple[Array, Any, Routing | None]:
        config = self.config
        h = rms_norm(x_BTD, self.attention_norm[...], config.norm_eps)
        q, k, v = (project(self, name, h, dtype) for name in ("q", "k", "v"))
        if config.qkv_bias:
            q, k = q + self.q_bias[...].astype(dtype), k + self.k_bias[...].astype(dtype)
            v = v + self.v_bias[...].astype(dtype)
        if config.qk_norm:
            q, k = rms_norm(q, self.q_norm[...], config.norm_eps), rms_norm(k, self.k_norm[...], config.norm_eps)
        out, cache = attend(rotate(q, rope), rotate(k, rope), v, cache)
        out = project(self, "o", out, dtype)
        if config.output_bias:
            out = out + self.o_bias[...].astype(dtype)
        x_BTD = x_BTD + out
        h = rms_norm(x_BTD, self.mlp_norm[...], config.norm_eps)
        if sparse:
            h, routed = self.experts(h, dtype, **routing)
            return x_BTD + h, cache, routed
        h = jax.nn.silu(project(self, "gate", h, dtype)) * project(self, "up", h, dtype)
        return x_BTD + project(self, "down", h, dtype), cache, None


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
        **options: Any,
    ) -> Float[Array, "B T D"]:
        """Normed hidden states before the output projection; arguments as of `forward`."""
        return self.forward(tokens, positions, segment_ids, **options).hidden

    def forward(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        *,
        segment_ends: Int[Array, "B T"] | None = None,
        remat: Remat = "none",
        attention: Attention | None = None,
        features: Features | None = None,
        replayed: Int[Array, "B T L C"] | None = None,
    ) -> DecoderOutput:
        """Runs whole sequences. Gives hidden states and the routers' statistics (of tokens in a segment that is not 0).

        Args:
          positions: rotary; [3, B, T] (time, row, column) for vision-language models.
          segment_ends: ends of segments, for sequences with shared prefixes (learning/batch.py).
          features: features of images among the tokens.
          remat: trades compute for memory in the backward pass.
          attention: the implementation of attention; default: the best for the weights' devices. Inside jit these are unknown,
            so pass it there.
          replayed: see `run`.
        """
        backend = attention or Attention.for_weight(self.embedding[...])
        check_ids(tokens, self.config.vocab_size)  # before JAX cuts them to 32 bits
        tokens = jnp.asarray(tokens)
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        def attend(q: Array, k: Array, v: Array, cache: None, window: int | None) -> tuple[Array, None]:
            ends = segment_ends
            return self_attention(q, k, v, segment_ids, segment_ends=ends, window=window, attention=backend), cache

        return self.run(
            tokens,
            positions,
            attend,
            None,
            remat=remat,
            features=features,
            replayed=replayed,
            counted=None if segment_ids is None else jnp.asarray(segment_ids) > 0,
            mesh=backend.mesh,
        )

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
        replayed: Int[Array, "B T L C"] | None = None,
        counted: Bool[Array, "B T"] | None = None,
        mesh: Mesh | None = None,
    ) -> DecoderOutput:
        """Runs all blocks with a given attention, which may read and replace a per-layer cache.

        Args:
          attend: see `Attend`.
          caches: None, or per-layer caches: a tree whose leaves have a leading layer axis; with `unroll`, a list of trees.
          features: features of images among the tokens.
          unroll: a Python loop over the layers instead of a scan (decoding: no copies of stacked caches).
          layers: with `unroll`, the result of `layer_weights`. A caller with its own loop calls it once before the loop.
          shared: `caches` is one tree for all layers, passed from layer to layer. `attend` gets (index of the layer, tree) and
            returns the tree (caches that are written in place).
          replayed: the experts of each token in each layer that has experts; `core.types.FREE`: the router chooses.
          counted: tokens that count in `Routing`; default: all.
          mesh: the program's devices, which experts are split over.

        Returns:
          Normed hidden states, the new caches in the same form, and the routers' statistics.
        """
        dtype, sparse = self.compute_dtype, self.config.sparse
        graph, stacked = nnx.split(self.blocks)

        def block(
            x: Array,
            params: nnx.State,
            cache: Any,
            layer_attend: LayerAttend,
            number: Any,
            sparse: bool,
            replayed: Array | None,
        ) -> tuple[Array, Any, Routing | None]:
            def call(x: Array, params: nnx.State, cache: Any) -> tuple[Array, Any, Routing | None]:
                routing = {"replayed": replayed, "counted": counted, "mesh": mesh}
                return nnx.merge(graph, params)(x, rope, layer_attend, cache, dtype, sparse, **routing)

            if remat != "none":
                call = jax.checkpoint(call, policy=REMAT_POLICIES[remat], prevent_cse=unroll)
            x, cache, routed = call(x, params, cache)
            return x if features is None else features.added_to(x, number), cache, routed

        with matmul_precision(dtype):
            # in this order, gradients of a repeated token add up in float32
            x = self.embedding[...][tokens].astype(dtype)
            if features is not None:
                x = features.instead_of(x)
            rope = rope_angles(positions, self.config)
            replayed = None if replayed is None else jnp.moveaxis(replayed, 2, 0)
            # Layers of two kinds can't share a branch if both write one cache, nor if only some have experts.
            if unroll or (shared and len(set(self.config.windows)) > 1) or len(set(sparse)) > 1:
                layers = layers or self.layer_weights()
                x, caches, routed = self._looped(block, x, attend, caches, layers, unroll, shared, replayed)
            else:
                stacked = cast_matrices(stacked, dtype)
                x, caches, routed = self._scanned(block, x, attend, caches, stacked, shared, replayed)
            if routed is not None:
                routed = dataclasses.replace(routed, chosen=jnp.moveaxis(routed.chosen, 0, 2))
            return DecoderOutput(rms_norm(x, self.final_norm[...], self.config.norm_eps), caches, routed)

    def layer_weights(self, cut: Sequence[nnx.State] | None = None) -> list[nnx.State]:
        """The blocks' weights by layer, as slices of the stacked weights. Slices are free on TPUs, and copies on CPUs and
        GPUs.

        Args:
          cut: in a loop, the result of a call before it. Matrices that end in heads are taken from there.
        """
        _, stacked = nnx.split(self.blocks)
        sparse = self.config.sparse

        def layer(i: int) -> nnx.State:
            """Feed-forwards and experts are stacks of their own; a layer ignores the weights of the other kind."""
            before = {True: sparse[:i].count(True), False: sparse[:i].count(False)}

            def at(path: Any, p: Array, sliced: Array | None = None) -> Array:
                name, of_experts = path[0].key, path[0].key == "experts"
                module = name.partition("_")[0]
                # XLA for TPUs multiplies with [D, N, H] in another layout than the stack's. In a loop some versions copy the
                # whole stack for every slice (14B on v5e: 3.3 times the bytes of weights and cache). Slices from before the
                # loop are copied once. [N, H, D] and [D, F] need no copy.
                if sliced is not None and module in ("q", "k", "v") and p.ndim == 4:
                    return sliced
                alone = of_experts or module in ("gate", "up", "down")
                return p[min(before[of_experts], len(p) - 1) if alone else i]

            return jax.tree.map_with_path(at, stacked, *([] if cut is None else [cut[i]]))

        return [layer(i) for i in range(len(sparse))]

    def _looped(
        self,
        block: Callable[..., tuple[Array, Any, Routing | None]],
        x: Array,
        attend: Attend,
        caches: Any,
        layers: Sequence[nnx.State],
        unroll: bool,
        shared: bool,
        replayed: Array | None,
    ) -> tuple[Array, Any, Routing | None]:
        """The layers one after the other in Python: `block`'s output, the new caches in the form of `caches`, and the routing
        of the layers that have experts."""
        cache_state, routings, new = caches, [], []
        for i, (params, window, sparse) in enumerate(zip(layers, self.config.windows, self.config.sparse)):
            if shared:
                cache = i, cache_state
            else:
                cache = caches[i] if unroll and caches is not None else jax.tree.map(operator.itemgetter(i), caches)
            replayed_experts = None if replayed is None or not sparse else replayed[len(routings)]
            x, cache_state, routed = block(x, params, cache, _in_window(attend, window), i, sparse, replayed_experts)
            new.append(cache_state)
            routings += [] if routed is None else [routed]
        return x, cache_state if shared else new if unroll else _stack(new), _stack(routings) if routings else None

    def _scanned(
        self,
        block: Callable[..., tuple[Array, Any, Routing | None]],
        x: Array,
        attend: Attend,
        caches: Any,
        stacked: nnx.State,
        shared: bool,
        replayed: Array | None,
    ) -> tuple[Array, Any, Routing | None]:
        """`_looped` as a scan over the stacked weights, for layers of one kind."""
        windows, sparse = self.config.windows, self.config.sparse[0]
        uniform = len(set(windows)) == 1

        def step(carry: tuple[Array, Any], layer: tuple[Any, ...]) -> tuple[tuple[Array, Any], Any]:
            (x, cache_state), (params, cache, number, windowed, replayed) = carry, layer

            def either(q: Array, k: Array, v: Array, cache: Any) -> tuple[Array, Any]:
                """The one body of the scan holds both attentions, because kernels need the window at compile time."""
                in_window, everywhere = (_in_window(attend, window) for window in (self.config.window, None))
                return jax.lax.cond(windowed, lambda: in_window(q, k, v, cache), lambda: everywhere(q, k, v, cache))

            layer_attend = _in_window(attend, windows[0]) if uniform else either
            cache = (number, cache_state) if shared else cache
            x, cache, routed = block(x, params, cache, layer_attend, number, sparse, replayed)
            return ((x, cache), (None, routed)) if shared else ((x, cache_state), (cache, routed))

        flags = None if uniform else jnp.asarray([window is not None for window in windows])
        layered = (stacked, None if shared else caches, jnp.arange(len(windows)), flags, replayed)
        (x, cache_state), (new, routed) = jax.lax.scan(step, (x, caches if shared else None), layered)
        return x, cache_state if shared else new, routed

    def policy_logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """`unembed` for sampling and its log-probabilities: ids that no token of `tokenizer` has can't be chosen (-1e30).

        Published models have such rows, which pad the vocabulary to a round number.
        """
        logits = self.unembed(hidden)
        used = None if self.tokenizer is None else self.tokenizer.used_rows(self.config.vocab_size)
        return logits if used is None or used.all() else jnp.where(used, logits, _NEVER)

    def unembed(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Float32 logits of normed hidden states."""
        flat = hidden.reshape(-1, hidden.shape[-1]).astype(self.compute_dtype)
        tied = self.config.tied_embeddings
        logits: Array = logits_of(flat, (self.embedding if tied else self.head)[...], tied)
        return logits.reshape(*hidden.shape[:-1], -1)


M = TypeVar("M", bound=Decoder)


@dataclasses.dataclass(frozen=True)
class _UsedRows:
    """What programs read of a tokenizer. Those of equal vocabularies are equal, unlike tokenizers that were loaded twice."""

    used: bytes

    def used_rows(self, rows: int) -> Bool[np.ndarray, " rows"]:
        return np.frombuffer(self.used, bool)


def for_programs(model: M) -> M:
    """A model of the same arrays, with no more of the tokenizer than programs need: equal models' programs can be shared."""
    lean = copy.copy(model)
    if model.tokenizer is not None:
        used = model.tokenizer.used_rows(model.config.vocab_size)
        lean.tokenizer = None if used.all() else _UsedRows(used.tobytes())  # type: ignore[assignment]
    return lean


def _stack(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _in_window(attend: Attend, window: int | None) -> LayerAttend:
    return lambda q, k, v, cache: attend(q, k, v, cache, window)
