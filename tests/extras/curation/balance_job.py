"""A job that balances questions with a scripted policy, also as a program that tests kill:

    python -m tests.extras.curation.balance_job WORKDIR [--kill ROUND/PORTION]

or one of two processes of a job, of which the second is always late.

`WORKDIR/calls.txt` gets a line for every portion that is attempted.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.core.types import Call, Episode, Example, Turn
from routerl_jax.extras.curation import selection
from routerl_jax.extras.curation.balance import BalanceConfig, BalanceReport, balance, probing
from routerl_jax.parallel import multihost
from routerl_jax.recipes.mmsearch_r1.agents import MMSearchAgent
from routerl_jax.recipes.mmsearch_r1.protocol import Kind
from tests import seeing
from tests.extras.curation.selection_job import die_writing

AGENT = MMSearchAgent(image_tool="image", text_tool="text", k=1, image_k=1, max_turn_tokens=200, answer_tokens=40)
PICTURE = seeing.picture(0)
# By question the turns of its eight attempts, and what it takes, counted by hand.
ATTEMPTS: Mapping[str, tuple[str, str]] = {
    "never": ("- - i- i- t- it- it- it-", "unsolved"),
    "free": ("it+ it+ i+ t+ it+ it+ - +", "search_free"),
    "image": ("- it+ it+ it+ it+ i+ i- -", "image"),
    "text": ("- t+ it+ it+ t- i- i- -", "text"),
    "mixed": ("- i- t- it- it- it+ it+ it-", "mixed"),
    "either, more in words": ("t+ t+ i+ i- - - it+ it+", "text"),
    "either, as many": ("t+ i+ i- t- - - it+ it+", "image"),
    "by the last": ("- - - - - - - i+", "image"),
}
QUESTIONS = [
    Example(
        id=name,
        question="What is its capital?",
        answers=("Accra",),
        images=(PICTURE,),
        metadata={"dataset": "abc"[i % 2]},
    )
    for i, name in enumerate(ATTEMPTS)
]
CONFIG = BalanceConfig(policy="scripted", portion=3, amounts="search_free:1,a/image:1,search_required:3")


def played(example: Example, sample: int, moves: str, agent: MMSearchAgent, error: str | None) -> Episode:
    """An attempt that searches by the picture (i), in words (t), and answers rightly (+) or not (-). What the agent may not do
    ends it, with a wrong answer."""
    kinds: list[Kind] = ["image" if move == "i" else "text" for move in moves[:-1]]
    made = [kind for place, kind in enumerate(kinds) if agent.limits.allows(kind, kinds[:place])]
    calls = [Call(tool=kind, query="", error=error) for kind in made]
    turn = Turn(text=moves, stop_reason="stop", tokens=1, calls=calls)
    answer = "Accra" if made == kinds and moves.endswith("+") else "Lagos"
    return Episode(example=example, sample=sample, answer=answer, turns=[turn], sequences=[])


def job(
    workdir: pathlib.Path,
    config: BalanceConfig = CONFIG,
    questions: Sequence[Example] = QUESTIONS,
    attempts: Mapping[str, tuple[str, str]] = ATTEMPTS,
    error: str | None = None,
    **options: Any,
) -> BalanceReport:
    """Runs the job to its end. In a forced probe a question's attempts of round n are the n-th two of the eight.

    Args:
      error: of every search.
    """
    forced = config.probe == "forced"

    def attempt(examples: Sequence[Example], samples: int, number: int) -> list[Episode]:
        workdir.mkdir(parents=True, exist_ok=True)
        with (workdir / "calls.txt").open("a") as file:
            file.write(f"round {number}: {', '.join(example.id for example in examples)}\n")

        agent = probing(AGENT, number) if forced else AGENT
        return [
            played(example, sample, attempts[example.id][0].split()[number * samples + sample], agent, error)
            for example in examples
            for sample in range(samples)
        ]

    return balance(config, questions, attempt, "image", workdir, progress=False, **options)


def forced(config: BalanceConfig = CONFIG) -> BalanceConfig:
    """The same questions with two attempts in each round of a forced probe."""
    return dataclasses.replace(config, probe="forced", attempts=2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workdir", type=pathlib.Path)
    parser.add_argument("--kill", default="")
    arguments = parser.parse_args()
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        multihost.initialize()
        if not multihost.is_main():
            _be_late()
    die_writing(arguments.kill)
    job(arguments.workdir)


def _be_late() -> None:
    """This process comes to every portion when others may have written it."""
    read = selection._read

    def late(*arguments: Any) -> list[dict[str, Any]]:
        found = read(*arguments)
        time.sleep(0.5)
        return found

    selection._read = late


if __name__ == "__main__":
    main()
