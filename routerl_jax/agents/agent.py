"""What an agent is, and what it is given: an `LLM` to hold conversations with and `Tools` to call."""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import difflib
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

from routerl_jax.agents.conversation import Conversation, Prompt, Rollout, prompt_ids
from routerl_jax.agents.grammar import RouteChoices
from routerl_jax.agents.observation import Look, Marked, Rendered, Reply, Spoken, expanded_tokens
from routerl_jax.agents.request import Request
from routerl_jax.agents.routing import Always, Drawn, Routing
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.tool_schema import ToolSchema
from routerl_jax.core.types import Call, Demonstration, Episode, Example, Observation, Passage, Query
from routerl_jax.data.rounds import RecordedRounds
from routerl_jax.models.images import ImageSource
from routerl_jax.models.regions import Size

# What follows a prompt, in order, and whether the policy writes it. What it writes is text.
Pieces = list[tuple[Observation | Reply | Rendered | Look | Marked | Spoken, bool]]
LearnsFrom = Literal["demonstrations", "golden_steps"]


class SearchTool(Protocol):
    """A knowledge base as the driver calls it: many queries at once, results in their order."""

    def search(self, queries: Sequence[Any], k: int) -> list[list[Passage]]:
        """Returns up to k passages per query, best first. May raise; the driver turns that into failed calls."""
        ...


class Agent(abc.ABC):
    """A policy's way of working on one example. One instance serves all rollouts at once, so it holds no state of any.

    `run` is all that must be written. What else a run asks of an agent is below, with defaults: how its attempts can be forked,
    what it is compared with, how it is shown what to write. The fields of an agent that is a dataclass can be set in a
    configuration (`config.agent.settings`).

    Attributes:
      searches_field: the field that bounds how often it searches, where it has one.
    """

    searches_field: ClassVar[str] = "max_searches"

    @abc.abstractmethod
    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        """Works on one example and returns its episode, usually `chat.episode(answer=...)`."""

    @property
    def choices(self) -> RouteChoices | None:
        """How its policy writes the choice of a knowledge base, so that an attempt can be forked there; None: it can't."""
        return None

    @property
    def search_budget(self) -> int | None:
        """Searches that it can make on a question at most; None: that is not known."""
        return None

    @property
    def functions(self) -> tuple[dict[str, Any], ...]:
        """JSON schemas of the functions that its model's chat template shows; () for none."""
        return ()

    def told(self, schemas: Mapping[str, ToolSchema]) -> Agent:
        """The same agent with these functions, by knowledge base, where it shows any."""
        return self

    def recorded(self, recorded: RecordedRounds) -> Episode:
        """An attempt that some other program recorded, as this agent reads it: its turns, calls and answer, without tokens.

        Raises:
          ValueError: the agent has no way to read one.
        """
        raise ValueError(f"{type(self).__name__} reads no recorded rounds: write its recorded()")

    # --- what it is compared with ---

    def with_passages(self, k: int) -> Agent:
        """The same agent with `k` passages per search.

        Raises:
          ValueError: it is no dataclass with a field `k`.
        """
        if not dataclasses.is_dataclass(self) or "k" not in self.__dataclass_fields__:
            raise ValueError(f"{type(self).__name__} has no number of passages, k, to change (config.evaluation.k)")
        return dataclasses.replace(self, k=k)

    def with_searches(self, count: int) -> Agent:
        """The same agent with at most `count` searches on a question; of one that asks several knowledge bases at once, so many
        rounds. One without a field `searches_field`, such as one that searches once or never, stays as it is.
        """
        if dataclasses.is_dataclass(self) and self.searches_field in self.__dataclass_fields__:
            return dataclasses.replace(self, **{self.searches_field: count})
        return self

    def baselines(self, tools: Sequence[str]) -> dict[str, Agent]:
        """The same policy with choices taken away, by name, for the run's final table.

        By default, where there are several knowledge bases, `only_KB` for each, to which all searches go, and `random_kb`.

        Args:
          tools: names of the knowledge bases.
        """
        if len(tools) < 2:
            return {}
        agents: dict[str, Agent] = {f"only_{tool}": Rerouted(self, Always(tool)) for tool in tools}
        return {**agents, "random_kb": Rerouted(self, Drawn())}

    def vanilla_rag(self, tools: Sequence[str]) -> dict[str, Agent]:
        """The same policy given what its question finds: `vanilla_rag`, or `vanilla_rag_KB` for each of several knowledge
        bases; by default none."""
        return {}

    # --- how it is shown what to write, for supervised runs ---

    @property
    def learns_from(self) -> LearnsFrom | None:
        """What it can be shown: worked questions (`opening` and `pieces`), golden steps of them (`opening` and `step_pieces`),
        or nothing."""
        return None

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Its protocol's tags, for tokenizers that are trained for it; a tokenizer that has one as a special token reads it as
        that in observations, too."""
        return ()

    def opening(
        self, example: Example, tokenizer: Tokenizer, image_marker: str = "", room: int | None = None
    ) -> list[int]:
        """The ids of an example's prompt; documents that it would show beyond `room` tokens are left out, as in a rollout."""
        raise ValueError(
            f"{type(self).__name__} says that it can be shown how to work (learns_from): write its opening()"
        )

    def pieces(self, demonstration: Demonstration) -> Pieces:
        """A worked example after its opening."""
        raise ValueError(f"{type(self).__name__} says that it learns from demonstrations: write its pieces()")

    def recorded_pieces(self, recorded: RecordedRounds) -> Pieces:
        """Recorded rounds after their opening: what was written is learnt, what followed comes as a user's message. What
        follows the last round is left out.

        Raises:
          ValueError: a round can't be learnt from; says which, and why.
        """
        pieces: Pieces = []
        for number, item in enumerate(recorded.rounds, 1):
            pieces.append((item.text, True))
            if number < len(recorded.rounds):
                pieces.append((Reply(item.pieces), False))
        return pieces

    def step_pieces(self, example: Example) -> Pieces:
        """A golden step after its opening."""
        raise ValueError(f"{type(self).__name__} says that it learns from golden steps: write its step_pieces()")


