"""Does the price of a search decide what is searched for, as arithmetic says it should?

python -m benchmarks.search_predictions benchmarks/results/mmsearch_r1_small.json [--picture=FILE.png]

With a right answer worth 1 - p after a search, a search pays where P_c < (1 - p) P_s: P_c is the chance to be right without a
search, P_s with all of them, both before training. Each run, type of question (kind, and how often the flag was shown)
and price is a point. The file is one of benchmarks.seeds --keep, of runs of configs/mmsearch_r1_small.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from benchmarks.seeds import Run, read_runs
from routerl_jax.evaluation.figures import color_of, new_figure, panels_of, save_figure

PRICES = {"no_penalty": 0.0, "mmsearch_r1": 0.1, "high_penalty": 0.3}  # agents by what a search costs of a right answer
_CLOSED, _OPEN = "warm_start_direct", "warm_start_rag_workflow"
_KEY = "by.type."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """A type of question in a run at a price.

    Attributes:
      closed, opened: EM of the start without a search, and with all (P_c, P_s).
      searched: share of the questions for which the trained policy searches.
      n: questions.
    """

    run: str
    type: str
    price: float
    closed: float
    opened: float
    searched: float
    n: int

    @property
    def pays(self) -> bool:
        """Whether a search does."""
        return self.closed < (1 - self.price) * self.opened

    @property
    def gain(self) -> float:
        """The gain of searches: the reward with them less the reward without."""
        return (1 - self.price) * self.opened - self.closed

    @property
    def by_any_price(self) -> bool:
        """Whether a rule holds that does not know the size of the price: at none all is searched for, at any what is mostly
        not known."""
        return (self.searched > 0.5) == (self.price == 0 or self.closed < 0.5)

    @property
    def foretold(self) -> bool:
        """Whether most questions are searched for if, and only if, a search pays."""
        return (self.searched > 0.5) == self.pays


def points(runs: Iterable[Run]) -> list[Point]:
    """All of them; of a run those prices for which it has the agent.

    Raises:
      SystemExit: a run has no start, or none of the prices, or no types of questions.
    """
    result = []
    for run in runs:
        prices = {agent: price for agent, price in PRICES.items() if agent in run.agents}
        needed = (_CLOSED, _OPEN, *(prices or PRICES))
        if lacking := next((name for name in needed if name not in run.agents), None):
            raise SystemExit(f"run {run.name} has no agent {lacking!r}; it has {', '.join(run.agents)}")
        types = sorted({key.split(".")[2] for key in run.agents[_CLOSED] if key.startswith(_KEY)})
        if not types:
            raise SystemExit(f"run {run.name} tells no types of questions apart (metadata 'type')")
        result += [_point(run, kind, agent, price) for kind in types for agent, price in prices.items()]
    return result


def _point(run: Run, kind: str, agent: str, price: float) -> Point:
    def of(name: str, metric: str) -> float:
        return run.agents[name][f"{_KEY}{kind}.{metric}"]

    return Point(
        run=run.name,
        type=kind,
        price=price,
        closed=of(_CLOSED, "em"),
        opened=of(_OPEN, "em"),
        searched=of(agent, "searched_rate"),
        n=int(of(agent, "n")),
    )


def table(points: Sequence[Point]) -> str:
    """Markdown: means over runs by type and price, and in how many runs the prediction holds."""
    lines = [
        "| questions | n | P_c % | P_s % | price | a search pays in | searched for % | as foretold |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for (kind, price), group in _grouped(points).items():
        means = [100 * np.mean([getattr(point, name) for point in group]) for name in ("closed", "opened", "searched")]
        closed, opened, searched = (f"{mean:.1f}" for mean in means)
        pays, held = (sum(getattr(point, name) for point in group) for name in ("pays", "foretold"))
        lines.append(
            f"| {kind} | {group[0].n} | {closed} | {opened} | {price:g} | {pays} of {len(group)} | {searched} | "
            f"{held} of {len(group)} |"
        )
    held = sum(point.foretold for point in points)
    by_any = sum(point.by_any_price for point in points)
    return "\n".join(
        [
            *lines,
            "",
            f"As foretold: {held} of {len(points)} points. By a rule that does not know the size of the price (without one, "
            f"always search; with any, search where P_c < 50 %): {by_any}.",
        ]
    )


def _grouped(points: Sequence[Point]) -> Mapping[tuple[str, float], list[Point]]:
    groups: dict[tuple[str, float], list[Point]] = {}
    for point in points:
        groups.setdefault((point.type, point.price), []).append(point)
    return groups


def picture(points: Sequence[Point], path: pathlib.Path) -> None:
    """A panel for each price: what a search gains by P_c and P_s, against how often the policy searches."""
    prices, types = (sorted({getattr(point, name) for point in points}) for name in ("price", "type"))
    figure = new_figure((4.6 * len(prices), 4))
    axes = panels_of(figure, 1, len(prices))
    for axis, price in zip(axes, prices):
        for i, kind in enumerate(types):
            chosen = [point for point in points if (point.price, point.type) == (price, kind)]
            gains, searched = [point.gain for point in chosen], [point.searched for point in chosen]
            axis.plot(gains, searched, "os"[i // 6 % 2], color=color_of(i), label=kind, markersize=6, alpha=0.8)
        axis.axvline(0, color="0.5", linewidth=0.8)
        axis.axhline(0.5, color="0.85", linewidth=0.8)
        axis.set(title=f"A search costs {100 * price:g} %", xlabel="(1 - p) P_s - P_c", ylim=(-0.03, 1.03))
    axes[0].set_ylabel("questions searched for")
    axes[-1].legend(frameon=False, fontsize=8, loc="lower right")
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=pathlib.Path, help="file of benchmarks.seeds --keep")
    parser.add_argument("--picture", type=pathlib.Path, help="PNG file")
    arguments = parser.parse_args()
    predictions = points(read_runs(arguments.runs))
    if not predictions:
        parser.error(
            f"{arguments.runs} holds no runs; write it by python -m benchmarks.seeds RUN.. --keep={arguments.runs}"
        )
    print(table(predictions))
    if arguments.picture:
        picture(predictions, arguments.picture)


if __name__ == "__main__":
    main()
