"""The interface of agents, and the objects that they work with: an `LLM` for conversations and `Tools` to search, which a
routing may send elsewhere."""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import difflib
import inspect
import itertools
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, Self

from routerl_jax.agents.chat import Chat, ChatRules
from routerl_jax.agents.conversation import Conversation, Prompt, Request, Rollout, prompt_ids
from routerl_jax.agents.grammar import RouteChoices, inert_call
from routerl_jax.agents.observation import Pieces, Reply, Spoken, expanded_tokens
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Call, Demonstration, Episode, Example, Passage, Query, ToolSchema, Turn
from routerl_jax.data.rounds import RecordedRounds
from routerl_jax.engine.policy import PromptTooLong
from routerl_jax.models.images import ImageSource
from routerl_jax.models.regions import Size


class Routing(Protocol):
    """Chooses the knowledge base that a search really goes to."""

    def __call__(self, named: str, tools: Sequence[str], example: Example, sample: int, step: int) -> str:
        """The member of `tools` for search number `step` (from 0) of an attempt. The policy has named `named`."""
        ...


EVERY_KB = "every_kb"  # in place of a routing: every search goes to all knowledge bases at once


@dataclasses.dataclass(frozen=True)
class FixedRouting:
    """Always the same knowledge base, whatever the policy names."""

    tool: str

    def __call__(self, named: str, tools: Sequence[str], example: Example, sample: int, step: int) -> str:
        return self.tool


@dataclasses.dataclass(frozen=True)
class RandomRouting:
    """A knowledge base drawn uniformly by a hash of (seed, example, sample, step): the same one in every run."""

    seed: int = 0

    def __call__(self, named: str, tools: Sequence[str], example: Example, sample: int, step: int) -> str:
        return tools[zlib.crc32(f"{self.seed}/{example.id}/{sample}/{step}".encode()) % len(tools)]


LearnsFrom = Literal["demonstrations", "golden_steps"]


class SearchTool(Protocol):
    """A knowledge base as the driver calls it: many queries at once, results in their order."""

    def search(self, queries: Sequence[Any], k: int) -> list[list[Passage]]:
        """Returns up to k passages per query, best first. May raise; the driver turns that into failed calls."""
        ...


