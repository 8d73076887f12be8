"""Patches in the order of the vision tower, and all indices that this order needs.

All of this is computed on the host, so device programs have no control flow that depends on a picture's size. The patches of a
merge group (which becomes one image token) are adjacent. Groups are ordered by window, and each window is padded to full size.
Towers without windows keep the raster order of groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

_LEAST_PATCHES = 1024  # of an array
_EMPTY = {"patches": 0, "positions": 0, "segments": 0, "slots": -1}  # of `VisionInputs` where there is no picture


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ImagePatches:
    """One picture, ready for the tower.

    Attributes:
      patches: normalised pixels; zeros where `valid` is False.
      positions: row and column of each patch in the picture, for the rotary embedding.
      valid: False on patches that pad a window.
      slots: for each image token, in raster order, the merge group (an index into P / group) that holds its feature.
      grid: frames, rows and columns of patches.
      group: patches per image token.
      window: patches per attention window; `group` for towers without windows.
      digest: SHA-256 of the pixels and of how they were processed; equal digests have equal features.
    """

    patches: Float32[np.ndarray, "P D"]
    positions: Int32[np.ndarray, "P 2"]
    valid: Bool[np.ndarray, " P"]
    slots: Int32[np.ndarray, " tokens"]
    grid: tuple[int, int, int]
    group: int
    window: int
    digest: str

    @property
    def tokens(self) -> int:
        """Image tokens in the prompt."""
        return len(self.slots)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class VisionInputs:
    """Several pictures in one array of a bucket's size: numpy arrays until a program takes them.

    Leading axes may be stacked before P: one array for each row of a batch, so that rows lie on different devices.

    Attributes:
      patches: as in `ImagePatches`, picture after picture, then zeros.
      positions: as in `ImagePatches`.
      segments: the number of the picture, from 1, that a patch belongs to; 0 on padding.
      slots: for each image token of picture after picture, the merge group that holds its feature; -1 after the last one.
    """

    patches: Float[Array | np.ndarray, "*B P D"]
    positions: Int[Array | np.ndarray, "*B P 2"]
    segments: Int[Array | np.ndarray, "*B P"]
    slots: Int[Array | np.ndarray, "*B groups"]


def arrange(
    patches: Float32[np.ndarray, "P D"], grid: tuple[int, int, int], *, merge: int, window: int | None, digest: str
) -> ImagePatches:
    """Puts the patches of a still picture into the tower's order.

    Args:
      patches: in raster order of merge groups (as transformers' processor gives them).
      grid: (1, rows, columns) in patches.
      merge: side of a merge group, in patches.
      window: side of an attention window, in merge groups; None: no windows.
      digest: see `ImagePatches`.
    """
    frames, rows, columns = grid
    if frames != 1 or rows % merge or columns % merge:
        raise ValueError(f"grid {grid}: need one frame, and rows and columns that are multiples of {merge}")
    group, height, width = merge**2, rows // merge, columns // merge
    if len(patches) != rows * columns:
        raise ValueError(f"{len(patches)} patches do not fill the grid {grid}")
    slots, groups = np.arange(height * width, dtype=np.int32), height * width
    if window is not None:
        slots = _windowed(height, width, window)
        groups = -(-height // window) * -(-width // window) * window**2
    # the first patch of each group, in raster order
    corner = np.stack(np.divmod(np.arange(height * width), width), -1) * merge
    inside = np.stack(np.divmod(np.arange(group), merge), -1)
    return ImagePatches(
        patches=_scatter(patches.reshape(height * width, group, -1), slots, groups),
        positions=_scatter((corner[:, None] + inside).astype(np.int32), slots, groups),
        valid=_scatter(np.ones((height * width, group, 1), bool), slots, groups)[:, 0],
        slots=slots,
        grid=grid,
        group=group,
        window=group * (1 if window is None else window**2),
        digest=digest,
    )


def array_size(needed: int, config: Any, growth: int = 2) -> int:
    """Patches of an array that is to hold `needed` ones: one of a few sizes, each `growth` times the one before.

    Args:
      config: of the tower (a `config.VisionConfig`), whose windows are whole.
    """
    size = _LEAST_PATCHES
    while size < needed:
        size *= growth
    return -(-size // config.window_patches) * config.window_patches


def concatenate(images: Sequence[ImagePatches], patches: int | None = None) -> VisionInputs:
    """Several pictures in one array.

    Args:
      images: at least one, all by the same processor.
      patches: P, a multiple of a window's patches; None: as many as they have.

    Raises:
      ValueError: no picture, or an array of another multiple or without room for them.
    """
    if not images:
        raise ValueError("no image to concatenate; `blank` makes inputs without one")
    group, window, width = images[0].group, images[0].window, images[0].patches.shape[1]
    if any((image.group, image.window, image.patches.shape[1]) != (group, window, width) for image in images):
        raise ValueError("images of different processors can't share an array; process all with one ImageProcessor")
    needed = sum(len(image.patches) for image in images)
    patches = needed if patches is None else patches
    if patches % window:
        raise ValueError(
            f"an array of {patches} patches is no multiple of {window}, the patches of an attention window"
        )
    if needed > patches:
        raise ValueError(
            f"{len(images)} images take {needed} patches, and the array has {patches}; "
            f"make it larger, lower max_pixels or put fewer images together"
        )
    inputs = blank(patches, width, group=group)
    for name, values in vars(inputs).items():
        _fill(name, values, images)
    return inputs


def blank(patches: int, width: int, *, group: int = 4) -> VisionInputs:
    """Inputs of P patches without a picture, for rows without pictures in a batch with pictures."""
    return VisionInputs(
        patches=np.full((patches, width), _EMPTY["patches"], np.float32),
        positions=np.full((patches, 2), _EMPTY["positions"], np.int32),
        segments=np.full(patches, _EMPTY["segments"], np.int32),
        slots=np.full(patches // group, _EMPTY["slots"], np.int32),
    )


def abstract_images(lead: tuple[int, ...], patches: int, config: Any, dtype: Any, sharding: Any) -> VisionInputs:
    """Shapes of inputs with leading axes `lead` and P patches for a tower (a `config.VisionConfig`), with a sharding."""

    def shape(*size: int, dtype: Any = np.int32) -> Any:
        return jax.ShapeDtypeStruct((*lead, *size), dtype, sharding=sharding)

    return VisionInputs(
        patches=shape(patches, config.patch_dim, dtype=dtype),
        positions=shape(patches, 2),
        segments=shape(patches),
        slots=shape(patches // config.group),
    )


def place_images(
    groups: Mapping[tuple[int, ...], Sequence[ImagePatches]],
    lead: tuple[int, ...],
    patches: int,
    config: Any,
    dtype: Any,
    sharding: jax.sharding.Sharding,
) -> VisionInputs:
    """Pictures on devices, [*lead, P, ...]. Each process makes the parts of its own devices, one array at a time, in the final
    dtype.

    Args:
      groups: pictures by index into `lead`, with at most P patches each.
      lead: leading axes; `sharding` splits only these.
      patches: P, a multiple of a window's.
      config: of the tower (a `config.VisionConfig`).
      dtype: of the patches.
    """
    shapes = abstract_images(lead, patches, config, dtype, sharding)

    def array(name: str) -> jax.Array:
        shape = getattr(shapes, name)
        blocks: dict[tuple[range, ...], np.ndarray] = {}  # devices that hold the same block share its values

        def block(index: Any) -> np.ndarray:
            spans = tuple(range(size)[part] for part, size in zip(index, lead))
            if spans not in blocks:
                sizes = [len(span) for span in spans]
                blocks[spans] = np.full((*sizes, *shape.shape[len(lead) :]), _EMPTY[name], shape.dtype)
                for at in np.ndindex(*sizes):
                    _fill(name, blocks[spans][at], groups.get(tuple(span[i] for span, i in zip(spans, at)), ()))
            return blocks[spans]

        return jax.make_array_from_callback(shape.shape, sharding, block)

    return VisionInputs(**{field.name: array(field.name) for field in dataclasses.fields(VisionInputs)})


def _fill(name: str, values: np.ndarray, images: Sequence[ImagePatches]) -> None:
    """Writes a field of `VisionInputs` into an empty array, picture after picture."""
    start = token = 0
    for number, image in enumerate(images, start=1):
        part = slice(start, start + len(image.patches))
        if name == "slots":
            values[token : token + image.tokens] = image.slots + start // image.group
        elif name == "segments":
            values[part] = np.where(image.valid, number, 0)
        else:
            values[part] = getattr(image, name)
        start, token = part.stop, token + image.tokens


def _windowed(height: int, width: int, side: int) -> Int32[np.ndarray, " groups"]:
    """The index of each group (in raster order) in the order by windows of side x side groups."""
    row, column = np.divmod(np.arange(height * width), width)
    windows_wide = -(-width // side)
    window = (row // side) * windows_wide + column // side
    return (window * side**2 + (row % side) * side + column % side).astype(np.int32)


def _scatter(values: np.ndarray, slots: np.ndarray, groups: int) -> np.ndarray:
    """Groups of values [n, group, D] at their slots, zeros elsewhere, as rows [groups * group, D]."""
    result = np.zeros((groups, *values.shape[1:]), values.dtype)
    result[slots] = values
    return result.reshape(-1, values.shape[-1])
