"""Several runs of one configuration: mean and worst of every number, each run's own, a picture; pairs of agents.

python -m benchmarks.seeds runs/quickstart runs/quickstart-seed1 runs/quickstart-seed2
python -m benchmarks.seeds --config=configs/quickstart.py --run=3 --isa=native,AVX --workdir=runs/seeds \
    --keep=benchmarks/results/quickstart.json --picture=docs/images/quickstart.png
python -m benchmarks.seeds runs/routerag runs/routerag-seed1 --pair=trained:stage1_only
python -m benchmarks.seeds --keep=benchmarks/results/mmsearch_r1_small.json --by=kind
python -m benchmarks.seeds --keep=benchmarks/results/vrag_rl_small.json --by=type --of-groups=em,crops_per_question
python -m benchmarks.seeds runs/online runs/online-seed1 --against runs/golden runs/golden-seed1 --pair=online:step_grpo

With --run, seeds 0, 1, .. are run, each as every --isa, in WORKDIR/SEED-ISA, one after the other or --at-once. What has
finished is left alone, what has begun is gone on with. --keep writes what the tables and the picture need of every finished run
into a file, from which another session, or machine, continues.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import hashlib
import json
import pathlib
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.runs import NATIVE, train, unfinished
from routerl_jax.evaluation.figures import COLORS, save_figure
from routerl_jax.evaluation.paired import compare_seeds, record_cost
from routerl_jax.evaluation.records import read_records
from routerl_jax.evaluation.report import title
from routerl_jax.training.controls import control_directory
from routerl_jax.training.load import load_config
from routerl_jax.training.loggers import read_metrics

Column = tuple[str, str, float, bool]  # key, heading, scale, whether more is better
_COLUMNS: tuple[Column, ...] = (
    ("em", "EM %", 100, True),
    ("f1", "F1 %", 100, True),
    ("f1_recall", "F1-recall %", 100, True),
    ("cover_em", "CEM %", 100, True),
    ("routing_accuracy", "routing %", 100, True),
    ("searches_per_question", "searches", 1, False),
    ("searched_rate", "questions with a search %", 100, False),
    ("search_ratio", "searches of those allowed %", 100, False),
    ("retrieval_cost", "cost", 1, False),
    ("repeated_search_rate", "repeated %", 100, False),
    ("valid_search_share", "episodes with a valid search %", 100, True),
    ("recall_at_first", "right page first %", 100, True),
    ("crops_per_question", "crops", 1, False),
    ("box_iou", "box IoU %", 100, True),
    ("image_tokens_per_question", "image tokens", 1, False),
    ("finish_rate", "answered in time %", 100, True),
    ("invalid_action_rate", "invalid %", 100, False),
)
_OF_GROUPS = ("em", "searched_rate", "search_ratio", "recall_at_first", "crops_per_question", "box_iou", "n")
_CURVES = (
    "em",
    "routing_accuracy",
    "searches_per_question",
    "retrieval_cost",
    "repeated_search_rate",
    "recall_at_first",
    "crops_per_question",
    "box_iou",
)
_SHARES = ("em", "routing_accuracy", "recall_at_first", "box_iou")  # of 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The numbers of a finished run.

    Attributes:
      settings: digest of its configuration but for the seed; runs of one table have the same.
      trained: what the trained policy is called among the agents.
      curves: metric -> values of the sampled policy by step, and validation/metric -> [step, value] pairs.
    """

    seed: int
    isa: str
    settings: str
    agents: dict[str, dict[str, float]]
    seconds: dict[str, float]
    tokens: int
    curves: dict[str, list[Any]]
    machine: str
    trained: str = "trained"

    @property
    def name(self) -> str:
        return f"{self.seed}" if self.isa == NATIVE else f"{self.seed}, {self.isa}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdirs", nargs="*", type=pathlib.Path, help="of finished runs")
    parser.add_argument("--config", help="run this configuration")
    parser.add_argument("--run", type=int, default=0, help="this many seeds")
    parser.add_argument("--isa", default=NATIVE, help="comma-separated: native, or XLA's --xla_cpu_max_isa")
    parser.add_argument("--workdir", type=pathlib.Path, help="directory of the runs")
    parser.add_argument(
        "--at-once", type=int, default=1, help="runs that share the machine (its times are longer then)"
    )
    parser.add_argument("--set", action="append", default=[], help="another flag of launch.train: config.steps=4")
    parser.add_argument(
        "--no-controls", action="store_true", help="leave out the controls of the named runs, which need not have run"
    )
    parser.add_argument("--keep", type=pathlib.Path, help="JSON file of finished runs")
    column_names = ",".join(key for key, *_ in _COLUMNS)
    parser.add_argument("--columns", default=column_names, help=f"comma-separated, of {column_names}")
    parser.add_argument("--by", help="also a table by kind of question: a key of the questions' metadata")
    parser.add_argument("--of-groups", default="em,searched_rate", help="its columns of each kind, comma-separated")
    parser.add_argument("--picture", type=pathlib.Path, help="PNG file of the learning curves")
    parser.add_argument(
        "--pair", action="append", default=[], help="AGENT:OTHER, as in results.json; any number of times"
    )
    parser.add_argument(
        "--against", nargs="+", type=pathlib.Path, help="other runs, seed by seed, that have the pairs' second agents"
    )
    arguments = parser.parse_args()
    if bool(arguments.run) != bool(arguments.config and arguments.workdir):
        parser.error("--run, --config and --workdir go together")
    of_groups = ",".join(name for name in column_names.split(",") if name in _OF_GROUPS)
    for flag, names, among in (
        ("columns", arguments.columns, column_names),
        ("of-groups", arguments.of_groups, of_groups),
    ):
        if unknown := set(names.split(",")) - set(among.split(",")):
            parser.error(f"--{flag}: {', '.join(sorted(unknown))} is none of {among}")
    if arguments.at_once < 1:
        parser.error(f"--at-once={arguments.at_once}: at least one")
    columns = [column for name in arguments.columns.split(",") for column in _COLUMNS if column[0] == name]
    against = arguments.against or arguments.workdirs
    if len(against) != len(arguments.workdirs):
        parser.error(
            f"--against needs as many runs as are compared with them: {len(arguments.workdirs)}, not {len(against)}"
        )
    if arguments.pair and not arguments.workdirs:
        parser.error("--pair compares the episodes of runs: name their directories")
    named = [finished(workdir, controls=not arguments.no_controls) for workdir in arguments.workdirs]
    present = {(run.seed, run.isa) for run in named}
    runs = [run for run in read_runs(arguments.keep) if (run.seed, run.isa) not in present] + named
    present |= {(run.seed, run.isa) for run in runs}
    missing = [
        (seed, isa) for seed in range(arguments.run) for isa in arguments.isa.split(",") if (seed, isa) not in present
    ]
    with concurrent.futures.ThreadPoolExecutor(arguments.at_once) as pool:
        try:
            for finished_run in concurrent.futures.as_completed(
                [pool.submit(_train_run, arguments, seed, isa) for seed, isa in missing]
            ):
                runs.append(finished_run.result())
                _check(runs, arguments.keep)
                if arguments.keep:
                    _write_runs(runs, arguments.keep)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if not runs:
        parser.error("name finished runs, or give --config, --run and --workdir")
    _check(runs, arguments.keep)
    if arguments.keep and named:
        _write_runs(runs, arguments.keep)
    runs.sort(key=lambda run: (run.isa != NATIVE, run.isa, run.seed))
    print(tables(runs, columns))
    if arguments.by:
        print(by_group(runs, arguments.by, arguments.of_groups.split(",")))
    if arguments.picture:
        curves(runs, arguments.picture)
    if arguments.against:
        print(tables([finished(workdir) for workdir in arguments.against], columns))
    if arguments.pair:
        _pairs(
            [run.name for run in named],
            arguments.workdirs,
            against,
            [tuple(pair.partition(":")[::2]) for pair in arguments.pair],
        )


