"""Few-shot prompting of a recipe: its agent with an untrained policy, after worked examples in its protocol."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from routerl_jax.agents.agent import Agent
from routerl_jax.agents.grammar import NO_TOOL
from routerl_jax.agents.observation import Reply
from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Demonstration, DemonstrationStep, Example, Message, Passage
from routerl_jax.data.trajectories import document_of
from routerl_jax.extras.baselines.baseline import WORKED, WORKED_FILE, WorkedExample
from routerl_jax.extras.baselines.registry import baseline
from routerl_jax.recipes.mmsearch_r1.agents import MMSearchAgent
from routerl_jax.recipes.r1_router.agents import StepwiseAgent
from routerl_jax.recipes.r1_router.steps import StepPrompt, StepProtocol
from routerl_jax.recipes.recipe import RECIPES, AgentConfig
from routerl_jax.recipes.vrag_rl.agents import VRAGAgent


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewShot(SearchAgent):
    """A search agent whose prompt has worked questions before the real one, with their searches and documents.

    They are turns of a chat, or plain text in the same form, one after the other. R1-Router's prompt-only rows have eight
    examples per kind of question; these are ours, the same for every protocol.

    Attributes:
      shots: number of worked questions, at most 8.
      searched: knowledge base that they search; "" for the first.
    """

    shots: int = 8
    searched: str = ""

    def opening(
        self, example: Example, tokenizer: Tokenizer, image_marker: str = "", room: int | None = None
    ) -> list[int]:
        question = image_marker * len(example.images) + tokenizer.plain(example.question)
        worked_pairs = [
            (worked_question.question, self.worked(worked_question)) for worked_question in WORKED[: self.shots]
        ]
        if self.instruct and tokenizer.instructs_in_chats:
            chat = [Message(role="system", content=self.grammar.instructions())]
            for worked_text, written in worked_pairs:
                chat += [Message(role="user", content=worked_text), Message(role="assistant", content=written)]
            chat.append(Message(role="user", content=question))
            return [*tokenizer.chat(chat), *tokenizer.encode(self.prompt_suffix)]
        task = f"{self.grammar.instructions()}\n\n" if self.instruct else ""
        text = "".join(f"Question: {worked_text}\n{written}\n\n" for worked_text, written in worked_pairs)
        return tokenizer.encode_prompt(f"{task}{text}Question: {question}\n{self.prompt_suffix}")

    def worked(self, shot: WorkedExample) -> str:
        """A worked question in the form of the protocol, without the line `Question: ..`."""
        pieces = [piece for piece, _ in self.pieces(demonstration(shot, self.searched or self.grammar.tools[0]))]
        return self.prompt_suffix + "".join(piece for piece in pieces if isinstance(piece, str))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewShotProtocol(StepProtocol):
    """R1-Router's protocol with worked chats before every chat: routes before a route, answers before an answer.

    The worked routes are the first, the second and the last of their questions in turn. The last one asks for nothing more.

    Attributes:
      shots: number of worked chats of a kind, at most 8.
      searched: knowledge base that they search; "" for the first.
    """

    shots: int = 8
    searched: str = ""

    def opening(self, prompt: StepPrompt, tokenizer: Tokenizer, *, instruct: bool, marks: str = "") -> list[int]:
        user = marks + tokenizer.plain(prompt.user, keep=self.special_tokens)
        worked = [
            (request.user, written)
            for number, shot in enumerate(WORKED[: self.shots])
            for request, written in [self.worked(shot, prompt.asked, number)]
        ]
        if instruct and tokenizer.instructs_in_chats:
            chat = [Message(role="system", content=prompt.system)]
            for request, written in worked:
                chat += [
                    Message(role="user", content=request.rstrip("\n")),
                    Message(role="assistant", content=written),
                ]
            return tokenizer.chat([*chat, Message(role="user", content=user.rstrip("\n"))])
        if instruct:
            text = "".join(f"User: {request}Assistant: {written}\n\n" for request, written in worked)
            return tokenizer.encode_prompt(f"{prompt.system}\n\n{text}User: {user}Assistant: ")
        return tokenizer.encode_prompt("".join(f"{request}{written}\n\n" for request, written in worked) + user)

    def worked(self, shot: WorkedExample, kind: str, number: int) -> tuple[StepPrompt, str]:
        """A worked chat of a kind (route, answer, final): the request and what is written. `number` chooses its step."""
        tool = self.searched or self.tools[0]
        facts = [(hop.question, hop.fact) for hop in shot.hops]
        if kind == "final":
            return self.final(shot.question, facts), self.answers.write_answer(shot.hops[-1].fact, shot.answer)
        if kind == "answer":
            hop = shot.hops[number % len(shot.hops)]
            page = document_of(tool, Passage(id=hop.title, title=hop.title, text=hop.text))
            return self.answer(hop.question, [page]), self.answers.write_answer("The document says it.", hop.fact)
        answered = number % (len(shot.hops) + 1)
        request = self.route(shot.question, facts[:answered])
        if answered == len(shot.hops):
            return request, self.routes.write_search("All that is needed is known.", NO_TOOL, NO_TOOL)
        return request, self.routes.write_search(_thought(shot, answered), shot.hops[answered].question, tool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewShotMMSearch(MMSearchAgent):
    """MMSearch-R1's agent after worked chats. Their questions show no picture, so all of them search by text.

    Attributes:
      shots: number of worked chats, at most 8.
    """

    shots: int = 8

    def opening(
        self, example: Example, tokenizer: Tokenizer, image_marker: str = "", room: int | None = None
    ) -> list[int]:
        chat = [message for shot in WORKED[: self.shots] for message in self.worked(shot)]
        question = image_marker * len(example.images) + tokenizer.plain(example.question)
        chat.append(Message(role="user", content=self.form.first(question, self.instruct)))
        if self.instruct and tokenizer.instructs_in_chats:
            return tokenizer.chat(chat)
        if self.instruct:
            return tokenizer.encode_prompt(f"{_script(chat)}Assistant: ")
        return tokenizer.encode_prompt("".join(f"{message.content}\n" for message in chat[:-1]) + chat[-1].content)

    def worked(self, shot: WorkedExample) -> list[Message]:
        """A worked question as messages, with as many searches as are allowed."""
        limits = self.limits
        steps = demonstration(shot, self.text_tool, min(limits.searches, limits.text_searches))
        first = self.form.first(shot.question, self.instruct)
        chat = [Message(role="user", content=first)]
        for piece, written in self.pieces(steps):
            observation: Any = piece.observation if isinstance(piece, Reply) else piece
            parts = [observation] if isinstance(observation, str) else observation
            text = "".join(part for part in parts if isinstance(part, str))
            chat.append(Message(role="assistant" if written else "user", content=text))
        return chat


SIZE = (896, 1148)  # pixels of the pages, wide and high: multiples of 28, as Qwen2.5-VL's image tokens need


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageStep:
    """A search, and what the page shows that it finds; or a closer look at the page shown last.

    Attributes:
      query: the query; "" for a closer look.
      box: where it looks: left, top, right, bottom as shares of the page's sides.
    """

    thought: str
    query: str = ""
    box: Sequence[float] = ()
    shows: str


@dataclasses.dataclass(frozen=True)
class WorkedPages:
    """A question with its steps, and the thought before its answer."""

    question: str
    steps: tuple[PageStep, ...]
    thought: str
    answer: str


WORKED_PAGES = tuple(
    WorkedPages(**{**worked, "steps": tuple(PageStep(**step) for step in worked["steps"])})
    for worked in WORKED_FILE["pages"]
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewShotVRAG(VRAGAgent):
    """VRAG-RL's agent after worked chats of searches, closer looks and answers. Their pages are told in words.

    A worked chat that takes more turns or searches than the agent has is left out. Without closer looks, what they would show
    is told with the page.

    Attributes:
      shots: number of worked chats, at most 8.
    """

    shots: int = 8

    def opening(
        self, example: Example, tokenizer: Tokenizer, image_marker: str = "", room: int | None = None
    ) -> list[int]:
        question = image_marker * len(example.images) + tokenizer.plain(example.question)
        request = Message(role="user", content=f"Question: {question}")
        chat = [message for shot in WORKED_PAGES[: self.shots] for message in self.worked(shot)]
        if not self.instruct:
            return tokenizer.encode_prompt("".join(f"{message.content}\n" for message in [*chat, request]))
        task = self.form.instructions()
        if tokenizer.instructs_in_chats:
            return tokenizer.chat([Message(role="system", content=task), *chat, request])
        return tokenizer.encode_prompt(f"{task}\n\n{_script([*chat, request])}Assistant: ")

    def worked(self, shot: WorkedPages) -> list[Message]:
        """A worked question as messages; [] if the agent has not enough turns or searches for it."""
        steps = shot.steps if self.looks else _without_looks(shot.steps)
        searches = sum(bool(step.query) for step in steps)
        if len(steps) + 1 > self.max_turns or searches > self.search_budget:
            return []
        chat = [Message(role="user", content=f"Question: {shot.question}")]
        for step in steps:
            if step.query:
                written, item = self.form.write_search(step.thought, step.query, self.tool), "A page"
            else:
                written, item = self.form.write_look(step.thought, self._box(step.box)), "That part, enlarged"
            observation = self._in_words(item, step.shows)
            chat += [Message(role="assistant", content=written), Message(role="user", content=observation)]
        return [*chat, Message(role="assistant", content=self.form.write_answer(shot.thought, shot.answer))]

    def _in_words(self, item: str, shows: str) -> str:
        """The content of a picture in words. If pages are shown as text, it is that text."""
        if self.shows == "text":
            return shows
        pixels = f", of {SIZE[0]} x {SIZE[1]} pixels" if item == "A page" and not self.regions.box_scale else ""
        return f"({item}{pixels}, which shows {shows})"

    def _box(self, box: Sequence[float]) -> list[int]:
        """The box as this agent's policy writes boxes."""
        wide, high = [self.regions.box_scale or side for side in SIZE]
        return [round(share * side) for share, side in zip(box, (wide, high, wide, high))]


