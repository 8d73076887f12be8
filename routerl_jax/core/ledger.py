"""The append-only token ledger of one conversation: the single source of what the learner trains on."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Sequence


class Ledger:
    """Records every token when it is fed or sampled; nothing is ever edited, removed or re-tokenized."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._sampled: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> list[int]:
        """All token ids so far (do not modify)."""
        return self._tokens

    def feed(self, tokens: Seq[int]) -> None:
        """Appends tokens that the policy did not sample: prompts, observations, forced text."""
        self._tokens.extend(int(token) for token in tokens)
        self._sampled.extend([False] * len(tokens))
        self._logprobs.extend([0.0] * len(tokens))
        self._versions.extend([-1] * len(tokens))

    def sample(self, tokens: Seq[int], logprobs: Seq[float], version: int) -> None:
        """Appends tokens that policy `version` sampled, with their behaviour log-probabilities."""
        if len(tokens) != len(logprobs):
            raise ValueError(f"{len(tokens)} sampled tokens came with {len(logprobs)} log-probabilities")
        self._tokens.extend(int(token) for token in tokens)
        self._sampled.extend([True] * len(tokens))
        self._logprobs.extend(float(logprob) for logprob in logprobs)
        self._versions.extend([version] * len(tokens))

    def copy(self) -> Ledger:
        """An independent copy with the same history, for a forked conversation."""
        other = Ledger()
        other._tokens = list(self._tokens)
        other._sampled = list(self._sampled)
        other._logprobs = list(self._logprobs)
        other._versions = list(self._versions)
        return other

    def sequence(self) -> Sequence:
        """The history as arrays."""
        length = len(self._tokens)
        return Sequence(
            tokens=np.asarray(self._tokens, np.int32),
            loss_mask=np.asarray(self._sampled, bool),
            logprobs=np.asarray(self._logprobs, np.float32),
            positions=np.broadcast_to(np.arange(length, dtype=np.int32), (3, length)),
            versions=np.asarray(self._versions, np.int32),
        )


def demonstrated(prompt: Seq[int], pieces: Iterable[tuple[str, bool]], tokenizer: Tokenizer) -> Sequence:
    """A written example as a rollout would have recorded it.

    Args:
      prompt: ids before the first piece, not learnt.
      pieces: stretches of text and whether the policy is to write them; the others are fed, as observations are.
    """
    ledger = Ledger()
    ledger.feed(prompt)
    for text, learnt in pieces:
        ids = tokenizer.encode(text)
        if learnt:
            ledger.sample(ids, [0.0] * len(ids), version=0)
        else:
            ledger.feed(ids)
    return ledger.sequence()
