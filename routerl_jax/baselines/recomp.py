"""RECOMP: documents become a summary, or nothing, before they are read (Xu et al., arXiv 2310.04408)."""

from __future__ import annotations

import dataclasses

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.agents.grammar import NO_TOOL
from routerl_jax.baselines.baseline import Asked
from routerl_jax.baselines.direct import DIRECT
from routerl_jax.baselines.registry import baseline
from routerl_jax.baselines.vanilla_rag import READ, VanillaRAG
from routerl_jax.core.types import Episode, Example

TASK = (
    "Write what the documents say that helps to answer the question, in a few sentences, on one line. Do not answer it. Write "
    f'"{NO_TOOL}" where nothing in them helps.'
)


@baseline("recomp", paper="2310.04408", about="summarises the documents for the question, and reads the summary alone")
@dataclasses.dataclass(frozen=True, kw_only=True)
class RECOMP(VanillaRAG):
    """Searches for the question, has the documents summarised for it in a chat of its own, and answers from the summary, or
    directly where that is empty or "none" (selective augmentation).

    The paper trains its compressors: an extractive encoder, and a T5 on the summaries of a large model that was asked for
    them. Here the policy is asked for them itself, which is that large model's part.

    Attributes:
      summary_tokens: most tokens of a summary.
    """

    summary_tokens: int = 128

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        found, question = await self.search(tools, example.question), f"Question: {self.question(example, llm)}"
        summary = ""
        if found.passages:

            def asking(documents: str) -> Asked:
                return Asked(task=TASK, text=f"Documents:\n{documents}\n\n{question}", cue="Summary:")

            asked = self.fitted(example, llm, found.passages, asking, tokens=self.summary_tokens)
            stop = () if self.chats(llm) else ("\n",)
            _, turn, text = await self.ask(example, llm, asked, stop=stop, max_tokens=self.summary_tokens)
            turn.asked, turn.well_formed = "summary", True
            summary = llm.tokenizer.plain(" ".join(text.split()))
        if summary.strip("\"'. ").lower() in ("", NO_TOOL):
            return await self.answer(example, llm, Asked(task=DIRECT, text=question, cue="Answer:"))
        text = f"Documents:\n[1] {summary}\n\n{question}"
        return await self.answer(example, llm, Asked(task=READ, text=text, cue="Answer:"))
