"""Our side of `benchmarks.agentic`: driver and engine on scripted agents, the learner on finished ones, and the limits."""

from __future__ import annotations

from routerl_jax.parallel.platform import tune_process

if __name__ == "__main__":
    tune_process()

import argparse
import dataclasses
import pathlib
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import peers
from benchmarks.accelerator_limits import memory_rate, timed
from benchmarks.accelerator_ours import Timed
from benchmarks.agentic_work import Trajectory, asked_work, episodes, must_prefill
from benchmarks.agentic_worker import Prepared, serve
from benchmarks.roofline import machine
from routerl_jax.agents.agent import LLM, Agent, Tools
from routerl_jax.agents.driver import run as drive
from routerl_jax.core.ledger import Ledger
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Episode, Example, Passage
from routerl_jax.engine.engine import Engine
from routerl_jax.learning.batch import BatchLayout
from routerl_jax.learning.learner import Learner
from routerl_jax.learning.losses import LossConfig, token_weights
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.models.config import DecoderConfig
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.huggingface import load_pretrained, save_pretrained
from routerl_jax.models.published import architecture_of
from routerl_jax.models.work import Work
from routerl_jax.parallel.mesh import make_mesh
from routerl_jax.parallel.platform import split_cpu

SIZES = ("0.9M", "8M", "135M")
CONTEXT = 8192
DEVICES = {"0.9M": 2, "8M": 2, "135M": 1}  # into which a CPU is split; docs/architecture.md says why
Span = tuple[float, float]  # begin and end, in seconds


def config_of(size: str) -> DecoderConfig:
    """A size's shape; weights are random."""
    if size == "135M":
        return dataclasses.replace(architecture_of("SmolLM2-135M-Instruct"), eos_ids=(), bos_id=None)
    shape = peers.SIZES[size]
    return DecoderConfig(
        model_type="llama", vocab_size=peers.VOCABULARY, max_length=CONTEXT, tied_embeddings=True, **shape
    )


def write_weights(size: str, directory: str | pathlib.Path) -> None:
    """Random weights that every side loads."""
    save_pretrained(Decoder(config_of(size), jax.random.key(0)), directory, peers.tokenizer())


def _policy(directory: str) -> Decoder:
    model = load_pretrained(directory, make_mesh(), "float32")
    assert isinstance(model, Decoder)
    assert model.tokenizer is not None
    model.config = dataclasses.replace(model.config, eos_ids=())  # turns are as long as they are asked for
    model.tokenizer.eos_ids = frozenset()
    return model


# --- rollouts --------------------------------------------------------------------------------------------------------------


class Scripted(Agent):
    """Writes turns of the recorded lengths, and searches between them."""

    def __init__(self, work: Sequence[Trajectory], tokenizer: Tokenizer) -> None:
        self._words = single_words(tokenizer)
        self._attempts: dict[tuple[str, int], Trajectory] = {}
        groups: dict[int, int] = {}
        for trajectory in work:
            sample = groups[trajectory.group] = groups.get(trajectory.group, -1) + 1
            self._attempts[str(trajectory.group), sample] = trajectory
        self.samples = 1 + max(groups.values())
        self.examples = [Example(id=str(group), question="", answers=()) for group in groups]

    def seconds(self, query: str) -> float:
        """How long the tool takes for a query."""
        group, sample, number = query.split()
        return self._attempts[group, int(sample)].steps[int(number)].seconds

    def text(self, tokens: int, seed: str) -> str:
        """Words that are so many tokens."""
        return "".join(random.Random(seed).choices(self._words, k=tokens))

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        attempt = self._attempts[example.id, llm.sample]
        chat = llm.conversation(self.text(attempt.prompt, example.id))
        for number, step in enumerate(attempt.steps):
            await chat.generate(max_tokens=step.sampled)
            if step.observed:
                query = f"{example.id} {llm.sample} {number}"
                await tools["search"].search(query, k=5)
                chat.observe(self.text(step.observed, query))
        return chat.episode(answer="")


def single_words(tokenizer: Tokenizer) -> list[str]:
    """Words with a space before them that are one token each, wherever they stand."""
    texts = [tokenizer.decode([i]) for i in range(len(tokenizer.token_bytes))]
    return [text for text in texts if text[:1] == " " and text[1:].isalpha() and len(tokenizer.encode(text)) == 1]


