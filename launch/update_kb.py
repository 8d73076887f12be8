r"""Adds passages to a knowledge base, or deletes some. An update takes effect as a whole or not at all.

    python -m launch.update_kb --workdir=kb/hotpotqa --add=more.jsonl.gz
    python -m launch.update_kb --workdir=kb/hotpotqa --delete=ids.txt

With both, passages are deleted first, so ids that are in both files are replaced. --add takes the files that launch.build_kb
reads for this knowledge base (passages, or tables), and turns them into passages in the same manner. --delete takes a file with
one id per line. Once the changes exceed the share --compact_above of the knowledge base, it is built anew from its present
passages, and nothing is embedded twice.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence

from absl import flags

from launch.command import start

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines this program's flags."""
    flags.DEFINE_string("workdir", None, "Directory of the knowledge base.", required=True)
    flags.DEFINE_string("add", None, "Passages to add: a file or a directory of files.")
    flags.DEFINE_string("delete", None, "Ids of passages to delete: a text file, one per line.")
    flags.DEFINE_float("compact_above", 0.2, "Build a new main part above this share of changes; 0: at any rate.", 0.0)
    flags.DEFINE_bool("json", False, "Print the report as one JSON object.")


def main(_: Sequence[str]) -> None:
    from routerl_jax.knowledge.builds import write_card
    from routerl_jax.knowledge.update import read_added, update

    report = update(
        FLAGS.workdir,
        add=read_added(FLAGS.workdir, FLAGS.add) if FLAGS.add else (),
        delete=_ids(FLAGS.delete) if FLAGS.delete else (),
        compact_above=FLAGS.compact_above,
        progress=True,
    )
    write_card(FLAGS.workdir)
    print(json.dumps(dataclasses.asdict(report)) if FLAGS.json else report)


def _ids(path: str) -> list[str]:
    try:
        lines = pathlib.Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--delete={path}: {error}. Give a UTF-8 text file with an id on each line") from error
    return [line.strip() for line in lines if line.strip()]


if __name__ == "__main__":
    start(main, define_flags)
