r"""Trains a policy, by reinforcement learning or on demonstrations, as the configuration says.

python -m launch.train --config=configs/quickstart.py --workdir=runs/quickstart
python -m launch.train --config=configs/quickstart.py --workdir=runs/longer --config.steps=300 --config.seed=1
python -m launch.train --config=configs/quickstart.py --workdir=runs/quickstart --resume
python -m launch.train --config=configs/quickstart.py --show
"""

from __future__ import annotations

from routerl_jax.parallel.platform import split_cpu, tune_process

if __name__ == "__main__":
    tune_process()  # before anything heavy is imported: it restarts Python

import os
import pathlib
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from launch.command import check_writable, read_config, start
from launch.command import run_schemas as schemas
from routerl_jax.core.buckets import in_bucket, url_of
from routerl_jax.core.stopping import Interrupted

FLAGS = flags.FLAGS


class _Resume(flags.BooleanFlag):
    """--resume, or --resume=auto."""

    def __init__(self) -> None:
        about = "Continue the run in --workdir from its newest checkpoint; =auto begins one where there is none."
        super().__init__("resume", False, about)
        self.parser = _ResumeParser()


class _ResumeParser(flags.BooleanParser):
    def parse(self, argument: Any) -> Any:
        return argument if argument == "auto" else super().parse(argument)


def define_flags() -> None:
    config_flags.DEFINE_config_file("config", None, "Configuration file, e.g. configs/quickstart.py.")
    flags.DEFINE_string("workdir", None, "Directory of the run: checkpoints, metrics, figures, results.")
    flags.DEFINE_bool("show", False, "Print the whole configuration, what differs from the defaults marked, and end.")
    flags.DEFINE_bool("distributed", False, "Join the job's other processes (TPU pod, Slurm, or JAX_* variables).")
    flags.DEFINE_flag(_Resume())
    flags.mark_flag_as_required("config")
    flags.register_multi_flags_validator(
        ["workdir", "show"],
        lambda values: values["workdir"] is not None or values["show"],
        message="give --workdir, the directory of the run; or --show",
    )


def main(_: Sequence[str]) -> None:
    config = read_config()
    if FLAGS.show:
        from launch.configuration import print_settings

        print_settings(config)
        return
    if config.chat_model.model:
        raise ValueError(
            f"config.chat_model.model={config.chat_model.model!r}: a chat model behind an endpoint can't be trained; it is for "
            "launch.evaluate and launch.ask"
        )
    check_writable("--workdir", FLAGS.workdir)
    split_cpu(config.mesh.cpu_devices)
    from routerl_jax.parallel import multihost

    workdir = pathlib.Path(FLAGS.workdir)
    if FLAGS.distributed:
        multihost.initialize(config.mesh.peer_timeout, lambda: f"The run is {_how_to_go_on(workdir)}")
    from routerl_jax.training.checks import check_resumable
    from routerl_jax.training.rl import train_rl
    from routerl_jax.training.sft import train_sft
    from routerl_jax.training.watch import RunStopped

    if FLAGS.resume is True:
        multihost.on_main(lambda: check_resumable(workdir))
    train = train_sft if config.kind == "sft" else train_rl
    # SIGTERM is as Ctrl-C. In a job of several processes JAX would take it for itself
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        train(config, workdir, resume=bool(FLAGS.resume))
    except RunStopped as stopped:
        sys.exit(f"launch.train: {stopped}")
    except KeyboardInterrupt as interrupt:
        if multihost.is_main():
            print(f"launch.train: {_how_to_go_on(workdir)}", file=sys.stderr)
        if FLAGS.distributed and not isinstance(interrupt, Interrupted):
            os._exit(130)  # the others go on, and JAX would wait for them
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _how_to_go_on(workdir: pathlib.Path) -> str:
    """The message of an interrupted run: its newest checkpoint (warm start and controls included) and how to resume."""
    arguments = [
        argument for argument in sys.argv[1:] if argument.lstrip("-") not in ("resume", "resume=true", "resume=auto")
    ]
    go_on = f"Go on with: python -m launch.train {shlex.join([*arguments, '--resume=auto'])}"
    if in_bucket(address := url_of(workdir)):
        return f"interrupted; its checkpoints are in {address}. {go_on}"
    patterns = ("checkpoints/*", "warm_start/checkpoints/*", "controls/*/checkpoints/*")
    checkpoints = [path for pattern in patterns for path in workdir.glob(pattern) if path.name.isdecimal()]
    newest = max(checkpoints, key=lambda path: path.stat().st_mtime, default=None)
    state = (
        "interrupted before the first checkpoint"
        if newest is None
        else f"interrupted; the newest checkpoint is {newest}"
    )
    return f"{state}. {go_on}"


if __name__ == "__main__":
    start(main, define_flags, schemas)
