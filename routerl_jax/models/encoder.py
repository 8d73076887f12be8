"""BERT-style text encoders (MiniLM) and sentence embeddings.

Dimensions: B batch, T time, D width, L layers, N heads, H head width.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Float32, Int
from tqdm.auto import tqdm

from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.models.config import EncoderConfig
from routerl_jax.models.layers import Initializer, layer_norm, matmul_precision
from routerl_jax.parallel.mesh import batch_sharding, batch_shards, single_device_mesh

_LENGTH_BUCKETS = (16, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512)


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

    def __call__(self, x_BTD: Array, mask_B11T: Array) -> Array:
        eps = self.config.norm_eps
        qkv = jnp.einsum("BTD,CDNH->CBTNH", x_BTD, self.qkv[...]) + self.qkv_bias[...][:, None, None]
        out = jax.nn.dot_product_attention(qkv[0], qkv[1], qkv[2], mask=mask_B11T)
        out = jnp.einsum("BTNH,NHD->BTD", out, self.o[...]) + self.o_bias[...]
        x_BTD = layer_norm(x_BTD + out, self.attention_norm[...], self.attention_norm_bias[...], eps)
        h = jax.nn.gelu(x_BTD @ self.up[...] + self.up_bias[...], approximate=False)
        h = h @ self.down[...] + self.down_bias[...]
        return layer_norm(x_BTD + h, self.mlp_norm[...], self.mlp_norm_bias[...], eps)


class Encoder(nnx.Module):
    """A bidirectional encoder. `encoder(tokens, mask)` gives token vectors; `embed(texts)` gives one vector per text."""

    def __init__(
        self,
        config: EncoderConfig,
        key: jax.Array,
        *,
        param_dtype: jnp.dtype = jnp.float32,
        compute_dtype: jnp.dtype | None = None,
    ) -> None:
        if compute_dtype not in (None, jnp.dtype(param_dtype)):
            raise ValueError(
                f"an encoder computes in the dtype of its weights: give dtype={jnp.dtype(compute_dtype).name!r} and no "
                f"compute_dtype"
            )
        init = Initializer(key, config.init_scale, param_dtype)
        self.config = config
        self.tokenizer: Tokenizer | None = None
        self.mesh: Mesh | None = None
        self.word = init.normal((config.vocab_size, config.embed), ("vocab", "embed"))
        self.position = init.normal((config.max_length, config.embed), (None, "embed"))
        self.token_type = init.normal((config.type_vocab_size, config.embed), (None, "embed"))
        self.embedding_norm = init.ones((config.embed,), (None,))
        self.embedding_norm_bias = init.zeros((config.embed,), (None,))
        self.blocks = EncoderBlocks(config, init)

    @property
    def architecture(self) -> EncoderConfig:
        """All that its config.json says."""
        return self.config

    def __call__(self, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T D"]:
        """Token vectors; `mask` is True on real tokens."""
        with matmul_precision(self.word[...].dtype):
            return self._run(jnp.asarray(tokens), jnp.asarray(mask, bool))

    def _run(self, tokens: Array, mask: Array) -> Array:
        x = self.word[...][tokens] + self.position[...][: tokens.shape[1]] + self.token_type[...][0]
        x = layer_norm(x, self.embedding_norm[...], self.embedding_norm_bias[...], self.config.norm_eps)
        graph, stacked = nnx.split(self.blocks)
        mask_B11T = mask[:, None, None, :]
        x, _ = jax.lax.scan(lambda x, layer: (nnx.merge(graph, layer)(x, mask_B11T), None), x, stacked)
        return x

    def pooled(self, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B D"]:
        """One vector per row: mean over real tokens (or the first token), unit length if the config says so."""
        hidden = self(tokens, mask).astype(jnp.float32)
        if self.config.pooling == "cls":
            vectors = hidden[:, 0]
        else:
            weights = mask.astype(jnp.float32)[..., None]
            vectors = (hidden * weights).sum(1) / jnp.maximum(weights.sum(1), 1e-9)
        if self.config.normalize:
            vectors = vectors / jnp.maximum(jnp.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
        return vectors

    def embed(
        self, texts: Sequence[str] | Sequence[list[int]], *, batch_size: int = 32, progress: bool = False
    ) -> Float32[np.ndarray, "N D"]:
        """Embeds texts, in their order; texts longer than the model reads are cut at their end.

        A text may be given as the ids that `tokenizer.encode_for_model(text, config.longest_text)` makes of it.

        Every batch has `batch_size` rows and one of a few lengths, so a text's vector depends on the text alone, not on
        its neighbours. Rows are split over `self.mesh`, where `load_pretrained` put the weights (default: the first local
        device).

        Raises:
          ValueError: the encoder was made without a tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError("this encoder has no tokenizer: load it with load_pretrained, or set encoder.tokenizer")
        mesh = self.mesh or single_device_mesh()
        batch_size = -(-batch_size // batch_shards(mesh)) * batch_shards(mesh)
        longest = self.config.longest_text
        ids = [t if isinstance(t, list) else self.tokenizer.encode_for_model(t, longest) for t in texts]
        graph, params = nnx.split(self, nnx.Param)
        result = np.zeros((len(ids), self.config.embed), np.float32)
        order = sorted(range(len(ids)), key=lambda i: (len(ids[i]), i))
        with tqdm(total=len(ids), desc="embedding", unit="text", disable=not progress) as bar:
            for bucket, rows in _batches(order, ids, batch_size, longest):
                tokens = np.full((batch_size, bucket), self.tokenizer.pad_id, np.int32)
                mask = np.zeros((batch_size, bucket), bool)
                mask[:, 0] = True  # rows without text stay finite
                for row, i in enumerate(rows):
                    tokens[row, : len(ids[i])] = ids[i]
                    mask[row, : len(ids[i])] = True
                sharding = batch_sharding(mesh)
                vectors = _pooled(graph, params, jax.device_put(tokens, sharding), jax.device_put(mask, sharding))
                result[rows] = np.asarray(vectors)[: len(rows)]
                bar.update(len(rows))
        return result


@functools.partial(jax.jit, static_argnums=0)
def _pooled(graph: nnx.GraphDef, params: nnx.State, tokens: Array, mask: Array) -> Array:
    """`Encoder.pooled` as a pure function: several threads may embed with one encoder at once."""
    return nnx.merge(graph, params).pooled(tokens, mask)


def _batches(order: list[int], ids: list[list[int]], size: int, longest: int) -> Iterator[tuple[int, list[int]]]:
    """Groups rows, sorted by length, into batches of one length bucket each."""
    buckets = [*(b for b in _LENGTH_BUCKETS if b < longest), longest]
    start = 0
    while start < len(order):
        bucket = next(b for b in buckets if b >= len(ids[order[start]]))
        end = start
        while end < len(order) and end - start < size and len(ids[order[end]]) <= bucket:
            end += 1
        yield bucket, order[start:end]
        start = end
