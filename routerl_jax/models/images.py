"""Pictures for Qwen2-VL and Qwen2.5-VL: decoding of all kinds of input, crops, and the image processor.

Numpy and Pillow on the host. Every value is equal to that of transformers' Qwen2VLImageProcessor (its Pillow version).
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging
from jaxtyping import Float32, UInt8
from PIL import Image, ImageOps

from routerl_jax.models.config import UnsupportedModelError
from routerl_jax.models.patches import ImagePatches, arrange
from routerl_jax.models.regions import MOST_ASPECT, RefusedRegion, pixels_within

ImageSource = bytes | bytearray | str | os.PathLike | Image.Image | np.ndarray

_COMMON = ("png", "jpeg", "gif", "webp")  # formats that every reader of pictures accepts
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def decode_image(source: ImageSource, *, name: str | None = None) -> Image.Image:
    """The picture in RGB, upright, 8 bits per channel.

    Animations (GIF, WebP, APNG) give their first frame; a PIL image gives its current frame. Transparent parts become white.
    The EXIF orientation is applied. Damaged EXIF data is ignored, with a warning. 16 bits are scaled to 8; CMYK, palettes and
    grey are converted. A damaged JPEG is used if the decoder can decode it. A truncated file is an error, because its missing
    part would be made up.

    Args:
      source: encoded bytes, a path, a `data:` URI in base64, a PIL image, or an array [H, W], [H, W, 1], [H, W, 3] or
        [H, W, 4] of uint8, uint16, bool, or floats from 0 to 1.
      name: name of the picture in errors; default: its path, or "image".

    Raises:
      ValueError: the source is no usable picture; names it and the fix.
    """
    name = _name(source, name)
    if isinstance(source, np.ndarray):
        return _flatten(_from_array(source, name), name)
    if not isinstance(source, Image.Image):
        source = _open(source, name)
    try:
        source.load()
    except Exception as error:  # decoders raise many types: OSError, SyntaxError, struct.error, ...
        raise _damaged(name, error) from error
    try:
        source = ImageOps.exif_transpose(source)
    except Exception as error:
        logging.warning("%s: EXIF data is damaged (%s); the picture is used as stored", name, error)
    return _flatten(source, name)


def check_image(source: bytes | bytearray | str | os.PathLike, *, name: str | None = None) -> None:
    """Checks a picture, faster than `decode_image`. Raises ValueError if `decode_image` would, or if no model can read a
    picture of this shape.

    PNGs are checked by their checksums, JPEGs are decoded at an eighth of their size, and other formats are decoded.
    """
    name = _name(source, name)
    with _open(source, name) as image:
        check_aspect(*image.size, name)
        try:
            if image.format == "PNG":
                image.verify()
            else:
                image.draft("RGB", (1, 1))  # of formats that know no smaller sizes this asks nothing
                image.load()
        except Exception as error:  # as in `decode_image`
            raise _damaged(name, error) from error


def check_aspect(width: int, height: int, name: str) -> None:
    """Raises ValueError that names the picture if one side is over 200 times the other: no model can read it then."""
    if max(height, width) > MOST_ASPECT * min(height, width):
        raise ValueError(
            f"{name}: {width}x{height} pixels; one side may be at most {MOST_ASPECT} times the other: crop or pad it"
        )


def image_size(source: ImageSource, *, name: str | None = None) -> tuple[int, int]:
    """(width, height) of the upright picture, as in `decode_image`. An encoded picture is not decoded for this.

    Raises:
      ValueError: nothing that can be used as a picture; names it.
    """
    if isinstance(source, Image.Image | np.ndarray):
        return decode_image(source, name=name).size
    with _open(source, _name(source, name)) as image:
        try:
            turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
        except Exception:  # damaged, and then ignored
            turned = False
        return (image.height, image.width) if turned else image.size


def image_bytes(source: bytes | bytearray | str | os.PathLike, name: str = "image") -> bytes:
    """A picture's encoded bytes: given as such, in a file, or in a `data:` URI (base64).

    Raises:
      ValueError: the file does not exist, the URI has another form, or it is a URL (which is not fetched); names the picture.
    """
    if is_url(source):
        raise ValueError(
            f"{name}: a URL, and nothing is fetched here; give the picture itself (a path, bytes, a data: URI)"
        )
    if isinstance(source, str) and is_data(source):
        head, comma, data = source.partition(",")
        try:
            if not comma or not head.endswith(";base64"):
                raise ValueError("no ';base64,' in it")
            return base64.b64decode(data, validate=True)
        except ValueError as error:
            raise ValueError(f"{name}: not a data URI in base64 ({error}); give data:image/png;base64,...") from error
    if isinstance(source, (str, os.PathLike)):
        try:
            return pathlib.Path(source).read_bytes()
        except OSError as error:
            raise ValueError(f"{name}: can't be read ({error.strerror}); check the path") from error
    return bytes(source)


def encoded_image(source: ImageSource, name: str | None = None) -> tuple[bytes, str]:
    """A picture as bytes of a file, and its format ("png", "jpeg", "gif", "webp"). Encoded bytes of these formats are returned
    unchanged; anything else becomes PNG.

    Raises:
      ValueError: nothing that can be used as a picture; names it.
    """
    if not isinstance(source, Image.Image | np.ndarray):
        content = image_bytes(source, _name(source, name))
        form = (_open(content, _name(source, name)).format or "").lower()
        if form in _COMMON:
            return content, form
    buffer = io.BytesIO()
    # a crop of a page is 5 % larger with this level, and takes a quarter of the time
    decode_image(source, name=name).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue(), "png"


def image_uri(source: ImageSource) -> str:
    """A picture as a `data:` URI (base64) of `encoded_image`. Raises the same ValueError."""
    content, form = encoded_image(source)
    return f"data:image/{form};base64,{base64.b64encode(content).decode()}"


def image_digest(source: ImageSource) -> str:
    """SHA-256 of a picture's encoded bytes, or of its pixels if it is not encoded.

    Raises:
      ValueError: the picture can't be read.
    """
    if isinstance(source, Image.Image):
        try:
            parts: tuple[Any, bytes] = (source.mode, source.size), source.tobytes()
        except OSError as error:  # an opened file whose pixels are read only now
            raise ValueError(f"a picture of {source.size} pixels can't be read: {error}") from error
    elif isinstance(source, np.ndarray):
        parts = (source.dtype.str, source.shape), source.tobytes()
    else:
        return hashlib.sha256(image_bytes(source, _name(source, None))).hexdigest()
    return hashlib.sha256(repr(parts[0]).encode() + parts[1]).hexdigest()


def crop(image: Image.Image, bbox: Sequence[float], *, name: str = "image") -> Image.Image:
    """The part of a picture inside (left, top, right, bottom), in its own pixels (`models.regions.pixels_within`).

    Raises:
      ValueError: not four finite numbers, no area (corners swapped, say), or no overlap with the picture.
    """
    try:
        return image.crop(pixels_within(bbox, image.size))
    except RefusedRegion as error:
        raise ValueError(f"{name}: bbox {bbox!r}: {error}") from error


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int, *, name: str = "image"
) -> tuple[int, int]:
    """The (height, width) after resizing: multiples of `factor`, area within bounds, aspect ratio nearly unchanged.

    Sides are rounded half to even, as Qwen's and transformers' functions of this name do.

    Raises:
      ValueError: one side is over 200 times the other.
    """
    check_aspect(width, height, name)
    new_height, new_width = (round(side / factor) * factor for side in (height, width))
    if new_height * new_width > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        new_height, new_width = (max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width))
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height, new_width = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return new_height, new_width


def normalised_levels(
    mean: tuple[float, float, float], std: tuple[float, float, float], rescale: float
) -> Float32[np.ndarray, "3 256"]:
    """The value of each level of each channel after rescaling and normalisation, with transformers' order and roundings."""
    levels = (np.arange(256, dtype=np.float64) * rescale).astype(np.float32)
    return (levels - np.asarray(mean, np.float32)[:, None]) / np.asarray(std, np.float32)[:, None]


