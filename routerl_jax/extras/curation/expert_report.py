"""The report of a job of experts: trajectories by steps and actions, rejections with their reasons, and the cost."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from routerl_jax.extras.curation.expert_config import ExpertJobConfig
from routerl_jax.extras.curation.report import ModelUse, Report, listed


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsReport(Report):
    """Numbers of trajectories, and their cost. `model` and `use` are the planner's.

    Attributes:
      tried, accepted, written: number of questions by data set. The written ones are the accepted ones that balancing keeps.
      reasons: number of questions without a trajectory, by the outcome of their last attempt.
      unusable: number of replies that could not be used, by expert and reason, even if a later reply could be used.
      steps, actions: number of written trajectories by their number of steps, and by their sequence of actions.
      accepted_steps, accepted_actions: the same for all accepted trajectories.
      grounder, grounder_use: model and use of the grounder.
    """

    tried: Mapping[str, int]
    accepted: Mapping[str, int]
    written: Mapping[str, int]
    reasons: Mapping[str, int]
    unusable: Mapping[str, int]
    steps: Mapping[int, int]
    actions: Mapping[str, int]
    accepted_steps: Mapping[int, int]
    accepted_actions: Mapping[str, int]
    grounder: str
    grounder_use: ModelUse
    searches: int

    def __str__(self) -> str:
        lines = ["| data set | tried | accepted | written |", "|---|---|---|---|"]
        for name, count in self.tried.items():
            lines.append(f"| {name} | {count:,} | {self.accepted.get(name, 0):,} | {self.written.get(name, 0):,} |")
        lines += ["", "| steps | accepted | written |", "|---|---|---|"]
        lines += [
            f"| {name} | {count:,} | {self.steps.get(name, 0):,} |" for name, count in self.accepted_steps.items()
        ]
        lines += ["", "| actions | accepted | written |", "|---|---|---|"]
        lines += [
            f"| {name} | {count:,} | {self.actions.get(name, 0):,} |" for name, count in self.accepted_actions.items()
        ]
        return "\n".join(
            [
                *lines,
                "",
                f"- not accepted because of: {listed(self.reasons)}",
                f"- replies that could not be used: {listed(self.unusable)}",
                f"- planner {self.model}: {self.use}",
                f"- grounder {self.grounder}: {self.grounder_use}",
                f"- {self.searches:,} searches; {self.seconds:,.0f} s in this session",
            ]
        )


def make_report(
    config: ExpertJobConfig,
    records: Sequence[Mapping[str, Any]],
    tried: Sequence[Mapping[str, Any]],
    written: Sequence[Mapping[str, Any]],
    seconds: float,
) -> ExpertsReport:
    """Counts the records of a job.

    Args:
      records: all records of the journal; the cost is over all of them.
      tried: the last record of each question.
      written: the records whose trajectories are in the file.
    """
    attempts = [attempt for record in records for attempt in record["attempts"]]
    accepted = [record for record in tried if record["row"] is not None]
    return ExpertsReport(
        model=config.planner.model,
        use=ModelUse.counted(attempts, config.read_price, config.write_price),
        seconds=round(seconds, 1),
        tried=_frequent(record["dataset"] for record in tried),
        accepted=_frequent(record["dataset"] for record in accepted),
        written=_frequent(record["dataset"] for record in written),
        reasons=_frequent(record["outcome"] for record in tried if record["row"] is None),
        unusable=_frequent(reason for attempt in attempts for reason in attempt["unusable"]),
        steps=_by_steps(written),
        actions=_frequent(map(actions_of, written)),
        accepted_steps=_by_steps(accepted),
        accepted_actions=_frequent(map(actions_of, accepted)),
        grounder=config.grounder.model,
        grounder_use=ModelUse.counted((attempt["grounder"] for attempt in attempts), 0.0, 0.0),
        searches=sum(attempt["searches"] for attempt in attempts),
    )


def steps_of(record: Mapping[str, Any]) -> int:
    """Number of steps of an accepted trajectory, including the answer."""
    return len(record["attempts"][-1]["actions"])


def actions_of(record: Mapping[str, Any]) -> str:
    """Actions of an accepted trajectory, such as "search > look > answer"."""
    return " > ".join(record["attempts"][-1]["actions"])


def _by_steps(records: Iterable[Mapping[str, Any]]) -> dict[int, int]:
    return dict(sorted(collections.Counter(map(steps_of, records)).items()))


def _frequent(items: Iterable[Any]) -> dict[Any, int]:
    return dict(collections.Counter(items).most_common())
