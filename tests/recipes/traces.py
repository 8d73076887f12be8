"""Five rollouts of ours in the form of R1-Searcher's released ones: none, one and two searches, a long answer, Chinese."""

from __future__ import annotations

from typing import Any


def _shown(*documents: tuple[str, str]) -> str:
    lines = "".join(f"({i})Title: {title} Text: {text}\n" for i, (title, text) in enumerate(documents, 1))
    return f"\n\n<|begin_of_documents|>\n{lines}<|end_of_documents|>\n\n"


def _row(name: str, question: str, gold: str, answer: str, trace: str, *searches: tuple[str, Any]) -> dict[str, Any]:
    return {
        "id": name,
        "dataset": "ours",
        "model": "ours",
        "question": question,
        "golden_answers": [gold],
        "pred_answer": answer,
        "trace": trace,
        "searches": [
            {"query": query, "documents": [{"title": title, "text": text} for title, text in documents]}
            for query, documents in searches
        ],
    }


_GHANA = (("Ghana", "Ghana is a country in West Africa.  Its capital is Accra."), ("Accra", "A city (2)by the sea."))
_VOLTA = (("Lake Volta", "An assistant engineer called it large: 8,502 km²."),)
_TWO = (
    "I need the country first. <|begin_of_query|> country of Lake Volta<|end_of_query|>"
    + _shown(*_VOLTA)
    + 'That is Ghana. <|begin_of_query|>capital of "Ghana"<|end_of_query|>'
    + _shown(*_GHANA)
    + "It is Accra.</think>\n\n <answer>Accra</answer>"
)

ROWS = [
    _row("none", "Is Accra a city?", "yes", "True", " It is.</think>\n<answer>True</answer>"),
    _row(
        "one",
        "What is the capital of Ghana?",
        "Accra",
        "The Accra city",
        "<|begin_of_query|>capital Ghana<|end_of_query|>"
        + _shown(*_GHANA)
        + "So.</think><answer>The Accra city</answer>",
        ("capital Ghana", _GHANA),
    ),
    _row(
        "two",
        "What is the capital of the country of Lake Volta?",
        "Accra",
        "Accra",
        _TWO,
        ("country of Lake Volta", _VOLTA),
        ('capital of "Ghana"', _GHANA),
    ),
    _row(
        "long",
        "What is Ghana?",
        "a country",
        "a country in West Africa which lies between Togo and Ivory Coast",
        "<|begin_of_query|>Ghana<|end_of_query|>"
        + _shown(*_GHANA)
        + "So.</think><answer>a country in West Africa which lies between Togo and Ivory Coast</answer>",
        ("Ghana", _GHANA),
    ),
    _row(
        "chinese",
        "Is Lake Volta in Togo?",
        "no",
        "not",
        "<|begin_of_query|>Lake Volta<|end_of_query|>"
        + _shown(("沃尔特水库", "加纳"))
        + "不在。</think><answer>not</answer>",
        ("Lake Volta", (("沃尔特水库", "加纳"),)),
    ),
]
