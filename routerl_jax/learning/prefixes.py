"""Sequences that begin alike, computed once: their tokens as a tree in one row.

Sequences of a bundle share tokens as a trie does. A sequence's own slots begin at the last common token: its prediction differs
between branches, so that token is computed once per branch. Where a token lies in the row says nothing of its rotary position,
which goes on along its own sequence. What a token sees are the tokens of its own sequence: the tree's stretches are numbered
in the order of a visit, so that those from a stretch's `id` up to its `end` lie at or below it, and a query q sees the keys k
before it with id[k] <= id[q] < end[k]. For sequences that share nothing this is the equality of segment ids.

A slot holds one target, weight and advantage. So sequences share no further than to the first token on which both are trained.

Two tokens are the same if id, rotary position and picture are. All tokens of pictures have one id, so pictures are compared by
digest. Sequences share no further than to the token before the first picture that differs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence as Seq

import numpy as np
from jaxtyping import Bool, Int

from routerl_jax.core.types import Sequence

Units = Int[
    np.ndarray, "T 5"
]  # of each token all that the model is given: id, picture (0: none), and position on three axes

LEAST_SHARED = 8  # tokens; below, what is saved is not worth a stretch of its own


@dataclasses.dataclass(kw_only=True)
class Bundle:
    """Sequences that lie in one stretch of a row.

    Attributes:
      members: indices of sequences; parents come before those that share their tokens.
      parents: for each member, the place among the members of the one whose tokens it shares; -1: none's.
      starts: for each member, the first token that it has a slot of its own for.
      slots: for each member, where each of its tokens lies in the stretch.
      trained: for each slot so far, whether a member is trained on what it predicts.
    """

    members: list[int] = dataclasses.field(default_factory=list)
    parents: list[int] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    slots: list[Int[np.ndarray, " T"]] = dataclasses.field(default_factory=list)
    trained: Bool[np.ndarray, " S"] = dataclasses.field(default_factory=lambda: np.zeros(0, bool))

    def __len__(self) -> int:
        return len(self.trained)

    def add(self, index: int, trained: Bool[np.ndarray, " T"], parent: int = -1, start: int = 0) -> None:
        """Takes a sequence in: its first `start` tokens lie where the parent's do."""
        while parent >= 0 and start <= self.starts[parent]:  # so early that the parent has them from its own parent
            parent = self.parents[parent]
        before = self.slots[parent][:start] if parent >= 0 else np.zeros(0, int)
        own = np.arange(len(self), len(self) + len(trained) - start)
        slots = np.concatenate([before, own])
        self.members.append(index)
        self.parents.append(parent)
        self.starts.append(start)
        self.slots.append(slots)
        self.trained = np.concatenate([self.trained, np.zeros(len(own), bool)])
        self.trained[slots[:-1]] |= trained[1:]

    def stretches(self, first: int = 1) -> tuple[Int[np.ndarray, " S"], Int[np.ndarray, " S"], int]:
        """`id` and `end` of every slot, numbered from `first`, and the first number that is not used."""
        ids, ends = np.zeros(len(self), np.int32), np.zeros(len(self), np.int32)
        children: dict[int, list[int]] = {}
        for member, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(member)

        def visit(member: int, number: int) -> int:
            below = children.get(member, [])
            slots, start = self.slots[member], self.starts[member]
            cuts = [start, *sorted({self.starts[child] for child in below}), len(slots)]
            for begin, stop in itertools.pairwise(cuts):
                ids[slots[begin:stop]] = number
                number += 1
                for child in below:
                    if self.starts[child] == stop:
                        number = visit(child, number)
            ends[slots[start:]] = number
            return number

        number = first
        for root in children[-1]:
            number = visit(root, number)
        return ids, ends, number


def bundles(
    sequences: Seq[Sequence], weights: Seq[np.ndarray], longest: int, least: int = LEAST_SHARED
) -> list[Bundle]:
    """Puts every sequence into a bundle; those that share most are put together first.

    In the order of their tokens, what a sequence shares most with is its neighbour: two comparisons per sequence.

    Args:
      weights: per sequence, of each of its tokens in the loss; not 0 where it is trained.
      longest: slots of a bundle, at most.
      least: tokens that must be shared.
    """
    trained = [np.asarray(weight) != 0 for weight in weights]
    units = _units(sequences)
    order = sorted(range(len(sequences)), key=lambda i: units[i].astype(">u4").tobytes())
    shared = [0] + [
        _shared(units[i], units[before], trained[i], trained[before][1:]) for before, i in itertools.pairwise(order)
    ]
    made: list[Bundle] = []
    for run in _runs([len(sequences[i]) for i in order], shared, longest, least):
        bundle = Bundle()
        for index in [order[place] for place in run]:
            start = 0
            if bundle.members:
                taken = bundle.trained[bundle.slots[-1][:-1]]  # by any member, not the neighbour alone
                start = _shared(units[index], units[bundle.members[-1]], trained[index], taken)
                if start < least or len(bundle) + len(sequences[index]) - start > longest:
                    made.append(bundle)
                    bundle, start = Bundle(), 0
            bundle.add(index, trained[index], len(bundle.members) - 1, start)
        made.append(bundle)
    return made


def _runs(lengths: Seq[int], shared: Seq[int], longest: int, least: int) -> list[range]:
    """Cuts a row of sequences into runs that fit, joining neighbours in the order of how much they share.

    Args:
      shared: tokens that each shares with the one before it.
    """
    first, last, size = list(range(len(lengths))), list(range(len(lengths))), list(lengths)
    for place in sorted(range(1, len(lengths)), key=lambda place: -shared[place]):
        begin, end = first[place - 1], last[place]
        together = size[begin] + size[place] - shared[place]
        if shared[place] >= least and together <= longest:
            first[end], last[begin], size[begin] = begin, end, together
    runs, begin = [], 0
    while begin < len(lengths):
        runs.append(range(begin, last[begin] + 1))
        begin = last[begin] + 1
    return runs


def _units(sequences: Seq[Sequence]) -> list[Units]:
    """Per sequence its tokens as rows that are equal where the model is given the same."""
    numbers: dict[str, int] = {}  # of pictures, from 1
    result = []
    for sequence in sequences:
        shown = np.zeros(len(sequence), np.int32)
        for first, image in sequence.images:
            shown[first : first + image.tokens] = numbers.setdefault(image.digest, len(numbers) + 1)
        result.append(np.column_stack([sequence.tokens, shown, sequence.positions.T]))
    return result


def _shared(one: Units, other: Units, trained: np.ndarray, taken: np.ndarray) -> int:
    """How many first tokens of `one` may lie where those of `other` do: all but the last that are equal.

    Args:
      trained: the tokens of `one` that it is trained on.
      taken: for the slots of `other`, whether what they predict is trained on by a member.
    """
    count = min(len(one), len(other))
    differs = (one[:count] != other[:count]).any(1)
    differs[1:] |= trained[1:count] & taken[: count - 1]
    equal = int(differs.argmax()) if differs.any() else count
    return equal - 1
