r"""Trains a policy, by reinforcement learning or on demonstrations, as the configuration says.

python -m launch.train --config=configs/quickstart.py --workdir=runs/quickstart
python -m launch.train --config=configs/quickstart.py --workdir=runs/longer --config.steps=300 --config.seed=1
python -m launch.train --config=configs/quickstart.py --workdir=runs/quickstart --resume
"""

from __future__ import annotations

from routerl_jax.parallel.platform import split_cpu, tune_process

if __name__ == "__main__":
    tune_process()  # before anything heavy is imported: it restarts Python

import pathlib
import sys
from collections.abc import Sequence

from absl import flags
from ml_collections import config_flags

from launch.command import read_config, start

FLAGS = flags.FLAGS


def define_flags() -> None:
    config_flags.DEFINE_config_file("config", None, "Configuration file, e.g. configs/quickstart.py.")
    flags.DEFINE_string("workdir", None, "Directory of the run: checkpoints, metrics, figures, results.", required=True)
    flags.DEFINE_bool("distributed", False, "Join the job's other processes (TPU pod, Slurm, or JAX_* variables).")
    flags.DEFINE_bool("resume", False, "Continue the run in --workdir from its newest checkpoint.")
    flags.mark_flag_as_required("config")


def main(_: Sequence[str]) -> None:
    config = read_config()
    split_cpu(config.mesh.cpu_devices)
    if FLAGS.distributed:
        from routerl_jax.parallel import multihost

        multihost.initialize()
    workdir = pathlib.Path(FLAGS.workdir)
    if config.kind == "sft":
        from routerl_jax.training.sft import train_sft

        train_sft(config, workdir, resume=FLAGS.resume)
    else:
        from routerl_jax.training.rl import train_rl
        from routerl_jax.training.watch import RunStopped

        try:
            train_rl(config, workdir, resume=FLAGS.resume)
        except RunStopped as stopped:
            sys.exit(f"launch.train: {stopped}")


if __name__ == "__main__":
    start(main, define_flags)
