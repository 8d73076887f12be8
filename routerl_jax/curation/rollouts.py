"""A policy's attempts at many questions, portion by portion on disk, so that a killed job goes on where it was."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh

from routerl_jax.agents.agent import Agent
from routerl_jax.agents.driver import run
from routerl_jax.core.files import write_json_lines
from routerl_jax.core.types import Episode, Example
from routerl_jax.evaluation.records import read_records
from routerl_jax.generation.sampling import Sampling
from routerl_jax.models.decoder import Decoder
from routerl_jax.parallel import multihost
from routerl_jax.rewards.metrics import ANSWER_METRICS
from routerl_jax.rewards.ranges import accepted_answers
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.run import step_seed
from routerl_jax.training.setup import build_mesh, make_engine, open_knowledge

_TELLING = 8  # searches: if so many fail, and none does not, it is not for what they ask

# (questions, attempts for each, round) -> episodes, question by question, in the order of the attempts
Attempt = Callable[[Sequence[Example], int, int], Sequence[Episode]]


def policy_attempts(
    config: TrainConfig, load: Callable[[Mesh], Decoder], agent: Callable[[int], Agent], workdir: pathlib.Path
) -> Attempt:
    """Attempts with a run's sampling and knowledge bases. Nothing is loaded before the first one: where all are on disk
    already, no policy is needed.

    Args:
      load: gives the policy.
      agent: who works in a round.
      workdir: where the snapshot of the web lies, if there is one (config.snapshot).
    """

    @functools.cache
    def parts():
        return make_engine(config, load(build_mesh(config.mesh))), open_knowledge(config, workdir)

    def attempt(examples: Sequence[Example], samples: int, number: int) -> list[Episode]:
        engine, tools = parts()
        rollout = config.rollout
        return run(
            agent(number),
            examples,
            engine,
            tools,
            samples=samples,
            seed=step_seed(config.seed, number),
            sampling=Sampling(temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k),
            deterministic=rollout.deterministic,
            tool_timeout=rollout.tool_timeout,
            progress="attempts",
        )

    return attempt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
    """Rounds of attempts. A question's record in a round has a list over its attempts under each of

    - `predictions`: the answers,
    - `correct`: whether `metric` is 1 for them, under `normalizer`,
    - `searched`: the tools whose searches came back, in order,

    and `failed_searches`, of all of them.

    Attributes:
      directory: holds a folder per round, with a file per portion.
      portion: questions of a file.
    """

    examples: Mapping[str, Example]
    attempt: Attempt
    directory: pathlib.Path
    portion: int
    metric: str
    normalizer: str

    def portions(self, names: Sequence[str]) -> int:
        """How many there are of these questions."""
        return -(-len(names) // self.portion)

    def made(self, number: int, names: Sequence[str], samples: int) -> Iterator[list[dict[str, Any]]]:
        """The records of a round's portions, in order; those that are on disk are not attempted again. Every process of a job
        must go through all.

        Raises:
          ValueError: a portion on disk is of other questions, or damaged; or all searches of a portion failed, which is not
            kept.
        """
        for index in range(self.portions(names)):
            own = names[index * self.portion : (index + 1) * self.portion]
            path = self.directory / f"round-{number:02d}" / f"portion-{index:05d}.jsonl"
            there = multihost.exchange(path.is_file())[0]  # for the main process: another may look when it is made
            if not there:
                self._attempt(path, [self.examples[name] for name in own], samples, number)
            yield _read(path, own, samples)

    def _attempt(self, path: pathlib.Path, examples: Sequence[Example], samples: int, number: int) -> None:
        """Makes a portion's attempts and writes what became of them."""
        metric = ANSWER_METRICS[self.metric]
        episodes = self.attempt(examples, samples, number)
        if len(episodes) != len(examples) * samples:
            raise ValueError(f"{len(episodes)} episodes for {samples} attempts at each of {len(examples)} questions")
        _check_searches(episodes)
        records = []
        for i, example in enumerate(examples):
            own = episodes[i * samples : (i + 1) * samples]
            predictions = [episode.answer for episode in own]
            right = [metric(text, accepted_answers(example, text), self.normalizer) >= 1.0 for text in predictions]
            records.append(
                {
                    "id": example.id,
                    "predictions": predictions,
                    "correct": right,
                    "searched": [[call.tool for call in episode.calls if call.error is None] for episode in own],
                    "failed_searches": sum(call.error is not None for episode in own for call in episode.calls),
                }
            )
        if multihost.is_main():
            write_json_lines(path, records)
        multihost.barrier(f"{path.parent.name}/{path.name}")


def _check_searches(episodes: Sequence[Episode]) -> None:
    """A knowledge base that is down would make every question a hard one; a few searches may all fail for their own sake."""
    errors = [call.error for episode in episodes for call in episode.calls]
    if len(errors) >= _TELLING and None not in errors:
        raise ValueError(
            f"all {len(errors)} searches of these attempts failed, the first with: {errors[0]}. They would count against the "
            "questions, so they are not kept; mend the knowledge base and go on with the job"
        )


def _read(path: pathlib.Path, names: Sequence[str], samples: int) -> list[dict[str, Any]]:
    records = list(read_records(path))
    same = [record.get("id") for record in records] == list(names)
    if not same or any(len(record["correct"]) != samples for record in records):
        raise ValueError(
            f"{path} holds attempts at other questions, or another number of them: the data or the settings have changed. Use "
            f"another --workdir"
        )
    return records
