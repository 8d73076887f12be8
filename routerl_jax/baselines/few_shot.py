"""Few-shot prompting of a recipe: its agent with an untrained policy, after worked examples in its protocol."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from routerl_jax.agents.config import AgentConfig
from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.baselines.registry import baseline
from routerl_jax.baselines.worked import WORKED, WorkedExample
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Demonstration, DemonstrationStep, Example, Message, Passage
from routerl_jax.recipes.known import RECIPES


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewShot(SearchAgent):
    """A search agent whose prompt has worked questions before the real one, with their searches and documents.

    They are turns of a chat, or plain text in the same form, one after the other. R1-Router's prompt-only rows have eight
    examples per kind of question; these are ours, the same for every protocol. R1-Router's agent works in separate chats and
    has other worked examples (`curation/shots.py`).

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
        if self.instruct and tokenizer.has_chat_template:
            chat = [Message(role="system", content=self.grammar.instructions())]
            for worked_text, written in worked_pairs:
                chat += [Message(role="user", content=worked_text), Message(role="assistant", content=written)]
            chat.append(Message(role="user", content=question))
            return [*tokenizer.chat(chat), *tokenizer.encode(self.prompt_suffix)]
        task = f"{self.grammar.instructions()}\n\n" if self.instruct else ""
        text = "".join(f"Question: {worked_text}\n{written}\n\n" for worked_text, written in worked_pairs)
        return tokenizer.encode_prompt(f"{task}{text}Question: {question}\n{self.prompt_suffix}")

    def worked(self, one: WorkedExample) -> str:
        """A worked question in the form of the protocol, without the line `Question: ..`."""
        pieces = [piece for piece, _ in self.pieces(demonstration(one, self.searched or self.grammar.tools[0]))]
        return self.prompt_suffix + "".join(piece for piece in pieces if isinstance(piece, str))


def demonstration(one: WorkedExample, tool: str) -> Demonstration:
    """A worked question as a demonstration with a search for each of its steps."""
    steps = []
    for number, hop in enumerate(one.hops):
        page = Passage(id=f"{one.question}/{number}", title=hop.title, text=hop.text)
        thought = (
            "This must be looked up first." if number == 0 else f"{one.hops[number - 1].fact} One fact is missing."
        )
        steps.append(DemonstrationStep(thought=thought, query=hop.question, tool=tool, passages=(page,)))
    example = Example(id=one.question, question=one.question, answers=(one.answer,))
    return Demonstration(example=example, steps=tuple(steps), thought=one.hops[-1].fact, answer=one.answer)


@baseline("few_shot", paper="", about="a recipe's agent after eight worked chats (settings: recipe)", searches="chosen")
def few_shot(tools: Sequence[str], recipe: str = "search") -> FewShot:
    """The agent of a recipe with worked questions. It must be a SearchAgent (search_r1, r1_searcher, routerag, search).

    Raises:
      ValueError: the recipe's agent is no SearchAgent, so worked questions can't be put before its prompt.
    """
    agent = RECIPES.get(recipe)(AgentConfig(instruct=True, max_turn_tokens=512), {}, tuple(tools), "search_r1").agent
    if not isinstance(agent, SearchAgent):
        raise ValueError(
            f"recipe {recipe!r} has a {type(agent).__name__}, which works in chats of its own: few_shot is of recipes with a "
            "SearchAgent (search_r1, r1_searcher, routerag, search)"
        )
    return FewShot(**{field.name: getattr(agent, field.name) for field in dataclasses.fields(SearchAgent)})
