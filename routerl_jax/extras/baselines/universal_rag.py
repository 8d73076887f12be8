"""UniversalRAG: first chooses a knowledge base, or none (Yeo et al., arXiv 2504.20734)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.agents.grammar import NO_TOOL
from routerl_jax.core.types import Action, Episode, Example
from routerl_jax.extras.baselines.baseline import ChatPrompt, SearchResults, answered
from routerl_jax.extras.baselines.direct import DIRECT
from routerl_jax.extras.baselines.registry import baseline
from routerl_jax.extras.baselines.vanilla_rag import VanillaRAG

TASK = (
    "Knowledge bases can be searched for what answers a question. Say which one of them should be, by its name alone, or "
    f'"{NO_TOOL}" where the question can be answered without a search. They are:\n{{names}}'
)


@baseline(
    "universal_rag", paper="2504.20734", about="chooses a knowledge base, or none; reads and answers", searches="chosen"
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class UniversalRAG(VanillaRAG):
    """Routes the question in one turn to a knowledge base or to none.

    Vanilla RAG over this knowledge base follows, with the question as the query; or a direct answer. If a reply names neither a
    knowledge base nor "none", it is invalid, and the first knowledge base is asked.

    This is the paper's router without training. Its trained routers and the examples in its prompt are not implemented here
    (R1-Router's row has 8 examples).

    Attributes:
      about: contents of the knowledge bases, by name, for the task. Those without an entry are listed by name only.
    """

    about: Mapping[str, str] = dataclasses.field(default_factory=dict)

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        names, question = self.tools or tuple(tools), f"Question: {self.question(example, llm)}"
        request = ChatPrompt(task=TASK.format(names=described(names, self.about)), text=question, cue="Knowledge base:")
        stop = () if self.chats(llm) else ("\n",)
        _, turn, text = await self.ask(example, llm, request, stop=stop, max_tokens=self.answer_tokens)
        turn.asked = "route"
        name = chosen(text, names)
        if name is None:
            answered(turn, None, f"it names none of {', '.join(names)} and {NO_TOOL}")
        else:
            turn.action, turn.well_formed = Action(kind="search", tool=name, query=example.question), True
        if name == NO_TOOL:
            return await self.answer(example, llm, ChatPrompt(task=DIRECT, text=question, cue="Answer:"))
        call = await tools[name or names[0]].search(example.question, self.k)
        return await self.read(example, llm, SearchResults((call,)))

    @property
    def search_budget(self) -> int:
        """One search."""
        return 1


def described(names: Sequence[str], about: Mapping[str, str]) -> str:
    """Knowledge bases as a list, with their contents."""
    return "\n".join(f"- {name}: {about[name]}" if about.get(name) else f"- {name}" for name in names)


def chosen(text: str, names: Sequence[str]) -> str | None:
    """The knowledge base, or "none", that a text names first; the longest if several match there. None if it names none."""
    pattern = "|".join(re.escape(name) for name in sorted((*names, NO_TOOL), key=len, reverse=True))
    match = re.search(rf"(?<!\w)({pattern})(?!\w)", text, re.IGNORECASE)
    return None if match is None else next(name for name in (*names, NO_TOOL) if name.lower() == match[1].lower())
