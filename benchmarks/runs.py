"""Training runs in separate processes. A run that was interrupted is resumed."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

from routerl_jax.core.files import read_json

# Instruction sets that XLA may use on a CPU. AVX has no fused multiply-add: exp, tanh and norms round otherwise, as they do on
# another machine. "native" leaves all of the machine's.
NATIVE = "native"


def train(config: str, workdir: pathlib.Path, *, seed: int, isa: str = NATIVE, flags: Sequence[str] = ()) -> None:
    """Runs `launch.train` to the end, or resumes it. Does nothing if the run is finished.

    Args:
      config: as for --config, such as configs/quickstart.py.
      isa: "native", or the highest instruction set (XLA's --xla_cpu_max_isa), such as AVX.
      flags: other flags, such as config.steps=60.

    Raises:
      subprocess.CalledProcessError: the run failed.
    """
    if unfinished(workdir) is None:
        return
    command = [
        *(sys.executable, "-m", "launch.train", f"--config={config}", f"--workdir={workdir}", f"--config.seed={seed}"),
        *(f"--{flag}" for flag in flags),
        "--resume=auto",
    ]
    environment = dict(os.environ)
    if isa != NATIVE:
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} --xla_cpu_max_isa={isa}".strip()
    subprocess.run(command, check=True, env=environment)


def unfinished(workdir: pathlib.Path, controls: bool = True) -> str | None:
    """The reason why a run is not finished, with its controls or without; None if it is finished."""
    if not (workdir / "results.json").is_file():
        return "results.json is missing"
    results = read_json(workdir / "results.json", "remove it, and the run's last part is done again")
    config = json.loads((workdir / "config.json").read_text())
    if "stopped" in results:
        return results["stopped"]["message"]
    needed = config.get("controls", {}) if controls else {}
    missing = [name for name in needed if name not in results.get("agents", {})]
    return f"its control {missing[0]!r} has not run to its end" if missing else None
