"""IRCoT: alternates between retrieval and chain of thought (Trivedi et al., arXiv 2212.10509)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.core.types import Episode, Example, Passage
from routerl_jax.extras.baselines.baseline import Baseline, ChatPrompt, answered
from routerl_jax.extras.baselines.direct import THINK
from routerl_jax.extras.baselines.forms import SENTENCE_ENDS, concluded, first_sentence, is_reasoning, short
from routerl_jax.extras.baselines.registry import baseline
from routerl_jax.extras.baselines.vanilla_rag import READ
from routerl_jax.extras.baselines.worked import chains

TASK = f"Answer the question from the documents and what you know. {THINK}"


@baseline("ircot", paper="2212.10509", about="a search for each sentence of a chain of thought, then a reader")
@dataclasses.dataclass(frozen=True, kw_only=True)
class IRCoT(Baseline):
    """Searches for the question. Then it alternates: it writes one sentence of a chain of thought, with all documents so far in
    the prompt, and searches for this sentence.

    The chain ends with a sentence that has "answer is", with an empty one, or after `max_steps`. Then a separate reader answers
    from the collected documents.

    As in the authors' code (StonyBrookNLP/ircot), a sentence that concludes or calculates is not searched for. The last
    sentence that states a fact is searched for instead, or the question if there is none. The same query is not searched for
    twice in a row. The code differs in three ways: it leaves out the question words of queries, because its retriever is BM25;
    it shows worked examples with documents for each data set (here there are `shots` examples, without documents); and it lets
    the model write on and drops everything after the first sentence (here the model stops there).

    R1-Router runs it with k=5, max_steps=3 and reader="none". R1-Searcher (by FlashRAG) also runs it without a reader.

    Attributes:
      max_steps: most sentences; 8 in the paper.
      max_documents: most documents that are collected; 15 in the paper.
      reader: how the reader answers. cot: by a chain of thought; direct: directly (the paper has both); none: there is no
        reader, and the answer is the conclusion of the chain, or its last sentence.
      sentence_tokens: most tokens of a sentence.
      shots: number of worked questions in the task, at most 8.
    """

    searches_field: ClassVar[str] = "max_steps"

    max_steps: int = 8
    max_documents: int = 15
    reader: Literal["cot", "direct", "none"] = "cot"
    sentence_tokens: int = 100
    shots: int = 4

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        collected: dict[tuple[str, str], Passage] = {}
        sentences: list[str] = []
        query, searched, failure = example.question, "", ""
        for step in range(1, self.max_steps + 1):
            if query != searched:
                results = await self.search(tools, query)
                searched, failure = query, results.failure
                fresh = {
                    (item.id, item.text): item for item in results.passages if (item.id, item.text) not in collected
                }
                collected |= dict(list(fresh.items())[: self.max_documents - len(collected)])
            tokens = self.sentence_tokens
            request = self.request(example, llm, list(collected.values()), failure, " ".join(sentences), tokens=tokens)
            chat, turn, text = await self.ask(example, llm, request, stop=SENTENCE_ENDS, max_tokens=tokens)
            sentence = first_sentence(text)
            if sentence:
                sentences.append(sentence)
            if not sentence or concluded(sentence) or step == self.max_steps:
                break
            facts = [item for item in sentences if not is_reasoning(item)]
            query = facts[-1] if facts else example.question
            turn.action, turn.well_formed = self.search_action(query, thought=sentence), True
        if self.reader == "none":
            answer = concluded(sentences[-1]) or short(sentences[-1]) if sentences else None
            return chat.episode(answer=answered(turn, answer))
        request = self.request(
            example, llm, list(collected.values()), failure, task=READ if self.reader == "direct" else TASK
        )
        if self.reader == "cot":
            return await self.think(self.begin(example, llm, request), llm)
        return await self.answer(example, llm, request)

    def request(
        self,
        example: Example,
        llm: LLM,
        passages: list[Passage],
        failure: str,
        begun: str = "",
        task: str = TASK,
        tokens: int = 0,
    ) -> ChatPrompt:
        """The prompt with documents, the question, and the chain of thought so far."""
        question = self.question(example, llm)
        task = task if task == READ else f"{task}{chains(self.shots)}"

        def request_of(documents: str) -> ChatPrompt:
            text = f"Documents:\n{documents}\n\nQuestion: {question}"
            return ChatPrompt(task=task, text=text, cue="Answer:", begun=begun)

        return self.fitted(example, llm, passages, request_of, failure, tokens)

    @property
    def search_budget(self) -> int:
        """One search per sentence, of each knowledge base."""
        return self.max_steps * max(1, len(self.tools))
