"""The report of a job of golden trajectories: questions by data set, reasons, steps, retrievers, and the cost."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.data.trajectories import Trajectory, summarize_trajectories
from routerl_jax.extras.curation.attempts import FAILED
from routerl_jax.extras.curation.golden_balance import pattern_of
from routerl_jax.extras.curation.golden_config import ConstructConfig
from routerl_jax.extras.curation.report import ModelUse, Report, listed


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetRow:
    """Numbers of a data set's questions and trajectories.

    Attributes:
      questions: all questions of the data set.
      tried: accepted, rejected and failed questions together.
      train, validation: trajectories in the files. Accepted ones that balancing left out are in neither.
      reasons: questions that were not accepted, by the outcome of their last attempt.
      steps: trajectories in the files by their number of steps.
      retrievers: steps in the files by their gold retriever.
      patterns: trajectories in the files by their sequence of retrievers.
    """

    questions: int
    tried: int
    accepted: int
    rejected: int
    failed: int
    train: int
    validation: int
    reasons: Mapping[str, int]
    steps: Mapping[int, int]
    retrievers: Mapping[str, int]
    patterns: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstructReport(Report):
    """Trajectories by data set, and their cost.

    Attributes:
      attempts: number of attempts at all questions, by outcome.
      searches: number of searches in all sessions. Like the model's use, it leaves out questions that a kill interrupted.
    """

    datasets: Mapping[str, DatasetRow]
    attempts: Mapping[str, int]
    searches: int

    def __str__(self) -> str:
        columns = ("tried", "accepted", "rejected", "failed", "train", "validation")
        lines = [f"| data set | questions | {' | '.join(columns)} |", "|---|" + "---|" * (len(columns) + 1)]
        for name, row in self.datasets.items():
            lines.append(f"| {name} | {row.questions} | {' | '.join(str(getattr(row, key)) for key in columns)} |")
        counts_of = {
            "not accepted because of": self._total("reasons"),
            "attempts": self.attempts,
            "steps per trajectory": {f"{key} steps": value for key, value in self._total("steps").items()},
            "gold retrievers": self._total("retrievers"),
            "their sequences": self._total("patterns"),
        }
        lines += ["", *(f"- {name}: {listed(counts)}" for name, counts in counts_of.items())]
        left_out = sum(row.accepted - row.train - row.validation for row in self.datasets.values())
        lines += [f"- accepted, but in no file, for balance's sake (config.amount): {left_out:,}"] if left_out else []
        if self.model:
            lines.append(f"- {self.model}: {self.use}")
        lines.append(f"- {self.searches:,} searches; {self.seconds:,.0f} s in this session")
        return "\n".join(lines)

    def _total(self, key: str) -> dict[Any, int]:
        """A field summed over all data sets, the most frequent first."""
        total: collections.Counter[Any] = collections.Counter()
        for row in self.datasets.values():
            total.update(getattr(row, key))
        return dict(total.most_common())


def make_report(
    config: ConstructConfig,
    datasets: Mapping[str, int],
    records: Sequence[Mapping[str, Any]],
    parts: Mapping[str, tuple[list[Trajectory], list[Trajectory]]],
    seconds: float,
) -> ConstructReport:
    """Counts the records of a job.

    Args:
      datasets: number of questions by data set.
      records: records of the journal. If a question was tried again, its last outcome counts, and the cost of all attempts.
      parts: training and validation trajectories by data set.
    """
    outcomes = {record["id"]: (record["dataset"], record["outcome"]) for record in records}
    attempts = [attempt for record in records for attempt in record["attempts"]]
    return ConstructReport(
        model=config.llm.model if config.teacher == "model" else "",
        datasets={
            name: _row(count, [o for dataset, o in outcomes.values() if dataset == name], *parts.get(name, ([], [])))
            for name, count in datasets.items()
        },
        attempts=_counted(attempt["outcome"] for attempt in attempts),
        use=ModelUse.counted(attempts, config.amount.read_price, config.amount.write_price),
        searches=sum(attempt["searches"] for attempt in attempts),
        seconds=round(seconds, 1),
    )


def _row(questions: int, outcomes: Sequence[str], train: list[Trajectory], validation: list[Trajectory]) -> DatasetRow:
    accepted, failed = outcomes.count("accepted"), sum(outcome in FAILED for outcome in outcomes)
    trajectories = [*train, *validation]
    return DatasetRow(
        questions=questions,
        tried=len(outcomes),
        accepted=accepted,
        rejected=len(outcomes) - accepted - failed,
        failed=failed,
        train=len(train),
        validation=len(validation),
        reasons=_counted(outcome for outcome in outcomes if outcome != "accepted"),
        steps=_counted(len(trajectory.steps) for trajectory in trajectories),
        retrievers=dict(summarize_trajectories(trajectories).retrievers),
        patterns=_counted(map(pattern_of, trajectories)),
    )


def _counted(items: Any) -> dict[Any, int]:
    return dict(collections.Counter(items).most_common())
