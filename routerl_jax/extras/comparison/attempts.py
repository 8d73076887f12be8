"""An agent's attempts at the questions of a benchmark, and the numbers from them: metrics with intervals, costs, paired tests.

Each attempt is saved as it ends, so that a killed process can go on.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from routerl_jax.agents.agent import Agent, SearchTool
from routerl_jax.agents.driver import run
from routerl_jax.core.files import Journal, write_json_lines
from routerl_jax.core.rows import RowLocation
from routerl_jax.core.types import Episode, Example
from routerl_jax.engine.policy import Policy
from routerl_jax.engine.sampling import Sampling
from routerl_jax.evaluation.metrics import ANSWER, JUDGE, answer_scores, summarize, verdicts_that_count
from routerl_jax.evaluation.paired import compare_scores, holm
from routerl_jax.evaluation.records import PictureFiles, episode_of, episode_record, read_records
from routerl_jax.rewards.terms import Judge
from routerl_jax.services import faults

Record = dict[str, Any]


def attempt_all(
    agent: Agent,
    examples: Sequence[Example],
    engine: Policy,
    tools: Mapping[str, SearchTool],
    path: pathlib.Path,
    *,
    sampling: Sampling,
    seed: int,
    tool_timeout: float,
    progress: str = "",
) -> None:
    """Runs an agent once on every example without an episode in `path`, and appends each episode as it ends.

    If the policy failed in a way that says nothing about the question (faults.PASSING), the question is tried again. The last
    episode of an id counts. Each record has `took`:

    - `seconds`: the time since the previous episode ended, of all episodes that ran side by side.
    - `read` and `written`: tokens as an endpoint counts them. For the engine, every token that it was fed, and every token that
      it sampled, counts once.
    """
    journal = Journal(path)
    try:
        finished_ids = {record["id"] for record in journal.read() if not _passing(record)}
        remaining = [example for example in examples if example.id not in finished_ids]
        pictures, last = PictureFiles(path.parent), time.perf_counter()

        def finished(episode: Episode) -> None:
            nonlocal last
            now = time.perf_counter()
            took = {"seconds": now - last, **_tokens(episode)}
            journal.append(episode_record(episode, pictures, took=took))
            last = now

        if remaining:
            run(
                agent,
                remaining,
                engine,
                tools,
                seed=seed,
                sampling=sampling,
                tool_timeout=tool_timeout,
                progress=progress,
                finished=finished,
            )
    finally:
        journal.close()


def attempted(path: pathlib.Path, examples: Sequence[Example]) -> int:
    """Number of the examples with an episode in `path`. Another process may be adding to the file."""
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    ids = {json.loads(line)["id"] for line in lines if line.endswith(b"\n")}
    return sum(example.id in ids for example in examples)


def finished_attempts(
    path: pathlib.Path,
    examples: Sequence[Example],
    judge: Judge | None = None,
    judged_by: str = "",
    *,
    rewrite: bool = True,
) -> tuple[list[Episode], list[Record]]:
    """Episodes and records of all examples, in order.

    With a `judge`, episodes without its verdict get one.

    Args:
      judged_by: identifies this judge. Verdicts of other judges do not count.
      rewrite: rewrite the file if its order or verdicts differ from what is returned.

    Raises:
      ValueError: an example has no episode, or a row is no episode.
    """
    rows = {record["id"]: record for record in read_records(path)}
    if missing := [example.id for example in examples if example.id not in rows]:
        raise ValueError(f"{path} has no episode of question {missing[0]!r}; run the same command again")
    records = [rows[example.id] for example in examples]
    episodes = []
    for line, (record, example) in enumerate(zip(records, examples), 1):
        episode = episode_of(record, RowLocation(path, "line", line))
        episode.example = example  # records keep little of the metadata
        if record.get("judge") != judged_by:
            episode.verdict = None
        episodes.append(episode)
    if judge is not None:
        unjudged = [e for e in episodes if e.verdict is None or e.verdict.kind == "failed"]
        for episode, verdict in zip(unjudged, judge(unjudged) if unjudged else [], strict=True):
            episode.verdict = verdict
        verdicts = [dataclasses.asdict(episode.verdict) for episode in episodes if episode.verdict is not None]
        records = [
            row | {"verdict": verdict_fields, "judge": judged_by}
            for row, verdict_fields in zip(records, verdicts, strict=True)
        ]
    if rewrite and list(read_records(path)) != records:
        write_json_lines(path, records)
    return episodes, records


def _passing(record: Mapping[str, Any]) -> bool:
    failure = record.get("failure")
    return failure is not None and failure["kind"] in faults.PASSING


def _tokens(episode: Episode) -> dict[str, int]:
    if episode.usage is not None:
        return {"read": episode.usage.prompt_tokens, "written": episode.usage.tokens}
    sampled = sum(int(sequence.loss_mask.sum()) for sequence in episode.sequences)
    return {"read": sum(len(sequence.tokens) for sequence in episode.sequences) - sampled, "written": sampled}


# scores of a row, by metric, with an axis for the seeds if there are several; nan for episodes that are left out
Scores = Mapping[str, Float[np.ndarray, "*S N"]]


def row_scores(
    episodes: Sequence[Episode], metrics: Sequence[str], normalizer: str, seeds: int = 1
) -> dict[str, Float[np.ndarray, "S N"]]:
    """Scores of each episode, by metric; nan if the judge's verdict does not count. The order is that of `summarize`."""
    table, judged = answer_scores(episodes, normalizer), verdicts_that_count(episodes)
    scores = {name: judged if name == JUDGE else table[:, ANSWER.index(name)] for name in metrics}
    return {name: values.reshape(seeds, -1) for name, values in scores.items()}