# Settings of published Qwen3-VL models in preprocessor_config.json, in addition to their patch size of 16.
QWEN3: Mapping[str, Any] = {"min_pixels": 256**2, "max_pixels": 4096**2, "mean": (0.5,) * 3, "std": (0.5,) * 3}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """The preprocessing of a picture for the vision tower: size, normalisation, patches.

    Attributes:
      patch_size: side of a patch, pixels.
      temporal_patch_size: frames per patch; a still picture is repeated.
      merge_size: side, in patches, of the group that becomes one image token.
      min_pixels, max_pixels: bounds of the area after resizing.
      mean, std: mean and standard deviation of the channels, after rescaling.
      rescale: factor for pixel values from 0 to 255.
      window: side of an attention window in pixels; None for towers without windows. (It is `VisionConfig.window`, and not in
        preprocessor_config.json.)
    """

    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD
    rescale: float = 1 / 255
    window: int | None = None

    @property
    def factor(self) -> int:
        """Side of an image token, in pixels."""
        return self.patch_size * self.merge_size

    def grid(self, height: int, width: int, *, name: str = "image") -> tuple[int, int, int]:
        """(frames, rows, columns) of the patches of a picture of this size; frames are 1."""
        new_height, new_width = smart_resize(height, width, self.factor, self.min_pixels, self.max_pixels, name=name)
        return 1, new_height // self.patch_size, new_width // self.patch_size

    def tokens(self, height: int, width: int, *, name: str = "image") -> int:
        """Number of image tokens of a picture of this size."""
        return math.prod(self.grid(height, width, name=name)) // self.merge_size**2

    def __call__(self, source: ImageSource, *, name: str | None = None) -> ImagePatches:
        """Patches of one picture with all indices that the tower needs.

        Raises:
          ValueError: see `decode_image` and `smart_resize`; names the picture.
        """
        name = _name(source, name)
        image = decode_image(source, name=name)
        grid = self.grid(image.height, image.width, name=name)
        size = (grid[2] * self.patch_size, grid[1] * self.patch_size)
        pixels = np.asarray(image.resize(size, Image.Resampling.BICUBIC))
        return arrange(
            self._patches(pixels),
            grid,
            merge=self.merge_size,
            window=None if self.window is None else self.window // self.factor,
            digest=hashlib.sha256(repr(self).encode() + pixels.tobytes()).hexdigest(),
        )

    def _patches(self, pixels: UInt8[np.ndarray, "H W 3"]) -> Float32[np.ndarray, "P D"]:
        """Normalised patches in raster order of merge groups, the values of one ordered (channel, frame, row, column)."""
        side, merge = self.patch_size, self.merge_size
        rows, columns = pixels.shape[0] // self.factor, pixels.shape[1] // self.factor
        split = pixels.reshape(rows, merge, side, columns, merge, side, 3).transpose(0, 3, 1, 4, 6, 2, 5)
        split = split.reshape(rows * columns * merge**2, 3, side, side)
        table = normalised_levels(self.mean, self.std, self.rescale)
        values = np.empty((len(split), 3, self.temporal_patch_size, side, side), np.float32)
        for channel in range(3):
            values[:, channel] = table[channel][split[:, channel]][:, None]
        return values.reshape(len(split), -1)

    def to_hf(self) -> dict[str, Any]:
        """The preprocessor_config.json that transformers loads as the same processor."""
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": self.patch_size,
            "temporal_patch_size": self.temporal_patch_size,
            "merge_size": self.merge_size,
            "size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels},
            # transformers before 4.50 and vLLM read these two instead of size
            "min_pixels": self.min_pixels,
            "max_pixels": self.max_pixels,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
            "rescale_factor": self.rescale,
            "resample": int(Image.Resampling.BICUBIC),
            "do_convert_rgb": True,
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": True,
        }


