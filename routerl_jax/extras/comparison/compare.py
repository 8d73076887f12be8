"""Runs agents on benchmarks and writes a report. Started again, it continues where it stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from routerl_jax.agents.agent import SearchTool
from routerl_jax.core.config import naming
from routerl_jax.core.files import check_same, read_json, write_atomic
from routerl_jax.core.types import Example, Message
from routerl_jax.data.readers import rows_left_out
from routerl_jax.data.trajectories import golden_step
from routerl_jax.engine.sampling import Sampling
from routerl_jax.evaluation.metrics import too_few_answered
from routerl_jax.extras.comparison import card
from routerl_jax.extras.comparison.agents import (
    AgentRow,
    Inapplicable,
    agent_rows,
    check_policy,
    check_settings,
    file_name,
    open_policy,
    policy_names,
)
from routerl_jax.extras.comparison.attempts import (
    attempt_all,
    attempted,
    finished_attempts,
    paired_tests,
    row_results,
    row_scores,
)
from routerl_jax.extras.comparison.benchmarks import BENCHMARKS, Benchmark, NoData, located, with_knowledge
from routerl_jax.extras.comparison.config import CaptionConfig, ComparisonConfig
from routerl_jax.extras.comparison.report import write_report
from routerl_jax.parallel.workdir import directory_lock
from routerl_jax.services import faults
from routerl_jax.services.judge import ModelJudge, check_judge, open_judge, settings_that_count
from routerl_jax.services.load import CachedModel, chat_model
from routerl_jax.training.config import KnowledgeConfig
from routerl_jax.training.knowledge import check_knowledge, open_knowledge_bases
from routerl_jax.training.setup import first_examples, open_examples

_SEEING = ("text_image", "reverse_image", "pages")  # kinds whose encoders read pictures
_REMEDY = "go on with the same ones, or give another --output"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedBenchmark:
    """A benchmark that is ready to run: its files are found, its questions are read, and its agents are known.

    Attributes:
      benchmark: the benchmark with files instead of patterns.
      rows: the agents that are run on it.
      left_out: agents that can't be run on it, with the reason.
      file: number of questions in its file, and numbers of other rows by the field that they lack.
    """

    name: str
    benchmark: Benchmark
    examples: list[Example]
    rows: list[AgentRow]
    left_out: Mapping[str, str]
    file: Mapping[str, int]

    @property
    def knowledge(self) -> Mapping[str, KnowledgeConfig]:
        """The knowledge bases of the benchmark."""
        return self.benchmark.knowledge

    def paths(self, row: AgentRow, output: pathlib.Path, config: ComparisonConfig) -> dict[int, pathlib.Path]:
        """The files with the episodes of a row, by seed: AGENT.jsonl of the first one, AGENT.seedN.jsonl of the others."""
        directory, name = output / "episodes" / file_name(self.name), file_name(row.name)
        seeds = range(config.seed, config.seed + config.seeds)
        return {seed: directory / f"{name}{f'.seed{seed}' if i else ''}.jsonl" for i, seed in enumerate(seeds)}


def compare(config: ComparisonConfig, output: pathlib.Path, *, progress: bool = True) -> dict[str, Any]:
    """Runs every agent on every benchmark, except for episodes that `output` has already, and writes the report.

    Files: `episodes/BENCHMARK/AGENT.jsonl` (evaluation.records, with `took`; further seeds in files of their own) and `.json`
    (the settings of these episodes),
    `policies/NAME.json`, `results.json`, `report.md`, `report.html` (pictures inside), `figures/`.

    Returns:
      The content of results.json: `benchmarks` (for each its `rows` (results.row_results), `tests` (results.paired_tests) and
      `n`), `card`, and `beside`: `benchmarks` and `card` of the comparisons in config.compare_with, by directory.

    Raises:
      ValueError: an agent or a benchmark is unknown, or lacks something that it needs; or `output` was made with other
        settings, or another process uses it.
    """
    beside, fields = _other_comparisons(config.compare_with), prepared(config)
    with directory_lock(output):
        fields = _with_captions(fields, config, progress)
        _check_settings(fields, config, output)
        with naming("config.judge"):
            judge = open_judge(config.judge, config.normalizer) if config.judge.model else None
        policy_cards: dict[str, dict[str, Any]] = {}
        tools: dict[str, Mapping[str, SearchTool]] = {}
        with contextlib.closing(judge) if judge else contextlib.nullcontext():
            for run in dict.fromkeys(row.run for field in fields for row in field.rows):
                policy_cards[_policy(run)] = _run_policy(run, fields, config, output, tools, progress)
            benchmarks = {field.name: _results(field, config, output, judge) for field in fields}
        results = {"benchmarks": benchmarks, "card": _card(fields, config, policy_cards), "beside": beside}
        _write(results, output)
    return results


def report_finished(config: ComparisonConfig, output: pathlib.Path) -> dict[str, Any]:
    """Writes the report of what `output` has, and asks no policy and no judge. A comparison may be running there.

    The report has the agents with an episode of every question of a benchmark. It says how many questions the others have, and
    leaves their cells blank. Verdicts count if they were given before.

    Returns:
      The content of results.json, as `compare`, with the other agents in the card (`unfinished`).

    Raises:
      ValueError: no agent has finished a benchmark, or as `compare`.
    """
    beside = _other_comparisons(config.compare_with)
    finished: list[PreparedBenchmark] = []
    unfinished: dict[str, dict[str, int]] = {}
    for field in _with_captions(prepared(config), config, False):
        counts = {
            row.name: sum(attempted(path, field.examples) for path in field.paths(row, output, config).values())
            for row in field.rows
        }
        attempts = config.seeds * len(field.examples)
        rows = [row for row in field.rows if counts[row.name] == attempts]
        if rows:
            finished.append(dataclasses.replace(field, rows=rows))
        if lacking := {name: count for name, count in counts.items() if count < attempts}:
            unfinished[field.name] = lacking
    if not finished:
        raise ValueError(f"no agent has an episode of every question in {output}; leave --finished out to run them")
    _check_settings(finished, config, output)
    policy_cards = {}
    for run in dict.fromkeys(row.run for field in finished for row in field.rows):
        saved = read_json(output / "policies" / f"{_policy(run)}.json", _REMEDY)
        policy_cards[_policy(run)] = policy_names(run, config) | saved
    results = {
        "benchmarks": {field.name: _results(field, config, output, None, rewrite=False) for field in finished},
        "card": _card(finished, config, policy_cards, unfinished),
        "beside": beside,
    }
    _write(results, output)
    return results


def _write(results: dict[str, Any], output: pathlib.Path) -> None:
    write_atomic(output / "results.json", json.dumps(results, indent=2) + "\n")
    write_report(results, output)


def _policy(run: str) -> str:
    """The name of a run's policy, or, for "", of the policy of the configuration."""
    return f"run-{file_name(run)}" if run else "policy"


