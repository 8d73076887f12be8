"""Figures of papers whose values are measured here, and the command that draws each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from routerl_jax.comparison.papers.measured import Measured, Method
from routerl_jax.core.registry import Registry

ANALYZE = "python -m launch.analyze --workdir=RUN"
EVALUATE = "python -m launch.evaluate --config=configs/eval/text_qa.py --output=DIR"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawing:
    """How a figure is drawn from what is measured (launch.analyze --figures).

    Attributes:
      recipe: the recipe that the figure is about.
      methods: the methods in it.
      draw: makes the figure.
      tries: for a run, vanilla RAG answers again with other numbers of pages (training.trials) before it is drawn.
    """

    recipe: str
    methods: tuple[Method, ...]
    draw: Callable[[Measured], Any]
    tries: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperFigure:
    """A figure of a paper.

    Attributes:
      shows: what the figure plots.
      command: the command that draws or tabulates the same here.
      where: the panel, the page of the documentation, or the file and key that has it.
      drawing: draws it alone, in the paper's layout; None: it is part of a larger picture.
    """

    title: str
    paper: str
    shows: str
    command: str
    where: str
    drawing: Drawing | None = None


PAPER_FIGURES: Registry[PaperFigure] = Registry("figure of a paper")


def drawing(name: str) -> Drawing:
    """How a figure is drawn alone. Raises ValueError if there is no such figure, or if it is part of a larger picture."""
    figure = PAPER_FIGURES.get(name)
    if figure.drawing is None:
        raise ValueError(f"{figure.title} is not drawn alone: {figure.command} ({figure.where})")
    return figure.drawing


def listing() -> list[tuple[str, str, str, str, str]]:
    """(name, paper, what it shows, command, where the result is) of every figure, sorted by name."""
    figures = [(name, PAPER_FIGURES.get(name)) for name in PAPER_FIGURES]
    return [(name, figure.paper, figure.shows, figure.command, figure.where) for name, figure in figures]
