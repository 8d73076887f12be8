"""MMSearch-R1 (arXiv 2506.20670): search on demand, and the paper's baselines; and the recipe "mmsearch_r1"."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from routerl_jax.agents.agent import LLM, Agent, CallingAgent, LearnsFrom, Pieces, Tools
from routerl_jax.agents.chat import Chat, ChatRules, read_turn
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
    Passage,
    Query,
    Shown,
    TextAndImage,
    Turn,
)
from routerl_jax.data.rounds import RecordedRounds
from routerl_jax.knowledge.base import with_question
from routerl_jax.recipes.mmsearch_r1 import protocol
from routerl_jax.recipes.mmsearch_r1.protocol import Kind, Limits, MMSearchCalls, MMSearchGrammar, MMSearchTags
from routerl_jax.recipes.mmsearch_r1.rewards import REWARD
from routerl_jax.recipes.recipe import AgentConfig, Recipe, check_own_protocol
from routerl_jax.recipes.search import StageSettings, stages_of

NO_PICTURE = "the question shows no picture to search by"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MMSearchAgent(CallingAgent):
    """In each round the policy answers, searches by the question's picture, or searches by text.

    A turn without an allowed action, or an image search for a question without a picture, ends the rounds. Then the answer is
    begun for the policy, or the episode ends without one.

    Attributes:
      image_tool, text_tool: names of the knowledge bases.
      searches, image_searches, text_searches, image_first: see `Limits`.
      k: summaries per text search.
      image_k: thumbnails per image search.
      max_turn_tokens: most tokens of a turn.
      max_observation_tokens: most tokens of a search's result, in whole items; 0: as many as there is room for.
      answer_tokens: tokens kept free for an answer that is begun for the policy.
      force_answer: begin the answer for a policy that has used up its rounds. The released code ends without an answer.
      thoughts: let the policy think before an action that is begun for it, as before its own actions. A small policy that is
        trained for the protocol knows no other form.
      repeat_pictures: show the question's pictures again after each search. The paper repeats the text alone.
      instruct: explain the task (for pretrained models).
      grammar: tool calls instead of the tags. Results then come as messages of a tool.
    """

    searches_field: ClassVar[str] = "searches"

    image_tool: str
    text_tool: str
    searches: int = 2
    image_searches: int = 1
    text_searches: int = 1
    image_first: bool = True
    k: int = 5
    image_k: int = 5
    max_turn_tokens: int = 512
    max_observation_tokens: int = 0
    answer_tokens: int = 64
    force_answer: bool = True
    thoughts: bool = False
    repeat_pictures: bool = False
    instruct: bool = False
    grammar: MMSearchCalls | None = None

    def __post_init__(self) -> None:
        if self.thoughts:
            self.check_tags("config.agent.settings.thoughts")

    @property
    def search_budget(self) -> int:
        """The largest number of searches that the limits allow."""
        return self.limits.allowed

    @property
    def limits(self) -> Limits:
        """The limits of searches."""
        return Limits(
            searches=self.searches,
            image_searches=self.image_searches,
            text_searches=self.text_searches,
            image_first=self.image_first,
        )

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        chat = self.begin(example, llm)
        searches: list[Kind] = []
        for _ in range(self.searches + 1):
            action = await chat.act(functools.partial(self.allowed, example=example, earlier=searches))
            if action is None:
                break
            if action.kind in ("answer", "refusal"):
                return chat.episode(answer=action.answer if action.kind == "answer" else None)
            if action.kind == "invalid":
                cut = chat.turn.stop_reason == "length"
                return await chat.final_answer(chat.protocol.reminder(action.error), truncated=cut)
            searches.append(self.kind_of(action.tool))
            await self.search(action.query, chat, tools, searches)
        return await chat.final_answer()

    @property
    def form(self) -> MMSearchGrammar:
        """The tool calls, or the tags."""
        tools = (self.image_tool, self.text_tool)
        return dataclasses.replace(
            self.grammar or MMSearchTags(tools=tools, image_tool=self.image_tool), limits=self.limits
        )

    @property
    def rules(self) -> ChatRules:
        return ChatRules(
            protocol=self.form,
            role="tool" if self.functions else "user" if self.instruct else None,
            max_turn_tokens=self.max_turn_tokens,
            max_observation_tokens=self.max_observation_tokens,
            answer_tokens=self.answer_tokens,
            opening=protocol.ANSWER_OPENING if self.force_answer else None,
            last_stops=("</answer>",),
            thoughts=protocol.REASON if self.thoughts else (),
        )

    def baselines(self, tools: Sequence[str]) -> dict[str, Agent]:
        """`direct`, which never searches (table 5), and `rag_workflow`, which always makes both searches (table 6)."""
        direct = DirectAnswer(**{**self.fields_of(MMSearchAgent), "searches": 0, "force_answer": True})
        return {"direct": direct, **self.vanilla_rag(tools)}

    def vanilla_rag(self, tools: Sequence[str]) -> dict[str, Agent]:
        searches = max(2, self.searches)  # whatever the bound is: the workflow is made for two searches
        return {
            "rag_workflow": RagWorkflow(**{**self.fields_of(MMSearchAgent), "searches": searches, "force_answer": True})
        }

    def recorded(self, recorded: RecordedRounds) -> Episode:
        """The rounds up to the first without a search, each judged as in a rollout."""
        self.check_tags("reading recorded rounds")
        turns: list[Turn] = []
        searches: list[Kind] = []
        for item in recorded.rounds:
            turn = Turn(text=item.text, stop_reason="stop", tokens=0, observation=item.observation)
            turns.append(turn)
            action = self.read(turn, recorded.example, searches)
            if action.kind != "search":
                break
            searches.append(self.kind_of(action.tool))
            turn.calls = [Call(tool=action.tool, query=action.query, error=item.error)]
        return self.recorded_episode(recorded.example, turns)

    # --- how it is shown what to write ---

    @property
    def learns_from(self) -> LearnsFrom:
        return "demonstrations"

    def opening(
        self, example: Example, tokenizer: Tokenizer, image_marker: str = "", room: int | None = None
    ) -> list[int]:
        """The token ids of the first message: the pictures, the question, and with `instruct` the explanation of the task."""
        self.of(tokenizer)  # refuses a model that can't write in this form
        first = self.form.first(example.question, self.instruct)
        return self._message(first, example, tokenizer, image_marker, self.functions)

    def pieces(self, demonstration: Demonstration) -> Pieces:
        """The turns of a demonstration. The tools of its steps must be this agent's; an image search has no query."""
        pieces: Pieces = []
        searches: list[Kind] = []
        for step in demonstration.steps:
            kind = self.kind_of(step.tool)
            searches.append(kind)
            pieces.append((self.spoken(functools.partial(_written, step=step)), True))
            call = Call(tool=step.tool, query=step.query, passages=step.passages)
            observation = self.observation(call, step.passages, kind, demonstration.example, searches)
            pieces.append((self.rules.framed(observation), False))
        last = self.form.write_answer(demonstration.thought, demonstration.answer)
        return [*pieces, (self.spoken(lambda _: last), True)]

    # --- what a rollout is made of ---

    def _message(
        self,
        text: str,
        example: Example,
        tokenizer: Tokenizer,
        image_marker: str,
        functions: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        content = image_marker * len(example.images) + tokenizer.plain(text, keep=self.special_tokens)
        if self.grammar or (self.instruct and tokenizer.instructs_in_chats):
            return tokenizer.chat([Message(role="user", content=content)], tools=functions)
        return tokenizer.encode_prompt(f"User: {content}\nAssistant: " if self.instruct else content)

    def kind_of(self, tool: str) -> Kind:
        """The kind of search for which a knowledge base is used."""
        return "image" if tool == self.image_tool else "text"

    def read(self, turn: Turn, example: Example, earlier: Sequence[Kind]) -> Action:
        """The turn's action. A search that is not allowed now is invalid."""
        return read_turn(turn, self.form, functools.partial(self.allowed, example=example, earlier=earlier))

    def allowed(self, action: Action, example: Example, earlier: Sequence[Kind]) -> Action:
        """An action after these searches, as it counts."""
        action = bounded(action)
        if action.kind != "search":
            return action
        kind = self.kind_of(action.tool)
        why = self.limits.refused(kind, earlier) or (NO_PICTURE if kind == "image" and not example.images else "")
        return dataclasses.replace(action, kind="invalid", error=why) if why else action

    async def search(self, query: str, chat: Chat, tools: Tools, searches: Sequence[Kind]) -> bool:
        """Makes the last of these searches and shows the results. False if nothing has room."""
        kind, example = searches[-1], chat.example
        if kind == "image":
            call = await tools[self.image_tool].search(picture_query(example), self.image_k)
        else:
            call = await tools[self.text_tool].search(with_question(query, example.question), self.k)

        def observation(passages: Sequence[Passage]) -> Observation:
            return self.observation(call, passages, kind, example, searches)

        return await chat.show(call, observation=observation, cut=kind == "text") is not None

    def observation(
        self, call: Call, passages: Sequence[Passage], kind: Kind, example: Example, earlier: Sequence[Kind]
    ) -> Observation:
        """The observation after a search: the results, then the question again, and its pictures with `repeat_pictures`."""
        return [
            "" if self.instruct or self.grammar else "\n",
            *self.form.results(call, passages, kind),
            *(Shown(image=image) for image in example.images if self.repeat_pictures),
            self.form.after(example.question, earlier, self.instruct),
        ]


def bounded(action: Action) -> Action:
    """An action with no more of its query than counts."""
    return dataclasses.replace(action, query=action.query[: protocol.QUERY_LETTERS])


def _written(agent: MMSearchAgent, step: DemonstrationStep) -> str:
    """A turn that searches."""
    tool = agent.image_tool if agent.kind_of(step.tool) == "image" else agent.text_tool
    return agent.form.write_search(step.thought, step.query, tool)


def picture_query(example: Example) -> Query:
    """The query of an image search: the question's first picture, and its URL if `metadata["image_urls"]` has one."""
    urls = example.metadata.get("image_urls")
    return TextAndImage(image=example.images[0], url=urls[0] if urls else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DirectAnswer(MMSearchAgent):
    """Answers from the picture alone (table 5). The answer is begun for the policy at once."""

    searches: int = 0

    def opening(
        self, example: Example, tokenizer: Tokenizer, image_marker: str = "", room: int | None = None
    ) -> list[int]:
        task = "Look at the picture and answer the question in as few words as possible.\n" if self.instruct else ""
        end = "" if self.instruct else "\n"
        return self._message(f"{task}Question: {example.question}{end}", example, tokenizer, image_marker)

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        return await self.begin(example, llm).final_answer()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RagWorkflow(MMSearchAgent):
    """Always searches by the picture, then by a text query of the policy, and then answers (table 6).

    The agent writes the searches in place of the policy, except for thoughts and query. A question without a picture gets only
    the text search.
    """

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        chat, form = self.begin(example, llm), self.of(llm.tokenizer).grammar
        searches: list[Kind] = []
        if example.images and self.image_searches:
            search = form.write_search("", "", self.image_tool) if form else protocol.IMAGE_SEARCH
            between = await chat.think(chat.reserve + chat.tokens_of(search))
            chat.write(between + search).action = Action(kind="search", tool=self.image_tool)
            searches.append("image")
            if not await self.search("", chat, tools, searches):
                return await chat.final_answer()
        begun = form.query_opening(self.text_tool) if form else protocol.TEXT_OPENING
        opening = chat.tokens_of(begun)
        query = min(self.max_turn_tokens, chat.room - chat.reserve - opening)
        if query < 1:
            return await chat.final_answer(truncated=True)
        chat.force(await chat.think(chat.reserve + opening + query) + begun)
        turn = await chat.generate(stop=() if form else ("</text_search>",), max_tokens=query)
        action = read_turn(turn, chat.protocol, bounded)
        if action.kind != "search":
            return await chat.final_answer(chat.protocol.reminder(action.error))
        searches.append("text")
        await self.search(action.query, chat, tools, searches)
        return await chat.final_answer()


IMAGE_TOOLS = (
    "image",
    "reverse_image",
)  # names of a knowledge base that is searched by pictures, if config.agent.sees is empty


def mmsearch_r1(
    agent: AgentConfig, stages: Mapping[str, StageSettings], tools: Sequence[str], normalizer: str
) -> Recipe:
    """Builds the recipe from its configuration. config.agent.max_searches is the limit of searches in all. The other limits,
    `image_k` and `force_answer` are in config.agent.settings.

    Raises:
      ValueError: there are other knowledge bases than one for pictures and one for text; another grammar than
        `tool_calls`, a prompt or `on_invalid` is set, which this recipe does not have; or a reward term is unknown.
    """
    check_own_protocol(
        agent,
        "mmsearch_r1",
        prompt="a prompt for every round",
        instead_of_on_invalid="says with config.agent.settings.force_answer what follows a turn that can't be read",
    )
    image = tuple(agent.sees) or tuple(name for name in tools if name in IMAGE_TOOLS)
    text = [name for name in tools if name not in image]
    if len(image) != 1 or image[0] not in tools or len(text) != 1:
        sees = f", config.agent.sees {tuple(agent.sees)}" if agent.sees else ""
        raise ValueError(
            "config.recipe='mmsearch_r1' needs two knowledge bases, one searched by pictures, which config.agent.sees names "
            f"(or which is called {' or '.join(IMAGE_TOOLS)}), and one searched in words; config.knowledge has "
            f"{', '.join(tools) or 'none'}{sees}"
        )
    return Recipe(
        agent=MMSearchAgent(
            image_tool=image[0],
            text_tool=text[0],
            searches=agent.max_searches,
            k=agent.k,
            max_turn_tokens=agent.max_turn_tokens,
            max_observation_tokens=agent.max_observation_tokens,
            answer_tokens=agent.answer_tokens,
            instruct=agent.instruct,
            grammar=MMSearchCalls(tools=tuple(tools), image_tool=image[0]) if agent.grammar else None,
        ),
        stages=stages_of(stages, normalizer),
        reward=REWARD,
    )
