"""IRCoT: retrieval and chain of thought in turn (Trivedi et al., arXiv 2212.10509)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.baselines.baseline import Asked, Baseline, answered
from routerl_jax.baselines.direct import THINK
from routerl_jax.baselines.forms import SENTENCE_ENDS, concluded, first_sentence, is_reasoning, short
from routerl_jax.baselines.registry import baseline
from routerl_jax.baselines.vanilla_rag import READ
from routerl_jax.baselines.worked import chains
from routerl_jax.core.types import Episode, Example, Passage

TASK = f"Answer the question from the documents and what you know. {THINK}"


@baseline("ircot", paper="2212.10509", about="a search for each sentence of a chain of thought, then a reader")
@dataclasses.dataclass(frozen=True, kw_only=True)
class IRCoT(Baseline):
    """Searches for the question; then, in turn, writes one sentence of a chain of thought with all documents so far in the
    prompt, and searches for this sentence. It ends with a sentence that has "answer is" or is empty, or after `max_steps`; then
    a reader of its own answers from the documents that were collected.

    As in the authors' code (StonyBrookNLP/ircot) a sentence that concludes or calculates is not searched for: the last one that
    states a fact is, or the question; what was just searched for is not searched for again. The code leaves out the question
    words of queries, as its retriever is BM25, shows worked examples with documents for each data set (here `shots` without),
    and lets the model write on and drops all but the first sentence (here it stops there).

    R1-Router runs it with k=5, max_steps=3 and reader="none", R1-Searcher (by FlashRAG) likewise without a reader.

    Attributes:
      max_steps: most sentences: 8 in the paper.
      max_documents: most documents that are collected: 15 in the paper.
      reader: how the answer is made at the end: by a chain of thought, directly (the paper has both), or not: then it is the
        chain's own conclusion, or its last sentence.
      sentence_tokens: most tokens of a sentence.
      shots: worked questions in the task, of at most 8.
    """

    searches_field: ClassVar[str] = "max_steps"

    max_steps: int = 8
    max_documents: int = 15
    reader: Literal["cot", "direct", "none"] = "cot"
    sentence_tokens: int = 100
    shots: int = 4

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        known: dict[tuple[str, str], Passage] = {}
        sentences: list[str] = []
        query, searched, trouble = example.question, "", ""
        for step in range(1, self.max_steps + 1):
            if query != searched:
                found = await self.search(tools, query)
                searched, trouble = query, found.trouble
                fresh = {(one.id, one.text): one for one in found.passages if (one.id, one.text) not in known}
                known |= dict(list(fresh.items())[: self.max_documents - len(known)])
            tokens = self.sentence_tokens
            asked = self.asking(example, llm, list(known.values()), trouble, " ".join(sentences), tokens=tokens)
            chat, turn, text = await self.ask(example, llm, asked, stop=SENTENCE_ENDS, max_tokens=tokens)
            sentence = first_sentence(text)
            if sentence:
                sentences.append(sentence)
            if not sentence or concluded(sentence) or step == self.max_steps:
                break
            facts = [one for one in sentences if not is_reasoning(one)]
            query = facts[-1] if facts else example.question
            turn.action, turn.well_formed = self.searching(query, thought=sentence), True
        if self.reader == "none":
            answer = concluded(sentences[-1]) or short(sentences[-1]) if sentences else None
            return chat.episode(answer=answered(turn, answer))
        asked = self.asking(example, llm, list(known.values()), trouble, task=READ if self.reader == "direct" else TASK)
        if self.reader == "cot":
            return await self.think(self.begin(example, llm, asked), llm)
        return await self.answer(example, llm, asked)

    def asking(
        self,
        example: Example,
        llm: LLM,
        known: list[Passage],
        trouble: str,
        begun: str = "",
        task: str = TASK,
        tokens: int = 0,
    ) -> Asked:
        """The question with documents, in which a chain of thought has begun."""
        question = self.question(example, llm)
        task = task if task == READ else f"{task}{chains(self.shots)}"

        def asked(documents: str) -> Asked:
            text = f"Documents:\n{documents}\n\nQuestion: {question}"
            return Asked(task=task, text=text, cue="Answer:", begun=begun)

        return self.fitted(example, llm, known, asked, trouble, tokens)

    @property
    def search_budget(self) -> int:
        """One search a sentence, of each knowledge base."""
        return self.max_steps * max(1, len(self.tools))
