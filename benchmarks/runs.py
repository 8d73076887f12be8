"""Training runs as processes of their own, each gone on with where it was left."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

# Instruction sets that XLA may use on a CPU. AVX has no fused multiply-add: exp, tanh and norms round otherwise, as they do on
# another machine. "native" leaves all of the machine's.
NATIVE = "native"


def train(config: str, workdir: pathlib.Path, *, seed: int, isa: str = NATIVE, flags: Sequence[str] = ()) -> None:
    """`launch.train` to the end; nothing where results.json is there.

    Args:
      config: as for --config, such as configs/quickstart.py.
      isa: "native", or the highest instruction set (XLA's --xla_cpu_max_isa), such as AVX.
      flags: other flags, such as config.steps=60.

    Raises:
      subprocess.CalledProcessError: the run failed.
    """
    if (workdir / "results.json").is_file():
        return
    command = [
        *(sys.executable, "-m", "launch.train", f"--config={config}", f"--workdir={workdir}", f"--config.seed={seed}"),
        *(f"--{flag}" for flag in flags),
    ]
    if (workdir / "config.json").is_file():
        command.append("--resume")
    environment = dict(os.environ)
    if isa != NATIVE:
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} --xla_cpu_max_isa={isa}".strip()
    subprocess.run(command, check=True, env=environment)
