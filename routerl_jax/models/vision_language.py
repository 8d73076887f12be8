"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: a text decoder; a vision tower gives the embeddings of image tokens.

(arXiv 2409.12191, 2502.13923 and 2511.21631.) Parameters of all layers are stacked and scanned, as in models/decoder.py.
Dimensions of the model: B rows, T time, D residual stream, S shards of rows (B is a multiple), P patches of a shard, F image
features of a shard. Of the tower: B arrays of patches, P patches, D width of the tower, L layers, N heads, H head width,
F feed-forward, W windows, Q queries, S keys.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from routerl_jax.models.attention import Attention, self_attention
from routerl_jax.models.config import VisionConfig, VisionLanguageConfig
from routerl_jax.models.decoder import REMAT_POLICIES, Decoder, Features, Remat
from routerl_jax.models.image_tokens import ImageTokens
from routerl_jax.models.images import QWEN3, ImageProcessor, ImageSource
from routerl_jax.models.layers import Initializer, inverse_frequencies, layer_norm, matmul_precision, rms_norm, rotate
from routerl_jax.models.patches import ImagePatches, VisionInputs, concatenate


class VisionLanguageModel(Decoder):
    """A decoder with vision. For text it is a `Decoder`; a text-only row needs no image, not even a dummy one."""

    def __init__(
        self,
        config: VisionLanguageConfig,
        key: jax.Array,
        *,
        param_dtype: jnp.dtype = jnp.float32,
        compute_dtype: jnp.dtype | None = None,
    ) -> None:
        text_key, vision_key = jax.random.split(key)
        super().__init__(config.text, text_key, param_dtype=param_dtype, compute_dtype=compute_dtype)
        self.vl_config = config
        self.visual = VisionTower(config.vision, vision_key, param_dtype=param_dtype, compute_dtype=self.compute_dtype)
        self.image_processor = ImageProcessor(
            patch_size=config.vision.patch,
            temporal_patch_size=config.vision.temporal_patch,
            merge_size=config.vision.merge,
            window=config.vision.window,
            **(QWEN3 if config.model_type == "qwen3_vl" else {}),
        )

    @property
    def image_tokens(self) -> ImageTokens:
        """The host's tools to put images into prompts and observations."""
        return ImageTokens(self.vl_config, self.image_processor)

    @property
    def architecture(self) -> VisionLanguageConfig:  # type: ignore[override]
        return self.vl_config

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "3 B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        images: Sequence[Sequence[ImageSource | ImagePatches]] | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits, float32.

        Args:
          tokens: ids; an image token stands there once for each feature of its image (`ImageTokens.expand`).
          positions: rotary positions (time, row, column); default: of each row's own text and images from 0 on.
          segment_ids: packed sequences; default: one segment a row.
          images: the images of each row, in order. Not inside jit, where `features` and `hidden` take processed ones.
        """
        if images is None:
            return super().__call__(tokens, positions, segment_ids)
        rows = np.asarray(tokens)
        host = self.image_tokens
        placed = [[host.process(image) for image in row] for row in images]
        if len(placed) != len(rows):
            raise ValueError(
                f"images of {len(placed)} rows for {len(rows)} rows of tokens; give an empty list where none are"
            )
        if positions is None:
            positions = jnp.stack([host.positions(*row)[0] for row in zip(rows, placed)], axis=1)
        flat = [image for row in placed for image in row]
        features = None
        if flat:
            inputs = concatenate(flat)
            index = np.full(rows.shape, -1, np.int32)
            index[rows == self.vl_config.image_id] = inputs.slots[inputs.slots >= 0]
            values = self.features(jax.tree.map(lambda x: x[None], inputs))
            features = Features(values=values, index=jnp.asarray(index))
        return self.unembed(self.hidden(jnp.asarray(rows), positions, segment_ids, features=features))

    def features(
        self, images: VisionInputs, *, remat: Remat = "none", attention: Attention | None = None
    ) -> Float[Array, "S F D"] | Float[Array, "S F N D"]:
        """Features of images that are laid out in shards ([S, P, ...]): F = P / patches per token of them."""
        return self.visual(images, remat=remat, attention=attention)


class VisionBlocks(nnx.Module):
    """All layers. `__call__` runs the layer whose parameters it currently holds (one slice of the stack)."""

    def __init__(self, config: VisionConfig, init: Initializer) -> None:
        layers, embed, heads, width, mlp = config.depth, config.embed, config.heads, config.head_dim, config.mlp
        self.config = config
        self.attention_norm = init.ones((layers, embed), ("layers", None))
        self.qkv = init.normal((layers, 3, embed, heads, width), ("layers", None, "embed", "heads", "head_dim"))
        self.qkv_bias = init.zeros((layers, 3, heads, width), ("layers", None, "heads", "head_dim"))
        self.o = init.normal((layers, heads, width, embed), ("layers", "heads", "head_dim", "embed"))
        self.o_bias = init.zeros((layers, embed), ("layers", None))
        self.mlp_norm = init.ones((layers, embed), ("layers", None))
        self.up = init.normal((layers, embed, mlp), ("layers", "embed", "mlp"))
        self.up_bias = init.zeros((layers, mlp), ("layers", "mlp"))
        if config.gated:
            self.gate = init.normal((layers, embed, mlp), ("layers", "embed", "mlp"))
            self.gate_bias = init.zeros((layers, mlp), ("layers", "mlp"))
        self.down = init.normal((layers, mlp, embed), ("layers", "mlp", "embed"))
        self.down_bias = init.zeros((layers, embed), ("layers", None))
        if config.norm == "layer":
            self.attention_norm_bias = init.zeros((layers, embed), ("layers", None))
            self.mlp_norm_bias = init.zeros((layers, embed), ("layers", None))

    def __call__(
        self,
        x_BPD: Array,
        rope: tuple[Array, Array],
        segments_BP: Array,
        full: Array | bool,
        attention: Attention,
        dtype: jnp.dtype,
    ) -> Array:
        h = self._norm(x_BPD, "attention_norm")
        qkv = jnp.einsum("BPD,CDNH->CBPNH", h, self.qkv[...].astype(dtype))
        qkv = qkv + self.qkv_bias[...].astype(dtype)[:, None, None]
        q, k = (rotate(part.astype(jnp.float32), rope).astype(dtype) for part in (qkv[0], qkv[1]))
        out = self._attention(q, k, qkv[2], segments_BP, full, attention)
        x_BPD = x_BPD + (jnp.einsum("BPNH,NHD->BPD", out, self.o[...].astype(dtype)) + self.o_bias[...].astype(dtype))
        h = self._norm(x_BPD, "mlp_norm")
        up = (h @ self.up[...].astype(dtype) + self.up_bias[...].astype(dtype)).astype(jnp.float32)
        if self.config.gated:
            gate = (h @ self.gate[...].astype(dtype) + self.gate_bias[...].astype(dtype)).astype(jnp.float32)
            h = jax.nn.silu(gate) * up
        elif self.config.model_type == "qwen3_vl":
            h = jax.nn.gelu(up, approximate=True)
        else:
            h = up * jax.nn.sigmoid(1.702 * up)
        h = h.astype(dtype)
        return x_BPD + (h @ self.down[...].astype(dtype) + self.down_bias[...].astype(dtype))

    def _attention(
        self, q: Array, k: Array, v: Array, segments_BP: Array, full: Array | bool, attention: Attention
    ) -> Array:
        everywhere = functools.partial(full_attention, attention=attention)
        if self.config.window is None or full is True:
            return everywhere(q, k, v, segments_BP)
        patches = self.config.window_patches
        if full is False:
            return window_attention(q, k, v, segments_BP, patches)
        # Rematerialised, because the backward pass of a cond stores the values that either branch needs.
        return jax.lax.cond(
            full,
            jax.checkpoint(everywhere),
            jax.checkpoint(lambda q, k, v, segments: window_attention(q, k, v, segments, patches)),
            *(q, k, v, segments_BP),
        )

    def _norm(self, x: Array, name: str) -> Array:
        scale, eps = getattr(self, name)[...], self.config.norm_eps
        if self.config.norm == "rms":
            return rms_norm(x, scale, eps)
        return layer_norm(x, scale, getattr(self, f"{name}_bias")[...], eps)


class VisionTower(nnx.Module):
    """`tower(inputs)` gives one feature of the language model's width per merge group; of a tower with `deep_layers`, one more
    for each of them."""

    def __init__(
        self,
        config: VisionConfig,
        key: jax.Array,
        *,
        param_dtype: jnp.dtype = jnp.float32,
        compute_dtype: jnp.dtype | None = None,
    ) -> None:
        init = Initializer(key, config.init_scale, param_dtype)
        merged = config.group * config.embed
        self.config = config
        self.compute_dtype = jnp.dtype(param_dtype if compute_dtype is None else compute_dtype)
        # A convolution whose stride is its size: a product with flattened patches.
        side, frames = config.patch, config.temporal_patch
        self.patch = init.normal((config.channels, frames, side, side, config.embed), (*(None,) * 4, "embed"))
        self.blocks = VisionBlocks(config, init)
        self.merger_norm = init.ones((config.embed,), (None,))
        if config.norm == "layer":
            self.merger_norm_bias = init.zeros((config.embed,), (None,))
        self.merger_up = init.normal((merged, merged), ("embed", "mlp"))
        self.merger_up_bias = init.zeros((merged,), ("mlp",))
        self.merger_down = init.normal((merged, config.out), ("mlp", "embed"))
        self.merger_down_bias = init.zeros((config.out,), (None,))
        if config.table:
            self.patch_bias = init.zeros((config.embed,), (None,))
            self.places = init.normal((config.table**2, config.embed), (None, "embed"))
        if deep := len(config.deep_layers):  # normed as groups, and not patch by patch
            self.deep_norm = init.ones((deep, merged), ("layers", None))
            self.deep_norm_bias = init.zeros((deep, merged), ("layers", None))
            self.deep_up = init.normal((deep, merged, merged), ("layers", "embed", "mlp"))
            self.deep_up_bias = init.zeros((deep, merged), ("layers", "mlp"))
            self.deep_down = init.normal((deep, merged, config.out), ("layers", "mlp", "embed"))
            self.deep_down_bias = init.zeros((deep, config.out), ("layers", None))

    def __call__(
        self, inputs: VisionInputs, *, remat: Remat = "none", attention: Attention | None = None
    ) -> Float[Array, "*B groups D"] | Float[Array, "*B groups N D"]:
        """Features of all merge groups, in the compute dtype; N: of the last layer, then of each of `deep_layers`.

        The image tokens, in order, have the features `result[slots]`. Groups without a slot hold meaningless finite values. A
        picture's features do not depend on other pictures in its array.

        Args:
          inputs: P patches, a multiple of `config.window_patches`.
          remat: trades compute for memory in the backward pass.
          attention: the implementation of full attention; default: the best for the weights' devices. Inside jit these are
            unknown, so pass it there.
        """
        *lead, patches, width = inputs.patches.shape
        if width != self.config.patch_dim or patches % self.config.window_patches:
            raise ValueError(
                f"{patches} patches of {width} values; this tower takes patches of {self.config.patch_dim} values, in "
                f"multiples of {self.config.window_patches}"
            )
        with matmul_precision(self.compute_dtype):
            features = self._run(
                jnp.reshape(inputs.patches, (-1, patches, width)),
                jnp.reshape(inputs.positions, (-1, patches, 2)),
                jnp.reshape(inputs.segments, (-1, patches)),
                remat,
                attention or Attention.for_weight(self.patch[...]),
            )
        return features.reshape(*lead, *features.shape[1:])

    def _run(
        self, patches_BPE: Array, positions_BP2: Array, segments_BP: Array, remat: Remat, attention: Attention
    ) -> Array:
        config, dtype = self.config, self.compute_dtype
        x = patches_BPE.astype(dtype) @ self.patch[...].astype(dtype).reshape(config.patch_dim, config.embed)
        if config.table:
            x = x + self.patch_bias[...].astype(dtype)
            x = x + self._stretched(positions_BP2, segments_BP).astype(dtype)
        rope = _axial_angles(positions_BP2, config)
        graph, stacked = nnx.split(self.blocks)

        full = [config.window is None or layer in config.full_layers for layer in range(config.depth)]
        uniform = len(set(full)) == 1

        def block(x: Array, params: nnx.State, flag: Array) -> Array:
            full_attention_flag = full[0] if uniform else flag
            return nnx.merge(graph, params)(x, rope, segments_BP, full_attention_flag, attention, dtype)

        if remat != "none":
            block = jax.checkpoint(block, policy=REMAT_POLICIES[remat], prevent_cse=False)
        if not config.deep_layers:
            x, _ = jax.lax.scan(lambda x, layer: (block(x, *layer), None), x, (stacked, jnp.array(full)))
            return self._merge(x)

        # A layer writes its output in the place of the next deep layer, which is the last to write there.
        ends = jnp.searchsorted(jnp.array(config.deep_layers), jnp.arange(config.depth))

        def step(carry: tuple[Array, Array], layer: tuple[nnx.State, Array, Array]) -> tuple[tuple[Array, Array], None]:
            x = block(carry[0], *layer[:2])
            return (x, jax.lax.dynamic_update_index_in_dim(carry[1], x, layer[2], axis=0)), None

        deep = jnp.zeros((len(config.deep_layers) + 1, *x.shape), x.dtype)
        (x, deep), _ = jax.lax.scan(step, (x, deep), (stacked, jnp.array(full), ends))
        of_layers = (self._merge_deep(deep[i], i) for i in range(len(config.deep_layers)))
        return jnp.stack([self._merge(x), *of_layers], axis=2)

    def _stretched(self, positions_BP2: Array, segments_BP: Array) -> Array:
        """The learned positions of every patch, float32: the table, stretched so that its corners are those of the picture."""
        side, pictures = self.config.table, segments_BP.shape[1] // self.config.group + 1

        def last_of_picture(positions: Array, segments: Array) -> Array:
            return jax.ops.segment_max(positions, segments, num_segments=pictures)[segments]

        last = jnp.maximum(jax.vmap(last_of_picture)(positions_BP2, segments_BP), 1).astype(jnp.float32)
        at = positions_BP2.astype(jnp.float32) * (side - 1) / last
        low = jnp.floor(at)
        share = at - low
        low = low.astype(jnp.int32)
        high = jnp.minimum(low + 1, side - 1)
        table, total = self.places[...].astype(jnp.float32), jnp.zeros(())
        for row, of_row in ((low, 1 - share), (high, share)):
            for column, of_column in ((low, 1 - share), (high, share)):
                weight = of_row[..., 0] * of_column[..., 1]
                total = total + table[row[..., 0] * side + column[..., 1]] * weight[..., None]
        return total

    def _merge_deep(self, x_BPD: Array, i: int) -> Array:
        """`_merge` of the i-th deep layer."""
        config, dtype = self.config, self.compute_dtype
        x = x_BPD.reshape(x_BPD.shape[0], -1, config.group * config.embed)
        x = layer_norm(x, self.deep_norm[...][i], self.deep_norm_bias[...][i], config.norm_eps)
        x = x @ self.deep_up[...][i].astype(dtype) + self.deep_up_bias[...][i].astype(dtype)
        x = jax.nn.gelu(x, approximate=False)
        return x @ self.deep_down[...][i].astype(dtype) + self.deep_down_bias[...][i].astype(dtype)

    def _merge(self, x_BPD: Array) -> Array:
        """Groups of patches, adjacent in the array, to features."""
        config, dtype = self.config, self.compute_dtype
        if config.norm == "rms":
            x = rms_norm(x_BPD, self.merger_norm[...], config.norm_eps)
        else:
            x = layer_norm(x_BPD, self.merger_norm[...], self.merger_norm_bias[...], config.norm_eps)
        x = x.reshape(x.shape[0], -1, config.group * config.embed)
        x = x @ self.merger_up[...].astype(dtype) + self.merger_up_bias[...].astype(dtype)
        x = jax.nn.gelu(x, approximate=False)
        return x @ self.merger_down[...].astype(dtype) + self.merger_down_bias[...].astype(dtype)


def window_attention(
    q: Float[Array, "B P N H"],
    k: Float[Array, "B P N H"],
    v: Float[Array, "B P N H"],
    segments: Int[Array, "B P"],
    window: int,
) -> Float[Array, "B P N H"]:
    """Attention inside windows of `window` consecutive patches, to patches of the same segment; softmax in float32."""
    batch, patches, heads, width = q.shape
    shape = (batch * patches // window, window)
    q_WQNH, k_WSNH, v_WSNH = (part.reshape(*shape, heads, width) for part in (q, k, v))
    segments_WS = segments.reshape(shape)
    logits = jnp.einsum("WQNH,WSNH->WNQS", q_WQNH, k_WSNH, preferred_element_type=jnp.float32) * width**-0.5
    same = segments_WS[:, None, :, None] == segments_WS[:, None, None, :]
    weights = jax.nn.softmax(jnp.where(same, logits, jnp.finfo(jnp.float32).min), axis=-1)
    return jnp.einsum("WNQS,WSNH->WQNH", weights.astype(v.dtype), v_WSNH).reshape(q.shape)


def full_attention(
    q: Float[Array, "B P N H"],
    k: Float[Array, "B P N H"],
    v: Float[Array, "B P N H"],
    segments: Int[Array, "B P"],
    *,
    attention: Attention | None = None,
) -> Float[Array, "B P N H"]:
    """Attention to all patches of the same segment.

    cuDNN is not asked: it would need a mask of all pairs (half a GB for a page of 16,384 patches). Tiles without a common
    picture are left out, so an array of several pictures costs the sum of their squares, not the square of their sum.
    """
    attention = attention or Attention()
    if attention.kind == "cudnn":
        attention = dataclasses.replace(attention, kind="xla")
    return self_attention(q, k, v, segments, causal=False, attention=attention)


def _axial_angles(positions_BP2: Array, config: VisionConfig) -> tuple[Array, Array]:
    """Cosines and sines [B, P, H / 2]: the first half of the frequencies turns with the row, the second with the column."""
    half = config.head_dim // 2
    frequencies = inverse_frequencies(half, config.rope_theta)
    angles = (positions_BP2[..., None].astype(jnp.float32) * frequencies).reshape(*positions_BP2.shape[:2], half)
    return jnp.cos(angles), jnp.sin(angles)
