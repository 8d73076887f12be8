"""Worked questions that baselines put into their prompts, from worked.toml. They are the same for all baselines."""

from __future__ import annotations

import dataclasses
import pathlib
import tomllib
from collections.abc import Sequence

from routerl_jax.extras.baselines.baseline import CONCLUSION

SIZE = (896, 1148)  # pixels of the pages, wide and high: multiples of 28, as Qwen2.5-VL's image tokens need


@dataclasses.dataclass(frozen=True)
class Hop:
    """A step: a question, a sentence that answers it, the answer alone, and a page (title, text) that says so."""

    question: str
    fact: str
    answer: str
    title: str
    text: str


@dataclasses.dataclass(frozen=True)
class WorkedExample:
    """A question with its steps and its answer."""

    question: str
    hops: tuple[Hop, ...]
    answer: str

    @property
    def chain(self) -> str:
        """The chain of thought."""
        return " ".join([*(hop.fact for hop in self.hops), f"{CONCLUSION} {self.answer}."])


@dataclasses.dataclass(frozen=True)
class PageSearch:
    """A search, and what the page shows that it finds."""

    thought: str
    query: str
    shows: str


@dataclasses.dataclass(frozen=True)
class PageLook:
    """A closer look at the page shown last. `box` is left, top, right, bottom as shares of its sides."""

    thought: str
    box: tuple[float, float, float, float]
    shows: str


@dataclasses.dataclass(frozen=True)
class WorkedPages:
    """A question with its steps, and the thought before its answer."""

    question: str
    steps: tuple[PageSearch | PageLook, ...]
    thought: str
    answer: str


def _page_step(thought: str, shows: str, query: str = "", box: Sequence[float] = ()) -> PageSearch | PageLook:
    return PageSearch(thought, query, shows) if query else PageLook(thought, (box[0], box[1], box[2], box[3]), shows)


_FILE = tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text())
WORKED = tuple(
    WorkedExample(worked["question"], tuple(Hop(*hop) for hop in worked["hops"]), worked["answer"])
    for worked in _FILE["questions"]
)
WORKED_PAGES = tuple(
    WorkedPages(**{**worked, "steps": tuple(_page_step(**step) for step in worked["steps"])})
    for worked in _FILE["pages"]
)


def chains(count: int) -> str:
    """The first `count` worked questions with their chains of thought, as text; "" for none."""
    return examples([f"Question: {worked.question}\nAnswer: {worked.chain}" for worked in WORKED[:count]])


def examples(texts: Sequence[str]) -> str:
    """Worked examples in the form in which they end a task; "" for none."""
    return "\n\nExamples:\n\n" + "\n\n".join(texts) if texts else ""
