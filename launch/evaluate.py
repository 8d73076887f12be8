r"""Compares agents on benchmarks, or evaluates one policy on one benchmark beside routing baselines with the same weights.

    python -m launch.evaluate --config=configs/eval/text_qa.py --output=results
    python -m launch.evaluate --config=configs/eval/text_qa.py --output=results --agents=direct,ircot_all,runs/quickstart \
        --benchmarks=atlas,hotpotqa --config.data=DATA
    python -m launch.evaluate --config=configs/eval/text_qa.py --output=results --report=r1_searcher.table2 --config.data=DATA
    python -m launch.evaluate --output=results --report=routerag.figure4
    python -m launch.evaluate --agents=help
    python -m launch.evaluate --benchmarks=help
    python -m launch.evaluate --report=help

Every agent (baseline, recipe or directory of a run) answers the questions of every benchmark. It searches that benchmark's
knowledge bases. The program writes report.html, report.md, results.json, figures/ and episodes/BENCHMARK/AGENT.jsonl. Run the
same command again to complete what is missing (docs/evaluation.md). A figure of a paper is drawn from what --output (or
--workdir, a run) has, into figures/NAME.png (analysis/NAME.png).

One policy:

    python -m launch.evaluate --workdir=runs/quickstart
    python -m launch.evaluate --workdir=runs/quickstart --agents=trained,random_kb --benchmark=questions.jsonl --limit=100
    python -m launch.evaluate --workdir=runs/mine --benchmark=hotpotqa.json,tabfact.jsonl --by=dataset
    python -m launch.evaluate --model=SmolLM2-135M-Instruct --config=configs/smollm2_search.py --output=results
    python -m launch.evaluate --config=configs/smollm2_search.py --output=results --config.agent.instruct=True \
        --config.chat_model.model=gpt-4o-mini --config.chat_model.base_url=https://api.openai.com/v1 \
        --config.chat_model.api_key_env=OPENAI_API_KEY

This writes results.json, report.md, figures/ and one file of episodes per agent (see launch.view). Run the same command again
to go on after an interruption: what has been answered is kept in AGENT.unfinished. The agents are:

    trained               the policy as it was trained
    only_KB               every search goes to the knowledge base KB; one such agent per knowledge base
    random_kb             every search goes to a random knowledge base
    every_kb              each search is made in every knowledge base at once, for k passages of each; the best ones
                          come first, and those that do not fit are left out
    vanilla_rag           one search, for the question itself (vanilla_rag_KB where there are several knowledge bases)
    no_search             no search
    full_budget           always the largest number of searches; the policy chooses where the further ones go
    full_budget_random    the same, with random knowledge bases for the further searches

The last two exist for agents that work step by step.
"""

from __future__ import annotations

from routerl_jax.parallel.platform import split_cpu, tune_process

if __name__ == "__main__":
    tune_process()

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags
from ml_collections import config_flags

from launch.command import check_writable, define_amount, read_config, read_config_as, read_config_dict, start

if TYPE_CHECKING:
    from routerl_jax.training.config import AgentConfig, TrainConfig

FLAGS = flags.FLAGS


def define_flags() -> None:
    from routerl_jax.evaluation.metrics import GROUPS, MOST_FAILED

    flags.DEFINE_string("workdir", None, "Directory of a run of launch.train.")
    flags.DEFINE_string("model", None, "A Hugging Face directory, hub id or PyPI model instead; needs --config.")
    config_flags.DEFINE_config_file(
        "config",
        None,
        "A comparison (configs/eval); or agent, knowledge bases and data for --model, or config.chat_model.",
    )
    flags.DEFINE_list("agents", [], "Agents to run, or help; default: the configuration's, or all that make sense.")
    flags.DEFINE_list("benchmarks", [], "Of a comparison, or help; default: the configuration's.")
    flags.DEFINE_string(
        "report",
        None,
        "A paper's table, with its agents and benchmarks, such as r1_searcher.table2; a figure, from what is there; or help.",
    )
    flags.DEFINE_bool(
        "finished", False, "Of a comparison: ask nothing, and report what is finished; one may be running in --output."
    )
    flags.DEFINE_string("benchmark", None, "Questions: atlas/SPLIT or a file; default: the run's test questions.")
    define_amount("limit", None, "Questions; -1: all; default: the configuration's evaluation.final_examples.")
    flags.DEFINE_float(
        "most_failed",
        MOST_FAILED,
        "Greatest share of questions without a reply or a verdict; above it the exit status is 1.",
        lower_bound=0,
        upper_bound=1,
    )
    flags.DEFINE_bool("allow_failures", False, "Exit with 0 however many questions have no reply or no verdict.")
    flags.DEFINE_float("temperature", 0.0, "Sampling temperature; 0 is greedy.")
    flags.DEFINE_integer("seed", 0, "Of the sampling.")
    flags.DEFINE_enum(
        "snapshot", None, ["auto", "replay"], "Of the web: in the place of the run's config.snapshot.mode."
    )
    flags.DEFINE_string("output", None, "Directory of the results; default: WORKDIR/benchmarks/NAME of the benchmark.")
    flags.DEFINE_enum("by", None, GROUPS, "Show results by this of the questions' metadata, too.")
    flags.DEFINE_bool("json", False, "Print results.json's content instead of a table.")


