"""Shortens documents by the policy's own scores: Selective Context (arXiv 2310.06201) and LongLLMLingua (2310.06839)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Literal

import numpy as np

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.core.types import Episode, Example, Passage
from routerl_jax.extras.baselines.baseline import SearchResults
from routerl_jax.extras.baselines.registry import baseline
from routerl_jax.extras.baselines.vanilla_rag import VanillaRAG

HELD = "The answer to this question stands in the text above."


@baseline(
    "selective_context",
    paper="2310.06201",
    about="drops what the policy expects anyway, and reads the rest",
    scores=True,
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectiveContext(VanillaRAG):
    """Searches for the question, drops the words or sentences with the least information, and reads the rest as vanilla RAG.

    Each sentence of the documents is scored by itself. The information of a unit is the mean of -log p over its tokens. The
    share `drop` of the units with the least information is left out (a percentile over all documents together).

    The paper's units are tokens, noun phrases (by spaCy, the code's default) and sentences, and a separate model scores them.
    Here units are words or sentences, and the policy scores them. It needs an engine, because an endpoint gives no
    log-probabilities.

    Attributes:
      drop: share of units that is dropped; 0.5 in the code.
      unit: the unit that is kept or dropped as a whole.
    """

    drop: float = 0.5
    unit: Literal["word", "sentence"] = "word"

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        results = await self.search(tools, example.question)
        scored = [[await surprise(llm, item) for item in sentences(passage, llm)] for passage in results.passages]
        if self.unit == "sentence":
            scored = [[[(" ".join(word for word, _ in item), mean_of(item))] for item in passage] for passage in scored]
        units = [value for passage in scored for sentence in passage for _, value in sentence]
        least = float(np.quantile(units, self.drop)) if units else 0.0
        shorter = [
            dataclasses.replace(
                passage, text=" ".join(text for item in scored_sentences for text, value in item if value >= least)
            )
            for passage, scored_sentences in zip(results.passages, scored, strict=True)
        ]
        return await self.read(example, llm, together(results, [item for item in shorter if item.text.strip()]))


@baseline(
    "longllmlingua",
    paper="2310.06839",
    about="ranks documents by the question's probability, and shortens them for it",
    scores=True,
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class LongLLMLingua(VanillaRAG):
    """Searches for the question, ranks and shortens the documents, and reads the rest as vanilla RAG.

    Documents are ranked, best first, by the mean log-probability of two texts after each document: the question, and a sentence
    that says that it can be answered. Then each document keeps the words whose log-probability rises most when the question
    stands before the document (contrastive perplexity). The share of words that it keeps is `rate`, plus `spread` for the first
    document, falling towards minus `spread` for the last (`share`).

    The paper compresses token by token, in segments that see what was kept before, with a small separate model, under a budget
    of tokens that may leave documents out. Afterwards it repairs names in the answer. Here the policy scores the words once, in
    whole documents, and every document keeps its share. It needs an engine.

    Attributes:
      rate: share of words that is kept; 0.55 in FlashRAG.
      spread: how far the shares differ; 0.3 in FlashRAG.
    """

    rate: float = 0.55
    spread: float = 0.3

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        results, question = await self.search(tools, example.question), self.question(example, llm)
        questions = [f"\n\nQuestion: {question}", f"\n{HELD}"]
        ranked = []
        for passage in results.passages:
            text = llm.tokenizer.plain(f"{passage.title}\n{passage.text}")
            scores = await score(llm, text, questions)
            ranked.append(
                (sum(scores) / sum(len(llm.tokenizer.encode(question_text)) for question_text in questions), passage)
            )
        ranked.sort(key=lambda item: -item[0])
        shorter = []
        for index, (_, passage) in enumerate(ranked):
            words = re.findall(r"\s*\S+", llm.tokenizer.plain(passage.text))
            alone, conditioned = await score(llm, "\n", words), await score(llm, f"Question: {question}\n", words)
            count = round(len(words) * share(index, len(ranked), self.rate, self.spread))
            gains = np.subtract(conditioned, alone)
            best = sorted(np.argsort(-gains, kind="stable")[: max(1, count)].tolist())
            shorter.append(dataclasses.replace(passage, text="".join(words[index] for index in best).strip()))
        return await self.read(example, llm, together(results, shorter))


def share(rank: int, count: int, rate: float, spread: float) -> float:
    """Share of words, in [0, 1], that the document of this rank (0 is the best) keeps of `count` documents."""
    return min(1.0, max(0.0, rate + (1 - 2 * rank / count) * spread))


def together(results: SearchResults, passages: Sequence[Passage]) -> SearchResults:
    """The results with these passages, in their order, instead of their own."""
    if not results.passages:
        return results
    return SearchResults((dataclasses.replace(results.calls[0], passages=tuple(passages), error=None),))


def sentences(passage: Passage, llm: LLM) -> list[str]:
    """The sentences of a passage."""
    return [sentence for sentence in re.split(r"(?<=[.?!])\s+", llm.tokenizer.plain(passage.text).strip()) if sentence]


async def score(llm: LLM, prompt: str, texts: Sequence[str]) -> list[float]:
    """Log-probability of each text after a prompt, in a new conversation."""
    chat = llm.conversation(prompt)
    scores = await chat.score(texts)
    chat.close()
    return scores


async def surprise(llm: LLM, sentence: str) -> list[tuple[str, float]]:
    """The words of a sentence with their information per token, in nats."""
    words = re.findall(r"\s*\S+", sentence)
    scores = await score(llm, "\n", words)
    return [
        (word.strip(), -value / max(len(llm.tokenizer.encode(word)), 1))
        for word, value in zip(words, scores, strict=True)
    ]


def mean_of(words: Sequence[tuple[str, float]]) -> float:
    """Mean information of a sentence's words."""
    return float(np.mean([value for _, value in words]))
