"""Sorts questions by the searches that they need, and draws a balanced sample (MMSearch-R1, arXiv 2506.20670, section 3.1,
Search Balancing).

A trained policy attempts each question several times. The searches of its right attempts show whether the question needs a
search, and of which kind.

WORKDIR/construct.json                 settings and data of the job
WORKDIR/rounds/                        attempts, one file per portion
WORKDIR/questions.jsonl                every question with its kind
WORKDIR/train.jsonl                    the balanced sample
WORKDIR/report.json, report.md         counts before and after
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from routerl_jax.core.config import Count, Seed, Size, checked
from routerl_jax.core.files import write_json_lines
from routerl_jax.core.types import Example
from routerl_jax.extras.curation.job import begin, write_report
from routerl_jax.extras.curation.questions import IMAGES, choose, counts_of, dataset_of, digest_of, question_row
from routerl_jax.extras.curation.selection import Attempt, Rounds
from routerl_jax.parallel import multihost
from routerl_jax.parallel.workdir import job_directory_lock
from routerl_jax.recipes.mmsearch_r1.agents import MMSearchAgent
from routerl_jax.rewards.metrics import ANSWER_METRICS, NORMALIZERS
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.load import load_config
from routerl_jax.training.setup import build_recipe


def open_run(workdir: pathlib.Path, step: int) -> tuple[TrainConfig, MMSearchAgent, dict[str, Any]]:
    """A run's configuration, its agent, and the settings that attempts depend on (JSON-serialisable). Loads no weights.

    Args:
      step: step of a checkpoint; 0: the finished policy.

    Raises:
      ValueError: there is no run, it has another recipe, or its policy is not finished. The message names config.policy or
        config.step.
    """
    try:
        config = load_config(workdir)
    except ValueError as error:
        raise ValueError(f"config.policy={str(workdir)!r}: {error}") from error
    agent = build_recipe(config).agent
    if not isinstance(agent, MMSearchAgent):
        raise ValueError(
            f"config.policy={str(workdir)!r}: its config.recipe is {config.recipe!r}; give a run of recipe 'mmsearch_r1'"
        )
    if not step and not (workdir / "policy" / "config.json").is_file():
        raise ValueError(
            f"config.step=0: {workdir} has no finished policy; wait for its end, or give the step of a checkpoint"
        )
    parts = ("seed", "recipe", "model", "agent", "knowledge", "rollout")
    made_of = {"policy": str(workdir.resolve()), **{key: dataclasses.asdict(config)[key] for key in parts}}
    return config, agent, {**made_of, "max_length": config.engine.max_length}


FREE, REQUIRED, UNSOLVED = "search_free", "search_required", "unsolved"
KINDS = (FREE, "image", "text", "mixed")
# The rounds of a forced probe: whether image search and text search are allowed.
PROBES = ((False, False), (True, False), (False, True), (True, True))
_MADE = ("questions.jsonl", "train.jsonl", "report.json", "report.md", "rounds", IMAGES)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class BalanceConfig:
    """A job that sorts questions by the searches that they need, and draws a balanced sample."""

    job: Literal["balance"] = "balance"  # the job that this configuration is for
    policy: str = ""  # the --workdir of a run of launch.train with config.recipe="mmsearch_r1"; its settings apply
    step: Count = 0  # step of the policy's checkpoint; 0: the finished policy
    data: str = ""  # questions, as data.readers.open_dataset takes them; empty: the questions that the run trained on
    attempts: Size = 8  # attempts per question; with probe="forced" per question and round
    # observed: one round, in which the policy searches as it likes (as in the paper). forced: rounds that allow no search, then
    # image search, then text search, then both; unanswered questions go on to the next round
    probe: Literal["observed", "forced"] = "observed"
    metric: str = "em"  # rewards.metrics.ANSWER_METRICS; an attempt is right if it is 1
    normalizer: str = ""  # rewards.metrics.NORMALIZERS; empty: the run's
    portion: Size = 256  # number of questions whose attempts are written at once
    # contents of the sample: [DATASET/]KIND:COUNT, separated by commas. Kinds are search_free, image, text, mixed, and
    # search_required for the last three together; COUNT may be `all`
    amounts: str = "search_free:1600,search_required:3400"
    seed: Seed = 0  # seed of the sample

    def __post_init__(self) -> None:
        if not self.policy:
            raise ValueError('config.policy is not set: name the --workdir of a run with config.recipe="mmsearch_r1"')
        if self.metric not in ANSWER_METRICS:
            raise ValueError(f"config.metric={self.metric!r}: known are {', '.join(ANSWER_METRICS)}")
        if self.normalizer:
            NORMALIZERS.get(self.normalizer)
        for kind in self.counts:
            if kind.rpartition("/")[2] not in (*KINDS, REQUIRED):
                kinds = ", ".join((*KINDS, REQUIRED))
                raise ValueError(f"config.amounts={self.amounts!r}: {kind!r} is not [DATASET/] and one of {kinds}")

    @property
    def counts(self) -> dict[str, int | None]:
        """`amounts` by kind; None stands for all."""
        return counts_of([part for part in self.amounts.split(",") if part.strip()], "config.amounts")

    def decisive(self) -> dict[str, Any]:
        """The settings that attempts depend on, besides policy and questions. Other values make another job."""
        return {key: getattr(self, key) for key in ("step", "attempts", "probe", "metric", "normalizer")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BalanceReport:
    """The result of the job. `str(report)` is Markdown for people.

    Attributes:
      before: number of questions by data set and kind. `unsolved` ones, which no attempt got right, are in no sample.
      after: the same for the sample.
      either: number of questions (of kind image or text) for which either search alone was enough.
      attempts, failed_searches: numbers over the whole job.
      missing: amounts that could not be reached.
    """

    before: Mapping[str, Mapping[str, int]]
    after: Mapping[str, Mapping[str, int]]
    either: int
    attempts: int
    failed_searches: int
    missing: Sequence[str]

    def record(self) -> dict[str, Any]:
        """The report, JSON-serialisable."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        columns = (*KINDS, UNSOLVED)
        lines = [f"| data set | | {' | '.join(columns)} | all |", "|---|---|" + "---|" * (len(columns) + 1)]
        for title, table in (("questions", self.before), ("sample", self.after)):
            total: collections.Counter[str] = collections.Counter()
            for counts in table.values():
                total.update(counts)
            rows = [*table.items(), *([("all", total)] if len(table) > 1 else [])]
            for name, counts in rows:
                cells = " | ".join(f"{counts.get(kind, 0):,}" for kind in columns)
                lines.append(f"| {name} | {title} | {cells} | {sum(counts.values()):,} |")
        unsolved = sum(counts.get(UNSOLVED, 0) for counts in self.before.values())
        drawn, questions = (
            sum(sum(counts.values()) for counts in table.values()) for table in (self.after, self.before)
        )
        lines += [
            "",
            f"- rejected, as none of the attempts was right: {unsolved:,}",
            f"- in no sample, as the amounts were reached: {questions - unsolved - drawn:,}",
            f"- either search alone was enough: {self.either:,}",
            f"- {self.attempts:,} attempts; {self.failed_searches:,} searches failed",
            *(f"- {line}; the sample is smaller" for line in self.missing),
        ]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchNeed:
    """The searches that a question needs, judged by its attempts.

    Attributes:
      kind: one of `KINDS`, or `unsolved`.
      either: a search of either kind alone was enough.
    """

    kind: str
    either: bool = False


