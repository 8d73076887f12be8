"""Conversations, their turns, and the interface of policies: the engine, or anything else that can continue a conversation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from routerl_jax.core.ledger import Ledger
from routerl_jax.core.tokenizer import DoesNotFit, Tokenizer
from routerl_jax.core.types import Failure, StopReason, Usage
from routerl_jax.engine.sampling import GREEDY, Sampling
from routerl_jax.models.image_tokens import PictureReader
from routerl_jax.models.images import ImageSource

# The likeliest tokens at one position, best first, and their log-probabilities.
TopLogprobs = tuple[tuple[int, float], ...]


@dataclasses.dataclass(kw_only=True)
class Request:
    """One turn to be sampled."""

    stops: tuple[str, ...]
    sampling: Sampling
    remaining: int  # tokens that this turn may still sample
    automaton_state: int = 0
    sampled: int = 0
    given: tuple[int, ...] = ()  # tokens with which the turn begins
    scored: bool = False  # the given tokens are only scored: they count as fed
    logprobs: list[float] = dataclasses.field(default_factory=list)  # of the scored tokens so far
    top: int = 0  # likeliest tokens of each step that are wanted
    tops: list[TopLogprobs] = dataclasses.field(default_factory=list)  # of the tokens so far


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
    """A finished turn: its token ids, why it ended and, if a stop string ended it, which.

    Attributes:
      tops: for each token the likeliest ones at its position, if they were requested.
      logprobs: of tokens that were only scored, the log-probability of each; of sampled ones the ledger has them.
    """

    tokens: list[int]
    stop_reason: StopReason
    stop: str | None
    tops: list[TopLogprobs] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(kw_only=True, eq=False)
class Stream:
    """The engine's state of one conversation."""

    identity: tuple[int, int]  # (hash of the example id, sample index): seeds its randomness
    ledger: Ledger
    turn: int = 0
    row: tuple[int, int] | None = None
    cached: int = 0  # tokens of the ledger that the row holds
    request: Request | None = None
    last_used: int = 0
    example_id: str = ""
    # (start, stop) of tokens fed in place of the policy
    forced: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    usage: Usage | None = None  # usage of an endpoint's replies
    lender: Stream | None = None  # of a probe: the conversation that it began from ..
    lent: int = 0  # .. and the number of tokens that both begin with

    @property
    def name(self) -> str:
        """Name of the conversation for messages."""
        return f"the conversation of example {self.example_id!r}, sample {self.identity[1]},"

    def prefix(self, count: int) -> tuple[tuple[int, ...], tuple[tuple[int, str], ...]]:
        """The first `count` tokens, and the positions and digests of the images among them."""
        images = tuple((at, image.digest) for at, image in self.ledger.images if at < count)
        return tuple(self.ledger.tokens[:count]), images

    @property
    def turn_request(self) -> Request:
        """The request of the present turn."""
        assert self.request is not None, "the conversation has no turn under way"
        return self.request


@dataclasses.dataclass
class EngineStats:
    """Counters since the last reset."""

    prefilled_tokens: int = 0
    prefill_slots: int = 0  # rows x tokens that prefilling computed; prefilled_tokens / prefill_slots is the occupancy
    forked_tokens: int = 0  # tokens that conversations shared instead of prefilling: prompts, and histories of forks
    decoded_tokens: int = 0
    # rows x steps that decoding computed, times the tokens of a step; decoded_tokens / decode_slots is the occupancy
    decode_slots: int = 0
    decode_passes: int = 0  # steps of every row; decoded_tokens / decode_passes is 1 without drafts, and more with them
    evictions: int = 0


class PromptTooLong(DoesNotFit):
    """A prompt fills a conversation by itself."""


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
