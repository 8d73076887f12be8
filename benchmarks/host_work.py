"""Measures the host's work for every turn at many rows: decode tokens, parse, call an empty search, encode, record.

    python -m benchmarks.host_work [--agents=1024] [--repeats=3] [--profile] [--json]

The driver, the search agent with R1-Searcher's grammar and the engine run as in training, but no device program runs: every
turn is a recorded text, whose tokens are available at once. So the host takes all the time. It is printed per turn, beside an
estimate of the decode calls on an H100 (all weights and all live keys at the memory's bandwidth, a lower bound).

Turns and documents are the words of a fixed text in the lengths of results/agentic_traces.json; the tokenizer is SmolLM2's.
"""

from __future__ import annotations

from routerl_jax.parallel.platform import tune_process

if __name__ == "__main__":
    tune_process()

import argparse
import cProfile
import dataclasses
import functools
import json
import pstats
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.agentic_work import Trajectory, trajectories
from routerl_jax.agents.driver import run as drive
from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Example, Passage
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.policy import Stream
from routerl_jax.engine.programs import DecodeOutputs
from routerl_jax.engine.rows import Placement
from routerl_jax.extras.compile_check.roofline import CHIPS
from routerl_jax.models.config import DecoderConfig
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.pretrained import resolve
from routerl_jax.models.published import architecture_of
from routerl_jax.models.work import Work
from routerl_jax.recipes.r1_searcher import PROMPT_SUFFIX, R1SearcherGrammar

# policies whose decode calls on an H100 are estimated
ESTIMATED = {"1.5B": "Qwen/Qwen2.5-1.5B-Instruct", "7B": "Qwen/Qwen2.5-7B-Instruct"}
WORDS = [
    "the",
    "river",
    "of",
    "a",
    "northern",
    "county",
    "joins",
    "larger",
    "stream",
    "near",
    "old",
    "mill",
    "by",
    "monks",
    "1204",
]


