"""Several runs of one configuration as a Markdown table: mean and range over seeds, per agent and per phase.

python -m benchmarks.seeds runs/quickstart runs/quickstart-seed1 runs/quickstart-seed2
"""

from __future__ import annotations

import json
import pathlib
import sys

from routerl_jax.evaluation.report import title

_COLUMNS = (
    ("em", "EM %", 100),
    ("f1", "F1 %", 100),
    ("routing_accuracy", "routing %", 100),
    ("searches_per_question", "searches", 1),
    ("valid_search_share", "episodes with a valid search %", 100),
    ("invalid_action_rate", "invalid %", 100),
)


def main(workdirs: list[str]) -> None:
    if not workdirs:
        sys.exit("give the workdirs of the runs to compare")
    runs = [json.loads((pathlib.Path(workdir) / "results.json").read_text()) for workdir in workdirs]
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


def _cell(values: list[float], digits: int = 1) -> str:
    mean = sum(values) / len(values)
    if len(values) == 1 or max(values) - min(values) < 0.05:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


if __name__ == "__main__":
    main(sys.argv[1:])
