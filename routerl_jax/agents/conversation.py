"""One attempt of an agent while it runs, and its conversations with the policy."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal, NamedTuple, Protocol, cast

from routerl_jax.agents.observation import Rendered, Reply, Viewer, expanded_tokens, rendered
from routerl_jax.core.tokenizer import ReplyRole
from routerl_jax.core.types import (
    Branch,
    Call,
    Episode,
    Example,
    Failure,
    Message,
    Observation,
    Query,
    Shown,
    Turn,
    Usage,
)
from routerl_jax.engine.policy import Generated, Policy, PromptTooLong, Stream
from routerl_jax.engine.sampling import Sampling
from routerl_jax.models.images import ImageSource
from routerl_jax.models.regions import RefusedRegion, RegionRule, Size
from routerl_jax.services import faults

Want = Literal["passages", "listing", "pictures"]


class Request(NamedTuple):
    """A request to a tool, of one of three kinds (`want`).

    "passages": `k` passages with their pictures. "listing": `k` passages, without the pictures that a server would have to
    send. "pictures": the picture of one passage; the query is the passage's id.
    """

    tool: str
    query: Query
    k: int
    want: Want = "passages"


Prompt = str | Sequence[int] | Sequence[Message]


class Branching(Protocol):
    """How a forked attempt writes its turns and makes its calls (`forks.BranchState`).

    Attributes:
      suffix: suffix of the attempt's name, which seeds its sampling. Each branch has its own.
      branches: the decisions so far.
    """

    suffix: str
    branches: list[Branch]

    async def turn(
        self, chat: Conversation, stop: Sequence[str], max_tokens: int | None, sampling: Sampling
    ) -> Generated: ...

    async def call(self, asked: Coroutine[Any, Any, Call]) -> Call: ...


@dataclasses.dataclass(eq=False)
class Rollout:
    """The record of one attempt while it runs: its conversations, turns and calls, and what it is waiting for."""

    example: Example
    sample: int
    engine: Policy
    sampling: Sampling
    wait_turn: Callable[[Rollout, Stream], Awaitable[Generated]]
    wait_tool: Callable[[Rollout, Request], Awaitable[Call]]
    prepare: Callable[[Rollout, str], Awaitable[None]] | None = None
    tags: Sequence[str] = ()  # of the agent's protocol
    foreign: Sequence[str] = ()  # those that are broken up in what tools return
    branch: Branching | None = None  # of a forked attempt
    conversations: list[Conversation] = dataclasses.field(default_factory=list)
    probes: list[Conversation] = dataclasses.field(default_factory=list)  # aside, and no part of the episode
    turns: list[Turn] = dataclasses.field(default_factory=list)
    early: list[Call] = dataclasses.field(default_factory=list)  # before the first turn; they are recorded with it
    outstanding: int = 0  # requests that the driver has not answered yet

    def add(self, turn: Turn) -> None:
        """Records a turn."""
        turn.calls, self.early = [*self.early, *turn.calls], []
        self.turns.append(turn)

    def cut_short(self, failure: Failure | None = None) -> Episode:
        """The episode so far, ended by a limit or by a failure of the policy. It has no sequences if the policy has not
        written yet."""
        prompt = self.conversations[-1].prompt if self.conversations else ""
        truncated = failure is None or failure.kind == faults.CONTEXT_LENGTH
        episode = self.episode(prompt, answer=None, truncated=truncated)
        episode.failure = failure
        if not self.turns:
            episode.sequences = []
        return episode

    def episode(self, prompt: str, *, answer: str | None, truncated: bool) -> Episode:
        """The turns and token sequences of all conversations. The sequences of an endpoint are not known."""
        conversations = self.conversations if self.usage is None else []
        return Episode(
            example=self.example,
            sample=self.sample,
            answer=answer,
            turns=self.turns,
            sequences=[conversation._stream.ledger.sequence() for conversation in conversations],
            prompt=prompt,
            truncated=truncated,
            branches=tuple(self.branch.branches) if self.branch else (),
            usage=self.usage,
        )

    @property
    def usage(self) -> Usage | None:
        """Tokens that the endpoint's replies took; None if the policy is no endpoint."""
        used = [usage for conversation in self.conversations if (usage := conversation.usage) is not None]
        return sum(used, Usage()) if used else None

    def aside(self) -> Rollout:
        """A record apart, for a probe: what is written there is no turn of the attempt. The driver waits for it as for this."""
        apart, prepare = copy.copy(self), self.prepare
        apart.branch, apart.conversations, apart.turns, apart.early = None, [], [], []
        apart.wait_turn = lambda _, stream: self.wait_turn(self, stream)
        apart.prepare = None if prepare is None else lambda _, text: prepare(self, text)
        return apart

    def close(self) -> None:
        """Frees the rows of the KV cache."""
        for conversation in (*self.conversations, *self.probes):
            conversation.close()