def _without_looks(steps: Sequence[PageStep]) -> list[PageStep]:
    """The searches alone. What a closer look would show is added to its page."""
    merged: list[PageStep] = []
    for step in steps:
        if step.query:
            merged.append(step)
        else:
            merged[-1] = dataclasses.replace(merged[-1], shows=f"{merged[-1].shows} In detail: {step.shows}")
    return merged


def _script(chat: Sequence[Message]) -> str:
    """A chat as plain text, a line for each message."""
    names = {"user": "User", "assistant": "Assistant"}
    return "".join(f"{names[message.role]}: {message.content}\n" for message in chat)


def demonstration(shot: WorkedExample, tool: str, most: int = 0) -> Demonstration:
    """A worked question as a demonstration with a search for each of its steps, or for the last `most` of them."""
    steps = []
    for number, hop in list(enumerate(shot.hops))[-most:]:
        page = Passage(id=f"{shot.question}/{number}", title=hop.title, text=hop.text)
        step = DemonstrationStep(thought=_thought(shot, number), query=hop.question, tool=tool, passages=(page,))
        steps.append(step)
    example = Example(id=shot.question, question=shot.question, answers=(shot.answer,))
    return Demonstration(example=example, steps=tuple(steps), thought=shot.hops[-1].fact, answer=shot.answer)


