"""R1-Router's agents (arXiv 2505.22095, sections 3.1 and 3.2): one works on a question step by step, one on a golden step.

The recipe "r1_router" is Step-GRPO if training questions are golden steps, and independent chats for all other questions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

from routerl_jax.agents.agent import (
    LLM,
    Agent,
    FixedRouting,
    LearnsFrom,
    Pieces,
    PolicyRouting,
    RandomRouting,
    Routing,
    Tools,
)
from routerl_jax.agents.chat import CallingAgent, fitting
from routerl_jax.agents.conversation import Conversation
from routerl_jax.agents.grammar import NO_TOOL, TOO_LONG, RouteChoices
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Action, Call, Episode, Example, Query, Turn
from routerl_jax.data.trajectories import Document, GoldenStep, document_of, golden_step
from routerl_jax.engine.streams import PromptTooLong
from routerl_jax.knowledge.query import with_picture
from routerl_jax.recipes.r1_router.steps import RouteCalls, StepCalls, StepPrompt, StepProtocol
from routerl_jax.recipes.recipe import RECIPES, TOOL_CALLS, AgentConfig, Recipe
from routerl_jax.recipes.search import StageSettings, stages_of

_ANSWER_OPENING = "<answer>"
_UNKNOWN = "not known"  # stands for the answer to a sub-question if no answer of the policy could be read


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepAgent(CallingAgent):
    """Works on a single golden step (Step-GRPO, equation 11): one chat with the gold steps before it, and one turn.

    The episode's answer is the sub-question of a route, or the answer.

    Attributes:
      protocol: the tags, or tool calls, and the prompts.
      max_turn_tokens: most tokens of a turn; documents leave this much room for it.
      max_observation_tokens: most tokens of the documents of a chat, in whole documents; 0: as many as there is room for.
      instruct: explain the task to the model (for pretrained models).
      prompt_suffix: text that begins the policy's turns, such as `<think>`.
    """

    form_field: ClassVar[str] = "protocol"

    protocol: StepProtocol
    max_turn_tokens: int = 512
    max_observation_tokens: int = 0
    instruct: bool = False
    prompt_suffix: str = ""

    async def _run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        step = golden_step(example)
        if step is None:
            raise ValueError("it is no golden step; give trajectories (config.data.train=trajectories:FILE)")
        prompt = self._golden(step, example, partial(self._room, example, llm))
        chat, turn = await self._turn(prompt, example, llm)
        assert turn.action is not None
        output = turn.action.query if turn.action.kind == "search" else turn.action.answer
        return chat.episode(answer=output or None, truncated=turn.stop_reason == "length")

    @property
    def choices(self) -> RouteChoices | None:
        """The routing choices of the protocol."""
        return self.protocol.choices

    def baselines(self, tools: Sequence[str]) -> dict[str, Agent]:
        """None, because a golden step needs no search."""
        return {}

    @property
    def learns_from(self) -> LearnsFrom:
        return "golden_steps"

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return self.protocol.special_tokens

    def opening(
        self, example: Example, tokenizer: Tokenizer, image_marker: str = "", room: int | None = None
    ) -> list[int]:
        """The token ids of a golden step's prompt, with all its documents, or as many as a rollout shows in `room` tokens.

        Raises:
          ValueError: the example is no golden step.
        """
        step = golden_step(example)
        if step is None:
            raise ValueError(f"example {example.id!r} is no golden step")

        def prompt_ids(prompt: StepPrompt) -> list[int]:
            return self._prompt_ids(prompt, example, tokenizer, image_marker)

        room_after = None if room is None else lambda prompt: room - len(prompt_ids(prompt))
        prompt = self._golden(step, example, room_after)
        return [*prompt_ids(prompt), *tokenizer.encode(self.prompt_suffix)]

    def step_pieces(self, example: Example) -> Pieces:
        step = golden_step(example)
        assert step is not None
        written = self.spoken(lambda agent: agent.protocol.write_golden(step).removeprefix(self.prompt_suffix))
        return [(written, True)]

    def _prompt_ids(self, prompt: StepPrompt, example: Example, tokenizer: Tokenizer, image_marker: str) -> list[int]:
        marks = image_marker * len(example.images)
        return self.protocol.opening(prompt, tokenizer, instruct=self.instruct, marks=marks)

    async def _turn(
        self, prompt: StepPrompt, example: Example, llm: LLM, *, forced: str = "", max_tokens: int = 0
    ) -> tuple[Conversation, Turn]:
        """Starts a chat, and reads the policy's turn in it. `forced` begins the turn instead of `prompt_suffix`.

        Raises:
          PromptTooLong: there is no room for a turn.
        """
        chat = llm.conversation(self._prompt_ids(prompt, example, llm.tokenizer, llm.image_marker), example.images)
        if begun := forced or self.prompt_suffix:
            if chat.tokens_of(begun) >= chat.room:
                raise PromptTooLong(f"the prompt of example {example.id!r} leaves no room for a turn")
            chat.force(begun)
        turn = await chat.generate(
            stop=self.protocol.stops(prompt), max_tokens=min(max_tokens or self.max_turn_tokens, chat.room)
        )
        chat.close()
        turn.asked = prompt.asked
        turn.action, formed = self.protocol.read(prompt, turn.forced + turn.text, bool(forced))
        turn.well_formed = formed and self.whole(turn)
        return chat, turn

    def _room(self, example: Example, llm: LLM, prompt: StepPrompt) -> int:
        """Tokens that the rollout's conversation has left after this chat."""
        return llm.room(self._prompt_ids(prompt, example, llm.tokenizer, llm.image_marker), example.images)

    def _golden(self, step: GoldenStep, example: Example, room: Callable[[StepPrompt], int] | None) -> StepPrompt:
        """A golden step's prompt, with the documents that fit; with all of them if `room` is None."""
        if step.kind != "answer" or room is None:
            return self.protocol.golden(example.question, step)
        return self._fitting(partial(self.protocol.answer, step.query), step.documents, room)

    def _fitting(
        self,
        prompt_with: Callable[[Sequence[Document], str], StepPrompt],
        documents: Sequence[Document],
        room: Callable[[StepPrompt], int],
    ) -> StepPrompt:
        """The prompt with as many documents, best first, as fit and leave room for a turn, or with the first one's beginning.

        Args:
          prompt_with: (documents, reason why there are none) -> prompt.
          room: prompt -> tokens that are left after it.
        """
        bare = prompt_with((), "")
        most = room(bare)
        least = max(self.max_turn_tokens, most - (self.max_observation_tokens or most))
        shown = fitting(documents, lambda subset: room(prompt_with(subset, "")) >= least)
        if shown or not documents:
            return prompt_with(shown, "")
        too_long = prompt_with((), TOO_LONG)
        return too_long if room(too_long) >= self.max_turn_tokens else bare


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepwiseAgent(StepAgent):
    """Works on a question in independent chats: alternating routes and answers, then the final answer (equations 1 to 8).

    Only sub-questions and their answers are carried from one chat to the next. A golden step is handled by `StepAgent`.

    Attributes:
      max_searches: most sub-questions (n of equation 2).
      k: passages per search.
      attempts: most chats for one route or answer; the first one that can be read counts. In the last chat for an answer,
        `<answer>` is begun for the policy. If no route can be read, the final answer follows.
      answer_tokens: most tokens of an answer begun for the policy.
      sees: knowledge bases that get the question's picture, if there is one, besides the sub-question.
      routing: chooses the knowledge base that is called; the policy does, except in baselines.
      beyond: the further search if the policy would stop before the budget is spent. None: none, it stops. "own": the agent
        begins a sub-question and the policy completes it (a policy that calls functions gets no function to stop with). If the
        policy writes none again, the question itself is sent to the last retriever that it named. A routing: the question
        itself is sent to the knowledge base that the routing chooses.
    """

    max_searches: int = 3
    k: int = 5
    attempts: int = 3
    answer_tokens: int = 64
    sees: tuple[str, ...] = ("text_image",)
    routing: Routing = PolicyRouting()
    beyond: Routing | Literal["own"] | None = None

    async def _run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        if golden_step(example) is not None:
            return await super()._run(example, llm, tools)
        chats: list[Conversation] = []
        history = await self._gather(example, llm, tools, chats)
        answer = await self._answer(self.protocol.final(example.question, history), example, llm, chats)
        episode = chats[-1].episode(answer=answer)
        return dataclasses.replace(episode, truncated=answer is None and episode.turns[-1].stop_reason == "length")

    @property
    def search_budget(self) -> int:
        """`max_searches`."""
        return self.max_searches

    @property
    def tools(self) -> tuple[str, ...]:
        """Names of the knowledge bases."""
        return self.protocol.tools

    def baselines(self, tools: Sequence[str]) -> dict[str, Agent]:
        """The baselines of this agent:

        - with several knowledge bases, `only_KB` for each and `random_kb`; with one, `vanilla_rag`;
        - `full_budget`: always the largest number of searches, where the policy writes the further ones (it only can't stop);
        - `full_budget_random`: the same, where the further ones ask a random knowledge base for the question itself;
        - `no_search`.

        A query depends on the knowledge base that it goes to (`query`), so the agent has its own routing.
        """
        agents: dict[str, Agent] = {
            f"only_{tool}": dataclasses.replace(self, routing=FixedRouting(tool)) for tool in tools
        }
        agents["random_kb"] = dataclasses.replace(self, routing=RandomRouting())
        return {
            **(agents if len(tools) > 1 else self.vanilla_rag(tools)),
            "full_budget": dataclasses.replace(self, beyond="own"),
            "full_budget_random": dataclasses.replace(self, beyond=RandomRouting()),
            "no_search": dataclasses.replace(self, max_searches=0),
        }

    def vanilla_rag(self, tools: Sequence[str]) -> dict[str, Agent]:
        several = len(tools) > 1
        return {
            f"vanilla_rag_{tool}" if several else "vanilla_rag": OneSearch(**self._fields, tool=tool) for tool in tools
        }

    @property
    def _fields(self) -> dict[str, Any]:
        """Values of the fields that every stepwise agent has. Further fields of subclasses are left out."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(StepwiseAgent)}

    async def _gather(
        self, example: Example, llm: LLM, tools: Tools, chats: list[Conversation]
    ) -> list[tuple[str, str]]:
        """Sub-questions with their answers, until none is needed or the budget is spent."""
        history: list[tuple[str, str]] = []
        last_tool = self.tools[0]  # by the policy, in its last search
        for step in range(self.max_searches):
            action = await self._route(example, history, llm, chats)
            if not _searches(action):
                action = await self._beyond(example, history, llm, chats, last_tool)
            if action is None:
                break
            last_tool = action.tool
            tool = self.routing(action.tool, self.tools, example, llm.sample, step)
            call = await tools[tool].search(self.query(tool, action.query, example), self.k)
            answer = await self._answer(self.read(action.query, call, example, llm), example, llm, chats)
            history.append((action.query, answer or _UNKNOWN))
        return history

    def query(self, tool: str, text: str, example: Example) -> Query:
        """The query for a knowledge base: the text, with the question's picture if the knowledge base sees it."""
        return with_picture(text, example.images) if tool in self.sees else text

    def read(self, query: str, call: Call, example: Example, llm: LLM, *, last: bool = False) -> StepPrompt:
        """The prompt to answer a sub-question from the passages found; with `last`, the question itself."""
        documents = [document_of(call.tool, passage) for passage in call.passages]
        failure = f"The search failed: {call.error}" if call.error is not None else ""
        prompt = self.protocol.direct if last else self.protocol.answer
        if failure:
            return prompt(query, (), failure)
        return self._fitting(partial(prompt, query), documents, partial(self._room, example, llm))

    async def _route(
        self, example: Example, history: Sequence[tuple[str, str]], llm: LLM, chats: list[Conversation]
    ) -> Action | None:
        prompt = request = self.protocol.route(example.question, history)
        for _ in range(self.attempts):
            chat, turn = await self._turn(request, example, llm)
            chats.append(chat)
            assert turn.action is not None
            if turn.action.kind != "invalid":
                return turn.action
            request = self.protocol.again(prompt, turn.action.error)
        return None

    async def _beyond(
        self, example: Example, history: Sequence[tuple[str, str]], llm: LLM, chats: list[Conversation], last_tool: str
    ) -> Action | None:
        """The search to make if the policy would stop; None if it stops."""
        if self.beyond is None:
            return None
        if self.beyond != "own":
            tool = self.beyond(NO_TOOL, self.tools, example, llm.sample, len(history))
            return Action(kind="search", tool=tool, query=example.question)
        agent, openings = self, ("",)
        if isinstance(self.protocol, StepCalls):
            agent = dataclasses.replace(self, protocol=self.protocol.unending())
        else:
            question = llm.tokenizer.plain(example.question)
            openings = (self.protocol.route_opening(), self.protocol.route_opening(question))
        prompt = agent.protocol.route(example.question, history)
        for opening in openings:
            chat, turn = await agent._turn(prompt, example, llm, forced=opening)
            chats.append(chat)
            if _searches(turn.action):
                return turn.action
        return Action(kind="search", tool=last_tool, query=example.question)

    async def _answer(self, prompt: StepPrompt, example: Example, llm: LLM, chats: list[Conversation]) -> str | None:
        request = prompt
        for attempt in range(self.attempts):
            if 0 < attempt == self.attempts - 1:
                chat, turn = await self._turn(
                    prompt, example, llm, forced=_ANSWER_OPENING, max_tokens=self.answer_tokens
                )
            else:
                chat, turn = await self._turn(request, example, llm)
            chats.append(chat)
            assert turn.action is not None
            if turn.action.kind == "answer":
                return turn.action.answer
            request = self.protocol.again(prompt, turn.action.error)
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneSearch(StepwiseAgent):
    """Retrieve, then read, in one chat: it has the passages found, and asks for the final answer."""

    tool: str

    async def _run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        call = await tools[self.tool].search(self.query(self.tool, example.question, example), self.k)
        chats: list[Conversation] = []
        answer = await self._answer(self.read(example.question, call, example, llm, last=True), example, llm, chats)
        return chats[-1].episode(answer=answer)