class Conversation:
    """A growing token sequence. The policy writes its turns, and the agent feeds observations between them."""

    def __init__(self, rollout: Rollout, prompt: Prompt, images: Sequence[ImageSource] = ()) -> None:
        self._rollout = rollout
        self._engine = rollout.engine
        ids = prompt_ids(prompt, self._engine, rollout.example.id)
        self.prompt = prompt if isinstance(prompt, str) else self._engine.tokenizer.decode(ids)
        # The name seeds the row's sampling, so each conversation of a rollout needs its own.
        self._number = number = len(rollout.conversations)
        name = f"{rollout.example.id}{rollout.branch.suffix if rollout.branch else ''}"
        self._name = f"{name}#{number}" if number else name
        self._stream = self._engine.open(ids, self._name, rollout.sample, images=images)
        self._viewer = Viewer(self._engine.images, images)
        self._open = True
        self._forced = ""

    @property
    def usage(self) -> Usage | None:
        """Tokens that the endpoint's replies took so far; None if the policy is no endpoint."""
        return self._stream.usage

    @property
    def room(self) -> int:
        """Tokens that the conversation may still take."""
        return self._engine.room(self._stream)

    def tokens_of(self, observation: Observation | Reply) -> int:
        """Number of tokens that a text, a text with pictures, or either as a message would take (`observe`)."""
        content, ids = self._encoded(observation)
        return len(ids) + expanded_tokens(self._engine.images, content.images)

    def fits(self, observation: Observation | Reply, tokens: int) -> bool:
        """Whether an observation takes at most this number of tokens. Of a long text, only as much is encoded as shows that."""
        return (
            not self._engine.tokenizer.exceeds(self._text(observation), tokens)
            and self.tokens_of(observation) <= tokens
        )

    async def generate(
        self, *, stop: Sequence[str] = (), max_tokens: int | None = None, sampling: Sampling | None = None
    ) -> Turn:
        """Lets the policy write until a stop string, an end token or a limit. The stop string stays in the text.

        Raises:
          DoesNotFit: the conversation is full. If the agent does not catch this, the episode ends unanswered.
          ValueError: the conversation is closed.
        """
        start, used, branch = len(self._stream.ledger), self.usage, self._rollout.branch
        sampling = sampling or self._rollout.sampling
        if branch is None:
            written = await self._request(stops=stop, max_tokens=max_tokens, sampling=sampling)
        else:
            written = await branch.turn(self, stop, max_tokens, sampling)
        turn = Turn(
            text=self._engine.tokenizer.decode(written.tokens),
            stop_reason=written.stop_reason,
            tokens=len(written.tokens) if used is None or self.usage is None else self.usage.tokens - used.tokens,
            forced=self._forced,
            sequence=self._number,
            start=start,
        )
        self._forced = ""
        self._rollout.add(turn)
        return turn

    async def _request(self, **settings: Any) -> Generated:
        """What the engine samples; see `Policy.request`."""
        if not self._open:  # nobody would ever answer
            raise ValueError(
                "this conversation is closed: ask for turns and scores before close(), and in the block of `aside`"
            )
        self._engine.request(self._stream, **settings)
        return await self._rollout.wait_turn(self._rollout, self._stream)

    async def score(self, texts: Sequence[str]) -> list[float]:
        """The log-probability that the policy gives each of these texts, in nats at temperature 1.

        The texts follow each other in the conversation, each encoded by itself. They stay in it as if they had been fed: they
        make no turn and are never trained on. To measure something without leaving it there, score it in an `aside`.

        Raises:
          DoesNotFit: the texts are longer than `room`.
          ValueError: attempts are forked; `texts` is a string, or a text other than the last contains an end of turn; the
            conversation is closed; or the policy is an endpoint, which can't score texts.
        """
        self._check_alone("scores no texts")
        if isinstance(texts, str):
            raise ValueError(f"score({texts!r}) would score letter by letter: give a list of texts, score([{texts!r}])")
        encoded = [self._engine.tokenizer.encode(text) for text in texts]
        ids = list(itertools.chain.from_iterable(encoded))
        logprobs: list[float] = []
        if ids:
            logprobs = (await self._request(sampling=Sampling(), given=ids, scored=True)).logprobs
        if len(logprobs) != len(ids):
            raise ValueError("a text that is scored holds what ends a turn: break it up (Tokenizer.plain)")
        ends = itertools.accumulate(map(len, encoded), initial=0)
        return [float(sum(logprobs[begin:end])) for begin, end in itertools.pairwise(ends)]

    @contextlib.asynccontextmanager
    async def aside(self) -> AsyncIterator[Conversation]:
        """A probe: a conversation that begins as this one is now, and shares its cache. The attempt never hears of it.

            async with chat.aside() as probe:
                probe.force("<answer>")
                (logprob,) = await probe.score([gold])

        What is fed, scored or written in it is no turn of the episode and is never trained on, and this conversation goes on
        as if there had been no probe. What was measured travels in `Turn.info`. A probe has a copy of the conversation's row of
        the KV cache, or borrows the row if none is free.

        Raises:
          ValueError: attempts are forked; a turn of this conversation is under way; or the policy is an endpoint, which tells
            no log-probabilities.
        """
        self._check_alone("has no probes")
        probe = copy.copy(self)
        probe._rollout, probe._viewer = self._rollout.aside(), self._viewer.copy()
        probe._name = f"{self._name}?{len(self._rollout.probes)}"
        probe._stream = self._engine.probe(self._stream, probe._name)
        self._rollout.probes.append(probe)
        try:
            yield probe
        finally:
            probe.close()

    def _check_alone(self, lack: str) -> None:
        if self._rollout.branch is not None:
            raise ValueError(f"a forked attempt {lack}: take forks=0")

    async def prepare(self, observation: Observation | Reply) -> None:
        """Encodes an observation together with those of the other attempts, on all cores. So `observe` or `reply`, and the
        number of its tokens, take no time later. Agents call it for long texts; it changes nothing else."""
        if self._rollout.prepare is None:
            return
        text = self._text(observation)
        if not self._engine.tokenizer.exceeds(text, self.room):
            await self._rollout.prepare(self._rollout, text)

    def observe(self, observation: Observation | Reply, passages: Sequence[str] = ()) -> None:
        """Feeds an observation (never trained on). A picture that can't be used is replaced by words that say why.

        Args:
          observation: a text, or pieces of text and `Shown` pictures in order; or either as a message (`reply`).
          passages: ids of the passages that it shows as text, for the record (Turn.shown).

        Raises:
          DoesNotFit: the observation is longer than `room`; nothing is cut here. If the agent does not catch this, the episode
            ends unanswered.
          ValueError: the observation has a picture, and the model sees none.
        """
        content, ids = self._encoded(observation)
        self._engine.feed(self._stream, ids, content.images)
        self._viewer.see(content.shown)
        if self._rollout.turns:
            turn, tokenizer = self._rollout.turns[-1], self._engine.tokenizer
            plain = content.text.isascii() and not isinstance(observation, Reply)
            exact = plain and tokenizer.lossless  # normalizers change other texts; decoding all takes time
            turn.observation += content.text if exact else tokenizer.decode(ids)
            seen = {item.passage for item in content.shown}
            turn.shown += [*content.shown, *(Shown(passage=name) for name in passages if name not in seen)]

    def reply(self, observation: Observation, passages: Sequence[str] = (), *, role: ReplyRole = "user") -> None:
        """Ends the policy's turn, feeds an observation as a message of `role`, and begins the policy's next turn.

        The tokens are those of the model's chat template (`Tokenizer.reply`); they are never trained on. If the policy ended
        its turn itself, that end token stays the policy's.

        Raises:
          DoesNotFit: the message is longer than `room`.
          ValueError: the chat template does not write one turn after the other, or the observation has a picture and the model
            sees none.
        """
        self.observe(Reply(observation, role), passages)

    @property
    def frame(self) -> Size | None:
        """(width, height) at which the policy sees the latest picture shown; None if there is none yet."""
        return self._viewer.frame

    def look(self, turn: Turn, rule: RegionRule, box: Sequence[float] | None = None) -> Shown | None:
        """The region of the latest picture that the turn's action marks (`Viewer.region`), as a picture to observe.

        None if the box marks no region: the turn's action then becomes invalid, with the reason. The sampled tokens do not
        change.

        Args:
          box: used instead of the action's box.
        """
        assert turn.action is not None
        try:
            return self._viewer.region(turn.action.box if box is None else box, rule)
        except RefusedRegion as error:
            turn.action = dataclasses.replace(turn.action, kind="invalid", error=str(error))
            turn.well_formed = False
            return None

    def _rendered(self, observation: Observation) -> Rendered:
        return rendered(observation, self._engine.tokenizer, self._engine.images, self._rollout.tags)

    def _text(self, observation: Observation | Reply) -> str:
        """The text of an observation as it is encoded."""
        if not isinstance(observation, Reply):
            return self._rendered(observation).text
        return self._engine.tokenizer.reply_text(self._rendered(observation.observation).text, observation.role)

    def _encoded(self, observation: Observation | Reply) -> tuple[Rendered, list[int]]:
        """An observation in the model's form, and its tokens."""
        tokenizer = self._engine.tokenizer
        if isinstance(observation, Reply):
            content = self._rendered(observation.observation)
            return content, tokenizer.reply(content.text, self._stream.ledger.tokens[-1], observation.role)
        content = self._rendered(observation)
        return content, tokenizer.encode(content.text)

    def force(self, text: str) -> None:
        """Feeds the beginning of the policy's next turn (never trained on), such as an opening answer tag."""
        start = len(self._stream.ledger)
        ids = self._engine.tokenizer.encode(text)
        self._engine.feed(self._stream, ids)
        self._stream.forced.append((start, len(self._stream.ledger)))
        self._forced += self._engine.tokenizer.decode(ids)

    def write(self, text: str) -> Turn:
        """Feeds a whole turn in place of the policy (never trained on). All its text is `forced`."""
        self.force(text)
        start = len(self._stream.ledger)
        turn = Turn(text="", stop_reason="stop", tokens=0, forced=self._forced, sequence=self._number, start=start)
        self._forced = ""
        self._rollout.add(turn)
        return turn

    def close(self) -> None:
        """Frees the row; the record stays."""
        if self._open:
            self._engine.close(self._stream)
            self._open = False

    def episode(self, *, answer: str | None, truncated: bool = False) -> Episode:
        """The rollout's episode: the turns and token sequences of all its conversations.

        Raises:
          TypeError: the answer is neither a string nor None.
          ValueError: this is an `aside`, which is no part of the episode.
        """
        if self in self._rollout.probes:
            raise ValueError("a probe ends in no episode: call episode() of the conversation that it is an aside of")
        if answer is not None and not isinstance(answer, str):
            raise TypeError(f"an answer is a string, or None where there is none, and not a {type(answer).__name__}")
        return self._rollout.episode(self.prompt, answer=answer, truncated=truncated)


def prompt_ids(prompt: Prompt, engine: Policy, example_id: str) -> list[int]:
    """A prompt's tokens; messages are rendered with the model's chat template. Raises PromptTooLong for a long text that surely
    has more than a conversation may hold: only a beginning of it was encoded."""
    tokenizer = engine.tokenizer
    items = [] if isinstance(prompt, str) else list(prompt)
    messages = [item for item in items if isinstance(item, Message)]
    text = prompt if isinstance(prompt, str) else "\n".join(message.content for message in messages)
    if tokenizer.exceeds(text, engine.max_length):
        raise PromptTooLong(
            f"the prompt of example {example_id!r} has {len(text):,} letters and more tokens than a conversation may hold "
            f"({engine.max_length:,}): shorten it or raise max_length"
        )
    if isinstance(prompt, str):
        return tokenizer.encode_prompt(prompt)
    return tokenizer.chat(messages) if messages else list(map(int, cast(list[int], items)))
