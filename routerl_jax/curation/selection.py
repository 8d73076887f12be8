"""Questions by difficulty (R1-Searcher, arXiv 2503.05592, section 2.1): how many attempts until a policy answers one?

The job runs in rounds. A round gives every question that is still unanswered a few attempts; its results go to disk portion by
portion, so that a killed job goes on where it was.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from tqdm.auto import tqdm

from routerl_jax.core.checked import Count, Seed, Size, checked
from routerl_jax.core.files import write_json_lines
from routerl_jax.core.types import Episode, Example
from routerl_jax.data.pictures import picture_name
from routerl_jax.data.readers import ExampleSource
from routerl_jax.evaluation.figures import difficulty_figure
from routerl_jax.evaluation.records import read_records
from routerl_jax.models.images import image_uri
from routerl_jax.parallel import multihost
from routerl_jax.rewards.metrics import ANSWER_METRICS
from routerl_jax.rewards.ranges import accepted_answers

Difficulty = Literal["easy", "medium", "hard"]
_TELLING = 8  # searches: if so many fail, and none does not, it is not for what they ask
LEVELS: tuple[Difficulty, ...] = ("easy", "medium", "hard")

# (questions, attempts for each, round) -> episodes, question by question, in the order of the attempts
Attempt = Callable[[Sequence[Example], int, int], Sequence[Episode]]


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class SelectionConfig:
    """How difficulty is measured, and what the sets are made of.

    `stage1` and `stage2` say how many questions of a kind to take, None for all: `{"medium": 350}`, or by data set
    (`metadata["dataset"]`, `data_source` or `source`) `{"hotpotqa/medium": 200, "2wiki/medium": 150}`.
    """

    easy_below: Size = 10  # answered in fewer attempts: easy, which is in no set by default
    hard_above: Size = 20  # not answered in so many: hard
    per_round: Size = 5  # attempts per question and round
    portion: Size = 256  # questions whose results are written at a time
    metric: str = "em"  # rewards.metrics.ANSWER_METRICS; an attempt is right where it is 1
    normalizer: str = "search_r1"
    seed: Seed = 0  # of the choice of questions
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
        """Of a question that was answered in so many attempts (None: in none)."""
        if rollouts is None or rollouts > self.hard_above:
            return "hard"
        return "easy" if rollouts < self.easy_below else "medium"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionReport:
    """What came out: questions by difficulty, the size of the sets, what they lack of what was asked for, and how many of the
    attempts' searches failed, which counts against their questions."""

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

    Portions that are in `workdir/rounds` already are not repeated. Every process of a job must call this, with one `workdir`.

    Raises:
      ValueError: a portion on disk is of other questions, or damaged; or all searches of a portion failed, which is not kept.
    """
    examples = {example.id: example for example in (source[i] for i in range(len(source)))}
    rollouts, failed = _measure(examples, attempt, config, workdir, progress)
    rows = [_row(example, rollouts[name], config) for name, example in examples.items()]
    stage1, missing1 = _choose(rows, config.stage1, config.seed, set())
    stage2, missing2 = _choose(rows, config.stage2, config.seed, {row["id"] for row in stage1})
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


def _measure(
    examples: Mapping[str, Example], attempt: Attempt, config: SelectionConfig, workdir: pathlib.Path, progress: bool
) -> tuple[dict[str, int | None], int]:
    """The number of the first right attempt of each question; and how many searches failed."""
    rollouts: dict[str, int | None] = dict.fromkeys(examples)
    failed = 0
    rounds = -(-config.hard_above // config.per_round)
    for number in range(rounds):
        before = number * config.per_round
        samples = min(config.per_round, config.hard_above - before)
        left = [name for name in examples if rollouts[name] is None]
        portions = [left[i : i + config.portion] for i in range(0, len(left), config.portion)]
        bar = tqdm(portions, desc=f"round {number + 1} of {rounds}", unit="portion", disable=not progress)
        for index, names in enumerate(bar):
            path = workdir / "rounds" / f"round-{number:02d}" / f"portion-{index:05d}.jsonl"
            if not path.is_file():
                _attempt(path, [examples[name] for name in names], attempt, samples, number, config)
            for record in _read(path, names, samples):
                failed += record["failed_searches"]
                if any(record["correct"]):
                    rollouts[record["id"]] = before + record["correct"].index(True) + 1
            bar.set_postfix_str(f"{sum(value is None for value in rollouts.values())} unanswered")
    return rollouts, failed


def _attempt(
    path: pathlib.Path,
    examples: Sequence[Example],
    attempt: Attempt,
    samples: int,
    number: int,
    config: SelectionConfig,
) -> None:
    """Makes a portion's attempts and writes what became of them."""
    metric = ANSWER_METRICS[config.metric]
    episodes = attempt(examples, samples, number)
    if len(episodes) != len(examples) * samples:
        raise ValueError(f"{len(episodes)} episodes for {samples} attempts at each of {len(examples)} questions")
    _check_searches(episodes)
    records = []
    for i, example in enumerate(examples):
        own = episodes[i * samples : (i + 1) * samples]
        predictions = [episode.answer for episode in own]
        correct = [metric(text, accepted_answers(example, text), config.normalizer) >= 1.0 for text in predictions]
        failed = sum(call.error is not None for episode in own for call in episode.calls)
        records.append({"id": example.id, "predictions": predictions, "correct": correct, "failed_searches": failed})
    if multihost.is_main():
        write_json_lines(path, records)
    multihost.barrier(f"{path.parent.name}/{path.name}")


def _check_searches(episodes: Sequence[Episode]) -> None:
    """A knowledge base that is down would make every question a hard one; a few searches may all fail for their own sake."""
    errors = [call.error for episode in episodes for call in episode.calls]
    if len(errors) >= _TELLING and None not in errors:
        raise ValueError(
            f"all {len(errors)} searches of these attempts failed, the first with: {errors[0]}. They would count against the "
            "questions, so they are not kept; mend the knowledge base and go on with --resume"
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


def _row(example: Example, rollouts: int | None, config: SelectionConfig) -> dict[str, Any]:
    """A question as FlashRAG writes it; pictures that are in memory alone as `data:` URIs."""
    found = {"difficulty": config.difficulty(rollouts), "rollouts": rollouts}
    pictures = [picture_name(image) or image_uri(image) for image in example.images]
    return {
        **({"images": pictures} if pictures else {}),
        "id": example.id,
        "question": example.question,
        "golden_answers": list(example.answers),
        "metadata": {**example.metadata, **found},
    }


def _choose(
    rows: Sequence[dict[str, Any]], wanted: Mapping[str, int | None], seed: int, taken: set[str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of the wanted kinds, drawn without those taken, in the order of `rows`; and what there was too little of."""
    rng = np.random.default_rng(seed)
    chosen: set[str] = set()
    missing = []
    for kind, count in wanted.items():
        name, _, level = kind.rpartition("/")
        gone = taken | chosen
        of_kind = [row["id"] for row in rows if _is_of(row, name, level) and row["id"] not in gone]
        if count is not None and count > len(of_kind):
            missing.append(f"{count} {kind} were asked for, {len(of_kind)} are there")
        drawn = of_kind if count is None else [of_kind[i] for i in rng.permutation(len(of_kind))[:count]]
        chosen.update(drawn)
    return [row for row in rows if row["id"] in chosen], missing


def _is_of(row: Mapping[str, Any], name: str, level: str) -> bool:
    metadata = row["metadata"]
    known = next((metadata[key] for key in ("dataset", "data_source", "source") if key in metadata), "")
    return metadata["difficulty"] == level and (not name or known == name)
