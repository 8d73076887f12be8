"""OmniSearch: a planner asks sub-questions and names a retriever for each (Li et al., arXiv 2411.02937)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.agents.grammar import NO_TOOL, one_line
from routerl_jax.core.types import Action, Episode, Example, Query
from routerl_jax.extras.baselines.baseline import Baseline, ChatPrompt, SearchResults, answered, reply_text
from routerl_jax.extras.baselines.forms import last_line, tidied
from routerl_jax.extras.baselines.registry import baseline
from routerl_jax.extras.baselines.universal_rag import chosen, described
from routerl_jax.knowledge.base import with_picture

TASK = (
    'Solve the question by sub-questions, one at a time. A step is three lines: "Thought:" with what is known and what is '
    'missing; "Sub-question:" with what to find out next; "Search:" with where to look it up, written NAME: query, or '
    f'"{NO_TOOL}". What is found follows in a line "Found:". When all is known, write a line "Final answer:" with the answer '
    "alone, in a few words. These can be searched:\n{names}"
)


@baseline("omnisearch", paper="2411.02937", about="plans sub-questions and a retriever for each", searches="chosen")
@dataclasses.dataclass(frozen=True, kw_only=True)
class OmniSearch(Baseline):
    """Plans sub-questions in one conversation.

    In each step the policy writes a thought, a sub-question, and a retriever with a query. The search results follow as text.
    With "none" as the retriever, the policy answers the sub-question itself. The conversation ends when the policy writes a
    final answer. A turn with neither a retriever nor a final answer is invalid and costs a step. After the last step the answer
    is begun for the policy.

    The paper's retrievers are a web search by text, a web search by text for pictures, and a search by the question's picture.
    Here they are the run's knowledge bases; those in `sees` also get the picture. The paper's model is fine-tuned for this
    form; here any policy runs.

    Attributes:
      max_steps: most turns. The paper leaves it to the model; R1-Router has a limit, but does not give it.
      about: contents of the knowledge bases, by name.
      sees: knowledge bases that get the question's picture with the query.
    """

    searches_field: ClassVar[str] = "max_steps"

    max_steps: int = 5
    about: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sees: tuple[str, ...] = ()

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        names = self.tools or tuple(tools)
        task = TASK.format(names=described(names, self.about))
        chat = self.begin(example, llm, ChatPrompt(task=task, text=f"Question: {self.question(example, llm)}"))
        turn = None
        for _ in range(self.max_steps):
            turn = await self.generate(chat, ("\nFound:", "\nQuestion:"), opening="Final answer:")
            text = reply_text(turn, llm).split("\nQuestion:")[0]
            behind = text.rpartition("Search:")[2]  # before a search, a thought only names the answer's label
            if answer := tidied(last_line(behind, "Final answer:") or ""):
                return chat.episode(answer=answered(turn, answer))
            turn.action = action = parse(text, names)
            turn.well_formed = action.kind == "search" and "Thought:" in text and "Sub-question:" in text
            if action.kind == "invalid":
                observation = f"That step can't be done: {action.error}."
            elif action.tool == NO_TOOL:
                observation = "Nothing was searched for."
            else:
                query: Query = action.query
                if action.tool in self.sees and example.images:
                    query = with_picture(action.query, example.images)
                results = SearchResults((await tools[action.tool].search(query, self.k),))
                observation = results.failure or " ".join(
                    f"({n}) {p.title}: {p.text}" for n, p in enumerate(results.passages, 1)
                )
            mark = " " if text.endswith("Found:") else "\nFound: "
            if not self.tell(chat, llm, turn, f"{mark}{one_line(observation, ())}\n"):
                break
        assert turn is not None
        return await self.conclude(chat, llm, turn, opening="Final answer:")

    @property
    def search_budget(self) -> int:
        """One search per step."""
        return self.max_steps


def parse(text: str, names: tuple[str, ...]) -> Action:
    """The search of a step. Its query is the text after the retriever's name, or else the sub-question."""
    where = last_line(text, "Search:")
    name = None if where is None else chosen(where, names)
    if where is None or name is None:
        return Action(kind="invalid", error=f'after "Search:" it names none of {", ".join(names)} and {NO_TOOL}')
    query = where.partition(":")[2].strip() or last_line(text, "Sub-question:") or ""
    if name != NO_TOOL and not query:
        return Action(kind="invalid", error="there is no query")
    return Action(kind="search", tool=name, query=query or NO_TOOL, thought=last_line(text, "Thought:") or "")
