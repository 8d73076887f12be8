"""SKR: the policy says whether it needs a search (Wang et al., arXiv 2310.05002)."""

from __future__ import annotations

import dataclasses
import re

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.agents.grammar import NO_TOOL
from routerl_jax.core.types import Action, Episode, Example
from routerl_jax.extras.baselines.baseline import ChatPrompt, answered
from routerl_jax.extras.baselines.direct import DIRECT
from routerl_jax.extras.baselines.registry import baseline
from routerl_jax.extras.baselines.vanilla_rag import VanillaRAG

TASK = (
    "Say whether more information is needed to answer the question for certain: Yes or No. Do not answer the question."
)
NEEDED = "Is more information needed to answer this?"


@baseline(
    "skr", paper="2310.05002", about="asks the policy whether it must search; then vanilla RAG or a direct answer"
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class SKR(VanillaRAG):
    """The paper's direct prompting (section 3.2). The policy is asked whether it needs more information.

    After yes, vanilla RAG follows; after no, the policy answers directly. A reply that is neither, or both without beginning
    with one, is invalid and counts as yes.

    The paper's best variant, which is also R1-Searcher's row (by FlashRAG), decides by the nearest training questions for which
    it is known whether a search helped. That takes a training set, and is not implemented here.
    """

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        question = self.question(example, llm)
        request = ChatPrompt(task=TASK, text=f"Question: {question}\n{NEEDED}", cue="Answer:")
        stop = () if self.chats(llm) else ("\n",)
        _, turn, text = await self.ask(example, llm, request, stop=stop, max_tokens=self.answer_tokens)
        turn.asked = "route"
        first = re.match(r"\W*(yes|no)\b", text.lower())
        said = {first[1]} if first else set(re.findall(r"\b(?:yes|no)\b", text.lower()))
        if len(said) != 1:
            answered(turn, None, "it says neither Yes nor No" if not said else "it says both Yes and No")
        elif said == {"no"}:
            turn.action, turn.well_formed = Action(kind="search", tool=NO_TOOL, query=NO_TOOL), True
            return await self.answer(example, llm, ChatPrompt(task=DIRECT, text=f"Question: {question}", cue="Answer:"))
        else:
            turn.action, turn.well_formed = self.search_action(example.question), True
        return await super().run(example, llm, tools)
