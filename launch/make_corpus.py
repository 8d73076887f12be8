r"""Makes a corpus of the passages in files of questions: HotpotQA's and 2WikiMultihopQA's contexts, MuSiQue's paragraphs.

    python -m launch.make_corpus --questions=hotpot_dev_distractor_v1.json --output=corpus.jsonl.gz
    python -m launch.make_corpus --questions=hotpot.json,musique.jsonl --output=corpus.jsonl

The corpus has each distinct passage once, as a line `{id, title, text}`. The ids are those that the questions' `supporting`
names. The file appears only when it is complete.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib
from collections.abc import Iterable, Iterator, Sequence

from absl import flags

from launch.command import check_writable, start
from routerl_jax.core.files import atomic_file
from routerl_jax.core.progress import Bar
from routerl_jax.core.text import counted
from routerl_jax.core.types import Passage
from routerl_jax.data.formats.known import read_passages, split_name
from routerl_jax.data.hub import on_this_machine

FLAGS = flags.FLAGS


def define_flags() -> None:
    flags.DEFINE_list("questions", None, "Files of questions, FILE or FORMAT:FILE, with commas between.", required=True)
    flags.DEFINE_string("output", None, "The corpus: .jsonl or .jsonl.gz.", required=True)


def main(_: Sequence[str]) -> None:
    output = pathlib.Path(FLAGS.output)
    if not output.name.endswith((".jsonl", ".jsonl.gz")):
        raise ValueError(f"--output={output}: the name must end in .jsonl or .jsonl.gz")
    if output.exists():
        raise ValueError(f"--output={output} exists already; remove it, or give another name")
    check_writable("--output", output, file=True)
    counts = PoolCounts()
    passages = Bar(pool_passages(FLAGS.questions, counts), desc="pooling", unit="passage")
    write_corpus(output, passages)
    print(
        f"{output}: {counted(counts.passages, 'distinct passage')} of {counts.occurrences:,} that came with "
        f"{counted(counts.rows, 'question')}"
    )


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


def write_corpus(path: pathlib.Path, passages: Iterable[Passage]) -> None:
    """Writes passages to a file that appears only when it is complete."""
    with atomic_file(path, shared=True) as raw:
        # no time stamp and no name inside, so that the same passages give the same bytes
        file = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if path.suffix == ".gz" else raw
        for passage in passages:
            row = {"id": passage.id, "title": passage.title, "text": passage.text}
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        if file is not raw:
            file.close()


if __name__ == "__main__":
    start(main, define_flags)