def _other_comparisons(directories: tuple[str, ...]) -> dict[str, Any]:
    """`benchmarks` and `card` of other comparisons, by directory. Raises ValueError if a directory has no comparison."""
    comparisons = {}
    for directory in directories:
        path = pathlib.Path(directory).expanduser() / "results.json"
        if not path.is_file():
            raise ValueError(
                f"config.compare_with: {path} is not there; name the --output of a comparison that has ended"
            )
        other = read_json(path, "run that comparison again")
        if "left out" not in other.get("card", {}):
            raise ValueError(f"config.compare_with: {path} is no comparison's; name the --output of one (configs/eval)")
        comparisons[directory] = {key: other[key] for key in ("benchmarks", "card")}
    return comparisons


def _run_policy(
    run: str,
    fields: list[PreparedBenchmark],
    config: ComparisonConfig,
    output: pathlib.Path,
    tools: dict[str, Mapping[str, SearchTool]],
    progress: bool,
) -> dict[str, Any]:
    """Makes all attempts of the agents that use one policy. Returns a description of the policy, which is then closed.

    Args:
      tools: open knowledge bases by a digest of their settings. Benchmarks with the same ones share them.
    """
    with open_policy(run, config) as (engine, description):
        weights = {key: value for key, value in description.items() if key not in ("name", "model")}
        check_same(weights, output / "policies" / f"{_policy(run)}.json", _REMEDY)
        for field in fields:
            settings_digest = card.digest({name: dataclasses.asdict(spec) for name, spec in field.knowledge.items()})
            for row in (row for row in field.rows if row.run == run):
                if settings_digest not in tools:
                    with naming(f"benchmark {field.name!r}"):
                        tools[settings_digest] = open_knowledge_bases(field.knowledge, progress=progress)
                for seed, path in field.paths(row, output, config).items():
                    of_seed = f", seed {seed}" if config.seeds > 1 else ""
                    attempt_all(
                        row.agent,
                        field.examples,
                        engine,
                        {name: tools[settings_digest][name] for name in row.tools},
                        path,
                        sampling=Sampling(temperature=config.temperature),
                        seed=seed,
                        tool_timeout=config.tool_timeout,
                        progress=f"{field.name}: {row.name}{of_seed}" if progress else "",
                    )
    return description