def schemas() -> dict[str, type]:
    """The classes of configurations that --config may name, by their description."""
    from routerl_jax.extras.comparison.config import ComparisonConfig
    from routerl_jax.training.config import TrainConfig

    return {"A comparison (configs/eval)": ComparisonConfig, "A run, of one policy": TrainConfig}


def main(_: Sequence[str]) -> None:
    if "help" in (*FLAGS.agents, *FLAGS.benchmarks, FLAGS.report):
        _help()
    elif _is_figure(FLAGS.report):
        _draw()
    elif FLAGS.config is not None and "benchmarks" in read_config_dict():
        _compare()
    else:
        with contextlib.ExitStack() as stack:
            try:
                _evaluate(stack)
            except KeyboardInterrupt:
                print("launch.evaluate: interrupted; the same command goes on with what is missing", file=sys.stderr)
                raise


def _is_figure(report: str | None) -> bool:
    from routerl_jax.extras.comparison.papers.figure import PAPER_FIGURES

    return report is not None and report in PAPER_FIGURES


def _draw() -> None:
    """A figure of a paper, from the results of a comparison or of a run."""
    from routerl_jax.core.config import naming
    from routerl_jax.extras.comparison.config import ComparisonConfig
    from routerl_jax.extras.comparison.papers import drawn

    if bool(FLAGS.workdir) == bool(FLAGS.output):
        raise ValueError(
            f"--report={FLAGS.report} draws what is measured: give --output, the directory of a comparison, or --workdir, "
            "that of a run. launch.analyze --figures takes more"
        )
    directory = pathlib.Path(FLAGS.workdir or FLAGS.output)
    output = directory / ("analysis" if FLAGS.workdir else "figures")
    check_writable("--workdir" if FLAGS.workdir else "--output", output)
    rows = read_config_as(ComparisonConfig).rows if FLAGS.config is not None else {}
    with naming("--report"):
        drawn_files = drawn.draw_figures(
            [FLAGS.report],
            directory,
            output,
            rows={key: pathlib.Path(value) for key, value in rows.items()},
            limit=drawn.QUESTIONS if FLAGS.limit is None else FLAGS.limit,
        )
    print(f"{FLAGS.report}: {drawn_files[FLAGS.report]}")


def _help() -> None:
    """Prints the possible values of --agents, --benchmarks and --report."""
    from routerl_jax.core.console import print_listing
    from routerl_jax.extras.comparison import agents, benchmarks
    from routerl_jax.extras.comparison.papers import figure, table

    rows_of_benchmarks = benchmarks.listing()
    benchmark_headings = ("name", "paper", "knowledge bases", "", "licence")
    table_headings = ("name", "paper", "benchmarks", "rows to be named (config.rows)", "")
    listings = [
        ("agents", "agents", ("name", "paper", "needs", ""), agents.listing()),
        ("benchmarks", "benchmarks", benchmark_headings, [row[:-1] for row in rows_of_benchmarks]),
        # a table of its own: as a column it would be a finger wide
        ("benchmarks", "where the data are had", ("name", ""), [(row[0], row[-1]) for row in rows_of_benchmarks]),
        ("report", "tables", table_headings, table.listing(list(benchmarks.BENCHMARKS))),
        ("report", "figures", figure.FIGURE_HEADINGS, figure.listing()),
    ]
    for name, title, headings, rows in listings:
        if "help" in (getattr(FLAGS, name) or ()):
            print_listing(title, headings, rows)


