"""A job in which a planner and a grounder make trajectories over Atlas's pages, and who plays these two; as a program for tests
that kill it:

python -m tests.extras.curation.expert_run WORKDIR QUESTIONS STUDENT URL
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from routerl_jax.core.types import Example, Passage
from routerl_jax.data.atlas import pages
from routerl_jax.data.atlas.pages import page_questions
from routerl_jax.extras.curation.expert_job import ExpertResources, ExpertsReport, demonstrate
from routerl_jax.extras.curation.experts import ExpertJobConfig
from routerl_jax.recipes.recipe import AgentConfig
from routerl_jax.services.config import ChatModelConfig
from routerl_jax.services.openai import OpenAIModel
from routerl_jax.training.config import KnowledgeConfig

Messages = list[dict[str, Any]]
PLACES = {title: one for one in pages.all_pages() for title in [one.title]}


class Titles:
    """Finds Atlas's pages by the words of their titles, best first, and draws what it finds; remembers what it was asked."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self.asked: list[str] = []

    def search(self, queries: Sequence[Any], k: int) -> list[list[Passage]]:
        self.asked += queries
        if any("broken" in query for query in queries):
            raise ConnectionError("the engine is down")
        return [[self._passage(one) for one in _best(query)[:k]] for query in queries]

    def _passage(self, page: pages.Page) -> Passage:
        path = self._directory / f"{page.country}-{page.topic}.jpg".replace(" ", "_")
        if not path.is_file():
            path.write_bytes(pages.encoded(page))
        return Passage(id=page.id, title=page.title, text=page.title, image=str(path))


def _best(query: str) -> list[pages.Page]:
    words = set(re.findall(r"\w+", query.lower()))
    return sorted(PLACES.values(), key=lambda page: -len(words & set(re.findall(r"\w+", page.title.lower()))))


def questions(count: int = 6) -> list[Example]:
    """Two coarse, two fine, two of two pages, and so on."""
    return page_questions("train", count)


def write(path: pathlib.Path, examples: Sequence[Example]) -> pathlib.Path:
    rows = [
        {"id": e.id, "question": e.question, "golden_answers": list(e.answers), "metadata": dict(e.metadata)}
        for e in examples
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# --- the two experts ---


def text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else next(part["text"] for part in content if part["type"] == "text")


def is_planner(messages: Messages) -> bool:
    return messages[0]["role"] == "system"


def question_in(messages: Messages) -> str:
    if is_planner(messages):
        return text_of(messages[1]).removeprefix("Question: ").split("\n")[0]
    return re.findall(r"^The question is: (.*)$", text_of(messages[0]), re.MULTILINE)[0]


def plan(example: Example) -> list[str]:
    """What a planner writes that knows the gold pages: a search for each, a look at what is small, the answer."""
    steps = []
    for title in example.metadata["supporting_titles"]:
        steps.append(f"<thought>I need the page {title}.</thought>\n<search>{title}</search>")
        if example.metadata["type"] != "coarse":
            steps.append("<thought>The figures are too small.</thought>\n<look>the plate with the value</look>")
    return [*steps, f"<thought>Now I know it.</thought>\n<answer>{example.answers[0]}</answer>"]


def located(messages: Messages, scale: float = 0) -> list[int]:
    """Where the gold box of the page that was found last is, in the picture as it is said to be sent."""
    said = text_of(messages[0])
    title = re.findall(r"\(searched for: (.*?)\)", said)[-1]
    width, height = (scale, scale) if scale else map(int, re.findall(r"pixels of the picture, (\d+) x (\d+)", said)[0])
    example = next(e for e in questions(30) if e.question == question_in(messages))
    box = example.metadata["boxes"][PLACES[title].id]
    return [round(value * (width, height)[i % 2] / pages.SIZE[i % 2]) for i, value in enumerate(box)]


def knowing(messages: Messages) -> str:
    """What both write that do everything as they should."""
    if is_planner(messages):
        example = next(e for e in questions(30) if e.question == question_in(messages))
        return plan(example)[sum(message["role"] == "assistant" for message in messages)]
    return f"It is here: <box>{located(messages)}</box>"


# --- the job ---


def config(data: pathlib.Path | str, student: pathlib.Path | str, /, **changes: Any) -> ExpertJobConfig:
    fields: dict[str, Any] = {
        "data": str(data),
        "student": str(student),
        "planner": ChatModelConfig(model="planner"),
        "grounder": ChatModelConfig(model="grounder"),
        "agent": AgentConfig(max_searches=6, k=3, max_turn_tokens=400, instruct=True),
        "knowledge": {"pages": KnowledgeConfig(source="titles")},
        "steps_share": 1.0,
        "actions_share": 1.0,
    }
    return ExpertJobConfig(**{**fields, **changes})


def run(
    workdir: pathlib.Path,
    settings: ExpertJobConfig,
    url: str,
    tool: Titles | None = None,
    opened: Callable[[], None] = lambda: None,
    **options: Any,
) -> ExpertsReport:
    """The job with the two behind a server."""

    def open_services() -> ExpertResources:
        opened()
        planner, grounder = (OpenAIModel(name, url, retries=0) for name in ("planner", "grounder"))
        return ExpertResources(planner, grounder, {"pages": tool or Titles(pathlib.Path(settings.data).parent)})

    return demonstrate(settings, workdir, open_services, progress=False, **options)


if __name__ == "__main__":
    place, data, policy, server = sys.argv[1:]
    run(pathlib.Path(place), config(data, policy, concurrency=2), server)