class Sleeping:
    """A tool that takes the recorded time: queries of a batch wait for the slowest, as at a server that answers a batch."""

    def __init__(self, agent: Scripted) -> None:
        self._agent = agent
        self.spans: list[Span] = []

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        started = time.perf_counter()
        time.sleep(max(map(self._agent.seconds, queries)))
        self.spans.append((started, time.perf_counter()))
        return [[] for _ in queries]


class Rollout:
    """The rollout of some work. `deterministic` is config.rollout's; the others go to the engine."""

    def __init__(
        self,
        model: Decoder,
        work: Sequence[Trajectory],
        *,
        deterministic: bool = False,
        rows: int = 0,
        **engine: Any,
    ) -> None:
        assert model.tokenizer is not None
        self.work, self._deterministic = work, deterministic
        self.engine = Engine(model, rows=rows or len(work), max_length=max(map(len, work)) + 1, **engine)
        self.agent = Scripted(work, model.tokenizer)
        self.tool = Sleeping(self.agent)

    def run(self) -> dict[str, Any]:
        """One rollout; the engine's counts."""
        engine, before = self.engine, self.engine.compilations
        engine.stats = type(engine.stats)()
        episodes = drive(
            *(self.agent, self.agent.examples, engine, {"search": self.tool}, self.agent.samples),
            deterministic=self._deterministic,
        )
        for episode, attempt in zip(episodes, self.work, strict=True):
            [sequence] = episode.sequences
            assert (len(sequence), int(sequence.loss_mask.sum())) == (len(attempt), attempt.sampled)
        return {
            **dataclasses.asdict(engine.stats),
            "must_prefill": must_prefill(self.work),
            "sampled": sum(trajectory.sampled for trajectory in self.work),
            "attempts": len(self.work),
            "compilations": engine.compilations - before,
        }


