"""The base class of encoders: texts or pictures in, vectors out, in batches of a few fixed shapes over a mesh."""

from __future__ import annotations

import abc
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Float32, Int32

from routerl_jax.core.progress import Bar
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import TextAndImage
from routerl_jax.models.attention import Attention, self_attention
from routerl_jax.models.config import TextKind
from routerl_jax.models.images import ImageSource
from routerl_jax.models.layers import Initializer, check_ids
from routerl_jax.parallel import multihost
from routerl_jax.parallel.mesh import batch_sharding, batch_shards, single_device_mesh

_LENGTHS = (
    *(8, 16, 24, 32, 40, 48, 64, 96, 128, 160, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
    *(12288, 16384, 24576, 32768),
)
_FULL_BATCH = 512  # tokens up to which a batch has all its rows; longer ones have fewer


class Embedder(nnx.Module):
    """An encoder: `embed` maps inputs to vectors. A text's vector depends only on the text, not on the rest of its batch.

    Attributes:
      config: the configuration; its `prompts` are the prefixes of queries and passages.
      dim: width of the vectors.
      tokenizer: the tokenizer of texts; None if the model's directory has none.
      mesh: the devices of its weights; None: JAX's default device.
    """

    config: Any
    dim: int
    tokenizer: Tokenizer | None
    mesh: Mesh | None

    def __init__(self, config: Any, dim: int, param_dtype: Any, compute_dtype: Any = None) -> None:
        """Sets the attributes. Raises ValueError if the compute dtype differs from the dtype of the weights."""
        if compute_dtype not in (None, jnp.dtype(param_dtype)):
            name = jnp.dtype(compute_dtype).name
            raise ValueError(
                f"an encoder computes in the dtype of its weights: give dtype={name!r} and no compute_dtype"
            )
        self.config, self.dim, self.tokenizer, self.mesh = config, dim, None, None

    @property
    def longest_text(self) -> int:
        """Tokens of a text that `embed` reads, special tokens and prefix included."""
        return min(self.config.text_length or self.config.max_length, self.config.max_length)

    @abc.abstractmethod
    def _vectors(self, inputs: Sequence[Any], prefix: str, batch_size: int, bar: Bar) -> Float32[np.ndarray, "N D"]:
        """Implements `embed`, with the prefix of texts already chosen."""

    @property
    def architecture(self) -> Any:
        """The configuration that its files describe."""
        return self.config

    def embed(
        self,
        inputs: Sequence[Any],
        *,
        kind: TextKind | None = None,
        prefix: str | None = None,
        batch_size: int = 32,
        progress: bool | Bar = False,
    ) -> Float32[np.ndarray, "N D"]:
        """One vector per input, in order. Texts that are too long for the model are cut at their end.

        Every batch has one of a few lengths. Its number of rows depends only on the length: `batch_size` up to 512 tokens, and
        fewer for longer batches. Rows are split over `self.mesh`, where `load_pretrained` put the weights.

        Args:
          inputs: texts, or ids from `encode(text, prefix)`. For other inputs see the model's class.
          kind: the kind of the texts. Queries and passages get their prefix of `config.prompts`.
          prefix: a prefix of all texts, instead of `kind`.
          batch_size: rows of a batch.
          progress: show a bar; or a bar that is moved on after every batch.

        Raises:
          ValueError: no tokenizer, an unknown kind, or both kind and prefix.
        """
        if isinstance(inputs, str):
            raise ValueError(f"embed takes a list of texts, got one string; write embed([{inputs[:40]!r}])")
        if kind is not None and prefix is not None:
            raise ValueError(f"give kind={kind!r} or a prefix of your own, not both")
        before: str = self.config.prompts.of(kind) if prefix is None else prefix
        if isinstance(progress, Bar):
            return self._vectors(inputs, before, batch_size, progress)
        with Bar(total=len(inputs), desc="embedding", unit="input", disable=not progress) as bar:
            return self._vectors(inputs, before, batch_size, bar)

    def encode(self, text: str, prefix: str = "") -> list[int]:
        """The ids that the model reads for a text: prefix and special tokens included, cut to `longest_text`."""
        return self._tokenizer().encode_for_model(prefix + text, self.longest_text)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("this encoder has no tokenizer: load it with load_pretrained, or set encoder.tokenizer")
        return self.tokenizer

    def _ids(self, texts: Sequence[str | list[int]], prefix: str) -> list[list[int]]:
        ids = [text if isinstance(text, list) else self.encode(text, prefix) for text in texts]
        rows = text_rows(self.architecture)
        for i, input_ids in enumerate(ids):
            check_ids(input_ids, rows, f"input {i}")
            if not 0 < len(input_ids) <= self.longest_text:
                raise ValueError(f"input {i} has {len(input_ids)} ids; this encoder reads 1 to {self.longest_text}")
        return ids

    def _token_batch(
        self, ids: list[list[int]], rows: list[int], shape: tuple[int, int]
    ) -> tuple[Int32[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
        """Ids padded on the right, and a mask that is True on real tokens."""
        tokens, mask = np.full(shape, self._tokenizer().pad_id, np.int32), np.zeros(shape, bool)
        mask[:, 0] = True  # rows without text stay finite
        for row, i in enumerate(rows):
            tokens[row, : len(ids[i])] = ids[i]
            mask[row, : len(ids[i])] = True
        return tokens, mask

    def _run(
        self,
        method: str,
        lengths: Sequence[int],
        fill: Callable[[list[int], tuple[int, int]], tuple[np.ndarray, ...]],
        batch_size: int,
        longest: int,
    ) -> Iterator[tuple[list[int], np.ndarray]]:
        """Runs a method, jitted, over inputs of these lengths. Yields (indices of inputs, their results), batch by batch.

        The host fills the next batch while the devices compute one.

        Args:
          method: its name; (*arrays, attention=) -> one result per row.
          fill: (indices of inputs, (rows, length)) -> arrays with that many rows. Rows beyond the inputs are ignored.
        """
        mesh = self.mesh or single_device_mesh()
        lean = copy.copy(self)
        lean.tokenizer = None  # programs don't read it, and encoders that are loaded twice then share them
        graph, params = nnx.split(lean, nnx.Param)
        attention, sharding = Attention.on(mesh), batch_sharding(mesh)
        waiting: tuple[list[int], Array] | None = None
        for rows, shape in batches(lengths, batch_size, longest, batch_shards(mesh)):
            placed = [jax.device_put(array, sharding) for array in fill(rows, shape)]
            result = _run_method(method, graph, params, attention, *placed)
            if waiting is not None:
                yield waiting[0], multihost.to_host(waiting[1])[: len(waiting[0])]
            waiting = rows, result
        if waiting is not None:
            yield waiting[0], multihost.to_host(waiting[1])[: len(waiting[0])]

    def _gather(
        self, results: Iterator[tuple[list[int], np.ndarray]], count: int, bar: Bar
    ) -> Float32[np.ndarray, "N D"]:
        """One row per input, from the results of `_run`."""
        vectors = np.zeros((count, self.dim), np.float32)
        for rows, values in results:
            vectors[rows] = values
            bar.update(len(rows))
        return vectors


@functools.partial(jax.jit, static_argnums=(0, 1, 3))
def _run_method(method: str, graph: nnx.GraphDef, params: nnx.State, attention: Attention, *arrays: Array) -> Array:
    """A method as a pure function: several threads may embed with one model at once."""
    return getattr(nnx.merge(graph, params), method)(*arrays, attention=attention)


class TransformerBlocks(nnx.Module):
    """Parameters of all layers of a plain transformer, stacked: LayerNorm, biases, queries, keys and values in one matrix.

    A subclass runs the layer whose slice it holds. Dimensions: B batch, T time, D width, N heads, H head width.

    Args:
      config: has layers, embed, heads, mlp and norm_eps.
    """

    def __init__(self, config: Any, init: Initializer) -> None:
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

    def attend(self, x_BTD: Array, segments_BT: Array | None, causal: bool, attention: Attention) -> Array:
        """The attention of one layer, without norm and residual."""
        qkv = jnp.einsum("BTD,CDNH->CBTNH", x_BTD, self.qkv[...]) + self.qkv_bias[...][:, None, None]
        out = self_attention(qkv[0], qkv[1], qkv[2], segments_BT, causal=causal, attention=attention)
        return jnp.einsum("BTNH,NHD->BTD", out, self.o[...]) + self.o_bias[...]

    def feed_forward(self, x_BTD: Array, activation: Callable[[Array], Array]) -> Array:
        """The feed-forward of one layer, without norm and residual."""
        return activation(x_BTD @ self.up[...] + self.up_bias[...]) @ self.down[...] + self.down_bias[...]


def run_layers(blocks: TransformerBlocks, x: Float[Array, "B T D"], *inputs: Any) -> Float[Array, "B T D"]:
    """The output of all layers, a scan over them. `inputs` are further arguments of a layer's call."""
    graph, stacked = nnx.split(blocks)
    x, _ = jax.lax.scan(lambda x, layer: (nnx.merge(graph, layer)(x, *inputs), None), x, stacked)
    return x


class PictureEmbedder(Embedder):
    """An encoder whose `embed` also takes pictures (`images.decode_image`; a string is a text) and `TextAndImage`s."""


def text_and_picture(
    item: str | list[int] | ImageSource | TextAndImage,
) -> tuple[str | list[int] | None, ImageSource | None]:
    """(text, picture) of an input of a `PictureEmbedder`."""
    if isinstance(item, TextAndImage):
        return item.text, item.image
    return (item, None) if isinstance(item, (str, list)) else (None, item)


def batches(
    lengths: Sequence[int], batch_size: int, longest: int, shards: int
) -> Iterator[tuple[list[int], tuple[int, int]]]:
    """Groups inputs by length. Gives (indices of inputs, (rows, length) of their batch); rows are a multiple of `shards`."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    ladder = [*(step for step in _LENGTHS if step < longest), longest]
    start = 0
    while start < len(order):
        length = next(step for step in ladder if step >= lengths[order[start]])
        height = max(1, batch_size * _FULL_BATCH // max(length, _FULL_BATCH))
        height = -(-height // shards) * shards
        end = start
        while end < len(order) and end - start < height and lengths[order[end]] <= length:
            end += 1
        yield order[start:end], (height, length)
        start = end


def mean_over(hidden: Float[Array, "B T D"], keep: Bool[Array, "B T"]) -> Float[Array, "B D"]:
    """Mean over the tokens where `keep` is True, float32."""
    weights = keep.astype(jnp.float32)[..., None]
    return (hidden.astype(jnp.float32) * weights).sum(1) / jnp.maximum(weights.sum(1), 1e-9)


def unit(vectors: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
    """Vectors at unit length; zero stays zero."""
    return vectors / jnp.maximum(jnp.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def text_rows(architecture: Any) -> int:
    """Rows of the embedding of text of any architecture here."""
    while not hasattr(architecture, "vocab_size"):
        architecture = getattr(architecture, "backbone", None) or architecture.text
    return architecture.vocab_size
