"""The passages that come with questions (HotpotQA's contexts, MuSiQue's paragraphs, ...) as one corpus."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from routerl_jax.core.types import Passage
from routerl_jax.data.formats.known import read_passages, split_name
from routerl_jax.data.hub import on_this_machine


@dataclasses.dataclass
class PoolCounts:
    """Counts of a pool: rows read, occurrences of passages in them, and distinct passages."""

    rows: int = 0
    occurrences: int = 0
    passages: int = 0


def pool_passages(names: Sequence[str], counts: PoolCounts | None = None) -> Iterator[Passage]:
    """The distinct passages of question files, gold ones and distractors, in the order in which they first occur.

    Passages with equal title and text are the same. The id of a passage is the one that the questions' `supporting` names
    (`data.formats.format.passage_id`). Questions without an answer, which training leaves out, contribute passages too.

    Args:
      names: `FILE` or `FORMAT:FILE`, as in `data.readers.open_dataset`.
      counts: filled in while reading, if given.

    Raises:
      ValueError: while reading: a row can't be used, or the rows of a file have no passages.
    """
    counts = counts or PoolCounts()
    seen_ids: set[str] = set()
    for name in names:
        form, path = split_name(on_this_machine(name))
        before = counts.occurrences
        for _, passages in read_passages(path, form):
            counts.rows += 1
            for passage in passages:
                counts.occurrences += 1
                if passage.id not in seen_ids and passage.text.strip():
                    seen_ids.add(passage.id)
                    counts.passages += 1
                    yield passage
        if counts.occurrences == before:
            raise ValueError(
                f"{path}: no row brings passages along (HotpotQA and 2WikiMultihopQA call them 'context', MuSiQue and HippoRAG "
                f"'paragraphs'). Name the format, as in hotpotqa:{path}, or leave the file out"
            )
