"""What writes the turns: our engine, or whatever else can go on with a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Failure
from routerl_jax.generation.sampling import GREEDY, Sampling
from routerl_jax.generation.streams import Generated, Stream
from routerl_jax.models.image_tokens import PictureReader
from routerl_jax.models.images import ImageSource


class TurnFailed(Exception):
    """There is no turn, and will be none: the driver ends the episode with this failure, and goes on with the others."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.kind}: {failure.message}")
        self.failure = failure


class Endpoint:
    """What a policy is that runs elsewhere, and tells neither its token ids nor their log-probabilities."""

    def check(self, forks: int, processes: int) -> None:
        """Raises ValueError if a run would need them, or would ask everything once for each of its processes."""
        if forks:
            raise ValueError(
                f"forks={forks}: attempts are forked by log-probabilities, which an endpoint does not tell; take forks=0"
            )
        if processes > 1:
            raise ValueError(f"an endpoint as the policy is for a single process, and there are {processes}: start one")


class Policy(Protocol):
    """What agents run with. `Engine` has it, and says what each method does; `llms.policy.ChatModel` is an endpoint in its
    place, whose token ids are its own and mean nothing to any model.

    Attributes:
      seed: root of all randomness of the sampling.
      max_length: most tokens of one conversation.
    """

    seed: int
    max_length: int

    @property
    def tokenizer(self) -> Tokenizer:
        """From text to the ids that `open` and `feed` take, and back."""
        ...

    @property
    def images(self) -> PictureReader | None:
        """How it sees pictures; None if it sees none."""
        ...

    @property
    def rows(self) -> int:
        """Conversations that go on at once."""
        ...

    @property
    def busy(self) -> bool:
        """True if a turn is waiting or under way."""
        ...

    def open(
        self, prompt: Sequence[int], example_id: str = "", sample: int = 0, *, images: Sequence[ImageSource] = ()
    ) -> Stream:
        """Starts a conversation."""
        ...

    def room(self, stream: Stream) -> int:
        """Tokens that it may still take."""
        ...

    def feed(self, stream: Stream, tokens: Sequence[int], images: Sequence[ImageSource] = ()) -> None:
        """Appends what the policy did not write."""
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
    ) -> None:
        """Asks for the next turn."""
        ...

    def share(self, pairs: Sequence[tuple[Stream, Stream]]) -> None:
        """Lets conversations share what they have in common; for forks."""
        ...

    def close(self, stream: Stream) -> None:
        """Ends a conversation."""
        ...

    def step(self) -> Sequence[tuple[Stream, Generated | TurnFailed]]:
        """Works until a turn may be over, and returns those that are, or that never will be."""
        ...
