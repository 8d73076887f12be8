"""A job that makes questions about pictures, whose model is a server, for tests that kill it:

python -m tests.extras.curation.vqa_job WORKDIR CONCEPTS URL
"""

from __future__ import annotations

import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

from routerl_jax.core.types import Passage
from routerl_jax.extras.curation.vqa import VqaConfig, VqaReport, make_vqa
from routerl_jax.services.base import ChatModel
from routerl_jax.services.config import ChatModelConfig
from routerl_jax.services.openai import OpenAIModel
from routerl_jax.training.config import KnowledgeConfig
from tests.extras.curation.teaching_job import thumbnail

KINDS = {
    "thylacine": "Nature",
    "astrolabe": "Science",
    "otter": "Nature",
    "lute": "Arts",
    "tram": "Industry",
    "fern": "Nature",
}


class Gallery:
    """Finds a page without a picture, and one with a picture, about what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def search(self, queries: Sequence[Any], k: int) -> list[list[Passage]]:
        self.asked += queries
        if any("broken" in query for query in queries):
            raise ConnectionError("the engine is down")
        return [
            [
                Passage(id="https://a.b/0", title="No picture", text="x"),
                *(
                    [
                        Passage(
                            id="https://a.b/1",
                            title=f"On {query}",
                            text=f"A {query}. " * 9,
                            image=thumbnail(len(query)),
                        )
                    ]
                    if "unseen" not in query
                    else []
                ),
            ][:k]
            for query in queries
        ]


def concept_of(user: str) -> str:
    return re.findall(r"were found for: (.*)|^Answer: The (.*)\.", user, re.MULTILINE)[-1][0]


def knowing(user: str) -> str:
    """A question that keeps the rules, or a kind."""
    if "<kind>" in user:
        name = re.findall(r"^Answer: The (.*)", user, re.MULTILINE)[-1].lower()
        return f"<kind>{KINDS.get(name, 'Entities')}</kind>"
    return f"<question>What is shown here?</question><answer>The {concept_of(user)}</answer>"


def config(concepts: pathlib.Path | str, **changes: Any) -> VqaConfig:
    fields: dict[str, Any] = {
        "concepts": str(concepts),
        "llm": ChatModelConfig(model="scripted"),
        "knowledge": {"pictures": KnowledgeConfig(source="facts")},
        "sample": -1,
        "test": 0,
    }
    return VqaConfig(**{**fields, **changes})


def run(workdir: pathlib.Path, settings: VqaConfig, model: ChatModel, **options: Any) -> VqaReport:
    return make_vqa(settings, workdir, lambda: (model, Gallery()), progress=False, **options)


def serve(workdir: pathlib.Path, concepts: str, url: str) -> VqaReport:
    """Asks a server, two concepts at once."""
    return run(workdir, config(concepts, concurrency=2), OpenAIModel("scripted", url, retries=0))


if __name__ == "__main__":
    serve(pathlib.Path(sys.argv[1]), *sys.argv[2:])
