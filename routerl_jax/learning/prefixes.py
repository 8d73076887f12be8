"""Shared prefixes: common beginnings of sequences are computed once, with the tokens laid out as a tree in one row.

The sequences of a bundle share tokens like a trie. A sequence's own slots begin at the last common token: the prediction after
it differs between branches, so that token is computed once per branch. The index of a token in the row is unrelated to its
rotary position, which continues along its own sequence.

A token must see exactly the earlier tokens of its own sequence. For this, the segments of the tree are numbered in depth-first
order: the numbers from a segment's `id` up to (not including) its `end` are those of the segment and of all segments below it.
A query q sees the keys k before it with id[k] <= id[q] < end[k]. For sequences that share nothing, this is equality of segment
ids.

Two sequences may be trained on one token: rollouts of a group often write the same query, and then read the same passages.
Their loss is then that of one token, with the sum of their weights and with the means of the positive and of the negative
advantages (`Batch`). This needs a loss that is a multiple of the advantage on each side of 0 (`merge`), and a token that was
sampled at equal log-probabilities. Otherwise two sequences share no further than to the first token on which both are trained.

Two tokens are the same if their id, rotary position and picture are. All tokens of pictures have one id, so pictures are
compared by digest. Sequences share no further than to the token before the first picture that differs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence as Seq

import numpy as np
from jaxtyping import Float, Int

from routerl_jax.core.types import Sequence

Units = Int[
    np.ndarray, "T 5"
]  # all inputs of the model for each token: id, picture (0: none), and position on three axes

LEAST_SHARED = 8  # tokens; sharing fewer saves too little for a segment of its own
_ROUNDING = (
    1e-4  # between the log-probabilities of one token in two rows; beyond it, another policy has sampled the token
)


@dataclasses.dataclass(kw_only=True)
class Bundle:
    """Sequences that share tokens and lie together in a row.

    Attributes:
      members: indices of sequences; a parent comes before the members that share its tokens.
      parents: for each member, the position in `members` of the one whose tokens it shares; -1: none.
      starts: for each member, the first token with a slot of its own.
      slots: for each member, the slot of each of its tokens within the bundle.
      sampled: for each slot so far, the log-probability at which the token that it predicts was sampled, if a member is trained
        on that token; else NaN.
    """

    members: list[int] = dataclasses.field(default_factory=list)
    parents: list[int] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    slots: list[Int[np.ndarray, " T"]] = dataclasses.field(default_factory=list)
    sampled: Float[np.ndarray, " S"] = dataclasses.field(default_factory=lambda: np.zeros(0))

    def __len__(self) -> int:
        return len(self.sampled)

    def add(self, index: int, sampled: Float[np.ndarray, " T"], parent: int = -1, start: int = 0) -> None:
        """Adds a sequence. It shares the slots of its first `start` tokens with the parent.

        Args:
          sampled: the log-probability of each token on which the sequence is trained; NaN for others.
        """
        while parent >= 0 and start <= self.starts[parent]:  # the parent shares all these tokens with its own parent
            parent = self.parents[parent]
        before = self.slots[parent][:start] if parent >= 0 else np.zeros(0, int)
        own = np.arange(len(self), len(self) + len(sampled) - start)
        slots = np.concatenate([before, own])
        self.members.append(index)
        self.parents.append(parent)
        self.starts.append(start)
        self.slots.append(slots)
        self.sampled = np.concatenate([self.sampled, np.full(len(own), np.nan)])
        known = self.sampled[slots[:-1]]
        self.sampled[slots[:-1]] = np.where(np.isnan(known), sampled[1:], known)

    def segments(self, first: int = 1) -> tuple[Int[np.ndarray, " S"], Int[np.ndarray, " S"], int]:
        """`id` and `end` of every slot, numbered from `first`, and the next unused number."""
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
    sequences: Seq[Sequence], weights: Seq[np.ndarray], longest: int, least: int = LEAST_SHARED, *, merge: bool = False
) -> list[Bundle]:
    """Puts every sequence into a bundle. Sequences that share most are joined first.

    The sequences are sorted by their tokens. Each then shares most with a neighbour, so two comparisons per sequence suffice.

    Args:
      weights: per sequence, the loss weight of each of its tokens; not 0 on trained tokens.
      longest: most slots of a bundle.
      least: smallest number of tokens that are shared.
      merge: sequences may share tokens on which both are trained, if these were sampled at equal log-probabilities.
    """
    apart = _ROUNDING if merge else -1.0
    sampled = [np.where(np.asarray(weight) != 0, s.logprobs, np.nan) for s, weight in zip(sequences, weights)]
    units = _units(sequences)
    order = sorted(range(len(sequences)), key=lambda i: units[i].astype(">u4").tobytes())
    shared = [0] + [
        _shared(units[i], units[before], sampled[i], sampled[before][1:], apart)
        for before, i in itertools.pairwise(order)
    ]
    result: list[Bundle] = []
    for run in _runs([len(sequences[i]) for i in order], shared, longest, least):
        bundle = Bundle()
        for index in [order[position] for position in run]:
            start = 0
            if bundle.members:
                of_any = bundle.sampled[bundle.slots[-1][:-1]]  # of any member, not just the neighbour
                start = _shared(units[index], units[bundle.members[-1]], sampled[index], of_any, apart)
                if start < least or len(bundle) + len(sequences[index]) - start > longest:
                    result.append(bundle)
                    bundle, start = Bundle(), 0
            bundle.add(index, sampled[index], len(bundle.members) - 1, start)
        result.append(bundle)
    return result


def _runs(lengths: Seq[int], shared: Seq[int], longest: int, least: int) -> list[range]:
    """Cuts a list of sequences into runs that fit. Neighbours that share most are joined first.

    Args:
      shared: number of tokens that each sequence shares with the one before it.
    """
    first, last, size = list(range(len(lengths))), list(range(len(lengths))), list(lengths)
    for position in sorted(range(1, len(lengths)), key=lambda index: -shared[index]):
        begin, end = first[position - 1], last[position]
        together = size[begin] + size[position] - shared[position]
        if shared[position] >= least and together <= longest:
            first[end], last[begin], size[begin] = begin, end, together
    runs, begin = [], 0
    while begin < len(lengths):
        runs.append(range(begin, last[begin] + 1))
        begin = last[begin] + 1
    return runs


def _units(sequences: Seq[Sequence]) -> list[Units]:
    """Per sequence, its tokens as rows. Two rows are equal exactly if the model gets the same input."""
    numbers: dict[str, int] = {}  # number of each picture, from 1
    result = []
    for sequence in sequences:
        shown = np.zeros(len(sequence), np.int32)
        for first, image in sequence.images:
            shown[first : first + image.tokens] = numbers.setdefault(image.digest, len(numbers) + 1)
        result.append(np.column_stack([sequence.tokens, shown, sequence.positions.T]))
    return result


def _shared(units: Units, previous: Units, sampled: np.ndarray, previous_sampled: np.ndarray, apart: float) -> int:
    """How many first tokens of a sequence may share the slots of the previous one: the equal ones, except the last of these.

    Args:
      units: the sequence's tokens (`_units`).
      previous: those of the previous sequence.
      sampled: the log-probabilities of the tokens on which the sequence is trained; NaN for others.
      previous_sampled: for each slot of `previous`, that of the token that it predicts.
      apart: log-probabilities that differ by more part the sequences, if both are trained.
    """
    count = min(len(units), len(previous))
    differs = (units[:count] != previous[:count]).any(1)
    differs[1:] |= np.abs(sampled[1:count] - previous_sampled[: count - 1]) > apart
    equal = int(differs.argmax()) if differs.any() else count
    return equal - 1
