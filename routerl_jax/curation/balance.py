"""Questions by the searches that they take (MMSearch-R1, arXiv 2506.20670, section 3.1, Search Balancing): a trained policy
attempts each one several times, and what its right attempts searched says whether a search is needed, and of which kind.

WORKDIR/construct.json                 what the job is made of
WORKDIR/rounds/                        attempts, a file per portion
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

from routerl_jax.core.checked import Count, Seed, Size, checked
from routerl_jax.core.files import write_json_lines
from routerl_jax.core.progress import Bar
from routerl_jax.core.types import Example
from routerl_jax.curation.job import begin
from routerl_jax.curation.questions import IMAGES, choose, counts_of, dataset_of, digest_of, question_row
from routerl_jax.curation.report import write_report
from routerl_jax.curation.rollouts import Attempt, Rounds
from routerl_jax.parallel import multihost
from routerl_jax.parallel.workdir import alone_as_job
from routerl_jax.recipes.mmsearch_r1.agents import MMSearchAgent
from routerl_jax.rewards.metrics import ANSWER_METRICS
from routerl_jax.rewards.normalize import NORMALIZERS

FREE, REQUIRED, UNSOLVED = "search_free", "search_required", "unsolved"
KINDS = (FREE, "image", "text", "mixed")
# Of a forced probe's rounds: the searches that are allowed, by the picture and in words.
PROBES = ((False, False), (True, False), (False, True), (True, True))
_MADE = ("questions.jsonl", "train.jsonl", "report.json", "report.md", "rounds", IMAGES)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class BalanceConfig:
    """A job that finds out what questions take and draws a balanced sample."""

    job: Literal["balance"] = "balance"  # says which job it is
    policy: str = ""  # the --workdir of a run of launch.train with config.recipe="mmsearch_r1"; its settings hold
    step: Count = 0  # which of its checkpoints; 0: the finished policy
    data: str = ""  # questions, as data.readers.open_dataset takes them; empty: those that the run trained on
    attempts: Size = 8  # per question; with probe="forced" per question and round
    # observed: one round, the policy searches as it likes (the paper's). forced: rounds in which no search, one by the picture,
    # one in words and both are allowed; unanswered questions go on to the next
    probe: Literal["observed", "forced"] = "observed"
    metric: str = "em"  # rewards.metrics.ANSWER_METRICS; an attempt is right where it is 1
    normalizer: str = ""  # rewards.normalize.NORMALIZERS; empty: the run's
    portion: Size = 256  # questions whose attempts are written at a time
    # what the sample is made of: [DATASET/]KIND:COUNT with commas between. Kinds are search_free, image, text, mixed, and
    # search_required for the last three; COUNT may be `all`
    amounts: str = "search_free:1600,search_required:3400"
    seed: Seed = 0  # of what is drawn

    def __post_init__(self) -> None:
        if not self.policy:
            raise ValueError('config.policy is not set: name the --workdir of a run with config.recipe="mmsearch_r1"')
        if self.metric not in ANSWER_METRICS:
            raise ValueError(f"config.metric={self.metric!r}: known are {', '.join(ANSWER_METRICS)}")
        if self.normalizer:
            NORMALIZERS.get(self.normalizer)
        for kind in self.counts:
            if kind.rpartition("/")[2] not in (*KINDS, REQUIRED):
                known = ", ".join((*KINDS, REQUIRED))
                raise ValueError(f"config.amounts={self.amounts!r}: {kind!r} is not [DATASET/] and one of {known}")

    @property
    def counts(self) -> dict[str, int | None]:
        """`amounts` by kind."""
        return counts_of([part for part in self.amounts.split(",") if part.strip()], "config.amounts")

    def decisive(self) -> dict[str, Any]:
        """What attempts depend on beside policy and questions: other values are another job."""
        return {key: getattr(self, key) for key in ("step", "attempts", "probe", "metric", "normalizer")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BalanceReport:
    """What came out. `str(report)` is text for people, in Markdown.

    Attributes:
      before: questions by data set and kind; `unsolved` ones, which no attempt got right, are in no sample.
      after: of the sample.
      either: questions of kind image or text for which either search alone was enough.
      attempts, failed_searches: made in all.
      missing: what there was too little of.
    """

    before: Mapping[str, Mapping[str, int]]
    after: Mapping[str, Mapping[str, int]]
    either: int
    attempts: int
    failed_searches: int
    missing: Sequence[str]

    def record(self) -> dict[str, Any]:
        """As JSON."""
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
        drawn, known = (sum(sum(counts.values()) for counts in table.values()) for table in (self.after, self.before))
        lines += [
            "",
            f"- rejected, as none of the attempts was right: {unsolved:,}",
            f"- in no sample, as the amounts were reached: {known - unsolved - drawn:,}",
            f"- either search alone was enough: {self.either:,}",
            f"- {self.attempts:,} attempts; {self.failed_searches:,} searches failed",
            *(f"- {line}; the sample is smaller" for line in self.missing),
        ]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What the attempts at a question say.

    Attributes:
      kind: one of `KINDS`, or `unsolved`.
      either: a search of either kind alone was enough.
    """

    kind: str
    either: bool = False


