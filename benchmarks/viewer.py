"""How long the page of `launch.view` waits: filters over 100,000 episodes, over HTTP, after and while they are indexed.

    python -m benchmarks.viewer [--episodes 100000] [--repeats 9] [--json FILE]

Episodes are made up: two searches and an answer, each with a thought; 20,000 questions, 50,000 passages of some 600 letters, of
which an episode retrieves six. The server has its own process. Its processor time is printed beside the elapsed time, because
on a busy machine only processor time can be compared. Prints a Markdown table; `--json` keeps the numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import json
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
from typing import Any

from routerl_jax.core.types import Action, Call, Episode, Example, Passage, Turn
from routerl_jax.evaluation.records import episode_record

FILTERS = {
    "all, newest first": {},
    "reward at least 0.5, largest first": {"reward_min": "0.5", "order": "-reward"},
    "advantage below 0, smallest first": {"advantage_max": "-0.01", "order": "advantage"},
    "one knowledge base, wrong answers": {"kb": "table", "correct": "wrong"},
    "one data set, failures, longest first": {"dataset": "dataset: set3", "failure": "truncated", "order": "-tokens"},
    "a word in a few episodes": {"text": "zebra17"},
    "a word in most episodes": {"text": "because"},
    "words that nothing holds": {"text": "nothing says this"},
    "a word, a knowledge base and a reward": {"text": "zebra", "kb": "text", "reward_min": "0.5"},
    "one question": {"question": "q77"},
    "the last page of all": {"offset": "99900"},
}
_STEP = 128  # episodes of a step
_LETTERS = 600  # of a passage
_KINDS = 10_000  # episodes with texts of their own
_TICK = 1000 / os.sysconf("SC_CLK_TCK")  # ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        workdir = pathlib.Path(directory) / "run"
        size = make_records(workdir, arguments.episodes)
        result = {"episodes": arguments.episodes, "bytes": size, **measure(workdir, arguments.repeats)}
    result["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(table(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def make_records(workdir: pathlib.Path, count: int) -> int:
    """Writes the episodes as training does, a file a step. Returns their bytes."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(3, 9))) for _ in range(5000)]
    words += [f"zebra{i}" for i in range(50)]
    passages = [_passage(i, draw, words) for i in range(50_000)]
    kinds = [_record(draw, words, passages) for _ in range(_KINDS)]
    (workdir / "episodes").mkdir(parents=True)
    total = 0
    for first in range(0, count, _STEP):
        step = first // _STEP
        lines = [
            json.dumps(_varied(kinds[(first + i) % _KINDS], step, draw, words))
            for i in range(min(_STEP, count - first))
        ]
        total += (workdir / "episodes" / f"step-{step:06d}.jsonl").write_text("\n".join(lines) + "\n")
    return total