def search_need(record: Mapping[str, Any], image_tool: str) -> SearchNeed:
    """The fewest kinds of search that were enough for a right attempt: none, one, or both.

    A search that failed gave nothing, so it does not count. If either kind alone was enough, the kind with more right attempts
    is taken, and image search if both have as many.

    Args:
      record: a record of `selection.Rounds`.
      image_tool: name of the image search tool. All other tools search with text.
    """
    right: collections.Counter[str] = collections.Counter()
    for correct, tools in zip(record["correct"], record["searched"], strict=True):
        if correct:
            kinds = {"image" if tool == image_tool else "text" for tool in tools}
            right["mixed" if len(kinds) == 2 else next(iter(kinds), FREE)] += 1
    if not right:
        return SearchNeed(kind=UNSOLVED)
    if right[FREE]:
        return SearchNeed(kind=FREE)
    if right["image"] or right["text"]:
        return SearchNeed(
            kind="image" if right["image"] >= right["text"] else "text", either=bool(right["image"] and right["text"])
        )
    return SearchNeed(kind="mixed")


def probing(agent: MMSearchAgent, number: int) -> MMSearchAgent:
    """The agent of a round of a forced probe, with only the searches that the round allows."""
    image, text = PROBES[number]
    return dataclasses.replace(
        agent,
        searches=agent.searches if image or text else 0,
        image_searches=agent.image_searches if image else 0,
        text_searches=agent.text_searches if text else 0,
    )