def _compare() -> None:
    """Agents on benchmarks, as the configuration and the flags say."""
    from routerl_jax.core.config import naming
    from routerl_jax.extras.comparison.compare import compare, report_finished
    from routerl_jax.extras.comparison.config import ComparisonConfig
    from routerl_jax.extras.comparison.report import print_metrics

    for name in ("workdir", "model", "benchmark", "snapshot", "by", "temperature", "seed", "most_failed"):
        if FLAGS[name].present:
            instead = _INSTEAD.get(name, f"--config.{name}")
            raise ValueError(f"--{name} is not for a comparison (a configuration of configs/eval): give {instead}")
    if FLAGS.output is None:
        raise ValueError("a comparison needs --output, the directory of its results")
    config = read_config_as(ComparisonConfig)
    if FLAGS.report:
        with naming("--report"):
            config = config.of_paper(FLAGS.report)
    changes: dict[str, Any] = {
        name: tuple(names) for name in ("agents", "benchmarks") if (names := getattr(FLAGS, name))
    }
    if FLAGS.benchmarks:
        changes["skip_absent"] = (
            config.skip_absent and not FLAGS.report
        )  # a benchmark asked for by name is run or refused
    if FLAGS.agents:
        changes["skip_unfit"] = config.skip_unfit and not FLAGS.report  # an agent, likewise
    if FLAGS.limit is not None:
        changes["questions"] = FLAGS.limit
    config = dataclasses.replace(config, **changes)
    output = pathlib.Path(FLAGS.output)
    check_writable("--output", output)
    split_cpu(config.mesh.cpu_devices)
    results = report_finished(config, output) if FLAGS.finished else compare(config, output)
    if FLAGS.json:
        print(json.dumps(results))
    else:
        print_metrics(results)
        print(f"report: {output / 'report.html'}   results: {output / 'results.json'}")
    _check_answered({name: found["rows"] for name, found in results["benchmarks"].items()}, config.most_failed)


def _check_answered(rows: Mapping[str, Mapping[str, Any]], most_failed: float) -> None:
    """Ends the program with status 1 if too many questions have no reply or no verdict, unless --allow_failures.

    Args:
      rows: rows of results by benchmark and agent.
    """
    from routerl_jax.evaluation.metrics import JUDGE, answered, too_few_answered

    lacking = [
        f"{agent} on {benchmark} ({what} for {count} of {asked})"
        for benchmark, agents in rows.items()
        for agent, row in agents.items()
        for metric, what in (("em", "replies"), (JUDGE, "verdicts"))
        if too_few_answered(row, metric, most_failed)
        for count, asked in [answered(row, metric)]
    ]
    if lacking and not FLAGS.allow_failures:
        sys.exit(
            f"launch.evaluate: more than {100 * most_failed:g} % of the questions have no reply or no verdict: "
            f"{', '.join(lacking)}. The results are written, and say so. The same command asks again where that may help; "
            "with --allow_failures the exit status is 0"
        )


_INSTEAD = {
    "workdir": "the directory in --agents",
    "model": "--config.model.path",
    "benchmark": "--benchmarks",
    "snapshot": "the knowledge base a snapshot",
    "by": "none: report.md has all questions together",
}