def prepared(config: ComparisonConfig) -> list[PreparedBenchmark]:
    """The benchmarks with their questions and rows. Raises ValueError as `compare` does, before any long work begins."""
    check_settings(config)
    agents, missing = config.all_agents, absent(config)
    if len(missing) == len(config.benchmarks):
        raise ValueError("no benchmark has its files here. " + next(iter(missing.values())))
    fields = []
    for name in config.benchmarks:
        if name in missing:
            logging.warning("left out: %s", missing[name])
            continue
        benchmark = _located(name, config)
        knowledge = {kb: _with_changes(spec, config) for kb, spec in benchmark.knowledge.items()}
        with naming(f"benchmark {name!r}"):
            check_knowledge(knowledge)
            source = open_examples(benchmark.questions[0], (), "test")
        examples = first_examples(source, config.questions)
        if any(golden_step(example) is not None for example in examples):
            raise ValueError(
                f"benchmark {name!r} holds golden steps, at which nothing is searched: give whole questions"
            )
        rows, left_out = _agent_rows(agents, tuple(knowledge), config, name)
        names = [file_name(row.name) for row in rows]
        if duplicate := next((row.name for row in rows if names.count(file_name(row.name)) > 1), None):
            raise ValueError(f"benchmark {name!r}: two agents would be called {duplicate!r}; leave one of them out")
        benchmark = dataclasses.replace(benchmark, knowledge=knowledge)
        fields.append(
            PreparedBenchmark(
                name=name,
                benchmark=benchmark,
                examples=examples,
                rows=rows,
                left_out=left_out,
                file={"questions": len(source), **rows_left_out(source)},
            )
        )
    row_names = {row.name for field in fields for row in field.rows}
    if config.reference and config.reference not in row_names:
        raise ValueError(
            f"config.reference={config.reference!r} is no agent of this comparison: {', '.join(sorted(row_names))}"
        )
    if any(not row.run for field in fields for row in field.rows):
        check_policy(config)
    return fields


def _located(name: str, config: ComparisonConfig) -> Benchmark:
    benchmark = config.own[name] if name in config.own else BENCHMARKS.get(name)
    if not isinstance(benchmark, Benchmark):
        raise ValueError(
            f"benchmark {name!r} is a {type(benchmark).__name__}; name a routerl_jax.extras.comparison.benchmarks.Benchmark"
        )
    return located(name, with_knowledge(name, benchmark, config.knowledge), config.data)


def absent(config: ComparisonConfig) -> dict[str, str]:
    """The benchmarks that are left out because their files are missing (config.skip_absent), and where to get the files."""
    missing: dict[str, str] = {}
    for name in config.benchmarks if config.skip_absent else ():
        try:
            _located(name, config)
        except NoData as error:
            missing[name] = str(error)
    return missing