class Agent(abc.ABC):
    """How a policy works on one example. One instance serves all rollouts at once, so it holds no state of any rollout.

    Only `run` must be written. The other members have defaults: how attempts can be forked, what the agent is compared with,
    and how it is trained on demonstrations. If an agent is a dataclass, its fields can be set in a configuration
    (`config.agent.settings`).

    Attributes:
      searches_field: name of the field that bounds the number of searches, if the agent has one.
    """

    searches_field: ClassVar[str] = "max_searches"

    @abc.abstractmethod
    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        """Works on one example and returns its episode, usually `chat.episode(answer=...)`."""

    @property
    def choices(self) -> RouteChoices | None:
        """How the policy writes its choice of a knowledge base, where an attempt can be forked; None: it can't be forked."""
        return None

    @property
    def search_budget(self) -> int | None:
        """The largest number of searches that it makes on a question; None if that is not known."""
        return None

    @property
    def functions(self) -> tuple[dict[str, Any], ...]:
        """JSON schemas of the functions that its model's chat template shows; () for none."""
        return ()

    def with_schemas(self, schemas: Mapping[str, ToolSchema]) -> Agent:
        """The agent with these functions, by knowledge base. An agent without functions stays as it is."""
        return self

    def recorded(self, recorded: RecordedRounds) -> Episode:
        """The episode of an attempt that another program recorded: its turns, calls and answer, without tokens.

        Raises:
          ValueError: the agent can't read recorded rounds.
        """
        raise ValueError(f"{type(self).__name__} reads no recorded rounds: write its recorded()")

    @staticmethod
    def recorded_episode(example: Example, turns: list[Turn]) -> Episode:
        """The episode of recorded turns that were read (`Turn.action`). It has the answer of the last one, if that answers."""
        last = turns[-1].action
        answer = last.answer if last is not None and last.kind == "answer" else None
        return Episode(example=example, sample=0, answer=answer, turns=turns, sequences=[])

    # --- what it is compared with ---

    def with_passages(self, k: int) -> Agent:
        """The same agent with `k` passages per search.

        Raises:
          ValueError: the agent is no dataclass with a field `k`.
        """
        if not dataclasses.is_dataclass(self) or "k" not in self.__dataclass_fields__:
            raise ValueError(f"{type(self).__name__} has no number of passages, k, to change (config.evaluation.k)")
        return dataclasses.replace(self, k=k)

    def with_searches(self, count: int) -> Agent:
        """The same agent with at most `count` searches on a question.

        For an agent that asks several knowledge bases at once, `count` is the number of rounds. An agent without the field
        `searches_field`, such as one that searches once or never, is returned unchanged.
        """
        if dataclasses.is_dataclass(self) and self.searches_field in self.__dataclass_fields__:
            return dataclasses.replace(self, **{self.searches_field: count})
        return self

    def baselines(self, tools: Sequence[str]) -> dict[str, Agent]:
        """Agents for the run's final table, by name: the same policy without some of its choices.

        By default there are baselines only with several knowledge bases: one `only_KB` for each knowledge base, which gets all
        searches, and `random_kb`.

        Args:
          tools: names of the knowledge bases.
        """
        if len(tools) < 2:
            return {}
        agents: dict[str, Agent] = {f"only_{tool}": Rerouted(self, FixedRouting(tool)) for tool in tools}
        return {**agents, "random_kb": Rerouted(self, RandomRouting())}

    def vanilla_rag(self, tools: Sequence[str]) -> dict[str, Agent]:
        """Agents that search once, for the question itself, and answer from that; by default none.

        Named `vanilla_rag`, or `vanilla_rag_KB` for each of several knowledge bases.
        """
        return {}

    def alternatives(self, tools: Sequence[str]) -> dict[str, Agent]:
        """All agents that it can be compared with, by name: `baselines`, `vanilla_rag` and, with several knowledge bases,
        `every_kb`, which makes each search in all of them and finds `k` passages in each. Best ones are shown first."""
        every: dict[str, Agent] = {EVERY_KB: Rerouted(self, EVERY_KB)} if len(tools) > 1 else {}
        return {**self.baselines(tools), **self.vanilla_rag(tools), **every}

    # --- how it is shown what to write, for supervised runs ---

    @property
    def learns_from(self) -> LearnsFrom | None:
        """The kind of supervised examples: "demonstrations", whole worked questions (`opening` and `pieces`);
        "golden_steps", single steps of them (`opening` and `step_pieces`); or None."""
        return None

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The tags of the agent's protocol, for tokenizers that are trained for it.

        A tokenizer that has such a tag as a special token also reads it as that token in observations.
        """
        return ()

    @property
    def foreign(self) -> tuple[str, ...]:
        """Tags that are broken up in all that tools return (`grammar.inert`), so that no passage and no error of a tool ends
        its block or writes an action; by default all of the protocol's."""
        return self.special_tokens

    def opening(
        self, example: Example, tokenizer: Tokenizer, image_marker: str = "", room: int | None = None
    ) -> list[int]:
        """The token ids of an example's prompt. Documents in it that do not fit into `room` tokens are left out, as in a
        rollout."""
        raise ValueError(
            f"{type(self).__name__} says that it can be shown how to work (learns_from): write its opening()"
        )

    def pieces(self, demonstration: Demonstration) -> Pieces:
        """The pieces of a worked example that follow its opening."""
        raise ValueError(f"{type(self).__name__} says that it learns from demonstrations: write its pieces()")

    def recorded_pieces(self, recorded: RecordedRounds) -> Pieces:
        """The pieces of recorded rounds that follow their opening.

        The text of a round is trained on. What followed it comes as a user's message, except after the last round.

        Raises:
          ValueError: a round can't be trained on; says which, and why.
        """
        pieces: Pieces = []
        for number, item in enumerate(recorded.rounds, 1):
            pieces.append((item.text, True))
            if number < len(recorded.rounds):
                pieces.append((Reply(item.pieces), False))
        return pieces

    def step_pieces(self, example: Example) -> Pieces:
        """The pieces of a golden step that follow its opening."""
        raise ValueError(f"{type(self).__name__} says that it learns from golden steps: write its step_pieces()")


