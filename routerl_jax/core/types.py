"""The values that all packages share: questions, passages, tool calls, turns, episodes and token sequences."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Float32, Int16, Int32

StopReason = Literal["stop", "eos", "length"]
ActionKind = Literal["search", "region", "answer", "refusal", "invalid"]
VerdictKind = Literal["right", "wrong", "unreadable", "failed", "unasked"]


class PlacedImage(Protocol):
    """A processed image in a token sequence (models.patches.ImagePatches).

    Attributes:
      tokens: number of tokens that stand for the image.
      digest: images with equal digests look the same to the model.
    """

    @property
    def tokens(self) -> int: ...

    @property
    def digest(self) -> str: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """One question with its accepted answers.

    `images` are paths, encoded bytes, PIL images or arrays. `metadata` is free-form (supporting passages, question type, ...).

    Raises:
      ValueError: `answers` is a string, whose letters would count as answers; or a text holds half of a surrogate pair.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    images: tuple[Any, ...] = ()
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.answers, str):
            raise ValueError(
                f"example {self.id!r}: answers={self.answers!r} is a string; give a tuple of accepted answers: "
                f"({self.answers!r},)"
            )
        for text in (self.question, *self.answers):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"example {self.id!r}: {text[:80]!r} holds half of a surrogate pair, which no tokenizer takes; take it out "
                    "(core.text.replace_surrogates)"
                ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """One message of a chat, as chat templates take it.

    Attributes:
      images: pictures before the content, in the forms that `Example` takes. Only chat models (services) use them; chat
        templates do not.
      image_offsets: for each picture, in order, the number of letters of the content before it. (): all pictures come before
        the content.
    """

    role: Literal["system", "user", "assistant"]
    content: str
    images: tuple[Any, ...] = ()
    image_offsets: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextAndImage:
    """An encoder's input or a query: a text, a picture (a path, encoded bytes, a PIL image or an array), or both.

    Attributes:
      question: for a query: the user's question that it belongs to; "" if it is not passed on. Only knowledge bases whose
        `reads` has "question" see it.
      url: for a query: the web address of its picture; "" if it is not passed on. Only knowledge bases whose `reads` has "url"
        see it.
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
      image: the passage's picture, as a path or a `data:image/...;base64,` URI; "" if it has none.
    """

    id: str
    title: str
    text: str
    score: float = 0.0
    image: str = ""