def _agent_rows(
    agents: tuple[str, ...], tools: tuple[str, ...], config: ComparisonConfig, benchmark: str
) -> tuple[list[AgentRow], dict[str, str]]:
    """The rows of a benchmark, and the agents that are left out, with the reason. Raises ValueError if no row is left."""
    rows: list[AgentRow] = []
    left_out: dict[str, str] = {}
    for agent in agents:
        try:
            rows += agent_rows(agent, tools, config, benchmark)
        except Inapplicable as error:
            if not config.skip_unfit:
                raise
            left_out[agent] = str(error)
    if not rows:
        raise ValueError(f"benchmark {benchmark!r}: no agent can be asked it. {'; '.join(left_out.values())}")
    return rows, left_out


def _with_changes(spec: KnowledgeConfig, config: ComparisonConfig) -> KnowledgeConfig:
    """The section of a knowledge base, with the changes that the configuration makes to it."""
    replaceable = {"dense_text": ("encoder", "index"), "dense_table": ("encoder", "index"), "graph": ("encoder",)}
    changes = {key: value for key in replaceable.get(spec.kind, ()) if (value := getattr(config, key))}
    if config.picture_encoder and spec.kind in _SEEING and not spec.directory:
        changes["encoder"] = config.picture_encoder
    if config.retriever and spec.kind == "dense_text":
        changes |= {"kind": config.retriever, "settings": {**spec.settings, **config.retriever_settings}}
    return dataclasses.replace(spec, **changes) if changes else spec


_CAPTION = (
    "Somebody who can't see this picture has to answer questions about it. Describe what it shows in one paragraph: people, "
    "things, places and what they are known as, text that can be read, numbers, colours, and where each is."
)


def _captions_card(config: ComparisonConfig) -> dict[str, Any]:
    """The settings that captions depend on; {} if there are no captions."""
    fields = {name: getattr(config.captions, name) for name in ("kind", "model", "extra", "max_tokens")}
    return {"captions": {**fields, "task": _CAPTION}} if config.captions.model else {}


def _with_captions(
    fields: list[PreparedBenchmark], config: ComparisonConfig, progress: bool
) -> list[PreparedBenchmark]:
    if not config.captions.model:
        return fields
    labels = [f"{field.name}: captions" if progress else "" for field in fields]
    with naming("config.captions"):
        examples = [captioned(field.examples, config.captions, progress=label) for field, label in zip(fields, labels)]
    return [dataclasses.replace(field, examples=of_field) for field, of_field in zip(fields, examples)]


def captioned(examples: Sequence[Example], config: CaptionConfig, *, progress: str = "") -> list[Example]:
    """Examples with a caption instead of each picture, before the question: `Picture: ..`.

    Captions are cached, so each picture is described once.

    Raises:
      ValueError: the model can't be reached as the configuration says, or a picture has no caption. The message names the
        first one.
    """
    pictures = [(example, image) for example in examples for image in example.images]
    if not pictures:
        return list(examples)
    model = CachedModel(chat_model(config), progress=progress)
    try:
        requests = [[Message(role="user", content=_CAPTION, images=(image,))] for _, image in pictures]
        replies = model.complete(requests, max_tokens=config.max_tokens)
    finally:
        model.close()
    empty = [reply.fault == faults.EMPTY or not (reply.error or reply.text.strip()) for reply in replies]
    errors = ["the reply is empty" if none else reply.error for none, reply in zip(empty, replies)]
    if failed := [(example.id, error) for (example, _), error in zip(pictures, errors) if error]:
        raise ValueError(
            f"{len(failed)} of {len(pictures)} pictures have no caption; that of question {failed[0][0]!r}: {failed[0][1]}. "
            "The others are kept: start the same command again"
        )
    captions = iter([" ".join(reply.text.split()) for reply in replies])

    def question(example: Example) -> str:
        several = len(example.images) > 1
        lines = [f"Picture{f' {i}' if several else ''}: {next(captions)}" for i, _ in enumerate(example.images, 1)]
        return "\n".join([*lines, example.question])

    return [dataclasses.replace(example, question=question(example), images=()) for example in examples]