class Form(Protocol):
    """How a policy writes its actions: a grammar, or another object with these members (`Grammar` describes them)."""

    @property
    def functions(self) -> tuple[dict[str, Any], ...]: ...
    @property
    def special_tokens(self) -> tuple[str, ...]: ...
    @property
    def foreign(self) -> tuple[str, ...]: ...
    @property
    def choices(self) -> RouteChoices | None: ...
    def of(self, tokenizer: Tokenizer) -> Any: ...
    def with_schemas(self, schemas: Mapping[str, ToolSchema]) -> Any: ...


class CallingAgent(Agent):
    """An agent in a protocol, whose `run` works on the chat that `begin` gives (`chat.Chat`).

    If the protocol has functions, the policy calls them. Then every turn is a message of the model's chat, and what follows it
    comes as a tool's message. Subclasses are dataclasses.

    Attributes:
      form_field: name of the field with the protocol.
    """

    form_field: ClassVar[str] = "grammar"

    @property
    def form(self) -> Form:
        """The protocol: tags, or tool calls."""
        return getattr(self, self.form_field)

    @property
    def rules(self) -> ChatRules:
        """The rules of its chats (`begin`)."""
        raise ValueError(f"{type(self).__name__} begins a chat in its protocol: write its rules")

    def begin(self, example: Example, llm: LLM) -> Chat:
        """A chat in the form of the model, which begins with the agent's opening of an example."""
        agent = self.of(llm.tokenizer)
        return llm.chat(agent.opening(example, llm.tokenizer, llm.image_marker), agent.rules, example.images)

    def of(self, tokenizer: Tokenizer) -> Self:
        """The agent in the form of this model. Raises ValueError if the model has none."""
        return self._with(lambda form: form.of(tokenizer))

    def with_schemas(self, schemas: Mapping[str, ToolSchema]) -> Self:
        return self._with(lambda form: form.with_schemas(schemas))

    def _with(self, change: Callable[[Form], Form]) -> Self:
        form = self.form
        changed: Any = change(form)
        if changed is not form:
            changed = dataclasses.replace(self, **{self.form_field: changed})  # type: ignore[type-var]
            return changed
        return self

    @property
    def functions(self) -> tuple[dict[str, Any], ...]:
        """The protocol's own, as the next two."""
        return self.form.functions

    @property
    def choices(self) -> RouteChoices | None:
        return self.form.choices

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return self.form.special_tokens

    @property
    def foreign(self) -> tuple[str, ...]:
        return self.form.foreign

    def fields_of(self, base: type[CallingAgent]) -> dict[str, Any]:
        """The values of the fields that it shares with all agents of a class. Further fields of subclasses are left out."""
        fields: Any = dataclasses.fields(base)  # type: ignore[arg-type]
        return {field.name: getattr(self, field.name) for field in fields}

    def check_tags(self, what: str) -> None:
        """Raises ValueError if the policy calls functions. `what` needs the tags of the agent's own protocol."""
        if self.functions:
            raise ValueError(
                f"{what} needs the tags of the agent's own protocol, and the policy calls functions: leave one of them out "
                "(config.agent.grammar)"
            )

    # --- demonstrations ---

    def recorded_pieces(self, recorded: RecordedRounds) -> Pieces:
        self.check_tags("learning from recorded rounds")
        return super().recorded_pieces(recorded)

    def spoken(self, write: Callable[[Self], str]) -> str | Spoken:
        """A turn for a demonstration, which `write` makes from the agent in a model's form."""
        return Spoken(lambda tokenizer: write(self.of(tokenizer))) if self.functions else write(self)


@dataclasses.dataclass(frozen=True)
class Rerouted(Agent):
    """An agent whose searches go where a routing sends them, whatever knowledge base it names. All else is unchanged."""

    agent: Agent
    routing: Routing | Literal["every_kb"]

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        return await self.agent.run(example, llm, tools.rerouted(self.routing))

    def with_passages(self, k: int) -> Agent:
        """The agent with `k` passages per search, rerouted."""
        return dataclasses.replace(self, agent=self.agent.with_passages(k))

    def with_searches(self, count: int) -> Agent:
        """The agent with at most `count` searches, rerouted."""
        return dataclasses.replace(self, agent=self.agent.with_searches(count))

    @property
    def search_budget(self) -> int | None:
        """The agent's own; None if each search is made in every knowledge base."""
        return None if self.routing == EVERY_KB else self.agent.search_budget

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The agent's own, as the next."""
        return self.agent.special_tokens

    @property
    def foreign(self) -> tuple[str, ...]:
        return self.agent.foreign


