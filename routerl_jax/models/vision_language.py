"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: a text decoder; a vision tower gives the embeddings of image tokens.

Dimensions: B rows, T time, D residual stream, S shards of rows (B is a multiple), P patches of a shard, F image features of
a shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from routerl_jax.models.attention import Attention
from routerl_jax.models.config import VisionLanguageConfig
from routerl_jax.models.decoder import Decoder, Features, Remat
from routerl_jax.models.image_tokens import ImageTokens
from routerl_jax.models.images import QWEN3, ImageProcessor, ImageSource
from routerl_jax.models.patches import ImagePatches, VisionInputs, concatenate
from routerl_jax.models.vision import VisionTower


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
            patches = sum(len(image.patches) for image in flat)
            inputs = concatenate(flat, [patches])
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