def _passage(number: int, draw: random.Random, words: list[str]) -> Passage:
    text = " ".join(draw.choices(words, k=_LETTERS // 7))
    return Passage(id=f"p{number}", title=" ".join(draw.choices(words, k=3)), text=text, score=draw.random())


def _varied(record: dict[str, Any], step: int, draw: random.Random, words: list[str]) -> dict[str, Any]:
    """The same texts for another question, with its own thought, rewards and outcome."""
    question, reward = draw.randrange(20_000), draw.random()
    last = record["turns"][-1]
    thought = " ".join(["because", *draw.choices(words, k=20)])
    return record | {
        "id": f"q{question}",
        "question": " ".join(words[question % 4000 :][:9]),
        "metadata": {"dataset": f"set{question % 7}", "type": f"type{question % 11}"},
        "turns": [*record["turns"][:-1], last | {"action": last["action"] | {"thought": thought}}],
        "rewards": {"em": reward, "total": reward},
        "truncated": draw.random() < 0.05,
        "step": step,
        "advantage": round(draw.gauss(0, 1), 4),
    }


def _record(draw: random.Random, words: list[str], passages: list[Passage]) -> dict[str, Any]:
    turns = [_search(draw, words, passages) for _ in range(2)]
    answer = draw.choice(words[:20])
    action = Action(kind="answer", answer=answer)
    turns.append(Turn(text=answer, stop_reason="stop", tokens=30, action=action, well_formed=True))
    made = Episode(
        example=Example(id="q", question="?", answers=(words[0],)), sample=0, answer=answer, turns=turns, sequences=[]
    )
    return episode_record(made, trained=True)


def _search(draw: random.Random, words: list[str], passages: list[Passage]) -> Turn:
    query, tool = " ".join(draw.choices(words, k=6)), draw.choice(("text", "table", "graph"))
    retrieved = tuple(dataclasses.replace(passage) for passage in draw.choices(passages, k=3))
    action = Action(kind="search", tool=tool, query=query, thought=" ".join(draw.choices(words, k=15)))
    call = Call(tool=tool, query=query, passages=retrieved, seconds=0.01, cost=1.0)
    return Turn(
        text=query, stop_reason="stop", tokens=40, action=action, well_formed=True, calls=[call], observation=query
    )


def measure(workdir: pathlib.Path, repeats: int) -> dict[str, Any]:
    """Milliseconds of each filter, seconds of indexing, and the server's memory."""
    command = [sys.executable, "-m", "launch.view", f"--workdir={workdir}", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            host = urllib.parse.urlsplit(server.stdout.readline().strip()).netloc
            started, meanwhile = time.perf_counter(), []
            while not _ask(host, "/api/state", {})[1]["settled"]:
                meanwhile.append(_ask(host, "/api/episodes", {"reward_min": "0.5"})[0])
                time.sleep(0.2)
            indexed = time.perf_counter() - started
            filters = {}
            for name, params in FILTERS.items():
                before = _processor(server.pid)
                asked = [_ask(host, "/api/episodes", params) for _ in range(repeats)]
                mean = (_processor(server.pid) - before) / repeats
                times = sorted(time_ for time_, _ in asked)
                filters[name] = {
                    "median": statistics.median(times),
                    "worst": times[-1],
                    "processor": mean,
                    "pass": asked[0][1]["total"],
                }
            key = _ask(host, "/api/episodes", {})[1]["rows"][0]["key"]
            opened = statistics.median(_ask(host, "/api/episode", {"key": key})[0] for _ in range(repeats))
            status = pathlib.Path(f"/proc/{server.pid}/status").read_text()
        finally:
            server.terminate()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    worst = max(meanwhile, default=0.0)
    return {
        "filters": filters,
        "open": opened,
        "index_seconds": indexed,
        "while_indexing": worst,
        "peak_mib": peak / 1024,
    }


def _processor(process: int) -> float:
    """Milliseconds of processor time that it has taken."""
    fields = pathlib.Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return _TICK * (int(fields[11]) + int(fields[12]))


def _ask(host: str, path: str, params: dict[str, str]) -> tuple[float, Any]:
    """Milliseconds until the whole reply has arrived, and its content."""
    started = time.perf_counter()
    connection = http.client.HTTPConnection(host, timeout=60)
    connection.request("GET", f"{path}?{urllib.parse.urlencode(params)}")
    content = connection.getresponse().read()
    took = 1000 * (time.perf_counter() - started)
    connection.close()
    return took, json.loads(content)


def table(result: dict[str, Any]) -> str:
    """The table of benchmarks/README.md."""
    lines = ["| filter | pass | processor, ms | ms, median | ms, worst |", "|---|---:|---:|---:|---:|"]
    for name, times in result["filters"].items():
        numbers = " | ".join(f"{times[key]:.0f}" for key in ("processor", "median", "worst"))
        lines.append(f"| {name} | {times['pass']:,} | {numbers} |")
    lines += [
        f"| opening an episode | 1 | | {result['open']:.0f} | |",
        f"| reward at least 0.5, while the index is filled | | | | {result['while_indexing']:.0f} |",
        "",
        f"{result['episodes']:,} episodes, {result['bytes'] / 1e6:.0f} MB of records, indexed in "
        f"{result['index_seconds']:.0f} s; the server's memory at most {result['peak_mib']:.0f} MiB. {result['machine']}.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