class Accounts:
    """Divides the time of a rollout among its parts. Each program is waited for, so the rollout is not compared with others.

    The machine's limits are measured before and after it; the medians count, as other work on the host may disturb a moment.
    """

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._clock = Timed(rollout.engine, apart=True)
        self._decoded: list[tuple[float, float]] = []  # bytes and FLOPs that each step of decoding needs
        self._extended = 0.0  # FLOPs that prefills need
        self._steps: list[Span] = []
        self._config = rollout.engine.config
        self._watch(rollout.engine)

    def _watch(self, engine: Engine) -> None:
        calls, step = engine._calls, engine.step
        decode, extend = calls.decode, calls.extend

        def timed_step() -> Any:
            started = time.perf_counter()
            finished = step()
            self._steps.append((started, time.perf_counter()))
            return finished

        def counted_decode(streams: Any, *inputs: Any, **options: Any) -> Any:
            starts = [stream.cached for stream in streams]
            layout, outputs = decode(streams, *inputs, **options)
            counts = {id(stream): int(outputs.counts[slot]) for slot, stream in layout}
            self._decoded += self._needed(starts, [counts[id(stream)] for stream in streams])
            return layout, outputs

        def counted_extend(streams: Any) -> int:
            work = Work(config=self._config, bytes_per_entry=4)
            for stream in streams:
                length = len(stream.ledger) - 1
                self._extended += work.prefill_flops(1, length - stream.cached, length)
            return extend(streams)

        engine.step, calls.decode, calls.extend = timed_step, counted_decode, counted_extend  # type: ignore[method-assign]

    def _needed(self, starts: list[int], counts: list[int]) -> list[tuple[float, float]]:
        """Bytes and FLOPs of every step of a call, of the rows that are still alive in it."""
        work, needed = Work(config=self._config, bytes_per_entry=4), []
        for step in range(max(counts)):
            alive = [start + step + 1 for start, count in zip(starts, counts) if count > step]
            tokens = sum(alive) // len(alive)
            needed.append((work.decode_bytes(len(alive), tokens), work.decode_flops(len(alive), tokens)))
        return needed

    def run(self) -> dict[str, Any]:
        """One rollout; seconds by its parts. They add up to `seconds`."""
        rollout = self._rollout
        self._clock.reset()
        self._steps.clear()
        rollout.tool.spans.clear()
        self._decoded.clear()
        self._extended = 0.0
        measured = [limits(self._config, rollout.engine.rows) for _ in range(3)]
        started = time.perf_counter()
        counted = rollout.run()
        seconds = time.perf_counter() - started
        most = medians([*measured, *(limits(self._config, rollout.engine.rows) for _ in range(3))])
        bytes_per_s, flops_per_s = most["memory_bytes_per_s"], most["matmul_flops_per_s"]
        least_decode = sum(max(moved / bytes_per_s, flops / flops_per_s) for moved, flops in self._decoded)
        device = {name: sum(times) for name, times in self._clock.seconds.items()}
        calls = {name: len(times) for name, times in self._clock.seconds.items()}
        stepped = sum(end - begin for begin, end in self._steps)
        waited = outside(rollout.tool.spans, self._steps)
        dispatch = most["dispatch_s"]
        idle = device["decode"] * (1 - counted["decoded_tokens"] / counted["decode_slots"])
        padding = device["extend"] * (1 - counted["prefilled_tokens"] / counted["prefill_slots"])
        twice = max(0.0, 1 - counted["must_prefill"] / counted["prefilled_tokens"])
        recompute = (device["extend"] - padding) * twice
        least_prefill = self._extended / flops_per_s * (1 - twice)
        lines = {
            "decode, at the limit": least_decode,
            "decode, rows that had stopped or were padding": idle,
            "decode, dispatch": calls["decode"] * dispatch,
            "prefill, at the limit": least_prefill,
            "prefill, padding": padding,
            "prefill, recomputed": recompute,
            "prefill, dispatch": calls["extend"] * dispatch,
            "copies of shared prompts": device["fork"],
            "waiting for tools, no row could run": waited,
            "host, in the engine": stepped - sum(device.values()),
            "host, in driver and agents": seconds - stepped - waited,
        }
        for name, kind in (("decode", "decode"), ("prefill", "extend")):
            explained = sum(value for key, value in lines.items() if key.startswith(f"{name}, "))
            lines[f"{name}, above the limit otherwise"] = device[kind] - explained
        host = lines["host, in the engine"] + lines["host, in driver and agents"]
        return {
            **counted,
            "seconds": seconds,
            "lines": lines,
            "calls": calls,
            "device_idle_while_a_row_could_run": host / seconds,
            "of_limit": {
                "decode": least_decode / device["decode"],
                "prefill": least_prefill / device["extend"],
                "rollout": (least_decode + least_prefill) / seconds,
            },
            "limits": most,
        }


def outside(spans: Sequence[Span], excluded: Sequence[Span]) -> float:
    """Seconds that lie in at least one of `spans` and in none of `excluded`."""
    edges = sorted(
        (time, kind, change)
        for kind, group in enumerate((spans, excluded))
        for begin, end in group
        for time, change in ((begin, 1), (end, -1))
    )
    total, since, open_ = 0.0, 0.0, [0, 0]
    for at, kind, change in edges:
        if open_[0] and not open_[1]:
            total += at - since
        open_[kind] += change
        since = at
    return total


# --- updates ---------------------------------------------------------------------------------------------------------------


