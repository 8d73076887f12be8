"""The memory, kernels, collectives and least time of a run's programs on a TPU slice, from the TPU compiler and without a TPU.

The programs are those of the learner and the engine. They are lowered from shapes, so no weights are needed.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
import tempfile
import time
from collections.abc import Collection, Mapping

import jax
from flax import nnx
from jax.sharding import Mesh

from routerl_jax.extras.compile_check.chips import chip_of, compiler, hbm_gib, topology_devices
from routerl_jax.extras.compile_check.hlo import Instruction, Module, parse
from routerl_jax.extras.compile_check.hlo_costs import count, kind_in, result_shapes
from routerl_jax.extras.compile_check.roofline import Estimate, estimate
from routerl_jax.extras.compile_check.run_programs import PROGRAMS, Program, run_programs
from routerl_jax.models.decoder import Decoder
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.setup import check_engine_devices, engine_mesh, learner_mesh

_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """One compiled program, per chip; memory in GiB."""

    hbm_gib_per_chip: float  # sum of the parts below: the memory that must be free to run it
    arguments_gib: float = 0.0
    outputs_gib: float = 0.0  # outputs that do not reuse an argument's memory
    temporaries_gib: float = 0.0
    code_gib: float = 0.0
    resident_gib: float = 0.0  # what the run keeps meanwhile for its other programs
    fits: bool = True
    compile_s: float = 0.0
    kernels: Mapping[str, int] = dataclasses.field(default_factory=dict)  # custom kernels in the compiled text
    collectives: Mapping[str, int] = dataclasses.field(default_factory=dict)  # in the text, loops not multiplied out
    roofline: Estimate | None = None  # None: the chip's peaks are unknown, or the program did not compile
    # for a program that decodes: bytes moved, over those of its weights and cache
    moved_over_least: float | None = None
    problems: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """All programs of a run on a slice."""

    fits: bool
    topology: str
    compiler: str  # versions of libtpu and JAX
    device: str
    devices: int
    mesh: Mapping[str, int]
    engine_mesh: Mapping[str, int]  # that of the learner, or of the engine's own devices
    hbm_gib: float  # memory of a chip that a program can use
    programs: Mapping[str, ProgramReport]


def check(config: TrainConfig, topology: str, programs: Collection[str] = PROGRAMS) -> Report:
    """Compiles a run's programs (or some of them) for a slice such as `v5e:16x16`.

    Sizes are the largest that the run can meet: full rows, every conversation at `engine.max_length`.

    An engine with devices of its own (`config.mesh.engine`) has the last ones of the slice, and the learner the others.

    Raises:
      ValueError: an unknown slice, model or program, or a mesh that the slice can't form.
    """
    unknown = set(programs) - set(PROGRAMS)
    if unknown or not programs:
        raise ValueError(f"--programs={','.join(programs)}: choose some of {', '.join(PROGRAMS)}")
    devices = topology_devices(topology)
    check_engine_devices(config.mesh, len(devices))
    mesh = learner_mesh(config.mesh, devices)
    engine = engine_mesh(config.mesh, mesh, devices)
    available = hbm_gib(devices[0])
    model, lowered = run_programs(config, mesh, engine)
    weights = _weight_shapes(model, mesh)
    reports = {
        name: _compile(name, program, available, set() if program.moves_weights else weights)
        for name, program in lowered.items()
        if name.split("/")[0] in programs
    }
    return Report(
        fits=all(program.fits for program in reports.values()),
        topology=topology,
        compiler=compiler(),
        device=devices[0].device_kind,
        devices=len(devices),
        mesh=dict(mesh.shape),
        engine_mesh=dict(engine.shape),
        hbm_gib=available,
        programs=reports,
    )


def _compile(name: str, program: Program, available: float, weights: set[tuple[int, ...]]) -> ProgramReport:
    """Compiles one program and measures it. `weights`: shapes of gathered weights to report; empty if gathering is expected."""
    started, resident = time.perf_counter(), program.resident / _GIB
    try:
        compiled, module = compile_for_tpu(program.lowered)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        sizes = re.search(r"([\d.]+)G(?:\)| of)", str(error))
        return ProgramReport(
            hbm_gib_per_chip=resident + (float(sizes.group(1)) if sizes else math.inf),
            resident_gib=resident,
            fits=False,
            compile_s=time.perf_counter() - started,
            problems=("the compiler runs out of memory: " + " ".join(str(error).split())[:200],),
        )
    seconds = time.perf_counter() - started
    memory = compiled.memory_analysis()
    assert memory is not None, "the TPU compiler knows"
    parts = {
        "arguments_gib": memory.argument_size_in_bytes / _GIB,
        "outputs_gib": (memory.output_size_in_bytes - memory.alias_size_in_bytes) / _GIB,
        "temporaries_gib": memory.temp_size_in_bytes / _GIB,
        "code_gib": memory.generated_code_size_in_bytes / _GIB,
        "resident_gib": resident,
    }
    total = sum(parts.values())
    problems = [f"{name} needs {total:.2f} GiB per chip of {available}"] if total > available else []
    collectives = _collectives(module)
    gathered = {
        shape
        for instruction in collectives.get("all-gather", [])
        for shape in result_shapes(instruction)
        if _squeezed(shape) in weights
    }
    problems += [f"{name} gathers a weight of shape {list(shape)} from other chips" for shape in sorted(gathered)]
    chip = chip_of(program.mesh.devices.flat[0])
    costs = count(module, trips=program.trips, grouped=program.grouped)
    return ProgramReport(
        hbm_gib_per_chip=total,
        fits=total <= available,
        compile_s=seconds,
        kernels=_kernels(module),
        collectives={kind: len(instructions) for kind, instructions in collectives.items()},
        roofline=None
        if chip is None
        else estimate(
            costs, chip, program.mesh, useful=program.useful, decoded=program.decoded, name=name.split("/")[0]
        ),
        moved_over_least=costs.bytes / program.least_bytes if program.least_bytes else None,
        problems=tuple(problems),
        **parts,
    )


def compile_for_tpu(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, Module]:
    """The compiled program, and its parsed text. Raises jax.errors.JaxRuntimeError if it does not fit."""
    with tempfile.TemporaryDirectory() as dump:
        compiled = lowered.compile(compiler_options={"xla_dump_to": dump, "xla_dump_hlo_as_text": True})
        return compiled, parse(_text(compiled, pathlib.Path(dump)))


def _text(compiled: jax.stages.Compiled, dump: pathlib.Path) -> str:
    """The compiled program, from libtpu's own dump: jaxlib can't read all of it (asynchronous collectives on v5p)."""
    files = sorted(dump.glob("*.after_codegen.txt"), key=lambda path: path.stat().st_size)
    if files:
        return files[-1].read_text()
    text = compiled.as_text()
    assert text is not None
    return text


def _kernels(module: Module) -> dict[str, int]:
    """Number of calls of each custom kernel in a compiled program, by name."""
    names = [
        re.sub(r"[.\d]+$", "", instruction.name)
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if instruction.attribute("custom_call_target") == '"tpu_custom_call"'
    ]
    return {name: names.count(name) for name in sorted(set(names))}


def _collectives(module: Module) -> dict[str, list[Instruction]]:
    """Collectives in a compiled program, by kind. One that a TPU does in steps is several times in the text, and here once."""
    by_kind: dict[str, dict[str, Instruction]] = {}
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            if kind := kind_in(computation, instruction):
                by_kind.setdefault(kind, {}).setdefault(
                    instruction.attribute("channel_id") or instruction.name, instruction
                )
    return {kind: list(by_kind[kind].values()) for kind in sorted(by_kind)}


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size > 1))


def _weight_shapes(model: Decoder, mesh: Mesh) -> set[tuple[int, ...]]:
    """Sorted shapes that the matrices can have when some axes are gathered: stacked or by layer, heads merged or separate."""
    shapes = set()
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        axes, shape = variable.get_metadata()["axes"], variable.get_value().shape
        sizes = list(zip(axes, shape))
        by_layer = [pair for pair in sizes if pair[0] != "layers"]
        for chosen in (sizes, by_layer):
            shapes |= _parts([size for _, size in chosen], mesh)
            if "head_dim" in axes:
                merged = math.prod(size for axis, size in chosen if axis in ("heads", "kv_heads", "head_dim"))
                rest = [size for axis, size in chosen if axis not in ("heads", "kv_heads", "head_dim")]
                shapes |= _parts([*rest, merged], mesh)
    smallest = min(model.config.embed, model.config.mlp)  # vectors and biases are no loss
    return {shape for shape in shapes if math.prod(shape) >= smallest * model.config.head_dim and len(shape) > 1}


def _parts(sizes: list[int], mesh: Mesh) -> set[tuple[int, ...]]:
    """Sorted shapes of an array with each axis whole, or split over `tensor`."""
    shards = mesh.shape["tensor"]
    shapes = {tuple(sorted(size for size in sizes if size > 1))}
    for i, size in enumerate(sizes):
        if size % shards == 0:
            shapes.add(_squeezed((*sizes[:i], size // shards, *sizes[i + 1 :])))
    return shapes
