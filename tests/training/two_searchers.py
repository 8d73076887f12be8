"""One of two processes that work out demonstrations: python -m tests.training.two_searchers.

Prints one JSON line: what this process asked, what was found for which question, and what it heard where a search failed on
the second process, and where one could not be made on the first.
"""

from __future__ import annotations

import json
from typing import Any

import jax

from routerl_jax.core.types import Passage
from routerl_jax.parallel import multihost
from routerl_jax.training.annotated import worked_examples
from tests.training.test_annotated import BRIDGE, Names


class TroubleOnTheSecond(Names):
    """The second process does not find one of the names."""

    def _find(self, query: str) -> list[Passage]:
        if jax.process_index() == 1 and "Fallon" in query:
            raise ConnectionError("the index is down")
        return super()._find(query)


class BrokenOnTheFirst(Names):
    @property
    def cost(self) -> Any:
        return "much" if jax.process_index() == 0 else 1.0


def heard(tool: Names, questions: int) -> str:
    try:
        worked_examples([BRIDGE] * questions, {"text": tool}, k=1, max_searches=2, seed=0)
    except (RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    multihost.initialize()
    tool = Names()
    worked = worked_examples([BRIDGE] * 4, {"text": tool}, k=1, max_searches=2, seed=0)
    found = [[[step.query, [p.id for p in step.passages]] for step in one.steps] for one in worked]
    failed, broken = heard(TroubleOnTheSecond(), 4), heard(BrokenOnTheFirst(), 1)
    print(json.dumps({"asked": tool.asked, "found": found, "failed": failed, "broken": broken}))


if __name__ == "__main__":
    main()