class LLM:
    """The policy, as one rollout sees it."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout

    @property
    def tokenizer(self) -> Tokenizer:
        """The policy's tokenizer."""
        return self._rollout.engine.tokenizer

    @property
    def sample(self) -> int:
        """Index of this rollout among the rollouts of its example."""
        return self._rollout.sample

    @property
    def image_marker(self) -> str:
        """The text that stands for an image in a prompt; "" if the model sees no images."""
        images = self._rollout.engine.images
        return "" if images is None else self.tokenizer.decode(images.marker)

    def frame(self, picture: ImageSource) -> Size:
        """(width, height) in pixels at which the policy sees a picture. The boxes that it writes are in this frame.

        Raises:
          ValueError: the picture can't be used, or the policy sees no pictures.
        """
        images = self._rollout.engine.images
        if images is None:
            raise ValueError("the policy sees no images; use a vision-language model")
        return images.frame(picture)

    def room(self, prompt: Prompt, images: Sequence[ImageSource] = ()) -> int:
        """Tokens that a conversation would have left after this prompt; less than 1 if the prompt does not fit."""
        engine = self._rollout.engine
        try:
            ids = prompt_ids(prompt, engine, self._rollout.example.id)
        except PromptTooLong:  # how much too long was not looked at
            return -engine.max_length
        return engine.max_length - len(ids) - expanded_tokens(engine.images, images)

    def conversation(self, prompt: Prompt, images: Sequence[ImageSource] = ()) -> Conversation:
        """Starts a conversation from text, token ids, or messages (rendered with the model's chat template).

        Args:
          images: the images at each `image_marker` in the prompt, in order.

        Raises:
          DoesNotFit: the prompt fills the model's context. If the agent does not catch this, the episode ends unanswered.
          ValueError: an image can't be used (names the example).
        """
        conversation = Conversation(self._rollout, prompt, images)
        self._rollout.conversations.append(conversation)
        return conversation

    def chat(self, prompt: Prompt, rules: ChatRules, images: Sequence[ImageSource] = ()) -> Chat:
        """As `conversation`, in a protocol."""
        chat = Chat(self._rollout, prompt, rules, images)
        self._rollout.conversations.append(chat)
        return chat


class UnknownTool(KeyError):
    """An agent asks for a tool by a name that no tool has."""

    def __init__(self, name: str, names: Sequence[str]) -> None:
        super().__init__(name)
        close = difflib.get_close_matches(str(name), names, n=1)
        hint = f"did you mean {close[0]!r}? There are" if close else "there are"
        self.message = f"there is no tool {name!r}; {hint}: {', '.join(names) or 'none'} (config.knowledge names them)"

    def __str__(self) -> str:
        return self.message


class Tools(Mapping[str, "Tool"]):
    """The rollout's tools by name."""

    def __init__(
        self, rollout: Rollout, names: Sequence[str], routing: Routing | Literal["every_kb"] | None = None
    ) -> None:
        self._rollout = rollout
        self._tools = {name: Tool(rollout, name, self) for name in names}
        self._routing = routing
        self._searches = 0

    def rerouted(self, routing: Routing | Literal["every_kb"]) -> Tools:
        """The same tools, with a routing that chooses the tool of every search."""
        return Tools(self._rollout, tuple(self), routing)

    @property
    def in_all(self) -> bool:
        """Whether each search goes to all of them."""
        return self._routing == EVERY_KB

    def asked(self, name: str) -> tuple[str, ...]:
        """The names of the tools that the next search really goes to; `name` is the one that the agent uses."""
        step, self._searches = self._searches, self._searches + 1
        if self._routing is None:
            return (name,)
        if self.in_all:
            return tuple(self)
        assert not isinstance(self._routing, str)
        return (self._routing(name, tuple(self), self._rollout.example, self._rollout.sample, step),)

    def __getitem__(self, name: str) -> Tool:
        """Raises UnknownTool, a KeyError that lists them."""
        if name not in self._tools:
            raise UnknownTool(name, tuple(self))
        return self._tools[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)


