"""Pictures as CLIP reads them: resized, centre-cropped, normalised. Numpy and Pillow on the host.

Every value is equal to that of transformers' CLIPImageProcessor (its Pillow version). OpenAI's own pipeline, which UniIR uses,
rounds half of an odd margin of the crop to even; this one and transformers round down. So crops differ by at most one pixel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float32
from PIL import Image

from routerl_jax.models.config import UnsupportedModelError
from routerl_jax.models.images import ImageSource, decode_image

_MOST_PIXELS = 2**28  # of a picture after resizing: a thin strip becomes huge before the crop takes its middle


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipImageProcessor:
    """The preprocessing of a picture for CLIP's vision tower.

    Attributes:
      size: length of the shorter side after resizing, pixels; or (height, width), which ignores the aspect ratio.
      crop: side of the square in the middle that is kept, pixels. Parts outside the picture are black.
      mean, std: mean and standard deviation of the channels, after rescaling.
      rescale: factor for pixel values from 0 to 255.
      resample: Pillow's number of the filter.
    """

    size: int | tuple[int, int] = 224
    crop: int = 224
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    rescale: float = 1 / 255
    resample: int = int(Image.Resampling.BICUBIC)

    def __call__(self, source: ImageSource) -> Float32[np.ndarray, "crop crop 3"]:
        """Pixels of one picture. Raises ValueError if it is no picture (`images.decode_image`)."""
        pixels = self._middle(decode_image(source))
        levels = (np.arange(256, dtype=np.float64) * self.rescale).astype(np.float32)
        table = (levels - np.asarray(self.mean, np.float32)[:, None]) / np.asarray(self.std, np.float32)[:, None]
        return np.stack([table[channel][pixels[:, :, channel]] for channel in range(3)], axis=-1)

    def _middle(self, image: Image.Image) -> np.ndarray:
        """The crop of the resized picture, uint8."""
        if isinstance(self.size, tuple):
            height, width = self.size
        else:
            long = int(self.size * max(image.size) / min(image.size))
            height, width = (long, self.size) if image.width <= image.height else (self.size, long)
        top, left = (height - self.crop) // 2, (width - self.crop) // 2
        if height * width > _MOST_PIXELS:
            raise ValueError(
                f"a picture of {image.width}x{image.height} pixels would become {width}x{height} before the middle is cut out; "
                f"crop or pad it"
            )
        resized = np.asarray(image.resize((width, height), Image.Resampling(self.resample)))
        # If a side is shorter than the crop, it is padded with black on both ends; an odd line goes to the start.
        above, before = max(0, -top), max(0, -left)
        resized = resized[max(0, top) : max(0, top) + self.crop, max(0, left) : max(0, left) + self.crop]
        canvas = np.zeros((self.crop, self.crop, 3), np.uint8)
        canvas[above : above + resized.shape[0], before : before + resized.shape[1]] = resized
        return canvas

    def to_hf(self) -> dict[str, Any]:
        """The preprocessor_config.json that transformers loads as the same processor."""
        if isinstance(self.size, tuple):
            size = {"height": self.size[0], "width": self.size[1]}
        else:
            size = {"shortest_edge": self.size}
        return {
            "image_processor_type": "CLIPImageProcessor",
            "size": size,
            "crop_size": {"height": self.crop, "width": self.crop},
            "image_mean": list(self.mean),
            "image_std": list(self.std),
            "rescale_factor": self.rescale,
            "resample": self.resample,
            "do_convert_rgb": True,
            "do_resize": True,
            "do_center_crop": True,
            "do_rescale": True,
            "do_normalize": True,
        }


def processor_from_hf(config: Mapping[str, Any], source: str = "preprocessor_config.json") -> ClipImageProcessor:
    """Reads a preprocessor_config.json, or a processor_config.json with an `image_processor` in it.

    Raises:
      UnsupportedModelError: processing that this class does not do; the values would differ.
    """
    config = config.get("image_processor", config)
    for key in ("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not config.get(key, True):
            raise UnsupportedModelError(f"{source}: {key}=false is not supported; supported: true")
    kind = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "CLIPImageProcessor")
    if not kind.startswith(("CLIPImageProcessor", "CLIPFeatureExtractor")):
        raise UnsupportedModelError(
            f"{source}: image_processor_type {kind!r} is not supported; supported: CLIPImageProcessor"
        )
    default = ClipImageProcessor()
    size, crop = config.get("size", default.size), config.get("crop_size", default.crop)
    if isinstance(size, Mapping):
        if set(size) == {"height", "width"}:
            size = (int(size["height"]), int(size["width"]))
        elif set(size) == {"shortest_edge"}:
            size = int(size["shortest_edge"])
        else:
            raise UnsupportedModelError(
                f"{source}: size={dict(size)} is not supported; supported: shortest_edge, or height and width"
            )
    if isinstance(crop, Mapping):
        if set(crop) != {"height", "width"} or crop["height"] != crop["width"]:
            raise UnsupportedModelError(f"{source}: crop_size={dict(crop)} is not supported; supported: a square")
        crop = crop["height"]
    mean, std = (config.get(key) or getattr(default, key[6:]) for key in ("image_mean", "image_std"))
    return ClipImageProcessor(
        size=size,
        crop=int(crop),
        mean=tuple(mean),
        std=tuple(std),
        rescale=config.get("rescale_factor", default.rescale),
        resample=config.get("resample", default.resample),
    )
