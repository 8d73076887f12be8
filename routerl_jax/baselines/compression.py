"""Documents shortened by the policy's own scores: Selective Context (arXiv 2310.06201) and LongLLMLingua (2310.06839)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Literal

import numpy as np

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.baselines.baseline import Found
from routerl_jax.baselines.registry import baseline
from routerl_jax.baselines.vanilla_rag import VanillaRAG
from routerl_jax.core.types import Episode, Example, Passage

HELD = "The answer to this question stands in the text above."


@baseline(
    "selective_context",
    paper="2310.06201",
    about="drops what the policy expects anyway, and reads the rest",
    scores=True,
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectiveContext(VanillaRAG):
    """Searches for the question and scores every sentence of the documents by itself; the share `drop` of the units that carry
    least information (mean of -log p over a unit's tokens; a percentile over all documents together) is left out, and vanilla
    RAG reads the rest.

    The paper's units are tokens, noun phrases (by spaCy, the code's default) and sentences, scored by a model of its own; here
    they are words or sentences, scored by the policy. It needs an engine: an endpoint tells no log-probabilities.

    Attributes:
      drop: share of units: 0.5 in the code.
      unit: what is kept or dropped whole.
    """

    drop: float = 0.5
    unit: Literal["word", "sentence"] = "word"

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        found = await self.search(tools, example.question)
        scored = [[await surprise(llm, one) for one in sentences(passage, llm)] for passage in found.passages]
        if self.unit == "sentence":
            scored = [[[(" ".join(word for word, _ in one), mean_of(one))] for one in passage] for passage in scored]
        units = [value for passage in scored for sentence in passage for _, value in sentence]
        least = float(np.quantile(units, self.drop)) if units else 0.0
        shorter = [
            dataclasses.replace(passage, text=" ".join(text for one in kept for text, value in one if value >= least))
            for passage, kept in zip(found.passages, scored, strict=True)
        ]
        return await self.read(example, llm, together(found, [one for one in shorter if one.text.strip()]))


@baseline(
    "longllmlingua",
    paper="2310.06839",
    about="ranks documents by the question's probability, and shortens them for it",
    scores=True,
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class LongLLMLingua(VanillaRAG):
    """Searches for the question; ranks the documents by the mean log-probability of the question, and of a sentence that says
    it can be answered, after each, and puts the best first; then keeps of each the words whose log-probability rises most when
    the question stands before it (contrastive perplexity): the share `rate`, and `spread` more for the first document, down to
    `spread` less (`share`). Vanilla RAG reads the rest.

    The paper compresses token by token in segments that see what was kept before, with a small model of its own, under a
    budget of tokens that may leave documents out, and mends names in the answer afterwards. Here words are scored once, in
    whole documents, by the policy, and every document keeps its share. It needs an engine.

    Attributes:
      rate: share of words that are kept: 0.55 in FlashRAG.
      spread: of the shares: 0.3 in FlashRAG.
    """

    rate: float = 0.55
    spread: float = 0.3

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        found, question = await self.search(tools, example.question), self.question(example, llm)
        asked = [f"\n\nQuestion: {question}", f"\n{HELD}"]
        ranked = []
        for passage in found.passages:
            text = llm.tokenizer.plain(f"{passage.title}\n{passage.text}")
            scores = await score(llm, text, asked)
            ranked.append((sum(scores) / sum(len(llm.tokenizer.encode(one)) for one in asked), passage))
        ranked.sort(key=lambda item: -item[0])
        shorter = []
        for place, (_, passage) in enumerate(ranked):
            words = re.findall(r"\s*\S+", llm.tokenizer.plain(passage.text))
            before, after = await score(llm, "\n", words), await score(llm, f"Question: {question}\n", words)
            count = round(len(words) * share(place, len(ranked), self.rate, self.spread))
            gains = np.subtract(after, before)
            kept = sorted(np.argsort(-gains, kind="stable")[: max(1, count)].tolist())
            shorter.append(dataclasses.replace(passage, text="".join(words[place] for place in kept).strip()))
        return await self.read(example, llm, together(found, shorter))


def share(place: int, count: int, rate: float, spread: float) -> float:
    """Of the words of the document at this place (0 is the best) of so many, what is kept, in [0, 1]."""
    return min(1.0, max(0.0, rate + (1 - 2 * place / count) * spread))


def together(found: Found, passages: Sequence[Passage]) -> Found:
    """What was found, with these passages, in their order, in the place of its own."""
    if not found.passages:
        return found
    return Found((dataclasses.replace(found.calls[0], passages=tuple(passages), error=None),))


def sentences(passage: Passage, llm: LLM) -> list[str]:
    """A passage's sentences."""
    return [one for one in re.split(r"(?<=[.?!])\s+", llm.tokenizer.plain(passage.text).strip()) if one]


async def score(llm: LLM, prompt: str, texts: Sequence[str]) -> list[float]:
    """Log-probability of each text after a prompt, in a conversation of its own."""
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
