"""Sorts questions by difficulty (R1-Searcher, arXiv 2503.05592, section 2.1): how many attempts does a policy need for one?

The job runs in rounds. In a round, every question that is still unanswered gets a few attempts. Results are saved in portions,
so that a killed job can continue.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from routerl_jax.core.config import Count, Seed, Size, checked
from routerl_jax.core.files import write_json_lines
from routerl_jax.data.readers import ExampleSource
from routerl_jax.evaluation.figures import difficulty_figure
from routerl_jax.extras.curation.questions import choose, question_row
from routerl_jax.extras.curation.rollouts import Attempt, Rounds
from routerl_jax.parallel import multihost
from routerl_jax.rewards.metrics import ANSWER_METRICS

Difficulty = Literal["easy", "medium", "hard"]
LEVELS: tuple[Difficulty, ...] = ("easy", "medium", "hard")


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class SelectionConfig:
    """How difficulty is measured, and the contents of the sets of questions.

    `stage1` and `stage2` say how many questions of each kind to take; None means all. A kind is a difficulty,
    `{"medium": 350}`, or a difficulty of one data set (`metadata["dataset"]`, `data_source` or `source`),
    `{"hotpotqa/medium": 200, "2wiki/medium": 150}`.
    """

    easy_below: Size = 10  # questions answered in fewer attempts are easy; by default they are in no set
    hard_above: Size = 20  # questions not answered in so many attempts are hard
    per_round: Size = 5  # attempts per question and round
    portion: Size = 256  # number of questions whose results are written at once
    metric: str = "em"  # rewards.metrics.ANSWER_METRICS; an attempt is right if it is 1
    normalizer: str = "search_r1"
    seed: Seed = 0  # seed of the choice of questions
    stage1: Mapping[str, Count | None] = dataclasses.field(default_factory=lambda: {"medium": 350})
    stage2: Mapping[str, Count | None] = dataclasses.field(default_factory=lambda: {"medium": None, "hard": None})

    def __post_init__(self) -> None:
        if not 1 <= self.easy_below <= self.hard_above:
            raise ValueError(f"easy_below={self.easy_below} must be in [1, hard_above={self.hard_above}]")
        if self.metric not in ANSWER_METRICS:
            raise ValueError(f"metric={self.metric!r}: known are {', '.join(ANSWER_METRICS)}")
        for stage in (self.stage1, self.stage2):
            for kind in stage:
                if kind.rpartition("/")[2] not in LEVELS:
                    raise ValueError(f"stage of {kind!r}: expected [DATASET/]easy, medium or hard")

    def difficulty(self, rollouts: int | None) -> Difficulty:
        """The difficulty of a question that was answered in so many attempts (None: in none)."""
        if rollouts is None or rollouts > self.hard_above:
            return "hard"
        return "easy" if rollouts < self.easy_below else "medium"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionReport:
    """The result of the job.

    Attributes:
      counts: number of questions by difficulty.
      stage1, stage2: sizes of the sets.
      missing: a message for each kind of which there were too few questions.
      failed_searches: number of failed searches in all attempts. They count against their questions.
    """

    counts: Mapping[str, int]
    stage1: int
    stage2: int
    missing: Sequence[str]
    failed_searches: int


def select(
    source: ExampleSource,
    attempt: Attempt,
    config: SelectionConfig,
    workdir: pathlib.Path,
    *,
    progress: bool = True,
) -> SelectionReport:
    """Measures the difficulty of all questions and writes difficulty.jsonl, stage_1.jsonl, stage_2.jsonl and difficulty.png.

    Portions that are in `workdir/rounds` already are not repeated. Every process of a job must call this, with the same
    `workdir`.

    Raises:
      ValueError: a portion on disk has other questions or is damaged, or all searches of a portion failed. Such a portion is
        not saved.
    """
    examples = {example.id: example for example in (source[i] for i in range(len(source)))}
    rounds = Rounds(
        examples=examples,
        attempt=attempt,
        directory=workdir / "rounds",
        portion=config.portion,
        metric=config.metric,
        normalizer=config.normalizer,
    )
    rollouts, failed = _measure(rounds, config, progress)
    rows = [
        question_row(example, {"difficulty": config.difficulty(rollouts[name]), "rollouts": rollouts[name]}, workdir)
        for name, example in examples.items()
    ]
    stage1, missing1 = choose(rows, config.stage1, config.seed, set(), _has_difficulty)
    stage2, missing2 = choose(rows, config.stage2, config.seed, {row["id"] for row in stage1}, _has_difficulty)
    if multihost.is_main():
        write_json_lines(workdir / "difficulty.jsonl", rows)
        write_json_lines(workdir / "stage_1.jsonl", stage1)
        write_json_lines(workdir / "stage_2.jsonl", stage2)
        difficulty_figure(list(rollouts.values()), config.easy_below, config.hard_above, workdir / "difficulty.png")
    counts = Counter(row["metadata"]["difficulty"] for row in rows)
    return SelectionReport(
        counts={level: counts[level] for level in LEVELS},
        stage1=len(stage1),
        stage2=len(stage2),
        missing=[f"stage 1: {text}" for text in missing1] + [f"stage 2: {text}" for text in missing2],
        failed_searches=failed,
    )


def _measure(rounds: Rounds, config: SelectionConfig, progress: bool) -> tuple[dict[str, int | None], int]:
    """The number of the first right attempt of each question (None: none was right), and the number of failed searches."""
    rollouts: dict[str, int | None] = dict.fromkeys(rounds.examples)
    failed = 0
    count = -(-config.hard_above // config.per_round)
    for number in range(count):
        before = number * config.per_round
        samples = min(config.per_round, config.hard_above - before)
        remaining = [name for name in rounds.examples if rollouts[name] is None]
        bar = rounds.bar(number, count, remaining, samples, progress=progress)
        for records in bar:
            for record in records:
                failed += record["failed_searches"]
                if any(record["correct"]):
                    rollouts[record["id"]] = before + record["correct"].index(True) + 1
            bar.set_postfix_str(f"{sum(value is None for value in rollouts.values())} unanswered")
    return rollouts, failed


def _has_difficulty(metadata: Mapping[str, Any], level: str) -> bool:
    return metadata["difficulty"] == level
