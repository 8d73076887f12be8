"""BERT-style text encoders: BERT (MiniLM, BGE, E5, Contriever), RoBERTa and XLM-R (BGE-M3, multilingual E5).

Dimensions: B batch, T time, D width, L layers, N heads, H head width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Float32, Int

from routerl_jax.core.progress import Bar
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.models.attention import Attention, self_attention
from routerl_jax.models.config import EncoderConfig
from routerl_jax.models.embedding import Embedder, mean_over, refuse_compute_dtype, unit
from routerl_jax.models.layers import Initializer, layer_norm, matmul_precision


class EncoderBlocks(nnx.Module):
    """All layers' parameters, stacked; `__call__` runs the layer whose slice it holds."""

    def __init__(self, config: EncoderConfig, init: Initializer) -> None:
        layers, embed, heads, width = config.layers, config.embed, config.heads, config.embed // config.heads
        self.config = config
        self.qkv = init.normal((layers, 3, embed, heads, width), ("layers", None, "embed", "heads", "head_dim"))
        self.qkv_bias = init.zeros((layers, 3, heads, width), ("layers", None, "heads", "head_dim"))
        self.o = init.normal((layers, heads, width, embed), ("layers", "heads", "head_dim", "embed"))
        self.o_bias = init.zeros((layers, embed), ("layers", None))
        self.attention_norm = init.ones((layers, embed), ("layers", None))
        self.attention_norm_bias = init.zeros((layers, embed), ("layers", None))
        self.up = init.normal((layers, embed, config.mlp), ("layers", "embed", "mlp"))
        self.up_bias = init.zeros((layers, config.mlp), ("layers", "mlp"))
        self.down = init.normal((layers, config.mlp, embed), ("layers", "mlp", "embed"))
        self.down_bias = init.zeros((layers, embed), ("layers", None))
        self.mlp_norm = init.ones((layers, embed), ("layers", None))
        self.mlp_norm_bias = init.zeros((layers, embed), ("layers", None))

    def __call__(self, x_BTD: Array, segments_BT: Array, attention: Attention) -> Array:
        eps = self.config.norm_eps
        qkv = jnp.einsum("BTD,CDNH->CBTNH", x_BTD, self.qkv[...]) + self.qkv_bias[...][:, None, None]
        out = self_attention(qkv[0], qkv[1], qkv[2], segments_BT, causal=False, attention=attention)
        out = jnp.einsum("BTNH,NHD->BTD", out, self.o[...]) + self.o_bias[...]
        x_BTD = layer_norm(x_BTD + out, self.attention_norm[...], self.attention_norm_bias[...], eps)
        h = jax.nn.gelu(x_BTD @ self.up[...] + self.up_bias[...], approximate=False)
        h = h @ self.down[...] + self.down_bias[...]
        return layer_norm(x_BTD + h, self.mlp_norm[...], self.mlp_norm_bias[...], eps)


