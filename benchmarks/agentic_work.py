"""The work of `benchmarks.agentic`: attempts with the shapes of R1-Searcher's released rollouts, and recorded latencies.

    python -m benchmarks.agentic_work --traces    # writes the lengths of r1searcher_traces into the record (ROUTERL_TEST_DATA)
    python -m benchmarks.agentic_work --latencies=KB    # and the latencies of a server of this knowledge base

The record, results/agentic_traces.json, ships with the project: lengths in tokens of SmolLM2's tokenizer, no text. So the work
is the same wherever it is done. Until `--latencies` has run on an idle machine, latencies are a log-normal distribution through
the two quantiles that benchmarks/README.md has for a server of HotpotQA's passages.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import os
import pathlib
import random
import re
from collections.abc import Sequence
from typing import Any

RECORD = pathlib.Path(__file__).parent / "results" / "agentic_traces.json"
_DOCUMENTS = re.compile(r"\s*<\|begin_of_documents\|>.*?<\|end_of_documents\|>\s*", re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One turn: tokens that the policy samples, tokens of the documents that follow (0 after the last), seconds of the tool."""

    sampled: int
    observed: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One attempt: its group, the prompt's tokens, and its turns."""

    group: int
    prompt: int
    steps: tuple[Step, ...]

    @property
    def fed(self) -> int:
        """Tokens that the policy did not sample, without the prompt."""
        return sum(step.observed for step in self.steps)

    @property
    def sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(step.sampled for step in self.steps)

    def __len__(self) -> int:
        return self.prompt + self.fed + self.sampled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """One finished attempt, for updates: its tokens, which of them were sampled, and its advantage."""

    ids: list[int]
    sampled: list[bool]
    prompt: int
    advantage: float