def processor_from_hf(
    config: Mapping[str, Any], source: str = "preprocessor_config.json", *, window: int | None = None
) -> ImageProcessor:
    """Reads a preprocessor_config.json, or a processor_config.json with an `image_processor` in it.

    The bounds of the area are its `min_pixels` and `max_pixels`, or those of `size`, or `shortest_edge` and `longest_edge` of
    `size` (which are areas too). The order of precedence is that of transformers.

    Args:
      window: `VisionConfig.window` of the model.

    Raises:
      UnsupportedModelError: processing that this class does not do; the values would differ.
    """
    config = config.get("image_processor", config)
    fixed: dict[str, Any] = dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True)
    for key, needed in {**fixed, "resample": int(Image.Resampling.BICUBIC)}.items():
        if config.get(key, needed) != needed:
            raise UnsupportedModelError(f"{source}: {key}={config[key]!r} is not supported; supported: {needed!r}")
    kind = str(config.get("image_processor_type", "Qwen2VLImageProcessor"))
    if not kind.startswith("Qwen2VLImageProcessor"):
        raise UnsupportedModelError(
            f"{source}: image_processor_type {kind!r} is not supported; supported: Qwen2VLImageProcessor"
        )
    size = config.get("size") or {}
    default = ImageProcessor()

    def bound(top: str, edge: str) -> int:
        candidates = (config.get(top), size.get(edge), size.get(top), getattr(default, top))
        return int(next(value for value in candidates if value is not None))

    result = ImageProcessor(
        patch_size=config.get("patch_size", default.patch_size),
        temporal_patch_size=config.get("temporal_patch_size", default.temporal_patch_size),
        merge_size=config.get("merge_size", default.merge_size),
        min_pixels=bound("min_pixels", "shortest_edge"),
        max_pixels=bound("max_pixels", "longest_edge"),
        mean=_channels(config, "image_mean", default.mean, source),
        std=_channels(config, "image_std", default.std, source),
        rescale=config.get("rescale_factor", default.rescale),
        window=window,
    )
    if not 0 < result.min_pixels <= result.max_pixels:
        raise ValueError(
            f"{source}: min_pixels={result.min_pixels} must lie between 1 and max_pixels={result.max_pixels}"
        )
    return result