def _train_run(arguments: argparse.Namespace, seed: int, isa: str) -> Run:
    workdir = arguments.workdir / f"{seed}-{isa}"
    train(arguments.config, workdir, seed=seed, isa=isa, flags=arguments.set)
    return finished(workdir)


def finished(workdir: pathlib.Path, controls: bool = True) -> Run:
    """The numbers of a finished run. A directory called SEED-ISA names the run's instruction set.

    Args:
      controls: take the run's controls, too, which must have run.

    Raises:
      SystemExit: the run is not finished.
    """
    if lacking := unfinished(workdir, controls):
        raise SystemExit(f"{workdir} holds no finished run ({lacking})")
    results = json.loads((workdir / "results.json").read_text())
    settings = dataclasses.replace(load_config(workdir), seed=0)
    rows = read_metrics(workdir)
    sampled = {name: [row.get(f"rollout/{name}") for row in rows] for name in _CURVES if _measured(rows, name)}
    measured = {
        f"validation/{name}": [[row["step"] + 1, row[key]] for row in rows if (key := f"validation/{name}") in row]
        for name in _CURVES
    }
    left_out = () if controls else settings.controls
    numbers = {agent: numbers_of(metrics) for agent, metrics in results["agents"].items() if agent not in left_out}
    return Run(
        seed=results["seed"],
        isa=_isa(workdir, results["seed"]),
        settings=hashlib.sha256(json.dumps(_without_defaults(settings), sort_keys=True).encode()).hexdigest()[:12],
        agents=_rounded(numbers),
        seconds=_rounded(results["seconds"]),
        tokens=int(sum(row.get("perf/decoded_tokens", 0) for row in rows)),
        curves=_rounded(sampled | measured),
        machine=f"{platform.machine()}, {results['devices']} {results['platform']} devices",
        trained=settings.evaluation.names.get("trained", "trained"),
    )


