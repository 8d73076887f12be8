"""The values that travel through the house: questions, passages, tool calls, turns, episodes and token sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Literal, Protocol

import numpy as np
from jaxtyping import Bool, Float32, Int32

StopReason = Literal["stop", "eos", "length"]
ActionKind = Literal["search", "region", "answer", "refusal", "invalid"]
VerdictKind = Literal["right", "wrong", "unreadable", "failed", "unasked"]


class PlacedImage(Protocol):
    """A processed image as a token sequence holds it (models.patches.ImagePatches): so many tokens stand for it.

    Images of one `digest` look the same to the model.
    """

    @property
    def tokens(self) -> int: ...

    @property
    def digest(self) -> str: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """One question with its accepted answers.

    `images` are paths, encoded bytes, PIL images or arrays. `metadata` is free-form (supporting passages, question type, ...).
    """

    id: str
    question: str
    answers: tuple[str, ...]
    images: tuple[Any, ...] = ()
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """One message of a chat, as chat templates take it.

    Attributes:
      images: pictures that stand before the content, as `Example` has them; for chat models (llms), templates know none.
      places: where each picture stands in the content instead, as a number of letters before it; () or one per picture, in
        order.
    """

    role: Literal["system", "user", "assistant"]
    content: str
    images: tuple[Any, ...] = ()
    places: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextAndImage:
    """What an encoder embeds or a query asks: a text, a picture (a path, encoded bytes, a PIL image or an array), or both.

    Attributes:
      question: of a query: the user's own question, which it was written for; "" if that is not told. Only knowledge bases
        whose `reads` has "question" see it.
      url: of a query: where its picture stands on the web; "" if that is not told. Only knowledge bases whose `reads` has
        "url" see it.
    """

    text: str | None = None
    image: Any = None
    question: str = ""
    url: str = ""


Query = str | TextAndImage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passage:
    """One retrieved unit of a knowledge base.

    Attributes:
      score: on the retriever's own scale, higher is better.
      image: its picture, as a path or a `data:image/...;base64,` URI; "" if it has none.
    """

    id: str
    title: str
    text: str
    score: float = 0.0
    image: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One tool call and its reply. A failed call has `error` set and no passages; it never raises in an agent.

    Attributes:
      query: the text that was searched for; "" where it was a picture alone.
      image: digest of the picture that was searched for, "" if none.
      seconds: that the query took, whatever else was in its batch (`knowledge.timing`).
      cost: the tool's own price of the query (`KnowledgeBase.cost`), the same in every run.
    """

    tool: str
    query: str
    image: str = ""
    passages: tuple[Passage, ...] = ()
    error: str | None = None
    seconds: float = 0.0
    cost: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shown:
    """A passage or a picture that an observation shows.

    Attributes:
      passage: id of the passage, "" of a picture that is no passage's.
      image: the picture, as `Example` has them; "" for a text alone. A record has its path (evaluation.records).
      digest: of the processed picture (`PlacedImage.digest`), "" before it has been shown.
      parent: digest of the picture that a crop was cut from, "" if it is whole.
      box: of a crop: left, top, right and bottom in pixels of its parent before it was resized; () if it is whole.
      error: why the picture could not be shown; its place in the text says so, too.
    """

    passage: str = ""
    image: Any = ""
    digest: str = ""
    parent: str = ""
    box: tuple[float, ...] = ()
    error: str = ""


# What surroundings say to a policy: a text, or pieces of text and pictures in order.
Observation = str | Seq[str | Shown]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Action:
    """What a turn asks for: `search` (`tool`, `query`), `region` (`box`, a part of the latest picture shown, as the policy
    writes it), `answer` (`answer`), `refusal` (it says that it can't answer) or `invalid` (`error` says why). An answer with an
    `error` was taken, and ought not to have come."""

    kind: ActionKind
    tool: str = ""
    query: str = ""
    answer: str = ""
    thought: str = ""
    error: str = ""
    box: tuple[float, ...] = ()


