r"""Compiles a configuration's programs for a TPU slice, without a TPU: says whether they fit, and how fast they can be.

python -m launch.compile_check --config=configs/r1_searcher_qwen25_7b.py --topology=v5e:16x16
python -m launch.compile_check --config=configs/r1_searcher_qwen25_7b.py --topology=v5p:4x4x4 --json
python -m launch.compile_check --config=configs/r1_searcher_qwen25_7b.py --topology=v5e:16x16 --search

Weights are not needed. For a model that is not on this machine, its published architecture is used (models/published.py).
The exit status is 1 if a program does not fit. Needs the libtpu wheel: pip install -e ".[compile_check]"
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # uses no TPU, even if there is one; several processes may load libtpu to compile
    os.environ.update(JAX_PLATFORMS="cpu", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags
from ml_collections import config_flags

from launch.command import read_config, start
from launch.command import run_schemas as schemas

if TYPE_CHECKING:
    from routerl_jax.extras.compile_check.check import Choice, ProgramReport, Report

FLAGS = flags.FLAGS


def define_flags() -> None:
    config_flags.DEFINE_config_file("config", None, "Configuration file, e.g. configs/r1_searcher_qwen25_7b.py.")
    flags.DEFINE_string("topology", "v5e:16x16", "TPU slice: generation and shape in chips.")
    flags.DEFINE_list(
        "programs",
        ["update", "reference", "merge", "copy", "encode", "prefill", "decode"],
        "Which to compile, of those that the run has.",
    )
    flags.DEFINE_bool("search", False, "Compile other meshes, micro-batches and rows as well, and print which is best.")
    flags.DEFINE_bool("json", False, "Print one JSON object instead of a table.")
    flags.mark_flag_as_required("config")


def main(_: Sequence[str]) -> None:
    config = read_config()
    from routerl_jax.extras.compile_check.check import check

    if FLAGS.search:
        from routerl_jax.extras.compile_check.check import compiler, search

        ranked = search(config, FLAGS.topology)
        if FLAGS.json:
            print(as_json([dataclasses.asdict(choice) for choice in ranked]))
        else:
            print(f"compiled by {compiler()}\n\n{choices(ranked)}")
        if ranked[0].step_s is None:
            sys.exit(1)
        return
    report = check(config, FLAGS.topology, FLAGS.programs)
    print(as_json(dataclasses.asdict(report)) if FLAGS.json else table(report))
    if not report.fits:
        sys.exit(1)


def as_json(value: Any) -> str:
    """JSON in which a number that is not finite, such as the size of a program that does not compile, is null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(report: Report) -> str:
    """Markdown: memory, time at best, then kernels, collectives, hints and problems."""
    mesh = _sizes(report.mesh)
    if report.engine_mesh != report.mesh:
        mesh = f"learner {mesh}, engine {_sizes(report.engine_mesh)}"
    lines = [
        f"{report.topology}: {report.devices} devices ({report.device}), {mesh}, {report.hbm_gib} GiB of HBM each",
        f"compiled by {report.compiler}",
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
    lines += ["", *_at_best(report), ""]
    for name, program in report.programs.items():
        kernels = ", ".join(f"{kernel} x {count}" for kernel, count in program.kernels.items()) or "none"
        lines.append(f"{name}: kernels {kernels}; collectives {_collectives(program)}")
        if (roofline := program.roofline) is not None:
            lines.append(f"  {roofline.bound} binds: {roofline.hint}")
            if roofline.uncounted:
                lines.append(f"  FLOPs not counted of {', '.join(roofline.uncounted)}")
        lines += [f"ERROR: {problem}" for problem in program.problems]
    return "\n".join(lines)


def _sizes(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in mesh.items())


def choices(results: Sequence[Choice]) -> str:
    """Markdown: the layouts that were tried, the best first, and the settings of the best."""
    lines = [
        "| mesh (data x fsdp x tensor) | micro_tokens | rows | a step, at best | its updates | decoded tokens/s | GiB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for choice in results:
        row = f"| {choice.data} x {choice.fsdp} x {choice.tensor} | {choice.micro_tokens:,} | {choice.rows:,} "
        if choice.step_s is None:
            lines.append(f"{row}| does not fit | | | {choice.gib:.2f} |")
        else:
            lines.append(
                f"{row}| {choice.step_s:.2f} s | {choice.update_s:.2f} s | {choice.tokens_per_s:,.0f} | {choice.gib:.2f} |"
            )
    return "\n".join([*lines, "", f"best: {results[0].flags()}" if results[0].step_s is not None else "nothing fits"])


def _at_best(report: Report) -> list[str]:
    """The least time of a call of each program; nothing if the chip's peaks are unknown."""
    lines = []
    for name, program in report.programs.items():
        if (roofline := program.roofline) is None:
            continue
        if not lines:
            lines = [
                f"| a call, at best ({roofline.chip}) | ms | products | memory | network (exposed) | TFLOP | GB | binds | MFU "
                "| HBM |",
                "|---|---:|---:|---:|---:|---:|---:|---|---:|---:|",
            ]
        seconds = [roofline.seconds, roofline.compute_s, roofline.memory_s]
        cells = " | ".join(f"{1000 * second:.2f}" for second in seconds)
        network = f"{1000 * roofline.network_s:.2f} ({1000 * roofline.exposed_s:.2f})"
        lines.append(
            f"| {name} | {cells} | {network} | {roofline.flops / 1e12:.3f} | {roofline.hbm_bytes / 1e9:.2f} | {roofline.bound} "
            f"| {roofline.mfu:.0%} | {roofline.hbm_share:.0%} |"
        )
    for program in report.programs.values():
        roofline = program.roofline
        if roofline is not None and roofline.token_s is not None:
            lines += [
                "",
                f"a decoded token of every row: {1000 * roofline.token_s:.3f} ms, {roofline.tokens_per_s:,.0f} tokens/s of the "
                f"slice; it moves {program.moved_over_least:.2f} times the chip's weights and cache, with every row full",
            ]
    return lines


def _collectives(program: ProgramReport) -> str:
    if program.roofline is None:
        return ", ".join(f"{kind} x {count}" for kind, count in program.collectives.items()) or "none"
    return (
        ", ".join(
            f"{kind} x {traffic.count:g} ({traffic.bytes / 1e6:.1f} MB, {1000 * traffic.seconds:.2f} ms, "
            f"{1000 * traffic.hidden_s:.2f} hidden)"
            for kind, traffic in program.roofline.traffic.items()
        )
        or "none"
    )


if __name__ == "__main__":
    start(main, define_flags, schemas)
