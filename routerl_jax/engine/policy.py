"""The interface of policies: the engine, or anything else that can continue a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Failure
from routerl_jax.engine.sampling import GREEDY, Sampling
from routerl_jax.engine.streams import Generated, Stream
from routerl_jax.models.image_tokens import PictureReader
from routerl_jax.models.images import ImageSource


class TurnFailed(Exception):
    """The policy failed to write a turn. The driver ends the episode with this failure, and continues the others."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.kind}: {failure.message}")
        self.failure = failure


class Endpoint:
    """Base class of policies that run elsewhere and reveal neither token ids nor log-probabilities."""

    def check(self, forks: int, processes: int) -> None:
        """Raises ValueError if a run needs these (forks), or has several processes, each of which would send every request."""
        if forks:
            raise ValueError(
                f"forks={forks}: attempts are forked by log-probabilities, which an endpoint does not tell; take forks=0"
            )
        if processes > 1:
            raise ValueError(f"an endpoint as the policy is for a single process, and there are {processes}: start one")

    def probe(self, stream: Stream, name: str) -> Stream:
        """Raises ValueError: there are no log-probabilities to ask for in a probe."""
        raise ValueError(
            f"{stream.name} can't be probed: an endpoint tells no log-probabilities; take an Engine as the policy"
        )


class Policy(Protocol):
    """The interface that agents run with. See `Engine` for the methods. `services.policy.ChatModel` implements it for an
    endpoint; its token ids are its own and mean nothing to any model.

    Attributes:
      seed: root of all sampling randomness.
      max_length: most tokens of one conversation.
    """

    seed: int
    max_length: int

    @property
    def tokenizer(self) -> Tokenizer:
        """Converts text to the ids that `open` and `feed` take, and back."""
        ...

    @property
    def images(self) -> PictureReader | None:
        """How the policy reads pictures; None if it sees none."""
        ...

    @property
    def rows(self) -> int:
        """Number of conversations that run at once."""
        ...

    @property
    def busy(self) -> bool:
        """True if a turn is waiting or running."""
        ...

    def open(
        self, prompt: Sequence[int], example_id: str = "", sample: int = 0, *, images: Sequence[ImageSource] = ()
    ) -> Stream:
        """Starts a conversation."""
        ...

    def room(self, stream: Stream) -> int:
        """Tokens that the conversation may still take."""
        ...

    def feed(self, stream: Stream, tokens: Sequence[int], images: Sequence[ImageSource] = ()) -> None:
        """Appends tokens that the policy did not write."""
        ...

    def request(
        self,
        stream: Stream,
        *,
        stops: Sequence[str] = (),
        max_tokens: int | None = None,
        sampling: Sampling = GREEDY,
        given: Sequence[int] = (),
        begun: Sequence[int] = (),
        scored: bool = False,
    ) -> None:
        """Requests the next turn."""
        ...

    def probe(self, stream: Stream, name: str) -> Stream:
        """A second conversation with the same history, to ask something aside."""
        ...

    def share(self, pairs: Sequence[tuple[Stream, Stream]]) -> None:
        """Lets conversations share their common prefix; for forks."""
        ...

    def close(self, stream: Stream) -> None:
        """Ends a conversation."""
        ...

    def step(self) -> Sequence[tuple[Stream, Generated | TurnFailed]]:
        """Works until a turn may be finished. Returns the turns that finished or failed."""
        ...
