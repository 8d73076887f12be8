"""The engine's view of a conversation, the request for a turn, and the finished turn."""

from __future__ import annotations

import dataclasses

from routerl_jax.core.ledger import Ledger
from routerl_jax.core.types import StopReason, Usage
from routerl_jax.engine.sampling import Sampling

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
    forced: list[tuple[int, int]] = dataclasses.field(
        default_factory=list
    )  # (start, stop) of tokens fed in place of the policy
    usage: Usage | None = None  # usage of an endpoint's replies
    lender: Stream | None = None  # of a probe: the conversation that it began from ..
    lent: int = 0  # .. and the number of tokens that both begin with

    @property
    def name(self) -> str:
        """Name of the conversation for messages."""
        return f"the conversation of example {self.example_id!r}, sample {self.identity[1]},"

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


Prefix = tuple[tuple[int, ...], tuple[tuple[int, str], ...]]


def prefix_of(stream: Stream, count: int) -> Prefix:
    """The first `count` tokens of a conversation, and the positions and digests of the images among them."""
    images = tuple((at, image.digest) for at, image in stream.ledger.images if at < count)
    return tuple(stream.ledger.tokens[:count]), images


class DoesNotFit(ValueError):
    """A conversation has no room for the tokens fed to it, or for a turn.

    The driver ends such an episode there, without an answer (`truncated`), and continues the others. An agent may catch this
    error, or check `Conversation.room` first.
    """


class PromptTooLong(DoesNotFit):
    """A prompt fills a conversation by itself."""