def _check_settings(fields: list[PreparedBenchmark], config: ComparisonConfig, output: pathlib.Path) -> None:
    """Raises ValueError if existing episodes were made with other settings. The message names the first one that differs."""
    common = {"temperature": config.temperature, **_captions_card(config)}
    for field in fields:
        knowledge = {name: card.knowledge_settings(name, spec) for name, spec in field.knowledge.items()}
        questions = {"questions": len(field.examples), "questions digest": card.questions_digest(field.examples)}
        for row in field.rows:
            for seed, path in field.paths(row, output, config).items():
                made_of = {**common, "seed": seed, "agent": row.about, **questions, "knowledge": knowledge}
                if not path.is_file():  # no question was asked yet
                    path.with_suffix(".json").unlink(missing_ok=True)
                check_same(made_of, path.with_suffix(".json"), _REMEDY)


def _results(
    field: PreparedBenchmark,
    config: ComparisonConfig,
    output: pathlib.Path,
    judge: ModelJudge | None,
    *,
    rewrite: bool = True,
) -> dict[str, Any]:
    rows, scores = {}, {}
    judged_by = card.digest(dict(settings_that_count(config.judge))) if config.judge.model else ""
    for row in field.rows:
        episodes, records = [], []
        for path in field.paths(row, output, config).values():
            of_seed = finished_attempts(path, field.examples, judge, judged_by, rewrite=rewrite)
            episodes += of_seed[0]
            records += of_seed[1]
        budget, bases = row.agent.search_budget, tuple(field.knowledge)
        rows[row.name] = row_results(episodes, records, bases, config.normalizer, budget, config.seeds)
        prompts = card.prompts_digest(records[: len(field.examples)])
        rows[row.name] |= {"budget": budget, "prompts": prompts, "agent": row.about}
        rows[row.name]["policy"] = _policy(row.run)
        if judge is not None and config.judge_checks:
            rows[row.name]["judge_checks"] = check_judge(judge, episodes, config.judge_checks)
        tested = [m for m in config.metrics if not too_few_answered(rows[row.name], m, config.most_failed)]
        scores[row.name] = row_scores(episodes, tested, config.normalizer, config.seeds)
    return {
        "n": len(field.examples),
        "without_gold": card.without_gold(field.examples, field.knowledge),
        "rows": rows,
        "tests": paired_tests(scores, config.metrics, config.reference),
    }


def _card(
    fields: list[PreparedBenchmark],
    config: ComparisonConfig,
    policy_cards: Mapping[str, Any],
    unfinished: Mapping[str, Mapping[str, int]] | None = None,
) -> dict[str, Any]:
    """Everything that the numbers depend on.

    Args:
      unfinished: for a report of a comparison that has not ended: number of questions with an episode, by benchmark and by
        unfinished agent. The card then has no devices, because the episodes may come from other machines.
    """
    return {
        "benchmarks": {
            field.name: {
                "questions": field.benchmark.questions[0],
                "n": len(field.examples),
                "in the file": dict(field.file),
                "questions digest": card.questions_digest(field.examples),
                "licence": field.benchmark.licence,
                "paper": field.benchmark.paper,
                "knowledge": {name: card.knowledge_card(name, spec) for name, spec in field.knowledge.items()},
            }
            for field in fields
        },
        "k": config.k,
        "searches": config.searches,
        "instruct": config.instruct,
        "policies": dict(policy_cards),
        "decoding": {
            "temperature": config.temperature,
            "seed": config.seed,
            "seeds": config.seeds,
            "turn tokens": config.turn_tokens,
        },
        "metrics": list(config.metrics),
        "normalizer": config.normalizer,
        "reference": config.reference,
        "most failed": config.most_failed,
        "papers": list(config.papers),
        "rows": dict(config.rows),
        "absent": absent(config),
        "left out": {field.name: dict(field.left_out) for field in fields if field.left_out},
        "unfinished": {name: dict(counts) for name, counts in (unfinished or {}).items()},
        "definitions": card.metric_definitions(config.metrics, config.normalizer),
        **_captions_card(config),
        **({"judge": dict(settings_that_count(config.judge))} if config.judge.model else {}),
        "versions": card.versions(devices=unfinished is None),
    }
