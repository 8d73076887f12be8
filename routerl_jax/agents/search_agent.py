"""The search agent: think, choose a knowledge base, search, read, and answer; the loop that most recipes share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

from routerl_jax.agents.agent import LLM, Agent, LearnsFrom, Pieces, Tools
from routerl_jax.agents.chat import CallingAgent
from routerl_jax.agents.conversation import Conversation
from routerl_jax.agents.grammar import NO_TOOL, TOO_LONG, Grammar, RouteChoices
from routerl_jax.agents.observation import Look, Reply, Spoken
from routerl_jax.core.text import split_thoughts
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import (
    Action,
    Call,
    Demonstration,
    DemonstrationStep,
    Episode,
    Example,
    Message,
    Observation,
    Turn,
)
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

    async def _run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        chat = llm.conversation(self.opening(example, llm.tokenizer, llm.image_marker), example.images)
        reserve = self.reserve(chat)
        for _ in range(self.max_searches):
            room = chat.room - reserve
            if room < 1:
                return await self.final_answer(chat, reserve, truncated=True)
            turn = await chat.generate(stop=self.grammar.stops, max_tokens=min(self.max_turn_tokens, room))
            action = self._read(turn)
            if action.kind == "answer":
                return chat.episode(answer=action.answer)
            if turn.stop_reason == "eos" and not self.functions:
                return chat.episode(answer=None)
            if action.tool == NO_TOOL:
                break
            crop = chat.look(turn, self.regions) if action.kind == "region" else None
            action = turn.action or action  # a box may mark no region
            if action.kind == "invalid" and self.on_invalid == "end":
                return chat.episode(answer=None, truncated=turn.stop_reason == "length")
            if crop is not None:
                shown = self.say(chat, self.grammar.closer(crop), reserve)
            elif action.kind == "invalid":
                shown = self.say(chat, self.grammar.reminder(action.error), reserve)
            else:
                shown = await self.show(await tools[action.tool].search(action.query, self.k), chat, reserve)
            if not shown:
                return await self.final_answer(chat, reserve, truncated=True, unanswered=True)
        return await self.final_answer(chat, reserve)

    def reserve(self, chat: Conversation) -> int:
        """Tokens kept for the last turn, and in a chat for the reply to a search whose result does not fit."""
        return self.answer_tokens + chat.tokens_of(self.last_opening) + self.note_tokens(chat)

    @property
    def last_opening(self) -> str:
        """Text with which the last turn is begun for the policy; "" if the policy writes all of it."""
        return self.grammar.answer_opening if self.grammar.forces_answer else ""

    @property
    def search_budget(self) -> int:
        """`max_searches`."""
        return self.max_searches

    @property
    def choices(self) -> RouteChoices | None:
        """The grammar's own."""
        return self.grammar.choices

    def baselines(self, tools: Sequence[str]) -> dict[str, Agent]:
        """The usual baselines if there are several knowledge bases, else `vanilla_rag`; and in both cases `no_search`."""
        no_search = NoSearch(**{**self._fields, "max_searches": 0})
        return {**(super().baselines(tools) or self.vanilla_rag(tools)), "no_search": no_search}

    def vanilla_rag(self, tools: Sequence[str]) -> dict[str, Agent]:
        """One `VanillaRAG` per knowledge base."""
        several = len(tools) > 1
        return {
            f"vanilla_rag_{tool}" if several else "vanilla_rag": VanillaRAG(**self._fields, tool=tool) for tool in tools
        }

    @property
    def _fields(self) -> dict[str, Any]:
        """Values of the fields that every search agent has. Further fields of subclasses are left out."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(SearchAgent)}

    @property
    def learns_from(self) -> LearnsFrom:
        """Demonstrations."""
        return "demonstrations"

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The grammar's own."""
        return self.grammar.special_tokens

    def opening(
        self, example: Example, tokenizer: Tokenizer, image_marker: str = "", room: int | None = None
    ) -> list[int]:
        """The token ids of an example's prompt. An `image_marker` per image stands before the question.

        The prompt shows no documents, so `room` (tokens that the conversation may take) changes nothing.
        """
        question = image_marker * len(example.images) + tokenizer.plain(example.question)
        if functions := self.functions:
            self.of(tokenizer)  # refuses a model without such a form
            asked = Message(role="user", content=(self.prompt or "{question}").replace("{question}", question))
            instructions = [Message(role="system", content=self.grammar.instructions())] if self.instruct else []
            return [*tokenizer.chat([*instructions, asked], tools=functions), *tokenizer.encode(self.prompt_suffix)]
        if self.prompt is not None:
            return tokenizer.encode_prompt(self.prompt.replace("{question}", question) + self.prompt_suffix)
        if not self.instruct:
            return tokenizer.encode_prompt(f"Question: {question}\n{self.prompt_suffix}")
        if not tokenizer.instructs_in_chats:
            text = f"{self.grammar.instructions()}\n\nUser: {question}\nAssistant: {self.prompt_suffix}"
            return tokenizer.encode_prompt(text)
        messages = [Message(role="system", content=self.grammar.instructions()), Message(role="user", content=question)]
        return [*tokenizer.chat(messages), *tokenizer.encode(self.prompt_suffix)]

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
            return Look(box=step.box, rule=self.regions, render=lambda crop: self.framed(self.grammar.closer(crop)))
        call = Call(tool=step.tool, query=step.query, passages=step.passages)
        return self.framed(self.grammar.observation(call, step.passages))

    def _read(self, turn: Turn) -> Action:
        text = turn.forced + turn.text
        turn.action = self.grammar.parse(text)
        whole = "eos" if self.functions else "stop"  # the stop reason of a turn that is not cut off
        turn.well_formed = self.grammar.well_formed(text) and self.whole(turn)
        # Of a forced turn only the policy's part is judged (a closed answer, no thought in it): the policy could not write a
        # thought before it.
        if turn.forced:
            answer = self.grammar.write_answer("", turn.action.answer)
            plain = turn.stop_reason == whole and split_thoughts(turn.text)[1] == turn.text
            turn.well_formed = plain and turn.action.kind == "answer" and self.grammar.well_formed(answer)
        return turn.action

    async def show(self, call: Call, chat: Conversation, reserve: int) -> bool:
        """Shows as many whole passages as fit, best first, pictures included, or the beginning of the first one (see
        `max_observation_tokens`). Returns False if not even an empty observation fits."""
        shown = await self.show_fitting(
            *(chat, call.passages, functools.partial(self.grammar.observation, call)),
            most=min(self.max_observation_tokens or chat.room, chat.room - reserve),
            reserve=reserve,
            cut=bool(self.max_observation_tokens),
        )
        return shown is not None

    async def final_answer(
        self, chat: Conversation, reserve: int, truncated: bool = False, unanswered: bool = False
    ) -> Episode:
        """Runs the last turn, for which `reserve` tokens are kept.

        Args:
          truncated: it comes because the context is nearly full.
          unanswered: the policy's latest turn got no reply. In a chat it gets one now, because a message ends its turn.
        """
        if chat.room < reserve:
            return chat.episode(answer=None, truncated=True)
        if unanswered:
            self.end_turn(chat, TOO_LONG, reserve)
        chat.force(self.last_opening)
        turn = await chat.generate(stop=self.grammar.stops, max_tokens=self.answer_tokens)
        action = self._read(turn)
        answer = action.answer if action.kind == "answer" else None
        return chat.episode(answer=answer, truncated=truncated or turn.stop_reason == "length")


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

    async def _run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        chat = llm.conversation(self.opening(example, llm.tokenizer, llm.image_marker), example.images)
        reserve = self.reserve(chat)
        search = self.grammar.write_search("", llm.tokenizer.plain(example.question), self.tool)
        if chat.tokens_of(search) <= chat.room - reserve:
            turn = chat.write(search)
            turn.action = Action(kind="search", tool=self.tool, query=example.question)
            shown = await self.show(await tools[self.tool].search(example.question, self.k), chat, reserve)
            return await self.final_answer(chat, reserve, unanswered=not shown)
        return await self.final_answer(chat, reserve)
