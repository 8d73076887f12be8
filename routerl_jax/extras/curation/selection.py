"""A policy's attempts at many questions, saved in portions, so that a killed job can continue; and the job that sorts questions
by difficulty with them (R1-Searcher, arXiv 2503.05592, section 2.1): how many attempts does a policy need for one?
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from jax.sharding import Mesh

from routerl_jax.agents.agent import Agent
from routerl_jax.agents.driver import run
from routerl_jax.core.config import Count, Seed, Size, checked
from routerl_jax.core.files import write_json_lines
from routerl_jax.core.progress import Bar
from routerl_jax.core.types import Episode, Example
from routerl_jax.data.readers import ExampleSource
from routerl_jax.engine.sampling import Sampling
from routerl_jax.evaluation.figures import difficulty_figure
from routerl_jax.evaluation.records import read_records
from routerl_jax.extras.curation.questions import choose, question_row
from routerl_jax.models.decoder import Decoder
from routerl_jax.parallel import multihost
from routerl_jax.rewards.metrics import ANSWER_METRICS, accepted_answers
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.run import step_seed
from routerl_jax.training.setup import build_mesh, make_engine, open_knowledge

_TELLING = 8  # fewest searches that, if all fail, show that the fault is not in the queries

# (questions, attempts for each, round) -> episodes, question by question, in the order of the attempts
Attempt = Callable[[Sequence[Example], int, int], Sequence[Episode]]


def policy_attempts(
    config: TrainConfig, load: Callable[[Mesh], Decoder], agent: Callable[[int], Agent], workdir: pathlib.Path
) -> Attempt:
    """A function that makes attempts with a run's sampling and knowledge bases.

    Nothing is loaded before its first call. If all attempts are on disk already, no policy is needed.

    Args:
      load: loads the policy.
      agent: gives the agent of a round.
      workdir: directory with the snapshot of the web, if there is one (config.snapshot).
    """

    @functools.cache
    def parts():
        return make_engine(config, load(build_mesh(config.mesh))), open_knowledge(config, workdir)

    def attempt(examples: Sequence[Example], samples: int, number: int) -> list[Episode]:
        engine, tools = parts()
        rollout = config.rollout
        return run(
            agent(number),
            examples,
            engine,
            tools,
            samples=samples,
            seed=step_seed(config.seed, number),
            sampling=Sampling(temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k),
            deterministic=rollout.deterministic,
            tool_timeout=rollout.tool_timeout,
            progress="attempts",
        )

    return attempt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
    """Rounds of attempts. A question's record in a round has these lists, with one entry per attempt:

    - `predictions`: the answer,
    - `correct`: whether `metric` is 1 for it, under `normalizer`,
    - `searched`: the tools whose searches succeeded, in order.

    It also has `failed_searches`, their number over all attempts.

    Attributes:
      directory: has a folder per round, with a file per portion.
      portion: number of questions per file.
    """

    examples: Mapping[str, Example]
    attempt: Attempt
    directory: pathlib.Path
    portion: int
    metric: str
    normalizer: str

    def _portions(self, names: Sequence[str]) -> int:
        """Number of portions of these questions."""
        return -(-len(names) // self.portion)

    def records(self, number: int, names: Sequence[str], samples: int) -> Iterator[list[dict[str, Any]]]:
        """The records of a round, portion by portion. Portions that are on disk are not attempted again.

        Every process of a job must iterate over all portions.

        Raises:
          ValueError: a portion on disk has other questions or is damaged, or all searches of a portion failed. Such a portion
            is not saved.
        """
        for index in range(self._portions(names)):
            names_here = names[index * self.portion : (index + 1) * self.portion]
            path = self.directory / f"round-{number:02d}" / f"portion-{index:05d}.jsonl"
            # The main process decides: another process may look after the file was made.
            saved = multihost.exchange(path.is_file())[0]
            if not saved:
                self._attempt(path, [self.examples[name] for name in names_here], samples, number)
            yield _read(path, names_here, samples)

    def bar(self, number: int, rounds: int, names: Sequence[str], samples: int, *, progress: bool) -> Bar:
        """`records` with a progress bar, for round `number` of `rounds`."""
        return Bar(
            self.records(number, names, samples),
            total=self._portions(names),
            desc=f"round {number + 1} of {rounds}",
            unit="portion",
            disable=not progress,
        )

    def _attempt(self, path: pathlib.Path, examples: Sequence[Example], samples: int, number: int) -> None:
        """Makes the attempts of a portion and saves their records."""
        metric = ANSWER_METRICS[self.metric]
        episodes = self.attempt(examples, samples, number)
        if len(episodes) != len(examples) * samples:
            raise ValueError(f"{len(episodes)} episodes for {samples} attempts at each of {len(examples)} questions")
        _check_searches(episodes)
        records = []
        for i, example in enumerate(examples):
            attempts = episodes[i * samples : (i + 1) * samples]
            predictions = [episode.answer for episode in attempts]
            right = [metric(text, accepted_answers(example, text), self.normalizer) >= 1.0 for text in predictions]
            records.append(
                {
                    "id": example.id,
                    "predictions": predictions,
                    "correct": right,
                    "searched": [[call.tool for call in episode.calls if call.error is None] for episode in attempts],
                    "failed_searches": sum(call.error is not None for episode in attempts for call in episode.calls),
                }
            )
        if multihost.is_main():
            write_json_lines(path, records)
        multihost.barrier(f"{path.parent.name}/{path.name}")


def _check_searches(episodes: Sequence[Episode]) -> None:
    """Raises ValueError if all searches failed: with a knowledge base that is down, every question would look hard. Below a
    few searches this is not checked, because those may all fail for reasons of their own."""
    errors = [call.error for episode in episodes for call in episode.calls]
    if len(errors) >= _TELLING and None not in errors:
        raise ValueError(
            f"all {len(errors)} searches of these attempts failed, the first with: {errors[0]}. They would count against the "
            "questions, so they are not kept; mend the knowledge base and go on with the job"
        )


def _read(path: pathlib.Path, names: Sequence[str], samples: int) -> list[dict[str, Any]]:
    records = list(read_records(path))
    same = [record.get("id") for record in records] == list(names)
    if not same or any(len(record["correct"]) != samples for record in records):
        raise ValueError(
            f"{path} holds attempts at other questions, or another number of them: the data or the settings have changed. Use "
            f"another --workdir"
        )
    return records


# --- questions by difficulty ---


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

    In a round, every question that is still unanswered gets a few attempts. Portions that are in `workdir/rounds` already are
    not repeated. Every process of a job must call this, with the same `workdir`.

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

    def is_a(metadata: Mapping[str, Any], level: str) -> bool:
        return metadata["difficulty"] == level

    stage1, missing1 = choose(rows, config.stage1, config.seed, set(), is_a)
    stage2, missing2 = choose(rows, config.stage2, config.seed, {row["id"] for row in stage1}, is_a)
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
