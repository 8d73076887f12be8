"""A real model learns where to look: runs of configs/sources.py on several seeds, and their results.

python -m benchmarks.real_data --output=runs/real_data    # --data=DIRECTORY: with what has no licence
python -m benchmarks.real_model --run=2:native,3:AVX,4:native --workdir=runs/real_model \
    --keep=benchmarks/results/real_model.json
python -m benchmarks.real_model --ship=1:native      # its adapter, benchmarks/real_policy
python -m benchmarks.real_model --evaluate --json    # the policy of this repository on the test questions, about ten minutes

What has finished is left alone, what has begun is gone on with. --keep is written after each evaluation, and keeps the runs of
other seeds that it has. Seed 1 chose the settings. docs/real_model.md has the results.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.real_data import exchanged, rows
from benchmarks.runs import train
from configs.sources import DATA, DESCRIPTIONS
from routerl_jax.core.files import write_atomic
from routerl_jax.evaluation.paired import compare_records, compare_seeds
from routerl_jax.evaluation.records import read_records

POLICY = pathlib.Path(__file__).with_name("real_policy")  # the adapter of one of the runs
_NUMBERS = ("em", "routing_accuracy", "searches_per_question")
_RENAMED = {"exchanged": {"people": "table", "table": "people"}, "renamed": {"table": "sheet"}}


def evaluated(output: pathlib.Path, agent: str, *flags: str) -> dict[str, Any]:
    """The table of `launch.evaluate`, by agent; `agent` is evaluated unless the table has it."""
    results = output / "results.json"
    table = json.loads(results.read_text())["agents"] if results.is_file() else {}
    if agent not in table:
        asked = agent if agent.startswith(("only_", "random_", "every_")) else "trained"
        command = [sys.executable, "-m", "launch.evaluate", f"--output={output}", f"--agents={asked}", *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        table = json.loads(results.read_text())["agents"]
    return table


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: row[name] for name in ("n", *_NUMBERS)}


def by_part(name: str, records: pathlib.Path) -> dict[str, dict[str, float]]:
    """Routing by the source that answers and, for paraphrases, by their kind."""
    asked = {row["id"]: row for row in rows(pathlib.Path(DATA) / f"{name}.jsonl")}
    parts: dict[str, list[bool]] = {}
    for record in read_records(records):
        row = asked[record["id"]]
        expected = row["path"][0]["kb"]
        called = [call["tool"] for turn in record["turns"] for call in turn["calls"]]
        for part in {expected, row["set"].rpartition(", ")[2] if name == "paraphrases" else expected}:
            parts.setdefault(part, []).append(called[:1] == [expected])
    return {part: {"n": len(hits), "routing_accuracy": sum(hits) / len(hits)} for part, hits in sorted(parts.items())}


def where(seed: int, isa: str, directory: pathlib.Path, flags: list[str]) -> Iterator[dict[str, Any]]:
    """A run from the start to its last evaluation: its record, after each evaluation."""
    workdir = directory / f"{seed}-{isa}"
    train("configs/sources.py", workdir, seed=seed, isa=isa, flags=[*flags, "config.evaluation.baselines=False"])
    results = json.loads((workdir / "results.json").read_text())
    table, of_run = results["agents"], f"--workdir={workdir}"
    before, after = (list(read_records(workdir / "evaluation" / f"{name}.jsonl")) for name in ("warm_start", "trained"))
    run: dict[str, Any] = {
        "seed": seed,
        "isa": isa,
        "device": results["platform"],
        "hours": results["seconds"]["total"] / 3600,
        "n": len(after),
        "before": numbers(table["start"]),
        "after": numbers(table["learnt"]),
        "p_before_after": compare_records(after, before)["mcnemar_p"],
    }
    yield run
    benchmarks = workdir / "benchmarks"
    start = (f"--workdir={workdir}/warm_start", f"--benchmark={DATA}/test.jsonl", "--temperature=1", "--limit=200")
    sampled = evaluated(benchmarks / "sampled", "policy", *start)["policy"]
    run["before"] |= {"sampled_routing_accuracy": sampled["routing_accuracy"], "sampled_n": sampled["n"]}
    yield run
    for name in ("other_sets", "paraphrases"):
        row = evaluated(benchmarks / name, "learnt", of_run, f"--benchmark={DATA}/{name}.jsonl")["learnt"]
        run[name] = numbers(row) | {"by": by_part(name, benchmarks / name / "trained.jsonl")}
        yield run
    for agent in ("random_kb", *(f"only_{name}" for name in DESCRIPTIONS), "every_kb"):
        row = evaluated(benchmarks / "test", agent, of_run, "--limit=200")[agent]
        run["all_sources" if agent == "every_kb" else agent] = numbers(row)
        yield run
    policy = (f"--model={workdir}/policy", "--config=configs/sources.py:own", "--limit=200")
    for name, renaming in _RENAMED.items():
        exchanged(pathlib.Path(DATA), name, renaming)
        new = {renaming.get(old, old): old for old in DESCRIPTIONS}
        knowledge = [f"--config.knowledge.{at}.source={DATA}/{old}.jsonl" for at, old in new.items()]
        knowledge += [f"--config.knowledge.{at}.description={DESCRIPTIONS[old]}" for at, old in new.items()]
        knowledge += [f"--config.knowledge.{at}.kind=bm25" for at in new]
        benchmark = f"--benchmark={DATA}/{name}.jsonl"
        run[name] = numbers(evaluated(benchmarks / name, "policy", *policy, *knowledge, benchmark)["policy"])
        yield run


def keep(path: pathlib.Path, runs: list[dict[str, Any]], directory: pathlib.Path) -> None:
    """Writes the records of runs, and the comparison of those whose episodes are in `directory`."""
    pairs = []
    for run in runs:
        records = directory / f"{run['seed']}-{run['isa']}" / "evaluation"
        if (records / "trained.jsonl").is_file():
            pairs.append([list(read_records(records / f"{name}.jsonl")) for name in ("trained", "warm_start")])
    pooled = compare_seeds([(after, before) for after, before in pairs]) | {"runs": len(pairs)}
    write_atomic(path, json.dumps({"where": {"runs": runs, "pooled": pooled}}, indent=2) + "\n")


def ship(workdir: pathlib.Path, base: str = "SmolLM2-135M-Instruct") -> None:
    """Writes what a run taught as one bfloat16 adapter of the published weights: the start's beside that of RL.

    Both have the same alpha / rank, so the matrices of the two, side by side, give the sum of their products.
    """
    with tempfile.TemporaryDirectory() as scratch:
        parts = []
        for name, trained in (("start", workdir / "warm_start"), ("learnt", workdir)):
            flags = (f"--workdir={trained}", f"--output={scratch}/{name}", "--lora=adapter", f"--base={base}")
            subprocess.run([sys.executable, "-m", "launch.export_hf", *flags], check=True, stdout=subprocess.DEVNULL)
            parts.append(pathlib.Path(scratch) / name)
        start, learnt = (load_file(part / "adapter_model.safetensors") for part in parts)
        settings, others = (json.loads((part / "adapter_config.json").read_text()) for part in parts)
    if settings["lora_alpha"] * others["r"] != others["lora_alpha"] * settings["r"]:
        raise ValueError(f"{workdir}: the adapters of the start and of the run have another alpha / rank")
    settings["r"], settings["lora_alpha"] = settings["r"] + others["r"], settings["lora_alpha"] + others["lora_alpha"]
    joined = {
        name: np.concatenate([start[name], learnt[name]], axis=0 if "lora_A" in name else 1).astype(ml_dtypes.bfloat16)
        for name in start
    }
    POLICY.mkdir(exist_ok=True)
    save_file(joined, POLICY / "adapter_model.safetensors", metadata={"format": "pt"})
    (POLICY / "adapter_model.safetensors").chmod(0o644)  # safetensors lets the owner alone read it
    write_atomic(POLICY / "adapter_config.json", json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="2:native,3:AVX,4:native", help="SEED:ISA, ..")
    parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/real_model"))
    parser.add_argument("--keep", type=pathlib.Path)
    parser.add_argument("--flag", action="append", default=[], help="of launch.train, without --")
    parser.add_argument("--evaluate", action="store_true", help="the policy of this repository")
    parser.add_argument("--json", action="store_true", help="with --evaluate: print numbers alone")
    parser.add_argument("--ship", help="SEED:ISA of the finished run whose adapter this repository is to hold")
    flags = parser.parse_args()
    if flags.ship:
        ship(flags.workdir / flags.ship.replace(":", "-"))
        return
    if flags.evaluate:
        output = flags.workdir / "shipped"
        made = evaluated(
            output, "policy", f"--model={POLICY}", "--config=configs/sources.py", "--config.model.lora.rank=0"
        )["policy"]
        print(json.dumps(numbers(made)) if flags.json else (output / "report.md").read_text())
        return
    known = json.loads(flags.keep.read_text())["where"]["runs"] if flags.keep and flags.keep.is_file() else []
    runs = {(run["seed"], run["isa"]): run for run in known}
    for named in flags.run.split(","):
        seed, _, isa = named.partition(":")
        for run in where(int(seed), isa or "native", flags.workdir, flags.flag):
            runs[run["seed"], run["isa"]] = run
            if flags.keep:
                keep(flags.keep, list(runs.values()), flags.workdir)
        print(json.dumps(runs[int(seed), isa or "native"], indent=2))


if __name__ == "__main__":
    main()