def found_in(record: Mapping[str, Any], image_tool: str) -> Found:
    """The least that sufficed for a right attempt: no search, one kind of search, both kinds.

    A search that failed gave nothing, so it does not count. Where either kind alone was enough, it is the one with more right
    attempts, and the picture's where both have as many.

    Args:
      record: of `rollouts.Rounds`.
      image_tool: what the search by the picture is called; all others are in words.
    """
    right: collections.Counter[str] = collections.Counter()
    for correct, tools in zip(record["correct"], record["searched"], strict=True):
        if correct:
            kinds = {"image" if tool == image_tool else "text" for tool in tools}
            right["mixed" if len(kinds) == 2 else next(iter(kinds), FREE)] += 1
    if not right:
        return Found(kind=UNSOLVED)
    if right[FREE]:
        return Found(kind=FREE)
    if right["image"] or right["text"]:
        return Found(
            kind="image" if right["image"] >= right["text"] else "text", either=bool(right["image"] and right["text"])
        )
    return Found(kind="mixed")


def probing(agent: MMSearchAgent, number: int) -> MMSearchAgent:
    """The agent of a forced probe's round, with the searches that it allows."""
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
    """Attempts all questions and writes what they take, and the sample. Run again after a kill, it goes on where it was. Every
    process of a job must call this, with one `workdir`.

    Args:
      attempt: with probe="forced" in the rounds of `PROBES`.
      image_tool: the agent's.
      made_of: what the policy is, JSON-serialisable.
      normalizer: the run's, where config.normalizer is empty.
      overwrite: throw away what a job of other settings has made in `workdir`.

    Raises:
      ValueError: `workdir` holds a job of other settings or another process is at it, or all searches of a portion failed.
    """
    with alone_as_job(workdir):
        settings = {"job": config.job, **config.decisive(), "questions": digest_of(examples), **(made_of or {})}
        multihost.on_main(lambda: begin(settings, workdir, overwrite, _MADE))
        made = Rounds(
            examples={example.id: example for example in examples},
            attempt=attempt,
            directory=workdir / "rounds",
            portion=config.portion,
            metric=config.metric,
            normalizer=config.normalizer or normalizer,
        )
        found, attempts, failed = _found(made, config, image_tool, progress)
        return _write(config, workdir, examples, found, attempts, failed)


def _found(
    made: Rounds, config: BalanceConfig, image_tool: str, progress: bool
) -> tuple[dict[str, tuple[Found, Mapping[str, Any]]], int, int]:
    """What each question takes, with the record that says so; the number of attempts and of searches that failed."""
    found: dict[str, tuple[Found, Mapping[str, Any]]] = {}
    attempts, failed = 0, 0
    rounds = len(PROBES) if config.probe == "forced" else 1
    for number in range(rounds):
        left = [name for name in made.examples if name not in found or found[name][0].kind == UNSOLVED]
        bar = Bar(
            made.made(number, left, config.attempts),
            total=made.portions(left),
            desc=f"round {number + 1} of {rounds}",
            unit="portion",
            disable=not progress,
        )
        for records in bar:
            for record in records:
                found[record["id"]] = found_in(record, image_tool), record
                attempts += len(record["correct"])
                failed += record["failed_searches"]
            bar.set_postfix_str(_listed(collections.Counter(one.kind for one, _ in found.values())))
    return found, attempts, failed


def _write(
    config: BalanceConfig,
    workdir: pathlib.Path,
    examples: Sequence[Example],
    found: Mapping[str, tuple[Found, Mapping[str, Any]]],
    attempts: int,
    failed: int,
) -> BalanceReport:
    rows = []
    for example in examples:
        one, record = found[example.id]
        told = {"kind": one.kind, "right_attempts": sum(record["correct"]), "attempts": len(record["correct"])}
        rows.append(question_row(example, told, workdir))
    sample, missing = choose(rows, config.counts, config.seed, set(), _is_a)
    report = BalanceReport(
        before=_by_dataset(rows),
        after=_by_dataset(sample),
        either=sum(one.either for one, _ in found.values()),
        attempts=attempts,
        failed_searches=failed,
        missing=missing,
    )
    if multihost.is_main():
        write_json_lines(workdir / "questions.jsonl", rows)
        write_json_lines(workdir / "train.jsonl", sample)
        write_report(workdir, report.record(), str(report))
    return report


def _is_a(metadata: Mapping[str, Any], kind: str) -> bool:
    return metadata["kind"] == kind or (kind == REQUIRED and metadata["kind"] in KINDS[1:])


def _by_dataset(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Numbers of rows by data set and kind."""
    counts: dict[str, collections.Counter[str]] = {}
    for row in rows:
        counts.setdefault(dataset_of(row["metadata"]) or "questions", collections.Counter())[
            row["metadata"]["kind"]
        ] += 1
    return {name: {kind: n[kind] for kind in (*KINDS, UNSOLVED) if n[kind]} for name, n in counts.items()}


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())