class Scripts:
    """The text of every turn, and the documents between turns, as tokens and as passages."""

    def __init__(self, work: Sequence[Trajectory], grammar: R1SearcherGrammar, tokenizer: Tokenizer) -> None:
        rng, seen = random.Random(0), {}
        self.turns: dict[tuple[str, int], list[list[int]]] = {}
        self.passages: dict[str, list[Passage]] = {}
        self.examples = []
        for each in work:
            sample = seen[each.group] = seen.get(each.group, -1) + 1
            name = str(each.group)
            if not sample:
                self.examples.append(Example(id=name, question=_text(rng, each.prompt), answers=("monks",)))
            written = []
            for number, step in enumerate(each.steps):
                thought = _text(rng, max(step.sampled - 20, 1))
                query = f"{name} {sample} {number}"
                last = number == len(each.steps) - 1
                turn = grammar.write_answer(thought, "monks") if last else grammar.write_search(thought, query, "wiki")
                written.append(tokenizer.encode(turn))
                if not last:
                    each_text = max(step.observed // 5, 1)
                    self.passages[query] = [
                        Passage(id=f"{query} {i}", title="Mill", text=_text(rng, each_text)) for i in range(5)
                    ]
            self.turns[name, sample] = written
        self.samples = 1 + max(seen.values())

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """The documents that belong to a turn's query; it takes no time."""
        return [self.passages[query.strip()][:k] for query in queries]


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


class NoDevice:
    """Replaces an engine's program calls: rows are fed at once, and turns are as scripted."""

    def __init__(self, engine: Engine, scripts: Scripts) -> None:
        self._engine, self._scripts = engine, scripts
        self.calls: list[tuple[int, int, int]] = []  # rows, steps, and live tokens of every decode call
        self.seconds = 0.0  # that this took itself
        calls = engine._calls
        calls.extend, calls.fork, calls.decode = self.extend, self.fork, self.decode  # type: ignore[method-assign]

    def extend(self, streams: Sequence[Stream]) -> int:
        """As DeviceCalls.extend."""
        for stream in streams:
            stream.cached = len(stream.ledger) - 1
        return 0

    def fork(self, pairs: Sequence[tuple[Stream, Stream]]) -> None:
        """As DeviceCalls.fork."""

    def decode(
        self, streams: Sequence[Stream], stops: Any, *, steps: int, seed: int, leave_at: int
    ) -> tuple[Placement[Stream], DecodeOutputs]:
        """As DeviceCalls.decode. The arguments of the program are built, too."""
        made: dict[str, Any] = {}

        def program(**options: Any) -> Any:
            made.update(options)
            raise _Given

        programs = self._engine._calls._programs
        self._engine._calls._programs = dataclasses.replace(programs, decode=program)
        try:
            type(self._engine._calls).decode(
                self._engine._calls, streams, stops, steps=steps, seed=seed, leave_at=leave_at
            )
        except _Given:
            pass
        finally:
            self._engine._calls._programs, self._engine._calls.cache = programs, made["cache"]
        started = time.perf_counter()
        table = self._engine._table
        layout = Placement(table, self._engine._calls._decode_rows, streams)
        rest = {id(stream): self._rest(stream) for stream in streams}
        lengths = sorted(len(tokens) for tokens in rest.values())
        ran = min(steps, lengths[len(lengths) - leave_at - 1] if leave_at < len(lengths) else lengths[-1])
        shape = layout.shape
        tokens, counts = np.zeros((*shape, steps), np.int32), np.zeros(shape, np.int32)
        stopped, states = np.zeros(shape, np.uint32), np.zeros(shape, np.int32)
        for slot, stream in layout:
            written = rest[id(stream)][:ran]
            tokens[slot][: len(written)], counts[slot] = written, len(written)
            if len(written) == len(rest[id(stream)]):
                stopped[slot] = np.uint32(1)
        logprobs = np.full(tokens.shape, -1.0, np.float32)
        self.calls.append((len(streams), ran, sum(stream.cached for stream in streams) // len(streams)))
        arrays = {"tokens": tokens, "logprobs": logprobs, "counts": counts, "passes": counts, "states": states}
        outputs = DecodeOutputs(**arrays, stopped=stopped)  # type: ignore[arg-type]
        self.seconds += time.perf_counter() - started
        return layout, outputs

    def _rest(self, stream: Stream) -> list[int]:
        """The tokens that the turn has still to write."""
        script = self._scripts.turns[stream.example_id, stream.identity[1]]
        return script[stream.turn][stream.turn_request.sampled :]


class TimedTokenizer:
    """Measures the seconds that a tokenizer's encoding and decoding take."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.seconds = 0.0
        tokenizer._ids = functools.lru_cache(1024)(self._timed(tokenizer._encode))
        tokenizer.prepare = self._timed(tokenizer.prepare)  # type: ignore[method-assign]
        tokenizer.decode = self._timed(tokenizer.decode)  # type: ignore[method-assign]

    def _timed(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(argument: Any) -> Any:
            started = time.perf_counter()
            result = function(argument)
            self.seconds += time.perf_counter() - started
            return result

        return run


class _Given(Exception):
    """The program's arguments are made."""


def estimated_seconds(calls: Sequence[tuple[int, int, int]], config: DecoderConfig) -> float:
    """Seconds that decode calls take on an H100 at least, at its memory's bandwidth or its peak."""
    work, chip = Work(config=config), CHIPS["H100"]
    return sum(
        steps
        * max(work.decode_bytes(rows, live) / chip.memory_bandwidth, work.decode_flops(rows, live) / chip.peak_flops)
        for rows, steps, live in calls
    )


def measure(agents: int, repeats: int, profile: bool = False) -> dict[str, Any]:
    """The host's seconds for one rollout of so many agents, groups of 8."""
    tokenizer = Tokenizer.load(resolve("SmolLM2-135M-Instruct"))
    config = DecoderConfig(
        **{"model_type": "llama", "embed": 8, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 8, "mlp": 8},
        vocab_size=len(tokenizer.token_bytes),
        max_length=8192,
        tied_embeddings=True,
    )
    model = Decoder(config, jax.random.key(0))
    model.tokenizer = tokenizer
    grammar = R1SearcherGrammar(tools=("wiki",))
    agent = SearchAgent(grammar=grammar, max_searches=9, k=5, max_turn_tokens=4096, prompt_suffix=PROMPT_SUFFIX)
    work = trajectories(agents // 8, 8)
    scripts = Scripts(work, grammar, tokenizer)
    engine = Engine(model, rows=agents, max_length=8192)
    device = NoDevice(engine, scripts)
    turns = sum(len(each.steps) for each in work)
    timed, seconds, tokenizing = TimedTokenizer(tokenizer), [], []
    for repeat in range(repeats + 1):
        tokenizer._ids.cache_clear()
        device.calls.clear()
        device.seconds = timed.seconds = 0.0
        profiler = cProfile.Profile() if profile and repeat == repeats else None
        started = time.perf_counter()
        if profiler:
            profiler.enable()
        episodes = drive(agent, scripts.examples, engine, {"wiki": scripts}, scripts.samples)
        if profiler:
            profiler.disable()
            pstats.Stats(profiler).sort_stats("tottime").print_stats(35)
        seconds.append(time.perf_counter() - started - device.seconds)
        tokenizing.append(timed.seconds)
        assert len(episodes) == agents
        assert sum(len(episode.turns) for episode in episodes) == turns
        assert all(episode.answer == "monks" for episode in episodes)
    took, encoding = statistics.median(seconds[1:]), statistics.median(tokenizing[1:])
    decoding = {size: estimated_seconds(device.calls, architecture_of(name)) for size, name in ESTIMATED.items()}
    return {
        "agents": agents,
        "turns": turns,
        "calls": len(device.calls),
        "seconds": took,
        "range": [min(seconds[1:]), max(seconds[1:])],
        "tokenizer_seconds": encoding,
        "ms_per_turn": 1000 * took / turns,
        "ms_per_call": 1000 * took / len(device.calls),
        "of_decode_on_h100": {size: took / seconds for size, seconds in decoding.items()},
        "driver_of_decode_on_h100": {size: (took - encoding) / seconds for size, seconds in decoding.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1024, help="a multiple of 8")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.agents < 8 or arguments.agents % 8:
        parser.error(f"--agents={arguments.agents}: give a multiple of 8, the agents of a group")
    result = measure(arguments.agents, arguments.repeats, arguments.profile)
    if arguments.json:
        print(json.dumps(result))
        return
    low, high = result["range"]
    shares = [result[key] for key in ("of_decode_on_h100", "driver_of_decode_on_h100")]
    whole, driver = (", ".join(f"{share:.0%} ({size})" for size, share in by_size.items()) for by_size in shares)
    print(
        "| agents | turns | decode calls | host, s (range) | of it the tokenizer | ms a turn | ms a call | of decoding "
        "on an H100 | without the tokenizer |\n"
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n"
        f"| {result['agents']:,} | {result['turns']:,} | {result['calls']} | {result['seconds']:.2f} ({low:.2f}-{high:.2f}) | "
        f"{result['tokenizer_seconds']:.2f} s | {result['ms_per_turn']:.2f} | {result['ms_per_call']:.0f} | {whole} | "
        f"{driver} |"
    )


if __name__ == "__main__":
    main()
