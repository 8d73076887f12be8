"""A job in which a language model shows how to search, whose teacher is a server, for tests that kill it:

python -m tests.extras.curation.teaching_job WORKDIR QUESTIONS STUDENT URL
"""

from __future__ import annotations

import io
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from PIL import Image

from routerl_jax.core.types import Passage, TextAndImage
from routerl_jax.extras.curation.teaching import TeachingConfig, TeachingReport, teach
from routerl_jax.models.images import image_uri
from routerl_jax.recipes.recipe import AgentConfig
from routerl_jax.services.base import ChatModel
from routerl_jax.services.config import ChatModelConfig
from routerl_jax.services.openai import OpenAIModel
from routerl_jax.training.config import KnowledgeConfig
from tests import seeing

IMAGE = "<reason>which flag?</reason>\n<search><img></search>"
TEXT = "<reason>it is Ghana</reason>\n<text_search>capital of Ghana</text_search>"
RIGHT = "<reason>so</reason>\n<answer>Accra</answer>"


def thumbnail(seed: int) -> str:
    buffer = io.BytesIO()
    Image.fromarray(seeing.picture(seed, 16, 16)).save(buffer, "PNG")
    return image_uri(buffer.getvalue())


class Pages:
    """Finds pages, or pictures; `fails`: at queries that hold this word."""

    def __init__(self, fails: str = "no query") -> None:
        self.fails = fails
        self.asked: list[Any] = []

    def search(self, queries: Sequence[Any], k: int) -> list[list[Passage]]:
        self.asked += queries
        if any(isinstance(query, str) and self.fails in query for query in queries):
            raise ConnectionError("the engine is down")
        return [
            [
                Passage(
                    id=f"https://a.b/{i}",
                    title=f"Title {i}",
                    text=f"words {i}",
                    image=thumbnail(i) if isinstance(query, TextAndImage) else "",
                )
                for i in range(k)
            ]
            for query in queries
        ]


def config(data: pathlib.Path | str, student: pathlib.Path | str, /, **changes: Any) -> TeachingConfig:
    fields: dict[str, Any] = {
        "data": str(data),
        "student": str(student),
        "llm": ChatModelConfig(model="scripted"),
        "agent": AgentConfig(max_searches=2, k=2, max_turn_tokens=200, answer_tokens=40, settings={"image_k": 2}),
        "knowledge": {name: KnowledgeConfig(source="facts") for name in ("image", "text")},
    }
    return TeachingConfig(**{**fields, **changes})


def run(
    workdir: pathlib.Path,
    settings: TeachingConfig,
    model: ChatModel,
    tools: dict[str, Any] | None = None,
    **options: Any,
) -> TeachingReport:
    found = tools or {"image": Pages(), "text": Pages()}
    return teach(settings, workdir, lambda: (model, found), progress=False, **options)


def serve(workdir: pathlib.Path, questions: str, student: str, url: str) -> TeachingReport:
    """Asks a server, two questions at once."""
    return run(workdir, config(questions, student, concurrency=2), OpenAIModel("scripted", url, retries=0))


if __name__ == "__main__":
    serve(pathlib.Path(sys.argv[1]), *sys.argv[2:])
