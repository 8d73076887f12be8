"""A selection job with a scripted policy, also as a program that tests kill:

    python -m tests.extras.curation.selection_job WORKDIR [--kill ROUND/PORTION]

It is killed (-9) while that portion is written. `WORKDIR/calls.txt` gets a line for every portion that is attempted.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
from collections.abc import Mapping, Sequence

from routerl_jax.agents.agent import SearchTool
from routerl_jax.agents.driver import run
from routerl_jax.core.types import Episode, Example
from routerl_jax.extras.curation.selection import SelectionConfig, SelectionReport, select
from tests.agents.scripted import AGENT, SEARCH, ScriptedEngine, knowledge

# Question qN is answered at attempt N, q0 never.
QUESTIONS = [Example(id=f"q{n}", question=f"Question {n}?", answers=("Accra",)) for n in (1, 3, 5, 6, 7, 9, 0, 4, 8)]
QUESTIONS = [
    Example(id=e.id, question=e.question, answers=e.answers, metadata={"dataset": "ab"[i % 2]})
    for i, e in enumerate(QUESTIONS)
]
CONFIG = SelectionConfig(
    easy_below=4,
    hard_above=7,
    per_round=3,
    portion=4,
    stage1={"a/medium": 1, "b/medium": 5},
    stage2={"medium": None, "hard": None},
)


def job(
    workdir: pathlib.Path,
    questions: Sequence[Example] = QUESTIONS,
    config: SelectionConfig = CONFIG,
    tools: Mapping[str, SearchTool] | None = None,
) -> SelectionReport:
    """Runs the job to its end. With `tools` every attempt searches in "text" once before it answers."""

    def attempt(examples: Sequence[Example], samples: int, number: int) -> list[Episode]:
        workdir.mkdir(parents=True, exist_ok=True)
        with (workdir / "calls.txt").open("a") as file:
            file.write(f"round {number}: {' '.join(example.id for example in examples)}\n")

        def script(name: str, sample: int, turn: int) -> str:
            if tools and turn == 0:
                return SEARCH.format("text")
            right = number * config.per_round + sample + 1 == int(name[1:])
            return f"<think>so</think><answer>{'Accra' if right else 'Lima'}</answer>"

        return run(AGENT, examples, ScriptedEngine(script), tools or knowledge(), samples=samples)  # type: ignore[arg-type]

    return select(questions, attempt, config, workdir, progress=False)


def die_writing(portion: str) -> None:
    """`kill -9` of this process while ROUND/PORTION is written; "": never."""
    replace = pathlib.Path.replace

    def deadly(self: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
        if portion and f"{target.parent.name}/{target.stem}" == portion:
            os.kill(os.getpid(), signal.SIGKILL)
        return replace(self, target)

    pathlib.Path.replace = deadly  # type: ignore[method-assign,assignment]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workdir", type=pathlib.Path)
    parser.add_argument("--kill", default="")
    arguments = parser.parse_args()
    die_writing(arguments.kill)
    job(arguments.workdir)


if __name__ == "__main__":
    main()