@dataclasses.dataclass(kw_only=True)
class Turn:
    """One stretch of text that the policy sampled and what followed from it.

    Attributes:
      text: the sampled text, special tokens included.
      stop_reason: "stop" (a stop string), "eos", or "length" (the turn's or the conversation's token limit).
      tokens: number of sampled tokens.
      forced: text fed right before this turn to force its form (a final answer when the budget was spent), else "".
      action: the parsed action; set by the agent.
      well_formed: the text obeys the agent's grammar to the letter (a parser may accept more); set by the agent.
      calls: the tool calls made in this turn.
      observation: the text that was fed back, with a mark (`LLM.image_marker`) for each picture; "" if none.
      shown: the pictures and passages in it: pictures in the order of their marks, then passages that are text alone.
      sequence, start: where the sampled tokens stand, as the ledger counted: from `start` on in the episode's
        sequences[sequence].
      asked: what the agent asked for ("route", "answer", "final"); "" where the policy chooses between search and answer.
      rewards: named terms of this turn alone, weighted.
    """

    text: str
    stop_reason: StopReason
    tokens: int
    forced: str = ""
    action: Action | None = None
    well_formed: bool = False
    calls: list[Call] = dataclasses.field(default_factory=list)
    observation: str = ""
    shown: list[Shown] = dataclasses.field(default_factory=list)
    sequence: int = 0
    start: int = 0
    asked: str = ""
    rewards: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequence:
    """Tokens exactly as the engine fed and sampled them; the learner's unit of work.

    Attributes:
      tokens: ids, [T].
      loss_mask: True where the policy sampled the token, [T]. Nothing else is ever trained on.
      logprobs: behaviour log-probability of each sampled token at the sampling temperature (full support), 0 elsewhere.
      positions: rotary positions on three axes (time, height, width), [3, T]; equal axes for text.
      versions: policy version that sampled the token, -1 for fed tokens.
      images: (index of its first token, processed image) of every image among the tokens, in order.
    """

    tokens: Int32[np.ndarray, " T"]
    loss_mask: Bool[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    positions: Int32[np.ndarray, "3 T"]
    versions: Int32[np.ndarray, " T"]
    images: tuple[tuple[int, PlacedImage], ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Branch:
    """A routing decision at which an attempt was forked, and the way that an episode goes there.

    Attributes:
      tool: the knowledge base that was chosen for the policy.
      turn: index of the turn that decides.
      sequence, start, tokens: where the choice is written, as in Turn: these tokens alone, of the turn's.
      logprob: of the choice, under the policy that wrote what comes before it, at the sampling temperature.
    """

    tool: str
    turn: int
    sequence: int
    start: int
    tokens: int
    logprob: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a judge says of an episode's answer.

    Attributes:
      kind: "right" or "wrong"; "unreadable" (no reply said which), "failed" (there was no reply), "unasked" (there is no
        answer).
      counts: what it counts in rewards and means, 1 or 0; None: the episode is left out of them.
      kept: the reply was in the cache.
      said: the last reply, or the error.
    """

    kind: VerdictKind
    counts: float | None
    kept: bool = False
    said: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a policy behind an endpoint wrote no further turn.

    Attributes:
      kind: such as "context_length", "server" or "budget" (`llms.faults`).
      message: what was said of it, in one line.
    """

    kind: str
    message: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """What replies of an endpoint took. A reply that was kept counts as it did when it was asked for.

    Attributes:
      replies: their number.
      kept: of these, those that a cache had.
      prompt_tokens, tokens: read and written, as the endpoint counts.
      seconds: waited for them, one after the other, without waits for a rate limit.
      cost: in the money of the price that is configured.
    """

    replies: int = 0
    kept: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cost: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        fields = (field.name for field in dataclasses.fields(self))
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in fields})


@dataclasses.dataclass(kw_only=True)
class Episode:
    """One attempt at one example: what was said, called and answered, its token sequences and its rewards.

    `rewards` holds named terms; recipes decide how they combine and store the sum under `total`. `verdict` is a judge's, None
    where none was asked.
    `truncated` is True when a token limit, not the agent, ended it. `branches` are the decisions at which the attempt was
    forked: episodes of one example and sample share what comes before the first one in which they differ. Those tokens are the
    policy's (`loss_mask`) in the episode that took the first way at every later decision, and fed in the others, so that each
    counts once.
    `usage` is set where the policy is a chat model behind an endpoint, whose token ids nobody knows: there are no `sequences`.
    `failure` says why such a policy wrote no further turn, and the episode ended there; None if it did not fail.
    """

    example: Example
    sample: int
    answer: str | None
    turns: list[Turn]
    sequences: list[Sequence]
    prompt: str = ""
    truncated: bool = False
    rewards: dict[str, float] = dataclasses.field(default_factory=dict)
    branches: tuple[Branch, ...] = ()
    verdict: Verdict | None = None
    usage: Usage | None = None
    failure: Failure | None = None

    @property
    def calls(self) -> list[Call]:
        """All tool calls in order."""
        return [call for turn in self.turns for call in turn.calls]

    @property
    def invalid_actions(self) -> int:
        """Number of turns that held no executable action, or one that ought not to have come (`Action.error`)."""
        return sum(bool(turn.action and (turn.action.kind == "invalid" or turn.action.error)) for turn in self.turns)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemonstrationStep:
    """One step of a gold or demonstrated path: a thought, and a sub-question, the tool and what it returned.

    Attributes:
      box: of a closer look instead of a search, as the policy writes it (Action.box); () of a search.
    """

    thought: str
    query: str = ""
    tool: str = ""
    passages: tuple[Passage, ...] = ()
    box: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demonstration:
    """A worked example for supervised learning: steps, then a final thought and answer. An agent renders it to tokens.

    `forced`: the answer follows on from the agent's own opening of it, as when the budget of searches is spent.
    """

    example: Example
    steps: tuple[DemonstrationStep, ...]
    thought: str
    answer: str
    forced: bool = False