@dataclasses.dataclass(frozen=True)
class Rerouted(Agent):
    """An agent whose searches go where a routing sends them, whatever it names; all else is its own."""

    agent: Agent
    routing: Routing

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        return await self.agent.run(example, llm, tools.rerouted(self.routing))

    @property
    def search_budget(self) -> int | None:
        """The agent's."""
        return self.agent.search_budget

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The agent's."""
        return self.agent.special_tokens


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
        """Index of this rollout among those of its example."""
        return self._rollout.sample

    @property
    def image_marker(self) -> str:
        """What stands for an image in text; "" for a model that sees none."""
        images = self._rollout.engine.images
        return "" if images is None else self.tokenizer.decode(images.marker)

    def frame(self, picture: ImageSource) -> Size:
        """(width, height) in pixels at which the policy sees a picture; boxes that it writes are in this frame.

        Raises:
          ValueError: the picture can't be used, or the policy sees none.
        """
        images = self._rollout.engine.images
        if images is None:
            raise ValueError("the policy sees no images; use a vision-language model")
        return images.frame(picture)

    def room(self, prompt: Prompt, images: Sequence[ImageSource] = ()) -> int:
        """Tokens that a conversation would have left after this prompt; less than 1 where it does not fit."""
        engine = self._rollout.engine
        ids = prompt_ids(prompt, engine.tokenizer)
        return engine.max_length - len(ids) - expanded_tokens(engine.images, images)

    def conversation(self, prompt: Prompt, images: Sequence[ImageSource] = ()) -> Conversation:
        """Starts a conversation from text, token ids, or messages (rendered with the model's chat template).

        Args:
          images: what to see at each `image_marker` in the prompt, in order.

        Raises:
          DoesNotFit: the prompt fills the model's context; where the agent does not catch it, the episode ends unanswered.
          ValueError: an image can't be used (names the example).
        """
        conversation = Conversation(self._rollout, prompt, images)
        self._rollout.conversations.append(conversation)
        return conversation


