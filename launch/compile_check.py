r"""Compiles a configuration's programs for a TPU slice, without a TPU, and says whether they fit its memory.

python -m launch.compile_check --config=configs/r1_searcher_qwen25_7b.py --topology=v5e:16x16
python -m launch.compile_check --config=configs/r1_searcher_qwen25_7b.py --topology=v5p:4x4x4 --json

Weights are not needed. For a model that is not on this machine, its published architecture is used (models/published.py).
The exit status is 1 if a program does not fit. Needs the libtpu wheel: pip install -e ".[compile_check]"
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # uses no TPU, even if there is one; several processes may load libtpu to compile
    os.environ.update(JAX_PLATFORMS="cpu", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from absl import flags
from ml_collections import config_flags

from launch.command import read_config, start

if TYPE_CHECKING:
    from routerl_jax.training.compile_check import Report

FLAGS = flags.FLAGS


def define_flags() -> None:
    config_flags.DEFINE_config_file("config", None, "Configuration file, e.g. configs/r1_searcher_qwen25_7b.py.")
    flags.DEFINE_string("topology", "v5e:16x16", "TPU slice: generation and shape in chips.")
    flags.DEFINE_list(
        "programs", ["update", "encode", "prefill", "decode"], "Which to compile (encode: of models that see)."
    )
    flags.DEFINE_bool("json", False, "Print one JSON object instead of a table.")
    flags.mark_flag_as_required("config")


def main(_: Sequence[str]) -> None:
    config = read_config()
    from routerl_jax.training.compile_check import check

    report = check(config, FLAGS.topology, FLAGS.programs)
    print(json.dumps(dataclasses.asdict(report), indent=2) if FLAGS.json else table(report))
    if not report.fits:
        sys.exit(1)


def table(report: Report) -> str:
    """Markdown: a line per program, then kernels, collectives and problems."""
    mesh = " x ".join(f"{axis}={size}" for axis, size in report.mesh.items())
    lines = [
        f"{report.topology}: {report.devices} devices ({report.device}), {mesh}, {report.hbm_gib} GiB of HBM each",
        "",
        "| GiB per chip | total | arguments | outputs | temporaries | code | kept meanwhile | fits | compiled in |",
        "|---|---:|---:|---:|---:|---:|---:|---|---:|",
    ]
    for name, program in report.programs.items():
        sizes = [
            program.hbm_gib_per_chip,
            program.arguments_gib,
            program.outputs_gib,
            program.temporaries_gib,
            program.code_gib,
            program.resident_gib,
        ]
        cells = " | ".join(f"{size:.2f}" for size in sizes)
        lines.append(f"| {name} | {cells} | {'yes' if program.fits else 'NO'} | {program.compile_s:.0f} s |")
    lines.append("")
    for name, program in report.programs.items():
        kernels = ", ".join(f"{kernel} x {count}" for kernel, count in program.kernels.items()) or "none"
        collectives = ", ".join(f"{kind} x {count}" for kind, count in program.collectives.items()) or "none"
        lines.append(f"{name}: kernels {kernels}; collectives {collectives}")
        lines += [f"ERROR: {problem}" for problem in program.problems]
    return "\n".join(lines)


if __name__ == "__main__":
    start(main, define_flags)
