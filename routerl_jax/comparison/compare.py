"""Runs agents on benchmarks and reports what they came to; started again, it goes on where it was."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from routerl_jax.agents.agent import SearchTool
from routerl_jax.comparison import captions, card, policies
from routerl_jax.comparison.agents import Entrant, Unfit, check_settings, entrants, file_name
from routerl_jax.comparison.attempts import attempt_all, finished_attempts
from routerl_jax.comparison.benchmarks.benchmark import Benchmark, located, with_knowledge
from routerl_jax.comparison.benchmarks.known import BENCHMARKS
from routerl_jax.comparison.captions import captioned
from routerl_jax.comparison.config import ComparisonConfig
from routerl_jax.comparison.report import write_report
from routerl_jax.comparison.results import paired_tests, row_results, row_scores
from routerl_jax.core.config import naming
from routerl_jax.core.files import read_json, write_whole
from routerl_jax.core.journal import check_same
from routerl_jax.core.types import Example
from routerl_jax.data.trajectories import golden_step
from routerl_jax.generation.sampling import Sampling
from routerl_jax.llms.judge import ModelJudge, open_judge, settings_that_count
from routerl_jax.parallel.workdir import alone
from routerl_jax.training.config import KnowledgeConfig
from routerl_jax.training.knowledge import check_knowledge, open_knowledge_bases
from routerl_jax.training.setup import take_examples

_SEEING = ("text_image", "reverse_image", "pages")  # kinds whose encoders read pictures
_REMEDY = "go on with the same ones, or give another --output"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """A benchmark that is ready: its files are there, its questions are read, and it is known who is asked.

    Attributes:
      benchmark: with files in the place of patterns.
      left_out: agents that can't be asked it, and why.
    """

    name: str
    benchmark: Benchmark
    examples: list[Example]
    rows: list[Entrant]
    left_out: Mapping[str, str]

    @property
    def knowledge(self) -> Mapping[str, KnowledgeConfig]:
        """Its knowledge bases."""
        return self.benchmark.knowledge

    def path(self, row: Entrant, output: pathlib.Path) -> pathlib.Path:
        """The file of a row's episodes."""
        return output / "episodes" / file_name(self.name) / f"{file_name(row.name)}.jsonl"


def compare(config: ComparisonConfig, output: pathlib.Path, *, progress: bool = True) -> dict[str, Any]:
    """Asks every agent every benchmark's questions, as far as `output` lacks their episodes, and writes the report.

    Files: `episodes/BENCHMARK/AGENT.jsonl` (evaluation.records, with `took`) and `.json` (what it was made with),
    `policies/NAME.json`, `results.json`, `report.md`, `report.html` (pictures inside), `figures/`.

    Returns:
      What results.json holds: `benchmarks` (for each its `rows` (results.row_results), `tests` (results.paired_tests) and `n`),
      `card`, and `beside`, the same of config.beside by directory.

    Raises:
      ValueError: an agent or a benchmark is unknown, or lacks what it needs; what is in `output` was made with other
        settings, or another process works there.
    """
    beside, fields = _beside(config.beside), prepared(config)
    with alone(output):
        results = _compared(fields, config, output, progress) | {"beside": beside}
        write_whole(output / "results.json", json.dumps(results, indent=2) + "\n")
        write_report(results, output)
    return results


def _compared(fields: list[Field], config: ComparisonConfig, output: pathlib.Path, progress: bool) -> dict[str, Any]:
    if config.captions.model:
        with naming("config.captions"):
            fields = [_captioned(field, config, progress) for field in fields]
    _check_settings(fields, config, output)
    judge = _judge(config)
    known: dict[str, dict[str, Any]] = {}
    tools: dict[str, Mapping[str, SearchTool]] = {}
    with contextlib.closing(judge) if judge else contextlib.nullcontext():
        for run in dict.fromkeys(row.run for field in fields for row in field.rows):
            called = _policy(run)
            known[called] = _attempted(run, called, fields, config, output, tools, progress)
        benchmarks = {field.name: _results(field, config, output, judge) for field in fields}
    return {"benchmarks": benchmarks, "card": _card(fields, config, known)}


def _policy(run: str) -> str:
    """What the policy of a run is called, or with "" that of the configuration."""
    return f"run-{file_name(run)}" if run else "policy"


