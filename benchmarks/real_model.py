"""A real model learns where to look: runs of configs/sources.py on several seeds, and their results.

python -m benchmarks.real_data --output=runs/real_data    # --data=DIRECTORY: with what has no licence
python -m benchmarks.real_model --run=0:native,1:AVX,2:native --workdir=runs/real_model \
    --keep=benchmarks/results/real_model.json

What has finished is left alone, what has begun is gone on with. No run has been made to its end yet.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.real_data import exchanged
from benchmarks.runs import train
from configs.sources import DATA, DESCRIPTIONS
from routerl_jax.core.files import write_atomic
from routerl_jax.evaluation.paired import compare_records, compare_seeds
from routerl_jax.evaluation.records import read_records

_NUMBERS = ("em", "routing_accuracy", "searches_per_question")


def evaluated(workdir: pathlib.Path, name: str, *flags: str) -> dict[str, Any]:
    """The table of `launch.evaluate`, by agent, which is made unless it is there."""
    output = workdir / "benchmarks" / name
    if not (output / "results.json").is_file():
        command = [sys.executable, "-m", "launch.evaluate", f"--output={output}", *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads((output / "results.json").read_text())["agents"]


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: row[name] for name in _NUMBERS}


def where(seed: int, isa: str, directory: pathlib.Path, flags: list[str]) -> dict[str, Any]:
    """A run from the start to its last evaluation."""
    workdir = directory / f"{seed}-{isa}"
    train("configs/sources.py", workdir, seed=seed, isa=isa, flags=flags)
    results = json.loads((workdir / "results.json").read_text())
    table, of_run = results["agents"], f"--workdir={workdir}"
    every = evaluated(workdir, "every_kb", of_run, "--agents=every_kb")
    sampled = evaluated(
        workdir,
        "sampled",
        f"--workdir={workdir}/warm_start",
        f"--benchmark={DATA}/test.jsonl",
        "--temperature=1",
        "--agents=trained",
    )
    asked = {
        name: evaluated(workdir, name, of_run, f"--benchmark={DATA}/{name}.jsonl", "--agents=trained")["learnt"]
        for name in ("other_sets", "paraphrases")
    }
    policy = [f"--model={workdir}/policy", "--config=configs/sources.py:own", "--agents=trained"]
    for name, renaming in (("exchanged", {"people": "table", "table": "people"}), ("renamed", {"table": "sheet"})):
        exchanged(pathlib.Path(DATA), name, renaming)
        new = {renaming.get(old, old): old for old in DESCRIPTIONS}
        knowledge = [f"--config.knowledge.{at}.source={DATA}/{old}.jsonl" for at, old in new.items()]
        knowledge += [f"--config.knowledge.{at}.description={DESCRIPTIONS[old]}" for at, old in new.items()]
        knowledge += [f"--config.knowledge.{at}.kind=bm25" for at in new]
        asked[name] = evaluated(workdir, name, *policy, *knowledge, f"--benchmark={DATA}/{name}.jsonl")["policy"]
    before, after = (list(read_records(workdir / "evaluation" / f"{name}.jsonl")) for name in ("warm_start", "trained"))
    return {
        "seed": seed,
        "isa": isa,
        "device": results["platform"],
        "hours": results["seconds"]["total"] / 3600,
        "n": len(after),
        "before": numbers(table["start"]) | {"sampled_routing_accuracy": sampled["policy"]["routing_accuracy"]},
        "after": numbers(table["learnt"]),
        "random_kb": numbers(table["random_kb"]),
        **{f"only_{name}": numbers(table[f"only_{name}"]) for name in DESCRIPTIONS},
        "all_sources": {name: every["every_kb"][name] for name in ("em", "searches_per_question")},
        **{name: numbers(row) | {"n": row["n"]} for name, row in asked.items()},
        "p_before_after": compare_records(after, before)["mcnemar_p"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="0:native,1:AVX,2:native", help="SEED:ISA, ..")
    parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/real_model"))
    parser.add_argument("--keep", type=pathlib.Path)
    parser.add_argument("--flag", action="append", default=[], help="of launch.train, without --")
    flags = parser.parse_args()
    runs = []
    for named in flags.run.split(","):
        seed, _, isa = named.partition(":")
        runs.append(where(int(seed), isa or "native", flags.workdir, flags.flag))
        print(json.dumps(runs[-1], indent=2))
    pairs = []
    for run in runs:
        records = flags.workdir / f"{run['seed']}-{run['isa']}" / "evaluation"
        pairs.append([list(read_records(records / f"{name}.jsonl")) for name in ("trained", "warm_start")])
    pooled = compare_seeds([(after, before) for after, before in pairs])
    if flags.keep:
        write_atomic(flags.keep, json.dumps({"where": {"runs": runs, "pooled": pooled}}, indent=2) + "\n")


if __name__ == "__main__":
    main()
