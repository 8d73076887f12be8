"""Measures what RouteRAG's modes find in Atlas: gold passages among the first k, for sub-questions and two-hop questions. For
runs, it counts the modes to which each kind of sub-question was sent.

python -m benchmarks.atlas_modes [--link_facts 1] [--k 2] [--k 3]
python -m benchmarks.atlas_modes --runs runs/routerag_small runs/routerag_small-seed1 [--agent trained]
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from configs import routerag_small
from routerl_jax.agents.agent import SearchTool
from routerl_jax.core.types import Example
from routerl_jax.data.readers import open_dataset
from routerl_jax.evaluation.records import read_records
from routerl_jax.training.config import KnowledgeConfig
from routerl_jax.training.knowledge import open_knowledge_bases

_SPLITS = ("validation", "test")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link_facts", type=int, default=1, help="facts that a walk of the graph starts from")
    parser.add_argument("--k", type=int, action="append", help="passages per search; may be given several times")
    parser.add_argument("--runs", nargs="+", type=pathlib.Path, help="workdirs: what the policies chose, instead")
    parser.add_argument("--agent", default="trained", help="of the runs' evaluation")
    arguments = parser.parse_args()
    if arguments.runs:
        print("| run | sub-questions | searches | modes |\n|---|---|---:|---|")
        for run in arguments.runs:
            chosen(run, arguments.agent)
        return
    tools = open_knowledge_bases(_with_link_facts(arguments.link_facts))
    print("| | split | what a thing has | which thing has it | both passages of a two-hop question |")
    print("|---|---|---:|---:|---:|")
    for k in arguments.k or [2]:
        for split in _SPLITS:
            source = open_dataset(f"atlas/{split}")
            examples = [source[i] for i in range(len(source))]
            for name, tool in tools.items():
                what, which = sub_questions(tool, examples, k)
                shares = " | ".join(f"{100 * share:.1f} %" for share in (what, which, two_hops(tool, examples, k)))
                print(f"| {name}, {k} passages | {split} | {shares} |")


def chosen(run: pathlib.Path, agent: str) -> None:
    """Rows of a table: the modes of a run's test searches, apart for those that ask for the thing itself (Which ..?)."""
    counts: dict[str, collections.Counter[str]] = {}
    for record in read_records(run / "evaluation" / f"{agent}.jsonl"):
        for call in (call for turn in record["turns"] for call in turn["calls"]):
            kind = "which thing has it" if call["query"].startswith("Which ") else "what a thing has"
            counts.setdefault(kind, collections.Counter())[call["tool"]] += 1
    for kind, modes in sorted(counts.items()):
        shares = ", ".join(f"{mode} {100 * count / modes.total():.1f} %" for mode, count in modes.most_common())
        print(f"| {run.name} | {kind} | {modes.total()} | {shares} |")


def sub_questions(tool: SearchTool, examples: Sequence[Example], k: int) -> tuple[float, float]:
    """Share of gold sub-questions whose passage is among the first k: of those that name the thing, and that ask for it."""
    hops = [hop for example in examples for hop in example.metadata["path"]]
    which = [hop for hop in hops if hop["passage_id"].split("/")[1] == hop["value"]]
    what = [hop for hop in hops if hop["passage_id"].split("/")[1] != hop["value"]]
    results = [
        _share(tool, [hop["query"] for hop in some], [{hop["passage_id"]} for hop in some], k) for some in (what, which)
    ]
    return results[0], results[1]


def two_hops(tool: SearchTool, examples: Sequence[Example], k: int) -> float:
    """Share of two-hop questions, asked as they are, whose passages are both among the first k."""
    two = [example for example in examples if len(example.metadata["path"]) == 2]
    gold = [{hop["passage_id"] for hop in example.metadata["path"]} for example in two]
    return _share(tool, [example.question for example in two], gold, k)


def _share(tool: SearchTool, queries: Sequence[str], gold: Sequence[set[str]], k: int) -> float:
    results = tool.search(queries, k)
    return sum(ids <= {passage.id for passage in passages} for ids, passages in zip(gold, results)) / len(queries)


def _with_link_facts(count: int) -> Mapping[str, KnowledgeConfig]:
    graph = dataclasses.replace(routerag_small.KNOWLEDGE["graph"], settings={"walk": {"link_facts": count}})
    return {**routerag_small.KNOWLEDGE, "graph": graph}


if __name__ == "__main__":
    main()
