"""Several runs of one configuration as Markdown tables: mean and range over seeds, per agent and per phase; pairs of agents.

python -m benchmarks.seeds runs/quickstart runs/quickstart-seed1 runs/quickstart-seed2
python -m benchmarks.seeds runs/routerag runs/routerag-seed1 --pair=trained:stage1_only
python -m benchmarks.seeds runs/online runs/online-seed1 --against runs/golden runs/golden-seed1 --pair=online:step_grpo
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

from routerl_jax.evaluation.paired import compare_seeds, record_cost
from routerl_jax.evaluation.records import read_records
from routerl_jax.evaluation.report import title
from routerl_jax.training.controls import control_directory
from routerl_jax.training.writer import read_metrics

_COLUMNS = (
    ("em", "EM %", 100),
    ("f1", "F1 %", 100),
    ("routing_accuracy", "routing %", 100),
    ("searches_per_question", "searches", 1),
    ("valid_search_share", "episodes with a valid search %", 100),
    ("invalid_action_rate", "invalid %", 100),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdirs", nargs="+", type=pathlib.Path, help="of the runs")
    parser.add_argument(
        "--pair", action="append", default=[], help="AGENT:OTHER, as in results.json; any number of times"
    )
    parser.add_argument(
        "--against", nargs="+", type=pathlib.Path, help="other runs, seed by seed, that have the pairs' second agents"
    )
    given = parser.parse_args()
    against = given.against or given.workdirs
    if len(against) != len(given.workdirs):
        parser.error(
            f"--against needs as many runs as are compared with them: {len(given.workdirs)}, not {len(against)}"
        )
    _runs(given.workdirs)
    if given.against:
        _runs(given.against)
    if given.pair:
        _pairs(given.workdirs, against, [tuple(pair.partition(":")[::2]) for pair in given.pair])


def _runs(workdirs: list[pathlib.Path]) -> None:
    runs = [json.loads((workdir / "results.json").read_text()) for workdir in workdirs]
    agents = runs[0]["agents"]
    columns = [column for column in _COLUMNS if all(column[0] in metrics for metrics in agents.values())]
    print("| agent | " + " | ".join(heading for _, heading, _ in columns) + " |")
    print("|---" + "|---:" * len(columns) + "|")
    for agent in agents:
        cells = [_cell([run["agents"][agent][key] * scale for run in runs]) for key, _, scale in columns]
        print(f"| {title(agent)} | " + " | ".join(cells) + " |")
    phases = [name for name in runs[0]["seconds"] if all(name in run["seconds"] for run in runs)]
    print("\n| phase | seconds |\n|---|---:|")
    for name in phases:
        print(f"| {name} | {_cell([run['seconds'][name] for run in runs], 0)} |")
    generated = [sum(row.get("perf/decoded_tokens", 0) for row in read_metrics(workdir)) for workdir in workdirs]
    if all(generated):
        print(f"\nThousand tokens generated in training: {_cell([tokens / 1e3 for tokens in generated], 0)}")
    print()


def _pairs(workdirs: list[pathlib.Path], against: list[pathlib.Path], pairs: list[tuple[str, ...]]) -> None:
    print("| pair | seed | EM points | McNemar's p | cost % | questions |\n|---|---|---:|---:|---:|---:|")
    normalizer = _evaluation(workdirs[0])["normalizer"]
    for one, other in pairs:
        records = [(_records(run, one), _records(beside, other)) for run, beside in zip(workdirs, against)]
        for seed, chosen in [*enumerate([pair] for pair in records), *([("all", records)] if len(records) > 1 else [])]:
            found = compare_seeds(chosen, normalizer)
            em = _interval(found["em_difference"], found["em_difference_interval"])
            low, high = found["cost_reduction_interval"]
            searched = any(record_cost(record) for _, second in chosen for record in second)
            cost = _interval(-found["cost_reduction"], [-high, -low]) if searched else "-"
            p = "-" if len(chosen) > 1 else f"{found['mcnemar_p']:.2g}"
            print(f"| {title(one)} - {title(other)} | {seed} | {em} | {p} | {cost} | {found['n']} |")


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


def _cell(values: list[float], digits: int = 1) -> str:
    mean = sum(values) / len(values)
    if len(values) == 1 or max(values) - min(values) < 0.05:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


if __name__ == "__main__":
    main()
