"""One of two processes that work out demonstrations: python -m tests.training.two_searchers.

Prints one JSON line: what this process asked, and what was found for which question.
"""

from __future__ import annotations

import json

import jax

from routerl_jax.core.types import Passage
from routerl_jax.parallel import multihost
from routerl_jax.training.annotated import worked_examples
from tests.training.test_annotated import BRIDGE, Names


class OfOneProcess(Names):
    """The second process has trouble with one of the names."""

    def _find(self, query: str) -> list[Passage]:
        if jax.process_index() == 1 and "Fallon" in query:
            raise ConnectionError("the index is down")
        return super()._find(query)


def main() -> None:
    multihost.initialize()
    tool = OfOneProcess()
    worked = worked_examples([BRIDGE] * 4, {"text": tool}, k=1, max_searches=2, seed=0)
    found = [[[step.query, [p.id for p in step.passages]] for step in one.steps] for one in worked]
    print(json.dumps({"asked": tool.asked, "found": found}))


if __name__ == "__main__":
    main()