def _evaluate(stack: contextlib.ExitStack) -> None:
    """One policy on one benchmark. `stack` closes all that was opened, also after an error."""
    from flax import nnx

    from routerl_jax.core.config import naming
    from routerl_jax.core.files import write_atomic
    from routerl_jax.data.trajectories import check_retrievers, golden_step
    from routerl_jax.engine.sampling import Sampling
    from routerl_jax.evaluation import figures, report
    from routerl_jax.evaluation.benchmark import Unfinished, score_all
    from routerl_jax.evaluation.metrics import by_group
    from routerl_jax.models.lora import digest
    from routerl_jax.services.judge import settings_that_count
    from routerl_jax.services.policy import ChatModel
    from routerl_jax.training import setup
    from routerl_jax.training.health import tool_counts, tool_results, tool_table
    from routerl_jax.training.knowledge import check_snapshot
    from routerl_jax.training.load import load_config, load_policy
    from routerl_jax.training.setup import (
        build_judge,
        build_mesh,
        build_policy,
        build_recipe,
        evaluated_agent,
        evaluation_examples,
        make_engine,
        open_knowledge,
        take_examples,
    )

    if FLAGS.benchmarks or FLAGS.report or FLAGS.finished:
        raise ValueError(
            "--benchmarks, --report and --finished are for a comparison: give its --config (configs/eval), and name the run in "
            "--agents"
        )
    chats = not FLAGS.workdir and FLAGS.config is not None and bool(read_config().chat_model.model)
    if bool(FLAGS.workdir) + bool(FLAGS.model) + chats != 1:
        raise ValueError("give either --workdir or --model, or --config with a config.chat_model.model")
    if FLAGS.workdir and FLAGS.config is not None:
        raise ValueError(
            "--workdir has a configuration of its own: --config and its settings would change nothing; leave it out"
        )
    if FLAGS.workdir:
        config = load_config(pathlib.Path(FLAGS.workdir))
    else:
        if FLAGS.config is None or FLAGS.output is None:
            needs = "config.chat_model" if chats else "--model"
            raise ValueError(f"{needs} needs --config (agent, knowledge bases, data) and --output")
        config = read_config()
        if FLAGS.model:
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=FLAGS.model))
    split_cpu(config.mesh.cpu_devices)
    recipe, bases = build_recipe(config), tuple(config.knowledge)
    judge = build_judge(config, recipe) if config.evaluation.judge else None
    if judge is not None:
        stack.enter_context(contextlib.closing(judge))
    judged, headline = evaluated_agent(config, recipe), setup.headline(config, recipe)
    agents = {"trained": judged, **judged.alternatives(bases)}
    unknown = [name for name in FLAGS.agents if name not in agents]
    if unknown:
        raise ValueError(f"unknown agent {unknown[0]!r}; known: {', '.join(agents)}")
    if FLAGS.agents:
        agents = {name: agents[name] for name in FLAGS.agents}

    benchmark = FLAGS.benchmark or config.data.test or config.data.train
    if FLAGS.benchmark:
        limit = config.evaluation.final_examples if FLAGS.limit is None else FLAGS.limit
        examples = take_examples(benchmark, (), "--benchmark", limit)
    else:
        examples = evaluation_examples(config, "test", FLAGS.limit)
    if any(golden_step(example) is not None for example in examples):
        check_retrievers(examples, tuple(config.knowledge), benchmark)
        if set(FLAGS.agents) - {"trained"}:
            raise ValueError(
                f"{benchmark} holds golden steps, at which nothing is searched: --agents can be trained alone"
            )
        agents = {"trained": judged}
    if FLAGS.by and FLAGS.by not in by_group([example.metadata for example in examples]):
        raise ValueError(
            f"--by={FLAGS.by}: the {len(examples)} questions of {benchmark} are not of several {FLAGS.by}s"
        )
    output = pathlib.Path(FLAGS.output or pathlib.Path(FLAGS.workdir) / "benchmarks" / _file_name(benchmark))
    check_writable("--output" if FLAGS.output else "--workdir", output)
    workdir = pathlib.Path(FLAGS.workdir) if FLAGS.workdir else output
    if FLAGS.snapshot:
        config = dataclasses.replace(config, snapshot=dataclasses.replace(config.snapshot, mode=FLAGS.snapshot))
    check_snapshot(config, workdir, resume=True)
    model = None
    if chats:
        with naming("config.chat_model"):
            engine = ChatModel(config.chat_model)
        stack.callback(engine.end)
        policy: dict[str, Any] = {"chat model": engine.about}
    else:
        mesh = build_mesh(config.mesh)
        model = load_policy(pathlib.Path(FLAGS.workdir), config, mesh) if FLAGS.workdir else build_policy(config, mesh)
        policy = {"policy digest": digest(nnx.state(model))}
    request = {
        "benchmark": benchmark,
        "questions": len(examples),
        "temperature": FLAGS.temperature,
        "seed": FLAGS.seed,
        "normalizer": config.evaluation.normalizer,
        **({"judge": dict(settings_that_count(config.judge))} if judge else {}),
        # digests stand for settings that are too long to be written out
        **policy,
        "questions digest": _digest([[item.id, item.question, item.answers] for item in examples]),
        "settings digest": _digest(
            [
                *(config.recipe, config.evaluation.k, config.engine.max_length),
                *(_agent_fields(config.agent), dataclasses.asdict(config)["knowledge"]),
            ]
        ),
    }
    _earlier_results(
        output / "results.json", request
    )  # refuses results of another benchmark before anything slow starts
    unfinished = {name: Unfinished(output / f"{name}.unfinished", request) for name in agents}
    if known := {name: len(kept.episodes) for name, kept in unfinished.items() if kept.episodes}:
        going_on = (
            f"going on: of {len(examples)} questions, {', '.join(f'{name} has {n}' for name, n in known.items())}"
        )
        print(going_on, file=sys.stderr)  # standard output may be JSON
    engine = make_engine(config, model) if model is not None else engine
    tools = open_knowledge(config, workdir)
    scores = score_all(
        agents,
        examples,
        engine,
        tools,
        config.evaluation.normalizer,
        records=output,
        tool_timeout=config.rollout.tool_timeout,
        sampling=Sampling(temperature=FLAGS.temperature),
        seed=FLAGS.seed,
        judge=judge,
        unfinished=unfinished,
    )
    names = _names(config)
    # read again: another process may have added agents
    table = _earlier_results(output / "results.json", request)
    scores = {names.get(name, name): row for name, row in scores.items()}
    table |= scores
    counted = tool_counts(tools)
    results = {"agents": table, **request, **({"tools": tool_results(counted)} if counted else {})}
    write_atomic(output / "results.json", json.dumps(results, indent=2) + "\n")
    for kept in unfinished.values():
        kept.close()
    groups = f"\n{report.markdown(report.grouped(table, FLAGS.by), headline)}" if FLAGS.by else ""
    shown = report.markdown(table, headline, config.judge.failed if judge else "")
    text = f"# {benchmark}, {len(examples)} questions\n\n{shown}{groups}"
    write_atomic(output / "report.md", text)
    measured = (
        metric for metric in (*headline, *report.EM) if all(f"{metric}_interval" in row for row in table.values())
    )
    figures.comparison_figure(table, output / "figures" / "comparison.png", next(measured))
    if FLAGS.json:
        print(json.dumps(results))
    else:
        report.print_table(table, output, FLAGS.by or "", headline)
        if tools_text := tool_table(counted):
            print(tools_text)
    _check_answered({benchmark: scores}, FLAGS.most_failed)


