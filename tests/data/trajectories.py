"""A small file of golden trajectories in the released schema, made for tests: every kind of step, and an image."""

from __future__ import annotations

import json
import pathlib
from typing import Any

LEGEND = "what was searched, from the table retriever:"
REQUEST = "\n\n Give me the answer(with the format <answer></answer>) to the Question: "


def route(problem: str, query: str, retriever: str) -> dict[str, Any]:
    answer = {"query": query, "retriever": [retriever]}
    return {"step_type": "ret", "system": "Split it.", "problem": problem, "answer": answer}


def answer(problem: str, gold: str | list[str]) -> dict[str, Any]:
    return {"step_type": "ans", "system": "Answer it.", "problem": problem, "answer": gold}


CAPITAL = {
    "images": [],
    "steps": [
        route(
            "Origin question: How many people live in the capital of Ghana?\n", "capital of ghana? ", "text retriever"
        ),
        answer(
            f"{LEGEND}ter-0: Accra is the capital.\nter-1: Kumasi\n\nA city.{REQUEST}capital of ghana? ", "\naccra."
        ),
        route("Origin question: ..\nSub-question1: ..", "how many live in accra?", "table retriever"),
        answer(
            f"{LEGEND}tar-0: city: Accra, people: 2,514,000{REQUEST}how many?", "about 2,514,000 people live in accra."
        ),
        route("Origin question: ..\nSub-question2: ..", "none", "none"),
        answer("Origin question: ..", ["2,514,000", "2.5 million"]),
    ],
}
RIVER = {
    "images": ["volta.png"],
    "steps": [
        route("Origin question: Which river is this?\n<image>", "which river is seen?", "text image retriever"),
        answer(f"{LEGEND}tir-0: The Volta at dusk{REQUEST}which river?<image>", "the volta"),
        answer("Origin question: ..<image>", ["Volta"]),
    ],
}


def write(path: pathlib.Path, *rows: dict[str, Any]) -> pathlib.Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
