"""R1-Router's agents (arXiv 2505.22095, sections 3.1 and 3.2): one works on a question step by step, one on a golden step.

The recipe "r1_router" is Step-GRPO if training questions are golden steps, and independent chats for all other questions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal

from routerl_jax.agents.agent import (
    LLM,
    Agent,
    CallingAgent,
    FixedRouting,
    LearnsFrom,
    Pieces,
    RandomRouting,
    Routing,
    Tools,
)
from routerl_jax.agents.chat import fitting
from routerl_jax.agents.conversation import Conversation
from routerl_jax.agents.grammar import NO_TOOL, TOO_LONG
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Action, Call, Episode, Example, Query, Turn
from routerl_jax.data.trajectories import Document, GoldenStep, document_of, golden_step
from routerl_jax.engine.policy import PromptTooLong
from routerl_jax.knowledge.base import with_picture
from routerl_jax.recipes.r1_router.steps import History, RouteCalls, StepPrompt, StepProtocol
from routerl_jax.recipes.recipe import TOOL_CALLS, AgentConfig, Recipe
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

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        step, chats = golden_step(example), StepChats(self, example, llm)
        if step is None:
            raise ValueError("it is no golden step; give trajectories (config.data.train=trajectories:FILE)")
        turn, action = await chats.turn(chats.agent.golden(step, example, chats.room))
        output = action.query if action.kind == "search" else action.answer
        return chats.latest.episode(answer=output or None, truncated=turn.stop_reason == "length")

    def baselines(self, tools: Sequence[str]) -> dict[str, Agent]:
        """None, because a golden step needs no search."""
        return {}

    @property
    def learns_from(self) -> LearnsFrom:
        return "golden_steps"

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
            return self.prompt_ids(prompt, example, tokenizer, image_marker)

        room_after = None if room is None else lambda prompt: room - len(prompt_ids(prompt))
        prompt = self.golden(step, example, room_after)
        return [*prompt_ids(prompt), *tokenizer.encode(self.prompt_suffix)]

    def step_pieces(self, example: Example) -> Pieces:
        step = golden_step(example)
        assert step is not None
        written = self.spoken(lambda agent: agent.protocol.write_golden(step).removeprefix(self.prompt_suffix))
        return [(written, True)]

    def prompt_ids(self, prompt: StepPrompt, example: Example, tokenizer: Tokenizer, image_marker: str) -> list[int]:
        """The token ids of a chat, whose request stands after the question's pictures."""
        marks = image_marker * len(example.images)
        return self.protocol.opening(prompt, tokenizer, instruct=self.instruct, marks=marks)

    def golden(self, step: GoldenStep, example: Example, room: Callable[[StepPrompt], int] | None) -> StepPrompt:
        """A golden step's prompt, with the documents that fit; with all of them if `room` is None."""
        if step.kind != "answer" or room is None:
            return self.protocol.golden(example.question, step)
        return self.fitted(partial(self.protocol.answer, step.query), step.documents, room)

    def fitted(
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


class StepChats:
    """The independent chats of an attempt, each with one turn.

    Attributes:
      agent: the agent in the form of the model.
      latest: the latest chat, which makes the episode.
    """

    latest: Conversation

    def __init__(self, agent: StepAgent, example: Example, llm: LLM) -> None:
        self.agent, self.example, self._llm = agent.of(llm.tokenizer), example, llm

    async def turn(self, prompt: StepPrompt, *, forced: str = "", max_tokens: int = 0) -> tuple[Turn, Action]:
        """The policy's turn in a chat, and its action. `forced` begins the turn instead of `prompt_suffix`.

        Raises:
          PromptTooLong: there is no room for a turn.
        """
        agent, example, form = self.agent, self.example, prompt.form
        opening = agent.prompt_ids(prompt, example, self._llm.tokenizer, self._llm.image_marker)
        self.latest = chat = self._llm.conversation(opening, example.images)
        if begun := forced or agent.prompt_suffix:
            if chat.tokens_of(begun) >= chat.room:
                raise PromptTooLong(f"the prompt of example {example.id!r} leaves no room for a turn")
            chat.force(begun)
        turn = await chat.generate(stop=form.stops, max_tokens=min(max_tokens or agent.max_turn_tokens, chat.room))
        chat.close()
        turn.asked, text = prompt.asked, turn.forced + turn.text
        turn.action = form.parse(text)
        if agent.functions:  # a message ends with the template's own token
            turn.well_formed = form.well_formed(text) and turn.stop_reason == "eos"
        else:  # the policy could not write a thought before an answer that was begun for it
            turn.well_formed = form.well_formed(
                f"<think></think>{text}" if forced and prompt.asked != "route" else text
            )
        return turn, turn.action

    def room(self, prompt: StepPrompt) -> int:
        """Tokens that the rollout's conversation has left after this prompt."""
        llm, example = self._llm, self.example
        return llm.room(self.agent.prompt_ids(prompt, example, llm.tokenizer, llm.image_marker), example.images)

    async def route(self, history: History, attempts: int) -> Action | None:
        """The first route that can be read; None if none can."""
        prompt = request = self.agent.protocol.route(self.example.question, history)
        for _ in range(attempts):
            _, action = await self.turn(request)
            if action.kind != "invalid":
                return action
            request = self.agent.protocol.again(prompt, action.error)
        return None

    async def further_route(self, history: History) -> Action | None:
        """The route of a policy that would stop, and may not; None if it writes none."""
        prompt, openings = self.agent.protocol.unending().route(self.example.question, history), ("",)
        if not self.agent.functions:  # the sub-question is begun, then its retriever
            begins = "<think></think>\n<sub-question>"
            question = self._llm.tokenizer.plain(self.example.question)
            openings = (begins, f"{begins}{question}</sub-question>\n<ret>")
        for opening in openings:
            _, action = await self.turn(prompt, forced=opening)
            if _searches(action):
                return action
        return None

    async def answer(self, prompt: StepPrompt, attempts: int, answer_tokens: int) -> str | None:
        """The first answer that can be read. In the last chat of several, it is begun for the policy."""
        request = prompt
        for attempt in range(attempts):
            if 0 < attempt == attempts - 1:
                _, action = await self.turn(prompt, forced=_ANSWER_OPENING, max_tokens=answer_tokens)
            else:
                _, action = await self.turn(request)
            if action.kind == "answer":
                return action.answer
            request = self.agent.protocol.again(prompt, action.error)
        return None


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
      routing: chooses the knowledge base that is called, in baselines; None: the policy does.
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
    routing: Routing | None = None
    beyond: Routing | Literal["own"] | None = None

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        if golden_step(example) is not None:
            return await super().run(example, llm, tools)
        chats = StepChats(self, example, llm)
        history: list[tuple[str, str]] = []  # sub-questions with their answers
        last_tool = self.tools[0]  # by the policy, in its last search
        for step in range(self.max_searches):
            action = await chats.route(history, self.attempts)
            if not _searches(action):
                action = await self.further(chats, history, last_tool, llm.sample)
            if action is None:
                break
            last_tool = action.tool
            tool = action.tool
            if self.routing is not None:
                tool = self.routing(tool, self.tools, example, llm.sample, step)
            call = await tools[tool].search(self.query(tool, action.query, example), self.k)
            answer = await chats.answer(self.read(action.query, call, chats), self.attempts, self.answer_tokens)
            history.append((action.query, answer or _UNKNOWN))
        answer = await chats.answer(self.protocol.final(example.question, history), self.attempts, self.answer_tokens)
        episode = chats.latest.episode(answer=answer)
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
        name, fields = "vanilla_rag_{}" if len(tools) > 1 else "vanilla_rag", self.fields_of(StepwiseAgent)
        return {name.format(tool): OneSearch(**fields, tool=tool) for tool in tools}

    def query(self, tool: str, text: str, example: Example) -> Query:
        """The query for a knowledge base: the text, with the question's picture if the knowledge base sees it."""
        return with_picture(text, example.images) if tool in self.sees else text

    def read(self, query: str, call: Call, chats: StepChats, *, last: bool = False) -> StepPrompt:
        """The prompt to answer a sub-question from the passages found; with `last`, the question itself."""
        prompt = self.protocol.direct if last else self.protocol.answer
        if call.error is not None:
            return prompt(query, (), f"The search failed: {call.error}")
        documents = [document_of(call.tool, passage) for passage in call.passages]
        return self.fitted(partial(prompt, query), documents, chats.room)

    async def further(self, chats: StepChats, history: History, last_tool: str, sample: int) -> Action | None:
        """The search to make if the policy would stop (`beyond`); None if it stops."""
        if self.beyond is None:
            return None
        tool, question = last_tool, chats.example.question
        if self.beyond != "own":
            tool = self.beyond(NO_TOOL, self.tools, chats.example, sample, len(history))
        elif action := await chats.further_route(history):
            return action
        return Action(kind="search", tool=tool, query=question)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneSearch(StepwiseAgent):
    """Retrieve, then read, in one chat: it has the passages found, and asks for the final answer."""

    tool: str

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        call = await tools[self.tool].search(self.query(self.tool, example.question, example), self.k)
        chats = StepChats(self, example, llm)
        prompt = self.read(example.question, call, chats, last=True)
        answer = await chats.answer(prompt, self.attempts, self.answer_tokens)
        return chats.latest.episode(answer=answer)


def _searches(action: Action | None) -> bool:
    return action is not None and action.kind == "search" and action.tool != NO_TOOL


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
    calls = None
    if agent.grammar == TOOL_CALLS:
        calls = RouteCalls(tools=tuple(tools), raw_results=agent.raw_results)
    return Recipe(
        agent=StepwiseAgent(
            protocol=StepProtocol(tools=tuple(tools), calls=calls, raw_results=agent.raw_results),
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
