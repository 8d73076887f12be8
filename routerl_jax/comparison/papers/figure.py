"""Figures of papers that plot what is measured here: the command that draws each."""

from __future__ import annotations

import dataclasses

from routerl_jax.core.registry import Registry

ANALYZE = "python -m launch.analyze --workdir=RUN"
EVALUATE = "python -m launch.evaluate --config=configs/eval/text_qa.py --output=DIR"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperFigure:
    """A figure of a paper.

    Attributes:
      shows: what it plots.
      command: draws or tabulates the same here.
      where: which panel, page of the documentation or key of which file has it.
    """

    title: str
    paper: str
    shows: str
    command: str
    where: str


PAPER_FIGURES: Registry[PaperFigure] = Registry("figure of a paper")


def listing() -> list[tuple[str, str, str, str, str]]:
    """(name, paper, what it shows, command, where it is then) of every figure, sorted by name."""
    figures = [(name, PAPER_FIGURES.get(name)) for name in PAPER_FIGURES]
    return [(name, one.paper, one.shows, one.command, one.where) for name, one in figures]
