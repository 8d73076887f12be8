"""Baselines that search once, or not at all: direct answers, vanilla RAG, and other ways to read what one search found."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Literal

import numpy as np

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.agents.grammar import NO_TOOL
from routerl_jax.core.text import sentences
from routerl_jax.core.types import Episode, Example, Passage, Turn
from routerl_jax.extras.baselines.baseline import (
    CONCLUSION,
    WORKED,
    Baseline,
    ChatPrompt,
    Extracted,
    SearchResults,
    answered,
    chains,
    end_mark,
    examples,
    extracted,
    marked,
    reply_text,
    tidied,
)
from routerl_jax.extras.baselines.registry import baseline

# --- Baselines without a search: a direct answer, and chain of thought (arXiv 2201.11903; zero-shot 2205.11916). ---


DIRECT = "Answer the question with the answer alone, in a few words, without an explanation."
THINK = (
    "Think about the question step by step, one fact per sentence. End with a sentence that begins with "
    f'"{CONCLUSION}" and has the answer alone, in a few words.'
)


@baseline("direct", paper="", about="answers at once, without a search", searches="nothing")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Direct(Baseline):
    """Answers in one turn."""

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        return await self.answer(example, llm, self.asking(example, llm, DIRECT))

    @property
    def search_budget(self) -> int:
        """0: it never searches."""
        return 0


@baseline("cot", paper="2201.11903", about="thinks step by step, then answers, without a search", searches="nothing")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainOfThought(Direct):
    """Thinks step by step, and ends with "So the answer is:".

    If the policy does not end so, it is asked once more, as in the second stage of zero-shot chain of thought (2205.11916).
    That method has no worked questions in its prompts (`shots=0`).

    Attributes:
      shots: number of worked questions in the task, at most 8 (`worked`).
    """

    shots: int = 4

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        request = self.asking(example, llm, f"{THINK}{chains(self.shots)}")
        return await self.think(self.begin(example, llm, request), llm)


# --- Vanilla RAG: retrieve, then read (arXiv 2005.11401 without its training; R1-Router, 2505.22095, appendix A.5). ---


READ = (
    "Answer the question. The documents may help: use what is true and fits, and leave the rest. Write the answer alone, in a "
    "few words, without an explanation."
)


@baseline("vanilla_rag", paper="2005.11401", about="one search, for the question itself; reads and answers")
@dataclasses.dataclass(frozen=True, kw_only=True)
class VanillaRAG(Baseline):
    """Searches for the question, and answers with the documents in the prompt.

    With several knowledge bases there are k documents of each, as in R1-Router (five of each). They alternate between the
    knowledge bases.
    """

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        results = await self.search(tools, example.question)
        return await self.read(example, llm, results)

    async def read(self, example: Example, llm: LLM, results: SearchResults) -> Episode:
        """Answers from documents in a new chat."""
        request = self.asking(example, llm, READ)
        request = self.reading(example, llm, results.passages, request, results.failure, self.answer_tokens)
        return await self.answer(example, llm, request)

    @property
    def search_budget(self) -> int:
        """One search of each knowledge base."""
        return max(1, len(self.tools))


# --- HippoRAG 2's reader: a thought, then an answer, after one worked example with documents (arXiv 2502.14802). ---


THINK_AND_READ = (
    'Read the documents and the question with care. After "Thought:" work out the answer step by step; then, after "Answer:", '
    "write it alone, as short and exact as it can be said."
)


@baseline(
    "hipporag_reader", paper="2502.14802", about="one search, for the question itself; a thought, then the answer"
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class HippoRAGReader(VanillaRAG):
    """Searches for the question, then writes a thought and an answer.

    This is the reader of OSU-NLP-Group/HippoRAG, which has one worked example with documents. With a knowledge base of kind
    "graph" it is HippoRAG 2, with a dense one it is that paper's baseline. The code takes a reply without "Answer:" as a whole;
    here the policy is asked for the answer, or the answer is begun for it.

    Attributes:
      k: 5 in the paper.
      shots: number of worked questions with documents in the task, at most 8.
    """

    shots: int = 1

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        results = await self.search(tools, example.question)
        task = THINK_AND_READ + examples([_worked_reading(number) for number in range(min(self.shots, len(WORKED)))])
        request = self.asking(example, llm, task, cue="", begun="Thought:")
        request = self.reading(example, llm, results.passages, request, results.failure)
        chat = self.begin(example, llm, request)
        turn = await self.generate(chat, self.ends(llm), opening="\nAnswer:")
        text = reply_text(turn, llm).split("\nQuestion:")[0]
        if found := marked(text, "Answer:") or extracted(text, chain=True):
            return chat.episode(answer=answered(turn, found))
        return await self.conclude(chat, llm, turn, opening="\nAnswer:")


def _worked_reading(number: int) -> str:
    """A worked question with its documents, as text."""
    question = WORKED[number]
    documents = "\n".join(f"[{rank}] {hop.title}: {hop.text}" for rank, hop in enumerate(question.hops, 1))
    thought = " ".join(hop.fact for hop in question.hops)
    return f"Documents:\n{documents}\n\nQuestion: {question.question}\nThought: {thought}\nAnswer: {question.answer}"


# --- RECOMP: summarises documents before they are read (Xu et al., arXiv 2310.04408). ---


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
        results, summary = await self.search(tools, example.question), ""
        if results.passages:
            request = self.asking(example, llm, TASK, cue="Summary:")
            request = self.reading(example, llm, results.passages, request, tokens=self.summary_tokens)
            _, turn, text = await self.ask_line(example, llm, request, self.summary_tokens)
            turn.asked, turn.well_formed = "summary", True
            summary = llm.tokenizer.plain(" ".join(text.split()))
        if summary.strip("\"'. ").lower() in ("", NO_TOOL):
            return await self.answer(example, llm, self.asking(example, llm, DIRECT))
        request = self.asking(example, llm, READ)
        request = dataclasses.replace(request, text=f"Documents:\n[1] {summary}\n\n{request.text}")
        return await self.answer(example, llm, request)


# --- REPLUG: one document per prompt, and a mixture of the answers' probabilities (Shi et al., arXiv 2301.12652). ---


@baseline(
    "replug",
    paper="2301.12652",
    about="one document per prompt; answers by their probability over all of them",
    scores=True,
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class REPLUG(VanillaRAG):
    """Searches for the question and reads each document in a separate chat.

    The answer is the most probable one in the mixture of these chats. The weights are the softmax of the retriever's scores;
    scores of different knowledge bases are compared as they are.

    The paper mixes the distributions of every next token during decoding, for which a policy must give these. Here each chat
    writes an answer, and each of these answers, with its end, is scored in every chat. The mixture then decides between them:
    the probabilities are the paper's, but of fewer answers. It needs an engine, because an endpoint gives no log-probabilities.

    Attributes:
      k: 10 in the paper.
    """

    k: int = 10

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        results = await self.search(tools, example.question)
        if not results.passages:
            return await self.read(example, llm, results)
        request = self.asking(example, llm, READ)
        chats = [
            self.reading(example, llm, [passage], request, tokens=self.answer_tokens) for passage in results.passages
        ]
        turns: list[Turn] = []
        for request in chats:
            chat, turn, text = await self.ask_line(example, llm, request)
            answered(turn, extracted(text))
            turns.append(turn)
        end = "\n" if not self.chats(llm) else next(filter(None, (end_mark(turn, llm) for turn in turns)), "")
        answers = list(dict.fromkeys(turn.action.answer for turn in turns if turn.action and turn.action.answer))
        if not answers:
            return chat.episode(answer=None)
        scores = np.empty((len(chats), len(answers)))
        for row, request in enumerate(chats):
            for column, answer in enumerate(answers):
                chat = self.begin(example, llm, request)
                written = llm.tokenizer.plain(answer if self.chats(llm) else f" {answer}") + end
                scores[row, column] = (
                    sum(await chat.score([written])) if chat.tokens_of(written) <= chat.room else -np.inf
                )
                chat.close()
        return chat.episode(answer=answers[mixed(scores, [passage.score for passage in results.passages])])


def mixed(scores: np.ndarray, weights: Sequence[float]) -> int:
    """The answer that is most probable in the mixture.

    Args:
      scores: log-probability of each answer with each document, [documents, answers].
      weights: the retriever's scores of the documents.
    """
    logits = np.asarray(weights) - np.max(weights)
    prior = logits - np.log(np.exp(logits).sum())
    return int(np.logaddexp.reduce(scores + prior[:, None], axis=0).argmax())


# --- SuRe: candidate answers, a summary in favour of each, and a vote between summaries (Kim et al., arXiv 2404.13081). ---


CANDIDATES = (
    "Read the documents and write {count} different answers that the question may have, most likely first, each of at most a "
    "few words, as a list: (a) .., (b) .."
)
SUMMARY = (
    "Write a short passage that speaks for the given answer to the question. Use what the documents say and nothing else. "
    "Write the passage alone."
)
VALID = "Does the passage support the answer to the question? Write True or False."
BETTER = "Two passages are given. Which of them tells more that answers the question? Write Passage 1 or Passage 2."


@baseline("sure", paper="2404.13081", about="candidate answers; a summary for each; the best supported wins")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SuRe(VanillaRAG):
    """Searches for the question, then asks in separate chats:

    1. for candidate answers, with all documents,
    2. for each candidate, for a summary of the documents in its favour,
    3. for each summary, whether it is valid (1 or 0),
    4. for each ordered pair of summaries, which one is better. The first gets a point if it is, and half a point if the reply
       can't be read.

    The candidate with the largest sum of validity and points wins, or the earliest of several. If no candidate can be read, the
    episode ends without an answer, as in FlashRAG, which this follows.

    Attributes:
      k: documents per search; 10 in the paper.
      candidates: number of candidates; 2 in the paper.
    """

    k: int = 10
    candidates: int = 2

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        results, question = await self.search(tools, example.question), f"Question: {self.question(example, llm)}"
        request = ChatPrompt(task=CANDIDATES.format(count=self.candidates), text=question, cue="Answers: (a)")
        request = self.reading(example, llm, results.passages, request, results.failure)
        chat, turn, text = await self.ask(example, llm, request, max_tokens=self.answer_tokens * self.candidates)
        names = listed(text if self.chats(llm) else f"(a){text}")[: self.candidates]
        if not names:
            return chat.episode(answer=answered(turn, None, "no answer of a list (a) .., (b) .. can be read"))
        turn.well_formed = True
        summaries, scores = [], []
        for name in names:
            question_and_answer = f"{question}\nGiven answer: {llm.tokenizer.plain(name)}"
            request = ChatPrompt(task=SUMMARY, text=question_and_answer, cue="Passage:")
            request = self.reading(example, llm, results.passages, request, results.failure)
            chat, _, text = await self.ask_line(example, llm, request, self.max_turn_tokens)
            summaries.append(llm.tokenizer.plain(text.strip()))
            request = ChatPrompt(
                task=VALID, text=f"{question_and_answer}\nPassage: {summaries[-1]}", cue="True or False:"
            )
            chat, turn, text = await self.ask(example, llm, request, max_tokens=self.answer_tokens)
            said = re.search(r"\b(?:(not )?true|false|untrue)\b", text.lower())
            scores.append(float(said is not None and said[0] == "true"))
        for first, second in itertools.permutations(range(len(names)), 2):
            text = f"Passage 1: {summaries[first]}\nPassage 2: {summaries[second]}\n{question}"
            request = ChatPrompt(task=BETTER, text=text, cue="Better: Passage")
            chat, turn, text = await self.ask(example, llm, request, max_tokens=self.answer_tokens)
            match = re.search(r"(?<!\d)[12](?!\d)", text)
            scores[first] += {"1": 1.0, "2": 0.0}[match[0]] if match else 0.5
        answer = names[scores.index(max(scores))]
        return chat.episode(answer=answered(turn, Extracted(answer, "own")))


def listed(text: str) -> list[str]:
    """The entries of a list (a) .., (b) .., without duplicates."""
    entries = [tidied(entry.strip().rstrip(",;")) for entry in re.findall(r"\([a-z]\)[ \t]*([^()\n]+)", text)]
    return list(dict.fromkeys(entry for entry in entries if entry))


# --- Shortens documents by the policy's own scores: Selective Context (arXiv 2310.06201) and LongLLMLingua (2310.06839). ---


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
        scored = [
            [await surprise(llm, item) for item in sentences(llm.tokenizer.plain(passage.text))]
            for passage in results.passages
        ]
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
