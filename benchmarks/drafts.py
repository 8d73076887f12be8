"""Drafts copied from the conversation (config.engine.drafts): how often they are right, and what they save.

    python -m benchmarks.drafts --traces=DATA/r1searcher_traces/traces_dev.jsonl.gz    # in recorded rollouts
    python -m benchmarks.drafts [--rows=1 --rows=4 --rows=16] [--drafts=2 --drafts=4]    # seconds on this machine

With traces: prints the tokens per step when the recorded texts are sampled with drafts (SmolLM2's tokenizer). This is exact,
because a draft is accepted where it equals the sampled token. Then prints the gain of decoding on a chip
(extras.compile_check.roofline). A step takes the longer of two times there: to read weights and cache once, and to multiply all
its tokens.

Without traces: SmolLM2-135M-Instruct answers questions about passages of Atlas greedily, with drafts and without in turn. Both
write the same tokens.
"""

from __future__ import annotations

from routerl_jax.parallel.platform import tune_process

if __name__ == "__main__":
    tune_process()

import argparse
import gzip
import json
import pathlib
import statistics
import time
from collections.abc import Sequence

from benchmarks.agentic_work import pieces
from routerl_jax.core.progress import Bar
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.data.atlas.world import passages_of
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.programs import LONGEST_MATCH
from routerl_jax.engine.sampling import GREEDY
from routerl_jax.extras.compile_check.roofline import CHIPS
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.models.pretrained import resolve

MODEL = "SmolLM2-135M-Instruct"
DRAFTS = (1, 2, 3, 5, 8)
CHIP_NAMES, CHIP_ROWS = ("v5e", "v5p", "H100"), (1, 16, 64, 256)
# of Qwen2.5-7B in bfloat16: parameters that a token is multiplied with, and bytes of the keys and values of a token
PARAMETERS, KEY_BYTES = 7.07e9, 28 * 4 * 128 * 2 * 2
CONTEXT = 1_300  # tokens in a row: about the mean of the traces


