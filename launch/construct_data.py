r"""Makes golden trajectories for R1-Router: a language model works on questions step by step, and what ends right is kept.

    python -m launch.construct_data --config=configs/r1_router_data.py --workdir=data/golden \
        --config.data=2wiki.json,open_wikitable.jsonl --config.llm.model=NAME --config.llm.base_url=http://host:8000/v1

Questions of data sets that say how they are answered need no model: `--config.teacher=annotations` (docs/data.md).

Leaves train.jsonl and validation.jsonl (`trajectories:FILE` trains on them), report.md, report.json, and questions.jsonl with
every attempt. The same command run again after a kill goes on where it was; no finished question is asked again.
"""

from __future__ import annotations

from routerl_jax.parallel.platform import tune_process

if __name__ == "__main__":
    tune_process()

import json
import pathlib
from collections.abc import Sequence

from absl import flags
from ml_collections import config_flags

from launch.command import check_writable, read_config_as, start

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines this program's flags."""
    config_flags.DEFINE_config_file(
        "config", None, "Configuration: configs/r1_router_data.py; keys as --config.key=value."
    )
    flags.DEFINE_string("workdir", None, "Directory of the job.", required=True)
    flags.DEFINE_bool("overwrite", False, "Throw away the job of other settings that is in --workdir.")
    flags.DEFINE_bool("json", False, "Print the report as one JSON object.")
    flags.mark_flag_as_required("config")


def main(_: Sequence[str]) -> None:
    from routerl_jax.curation.golden import construct
    from routerl_jax.curation.golden_config import ConstructConfig
    from routerl_jax.llms.load import chat_model
    from routerl_jax.training.knowledge import open_knowledge_bases

    config = read_config_as(ConstructConfig)
    check_writable("--workdir", FLAGS.workdir)
    report = construct(
        config,
        pathlib.Path(FLAGS.workdir),
        lambda: (
            chat_model(config.llm) if config.teacher == "model" else None,
            open_knowledge_bases(config.knowledge),
        ),
        overwrite=FLAGS.overwrite,
    )
    print(json.dumps(report.record()) if FLAGS.json else report)


if __name__ == "__main__":
    start(main, define_flags)