def _channels(
    config: Mapping[str, Any], key: str, default: tuple[float, float, float], source: str
) -> tuple[float, float, float]:
    value = config.get(key) or default
    if len(value) != 3:
        raise ValueError(f"{source}: {key}={value!r} must have three numbers, for red, green and blue")
    return tuple(float(part) for part in value)  # type: ignore[return-value]


def _name(source: ImageSource, name: str | None) -> str:
    if name is not None:
        return name
    if isinstance(source, (str, os.PathLike)) and not is_data(source):
        return os.fspath(source)
    return "image"


def is_url(source: object) -> bool:
    """Whether the source is a URL, and no picture or path."""
    return isinstance(source, str) and source.startswith(("http://", "https://"))


def is_data(source: str | os.PathLike) -> bool:
    """Whether the source is a `data:` URI, and no path."""
    return isinstance(source, str) and source.startswith("data:")


def _open(source: bytes | bytearray | str | os.PathLike, name: str) -> Image.Image:
    source = image_bytes(source, name)
    try:
        return Image.open(io.BytesIO(source))
    except Exception as error:
        raise ValueError(
            f"{name}: not an image that Pillow can open ({type(error).__name__}, {len(source)} bytes beginning with "
            f"{bytes(source[:8])!r}); give JPEG, PNG, GIF, WebP, TIFF or BMP"
        ) from error


def _damaged(name: str, error: Exception) -> ValueError:
    return ValueError(f"{name}: damaged or incomplete ({error}); get the file again or drop the row")


def _from_array(array: np.ndarray, name: str) -> Image.Image:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))) or 0 in array.shape:
        raise ValueError(f"{name}: an array of shape {array.shape}; give [H, W], [H, W, 1], [H, W, 3] or [H, W, 4]")
    if array.dtype == np.bool_:
        array = array * np.uint8(255)
    elif array.dtype == np.uint16:
        array = _to_bytes(array, 65535)
    elif np.issubdtype(array.dtype, np.floating):
        if not (array.min() >= 0 and array.max() <= 1):  # false for NaN
            raise ValueError(f"{name}: floats must lie from 0 to 1; give uint8 or divide by the largest value")
        array = _to_bytes(array, 1)
    elif array.dtype != np.uint8:
        raise ValueError(f"{name}: an array of {array.dtype}; give uint8, uint16, bool, or floats from 0 to 1")
    return Image.fromarray(array)


def _flatten(image: Image.Image, name: str) -> Image.Image:
    """RGB of any mode, transparency on white."""
    if 0 in image.size:
        raise ValueError(f"{name}: {image.width}x{image.height} pixels; a picture needs at least one")
    if image.mode == "F" or image.mode.startswith("I"):  # Pillow would clip these at 255
        levels = np.asarray(image)
        most = 1 if image.mode == "F" and levels.max() <= 1 else 255 if image.mode == "F" else 65535
        if not (levels.min() >= 0 and levels.max() <= most):
            raise ValueError(
                f"{name}: values from {levels.min()} to {levels.max()} in mode {image.mode}; save it with 8 or 16 bits"
            )
        return Image.fromarray(_to_bytes(levels, most)).convert("RGB")
    try:
        if image.has_transparency_data:
            image = image.convert("RGBA")
            return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
        return image.convert("RGB")
    except ValueError as error:
        raise ValueError(f"{name}: mode {image.mode} can't be converted ({error}); save it as RGB") from error


def _to_bytes(levels: np.ndarray, most: float) -> UInt8[np.ndarray, "..."]:
    return np.rint(levels.astype(np.float64) * (255 / most)).astype(np.uint8)