class UnknownTool(KeyError):
    """There is no tool of the name that an agent asks for."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(name)
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f"did you mean {close[0]!r}? There are" if close else "there are"
        self.message = f"there is no tool {name!r}; {hint}: {', '.join(known) or 'none'} (config.knowledge names them)"

    def __str__(self) -> str:
        return self.message


class Tools(Mapping[str, "Tool"]):
    """The rollout's tools by name."""

    def __init__(self, rollout: Rollout, names: Sequence[str], routing: Routing | None = None) -> None:
        self._rollout = rollout
        self._tools = {name: Tool(rollout, name, self) for name in names}
        self._routing = routing
        self._searches = 0

    def rerouted(self, routing: Routing) -> Tools:
        """The same tools, of which this says at every search which one is asked."""
        return Tools(self._rollout, tuple(self), routing)

    def asked(self, name: str) -> str:
        """The tool that the next search goes to, where the agent searches with this one."""
        step, self._searches = self._searches, self._searches + 1
        if self._routing is None:
            return name
        return self._routing(name, tuple(self), self._rollout.example, self._rollout.sample, step)

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
        """Searches for a text, or for a picture in a TextAndImage; the driver batches it with everybody else's.

        Never raises: look at `call.error`.

        Args:
          pictures: wait for the passages' pictures where they have to be sent here. Without them `with_pictures` gives those of
            the passages that are to be shown.
        """
        name = self._tools.asked(self.name)
        call = await self._reply(self._ask(Request(name, query, k, "passages" if pictures else "listing")))
        self._record.append(call)
        return call

    async def with_pictures(self, call: Call, passages: Sequence[Passage]) -> Call:
        """A call of `search(.., pictures=False)` with the pictures of these of its passages; it takes that one's place in the
        record of its turn. Where a picture can't be had, that has failed."""
        wanted = [passage.id for passage in passages if not passage.image]
        if not wanted:
            return call
        shown = await self._reply(self._pictured(call, wanted))
        record = self._record
        place = next(i for i, one in enumerate(record) if one is call)
        record[place] = shown
        return shown

    @property
    def _record(self) -> list[Call]:
        """Where calls made now are noted."""
        return self._rollout.turns[-1].calls if self._rollout.turns else self._rollout.early

    async def _ask(self, request: Request) -> Call:
        return await self._rollout.wait_tool(self._rollout, request)

    async def _pictured(self, call: Call, wanted: Sequence[str]) -> Call:
        replies = await asyncio.gather(*(self._ask(Request(call.tool, id, 1, "pictures")) for id in wanted))
        seconds = call.seconds + sum(reply.seconds for reply in replies)
        if failed := [reply for reply in replies if reply.error is not None]:
            return dataclasses.replace(call, passages=(), error=failed[0].error, seconds=seconds)
        images = {passage.id: passage.image for reply in replies for passage in reply.passages}
        passages = [dataclasses.replace(one, image=images.get(one.id, one.image)) for one in call.passages]
        return dataclasses.replace(call, passages=tuple(passages), seconds=seconds)

    async def _reply(self, asked: Coroutine[Any, Any, Call]) -> Call:
        """What comes of a question to a tool, or came of it where this attempt goes on with another one's."""
        course = self._rollout.course
        if course.replaying:
            asked.close()
            call = course.replay()
            assert isinstance(call, Call), (
                "the agent searches where it wrote before: it does not act alike on equal turns"
            )
            return call
        place = course.begin()
        call = await asked
        course.finish(place, call)
        return call


def check_choices(agent: Agent, asked: str) -> None:
    """Raises ValueError if attempts of an agent can't be forked. `asked`: the setting that wants them to be."""
    if agent.choices is None:
        raise ValueError(
            f"{asked}: {type(agent).__name__} does not say how its policy writes the choice of a knowledge base "
            "(Agent.choices, for a SearchAgent Grammar.choices); take forks=0, or an agent that does"
        )
