"""The append-only token ledger of one conversation: the single source of what the learner trains on."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

import numpy as np
from jaxtyping import Int16, Int32

from routerl_jax.core.types import FREE, PlacedImage, Sequence


class Ledger:
    """Records every token when it is fed or sampled. Nothing is ever edited, removed or tokenized again.

    Attributes:
      images: (index of its first token, processed image) of every image among the tokens, in order.
      next_position: rotary position of the token that comes next, on all axes.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        # Not lists, whose every item Python's garbage collector visits; a rollout's ledgers hold millions.
        self._sampled = bytearray()
        self._logprobs = array("f")
        self._versions = array("i")
        # (index of its first token, its first position or all of them) of every piece: text whose positions follow each other,
        # or tokens with positions of their own
        self._pieces: list[tuple[int, int | Int32[np.ndarray, "3 T"]]] = []
        self._routes: list[Int16[np.ndarray, "L C"] | None] = []
        self.images: list[tuple[int, PlacedImage]] = []
        self.next_position = 0

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> list[int]:
        """All token ids so far (do not modify)."""
        return self._tokens

    @property
    def sampled(self) -> Seq[int]:
        """For each token 1 if the policy sampled it, else 0 (do not modify)."""
        return self._sampled

    @property
    def logprobs(self) -> Seq[float]:
        """Behaviour log-probability of each token that the policy sampled, 0 of others, in float32 (do not modify)."""
        return self._logprobs

    def feed(
        self,
        tokens: Seq[int],
        *,
        positions: Int32[np.ndarray, "3 T"] | None = None,
        next_position: int | None = None,
        images: Seq[tuple[int, PlacedImage]] = (),
    ) -> None:
        """Appends tokens that the policy did not sample: prompts, observations, forced text.

        Args:
          positions: rotary positions of the tokens, [3, T]; default: those of text, one after the other.
          next_position: rotary position of the token after these; goes with `positions`.
          images: (index in `tokens` of the image's first token, processed image) of every image.
        """
        self.images.extend((len(self._tokens) + start, image) for start, image in images)
        if positions is None or next_position is None:
            self._advance(len(tokens))
        else:
            self._pieces.append((len(self._tokens), np.array(positions, np.int32)))
            self.next_position = next_position
        self._append(tokens, np.zeros(len(tokens), np.float32), sampled=False, version=-1)

    def sample(self, tokens: Seq[int], logprobs: Seq[float], version: int) -> None:
        """Appends tokens that policy `version` sampled, with their behaviour log-probabilities."""
        if len(tokens) != len(logprobs):
            raise ValueError(f"{len(tokens)} sampled tokens came with {len(logprobs)} log-probabilities")
        self._advance(len(tokens))
        self._append(tokens, logprobs, sampled=True, version=version)

    def _append(self, tokens: Seq[int], logprobs: Seq[float] | np.ndarray, *, sampled: bool, version: int) -> None:
        count = len(tokens)
        self._tokens.extend(map(int, tokens))
        self._sampled.extend(bytes([sampled]) * count)
        self._logprobs.frombytes(np.asarray(logprobs, np.float32).tobytes())
        self._versions.extend(array("i", [version]) * count)

    def route(self, start: int, chosen: Seq[Int16[np.ndarray, "L C"] | None]) -> None:
        """Records the experts that the sampler chose for tokens from `start` on; what is recorded already stays."""
        self._routes.extend([None] * (start + len(chosen) - len(self._routes)))
        for index, experts in enumerate(chosen, start):
            if self._routes[index] is None:
                self._routes[index] = experts

    def routes(self, count: int) -> list[Int16[np.ndarray, "L C"] | None]:
        """The experts of the first `count` tokens, as far as they are recorded; None elsewhere (do not modify)."""
        return self._routes[:count]

    def logprob(self, start: int, stop: int) -> float:
        """Joint log-probability of the sampled tokens `start` to `stop`, under the policy that sampled them."""
        return float(sum(self._logprobs[start:stop]))

    def positions(self, start: int, stop: int) -> Int32[np.ndarray, "3 T"]:
        """Rotary positions of tokens `start` to `stop`."""
        result = np.empty((3, max(min(stop, len(self)) - start, 0)), np.int32)
        ends = [begin for begin, _ in self._pieces[1:]]
        for (begin, piece), end in zip(self._pieces, [*ends, len(self)]):
            low, high = max(begin, start), min(end, stop)
            if low >= high:
                continue
            if isinstance(piece, int):
                these = np.arange(piece + low - begin, piece + high - begin)
            else:
                these = piece[:, low - begin : high - begin]
            result[:, low - start : high - start] = these
        return result

    def _advance(self, count: int) -> None:
        """Adds positions of text that comes next: all three axes advance together."""
        begin, first = self._pieces[-1] if self._pieces else (0, -1)
        follows = isinstance(first, int) and first + len(self) - begin == self.next_position
        if count and not (follows and self._pieces):
            self._pieces.append((len(self), self.next_position))
        self.next_position += count

    def copy(self) -> Ledger:
        """An independent copy with the same history, for a forked conversation."""
        copied = Ledger()
        copied._tokens = list(self._tokens)
        copied._sampled = self._sampled[:]
        copied._logprobs = self._logprobs[:]
        copied._versions = self._versions[:]
        copied._pieces = list(self._pieces)
        copied._routes = list(self._routes)
        copied.images = list(self.images)
        copied.next_position = self.next_position
        return copied

    def sequence(self) -> Sequence:
        """The history as arrays."""
        length, routes = len(self._tokens), None
        if (first := next((experts for experts in self._routes if experts is not None), None)) is not None:
            routes = np.full((length, *first.shape), FREE, np.int16)
            for index, experts in enumerate(self._routes):
                if experts is not None:
                    routes[index] = experts
        return Sequence(
            tokens=np.asarray(self._tokens, np.int32),
            loss_mask=np.array(self._sampled, bool),
            logprobs=np.array(self._logprobs, np.float32),
            positions=self.positions(0, length),
            versions=np.array(self._versions, np.int32),
            images=tuple(self.images),
            routes=routes,
        )