def _names(config: TrainConfig) -> Mapping[str, str]:
    """Maps the name of an agent to the name that results give it."""
    names = config.evaluation.names if FLAGS.workdir else {}
    reinforced = FLAGS.workdir and config.kind == "rl"
    return names if reinforced else {"trained": "policy", **names}


def _agent_fields(agent: AgentConfig) -> dict[str, Any]:
    """The agent section for the digest. Empty `settings` are left out, so that results from before the field existed fit."""
    return {key: value for key, value in dataclasses.asdict(agent).items() if value or key != "settings"}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _earlier_results(path: pathlib.Path, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Results of an earlier call in this directory, by agent; they are kept. {} if there are none.

    Raises:
      ValueError: the earlier call had another benchmark or other settings, or the file is damaged.
    """
    from routerl_jax.core.files import read_json

    if not path.is_file():
        return {}
    results = read_json(path, "remove it, or give another --output")
    for key, value in asked.items():
        if results.get(key) != value:
            raise ValueError(
                f"{path} has results of {key} {results.get(key)!r}, and now it is {value!r}: "
                "give another --output, or remove it"
            )
    return results["agents"]


def _file_name(benchmark: str) -> str:
    """A directory name for a data set: "atlas-test", "questions_dev"."""
    from routerl_jax.data.readers import short_names

    name = benchmark if benchmark.startswith("atlas/") else "+".join(short_names(benchmark.split(",")))
    return re.sub(r"[^\w.+-]+", "-", name) or "questions"


if __name__ == "__main__":
    start(main, define_flags, schemas)