class Encoder(Embedder):
    """A bidirectional encoder. `encoder(tokens, mask)` gives token vectors; `embed(texts)` gives one vector per text."""

    config: EncoderConfig

    def __init__(
        self,
        config: EncoderConfig,
        key: jax.Array,
        *,
        param_dtype: jnp.dtype = jnp.float32,
        compute_dtype: jnp.dtype | None = None,
    ) -> None:
        refuse_compute_dtype(param_dtype, compute_dtype)
        init = Initializer(key, config.init_scale, param_dtype)
        self.config = config
        self.tokenizer: Tokenizer | None = None
        self.mesh: Mesh | None = None
        self.word = init.normal((config.vocab_size, config.embed), ("vocab", "embed"))
        self.position = init.normal((config.first_position + config.max_length, config.embed), (None, "embed"))
        self.token_type = init.normal((config.type_vocab_size, config.embed), (None, "embed"))
        self.embedding_norm = init.ones((config.embed,), (None,))
        self.embedding_norm_bias = init.zeros((config.embed,), (None,))
        self.blocks = EncoderBlocks(config, init)
        if config.pooling == "pooler":
            self.pooler = init.normal((config.embed, config.embed), ("embed", "mlp"))
            self.pooler_bias = init.zeros((config.embed,), (None,))

    @property
    def dim(self) -> int:
        """Width of the vectors."""
        return self.config.embed

    @property
    def longest_text(self) -> int:
        """Tokens of a text that `embed` reads, special tokens and prefix included."""
        return min(self.config.text_length or self.config.max_length, self.config.max_length)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        mask: Bool[Array, "B T"],
        *,
        types: Int[Array, "B T"] | None = None,
        attention: Attention | None = None,
    ) -> Float[Array, "B T D"]:
        """Token vectors; `mask` is True on real tokens, which may begin anywhere in a row.

        Args:
          types: which text of a pair each token is from (0 or 1); None: all from the first.

        Raises:
          ValueError: rows are longer than there are positions.
        """
        if tokens.shape[1] > self.config.max_length:  # JAX would use the last position for all later ones
            raise ValueError(f"rows of {tokens.shape[1]} tokens; this encoder has {self.config.max_length} positions")
        attention = attention or Attention.for_weight(self.word[...])
        with matmul_precision(self.word[...].dtype):
            return self._hidden(jnp.asarray(tokens), jnp.asarray(mask, bool), types, attention)

    def _hidden(self, tokens: Array, mask: Array, types: Array | None, attention: Attention) -> Array:
        kind = self.token_type[...][0 if types is None else types]
        x = self.word[...][tokens] + self.position[...][self._positions(tokens)] + kind
        x = layer_norm(x, self.embedding_norm[...], self.embedding_norm_bias[...], self.config.norm_eps)
        graph, stacked = nnx.split(self.blocks)
        segments = mask.astype(jnp.int32)
        x, _ = jax.lax.scan(lambda x, layer: (nnx.merge(graph, layer)(x, segments, attention), None), x, stacked)
        return x

    def _positions(self, tokens: Array) -> Array:
        """Positions: BERT uses the index in the row, RoBERTa counts the tokens that are not padding."""
        if self.config.first_position == 0:
            return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        real = (tokens != self.config.pad_id).astype(jnp.int32)
        return jnp.cumsum(real, axis=1) * real + self.config.pad_id

    def pooled(
        self,
        tokens: Int[Array, "B T"],
        mask: Bool[Array, "B T"],
        *,
        types: Int[Array, "B T"] | None = None,
        attention: Attention | None = None,
    ) -> Float[Array, "B D"]:
        """One float32 vector per row, pooled as in the config. `cls` and `pooler` use the first token of the row."""
        hidden = self(tokens, mask, types=types, attention=attention)
        if self.config.pooling == "mean":
            vectors = mean_over(hidden, mask)
        elif self.config.pooling == "cls":
            vectors = hidden[:, 0].astype(jnp.float32)
        else:
            with matmul_precision(hidden.dtype):
                vectors = jnp.tanh(hidden[:, 0] @ self.pooler[...] + self.pooler_bias[...]).astype(jnp.float32)
        return unit(vectors) if self.config.normalize else vectors

    def _vectors(
        self, inputs: Sequence[str | list[int]], prefix: str, batch_size: int, bar: Bar
    ) -> Float32[np.ndarray, "N D"]:
        ids = self._ids(inputs, prefix)
        fill = functools.partial(self._token_batch, ids)
        results = self._run(_pooled, [len(i) for i in ids], fill, batch_size, self.longest_text)
        return self._gather(results, len(ids), bar)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _pooled(graph: nnx.GraphDef, params: nnx.State, attention: Attention, tokens: Array, mask: Array) -> Array:
    """`Encoder.pooled` as a pure function: several threads may embed with one encoder at once."""
    return nnx.merge(graph, params).pooled(tokens, mask, attention=attention)