def balance(
    config: BalanceConfig,
    examples: Sequence[Example],
    attempt: Attempt,
    image_tool: str,
    workdir: pathlib.Path,
    *,
    made_of: Mapping[str, Any] | None = None,
    normalizer: str = "search_r1",
    overwrite: bool = False,
    progress: bool = True,
) -> BalanceReport:
    """Attempts all questions; writes the searches that they need, and the sample.

    After a kill, the same call continues the job. Every process of a job must call this, with the same `workdir`.

    Args:
      attempt: makes attempts; with probe="forced" it is called with the rounds of `PROBES`.
      image_tool: name of the agent's image search tool.
      made_of: identity of the policy, JSON-serialisable.
      normalizer: normaliser of the run, which is used if config.normalizer is empty.
      overwrite: delete the files of a job with other settings in `workdir`.

    Raises:
      ValueError: `workdir` holds a job with other settings, another process uses it, or all searches of a portion failed.
    """
    with job_directory_lock(workdir):
        settings = {"job": config.job, **config.decisive(), "questions": digest_of(examples), **(made_of or {})}
        multihost.on_main(lambda: begin(settings, workdir, overwrite, _MADE))
        rounds = Rounds(
            examples={example.id: example for example in examples},
            attempt=attempt,
            directory=workdir / "rounds",
            portion=config.portion,
            metric=config.metric,
            normalizer=config.normalizer or normalizer,
        )
        results, attempts, failed = _search_needs(rounds, config, image_tool, progress)
        return _write(config, workdir, examples, results, attempts, failed)


def _search_needs(
    rounds: Rounds, config: BalanceConfig, image_tool: str, progress: bool
) -> tuple[dict[str, tuple[SearchNeed, Mapping[str, Any]]], int, int]:
    """The result of each question, with its record; the number of attempts, and of failed searches."""
    results: dict[str, tuple[SearchNeed, Mapping[str, Any]]] = {}
    attempts, failed = 0, 0
    count = len(PROBES) if config.probe == "forced" else 1
    for number in range(count):
        remaining = [name for name in rounds.examples if name not in results or results[name][0].kind == UNSOLVED]
        bar = rounds.bar(number, count, remaining, config.attempts, progress=progress)
        for records in bar:
            for record in records:
                results[record["id"]] = search_need(record, image_tool), record
                attempts += len(record["correct"])
                failed += record["failed_searches"]
            kinds = collections.Counter(result.kind for result, _ in results.values())
            bar.set_postfix_str(", ".join(f"{count} {kind}" for kind, count in kinds.items()))
    return results, attempts, failed


def _write(
    config: BalanceConfig,
    workdir: pathlib.Path,
    examples: Sequence[Example],
    needs: Mapping[str, tuple[SearchNeed, Mapping[str, Any]]],
    attempts: int,
    failed: int,
) -> BalanceReport:
    rows = []
    for example in examples:
        result, record = needs[example.id]
        metadata = {"kind": result.kind, "right_attempts": sum(record["correct"]), "attempts": len(record["correct"])}
        rows.append(question_row(example, metadata, workdir))

    def is_a(metadata: Mapping[str, Any], kind: str) -> bool:
        return metadata["kind"] == kind or (kind == REQUIRED and metadata["kind"] in KINDS[1:])

    sample, missing = choose(rows, config.counts, config.seed, set(), is_a)
    report = BalanceReport(
        before=_by_dataset(rows),
        after=_by_dataset(sample),
        either=sum(result.either for result, _ in needs.values()),
        attempts=attempts,
        failed_searches=failed,
        missing=missing,
    )
    if multihost.is_main():
        write_json_lines(workdir / "questions.jsonl", rows)
        write_json_lines(workdir / "train.jsonl", sample)
        write_report(workdir, report.record(), str(report))
    return report


def _by_dataset(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Numbers of rows by data set and kind."""
    counts: dict[str, collections.Counter[str]] = {}
    for metadata in (row["metadata"] for row in rows):
        counts.setdefault(dataset_of(metadata) or "questions", collections.Counter())[metadata["kind"]] += 1
    return {
        name: {kind: by_kind[kind] for kind in (*KINDS, UNSOLVED) if by_kind[kind]} for name, by_kind in counts.items()
    }
