"""A benchmark of six questions over six passages, and a chat model that knows some of the answers."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

from routerl_jax.extras.comparison.benchmarks import Benchmark
from routerl_jax.extras.comparison.config import ComparisonConfig
from routerl_jax.training.config import KnowledgeConfig, PolicyModelConfig

QUESTIONS = 6
KNOWN = {"direct": {0, 1}, "vanilla_rag": {0, 1, 2, 3, 4}, "cot": {5}}  # what it answers rightly


def write_world(directory: pathlib.Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    asked = [
        {"id": f"q{i}", "question": f"What colour has thing{i}?", "golden_answers": [f"colour{i}"]}
        for i in range(QUESTIONS)
    ]
    told = [
        {"id": f"p{i}", "title": f"Thing{i}", "text": f"thing{i} has the colour colour{i}."} for i in range(QUESTIONS)
    ]
    for name, rows in (("questions", asked), ("corpus", told)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def reply(messages: list[dict[str, Any]]) -> str:
    """By the prompt: with documents, step by step, or at once."""
    text = "\n".join(str(message["content"]) for message in messages)
    number = int(re.findall(r"What colour has thing(\d)", text)[-1])
    way = "vanilla_rag" if "[1] Thing" in text else "cot" if "So the answer is" in text else "direct"
    answer = f"colour{number}" if number in KNOWN[way] else "mauve"
    return f"So the answer is: {answer}" if way == "cot" else answer


def config(directory: pathlib.Path, url: str = "http://127.0.0.1:1/v1", **changes: Any) -> ComparisonConfig:
    """Three agents on the world in a directory."""
    world = Benchmark(
        questions=("questions.*",),
        knowledge={"text": KnowledgeConfig(source="corpus.*", kind="bm25")},
        licence="ours",
    )
    price: dict[str, Any] = {"price_read": 1000.0, "price_written": 1000.0}
    fields: dict[str, Any] = {
        "agents": ("direct", "vanilla_rag", "cot"),
        "benchmarks": ("things",),
        "own": {"things": world},
        "data": str(directory),
        "k": 2,
        "chat_model": PolicyModelConfig(model="m", base_url=url, concurrency=1, retries=0, **price),
    }
    return ComparisonConfig(**{**fields, **changes})
