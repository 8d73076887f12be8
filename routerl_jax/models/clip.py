"""CLIP (arXiv 2103.00020), text and vision towers, with UniIR's score fusion (arXiv 2311.17136): texts, pictures, or both.

Dimensions: B batch, T time (tokens or patches), D width, L layers, N heads, H head width, E width of the embeddings.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, Int

from routerl_jax.core.progress import Bar
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import TextAndImage
from routerl_jax.models.attention import Attention, self_attention
from routerl_jax.models.clip_images import ClipImageProcessor
from routerl_jax.models.config import Prompts
from routerl_jax.models.embedding import PictureEmbedder, refuse_compute_dtype, text_and_picture
from routerl_jax.models.images import ImageSource
from routerl_jax.models.layers import Initializer, layer_norm, matmul_precision

ACTIVATIONS = {
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
}
_LEGACY_EOS = 2  # configs of early exports say this and mean the largest id of the row


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """A pre-LayerNorm transformer."""

    embed: int
    layers: int
    heads: int
    mlp: int
    norm_eps: float = 1e-5
    activation: str = "quick_gelu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipConfig:
    """Two towers and their projections into one space."""

    model_type: str = "clip"
    text: TowerConfig
    vision: TowerConfig
    vocab_size: int
    max_length: int  # tokens
    image_size: int  # side of a picture, pixels
    patch: int  # side of a patch, pixels
    projection: int  # width of the embeddings
    bos_id: int | None = None
    eos_id: int | None = None  # a text's vector is taken at its first one; 2: at the largest id
    pad_id: int | None = None
    init_scale: float = 0.02
    images: ClipImageProcessor = ClipImageProcessor()
    text_length: int | None = None  # tokens of a text that `embed` reads; None: max_length
    prompts: Prompts = Prompts()

    def __post_init__(self) -> None:
        for name, tower in (("text", self.text), ("vision", self.vision)):
            if tower.embed % tower.heads:
                raise ValueError(f"{name}: embed={tower.embed} must be a multiple of heads={tower.heads}")
            if tower.activation not in ACTIVATIONS:
                raise ValueError(f"{name}: activation={tower.activation!r} is not one of {', '.join(ACTIVATIONS)}")
        if self.images.crop != self.image_size:
            raise ValueError(f"pictures are cut to {self.images.crop} pixels, but the tower reads {self.image_size}")

    @property
    def patches(self) -> int:
        """Patches of a picture; a last one that is not whole is not read."""
        return (self.image_size // self.patch) ** 2


class TowerBlocks(nnx.Module):
    """All layers of a tower, stacked. `__call__` runs the layer whose slice it holds."""

    def __init__(self, config: TowerConfig, init: Initializer) -> None:
        layers, embed, heads, width = config.layers, config.embed, config.heads, config.embed // config.heads
        self.config = config
        self.attention_norm = init.ones((layers, embed), ("layers", None))
        self.attention_norm_bias = init.zeros((layers, embed), ("layers", None))
        self.qkv = init.normal((layers, 3, embed, heads, width), ("layers", None, "embed", "heads", "head_dim"))
        self.qkv_bias = init.zeros((layers, 3, heads, width), ("layers", None, "heads", "head_dim"))
        self.o = init.normal((layers, heads, width, embed), ("layers", "heads", "head_dim", "embed"))
        self.o_bias = init.zeros((layers, embed), ("layers", None))
        self.mlp_norm = init.ones((layers, embed), ("layers", None))
        self.mlp_norm_bias = init.zeros((layers, embed), ("layers", None))
        self.up = init.normal((layers, embed, config.mlp), ("layers", "embed", "mlp"))
        self.up_bias = init.zeros((layers, config.mlp), ("layers", "mlp"))
        self.down = init.normal((layers, config.mlp, embed), ("layers", "mlp", "embed"))
        self.down_bias = init.zeros((layers, embed), ("layers", None))

    def __call__(self, x_BTD: Array, causal: bool, attention: Attention) -> Array:
        eps = self.config.norm_eps
        h = layer_norm(x_BTD, self.attention_norm[...], self.attention_norm_bias[...], eps)
        qkv = jnp.einsum("BTD,CDNH->CBTNH", h, self.qkv[...]) + self.qkv_bias[...][:, None, None]
        out = self_attention(qkv[0], qkv[1], qkv[2], causal=causal, attention=attention)
        x_BTD = x_BTD + (jnp.einsum("BTNH,NHD->BTD", out, self.o[...]) + self.o_bias[...])
        h = layer_norm(x_BTD, self.mlp_norm[...], self.mlp_norm_bias[...], eps)
        h = ACTIVATIONS[self.config.activation](h @ self.up[...] + self.up_bias[...])
        return x_BTD + (h @ self.down[...] + self.down_bias[...])


class TextTower(nnx.Module):
    """Token ids to one vector per row."""

    def __init__(self, config: ClipConfig, init: Initializer) -> None:
        tower = config.text
        self.config = config
        self.word = init.normal((config.vocab_size, tower.embed), ("vocab", "embed"))
        self.position = init.normal((config.max_length, tower.embed), (None, "embed"))
        self.blocks = TowerBlocks(tower, init)
        self.final_norm = init.ones((tower.embed,), (None,))
        self.final_norm_bias = init.zeros((tower.embed,), (None,))
        self.projection = init.normal((tower.embed, config.projection), ("embed", "mlp"))

    def __call__(self, tokens: Int[Array, "B T"], attention: Attention) -> Float[Array, "B E"]:
        x = _layers(self.blocks, self.word[...][tokens] + self.position[...][: tokens.shape[1]], True, attention)
        eos = self.config.eos_id
        ends = tokens if eos == _LEGACY_EOS else (tokens == eos).astype(jnp.int32)
        x = x[jnp.arange(len(x)), jnp.argmax(ends, axis=1)]
        x = layer_norm(x, self.final_norm[...], self.final_norm_bias[...], self.config.text.norm_eps)
        return x @ self.projection[...]


class VisionTower(nnx.Module):
    """Pictures to one vector each."""

    def __init__(self, config: ClipConfig, init: Initializer) -> None:
        tower = config.vision
        self.config = config
        self.patch = init.normal((3, config.patch, config.patch, tower.embed), (None, None, None, "embed"))
        self.cls = init.normal((tower.embed,), (None,))
        self.position = init.normal((config.patches + 1, tower.embed), (None, "embed"))
        self.first_norm = init.ones((tower.embed,), (None,))
        self.first_norm_bias = init.zeros((tower.embed,), (None,))
        self.blocks = TowerBlocks(tower, init)
        self.final_norm = init.ones((tower.embed,), (None,))
        self.final_norm_bias = init.zeros((tower.embed,), (None,))
        self.projection = init.normal((tower.embed, config.projection), ("embed", "mlp"))

    def __call__(self, pixels: Float[Array, "B S S 3"], attention: Attention) -> Float[Array, "B E"]:
        side, eps = self.config.patch, self.config.vision.norm_eps
        count = self.config.image_size // side
        whole = pixels[:, : count * side, : count * side].astype(self.patch[...].dtype)
        grid = whole.reshape(len(pixels), count, side, count, side, 3)
        x = jnp.einsum("ByhxwC,ChwD->ByxD", grid, self.patch[...]).reshape(len(pixels), count * count, -1)
        cls = jnp.broadcast_to(self.cls[...], (len(x), 1, x.shape[-1]))
        x = jnp.concatenate([cls, x], axis=1) + self.position[...]
        x = layer_norm(x, self.first_norm[...], self.first_norm_bias[...], eps)
        x = _layers(self.blocks, x, False, attention)[:, 0]
        return layer_norm(x, self.final_norm[...], self.final_norm_bias[...], eps) @ self.projection[...]


class Clip(PictureEmbedder):
    """`embed` takes texts, pictures (`images.decode_image`; a string is a text) and `TextAndImage`s, in any mix.

    Vectors are UniIR's CLIP-SF: the sum of the two towers' outputs, which is then normalised. A missing part, or an empty text,
    counts as zero. For a single part this is CLIP's usual normalised embedding. (UniIR rounds vectors to float16 before it
    normalises them; this class doesn't.)
    """

    config: ClipConfig

    def __init__(
        self,
        config: ClipConfig,
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
        self.text = TextTower(config, init)
        self.vision = VisionTower(config, init)
        self.logit_scale = nnx.Param(jnp.asarray(np.log(1 / 0.07), param_dtype), axes=())  # of the training loss

    @property
    def dim(self) -> int:
        """Width of the vectors."""
        return self.config.projection

    @property
    def longest_text(self) -> int:
        """Tokens of a text that `embed` reads, special tokens and prefix included."""
        return min(self.config.text_length or self.config.max_length, self.config.max_length)

    def encode_text(self, tokens: Int[Array, "B T"], *, attention: Attention | None = None) -> Float[Array, "B E"]:
        """Projected text vectors, float32, not normalised. Rows are padded on the right; attention is causal, so no mask is
        needed."""
        word = self.text.word[...]
        with matmul_precision(word.dtype):
            return self.text(jnp.asarray(tokens), attention or Attention.for_weight(word)).astype(jnp.float32)

    def encode_image(
        self, pixels: Float[Array, "B S S 3"], *, attention: Attention | None = None
    ) -> Float[Array, "B E"]:
        """Projected vectors of preprocessed pictures (`config.images`), float32, not normalised."""
        patch = self.vision.patch[...]
        with matmul_precision(patch.dtype):
            return self.vision(jnp.asarray(pixels), attention or Attention.for_weight(patch)).astype(jnp.float32)

    def _vectors(
        self, inputs: Sequence[str | list[int] | ImageSource | TextAndImage], prefix: str, batch_size: int, bar: Bar
    ) -> Float32[np.ndarray, "N E"]:
        parts = [text_and_picture(item) for item in inputs]
        written = [i for i, (text, _) in enumerate(parts) if text]
        shown = [i for i, (_, image) in enumerate(parts) if image is not None]
        bar.total = len(written) + len(shown)
        fused = np.zeros((len(parts), self.dim), np.float32)
        if written:
            ids = self._ids([text for text, _ in parts if text], prefix)
            results = self._run(
                _text, [len(i) for i in ids], functools.partial(self._text_batch, ids), batch_size, self.longest_text
            )
            fused[written] += self._gather(results, len(ids), bar)
        if shown:
            images = [image for _, image in parts if image is not None]
            fill = functools.partial(self._image_batch, images)
            results = self._run(_image, [1] * len(images), fill, batch_size, 1)
            fused[shown] += self._gather(results, len(images), bar)
        # On the host, because a device program's order of summation would depend on the number of inputs.
        return fused / np.maximum(np.linalg.norm(fused, axis=1, keepdims=True), 1e-12)

    def _text_batch(self, ids: list[list[int]], rows: list[int], shape: tuple[int, int]) -> tuple[np.ndarray]:
        return self._token_batch(ids, rows, shape)[:1]

    def _image_batch(self, images: list[ImageSource], rows: list[int], shape: tuple[int, int]) -> tuple[np.ndarray]:
        pixels = np.zeros((shape[0], self.config.image_size, self.config.image_size, 3), np.float32)
        for row, i in enumerate(rows):
            pixels[row] = self.config.images(images[i])
        return (pixels,)


def uniir_text(text: str, instruction: str = "") -> str:
    """A text in the form of UniIR's data sets: instruction first, then the text with a capital and a mark at its end."""
    text = f"{instruction} {text}" if instruction else text
    text = text.replace("\r", "").strip().strip('"')
    if not text:
        return text
    return text[0].upper() + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")


def _layers(blocks: TowerBlocks, x: Array, causal: bool, attention: Attention) -> Array:
    graph, stacked = nnx.split(blocks)
    x, _ = jax.lax.scan(lambda x, layer: (nnx.merge(graph, layer)(x, causal, attention), None), x, stacked)
    return x


@functools.partial(jax.jit, static_argnums=(0, 2))
def _text(graph: nnx.GraphDef, params: nnx.State, attention: Attention, tokens: Array) -> Array:
    """`Clip.encode_text` as a pure function: several threads may embed with one model at once."""
    return nnx.merge(graph, params).encode_text(tokens, attention=attention)


@functools.partial(jax.jit, static_argnums=(0, 2))
def _image(graph: nnx.GraphDef, params: nnx.State, attention: Attention, pixels: Array) -> Array:
    """`Clip.encode_image` as a pure function."""
    return nnx.merge(graph, params).encode_image(pixels, attention=attention)