class Update:
    """One optimiser step on all attempts."""

    def __init__(self, model: Decoder, work: Sequence[Trajectory], *, checkpointing: bool, share: bool) -> None:
        attempts = episodes(work, model.config.vocab_size)
        self._sequences = []
        for attempt in attempts:
            ledger, at = Ledger(), 0
            while at < len(attempt.ids):
                end = next(
                    (i for i in range(at, len(attempt.ids)) if attempt.sampled[i] != attempt.sampled[at]),
                    len(attempt.ids),
                )
                ids = attempt.ids[at:end]
                if attempt.sampled[at]:
                    ledger.sample(ids, [-float(np.log(model.config.vocab_size))] * len(ids), 0)
                else:
                    ledger.feed(ids)
                at = end
            self._sequences.append(ledger.sequence())
        self._advantages = [attempt.advantage for attempt in attempts]
        self._work, self._config = work, model.config
        self._layout = BatchLayout(make_mesh(), buckets_of(max(map(len, work))), 2048, model, share=share)
        optimizer = OptimizerConfig(lr=1e-5, weight_decay=0.0).build(1000)
        self._learner = Learner(model, optimizer, LossConfig(), self._layout, remat="full" if checkpointing else "none")

    def run(self) -> dict[str, Any]:
        """One update; its work."""
        before = self._learner.compilations
        weights = token_weights([s.loss_mask for s in self._sequences], "sequence", 1.0)
        batch, index = self._layout.build(self._sequences, weights, self._advantages)
        built = time.perf_counter()
        self._learner.update(batch)
        count = int(batch.count)
        return {
            "update_s": time.perf_counter() - built,
            "flops": Work(config=self._config).update_flops([len(trajectory) for trajectory in self._work]),
            "tokens": sum(map(len, self._work)),
            "computed_tokens": index.tokens,
            "slots": count * self._layout.width * self._layout.shards,
            "compilations": self._learner.compilations - before,
        }


def buckets_of(longest: int) -> tuple[int, ...]:
    """Row lengths of micro-batches: halves of one that holds the longest attempt."""
    top = -(-longest // 512) * 512
    return tuple(sorted({top, *(-(-top // (128 * part)) * 128 for part in (2, 4))}))


# --- limits ----------------------------------------------------------------------------------------------------------------


def limits(config: DecoderConfig, rows: int) -> dict[str, Any]:
    """This machine's limits: rates of products and copies by size, and the time of an empty call."""
    work = Work(config=config, bytes_per_entry=4)
    small = {str(tokens): machine(tokens, config, 3).peak_flops for tokens in sorted({8, rows})}
    flops = {str(tokens): machine(tokens, config, 3).peak_flops for tokens in (512, 2048)}
    for side in (512, 1024, 2048):
        x = jax.random.normal(jax.random.key(0), (side, side), jnp.float32)
        product = jax.jit(lambda x, scale=1 / side: x @ x * scale)
        flops[f"{side}x{side}"] = 2 * side**3 / float(np.median(timed(lambda x=x, f=product: f(x), 3)))
    size = max(2**20, 4 * work.matrices)
    rates = {str(count // 2**20): memory_rate(count, 3) for count in sorted({size, 2**26})}
    nothing, scalar = jax.jit(lambda x: x + 1), jnp.float32(0)
    return {
        "flops_per_s": {**small, **flops},
        "bytes_per_s": rates,
        "matmul_flops_per_s": max(flops.values()),
        "memory_bytes_per_s": rates[str(size // 2**20)],
        "dispatch_s": float(np.median(timed(lambda: nothing(scalar), 200, warm_up=10))),
    }


def medians(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of every number of several measurements."""
    return {
        name: medians([each[name] for each in measured])
        if isinstance(value, dict)
        else statistics.median(each[name] for each in measured)
        for name, value in measured[0].items()
    }


# --- the worker ------------------------------------------------------------------------------------------------------------


def _prepare_weights(arguments: argparse.Namespace) -> Prepared:
    write_weights(arguments.size, arguments.weights)
    return dict


def _prepare_rollout(arguments: argparse.Namespace) -> Prepared:
    split_cpu(DEVICES[arguments.size])
    fixed = arguments.part == "rollout_fixed"
    return Rollout(_policy(arguments.weights), asked_work(arguments), deterministic=fixed).run


def _prepare_accounts(arguments: argparse.Namespace) -> Prepared:
    split_cpu(DEVICES[arguments.size])
    return Accounts(Rollout(_policy(arguments.weights), asked_work(arguments))).run


def _prepare_update(arguments: argparse.Namespace) -> Prepared:
    split_cpu(DEVICES[arguments.size])
    share = arguments.part == "update_shared"
    model = _policy(arguments.weights)
    return Update(model, asked_work(arguments), checkpointing=bool(arguments.checkpointing), share=share).run


if __name__ == "__main__":
    serve(
        {
            "weights": _prepare_weights,
            "rollout": _prepare_rollout,
            "rollout_fixed": _prepare_rollout,
            "accounts": _prepare_accounts,
            "update": _prepare_update,
            "update_shared": _prepare_update,
        }
    )