def _measured(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return any(f"rollout/{name}" in row for row in rows)


def _without_defaults(value: Any) -> Any:
    """A configuration without settings at their defaults, so that a setting that is new to the schema changes nothing."""
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {
            field.name: _without_defaults(fields[field.name])
            for field in dataclasses.fields(value)
            if not _is_default(field, fields)
        }
    return {key: _without_defaults(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _is_default(field: dataclasses.Field[Any], fields: Mapping[str, Any]) -> bool:
    default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return fields[field.name] == default


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """An agent's metrics, and of each group of questions what `_OF_GROUPS` names, as by.KEY.VALUE.METRIC."""
    numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    for key, groups in metrics.get("by", {}).items():
        for value, group in groups.items():
            numbers |= {f"by.{key}.{value}.{name}": group[name] for name in _OF_GROUPS if name in group}
    return numbers


def _isa(workdir: pathlib.Path, seed: int) -> str:
    """The instruction set of the run in a directory: --run calls it SEED-ISA."""
    begins, _, isa = workdir.resolve().name.partition("-")
    return isa if isa and begins == str(seed) else NATIVE


def tables(runs: Sequence[Run], columns: Sequence[Column] = _COLUMNS) -> str:
    """Markdown: every agent's mean and worst over the runs, what they took, and the trained policy run by run."""
    agents = runs[0].agents
    columns = [
        column for column in columns if all(column[0] in run.agents.get(agent, {}) for agent in agents for run in runs)
    ]
    lines = [f"Mean and worst of {len(runs)} runs." if len(runs) > 1 else "One run.", ""]
    lines += _head(["agent", *(heading for _, heading, *_ in columns)])
    for agent in agents:
        cells = [
            _cell([run.agents[agent][key] * scale for run in runs], worst=min if more else max)
            for key, _, scale, more in columns
        ]
        lines.append(_row([title(agent), *cells]))
    phases = [name for name in runs[0].seconds if all(name in run.seconds for run in runs)]
    lines += ["", *_head(["phase", "seconds"])]
    lines += [_row([name, _cell([run.seconds[name] for run in runs], digits=0)]) for name in phases]
    if all(run.tokens for run in runs):
        generated = _cell([run.tokens / 1e3 for run in runs], digits=0)
        lines += ["", f"Thousand tokens generated in training: {generated}"]
    policy = runs[0].trained
    lines += ["", *_head([f"{title(policy)}, seed", *(heading for _, heading, *_ in columns)])]
    for run in runs:
        lines.append(_row([run.name, *(f"{run.agents[policy][key] * scale:.1f}" for key, _, scale, _ in columns)]))
    return "\n".join([*lines, ""])


def by_group(runs: Sequence[Run], key: str, metrics: Sequence[str] = ("em", "searched_rate")) -> str:
    """Markdown: metrics of every agent by group of questions: mean (least to most).

    Raises:
      SystemExit: the runs have no such groups.
    """
    keys = sorted({name.split(".")[1] for name in runs[0].agents[runs[0].trained] if name.startswith("by.")})
    if key not in keys:
        raise SystemExit(f"--by={key}: the runs' questions are grouped by {', '.join(keys) or 'nothing'}")
    groups = sorted({name.split(".")[2] for name in runs[0].agents[runs[0].trained] if name.startswith(f"by.{key}.")})
    columns = [column for metric in metrics for column in _COLUMNS if column[0] == metric]
    shown = ", ".join(heading for _, heading, *_ in columns)
    lines = _head(["agent", *(f"{group}: {shown}" for group in groups)])
    for agent in runs[0].agents:
        cells = []
        for group in groups:
            values = [
                [run.agents[agent].get(f"by.{key}.{group}.{metric}", float("nan")) * scale for run in runs]
                for metric, _, scale, _ in columns
            ]
            cells.append(
                ", ".join(
                    _range(found, digits=0 if scale == 100 else 2) for found, (_, _, scale, _) in zip(values, columns)
                )
            )
        lines.append(_row([title(agent), *cells]))
    return "\n".join([*lines, ""])


def curves(runs: Sequence[Run], path: pathlib.Path) -> None:
    """Routing, EM, searches, and what they cost where some cost more than others, over steps.

    Sampled: every run and their mean; dots: greedy on held-out questions.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = {
        "routing_accuracy": "Searches sent to the right knowledge base",
        "em": "Answers right (EM)",
        "searches_per_question": "Searches per question",
        "retrieval_cost": "Cost of a question's searches",
        "recall_at_first": "First search finds the page",
        "crops_per_question": "Closer looks per question",
        "box_iou": "Overlap (IoU) of the box with the right one",
    }
    titles = {
        name: text for name, text in shown.items() if all(None not in run.curves.get(name, [None]) for run in runs)
    }
    if "retrieval_cost" in titles and all(_each_costs_the_same(run) for run in runs):
        del titles["retrieval_cost"]
    if "routing_accuracy" in titles:  # says more about the same searches
        titles.pop("recall_at_first", None)
    figure, axes = plt.subplots(
        1, len(titles), figsize=(4.3 * len(titles), 3.6), constrained_layout=True, squeeze=False
    )
    for axis, (name, text), color in zip(axes[0], titles.items(), COLORS):
        smooth = [_smooth(run.curves[name]) for run in runs]
        for values in smooth:
            axis.plot(range(1, len(values) + 1), values, color=color, alpha=0.25, linewidth=0.9)
        length = min(map(len, smooth))
        mean = np.mean([values[:length] for values in smooth], axis=0)
        axis.plot(range(1, length + 1), mean, color=color, linewidth=2.2, label=f"sampled, mean of {len(runs)} runs")
        points = [point for run in runs for point in run.curves.get(f"validation/{name}", [])]
        if points:
            axis.plot(*zip(*points), "o", color=color, alpha=0.35, markersize=3.5, label="greedy, held-out questions")
        axis.set(title=text, xlabel="step", ylim=(0, 1.02) if name in _SHARES else (0, None))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=8, loc="lower right")
    save_figure(figure, path)


def _each_costs_the_same(run: Run) -> bool:
    costs, searches = (np.asarray(run.curves[name]) for name in ("retrieval_cost", "searches_per_question"))
    return np.allclose(costs, searches * (costs.sum() / max(searches.sum(), 1e-9)), atol=1e-4)


def _smooth(values: Sequence[float], window: int = 5) -> np.ndarray:
    """Mean of the last `window` values, at every step."""
    total = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (total[ends] - total[starts]) / (ends - starts)


def read_runs(path: pathlib.Path | None) -> list[Run]:
    """The runs in a file of --keep; none if the file does not exist."""
    if path is None or not path.is_file():
        return []
    return [Run(**row) for row in json.loads(path.read_text())]


def _write_runs(runs: Sequence[Run], path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps(dataclasses.asdict(run)) for run in runs]
    path.write_text("[\n" + ",\n".join(rows) + "\n]\n")  # a line a run


def _check(runs: Sequence[Run], path: pathlib.Path | None) -> None:
    """Warns about runs of different settings in one table. In a file of --keep they are an error."""
    differing = next((run for run in runs if run.settings != runs[0].settings), None)
    if differing:
        complaint = f"the runs of seeds {runs[0].name} and {differing.name} differ in more than their seed"
        if path:
            sys.exit(f"{complaint}; {path} holds runs of earlier settings: remove it, and they are run anew")
        print(f"warning: {complaint}", file=sys.stderr)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 5) if isinstance(value, float) else value


def _pairs(
    names: list[str], workdirs: list[pathlib.Path], against: list[pathlib.Path], pairs: list[tuple[str, ...]]
) -> None:
    print(
        "| pair | seed | EM points | McNemar's p | bootstrap p | cost % | questions |\n|---|---|---:|---:|---:|---:|---:|"
    )
    normalizer = _evaluation(workdirs[0])["normalizer"]
    for agent, baseline in pairs:
        records = [(_records(run, agent), _records(beside, baseline)) for run, beside in zip(workdirs, against)]
        rows = [(name, [pair]) for name, pair in zip(names, records)]
        for seed, seed_records in [*rows, *([("all", records)] if len(records) > 1 else [])]:
            comparison = compare_seeds(seed_records, normalizer)
            em = _interval(comparison["em_difference"], comparison["em_difference_interval"])
            low, high = comparison["cost_reduction_interval"]
            searched = any(record_cost(record) for _, second in seed_records for record in second)
            cost = _interval(-comparison["cost_reduction"], [-high, -low]) if searched else "-"
            p, pooled = f"{comparison['mcnemar_p']:.2g}", f"{comparison['bootstrap_p']:.2g}"
            p, pooled = (f"{p} (worst)", pooled) if len(seed_records) > 1 else (p, "-")
            print(
                f"| {title(agent)} - {title(baseline)} | {seed} | {em} | {p} | {pooled} | {cost} | {comparison['n']} |"
            )
    if len(workdirs) > 1:
        print(
            "Bootstrap p: over questions and runs, at least 1e-05. The worst p is 1 if runs differ in opposite directions."
        )


def _evaluation(workdir: pathlib.Path) -> dict[str, Any]:
    """The configuration's section."""
    return json.loads((workdir / "config.json").read_text())["evaluation"]


def _records(workdir: pathlib.Path, agent: str) -> list[dict[str, Any]]:
    """An agent's episodes: of the run, or of its control of that name."""
    names = {called: name for name, called in _evaluation(workdir).get("names", {}).items()}
    for file in (
        workdir / "evaluation" / f"{names.get(agent, agent)}.jsonl",
        workdir / "evaluation" / f"{agent}.jsonl",
        control_directory(workdir, agent) / "evaluation" / "trained.jsonl",
    ):
        if file.exists():
            return list(read_records(file))
    raise SystemExit(f"{workdir} has no episodes of {agent!r}")


def _interval(value: Any, interval: Any) -> str:
    low, high = interval
    return f"{100 * value:+.1f} ({100 * low:.1f} to {100 * high:.1f})"


def _head(headings: Sequence[str]) -> list[str]:
    return [_row(headings), "|---" + "|---:" * (len(headings) - 1) + "|"]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(values: Sequence[float], *, worst: Any = max, digits: int = 1) -> str:
    mean = f"{np.mean(values):.{digits}f}"
    return mean if max(values) - min(values) < 0.05 else f"{mean} (worst {worst(values):.{digits}f})"


def _range(values: Sequence[float], digits: int = 0) -> str:
    if np.isnan(values).all():
        return "-"
    least, most = (f"{value:.{digits}f}" for value in (np.nanmin(values), np.nanmax(values)))
    return least if least == most else f"{np.nanmean(values):.{digits}f} ({least} to {most})"


if __name__ == "__main__":
    main()
