"""What RouteRAG's modes find in Atlas: gold passages among the first k, for a sub-question and for a whole two-hop question.

python -m benchmarks.atlas_modes [--link_facts 1] [--k 2] [--k 3]
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence

from configs import routerag_small
from routerl_jax.agents.agent import SearchTool
from routerl_jax.core.types import Example
from routerl_jax.data.readers import open_dataset
from routerl_jax.training.config import KnowledgeConfig
from routerl_jax.training.knowledge import open_knowledge_bases

_SPLITS = ("validation", "test")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--link_facts", type=int, default=1, help="facts that a walk of the graph starts from")
    parser.add_argument("--k", type=int, action="append", help="passages per search; may be given several times")
    arguments = parser.parse_args()
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


def sub_questions(tool: SearchTool, examples: Sequence[Example], k: int) -> tuple[float, float]:
    """Share of gold sub-questions whose passage is among the first k: of those that name the thing, and that ask for it."""
    hops = [hop for example in examples for hop in example.metadata["path"]]
    which = [hop for hop in hops if hop["passage_id"].split("/")[1] == hop["value"]]
    what = [hop for hop in hops if hop["passage_id"].split("/")[1] != hop["value"]]
    found = [
        _share(tool, [hop["query"] for hop in some], [{hop["passage_id"]} for hop in some], k) for some in (what, which)
    ]
    return found[0], found[1]


def two_hops(tool: SearchTool, examples: Sequence[Example], k: int) -> float:
    """Share of two-hop questions, asked as they are, whose passages are both among the first k."""
    two = [example for example in examples if len(example.metadata["path"]) == 2]
    gold = [{hop["passage_id"] for hop in example.metadata["path"]} for example in two]
    return _share(tool, [example.question for example in two], gold, k)


def _share(tool: SearchTool, queries: Sequence[str], gold: Sequence[set[str]], k: int) -> float:
    found = tool.search(queries, k)
    return sum(ids <= {passage.id for passage in passages} for ids, passages in zip(gold, found)) / len(queries)


def _with_link_facts(count: int) -> Mapping[str, KnowledgeConfig]:
    graph = dataclasses.replace(routerag_small.KNOWLEDGE["graph"], settings={"walk": {"link_facts": count}})
    return {**routerag_small.KNOWLEDGE, "graph": graph}


if __name__ == "__main__":
    main()
