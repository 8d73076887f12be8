"""Summaries of groups of texts by a chat model. Answers are cached, so that a build after a kill only asks for the rest."""

from __future__ import annotations

from collections.abc import Sequence

from routerl_jax.core.types import Message, Passage
from routerl_jax.services.base import ChatModel

PROMPT = 1  # version of the prompt below; part of the cache's key
_SECOND_TEMPERATURE = 0.5  # temperature of the second attempt; greedy decoding would repeat the first answer
_TOKENS_PER_WORD = 2  # allows answers that are longer than requested
_TASK = (
    "Below are texts that belong together. Write one summary of them, of at most {words} words. Keep the names, dates, "
    "places and numbers, and say how things of different texts hang together. Write nothing that the texts don't say, and "
    "reply with the summary alone."
)


def summaries(
    model: ChatModel, groups: Sequence[Sequence[Passage]], *, words: int
) -> tuple[list[str | None], list[str]]:
    """One summary per group (None if it failed), and the reasons of failures in order. After an empty answer, the model is
    asked once more.

    Args:
      words: words of a summary, in the prompt.
    """
    prompts, tokens = [_conversation(group, words) for group in groups], _TOKENS_PER_WORD * words
    answers = model.complete(prompts, max_tokens=tokens) if prompts else []
    empty = [i for i, answer in enumerate(answers) if answer.error is None and not answer.text.strip()]
    if empty:
        again = model.complete(
            [prompts[i] for i in empty], max_tokens=tokens, temperature=_SECOND_TEMPERATURE, sample=1
        )
        for i, answer in zip(empty, again):
            answers[i] = answer
    texts: list[str | None] = []
    failures: list[str] = []
    for answer in answers:
        text = " ".join(answer.text.split())
        texts.append(text or None)
        if not text:
            failures.append(answer.error or "the answer is empty")
    return texts, failures


def _conversation(group: Sequence[Passage], words: int) -> list[Message]:
    texts = [f"{passage.title}\n{passage.text}" if passage.title else passage.text for passage in group]
    return [Message(role="user", content="\n\n".join([_TASK.format(words=words), *texts]))]
