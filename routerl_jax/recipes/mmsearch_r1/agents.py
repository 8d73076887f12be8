"""MMSearch-R1 (arXiv 2506.20670): search on demand, and the paper's baselines; and the recipe "mmsearch_r1"."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from routerl_jax.agents import tool_calls
from routerl_jax.agents.agent import LLM, Agent, LearnsFrom, Pieces, Tools
from routerl_jax.agents.chat import CallingAgent, ForcedAnswer
from routerl_jax.agents.conversation import Conversation
from routerl_jax.agents.grammar import TOO_LONG, RouteChoices
from routerl_jax.agents.observation import Reply, Spoken
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import (
    Action,
    Call,
    Demonstration,
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
from routerl_jax.knowledge.query import with_question
from routerl_jax.recipes.mmsearch_r1 import protocol
from routerl_jax.recipes.mmsearch_r1.protocol import Kind, Limits, MMSearchCalls
from routerl_jax.recipes.mmsearch_r1.rewards import REWARD
from routerl_jax.recipes.recipe import RECIPES, AgentConfig, Recipe, check_own_protocol
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
    def choices(self) -> RouteChoices | None:
        """The choice of a turn's action. All are allowed in the first round; later, one that is not allowed is invalid."""
        return None if self.grammar else protocol.choices(self.image_tool, self.text_tool)

    @property
    def limits(self) -> Limits:
        """The limits of searches."""
        return Limits(
            searches=self.searches,
            image_searches=self.image_searches,
            text_searches=self.text_searches,
            image_first=self.image_first,
        )

    async def _run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        chat = self._begin(example, llm)
        searches: list[Kind] = []
        for _ in range(self.searches + 1):
            room = chat.room - self._reserve(chat)
            if room < 1:
                return await self._forced(chat, truncated=True)
            turn = await chat.generate(stop=self._stops, max_tokens=min(self.max_turn_tokens, room))
            action = self.read(turn, example, searches)
            if action.kind in ("answer", "refusal"):
                return chat.episode(answer=action.answer if action.kind == "answer" else None)
            if action.kind == "invalid":
                cut = turn.stop_reason == "length"
                return await self._forced(chat, truncated=cut, unanswered=self._reminder(action))
            kind = self.kind_of(action.tool)
            searches.append(kind)
            if not await self._search(kind, action.query, example, chat, tools, searches):
                return await self._forced(chat, truncated=True, unanswered=TOO_LONG)
        return await self._forced(chat)

    def baselines(self, tools: Sequence[str]) -> dict[str, Agent]:
        """`direct`, which never searches (table 5), and `rag_workflow`, which always makes both searches (table 6)."""
        return {"direct": DirectAnswer(**{**self._fields, "searches": 0}), **self.vanilla_rag(tools)}

    def vanilla_rag(self, tools: Sequence[str]) -> dict[str, Agent]:
        searches = max(2, self.searches)  # whatever the bound is: the workflow is made for two searches
        return {"rag_workflow": RagWorkflow(**{**self._fields, "searches": searches, "force_answer": True})}

    @property
    def _fields(self) -> dict[str, Any]:
        """Values of the fields that every agent of the recipe has. Further fields of subclasses are left out."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(MMSearchAgent)}

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

    @property
    def special_tokens(self) -> tuple[str, ...]:
        return self.grammar.special_tokens if self.grammar else protocol.TAGS

    def opening(
        self, example: Example, tokenizer: Tokenizer, image_marker: str = "", room: int | None = None
    ) -> list[int]:
        """The token ids of the first message: the pictures, the question, and with `instruct` the explanation of the task."""
        self.of(tokenizer)  # refuses a model that can't write in this form
        first = protocol.first(example.question, self.limits, self.instruct, self._words)
        return self._message(first, example, tokenizer, image_marker, self.functions)

    def pieces(self, demonstration: Demonstration) -> Pieces:
        """The turns of a demonstration. The tools of its steps must be this agent's; an image search has no query."""
        pieces: Pieces = []
        searches: list[Kind] = []
        for step in demonstration.steps:
            kind = self.kind_of(step.tool)
            searches.append(kind)
            pieces.append((self._written(step.thought, kind, step.query), True))
            call = Call(tool=step.tool, query=step.query, passages=step.passages)
            observation = self.observation(call, step.passages, kind, demonstration.example, searches)
            pieces.append((self.framed(observation), False))
        last = f"<reason>{demonstration.thought}</reason>\n<answer>{demonstration.answer}</answer>"
        if self.grammar:
            last = self.grammar.write_answer(demonstration.thought, demonstration.answer)
        return [*pieces, (self.spoken(lambda _: last), True)]

    def _written(self, thought: str, kind: Kind, query: str) -> str | Spoken:
        """A turn that searches."""

        def write(agent: MMSearchAgent) -> str:
            if agent.grammar:
                return agent.grammar.write_search(
                    thought, query, agent.image_tool if kind == "image" else agent.text_tool
                )
            action = protocol.IMAGE_SEARCH if kind == "image" else f"<text_search>{query}</text_search>"
            return f"<reason>{thought}</reason>\n{action}"

        return self.spoken(write)

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
        if self.grammar:
            return tokenizer.chat([Message(role="user", content=content)], tools=functions)
        if self.instruct and tokenizer.instructs_in_chats:
            return tokenizer.chat([Message(role="user", content=content)])
        return tokenizer.encode_prompt(f"User: {content}\nAssistant: " if self.instruct else content)

    def _begin(self, example: Example, llm: LLM) -> Conversation:
        return llm.conversation(self.opening(example, llm.tokenizer, llm.image_marker), example.images)

    def _reserve(self, chat: Conversation) -> int:
        """Tokens kept free for an answer that is begun for the policy."""
        return self.forced.reserve(chat) + self.note_tokens(chat) if self.force_answer else 0

    def kind_of(self, tool: str) -> Kind:
        """The kind of search for which a knowledge base is used."""
        return "image" if tool == self.image_tool else "text"

    def read(self, turn: Turn, example: Example, earlier: Sequence[Kind]) -> Action:
        """The turn's action. A search that is not allowed now is invalid."""
        text = turn.forced + turn.text
        action = self._parse(text)
        if action.kind == "search":
            kind = self.kind_of(action.tool)
            why = self.limits.refused(kind, earlier) or (NO_PICTURE if kind == "image" and not example.images else "")
            if why:
                action = dataclasses.replace(action, kind="invalid", error=why)
        turn.action = action
        formed = self.grammar.well_formed if self.grammar else protocol.well_formed
        complete = not turn.forced and self.whole(turn)
        turn.well_formed = action.kind != "invalid" and complete and formed(turn.text)
        return action

    async def _search(
        self, kind: Kind, query: str, example: Example, chat: Conversation, tools: Tools, earlier: Sequence[Kind]
    ) -> bool:
        """Searches and shows the results. Returns False if there is no room even for a message that nothing fits."""
        if kind == "image":
            call = await tools[self.image_tool].search(picture_query(example), self.image_k)
        else:
            call = await tools[self.text_tool].search(with_question(query, example.question), self.k)
        reserve = self._reserve(chat)
        shown = await self.show_fitting(
            *(chat, call.passages, lambda passages: self.observation(call, passages, kind, example, earlier)),
            most=min(self.max_observation_tokens or chat.room, chat.room - reserve),
            reserve=reserve,
            cut=kind == "text",
        )
        return shown is not None

    def framed(self, observation: Observation) -> Observation | Reply:
        """The observation in the form for the policy: a tool's message if it calls functions, a user's if it chats."""
        return Reply(observation) if self.instruct and not self.functions else super().framed(observation)

    def observation(
        self, call: Call, passages: Sequence[Passage], kind: Kind, example: Example, earlier: Sequence[Kind]
    ) -> Observation:
        """The observation after a search: the results, then the question again, and its pictures with `repeat_pictures`."""
        results = protocol.information(call, passages, kind)
        if self.grammar:
            results = protocol.results(call, passages, kind, tool_calls.TAGS)
        return [
            "" if self.instruct or self.grammar else "\n",
            *results,
            *(Shown(image=image) for image in example.images if self.repeat_pictures),
            protocol.after(example.question, earlier, self.limits, self.instruct, self._words),
        ]

    @property
    def _words(self) -> protocol.Words:
        return self.grammar.words() if self.grammar else protocol.Words()

    @property
    def _stops(self) -> tuple[str, ...]:
        return self.grammar.stops if self.grammar else protocol.STOPS

    def _reminder(self, action: Action) -> str:
        """The message after an invalid turn, before an answer is begun; "" with tags, which have no such message."""
        return self.grammar.reminder(action.error) if self.grammar else ""

    async def _forced(self, chat: Conversation, truncated: bool = False, unanswered: str = "") -> Episode:
        """Ends an episode without an answer of the policy's own: with a forced answer if `force_answer` is set.

        Args:
          unanswered: the message after the policy's latest turn, if that got no reply.
        """
        if not self.force_answer:
            return chat.episode(answer=None, truncated=truncated)
        if unanswered:
            self.end_turn(chat, unanswered, self._reserve(chat))
        return await self.forced.answer(chat, self._parse, truncated)

    @property
    def forced(self) -> ForcedAnswer:
        """How an answer is begun for the policy."""
        return ForcedAnswer(
            opening=protocol.ANSWER_OPENING,
            closing="</answer>",
            tokens=self.answer_tokens,
            think=protocol.REASON if self.thoughts else (),
            thought_tokens=self.max_turn_tokens,
        )

    def _parse(self, text: str) -> Action:
        if self.grammar is None:
            return protocol.parse(text, image_tool=self.image_tool, text_tool=self.text_tool)
        action = self.grammar.parse(text)
        return dataclasses.replace(action, query=action.query[: protocol.QUERY_LETTERS])


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
        return self._message(protocol.direct(example.question, self.instruct), example, tokenizer, image_marker)

    async def _run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        return await self.forced.answer(self._begin(example, llm), self._parse)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RagWorkflow(MMSearchAgent):
    """Always searches by the picture, then by a text query of the policy, and then answers (table 6).

    The agent writes the searches in place of the policy, except for thoughts and query. A question without a picture gets only
    the text search.
    """

    async def _run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        chat = self._begin(example, llm)
        searches: list[Kind] = []
        if example.images and self.image_searches:
            search = self.grammar.write_search("", "", self.image_tool) if self.grammar else protocol.IMAGE_SEARCH
            between = await self.forced.thoughts(chat, self._reserve(chat) + chat.tokens_of(search))
            chat.write(between + search).action = Action(kind="search", tool=self.image_tool)
            searches.append("image")
            if not await self._search("image", "", example, chat, tools, searches):
                return await self._forced(chat, truncated=True, unanswered=TOO_LONG)
        begun = self.grammar.query_opening(self.text_tool) if self.grammar else protocol.TEXT_OPENING
        opening = chat.tokens_of(begun)
        if chat.room - self._reserve(chat) - opening < 1:
            return await self._forced(chat, truncated=True)
        query = min(self.max_turn_tokens, chat.room - self._reserve(chat) - opening)
        chat.force(await self.forced.thoughts(chat, self._reserve(chat) + opening + query) + begun)
        turn = await chat.generate(stop=() if self.grammar else ("</text_search>",), max_tokens=query)
        action = turn.action = self._parse(turn.forced + turn.text)
        if action.kind == "search":
            searches.append("text")
            if not await self._search("text", action.query, example, chat, tools, searches):
                return await self._forced(chat, truncated=True, unanswered=TOO_LONG)
            return await self._forced(chat)
        return await self._forced(chat, unanswered=self._reminder(action))


IMAGE_TOOLS = (
    "image",
    "reverse_image",
)  # names of a knowledge base that is searched by pictures, if config.agent.sees is empty


@RECIPES.register("mmsearch_r1")
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
