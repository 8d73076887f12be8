"""One of two processes that build a knowledge base together: python -m tests.knowledge.two_builders CORPUS DIRECTORY FAILING.

FAILING is the number of the process whose encoder breaks, or -1. Prints one JSON line: what this process embedded, and
what it was told.
"""

import dataclasses
import json
import sys

import jax

from routerl_jax.knowledge.build import BuildConfig, build_kb
from routerl_jax.parallel import multihost
from tests.knowledge.helpers import HashEncoder


class Broken(HashEncoder):
    """Refuses everything but what asks for its width."""

    def embed(self, texts, *, prefix=None, batch_size=32):
        if texts != ["width"]:
            raise OSError("the device is gone")
        return super().embed(texts)


def main() -> None:
    corpus, directory, failing = sys.argv[1], sys.argv[2], int(sys.argv[3])
    multihost.initialize()
    encoder = Broken() if failing == jax.process_index() else HashEncoder()
    config = BuildConfig(corpus=corpus, name="kb", shard_size=32)
    try:
        report = build_kb(config, directory, progress=False, encoder=encoder, together=True)
        result = {"report": dataclasses.asdict(report)}
    except (ValueError, OSError) as error:
        result = {"error": str(error)}
    embedded = [text.split("\n")[0] for text in encoder.seen if text != "width"]
    print(json.dumps({**result, "embedded": embedded}), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
