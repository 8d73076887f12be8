"""A build of pages that kills itself: `python -m tests.knowledge.killed_pages DOCUMENTS DIR LOG STAGE`, run by test_pages.

Every page that is drawn or embedded goes to LOG. STAGE says where `kill -9` strikes: `draw` (at the seventh page), `embed` (in
the third shard), `pool`, or `none`.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import threading
from typing import Any
from unittest import mock

from routerl_jax.knowledge.pages import build
from routerl_jax.knowledge.pages.reading import Page, Reader
from tests.knowledge import late

COUNT, SHARD = 15, 4


def main(documents: str, directory: str, log: str, stage: str) -> None:
    model, done = late.model(), {"draw": 0, "embed": 0}
    embed, picture, lock = model.embed, Reader.picture, threading.Lock()

    def note(what: str, name: str, last: int) -> None:
        with lock:  # pages are drawn by several threads
            if stage == what and done[what] == last:
                os.kill(os.getpid(), signal.SIGKILL)
            with pathlib.Path(log).open("a", encoding="utf-8") as file:
                file.write(f"{what} {name}\n")
            done[what] += 1

    def noted_embed(inputs: Any, **options: Any) -> Any:
        for one in inputs:
            note("embed", pathlib.Path(one).name, 2 * SHARD + 1)
        return embed(inputs, **options)

    def noted_picture(self: Reader, page: Page) -> Any:
        found = picture(self, page)
        note("draw", page.id, 7)
        return found

    pool = (lambda *_: os.kill(os.getpid(), signal.SIGKILL)) if stage == "pool" else build.pool
    config = build.PagesConfig(corpus=documents, name="kb", shard_size=SHARD, index="exact", pooled=3)
    with (
        mock.patch.object(late.LateInteraction, "embed", lambda _, *inputs, **options: noted_embed(*inputs, **options)),
        mock.patch.object(Reader, "picture", noted_picture),
        mock.patch.object(build, "pool", pool),
    ):
        build.build_pages(config, directory, progress=False, encoder=model)


if __name__ == "__main__":
    main(*sys.argv[1:])