class Walk(NamedTuple):
    """How a query walked over a graph of phrases and passages.

    Attributes:
      facts: where it began, best first, as "subject | predicate | object".
      nodes: the phrases at which it was oftenest, most first.
    """

    facts: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, fields: Any) -> Walk:
        """A walk from its JSON object, whose keys may be absent. Raises ValueError if it has another form."""
        if not isinstance(fields, dict):
            raise ValueError(f"not a walk: {str(fields)[:200]!r}")
        return cls(**{name: tuple(map(str, fields.get(name, ()))) for name in cls._fields})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One tool call and its reply. A failed call has `error` set and no passages; it never raises in an agent.

    Attributes:
      query: the text that was searched for; "" if the search was for a picture alone.
      image: digest of the picture that was searched for; "" if none.
      seconds: time that this query took, without the other queries of its batch (`knowledge.base`).
      cost: the tool's price of the query (`KnowledgeBase.cost`), the same in every run.
      facts, nodes: see `Walk`; () where there is no walk over a graph, or where it is not known.
    """

    tool: str
    query: str
    image: str = ""
    passages: tuple[Passage, ...] = ()
    error: str | None = None
    seconds: float = 0.0
    cost: float = 0.0
    facts: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shown:
    """A passage or a picture that an observation shows.

    Attributes:
      passage: id of the passage; "" for a picture that belongs to no passage.
      image: the picture, in the forms that `Example` takes; "" for a text alone. In a record it is a path (evaluation.records).
      digest: digest of the processed picture (`PlacedImage.digest`); "" before it has been shown.
      parent: digest of the picture that a crop was cut from; "" for a whole picture.
      box: for a crop: left, top, right and bottom in pixels of its parent before resizing; () for a whole picture.
      error: why the picture could not be shown; the text has this message in its place.
    """

    passage: str = ""
    image: Any = ""
    digest: str = ""
    parent: str = ""
    box: tuple[float, ...] = ()
    error: str = ""


# What an agent feeds to a policy: a text, or pieces of text and pictures in order.
Observation = str | Seq[str | Shown]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Action:
    """The action that a turn asks for, of one of these kinds:

    - `search`: search `tool` for `query`;
    - `region`: look at `box`, a part of the latest picture shown, as the policy writes it;
    - `answer`: give `answer`. If `error` is set too, the answer counts, but the protocol did not allow it here;
    - `refusal`: the policy says that it can't answer;
    - `invalid`: none of these; `error` says why.
    """

    kind: ActionKind
    tool: str = ""
    query: str = ""
    answer: str = ""
    thought: str = ""
    error: str = ""
    box: tuple[float, ...] = ()


@dataclasses.dataclass(kw_only=True)
class Turn:
    """One segment of text that the policy sampled, and what followed from it.

    Attributes:
      text: the sampled text, special tokens included.
      stop_reason: "stop" (a stop string), "eos", or "length" (the turn's or the conversation's token limit).
      tokens: number of sampled tokens.
      forced: text fed right before this turn to force its form (a final answer when the budget was spent), else "".
      action: the parsed action; set by the agent.
      well_formed: whether the text follows the agent's grammar to the letter (a parser may accept more); set by the agent.
      calls: the tool calls made in this turn.
      observation: the text that was fed after the turn, with a mark (`LLM.image_marker`) for each picture; "" if none.
      shown: the pictures and passages in the observation: pictures in the order of their marks, then passages of text alone.
      sequence, start: position of the sampled tokens: they begin at index `start` of the episode's sequences[sequence].
      asked: what the agent asked for ("route", "answer", "final"); "" if the policy chooses between search and answer itself.
      info: what the agent measured at this turn, by name: numbers and texts for rewards and for the record.
      rewards: weighted reward terms of this turn alone, by name, of the terms that judge it. Rewards write them, agents don't.
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
    info: dict[str, float | str] = dataclasses.field(default_factory=dict)
    rewards: dict[str, float] = dataclasses.field(default_factory=dict)