def _beside(directories: tuple[str, ...]) -> dict[str, Any]:
    """`benchmarks` and `card` of other comparisons, by directory. Raises ValueError where there is none."""
    found = {}
    for directory in directories:
        path = pathlib.Path(directory).expanduser() / "results.json"
        if not path.is_file():
            raise ValueError(f"config.beside: {path} is not there; name the --output of a comparison that has ended")
        other = read_json(path, "run that comparison again")
        if "left out" not in other.get("card", {}):
            raise ValueError(f"config.beside: {path} is no comparison's; name the --output of one (configs/eval)")
        found[directory] = {key: other[key] for key in ("benchmarks", "card")}
    return found


def _attempted(
    run: str,
    called: str,
    fields: list[Field],
    config: ComparisonConfig,
    output: pathlib.Path,
    tools: dict[str, Mapping[str, SearchTool]],
    progress: bool,
) -> dict[str, Any]:
    """All attempts of the agents with one policy; what there is to say of it. A policy goes before the next one comes.

    Args:
      tools: knowledge bases that are open, by what they are made of; of benchmarks with the same ones, once.
    """
    with policies.opened(run, config) as (engine, about):
        weights = {key: value for key, value in about.items() if key not in ("name", "model")}
        check_same(weights, output / "policies" / f"{called}.json", _REMEDY)
        for field in fields:
            made_of = card.digest({name: dataclasses.asdict(spec) for name, spec in field.knowledge.items()})
            for row in (row for row in field.rows if row.run == run):
                if made_of not in tools:
                    with naming(f"benchmark {field.name!r}"):
                        tools[made_of] = open_knowledge_bases(field.knowledge, progress=progress)
                attempt_all(
                    row.agent,
                    field.examples,
                    engine,
                    {name: tools[made_of][name] for name in row.tools},
                    field.path(row, output),
                    sampling=Sampling(temperature=config.temperature),
                    seed=config.seed,
                    tool_timeout=config.tool_timeout,
                    progress=f"{field.name}: {row.name}" if progress else "",
                )
    return about


def prepared(config: ComparisonConfig) -> list[Field]:
    """The benchmarks with their questions and rows. Raises ValueError as `compare`, before anything takes long."""
    check_settings(config)
    asked = config.asked
    fields = []
    for name in config.benchmarks:
        benchmark = located(name, with_knowledge(name, _benchmark(name, config), config.knowledge), config.data)
        knowledge = {kb: _changed(spec, config) for kb, spec in benchmark.knowledge.items()}
        with naming(f"benchmark {name!r}"):
            check_knowledge(knowledge)
            examples = take_examples(benchmark.questions[0], (), "test", config.questions)
        if any(golden_step(example) is not None for example in examples):
            raise ValueError(
                f"benchmark {name!r} holds golden steps, at which nothing is searched: give whole questions"
            )
        rows, left_out = _entrants(asked, tuple(knowledge), config, name)
        names = [file_name(row.name) for row in rows]
        if again := next((row.name for row in rows if names.count(file_name(row.name)) > 1), None):
            raise ValueError(f"benchmark {name!r}: two agents would be called {again!r}; leave one of them out")
        benchmark = dataclasses.replace(benchmark, knowledge=knowledge)
        fields.append(Field(name=name, benchmark=benchmark, examples=examples, rows=rows, left_out=left_out))
    every = {row.name for field in fields for row in field.rows}
    if config.reference and config.reference not in every:
        raise ValueError(
            f"config.reference={config.reference!r} is no agent of this comparison: {', '.join(sorted(every))}"
        )
    if any(not row.run for field in fields for row in field.rows):
        policies.check(config)
    return fields


def _entrants(
    asked: tuple[str, ...], tools: tuple[str, ...], config: ComparisonConfig, benchmark: str
) -> tuple[list[Entrant], dict[str, str]]:
    """The rows of a benchmark, and the agents that are left out, with the reason. Raises ValueError if no row is left."""
    rows: list[Entrant] = []
    left_out: dict[str, str] = {}
    for agent in asked:
        try:
            rows += entrants(agent, tools, config, benchmark)
        except Unfit as error:
            if not config.skip_unfit:
                raise
            left_out[agent] = str(error)
    if not rows:
        raise ValueError(f"benchmark {benchmark!r}: no agent can be asked it. {'; '.join(left_out.values())}")
    return rows, left_out


