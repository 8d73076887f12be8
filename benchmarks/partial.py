"""Rollouts of steps whose batch is taken before all groups are complete (config.rollout.partial), under a long tail of lengths.

    python -m benchmarks.partial [--partial=0,2,4,8] [--steps=12] [--examples=8] [--samples=4] [--json=FILE]

The shipped policy of the quickstart, without its end token, writes one turn per attempt. Its length is drawn from a log-normal
distribution (median 24 tokens, sigma 1, at most 400), by question and attempt alone: all settings have the same questions and
the same lengths. Rollouts are those of a training run; between two steps the engine gets weights, but nothing is learnt, so no
update is timed. The row `partial=0` is the loop that waits for all.

The table has for each setting, over all steps: the engine's steps (of up to 16 tokens a row) in a step of the run, which depend
on no clock; the share of their rows that sampled; tokens prefilled or copied in a step; seconds of a step's rollouts (median);
the share of episodes with tokens of several versions; and the age of tokens.
"""

from __future__ import annotations

from routerl_jax.parallel.platform import tune_process

if __name__ == "__main__":
    tune_process()

import argparse
import dataclasses
import json
import pathlib
import random
import statistics
import tempfile
import zlib
from typing import Any

import jax
from flax import nnx

from routerl_jax.agents.agent import LLM, Agent, Tools
from routerl_jax.core.types import Episode, Example
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.parallel.mesh import make_mesh
from routerl_jax.training import config as schema
from routerl_jax.training.asynchronous import PartialRollouts
from routerl_jax.training.health import staleness_metrics
from routerl_jax.training.rollouts import Rollouts
from routerl_jax.training.setup import build_recipe, make_engine
from routerl_jax.training.stages import Stages

MEDIAN, SIGMA, LONGEST = 24, 1.0, 400


class Writer(Agent):
    """Writes one turn of a drawn length."""

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        rng = random.Random(zlib.crc32(f"{example.id}/{llm.sample}".encode()))
        chat = llm.conversation(f"Question: {example.question}")
        await chat.generate(max_tokens=min(int(rng.lognormvariate(0, SIGMA) * MEDIAN) + 1, LONGEST))
        return chat.episode(answer=None)


def measured(partial: int, steps: int, examples: int, samples: int, directory: pathlib.Path) -> dict[str, Any]:
    """Generates the rollouts of some steps, and returns their measurements."""
    questions = directory / "questions.jsonl"
    rows = [{"id": str(i), "question": "Where?", "golden_answers": ["!"]} for i in range(steps * examples)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = schema.TrainConfig(
        steps=steps,
        model=schema.ModelConfig(path="atlas-warm-start"),
        engine=schema.EngineConfig(rows=(examples + partial) * samples, max_length=512),
        knowledge={"none": schema.KnowledgeConfig()},
        data=schema.DataConfig(train=str(questions)),
        rollout=schema.RolloutConfig(examples=examples, samples=samples, partial=partial),
        log_episodes=0,
    )
    model: Any = load_pretrained("atlas-warm-start", make_mesh(devices=jax.devices()[:1]), "float32")
    model.config = dataclasses.replace(model.config, eos_ids=())
    model.tokenizer.eos_ids = frozenset()
    stages, engine = Stages(config, build_recipe(config)), make_engine(config, model)
    under_way = PartialRollouts(stages, Writer(), engine, {})
    calls, advance = 0, engine.step

    def counted() -> Any:
        nonlocal calls
        calls += 1
        return advance()

    engine.step = counted
    rollouts_by_step: list[Rollouts] = []
    for step in range(steps):
        rollouts_by_step.append(under_way.roll_out(step))
        engine.update(nnx.state(model, nnx.Param), step + 1)
    ages = [staleness_metrics(rollouts.episodes, rollouts.step) for rollouts in rollouts_by_step]

    def total(name: str) -> int:
        return sum(getattr(rollouts.engine, name) for rollouts in rollouts_by_step)

    return {
        "partial": partial,
        "calls": calls / steps,
        "occupancy": total("decoded_tokens") / total("decode_slots"),
        "decoded": total("decoded_tokens") / steps,
        "prefilled": (total("prefilled_tokens") + total("forked_tokens")) / steps,
        "seconds": statistics.median(rollouts.seconds["rollout"] for rollouts in rollouts_by_step),
        "several": statistics.fmean(rollouts.partial["rollout/partial/episodes"] for rollouts in rollouts_by_step),
        "staleness": statistics.fmean(age["rollout/staleness/mean"] for age in ages),
        "oldest": max(age["rollout/staleness/max"] for age in ages),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partial", default="0,2,4,8")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--examples", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    rows = []
    print(
        "| partial | engine steps | rows that sample | prefilled | rollout, s | several versions | staleness | oldest |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for partial in map(int, arguments.partial.split(",")):
        with tempfile.TemporaryDirectory() as directory:
            sizes = (arguments.steps, arguments.examples, arguments.samples)
            rows.append(row := measured(partial, *sizes, pathlib.Path(directory)))
        print(
            f"| {partial} | {row['calls']:.1f} | {row['occupancy']:.0%} | {row['prefilled']:.0f} | {row['seconds']:.2f} | "
            f"{row['several']:.0%} | {row['staleness']:.2f} | {row['oldest']} |",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
