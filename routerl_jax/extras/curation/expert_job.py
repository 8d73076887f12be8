"""Makes supervised data for VRAG-RL's policy (arXiv 2505.22019, section 2.2, appendix D).

A planner thinks, searches and answers. A grounder finds the regions that the planner wants to see. Right trajectories are kept
and balanced.

WORKDIR/construct.json             settings and data of the job
WORKDIR/replies.jsonl              every reply of a model, written as soon as it arrives
WORKDIR/questions.jsonl            a record per finished question: its attempts, and the row of the right one
WORKDIR/demonstrations.jsonl       the balanced rows, as config.warm_start.demonstrations="messages:FILE" reads them
WORKDIR/pictures/                  crops in these rows
WORKDIR/report.json, report.md     written when the job ends
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from routerl_jax.agents.agent import SearchTool
from routerl_jax.core.background import in_thread
from routerl_jax.core.files import write_json_lines
from routerl_jax.core.types import Episode, Verdict
from routerl_jax.data.rounds import RecordedRounds, message_row
from routerl_jax.evaluation.records import PictureFiles
from routerl_jax.extras.curation import experts
from routerl_jax.extras.curation.experts import ExpertJobConfig, Experts
from routerl_jax.extras.curation.job import (
    Batches,
    Demonstrate,
    ModelUse,
    Record,
    ReplyFile,
    Report,
    Services,
    best_of,
    by_frequency,
    listed,
    load_student,
    run_demonstrations,
    within_share,
)
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.recipes.vrag_rl.agents import VRAGAgent
from routerl_jax.services.base import ChatModel
from routerl_jax.services.judge import open_judge
from routerl_jax.services.load import CachedModel
from routerl_jax.training.setup import bound_pictures


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
        kinds: list[tuple[str, Mapping[Any, int], Mapping[Any, int]]] = [
            ("steps", self.accepted_steps, self.steps),
            ("actions", self.accepted_actions, self.actions),
        ]
        for title, accepted, written in kinds:
            lines += ["", f"| {title} | accepted | written |", "|---|---|---|"]
            lines += [f"| {name} | {count:,} | {written.get(name, 0):,} |" for name, count in accepted.items()]
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
        use=ModelUse.counted(attempts, config),
        seconds=round(seconds, 1),
        tried=by_frequency(record["dataset"] for record in tried),
        accepted=by_frequency(record["dataset"] for record in accepted),
        written=by_frequency(record["dataset"] for record in written),
        reasons=by_frequency(record["outcome"] for record in tried if record["row"] is None),
        unusable=by_frequency(reason for attempt in attempts for reason in attempt["unusable"]),
        steps=_by_steps(written),
        actions=by_frequency(map(actions_of, written)),
        accepted_steps=_by_steps(accepted),
        accepted_actions=by_frequency(map(actions_of, accepted)),
        grounder=config.grounder.model,
        grounder_use=ModelUse.counted(attempt["grounder"] for attempt in attempts),
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


_MADE = ("questions.jsonl", "replies.jsonl", "demonstrations.jsonl", "report.json", "report.md", "pictures")


class ExpertResources(NamedTuple):
    """The models and knowledge bases of a job."""

    planner: ChatModel
    grounder: ChatModel
    tools: Mapping[str, SearchTool]


def demonstrate(
    config: ExpertJobConfig,
    workdir: pathlib.Path,
    open_services: Callable[[], ExpertResources],
    *,
    student: VisionLanguageModel | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> ExpertsReport:
    """Lets the experts work on the questions of `config.data`, and writes the right trajectories.

    After a kill, the same call continues the job. Nothing is asked twice.

    Args:
      open_services: opens the planner, the grounder and the pages. It is not called if nothing is left to do.
      student: the policy of `config.student`, if it is in memory already.
      overwrite: delete the files of a job with other settings in `workdir`.

    Raises:
      ValueError: `workdir` holds a job with other settings, another process uses it, the data or the student can't be used, or
        too many questions failed in a row.
    """
    agent = config.build_agent()
    prompts = [
        experts.planner_task(agent.max_turns),
        experts.planner_question(""),
        experts.PAGE,
        experts.PART,
        experts.last_turn(""),
        experts.retry_prompt("", ""),
        experts.grounder_task("", [""], "", "", (1, 1), config.box_scale, config.released),
    ]
    return run_demonstrations(
        config,
        {"workdir": workdir, "outputs": _MADE, "doing": "showing"},
        prompts,
        lambda: _demonstrating(config, workdir, agent, student, open_services),
        functools.partial(_write, config, workdir),
        overwrite=overwrite,
        progress=progress,
    )


@contextlib.contextmanager
def _demonstrating(
    config: ExpertJobConfig,
    workdir: pathlib.Path,
    agent: VRAGAgent,
    student: VisionLanguageModel | None,
    open_services: Callable[[], ExpertResources],
) -> Iterator[Demonstrate]:
    policy = student
    if policy is None:
        policy = load_student(config.student)
        if not isinstance(policy, VisionLanguageModel):
            raise ValueError(f"config.student={config.student!r} is no policy that sees, with a tokenizer")
        bound_pictures(config.student_model(), policy)
    opened = open_services()
    replies = ReplyFile(workdir / "replies.jsonl")
    planner, grounder = (CachedModel(model, replies) for model in (opened.planner, opened.grounder))
    # an attempt without a verdict is made again, whatever such a verdict counts
    tolerant = dataclasses.replace(config.judge, failed="zero")
    judge = open_judge(tolerant, config.normalizer, replies) if config.judge.model else None
    pair = Experts(
        agent=agent,
        student=policy,
        config=config,
        planner=Services(planner, opened.tools, config.search_timeout),
        grounder=Services(grounder, {}, config.search_timeout),
        judge=Batches[Episode, Verdict](lambda episodes: in_thread(lambda: judge(episodes), "judge"))
        if judge
        else None,
    )
    pictures = PictureFiles(workdir)
    task = agent.form.instructions()

    def record(recorded: RecordedRounds | None) -> dict[str, Any]:
        return {"row": recorded and message_row(recorded, pictures.name, task)}

    try:
        yield lambda question: best_of(question, pair.attempt, config.attempts, record)
    finally:
        for service in (planner, grounder, judge):
            if service is not None:
                service.close()  # also closes the file of replies


def balanced(records: Sequence[Mapping[str, Any]], config: ExpertJobConfig) -> list[Mapping[str, Any]]:
    """Accepted records, of which some are left out for balance.

    No number of steps and no sequence of actions has more than its share (`config.steps_share`, `config.actions_share`), or an
    equal part if that is larger. Of each kind the first records stay.
    """
    selected, count = list(records), -1
    while len(selected) != count:
        count = len(selected)
        selected = within_share(selected, config.steps_share, steps_of)
        selected = within_share(selected, config.actions_share, actions_of)
    return selected


def _write(
    config: ExpertJobConfig, workdir: pathlib.Path, records: Sequence[Record], tried: Sequence[Record], seconds: float
) -> ExpertsReport:
    """Writes the balanced rows and the report."""
    written = balanced([record for record in tried if record["row"] is not None], config)
    write_json_lines(workdir / "demonstrations.jsonl", (record["row"] for record in written))
    report = make_report(config, records, tried, written, seconds)
    report.write(workdir)
    return report
