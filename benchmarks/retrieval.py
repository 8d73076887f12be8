r"""Retrieval beside its peers, in one process: speed as ratios, quality as recall.

    python -m benchmarks.retrieval [--json] [--quick] [--only=scann,passages,graph,maxsim,server]

Parts, each a module of this directory with `measure(quick) -> {"ratios": .., "recall": ..}`:

    scann     benchmarks.vectors   ScaNN beside exact search (numpy) and FAISS, a million vectors
    passages  benchmarks.passages  recall@5 of BM25 and dense search on HotpotQA, 2WikiMultihopQA and MuSiQue
    graph     benchmarks.graph     batched PPR beside python-igraph, end to end beside HippoRAG's way
    maxsim    benchmarks.maxsim    late interaction beside a torch loop
    server    benchmarks.serving   200 clients beside one blocking search per request

Set ROUTERL_TEST_DATA to the real datasets, ROUTERL_BENCH_CACHE to where knowledge bases may stay (the first run builds them:
half an hour on two idle cores), and ROUTERL_HIPPORAG to a checkout of HippoRAG. A part that fails is reported, the
others go on, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import traceback
from typing import Any

PARTS = {"scann": "vectors", "passages": "passages", "graph": "graph", "maxsim": "maxsim", "server": "serving"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--quick", action="store_true", help="smaller work, for a look in minutes")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, separated by commas")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    unknown = set(chosen) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {unknown.pop()!r}; known: {', '.join(PARTS)}")
    result: dict[str, Any] = {"ratios": {}, "recall": {}, "details": {}, "errors": {}}
    for name in chosen:
        try:
            measured = importlib.import_module(f"benchmarks.{PARTS[name]}").measure(arguments.quick)
        except Exception as error:
            traceback.print_exc()
            result["errors"][name] = f"{type(error).__name__}: {error}"
            continue
        result["ratios"] |= measured.get("ratios", {})
        _join(result["recall"], measured.get("recall", {}))
        rest = {key: value for key, value in measured.items() if key not in ("ratios", "recall")}
        result["details"] |= {name: rest} if rest else {}
    print(json.dumps(result) if arguments.json else _table(result))
    sys.exit(bool(result["errors"]))


def _join(into: dict[str, Any], more: dict[str, Any]) -> None:
    """Recall is by corpus, then by retriever; several parts may know one corpus."""
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _join(into[key], value)
        else:
            into[key] = value


def _table(result: dict[str, Any]) -> str:
    lines = [f"{name:<28} {value:.3g}" for name, value in result["ratios"].items()]
    for corpus, recalls in result["recall"].items():
        shown = recalls.items() if isinstance(recalls, dict) else [("", recalls)]
        lines += [f"{f'recall {corpus} {name}':<44} {value:.4f}" for name, value in shown if isinstance(value, float)]
    lines += [f"{name}: FAILED, {error}" for name, error in result["errors"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
