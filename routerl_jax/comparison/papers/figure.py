"""Figures of papers whose values are measured here, and the command that draws each."""

from __future__ import annotations

import dataclasses

from routerl_jax.core.registry import Registry

ANALYZE = "python -m launch.analyze --workdir=RUN"
EVALUATE = "python -m launch.evaluate --config=configs/eval/text_qa.py --output=DIR"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperFigure:
    """A figure of a paper.

    Attributes:
      shows: what the figure plots.
      command: the command that draws or tabulates the same here.
      where: the panel, the page of the documentation, or the file and key that has it.
    """

    title: str
    paper: str
    shows: str
    command: str
    where: str


PAPER_FIGURES: Registry[PaperFigure] = Registry("figure of a paper")


def listing() -> list[tuple[str, str, str, str, str]]:
    """(name, paper, what it shows, command, where the result is) of every figure, sorted by name."""
    figures = [(name, PAPER_FIGURES.get(name)) for name in PAPER_FIGURES]
    return [(name, figure.paper, figure.shows, figure.command, figure.where) for name, figure in figures]
