"""REPLUG: one document per prompt, and a mixture of the answers' probabilities (Shi et al., arXiv 2301.12652)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from routerl_jax.agents.agent import LLM, Tools
from routerl_jax.core.types import Episode, Example, Passage, Turn
from routerl_jax.extras.baselines.baseline import ChatPrompt, answered, end_mark
from routerl_jax.extras.baselines.forms import concluded, short
from routerl_jax.extras.baselines.registry import baseline
from routerl_jax.extras.baselines.vanilla_rag import READ, VanillaRAG


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
        chats = [self.request(example, llm, passage) for passage in results.passages]
        stop = () if self.chats(llm) else ("\n",)
        turns: list[Turn] = []
        for request in chats:
            chat, turn, text = await self.ask(example, llm, request, stop=stop, max_tokens=self.answer_tokens)
            answered(turn, concluded(text) or short(text))
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

    def request(self, example: Example, llm: LLM, passage: Passage) -> ChatPrompt:
        """The prompt with one document."""
        question = self.question(example, llm)

        def request_of(documents: str) -> ChatPrompt:
            return ChatPrompt(task=READ, text=f"Documents:\n{documents}\n\nQuestion: {question}", cue="Answer:")

        return self.fitted(example, llm, [passage], request_of, tokens=self.answer_tokens)


def mixed(scores: np.ndarray, weights: Sequence[float]) -> int:
    """The answer that is most probable in the mixture.

    Args:
      scores: log-probability of each answer with each document, [documents, answers].
      weights: the retriever's scores of the documents.
    """
    logits = np.asarray(weights) - np.max(weights)
    prior = logits - np.log(np.exp(logits).sum())
    return int(np.logaddexp.reduce(scores + prior[:, None], axis=0).argmax())