FREE = -1  # in Sequence.routes, in place of an expert's number: the router chooses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequence:
    """Tokens exactly as the engine fed and sampled them. The learner trains on these.

    Attributes:
      tokens: ids, [T].
      loss_mask: True where the policy sampled the token, [T]. Nothing else is ever trained on.
      logprobs: behaviour log-probability of each sampled token at the sampling temperature (full support), 0 elsewhere.
      positions: rotary positions on three axes (time, height, width), [3, T]; equal axes for text.
      versions: policy version that sampled the token, [T]; -1 for fed tokens.
      images: (index of its first token, processed image) of every image among the tokens, in order.
      routes: the experts that the sampler chose for each token in each layer with experts, [T, L, C]; FREE for tokens that it
        never read, such as the last one. None: not recorded.
    """

    tokens: Int32[np.ndarray, " T"]
    loss_mask: Bool[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " T"]
    positions: Int32[np.ndarray, "3 T"]
    versions: Int32[np.ndarray, " T"]
    images: tuple[tuple[int, PlacedImage], ...] = ()
    routes: Int16[np.ndarray, "T L C"] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, length: int) -> Sequence:
        """Its first `length` tokens, and the images that begin among them."""
        return Sequence(
            tokens=self.tokens[:length],
            loss_mask=self.loss_mask[:length],
            logprobs=self.logprobs[:length],
            positions=self.positions[:, :length],
            versions=self.versions[:length],
            images=tuple((start, image) for start, image in self.images if start < length),
            routes=None if self.routes is None else self.routes[:length],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Branch:
    """A routing decision at which an attempt was forked, and the choice that an episode takes there.

    Attributes:
      tool: the knowledge base of this branch.
      turn: index of the turn with the decision.
      sequence, start, tokens: position of the choice, as in Turn, and its number of tokens.
      logprob: log-probability of the choice at the sampling temperature, under the policy that wrote the text before it.
    """

    tool: str
    turn: int
    sequence: int
    start: int
    tokens: int
    logprob: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """A judge's verdict on an episode's answer.

    Attributes:
      kind: "right" or "wrong"; "unreadable" (no reply gave a verdict), "failed" (there was no reply), "unasked" (the episode
        has no answer).
      counts: its value in rewards and means, 1 or 0; None: the episode is left out of them.
      kept: whether the reply came from the cache.
      said: the judge's last reply, or the error.
    """

    kind: VerdictKind
    counts: float | None
    kept: bool = False
    said: str = ""

    @property
    def given(self) -> bool:
        """Whether nothing is missing: the judge said right or wrong, or there was no answer to judge."""
        return self.kind not in ("failed", "unreadable")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a policy behind an endpoint wrote no further turn.

    Attributes:
      kind: kind of the failure, such as "context_length", "server" or "budget" (`services.faults`).
      message: the error in one line.
    """

    kind: str
    message: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """Tokens, time and cost of an endpoint's replies. A cached reply counts as it did when it was first requested.

    Attributes:
      replies: number of replies.
      kept: how many of them came from a cache.
      retries: requests that were sent again, because they failed or their reply was of no use.
      prompt_tokens, tokens: tokens read and written, as the endpoint counts them. What was written behind the end of a turn
        is not counted (but costs).
      seconds: sum of the waiting times for replies, without waits for a rate limit.
      cost: in the currency of the configured price.
    """

    replies: int = 0
    kept: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cost: float = 0.0
    retries: int = 0

    def __add__(self, other: Usage) -> Usage:
        fields = (field.name for field in dataclasses.fields(self))
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in fields})


@dataclasses.dataclass(kw_only=True)
class Episode:
    """One attempt at one example: its turns, calls and answer, its token sequences and its rewards.

    Attributes:
      answer: the final answer; None if there is none.
      prompt: text of the first prompt.
      truncated: whether a token limit, and not the agent, ended the episode.
      rewards: reward terms by name. Recipes decide how they combine, and store the sum under `total`.
      branches: the decisions at which the attempt was forked. Episodes of one example and sample share all tokens before the
        first decision in which they differ. A shared token belongs to the policy (`loss_mask`) only in the episode that took
        the first choice at every later decision. In the others it counts as fed, so that each token is trained on once.
      verdict: a judge's verdict; None if no judge was asked.
      usage: set if the policy is a chat model behind an endpoint. Its token ids are unknown, so there are no `sequences`.
      failure: why such a policy wrote no further turn, which ended the episode; None if it did not fail.
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
        """Number of turns without an executable action, or with one that the protocol did not allow (`Action.error`)."""
        return sum(bool(turn.action and (turn.action.kind == "invalid" or turn.action.error)) for turn in self.turns)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemonstrationStep:
    """One step of a gold or demonstrated path: a thought, a sub-question, the tool and the passages that it returned.

    Attributes:
      box: box of a closer look, as the policy writes it (Action.box); () if the step is a search.
    """

    thought: str
    query: str = ""
    tool: str = ""
    passages: tuple[Passage, ...] = ()
    box: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demonstration:
    """A worked example for supervised learning: steps, then a final thought and answer. An agent renders it to tokens.

    `forced`: the agent begins the answer itself, as it does when the budget of searches is spent.
    """

    example: Example
    steps: tuple[DemonstrationStep, ...]
    thought: str
    answer: str
    forced: bool = False


# --- tools as functions ------------------------------------------------------------------------------------------------

_QUERY = "query"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolSchema:
    """A function that searches.

    Attributes:
      name: of the function, as the model writes it.
      description: for the model.
      query: name of the argument that holds the query, a string. Every call must have it. "": the function has no arguments.
      about: the JSON schema of that argument.
    """

    name: str
    description: str
    query: str = _QUERY
    about: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: {"type": "string", "description": "What to search for."}, hash=False
    )

    @property
    def json(self) -> dict[str, Any]:
        """The JSON schema that chat templates take."""
        arguments = {self.query: dict(self.about)} if self.query else {}
        parameters = {"type": "object", "properties": arguments, "required": list(arguments)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }


def kb_schema(name: str, description: str = "") -> ToolSchema:
    """A knowledge base as a function `search_NAME(query)`.

    Args:
      description: what it contains; "" if unknown.
    """
    purpose = f"Searches the knowledge base {name!r} and returns the best passages."
    return ToolSchema(name=function_name(name), description=f"{purpose} {description.strip()}".strip())


def function_name(name: str) -> str:
    """The function name of a knowledge base. It has only letters, digits, `_` and `-`, as the APIs of models require."""
    return "search_" + re.sub(r"[^0-9A-Za-z_-]", "_", name)
