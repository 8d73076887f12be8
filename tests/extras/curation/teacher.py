"""A language model that knows a small world by heart, as a script: what it replies to each of R1-Router's chats."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from routerl_jax.core.types import Message, Passage
from routerl_jax.extras.curation.attempts import AttemptConfig
from routerl_jax.extras.curation.golden import AmountConfig, ConstructConfig
from routerl_jax.services.base import Completion
from routerl_jax.services.config import ChatModelConfig
from routerl_jax.training.config import KnowledgeConfig

CAPITALS = {"Ghana": "Accra", "Togo": "Lomé", "Peru": "Lima", "Chad": "N'Djamena", "Laos": "Vientiane", "Fiji": "Suva"}
RIVERS = {"Volta": "Ghana", "Mono": "Togo", "Rimac": "Peru", "Chari": "Chad", "Mekong": "Laos", "Rewa": "Fiji"}


def route(query: str, *names: str, thought: str = "hm") -> str:
    return f"<think>{thought}</think>\n<sub-question>{query}</sub-question>\n<ret>{', '.join(names)}</ret>"


def answer(text: str, thought: str = "hm") -> str:
    return f"<think>{thought}</think>\n<answer>{text}</answer>"


def question_of(river: str) -> str:
    return f"What is the capital of the country of the river {river}?"


def asked_for(user: str) -> tuple[str, str, int]:
    """Which chat it is ("route", "answer", "final"), its question, and how many sub-questions were answered."""
    question = re.findall(r"^Question: (.*)", user, re.MULTILINE)[-1]
    steps = len(re.findall(r"^Sub-question \d: ", user, re.MULTILINE))
    kinds = {"Next sub-question:": "route", "Answer:": "answer", "Final answer:": "final"}
    found = next(kind for end, kind in kinds.items() if re.search(rf"^{end}", user, re.MULTILINE))
    return found, question, steps


def knowing(user: str) -> str:
    """What a model replies that knows the world and does everything as it should."""
    kind, question, steps = asked_for(user)
    if kind == "answer":
        name = question.rstrip("?").split()[-1]
        return answer(f"It is {RIVERS.get(name) or CAPITALS[name]}.")
    river = question.rstrip("?").split()[-1]
    country = RIVERS[river]
    if kind == "final":
        return answer(CAPITALS[country])
    plan = [
        route(f"Which country has the river {river}?", "text retriever"),
        route(f"What is the capital of {country}?", "Table Retriever"),
        route("None", "None"),
    ]
    return plan[steps]


class Scripted:
    """A chat model in this process; `reply` gets (user's message, sample) and may give a Completion."""

    def __init__(self, reply: Callable[[str, int], str | Completion]) -> None:
        self.name, self.settings = "scripted", {}
        self._reply = reply
        self.asked: list[tuple[Sequence[Message], int]] = []

    def complete(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        max_tokens: int = 1024,
        temperature: float = 0.0,
        schema: Mapping[str, Any] | None = None,
        sample: int = 0,
    ) -> list[Completion]:
        self.asked += [(messages, sample) for messages in conversations]
        replies = [self._reply(messages[-1].content, sample) for messages in conversations]
        return [
            r if isinstance(r, Completion) else Completion(text=r, prompt_tokens=7, tokens=len(r.split()))
            for r in replies
        ]


class Facts:
    """A knowledge base that finds k lines about the last word of a query; remembers its batches."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    def search(self, queries: Sequence[Any], k: int) -> list[list[Passage]]:
        self.batches.append(list(queries))
        return [
            [Passage(id=str(i), title="", text=f"line {i} about\n{self._word(query)}") for i in range(k)]
            for query in queries
        ]

    def _word(self, query: Any) -> str:
        return (query if isinstance(query, str) else query.text).rstrip("?").split()[-1]


def job(data: str, attempt: Mapping[str, Any] | None = None, **amount: Any) -> ConstructConfig:
    """A job's configuration; the model and the knowledge bases are the tests' own."""
    return ConstructConfig(
        data=data,
        llm=ChatModelConfig(model="scripted"),
        knowledge={"text": KnowledgeConfig(source="facts"), "table": KnowledgeConfig(source="facts")},
        attempt=AttemptConfig(**{"k": 2, "attempts": 2, **(attempt or {})}),
        amount=AmountConfig(**{"dataset_ratio": 0.0, **amount}),
    )