def _benchmark(name: str, config: ComparisonConfig) -> Benchmark:
    if name in config.own:
        return config.own[name]
    found = BENCHMARKS.get(name)
    if not isinstance(found, Benchmark):
        raise ValueError(
            f"benchmark {name!r} is a {type(found).__name__}; name a comparison.benchmarks.benchmark.Benchmark"
        )
    return found


def _changed(spec: KnowledgeConfig, config: ComparisonConfig) -> KnowledgeConfig:
    """With what the configuration puts in the place of the benchmark's own."""
    takes = {"dense_text": ("encoder", "index"), "dense_table": ("encoder", "index"), "graph": ("encoder",)}
    changes = {key: value for key in takes.get(spec.kind, ()) if (value := getattr(config, key))}
    if config.picture_encoder and spec.kind in _SEEING and not spec.directory:
        changes["encoder"] = config.picture_encoder
    if config.retriever and spec.kind == "dense_text":
        changes |= {"kind": config.retriever, "settings": {**spec.settings, **config.retriever_settings}}
    return dataclasses.replace(spec, **changes) if changes else spec


def _captioned(field: Field, config: ComparisonConfig, progress: bool) -> Field:
    said = f"{field.name}: captions" if progress else ""
    return dataclasses.replace(field, examples=captioned(field.examples, config.captions, progress=said))


def _captions_card(config: ComparisonConfig) -> dict[str, Any]:
    return {"captions": dict(captions.settings_that_count(config.captions))} if config.captions.model else {}


def _judge(config: ComparisonConfig) -> ModelJudge | None:
    with naming("config.judge"):
        return open_judge(config.judge, config.normalizer) if config.judge.model else None


def _check_settings(fields: list[Field], config: ComparisonConfig, output: pathlib.Path) -> None:
    """Raises ValueError that names the first setting in which episodes that are there were made otherwise."""
    common = {"temperature": config.temperature, "seed": config.seed, **_captions_card(config)}
    for field in fields:
        knowledge = {name: card.knowledge_settings(name, spec) for name, spec in field.knowledge.items()}
        asked = {"questions": len(field.examples), "questions digest": card.questions_digest(field.examples)}
        for row in field.rows:
            path, made_of = field.path(row, output), {**common, "agent": row.about, **asked, "knowledge": knowledge}
            if not path.is_file():  # nothing was asked yet
                path.with_suffix(".json").unlink(missing_ok=True)
            check_same(made_of, path.with_suffix(".json"), _REMEDY)


def _results(field: Field, config: ComparisonConfig, output: pathlib.Path, judge: ModelJudge | None) -> dict[str, Any]:
    rows, scores = {}, {}
    judged_by = card.digest(dict(settings_that_count(config.judge))) if judge else ""
    for row in field.rows:
        episodes, records = finished_attempts(field.path(row, output), field.examples, judge, judged_by)
        rows[row.name] = row_results(
            episodes, records, tuple(field.knowledge), config.normalizer, row.agent.search_budget
        ) | {"budget": row.agent.search_budget, "prompts": card.prompts_digest(records), "agent": row.about}
        rows[row.name]["policy"] = _policy(row.run)
        scores[row.name] = row_scores(episodes, config.metrics, config.normalizer)
    return {"n": len(field.examples), "rows": rows, "tests": paired_tests(scores, config.metrics, config.reference)}


def _card(fields: list[Field], config: ComparisonConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "benchmarks": {
            field.name: {
                "questions": field.benchmark.questions[0],
                "n": len(field.examples),
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
        "policies": dict(known),
        "decoding": {"temperature": config.temperature, "seed": config.seed, "turn tokens": config.turn_tokens},
        "metrics": list(config.metrics),
        "normalizer": config.normalizer,
        "reference": config.reference,
        "papers": list(config.papers),
        "rows": dict(config.rows),
        "left out": {field.name: dict(field.left_out) for field in fields if field.left_out},
        "definitions": card.metric_definitions(config.metrics, config.normalizer),
        **_captions_card(config),
        **({"judge": dict(settings_that_count(config.judge))} if config.judge.model else {}),
        "versions": card.versions(),
    }
