"""M-RoPE (Qwen2-VL, arXiv 2409.12191, section 2.1): positions on three axes; the rotation by them is in rope.py.

Text advances on all three axes. The tokens of an image share one time; the second axis counts rows, and the third columns. The
text after an image continues from the largest of these positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int, Int32

Grid = tuple[int, int, int]


def mrope_positions(
    tokens: Int[np.ndarray, " T"] | Sequence[int],
    grids: Sequence[Grid],
    *,
    image_token_id: int,
    merge: int,
    start: int = 0,
    mask: Bool[np.ndarray, " T"] | None = None,
) -> tuple[Int32[np.ndarray, "3 T"], int]:
    """Positions (time, row, column) of tokens, and the position of the token that comes next.

    A sequence may be given in pieces: pass the second result to the next call as `start`. All tokens of an image must be in one
    piece. For still images the positions are those of transformers' `get_rope_index`.

    Args:
      tokens: ids.
      grids: (frames, rows, columns) in patches of the images in `tokens`, in order.
      image_token_id: stands once for every merged patch of an image.
      merge: side of a merge group, in patches.
      start: position of the first token.
      mask: False on padding, which gets position 0 and is not counted.

    Raises:
      ValueError: image tokens and grids do not match.
    """
    tokens = np.asarray(tokens)
    if mask is not None:
        mask = np.asarray(mask, bool)
        result = np.zeros((3, len(tokens)), np.int32)
        result[:, mask], start = mrope_positions(
            tokens[mask], grids, image_token_id=image_token_id, merge=merge, start=start
        )
        return result, start
    counts = [math.prod(grid) // merge**2 for grid in grids]
    indices = np.flatnonzero(tokens == image_token_id)
    if len(indices) != sum(counts):
        raise ValueError(
            f"{len(indices)} image tokens, but the grids {list(grids)} of {len(grids)} images take {sum(counts)}; give the "
            f"grids of exactly the images in these tokens, and never cut an image's tokens"
        )
    result = np.empty((3, len(tokens)), np.int32)
    consumed = consumed_image = 0  # tokens, and image tokens among them
    for number, (grid, count) in enumerate(zip(grids, counts)):
        first = int(indices[consumed_image])
        if indices[consumed_image + count - 1] != first + count - 1:
            raise ValueError(
                f"image {number} of grid {tuple(grid)} needs {count} image tokens in a row from token {first}; "
                f"other tokens stand among them"
            )
        result[:, consumed:first] = np.arange(start, start + first - consumed)
        start += first - consumed
        frames, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
        result[:, first : first + count] = start + np.indices((frames, rows, columns)).reshape(3, count)
        start += max(frames, rows, columns)
        consumed, consumed_image = first + count, consumed_image + count
    result[:, consumed:] = np.arange(start, start + len(tokens) - consumed)
    return result, start + len(tokens) - consumed
