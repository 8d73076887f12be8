"""Steps whose batch is taken before all groups are complete (config.rollout.partial), where lengths have a long tail.

    python -m benchmarks.partial [--partial=0,2,4,8] [--steps=12] [--examples=8] [--samples=4] [--json=FILE]

The shipped policy of the quickstart, without its end token, writes one turn per attempt. Its length is drawn from a log-normal
distribution (median 24 tokens, sigma 1, at most 400), by question and attempt alone: all settings have the same questions and
the same lengths. Rollouts and updates are those of a training run. The row `partial=0` is the loop that waits for all.

Per setting, over all steps but the last, which waits for all groups everywhere: decode calls of up to 16 steps, which depend on
no clock; the share of a decode call's rows that sampled; seconds of the rollouts (median); how old tokens are.
"""

from __future__ import annotations

from routerl_jax.parallel.platform import skip_absent_tpu, tune_process

if __name__ == "__main__":
    tune_process()
    skip_absent_tpu()

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

from routerl_jax.agents.agent import LLM, Agent, Tools
from routerl_jax.core.types import Episode, Example
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.parallel.mesh import make_mesh
from routerl_jax.training import config as schema
from routerl_jax.training.clock import Clock
from routerl_jax.training.partial import PartialRollouts
from routerl_jax.training.run import Run
from routerl_jax.training.setup import build_recipe, make_engine
from routerl_jax.training.stages import Stages
from routerl_jax.training.step import train_step

MEDIAN, SIGMA, LONGEST = 24, 1.0, 400


class Writer(Agent):
    """Writes one turn of a drawn length."""

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        rng = random.Random(zlib.crc32(f"{example.id}/{llm.sample}".encode()))
        chat = llm.conversation(f"Question: {example.question}")
        await chat.generate(max_tokens=min(int(rng.lognormvariate(0, SIGMA) * MEDIAN) + 1, LONGEST))
        return chat.episode(answer=None)


def tokens(episode: Episode) -> float:
    """A reward term that tells attempts apart."""
    return float(sum(turn.tokens for turn in episode.turns)) / LONGEST


def measured(partial: int, steps: int, examples: int, samples: int, directory: pathlib.Path) -> dict[str, Any]:
    """Trains for some steps, and returns what they took."""
    questions = directory / "questions.jsonl"
    rows = [{"id": str(i), "question": "Where?", "golden_answers": ["!"]} for i in range(steps * examples)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    learner = schema.LearnerConfig(importance_cap=2.0, optimizer=OptimizerConfig(lr=1e-5))
    config = schema.TrainConfig(
        steps=steps,
        model=schema.ModelConfig(path="atlas-warm-start"),
        engine=schema.EngineConfig(rows=(examples + partial) * samples, max_length=512),
        knowledge={"none": schema.KnowledgeConfig()},
        data=schema.DataConfig(train=str(questions)),
        rollout=schema.RolloutConfig(examples=examples, samples=samples, partial=partial),
        stages={"main": schema.StageConfig(reward={"benchmarks.partial:tokens": 1.0})},
        learner=learner,
        log_episodes=0,
    )
    mesh = make_mesh(devices=jax.devices()[:1])
    model: Any = load_pretrained("atlas-warm-start", mesh, "float32")
    model.config = dataclasses.replace(model.config, eos_ids=())
    model.tokenizer.eos_ids = frozenset()
    stages, engine = Stages(config, build_recipe(config)), make_engine(config, model)
    run = Run(config, directory / f"run{partial}", model, mesh, learner.loss, steps, False)
    engine.update(run.served_params(), 0)
    under_way = PartialRollouts(stages, Writer(), engine, {}, steps)
    calls, advance = [0] * steps, engine.step
    found: list[dict[str, Any]] = []

    def counted() -> Any:
        calls[len(found)] += 1
        return advance()

    engine.step = counted
    for step in range(steps):
        stage = stages.at(step)
        with (clock := Clock())("step"):
            asked = under_way.draw(stage, step, whole=False)
            metrics = train_step(stage, Writer(), run, engine, {}, asked, step, clock, under_way)
        found.append(metrics | clock.seconds)
    run.finish(export=False)
    found = found[:-1]

    def mean(name: str) -> float:
        return statistics.fmean(row[name] for row in found)

    return {
        "partial": partial,
        "calls": statistics.fmean(calls[:-1]),
        "occupancy": mean("perf/decode_occupancy"),
        "seconds": statistics.median(row["rollout"] for row in found),
        "several": mean("rollout/partial/episodes"),
        "staleness": mean("rollout/staleness/mean"),
        "oldest": max(row["rollout/staleness/max"] for row in found),
        "carried": mean("timing_s/carried"),
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
        "| partial | decode calls a step | rows that sample | rollout, s | episodes of several weights | staleness | oldest |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for partial in map(int, arguments.partial.split(",")):
        with tempfile.TemporaryDirectory() as directory:
            sizes = (arguments.steps, arguments.examples, arguments.samples)
            rows.append(row := measured(partial, *sizes, pathlib.Path(directory)))
        print(
            f"| {partial} | {row['calls']:.1f} | {row['occupancy']:.0%} | {row['seconds']:.2f} | {row['several']:.0%} | "
            f"{row['staleness']:.2f} | {row['oldest']} |",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
