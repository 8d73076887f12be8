"""Figures of papers, with values that are measured here: what each shows, what it needs, and how it is drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from routerl_jax.core.registry import Registry
from routerl_jax.extras.comparison.papers.measured import Measured, Method


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawing:
    """How a figure is drawn from measurements (launch.analyze --figures).

    Attributes:
      recipe: the recipe that the figure is about.
      methods: the methods in it.
      draw: makes the figure.
      tries: trials of a run (training.trials) before the figure is drawn: vanilla RAG with other numbers of `pages` at once, or
        the policy with other numbers of `documents` of a search.
      over_training: the figure needs only the metrics of training. A run need not have ended.
      records: the figure needs the episode records.
    """

    recipe: str
    methods: tuple[Method, ...]
    draw: Callable[[Measured], Any]
    tries: Literal["", "pages", "documents"] = ""
    over_training: bool = False
    records: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperFigure:
    """A figure of a paper.

    Attributes:
      shows: what the figure plots.
      needs: what must have been run for all of it.
      drawing: how it is drawn.
    """

    title: str
    paper: str
    shows: str
    needs: str
    drawing: Drawing

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of --rows that the figure uses."""
        return tuple(dict.fromkeys(method.key for method in self.drawing.methods if method.key))


PAPER_FIGURES: Registry[PaperFigure] = Registry("figure of a paper")
A_RUN = "RUN (--workdir)"
COMPARED = "DIR of a comparison (--output)"
FIGURE_HEADINGS = ("name", "paper", "shows", "needs", "runs to be named (--rows)")


def listing() -> list[tuple[str, str, str, str, str]]:
    """(name, paper, what it shows, what it needs, keys of --rows) of every figure, sorted by name."""
    figures = [(name, PAPER_FIGURES.get(name)) for name in PAPER_FIGURES]
    return [
        (name, figure.paper, figure.shows, figure.needs, ", ".join(figure.keys)) for name, figure in sorted(figures)
    ]