def _searches(action: Action | None) -> bool:
    return action is not None and action.kind == "search" and action.tool != NO_TOOL


@RECIPES.register("r1_router")
def r1_router(agent: AgentConfig, stages: Mapping[str, StageSettings], tools: Sequence[str], normalizer: str) -> Recipe:
    """Builds the recipe from its configuration. (Grammar "r1_router" with recipe "search" is one growing conversation.)

    Raises:
      ValueError: another grammar than `tool_calls`, a prompt or `on_invalid` is set, which this recipe does not have; `sees`
        names no knowledge base; or a reward term is unknown.
    """
    if agent.grammar not in ("", "r1_router", TOOL_CALLS):
        raise ValueError(
            f"config.agent.grammar={agent.grammar!r}: config.recipe='r1_router' has tags and chats of its own; leave "
            f"it empty, or set config.recipe='search', or take {TOOL_CALLS!r}"
        )
    if agent.prompt:
        raise ValueError("config.agent.prompt: config.recipe='r1_router' has three prompts of its own; leave it empty")
    if agent.on_invalid != "remind":
        raise ValueError(
            f"config.agent.on_invalid={agent.on_invalid!r}: config.recipe='r1_router' asks again for what can't be read; leave "
            "on_invalid='remind'"
        )
    if unknown := [name for name in agent.sees if name not in tools]:
        raise ValueError(f"config.agent.sees: {unknown[0]!r} is no knowledge base; there are: {', '.join(tools)}")
    protocol = StepProtocol(tools=tuple(tools))
    if agent.grammar == TOOL_CALLS:
        protocol = StepCalls(tools=tuple(tools), routes=RouteCalls(tools=tuple(tools)))
    return Recipe(
        agent=StepwiseAgent(
            protocol=protocol,
            max_searches=agent.max_searches,
            k=agent.k,
            max_turn_tokens=agent.max_turn_tokens,
            max_observation_tokens=agent.max_observation_tokens,
            answer_tokens=agent.answer_tokens,
            instruct=agent.instruct,
            prompt_suffix=agent.prompt_suffix,
            sees=tuple(agent.sees) or StepwiseAgent.sees,
        ),
        stages=stages_of(stages, normalizer),
        headline=("f1_recall",),
    )