def trajectories(groups: int, samples: int, seed: int = 0, longest: int = 0) -> list[Trajectory]:
    """Attempts in groups: every attempt is another recorded rollout, and a group has the prompt of its first one.

    If more attempts are asked for than were recorded, all are drawn, then all again in another order, and so on.

    Args:
      longest: rollouts of more tokens are not drawn; 0: all are. For a model that is too large for long ones here.
    """
    record, rng = json.loads(RECORD.read_text()), random.Random(seed)
    rows = [row for row in record["rollouts"] if not longest or sum(row[:1] + row[1] + row[2]) <= longest]
    if not rows:
        raise ValueError(f"no recorded rollout has at most {longest} tokens: give a larger number for the longest")
    drawn: list[Any] = []
    while missing := groups * samples - len(drawn):
        drawn += rng.sample(rows, min(missing, len(rows)))
    result = []
    for index, (_, sampled, observed) in enumerate(drawn):
        seconds = [rng.choice(record["latencies"]) for _ in observed]
        steps = [Step(sampled=a, observed=b, seconds=c) for a, b, c in zip(sampled, [*observed, 0], [*seconds, 0.0])]
        prompt = drawn[index - index % samples][0]
        result.append(Trajectory(group=index // samples, prompt=prompt, steps=tuple(steps)))
    return result


def asked_work(arguments: argparse.Namespace) -> list[Trajectory]:
    """The work that the options of a worker ask for (agentic_worker.serve)."""
    return trajectories(arguments.groups, arguments.samples, longest=arguments.longest)


def must_prefill(work: Sequence[Trajectory]) -> int:
    """Tokens that an engine has to prefill if it computes nothing twice: prompts once a group, all documents.

    The last token of a prompt is not among them: the first step of decoding reads it.
    """
    prompts = {trajectory.group: trajectory.prompt - 1 for trajectory in work}
    return sum(prompts.values()) + sum(trajectory.fed for trajectory in work)


def episodes(work: Sequence[Trajectory], vocabulary: int, seed: int = 0) -> list[Tokens]:
    """Random tokens for every attempt. Attempts of a group have the same prompt."""
    rng, prompts, result = random.Random(seed), {}, []
    for trajectory in work:
        ids = [rng.randrange(3, vocabulary) for _ in range(len(trajectory))]
        ids[: trajectory.prompt] = prompts.setdefault(trajectory.group, ids[: trajectory.prompt])
        mask = [False] * trajectory.prompt
        for step in trajectory.steps:
            mask += [True] * step.sampled + [False] * step.observed
        result.append(Tokens(ids=ids, sampled=mask, prompt=trajectory.prompt, advantage=rng.gauss(0, 1)))
    return result


# --- recording -------------------------------------------------------------------------------------------------------------


def pieces(row: dict[str, Any]) -> list[tuple[str, bool]]:
    """The texts of a released rollout in order, prompt first, and whether the policy wrote them."""
    from routerl_jax.recipes.r1_searcher import BASE_PROMPT, PROMPT_SUFFIX

    result, at = [(BASE_PROMPT.format(question=row["question"]) + PROMPT_SUFFIX, False)], 0
    for documents in _DOCUMENTS.finditer(row["trace"]):
        result += [(row["trace"][at : documents.start()], True), (documents[0], False)]
        at = documents.end()
    return [*result, (row["trace"][at:], True)]


def lengths(row: dict[str, Any], count: Any) -> tuple[int, list[int], list[int]]:
    """(prompt, sampled tokens of each turn, tokens of the documents between them) of a released rollout.

    Args:
      count: number of tokens of a text.
    """
    (prompt, _), *rest = pieces(row)
    turns = [max(count(text), 1) for text, policy in rest if policy]
    return count(prompt), turns, [count(text) for text, policy in rest if not policy]


def read_traces(path: str | pathlib.Path) -> list[tuple[int, list[int], list[int]]]:
    """The lengths of all rollouts of a file, in tokens of SmolLM2's tokenizer."""
    from routerl_jax.core.tokenizer import Tokenizer
    from routerl_jax.models.pretrained import resolve

    tokenizer = Tokenizer.load(resolve("SmolLM2-135M-Instruct"))
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [lengths(json.loads(line), lambda text: len(tokenizer.encode(text))) for line in file]


def serve_and_ask(directory: str, questions: Sequence[str], clients: int, think: float) -> list[float]:
    """Seconds that each question took over HTTP, asked by clients that think for about `think` seconds after each.

    The first question of every client is not among them.
    """
    import asyncio
    import threading
    import time

    import httpx2
    import uvicorn

    from routerl_jax.extras.kb_server.app import Served, create_app, warm_up
    from routerl_jax.knowledge.load import load_kb

    kb = load_kb(directory)
    warm_up(kb)
    server = uvicorn.Server(
        uvicorn.Config(create_app([Served("bench", {"default": kb})]), port=8971, log_level="error")
    )
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)
    seconds, todo, rng = [], iter(questions), random.Random(0)

    async def client(session: httpx2.AsyncClient) -> None:
        for number, question in enumerate(todo):
            started = time.perf_counter()
            reply = await session.post("http://127.0.0.1:8971/retrieve", json={"queries": [question], "topk": 5})
            reply.raise_for_status()
            if number:  # the first ones come all at once, while the server still warms up
                seconds.append(time.perf_counter() - started)
            await asyncio.sleep(rng.expovariate(1 / think))

    async def ask() -> None:
        async with httpx2.AsyncClient(timeout=600) as session:
            await asyncio.gather(*(client(session) for _ in range(clients)))

    asyncio.run(ask())
    server.should_exit = True
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", action="store_true")
    parser.add_argument("--latencies", help="directory of a knowledge base with an encoder")
    arguments = parser.parse_args()
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {"rollouts": [], "latencies": []}
    traces = pathlib.Path(os.environ.get("ROUTERL_TEST_DATA", "")) / "r1searcher_traces" / "traces_dev.jsonl.gz"
    if arguments.traces:
        record["rollouts"] = read_traces(traces)
        record["source"] = "RUCAIBox/R1-Searcher 631167c, data/eval_results: 1,194 of 1,750 rollouts (MIT)"
    if arguments.latencies:
        with gzip.open(traces, "rt", encoding="utf-8") as file:
            questions = [search["query"] for line in file for search in json.loads(line)["searches"]][:600]
        record["latencies"] = sorted(round(s, 3) for s in serve_and_ask(arguments.latencies, questions, 64, 4.0))
        record["latencies_source"] = "our server, 64 clients that think for about 4 s after each question"
    rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in record.pop("rollouts"))
    RECORD.write_text(f'{json.dumps(record, separators=(",", ":"))[:-1]},\n"rollouts":[\n{rows}\n]}}\n')


if __name__ == "__main__":
    main()