class Tool:
    """One knowledge base, as one rollout sees it."""

    def __init__(self, rollout: Rollout, name: str, tools: Tools) -> None:
        self._rollout = rollout
        self._tools = tools
        self.name = name

    async def search(self, query: Query, k: int = 3, *, pictures: bool = True) -> Call:
        """Searches for a text, or for a picture in a TextAndImage. The driver batches the search with those of other rollouts.

        Never raises: a search that failed has `call.error` set.

        Args:
          pictures: fetch the passages' pictures too. With False, pictures that a server would have to send are left out;
            `with_pictures` fetches them later, for the passages that are shown.
        """
        names = self._tools.asked(self.name)
        want = "passages" if pictures or len(names) > 1 else "listing"
        calls = await asyncio.gather(*(self._reply(self._ask(Request(name, query, k, want))) for name in names))
        self._record.extend(calls)
        return calls[0] if len(calls) == 1 else self._joined(calls)

    def _joined(self, calls: Sequence[Call]) -> Call:
        """What the agent sees of one search in several knowledge bases. It failed only if all of them did."""
        errors = [call.error for call in calls if call.error is not None]
        # best first, as agents leave out the last ones where room is short: else they would be those of one knowledge base
        ranks = itertools.chain.from_iterable(itertools.zip_longest(*(call.passages for call in calls)))
        return dataclasses.replace(
            calls[0],
            tool=self.name,
            passages=tuple(passage for passage in ranks if passage is not None),
            error=errors[0] if len(errors) == len(calls) else None,
        )

    async def with_pictures(self, call: Call, passages: Sequence[Passage]) -> Call:
        """The call that `search(.., pictures=False)` returned, with the pictures of some of its passages fetched.

        It replaces that call in the record of its turn. If a picture can't be fetched, the new call has failed (`error`).
        """
        missing = [passage.id for passage in passages if not passage.image]
        if not missing or self._tools.in_all:  # a search in all fetched them at once, each from its own knowledge base
            return call
        pictured = await self._reply(self._pictured(call, missing))
        for record in (self._rollout.early, *(turn.calls for turn in self._rollout.turns)):
            record[:] = [pictured if recorded is call else recorded for recorded in record]
        return pictured

    @property
    def _record(self) -> list[Call]:
        """The list in which a call made now is recorded."""
        return self._rollout.turns[-1].calls if self._rollout.turns else self._rollout.early

    async def _ask(self, request: Request) -> Call:
        return await self._rollout.wait_tool(self._rollout, request)

    async def _pictured(self, call: Call, ids: Sequence[str]) -> Call:
        replies = await asyncio.gather(*(self._ask(Request(call.tool, id, 1, "pictures")) for id in ids))
        seconds = call.seconds + sum(reply.seconds for reply in replies)
        if failed := [reply for reply in replies if reply.error is not None]:
            return dataclasses.replace(call, passages=(), error=failed[0].error, seconds=seconds)
        images = {passage.id: passage.image for reply in replies for passage in reply.passages}
        passages = [dataclasses.replace(shown, image=images.get(shown.id, shown.image)) for shown in call.passages]
        return dataclasses.replace(call, passages=tuple(passages), seconds=seconds)

    async def _reply(self, asked: Coroutine[Any, Any, Call]) -> Call:
        """The reply to a request to a tool, without the protocol's tags; a forked attempt may have it already."""
        branch = self._rollout.branch
        return inert_call(await (asked if branch is None else branch.call(asked)), self._rollout.foreign)


def begun(agent: Agent, example: Example, llm: LLM, tools: Tools) -> Awaitable[Episode]:
    """The agent's `run` on an example, to be awaited. Raises ValueError if it is written without `async`."""
    working = agent.run(example, llm, tools)
    if not inspect.isawaitable(working):
        raise ValueError(f"{type(agent).__name__}.run is no coroutine: write it as `async def run`")
    return working


def check_choices(agent: Agent, asked: str) -> None:
    """Raises ValueError if attempts of an agent can't be forked. `asked` is the setting that asks for forks."""
    if agent.choices is None:
        raise ValueError(
            f"{asked}: {type(agent).__name__} does not say how its policy writes the choice of a knowledge base "
            "(Agent.choices, for a SearchAgent Grammar.choices); take forks=0, or an agent that does"
        )