def row_results(
    episodes: Sequence[Episode],
    records: Sequence[Mapping[str, Any]],
    tools: Sequence[str],
    normalizer: str,
    budget: int | None,
    seeds: int = 1,
) -> dict[str, Any]:
    """The numbers of an agent's episodes on a benchmark: `evaluation.metrics.summarize`, and `cost`.

    `cost` has means per attempt at a question: `searches` by knowledge base, tokens `read` and `written`, `seconds` (shared by
    all questions that ran side by side), and `money` if there is a price.
    """
    summary = summarize(episodes, normalizer, tools, budget, seeds)
    count = len(episodes)
    searched = collections.Counter(call.tool for episode in episodes for call in episode.calls)
    took = {key: sum(record["took"][key] for record in records) / count for key in ("read", "written", "seconds")}
    money = sum(episode.usage.cost for episode in episodes if episode.usage is not None) / count
    searches = {name: searched[name] / count for name in (*tools, *sorted(searched.keys() - set(tools)))}
    return {**summary, "cost": {"searches": searches, **took, **({"money": money} if money else {})}}


def paired_tests(rows: Mapping[str, Scores], metrics: Sequence[str], reference: str = "") -> list[dict[str, Any]]:
    """Paired tests between rows of a benchmark, for each metric: between every two rows, or each row and the `reference`
    (none if that is not among the rows). Rows without scores of a metric are left out.

    Returns:
      One entry per `metric`, `first` and `second`, in the order of the rows. It has `difference`, `interval` and `p`
      (paired.compare_scores) on the `n` questions on which both have a score of every seed, and `holm`, the `p` corrected for
      the number of tests of this metric.
    """
    tests: list[dict[str, Any]] = []
    for metric in metrics:
        names = [name for name, scores in rows.items() if metric in scores]
        pairs = list(itertools.combinations(names, 2))
        if reference:
            pairs = [(name, reference) for name in names if name != reference and reference in names]
        of_metric = []
        for first, second in pairs:
            ours, theirs = (np.atleast_2d(rows[name][metric]) for name in (first, second))
            scored = ~np.isnan(ours - theirs).any(axis=0)
            if scored.any():
                compared = compare_scores(ours[:, scored], theirs[:, scored])
                of_metric.append(
                    {"metric": metric, "first": first, "second": second, "n": int(scored.sum()), **compared}
                )
        corrected = holm([test["p"] for test in of_metric])
        tests += [{**test, "holm": value} for test, value in zip(of_metric, corrected)]
    return tests
