"""The mapping between our parameters and Hugging Face's tensors, and the order of their axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

# Layouts: for each axis of their tensor, the axes of ours that it runs over, the last one fastest.
VECTOR = ((0,),)
MATRIX = ((0,), (1,))
TRANSPOSED = ((1,), (0,))
TO_HEADS = ((1, 2), (0,))  # ours [embed, heads, width], theirs [heads * width, embed]
FROM_HEADS = ((2,), (0, 1))  # ours [heads, width, embed], theirs [embed, heads * width]
HEADS_BIAS = ((0, 1),)


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one of our parameters is stored by Hugging Face.

    Attributes:
      name: tensor name; `{}` stands for the layer number, a second one for the expert's. Several names (joined by `|`) fill our
        second axis.
      axes: for each axis of their tensor, the axes of ours (of one layer) that it runs over, the last one fastest.
      layers: the numbers of the layers that have the parameter; empty: all.
      copies: other names under which a checkpoint may hold the same tensor again; it must be equal.
    """

    name: str
    axes: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...] = ()
    copies: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return self.name.split("|")

    @property
    def outer(self) -> int:
        """The number of our first axes that run over tensors."""
        return self.names[0].count("{}") + (len(self.names) > 1)

    def name_at(self, index: Sequence[int]) -> str:
        """The name of the tensor at an index of those axes."""
        layer = index[:1] if not self.layers else (self.layers[index[0]],)
        if len(self.names) > 1:
            return self.names[index[-1]].format(*layer)
        return self.name.format(*layer, *index[1:])

    def their_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of their tensor, from ours."""
        return tuple(math.prod(shape[axis] for axis in merged) for merged in self.axes)

    def rows(self, shape: Sequence[int]) -> tuple[int, int]:
        """Which axis of ours their rows (their first axis) run over slowest, and how many rows each of its entries takes."""
        first, *inner = self.axes[0]
        return first, math.prod(shape[axis] for axis in inner)

    def to_ours(self, tensor: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Their tensor, or whole entries of the axis that its rows run over, in our shape: a view."""
        order = sum(self.axes, ())
        return tensor.reshape([shape[axis] for axis in order]).transpose(np.argsort(order))

    def to_theirs(self, value: np.ndarray) -> np.ndarray:
        """Our parameter (of one layer) in their shape."""
        return value.transpose(sum(self.axes, ())).reshape(self.their_shape(value.shape))


def spelled(name: str, spellings: Sequence[tuple[str, str]]) -> Iterator[str]:
    """The possible names of a stored tensor: its own, then those with another prefix of `spellings`."""
    for old, new in (("", ""), *spellings):
        if name.startswith(old):
            yield new + name[len(old) :]


# our parameter path (as flax.nnx gives it) -> rule
Rules = dict[Any, Rule]