def _thought(shot: WorkedExample, number: int) -> str:
    """The thought before a step of a worked question."""
    return "This must be looked up first." if number == 0 else f"{shot.hops[number - 1].fact} One fact is missing."


@baseline("few_shot", paper="", about="a recipe's agent after eight worked chats (settings: recipe)", searches="chosen")
def few_shot(tools: Sequence[str], recipe: str = "search", shots: int = 8, searched: str = "") -> Agent:
    """The agent of a recipe with worked questions.

    Args:
      shots: number of worked questions, at most 8.
      searched: knowledge base that they search; "" for the first. MMSearch-R1's search its text, VRAG-RL's its pages.

    Raises:
      ValueError: the recipe's agent has no form of worked questions here.
    """
    built = RECIPES.get(recipe)(AgentConfig(instruct=True, max_turn_tokens=512), {}, tuple(tools), "search_r1")
    agent: Any = built.agent
    fields = {field.name: getattr(agent, field.name) for field in dataclasses.fields(agent)}
    if isinstance(agent, StepwiseAgent):
        base = agent.protocol
        named = FewShotProtocol(tools=base.tools, holds=base.holds, shots=shots, searched=searched)
        return dataclasses.replace(agent, protocol=named)
    if isinstance(agent, MMSearchAgent):
        return FewShotMMSearch(**fields, shots=shots)
    if isinstance(agent, VRAGAgent):
        return FewShotVRAG(**fields, shots=shots)
    if isinstance(agent, SearchAgent):
        return FewShot(
            **{field.name: fields[field.name] for field in dataclasses.fields(SearchAgent)},
            shots=shots,
            searched=searched,
        )
    raise ValueError(
        f"recipe {recipe!r} has a {type(agent).__name__}, and there are no worked questions in its form: few_shot is of "
        "search, search_r1, r1_searcher, routerag, r1_router, mmsearch_r1 and vrag_rl"
    )
