"""Work that kills itself: `python -m tests.knowledge.graph.killed WHAT DIR AT`, run by test_extraction and test_build.

    extract DIR AT    extracts 200 passages with a cache; dies at conversation AT (0: never)
    build DIR WHERE   builds DIR/kb with a chat model; dies while extracting, embedding facts, making the graph, or never:
                      "extract", "embed", "graph", "none"

What the chat model is asked goes to DIR/asked, what is embedded to DIR/embedded.
"""

import json
import os
import pathlib
import signal
import sys
from collections.abc import Sequence

import numpy as np

from routerl_jax.core.types import Message, Passage
from routerl_jax.knowledge.builds import BuildReport
from routerl_jax.knowledge.graph import build as build_module
from routerl_jax.knowledge.graph.build import GraphConfig, build_graph_from_passages
from routerl_jax.knowledge.graph.triples import ModelExtractor
from routerl_jax.services.cache import SqliteCache
from tests.knowledge.graph.helpers import Scripted
from tests.knowledge.helpers import HashEncoder, make_passages

PASSAGES = 200


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def model(directory: pathlib.Path, at: int) -> Scripted:
    count = 0

    def answer(messages: Sequence[Message]) -> str:
        nonlocal count
        count += 1
        if at and count > at:
            die()
        title = messages[-1].content.partition("\n")[0]
        with (directory / "asked").open("a") as file:
            file.write(title + "\n")
        number = int(title.split()[-1])
        return json.dumps({"triples": [[title, "is followed by", f"number {number + 1}"], ["number", "is", title]]})

    return Scripted(answer)


def extract(directory: pathlib.Path, at: int) -> None:
    cache = SqliteCache(directory / "cache.sqlite", max_bytes=None)
    ModelExtractor(model(directory, at), cache, entities_first=False).extract(make_passages(PASSAGES))


class Logging(HashEncoder):
    """Writes down what it embeds, and may die of the second shard of facts."""

    def __init__(self, directory: pathlib.Path, deadly: bool) -> None:
        super().__init__()
        self.directory, self.deadly, self.facts = directory, deadly, 0

    def embed(self, texts: Sequence[str], *, prefix: str | None = None, batch_size: int = 32) -> np.ndarray:
        self.facts += sum("is followed by" in text for text in texts)
        if self.deadly and self.facts > 32:
            die()
        with (self.directory / "embedded").open("a") as file:
            file.writelines(json.dumps(text) + "\n" for text in texts if text != "width")
        return super().embed(texts)


def build(directory: pathlib.Path, where: str) -> BuildReport:
    if where == "graph":
        build_module.make_graph = lambda *_: die()  # type: ignore[assignment]
    config = GraphConfig(extractor="llm", entities_first=False, shard_size=32, name="kb")
    llm = model(directory, 130 if where == "extract" else 0)
    encoder = Logging(directory, where == "embed")
    passages: list[Passage] = make_passages(PASSAGES)
    return build_graph_from_passages(passages, config, directory / "kb", progress=False, encoder=encoder, llm=llm)


if __name__ == "__main__":
    what, place, argument = sys.argv[1:]
    if what == "extract":
        extract(pathlib.Path(place), int(argument))
    else:
        build(pathlib.Path(place), argument)