class Lookup:
    """`engine.programs.lookup_drafts` for a conversation that grows."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # index of the token after the latest occurrence of a few tokens

    def add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            for count in range(1, LONGEST_MATCH + 1):
                if count <= len(self.tokens):
                    self._after[tuple(self.tokens[-count:])] = len(self.tokens)
            self.tokens.append(token)

    def draft(self, count: int) -> list[int]:
        for longest in range(LONGEST_MATCH, 0, -1):
            index = self._after.get(tuple(self.tokens[-longest:])) if longest <= len(self.tokens) else None
            if index is not None:
                return self.tokens[index : index + count]
        return []


def steps_of(parts: Sequence[tuple[list[int], bool]], drafts: int) -> tuple[int, int]:
    """The tokens of a recorded conversation that were sampled, and the steps in which they are sampled with drafts.

    Args:
      parts: its tokens in order, and whether they were sampled.
    """
    lookup, sampled, steps = Lookup(), 0, 0
    for tokens, policy in parts:
        if not policy:
            lookup.add(tokens)
            continue
        at = 0
        while at < len(tokens):
            draft = lookup.draft(drafts)
            right = 0
            while right < min(len(draft), len(tokens) - at - 1) and draft[right] == tokens[at + right]:
                right += 1
            lookup.add(tokens[at : at + right + 1])
            at, steps = at + right + 1, steps + 1
        sampled += len(tokens)
    return sampled, steps


def recorded(path: pathlib.Path, count: int) -> dict[int, float]:
    """Tokens per step in the released rollouts, by number of drafts."""
    tokenizer = Tokenizer.load(resolve(MODEL))
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file][:count]
    totals = {drafts: [0, 0] for drafts in DRAFTS}
    for row in Bar(rows, desc="rollouts"):
        parts = [(tokenizer.encode(text), policy) for text, policy in pieces(row)]
        for drafts, total in totals.items():
            for i, value in enumerate(steps_of(parts, drafts)):
                total[i] += value
    return {drafts: sampled / steps for drafts, (sampled, steps) in totals.items()}


def gain(chip: str, rows: int, drafts: int, tokens_per_step: float) -> float:
    """How many times as fast a 7B model decodes on a chip, at its peaks."""
    peaks = CHIPS[chip]

    def seconds(tokens: int) -> float:
        read = 2 * PARAMETERS + rows * CONTEXT * KEY_BYTES
        return max(read / peaks.memory_bandwidth, rows * tokens * 2 * PARAMETERS / peaks.peak_flops)

    return tokens_per_step * seconds(1) / seconds(drafts + 1)


def measured(rows: Sequence[int], drafts: Sequence[int], repeats: int, tokens: int) -> list[dict[str, float]]:
    """Seconds of greedy answers about passages with drafts and without, in turn."""
    model = load_pretrained(MODEL)
    assert model.tokenizer is not None
    results = []
    for count in rows:
        prompts = [model.tokenizer.chat([{"role": "user", "content": text}]) for text in _questions(count)]
        engines = {number: Engine(model, rows=count, max_length=1024, drafts=number) for number in (0, *drafts)}
        seconds: dict[int, list[float]] = {number: [] for number in engines}
        written: dict[int, list[list[int]]] = {}
        for repeat in range(-1, repeats):
            for number, engine in engines.items():
                begun = time.perf_counter()
                turns = engine.generate(prompts, max_tokens=tokens, sampling=GREEDY)
                written[number] = [turn.tokens for turn in turns]
                if repeat >= 0:
                    seconds[number].append(time.perf_counter() - begun)
        for number in drafts:
            stats = engines[number].stats
            ratios = sorted(plain / drafted for plain, drafted in zip(seconds[0], seconds[number]))
            same = sum(a == b for a, b in zip(written[0], written[number]))
            results.append(
                {
                    "rows": count,
                    "drafts": number,
                    "tokens_per_step": stats.decoded_tokens / stats.decode_passes,
                    "seconds_without": statistics.median(seconds[0]),
                    "seconds": statistics.median(seconds[number]),
                    "ratio": statistics.median(ratios),
                    "least": ratios[0],
                    "most": ratios[-1],
                    "same": same / count,
                }
            )
    return results


def _questions(count: int) -> list[str]:
    """Requests about five passages each."""
    passages = passages_of("text")
    groups = [passages[5 * i : 5 * i + 5] for i in range(count)]
    return [
        "Documents:\n\n"
        + "\n\n".join(f"{passage.title}\n{passage.text}" for passage in group)
        + f"\n\nWhat do the documents say about {group[2].title}? Answer in a few sentences."
        for group in groups
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=pathlib.Path)
    parser.add_argument("--most", type=int, default=300, help="rollouts of the traces that are read")
    parser.add_argument("--rows", type=int, action="append", help="default: 1, 4 and 16")
    parser.add_argument("--drafts", type=int, action="append", help="default: 2 and 4")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.traces:
        tokens = recorded(arguments.traces, arguments.most)
        print("| drafts | tokens per step |" + "".join(f" {chip}, {n} |" for chip in CHIP_NAMES for n in CHIP_ROWS))
        print("|---:|---:|" + "---:|" * len(CHIP_NAMES) * len(CHIP_ROWS))
        for drafts, rate in tokens.items():
            gains = (gain(chip, rows, drafts, rate) for chip in CHIP_NAMES for rows in CHIP_ROWS)
            print(f"| {drafts} | {rate:.2f} |" + "".join(f" {factor:.2f} |" for factor in gains))
        return
    print("| rows | drafts | tokens per step | seconds without | with | times as fast (range) | same answers |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for row in measured(arguments.rows or (1, 4, 16), arguments.drafts or (2, 4), arguments.repeats, arguments.tokens):
        print(
            f"| {row['rows']} | {row['drafts']} | {row['tokens_per_step']:.2f} | {row['seconds_without']:.2f} "
            f"| {row['seconds']:.2f} | {row['ratio']:.2f} ({row['least']:.2f}-{row['most']:.2f}) | {row['same']:.0%} |"
        )


if __name__ == "__main__":
    main()
