r"""Builds a knowledge base from a corpus or from tables: passages, their embeddings and an index, in one directory.

    python -m launch.build_kb --config=configs/build_kb.py --workdir=kb/hotpotqa --config.corpus=corpus.jsonl.gz
    python -m launch.build_kb --config=configs/build_kb.py:dense_table --workdir=kb/tables --config.corpus=tables.jsonl.gz

With --distributed, every process of a job runs the same command (TPU pod, Slurm, or JAX_* variables) in a directory that
all of them see. After a kill, run the same command again: it continues from what was saved.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Sequence

from absl import flags
from ml_collections import config_flags

from launch.command import check_writable, read_config_as, read_config_dict, start

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines this program's flags."""
    config_flags.DEFINE_config_file("config", None, "What to build: configs/build_kb.py; keys as --config.key=value.")
    flags.DEFINE_string("workdir", None, "Directory of the knowledge base to be made.", required=True)
    flags.DEFINE_bool("distributed", False, "Share the embedding with the job's other processes (dense kinds only).")
    flags.DEFINE_bool("json", False, "Print the report as one JSON object.")
    flags.mark_flag_as_required("config")


def schemas() -> dict[str, type]:
    """The classes of configurations that --config may name, by their description."""
    from routerl_jax.knowledge.builds import KB_BUILDERS

    classes: dict[type, list[str]] = {}  # some kinds have a configuration in common
    for name in KB_BUILDERS:
        classes.setdefault(KB_BUILDERS.get(name).config, []).append(name)
    return {f"A knowledge base of kind {' or '.join(names)}": config for config, names in classes.items()}


def main(_: Sequence[str]) -> None:
    from routerl_jax.knowledge.builds import KB_BUILDERS, write_card
    from routerl_jax.parallel import multihost

    builder = KB_BUILDERS.get(str(read_config_dict().get("kind", "dense_text")))
    config, options = read_config_as(builder.config), {}
    if FLAGS.distributed:
        if "together" not in inspect.signature(builder.build).parameters:
            raise ValueError(f"--distributed: knowledge bases of kind {config.kind!r} are built by one process")
        multihost.initialize()
        options = {"together": True}
    check_writable("--workdir", FLAGS.workdir)
    report = builder.build(config, FLAGS.workdir, progress=True, **options)
    if not FLAGS.distributed or multihost.is_main():
        write_card(FLAGS.workdir)
    print(json.dumps(dataclasses.asdict(report)) if FLAGS.json else report)


if __name__ == "__main__":
    start(main, define_flags, schemas)
