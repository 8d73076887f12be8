"""A build that kills itself: `python -m tests.knowledge.killed_build DIR LOG STAGE`, run by test_writer.

Every embedded text goes to LOG. STAGE says where `kill -9` strikes: `embed` (in the middle of the fourth shard), `index`
(all shards done, index not), `piece` (like `embed`, when every piece of a shard is saved at once), or `none`.
"""

import os
import pathlib
import signal
import sys
from collections.abc import Sequence

import numpy as np

from routerl_jax.knowledge import scann_index, writer
from routerl_jax.knowledge.build import BuildConfig, build_from_passages
from tests.knowledge.helpers import HashEncoder, make_passages

COUNT, SHARD, KILLED_AT = 200, 32, 3 * 32 + 10


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class LoggingEncoder(HashEncoder):
    """Writes down what it embeds, one text at a time, and may die of it."""

    def __init__(self, log: pathlib.Path, stage: str) -> None:
        super().__init__()
        self.log, self.stage, self.done = log, stage, 0

    def embed(self, texts: Sequence[str], *, prefix: str | None = None, batch_size: int = 32) -> np.ndarray:
        if texts == ["width"]:
            return super().embed(texts)
        with self.log.open("a", encoding="utf-8") as file:
            for text in texts:
                if self.stage in ("embed", "piece") and self.done == KILLED_AT:
                    file.flush()
                    die()
                file.write(text.splitlines()[0] + "\n")
                self.done += 1
        return super().embed(texts)


def build(directory: pathlib.Path, log: pathlib.Path, stage: str) -> None:
    if stage == "index":
        scann_index.ScannIndex.save = lambda *_: die()  # type: ignore[method-assign]
    if stage == "piece":
        writer.SAVE_SECONDS = 0.0
    build_from_passages(
        make_passages(COUNT),
        BuildConfig(name="kb", shard_size=SHARD),
        directory,
        progress=False,
        encoder=LoggingEncoder(log, stage),
    )


if __name__ == "__main__":
    build(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3])
