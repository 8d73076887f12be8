"""The search agent: think, choose a knowledge base, search, read, and answer; the loop that most recipes share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from routerl_jax.agents.agent import LLM, Agent, CallingAgent, LearnsFrom, Pieces, Tools
from routerl_jax.agents.chat import Chat, ChatRules
from routerl_jax.agents.grammar import NO_TOOL, Grammar, opening_ids
from routerl_jax.agents.observation import Look, Reply, Spoken
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Action, Call, Demonstration, DemonstrationStep, Episode, Example, Observation
from routerl_jax.models.regions import RegionRule

OnInvalid = Literal["remind", "end"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchAgent(CallingAgent):
    """Runs a policy through search turns to an answer.

    Attributes:
      grammar: how actions and observations are written.
      max_searches: turns that may search or look closer (invalid turns count). After them comes the last turn, in the form that
        the grammar gives it.
      k: passages per search.
      on_invalid: what happens after a turn with neither a query nor an answer. "remind": the policy gets a reminder and another
        turn. "end": the episode ends without an answer.
      max_turn_tokens: most tokens of one turn.
      max_observation_tokens: most tokens that the result of a search may take. Passages are shown whole; only if the first one
        does not fit is it cut, after a word. 0: as many whole passages as there is room for.
      answer_tokens: tokens kept free for the last turn. When no more than this is left, the last turn comes at once.
      prompt: text with `{question}`, or None for the default of the model (chat template with instructions if there is
        one and `instruct`, else `Question: ...` alone).
      instruct: explain the protocol to the model (for pretrained models).
      prompt_suffix: text that begins the policy's first turn, such as `<think>`.
      regions: how the boxes that the policy writes are read, if its grammar has actions of kind `region`.
    """

    grammar: Grammar
    max_searches: int = 4
    k: int = 3
    on_invalid: OnInvalid = "remind"
    max_turn_tokens: int = 512
    max_observation_tokens: int = 0
    answer_tokens: int = 64
    prompt: str | None = None
    instruct: bool = False
    prompt_suffix: str = ""
    regions: RegionRule = RegionRule()

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        chat = self.begin(example, llm)
        for _ in range(self.max_searches):
            action = await chat.act()
            if action is None:
                break
            if action.kind == "answer":
                return chat.episode(answer=action.answer)
            if chat.turn.stop_reason == "eos" and not self.functions:
                return chat.episode(answer=None)
            if action.tool == NO_TOOL:
                break
            if action.kind == "region" and (crop := chat.look(chat.turn, self.regions)) is not None:
                chat.tell(chat.protocol.closer(crop))
            elif action.kind == "search":
                await self.show(await tools[action.tool].search(action.query, self.k), chat)
            elif self.on_invalid == "end":
                return chat.episode(answer=None, truncated=chat.turn.stop_reason == "length")
            else:
                chat.remind()
        return await chat.final_answer()

    async def show(self, call: Call, chat: Chat) -> bool:
        """Shows what a search found (`Chat.show`); for subclasses that measure or change it. False if nothing has room."""
        return await chat.show(call) is not None

    @property
    def rules(self) -> ChatRules:
        """Those of its fields and its grammar."""
        return ChatRules(
            protocol=self.grammar,
            role="tool" if self.functions else None,
            max_turn_tokens=self.max_turn_tokens,
            max_observation_tokens=self.max_observation_tokens,
            answer_tokens=self.answer_tokens,
            opening=self.last_opening,
            last_stops=self.grammar.stops,
            judges_begun=True,
        )

    @property
    def last_opening(self) -> str:
        """Text with which the last turn is begun for the policy; "" if the policy writes all of it."""
        return self.grammar.answer_opening if self.grammar.forces_answer else ""

    @property
    def search_budget(self) -> int:
        """`max_searches`."""
        return self.max_searches

    def baselines(self, tools: Sequence[str]) -> dict[str, Agent]:
        """The usual baselines if there are several knowledge bases, else `vanilla_rag`; and in both cases `no_search`."""
        no_search = NoSearch(**{**self.fields_of(SearchAgent), "max_searches": 0})
        return {**(super().baselines(tools) or self.vanilla_rag(tools)), "no_search": no_search}

    def vanilla_rag(self, tools: Sequence[str]) -> dict[str, Agent]:
        """One `VanillaRAG` per knowledge base."""
        name, fields = "vanilla_rag_{}" if len(tools) > 1 else "vanilla_rag", self.fields_of(SearchAgent)
        return {name.format(tool): VanillaRAG(**fields, tool=tool) for tool in tools}

    @property
    def learns_from(self) -> LearnsFrom:
        """Demonstrations."""
        return "demonstrations"

    def opening(
        self, example: Example, tokenizer: Tokenizer, image_marker: str = "", room: int | None = None
    ) -> list[int]:
        """The token ids of an example's prompt. An `image_marker` per image stands before the question.

        The prompt shows no documents, so `room` (tokens that the conversation may take) changes nothing.
        """
        question = image_marker * len(example.images) + tokenizer.plain(example.question)
        instructions = self.grammar.instructions() if self.instruct else None
        if functions := self.functions:
            self.of(tokenizer)  # refuses a model without such a form
            request = (self.prompt or "{question}").replace("{question}", question)
            return opening_ids(tokenizer, request, instructions, functions, self.prompt_suffix)
        if self.prompt is not None:
            return tokenizer.encode_prompt(self.prompt.replace("{question}", question) + self.prompt_suffix)
        request = question if self.instruct else f"Question: {question}"
        return opening_ids(tokenizer, request, instructions, suffix=self.prompt_suffix)

    def pieces(self, demonstration: Demonstration) -> Pieces:
        """The search turns of a demonstration with their observations, and its answer turn."""
        pieces: Pieces = []
        for step in demonstration.steps:
            pieces += [(self._written(step), True), (self._observation_piece(step), False)]
        answer = self.grammar.write_answer(demonstration.thought, demonstration.answer)
        if demonstration.forced and (opening := self.last_opening):
            pieces.append((opening, False))
            answer = answer[answer.index(opening) + len(opening) :]
        return [*pieces, (self.spoken(lambda _: answer), True)]

    def _written(self, step: DemonstrationStep) -> str | Spoken:
        """A turn with a search or a closer look."""
        if step.box:
            return self.spoken(lambda agent: agent.grammar.write_look(step.thought, step.box))
        return self.spoken(lambda agent: agent.grammar.write_search(step.thought, step.query, step.tool))

    def _observation_piece(self, step: DemonstrationStep) -> Observation | Reply | Look:
        """The observation that follows such a turn."""
        if step.box:
            return Look(
                box=step.box, rule=self.regions, render=lambda crop: self.rules.framed(self.grammar.closer(crop))
            )
        call = Call(tool=step.tool, query=step.query, passages=step.passages)
        return self.rules.framed(self.grammar.observation(call, step.passages))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoSearch(SearchAgent):
    """An agent that never searches. The answer is always begun for the policy, because otherwise it would write a search."""

    max_searches: int = 0

    @property
    def last_opening(self) -> str:
        return self.grammar.answer_opening


@dataclasses.dataclass(frozen=True, kw_only=True)
class VanillaRAG(NoSearch):
    """Retrieve, then read, in one conversation. The agent writes the search turn in place of the policy."""

    tool: str

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        chat = self.begin(example, llm)
        search = chat.protocol.write_search("", llm.tokenizer.plain(example.question), self.tool)
        if chat.tokens_of(search) <= chat.room - chat.reserve:
            turn = chat.write(search)
            turn.action = Action(kind="search", tool=self.tool, query=example.question)
            await self.show(await tools[self.tool].search(example.question, self.k), chat)
        return await chat.final_answer(truncated=False)
