"""CogPlanner: plans queries and their knowledge bases until nothing is missing (Yu et al., arXiv 2501.15470)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.agents.grammar import NO_TOOL
from routerl_jax.core.types import Action, Call, Episode, Example, Turn
from routerl_jax.extras.baselines.baseline import ChatPrompt, SearchResults, answered
from routerl_jax.extras.baselines.forms import last_line, short
from routerl_jax.extras.baselines.registry import baseline
from routerl_jax.extras.baselines.universal_rag import chosen, described
from routerl_jax.extras.baselines.vanilla_rag import VanillaRAG

QUERY = (
    "A question is to be answered with the help of searches. Given what was found so far, write the query that should be "
    f'searched for next, alone, on one line; it asks for one thing. Write "{NO_TOOL}" where nothing is missing.'
)
CHOICE = (
    "A question is to be answered with the help of searches. Say which knowledge base should be searched for the query, by its "
    f'name alone, or "{NO_TOOL}" where no search is needed. They are:\n{{names}}'
)
BOTH = (
    "A question is to be answered with the help of searches. Given what was found so far, write two lines: "
    f'"Query:" with what should be searched for next, one thing, and "Knowledge base:" with the name of one, or "{NO_TOOL}" '
    "where nothing is missing. They are:\n{names}"
)


@baseline(
    "cogplanner",
    paper="2501.15470",
    about="plans the next query and its knowledge base, round by round",
    searches="chosen",
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class CogPlanner(VanillaRAG):
    """Plans a search per round, then answers from all documents.

    In a round the policy writes the next query and chooses a knowledge base for it, or decides that nothing is missing. The
    documents found join those of the earlier rounds. A choice that can't be read is invalid and ends the planning.

    Sequential modelling asks for the query first, and for the knowledge base in a second chat with this query. Parallel
    modelling asks for both at once. The paper has both. Its strategies are image search, text search and none; here they are
    the run's knowledge bases. The paper's code was not available when this was written: the flow follows its abstract and
    R1-Router's description (appendix A.5).

    Attributes:
      rounds: most rounds. The default 3 is R1-Router's number for such loops; the paper leaves it to the model.
      about: contents of the knowledge bases, by name.
    """

    modelling: Literal["sequential", "parallel"] = "sequential"
    searches_field: ClassVar[str] = "rounds"

    rounds: int = 3
    about: Mapping[str, str] = dataclasses.field(default_factory=dict)

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        calls: list[Call] = []
        names = self.tools or tuple(tools)
        for _ in range(self.rounds):
            plan = self.sequential if self.modelling == "sequential" else self.parallel
            action = await plan(example, llm, names, SearchResults(tuple(calls)))
            if action is None:
                break
            calls.append(await tools[action.tool].search(action.query, self.k))
        return await self.read(example, llm, SearchResults(tuple(calls)))

    async def sequential(
        self, example: Example, llm: LLM, names: Sequence[str], results: SearchResults
    ) -> Action | None:
        """The next search, planned in two chats: the query, then its knowledge base. None: no further search."""
        request = self.planning(example, llm, results, QUERY, "Query:")
        stop = () if self.chats(llm) else ("\n",)
        _, turn, text = await self.ask(example, llm, request, stop=stop, max_tokens=self.answer_tokens)
        query = short(text, "Query:")
        if query is None:
            answered(turn, None, "there is no query in it")
            return None
        turn.well_formed, turn.asked = True, "query"
        if chosen(query, ()) == NO_TOOL and len(query.split()) == 1:
            turn.action = Action(kind="search", tool=NO_TOOL, query=NO_TOOL)
            return None
        task = CHOICE.format(names=described(names, self.about))
        text = f"Question: {self.question(example, llm)}\nQuery: {llm.tokenizer.plain(query)}"
        _, turn, text = await self.ask(
            *(example, llm, ChatPrompt(task=task, text=text, cue="Knowledge base:")),
            stop=stop,
            max_tokens=self.answer_tokens,
        )
        return self.decided(turn, query, chosen(text, names), names)

    async def parallel(self, example: Example, llm: LLM, names: Sequence[str], results: SearchResults) -> Action | None:
        """The next search, planned in one reply with query and knowledge base. None: no further search."""
        request = self.planning(example, llm, results, BOTH.format(names=described(names, self.about)), "")
        _, turn, text = await self.ask(example, llm, request, max_tokens=2 * self.answer_tokens)
        query, name = last_line(text, "Query:") or "", chosen(last_line(text, "Knowledge base:") or "", names)
        return self.decided(turn, query, name if query or name == NO_TOOL else None, names)

    def decided(self, turn: Turn, query: str, name: str | None, names: Sequence[str]) -> Action | None:
        """Marks a turn with its choice. Returns the search that it asks for, or None."""
        turn.asked = "route"
        if name is None:
            answered(turn, None, f"there is no query, or it names none of {', '.join(names)} and {NO_TOOL}")
            return None
        turn.action, turn.well_formed = Action(kind="search", tool=name, query=query or NO_TOOL), True
        return None if name == NO_TOOL else turn.action

    def planning(self, example: Example, llm: LLM, results: SearchResults, task: str, cue: str) -> ChatPrompt:
        """The prompt that asks for the next search."""
        question = f"Question: {self.question(example, llm)}"

        def request_of(documents: str) -> ChatPrompt:
            return ChatPrompt(task=task, text=f"Found so far:\n{documents}\n\n{question}", cue=cue)

        if not results.calls:
            return ChatPrompt(task=task, text=question, cue=cue)
        return self.fitted(example, llm, results.passages, request_of, results.failure, 2 * self.answer_tokens)

    @property
    def search_budget(self) -> int:
        """One search per round."""
        return self.rounds
