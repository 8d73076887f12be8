"""Effects of int8 weights and an int8 cache on the engine: the gap to the learner, bytes, and seconds on this machine.

    python -m benchmarks.engine_int8 [--model=atlas-warm-start] [--dtype=float32] [--questions=16] [--samples=4] [--json=FILE]
    python -m benchmarks.engine_int8 --model=SmolLM2-135M-Instruct [--rows=8] [--tokens=32]    # random weights of this shape

The shipped policy of the quickstart answers Atlas's questions with its searches, at temperature 1. Any other model has random
weights and writes one turn after random tokens: its sizes count, its gap is that of random weights. The learner scores what was
sampled with the same float weights.

Columns: |sampler - learner| of the sampled tokens' log-probabilities (nats); KL(sampler || learner), their mean difference; the
share of tokens whose importance is cut off at 2 (`learner.importance_cap`), and the mean importance; MB of the engine's weights
and of its cache, as allocated; MB that the decoding program needs beside both (by the compiler); sampled tokens per second of
the second of two equal rollouts, searches included.
"""

from __future__ import annotations

from routerl_jax.parallel.platform import tune_process

if __name__ == "__main__":
    tune_process()

import argparse
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import routerl_jax as rj
from benchmarks import peers
from configs.common import ATLAS_KNOWLEDGE
from routerl_jax.core.types import Sequence
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.sampling import Sampling
from routerl_jax.extras.compile_check.run_programs import lower_programs
from routerl_jax.learning.advantages import truncated_importance
from routerl_jax.learning.batch import BatchLayout
from routerl_jax.learning.learner import Learner
from routerl_jax.learning.losses import LossConfig
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.models.published import architecture_of
from routerl_jax.parallel.mesh import make_mesh
from routerl_jax.parallel.sharding import create_sharded
from routerl_jax.recipes.r1_router.grammar import R1RouterGrammar
from routerl_jax.training.health import gap_metrics
from routerl_jax.training.knowledge import open_knowledge_bases
from routerl_jax.training.setup import open_examples

KINDS = (("", ""), ("int8", ""), ("", "int8"), ("int8", "int8"))
CAP = 2.0
WARM_START = "atlas-warm-start"
Rollout = Callable[[Engine], list[Sequence]]


def answering(questions: int, samples: int) -> Rollout:
    """Rollouts of the quickstart's agent on Atlas's validation questions."""
    tools = open_knowledge_bases(ATLAS_KNOWLEDGE, progress=False)
    agent = rj.SearchAgent(grammar=R1RouterGrammar(tools=tuple(tools)), max_searches=2, k=2)
    source = open_examples("atlas/validation", (), "validation")
    examples = [source[i] for i in range(questions)]

    def rollout(engine: Engine) -> list[Sequence]:
        episodes = rj.run(agent, examples, engine, tools, samples, sampling=Sampling())
        return [sequence for episode in episodes for sequence in episode.sequences]

    return rollout


def writing(rows: int, tokens: int, vocabulary: int) -> Rollout:
    """One turn after 32 random tokens, in every row."""
    prompts = np.random.default_rng(0).integers(0, vocabulary, (rows, 32)).tolist()

    def rollout(engine: Engine) -> list[Sequence]:
        streams = [engine.open(prompt, str(i)) for i, prompt in enumerate(prompts)]
        for stream in streams:
            engine.request(stream, max_tokens=tokens, sampling=Sampling())
        while engine.busy:
            engine.step()
        for stream in streams:
            engine.close(stream)
        return [stream.ledger.sequence() for stream in streams]

    return rollout


def random_policy(name: str, dtype: str) -> Decoder:
    config = dataclasses.replace(architecture_of(name), eos_ids=())
    model = create_sharded(
        lambda: Decoder(config, jax.random.key(0), param_dtype=jnp.dtype(dtype)), make_mesh(), "replicated"
    )
    model.tokenizer = peers.tokenizer()
    model.tokenizer.eos_ids = frozenset()
    return model


def megabytes(tree: Any) -> float:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) / 1e6


def measured(model: Decoder, rows: int, length: int, weights: Any, cache: Any, rollout: Rollout) -> dict[str, Any]:
    """One row of the table."""
    types: dict[str, Any] = {"weight_qtype": weights, "cache_qtype": cache}
    engine = Engine(model, rows=rows, max_length=length, layout="replicated", **types)
    rollout(engine)
    started = time.perf_counter()
    sequences = rollout(engine)
    seconds = time.perf_counter() - started
    masks = [sequence.loss_mask for sequence in sequences]
    layout = BatchLayout(engine.mesh, (length,), 4 * length)
    learner = Learner(model, OptimizerConfig().build(1), LossConfig(), layout)
    learnt = learner.logprobs(sequences)
    ours = [values[mask] for values, mask in zip(learnt, masks)]
    theirs = [sequence.logprobs[mask] for sequence, mask in zip(sequences, masks)]
    importance = np.concatenate(truncated_importance(ours, theirs, CAP))
    program = lower_programs(
        model, engine.mesh, rows=rows, max_length=length, segment=engine.segment, layout="replicated", **types
    )["decode"].compile()
    memory = program.memory_analysis()
    return {
        "weights": weights,
        "cache": cache,
        **{name.removeprefix("sampler_gap/"): value for name, value in gap_metrics(theirs, ours).items()},
        "kl": float((np.concatenate(theirs) - np.concatenate(ours)).mean()),
        "capped": float((importance >= CAP).mean()),
        "importance": float(importance.mean()),
        "tokens": len(importance),
        "weights_mb": megabytes(engine._calls.params),
        "cache_mb": megabytes(engine._calls.cache),
        "beside_mb": None if memory is None else memory.temp_size_in_bytes / 1e6,
        "tokens_per_s": len(importance) / seconds,
    }


def line(row: dict[str, Any]) -> str:
    beside = "-" if row["beside_mb"] is None else f"{row['beside_mb']:.1f}"
    return (
        f"| {row['weights'] or '-'} | {row['cache'] or '-'} | {row['mean']:.2g} | {row['p99']:.2g} | {row['max']:.2g} | "
        f"{row['kl']:.2g} | {row['capped']:.2%} | {row['importance']:.3f} | {row['weights_mb']:.2f} | {row['cache_mb']:.2f} | "
        f"{beside} | {row['tokens_per_s']:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=WARM_START)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8, help="of random weights")
    parser.add_argument("--tokens", type=int, default=32, help="of a turn of random weights")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.model == WARM_START:
        model: Any = load_pretrained(WARM_START, make_mesh(), arguments.dtype)
        rows, length = arguments.questions * arguments.samples, 512
        rollout = answering(arguments.questions, arguments.samples)
    else:
        model, rows = random_policy(arguments.model, arguments.dtype), arguments.rows
        length = 32 + arguments.tokens
        rollout = writing(rows, arguments.tokens, peers.VOCABULARY)
    print(
        "| weights | cache | mean gap | p99 | max | KL | capped | importance | weights MB | cache MB | beside MB | tokens/s |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    results = []
    for weights, cache in KINDS:
        results.append(measured(model, rows, length, weights, cache, rollout))
        print(line(results[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
