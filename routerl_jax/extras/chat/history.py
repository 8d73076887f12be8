"""Puts earlier exchanges of a conversation before a question, as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Exchange(NamedTuple):
    """A question and its answer."""

    question: str
    answer: str


def with_history(question: str, earlier: Sequence[Exchange], tokens: Callable[[str], int], most: int) -> str:
    """The question with the latest exchanges before it, as a text; the question alone if there are none.

    An agent is asked one question at a time. The text repeats earlier questions and answers, so that
    "and its capital?" can be understood.

    Args:
      tokens: number of tokens of a text.
      most: tokens that the exchanges may take. The oldest that have no room are left out.
    """
    shown: list[str] = []
    for exchange in reversed(earlier):
        text = f"Q: {exchange.question}\nA: {exchange.answer}\n"
        if tokens("".join([text, *shown])) > most:
            break
        shown.insert(0, text)
    if not shown:
        return question
    return f"Earlier in this conversation:\n{''.join(shown)}\nThe question now: {question}"
