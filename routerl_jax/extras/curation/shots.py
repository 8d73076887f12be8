"""Worked examples that stand before the real chat, so that models that don't know the form keep to it.

The paper has eight examples per kind of question (appendix A.4). These are ours, for any question.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from routerl_jax.agents.grammar import NO_TOOL
from routerl_jax.core.types import Message
from routerl_jax.data.trajectories import Document
from routerl_jax.recipes.r1_router.steps import StepPrompt, StepProtocol

Kind = Literal["route", "answer", "final"]

_CHURCH = "In which year was the architect of the Sagrada Família born?"
_WHO = ("Who designed the Sagrada Família?", "Antoni Gaudí designed the Sagrada Família.")
_WHEN = ("When was Antoni Gaudí born?", "Antoni Gaudí was born on 25 June 1852.")
_GAMES = "Which country won the most gold medals at the 2006 Winter Olympics?"
_MEDALS = (
    "How many gold medals did each country win at the 2006 Winter Olympics?",
    "Germany won 11, the United States and Austria 9 each.",
)
_MOUNTAIN = "How high is the mountain in this picture?"

# Question, sub-questions answered so far, thought, sub-question, knowledge base.
_ROUTES = (
    (_CHURCH, (), "I need the architect before I can ask for a year of birth.", _WHO[0], "text"),
    (_GAMES, (_MEDALS,), "Germany has the most, so nothing is missing.", NO_TOOL, NO_TOOL),
    (_MOUNTAIN, (), "Which mountain it is can only be seen.", "Which mountain is in the picture?", "text_image"),
    (_GAMES, (), "Medals are counted in tables.", _MEDALS[0], "table"),
    (_CHURCH, (_WHO,), "It was Gaudí. His year of birth is missing.", _WHEN[0], "text"),
    (_CHURCH, (_WHO, _WHEN), "The year is known.", NO_TOOL, NO_TOOL),
)
# Sub-question, knowledge base, documents found, thought, answer.
_ANSWERS = (
    (
        _WHO[0],
        "text",
        (
            "Sagrada Família: a basilica in Barcelona after the design of Antoni Gaudí.",
            "Barcelona: a city on the coast of Spain.",
        ),
        "The first finding names the architect.",
        _WHO[1],
    ),
    (
        _MEDALS[0],
        "table",
        ("2006 Winter Olympics medal table: Germany, gold 11; United States, gold 9; Austria, gold 9",),
        "The table lists them.",
        _MEDALS[1],
    ),
)
# Question, answered sub-questions, thought, answer.
_FINALS = (
    (_CHURCH, (_WHO, _WHEN), "The architect was Gaudí, born in 1852.", "1852"),
    (_GAMES, (_MEDALS,), "11 is more than 9.", "Germany"),
)


def shots(protocol: StepProtocol, kind: Kind, most: int) -> list[Message]:
    """Up to `most` worked chats of a kind, as messages. Chats about knowledge bases that the protocol lacks are left out."""
    tools = (*protocol.tools, NO_TOOL)
    if kind == "route":
        routes = [route for route in _ROUTES if route[4] in tools][:most]
        return _messages(
            [(protocol.route(q, history), protocol.write_route(t, sub, kb)) for q, history, t, sub, kb in routes]
        )
    if kind == "answer":
        label = protocol.label
        return _messages(
            [
                (
                    protocol.answer(sub, [Document(retriever=label(kb), text=text) for text in documents]),
                    protocol.write_answer(thought, answer),
                )
                for sub, kb, documents, thought, answer in _ANSWERS[:most]
                if kb in tools
            ]
        )
    return _messages(
        [
            (protocol.final(q, history), protocol.write_answer(thought, answer))
            for q, history, thought, answer in _FINALS[:most]
        ]
    )


def _messages(worked: Sequence[tuple[StepPrompt, str]]) -> list[Message]:
    return [
        message
        for prompt, reply in worked
        for message in (
            Message(role="user", content=prompt.user.rstrip("\n")),
            Message(role="assistant", content=reply),
        )
    ]
