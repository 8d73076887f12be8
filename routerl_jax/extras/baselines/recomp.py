"""RECOMP: summarises documents before they are read (Xu et al., arXiv 2310.04408)."""

from __future__ import annotations

import dataclasses

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.agents.grammar import NO_TOOL
from routerl_jax.core.types import Episode, Example
from routerl_jax.extras.baselines.baseline import ChatPrompt
from routerl_jax.extras.baselines.direct import DIRECT
from routerl_jax.extras.baselines.registry import baseline
from routerl_jax.extras.baselines.vanilla_rag import READ, VanillaRAG

TASK = (
    "Write what the documents say that helps to answer the question, in a few sentences, on one line. Do not answer it. Write "
    f'"{NO_TOOL}" where nothing in them helps.'
)


@baseline("recomp", paper="2310.04408", about="summarises the documents for the question, and reads the summary alone")
@dataclasses.dataclass(frozen=True, kw_only=True)
class RECOMP(VanillaRAG):
    """Searches for the question, summarises the documents for it in a separate chat, and answers from the summary.

    If the summary is empty or "none", it answers directly (selective augmentation). The paper trains its compressors: an
    extractive encoder, and a T5 on summaries that a large model was asked for. Here the policy itself is asked for the summary,
    in the role of that large model.

    Attributes:
      summary_tokens: most tokens of a summary.
    """

    summary_tokens: int = 128

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        results, question = await self.search(tools, example.question), f"Question: {self.question(example, llm)}"
        summary = ""
        if results.passages:

            def request_of(documents: str) -> ChatPrompt:
                return ChatPrompt(task=TASK, text=f"Documents:\n{documents}\n\n{question}", cue="Summary:")

            request = self.fitted(example, llm, results.passages, request_of, tokens=self.summary_tokens)
            stop = () if self.chats(llm) else ("\n",)
            _, turn, text = await self.ask(example, llm, request, stop=stop, max_tokens=self.summary_tokens)
            turn.asked, turn.well_formed = "summary", True
            summary = llm.tokenizer.plain(" ".join(text.split()))
        if summary.strip("\"'. ").lower() in ("", NO_TOOL):
            return await self.answer(example, llm, ChatPrompt(task=DIRECT, text=question, cue="Answer:"))
        text = f"Documents:\n[1] {summary}\n\n{question}"
        return await self.answer(example, llm, ChatPrompt(task=READ, text=text, cue="Answer:"))
