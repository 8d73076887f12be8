"""The memory, kernels, collectives and least time of a run's programs on a TPU slice, from the TPU compiler and without a TPU.

The programs are those of the learner and the engine. They are lowered from shapes, so no weights are needed. A search for
a run's best mesh, micro-batches and rows compiles each choice, and estimates its least time.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib.metadata
import importlib.util
import math
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from absl import logging
from flax import nnx
from jax.sharding import Mesh

from routerl_jax.core.packages import install_hint
from routerl_jax.extras.compile_check.hlo import Instruction, Module, parse
from routerl_jax.extras.compile_check.hlo_costs import Costs, count, kind_in, result_shapes
from routerl_jax.extras.compile_check.roofline import CHIPS, Estimate, chip_of, estimate
from routerl_jax.extras.compile_check.run_programs import PROGRAMS, Program, run_programs, sequences_of_step
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.published import architecture_of
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.setup import check_engine_devices, engine_mesh, learner_mesh, random_architecture

_GIB = 2**30
# Bytes that decoding moves, over those of weights and cache. The shipped configurations move 1.0 to 1.1 times as many.
MOST_MOVED = 1.25


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
    moved = costs.bytes / program.least_bytes if program.least_bytes else None
    if moved is not None and moved > MOST_MOVED:
        problems.append(
            f"{name} moves {moved:.2f} times the chip's weights and cache, and should move at most {MOST_MOVED} times; most in "
            f"{_movers(module, costs)}. Try another config.mesh.tensor or config.engine.rows"
        )
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
        moved_over_least=moved,
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


def _movers(module: Module, costs: Costs) -> str:
    """The three instructions that move most, with their results."""
    results = {
        instruction.name: " ".join([instruction.name, *(f"{x.dtype}{list(x.dims)}" for x in instruction.shapes[:1])])
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
    }
    most = sorted(costs.operations, key=lambda one: one.bytes * one.times, reverse=True)[:3]
    return ", ".join(f"{results[one.name]} ({one.times:g} x {one.bytes / 1e6:,.1f} MB)" for one in most)


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


# --- slices that are not attached ---


# GiB that a program may use on one device of each kind: the available memory that the TPU compiler of libtpu 0.0.52 reports
# when a program does not fit. The chip has more, because the runtime keeps some. In a v4 topology, the two cores of a chip are
# separate devices with half of its memory each.
HBM_GIB = {
    "TPU v4": 15.25,
    "TPU v5 lite": 15.75,  # v5e
    "TPU v5": 95.73,  # v5p
    "TPU v6 lite": 31.24,  # v6e
    "TPU7x": 94.74,
}


def topology_devices(name: str) -> list[Any]:
    """The devices of a TPU slice, such as `v5e:16x16` or `v5p:4x4x4`, for compiling only.

    Set JAX_PLATFORMS=cpu before JAX starts where no TPU is attached.

    Raises:
      ValueError: there is no such slice, or libtpu is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(f"compiling for TPUs needs the libtpu wheel: run {install_hint('compile_check')}")
    # Without these, libtpu asks a cloud machine's metadata server for its location, and waits.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except Exception as error:  # jaxlib raises its own types, by version
        raise ValueError(
            f"--topology={name}: the TPU compiler knows no such slice ({error}); examples: v4:2x2x2, v5e:16x16, v5p:4x4x4, "
            f"v6e:16x16"
        ) from error


def compiler() -> str:
    """Which TPU compiler and JAX this Python has, for reports. Says so if a TPU install of this JAX has another compiler."""
    jax, libtpu = (importlib.metadata.version(package) for package in ("jax", "libtpu"))
    asked = re.search(r"libtpu==([\d.*]+)", " ".join(importlib.metadata.requires("jax") or ()))
    same = asked is None or fnmatch.fnmatch(f"{libtpu}.0", asked[1])
    other = "" if same or asked is None else f", with which a TPU install has libtpu {asked[1]}"
    return f"libtpu {libtpu}, jax {jax}{other}"


def hbm_gib(device: Any) -> float:
    """Memory of a device that programs can use, in GiB. Raises ValueError for a kind that is not in `HBM_GIB`."""
    if device.device_kind not in HBM_GIB:
        raise ValueError(f"memory of {device.device_kind!r} is unknown; known: {', '.join(HBM_GIB)}")
    return HBM_GIB[device.device_kind]


# --- the search for a layout ---


Check = Callable[[TrainConfig, str, Collection[str]], Report]

_ROWS_OF_A_SHARD = (1, 2, 4)  # of a micro-batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """Settings with their estimate. The times are None if a program does not fit.

    Attributes:
      update_s: all updates of a step.
      tokens_per_s: decoded tokens per second of the slice, with every row full.
      step_s: the updates and the decoding of all tokens that a step's sequences can have; the longer of the two if the engine
        has devices of its own (`config.mesh.engine`). Real sequences are shorter.
      gib: memory of the larger of the two programs, per chip.
    """

    data: int
    fsdp: int
    tensor: int
    micro_tokens: int
    rows: int
    update_s: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    gib: float = 0.0

    def flags(self) -> str:
        """The choice as flags of a launch program."""
        settings = {
            "mesh.data": self.data,
            "mesh.fsdp": self.fsdp,
            "mesh.tensor": self.tensor,
            "learner.micro_tokens": self.micro_tokens,
            "engine.rows": self.rows,
        }
        return " ".join(f"--config.{name}={value}" for name, value in settings.items())


def search(config: TrainConfig, topology: str, *, compile_and_weigh: Check = check) -> list[Choice]:
    """All choices, the best that fits first.

    `tensor` is every power of two that divides the query heads and the devices; all other devices are on `fsdp`. For each mesh
    the update is compiled with micro-batches of one, two and four rows per shard, and decoding with the configured rows and
    with as many rows as a step has sequences.

    Raises:
      ValueError: the run generates nothing, the slice's chip has no published peaks here, or `check` raises it.
    """
    if config.kind != "rl":
        raise ValueError(
            f"--search chooses for runs that generate and learn (kind='rl'); this one is of kind={config.kind!r}"
        )
    slice_devices = topology_devices(topology)
    if chip_of(slice_devices[0]) is None:
        kind = slice_devices[0].device_kind
        raise ValueError(f"--search estimates times, and the peaks of {kind!r} are unknown; known: {', '.join(CHIPS)}")
    check_engine_devices(config.mesh, len(slice_devices))
    devices = len(slice_devices) - config.mesh.engine
    architecture = architecture_of(config.model.path) if config.model.path else random_architecture(config.model)
    heads = getattr(architecture, "text", architecture).heads  # of a model that sees, its decoder's
    common = math.gcd(devices, config.mesh.engine, heads)
    tried: list[Choice] = []
    for tensor in [2**i for i in range(common.bit_length()) if common % 2**i == 0]:
        mesh = dataclasses.replace(config.mesh, data=1, fsdp=devices // tensor, tensor=tensor)
        run = dataclasses.replace(config, mesh=mesh)
        updates = {}
        for micro in _micro_batches(run):
            changed = dataclasses.replace(run, learner=dataclasses.replace(run.learner, micro_tokens=micro))
            updates[micro] = compile_and_weigh(changed, topology, ["update"]).programs["update"]
        decodes = {}
        shards = config.mesh.engine // tensor or devices // tensor
        for rows in sorted({-(-rows // shards) * shards for rows in (config.engine.rows, sequences_of_step(config))}):
            changed = dataclasses.replace(run, engine=dataclasses.replace(run.engine, rows=rows))
            decodes[rows] = compile_and_weigh(changed, topology, ["decode"]).programs["decode"]
        choices = [_choice(run, micro, rows, updates[micro], decodes[rows]) for micro in updates for rows in decodes]
        tried += choices
        best = min(choices, key=_sort_key)
        logging.info("tensor=%d: %s", tensor, best)
    return sorted(tried, key=_sort_key)


def _sort_key(choice: Choice) -> tuple[bool, float]:
    """Sort key: layouts that fit first, then the fastest."""
    return choice.step_s is None, choice.step_s or choice.gib


def _micro_batches(config: TrainConfig) -> list[int]:
    """Tokens of one, two and four of the longest rows per shard, if a mini-batch has so many sequences."""
    longest = max(config.learner.length_buckets or (config.engine.max_length,))
    shards = config.mesh.data * config.mesh.fsdp
    sequences = -(-sequences_of_step(config) // config.learner.minibatches)
    return [shards * longest * rows for rows in _ROWS_OF_A_SHARD if rows == 1 or shards * rows <= sequences]


def _choice(config: TrainConfig, micro: int, rows: int, update: ProgramReport, decode: ProgramReport) -> Choice:
    choice = Choice(
        data=config.mesh.data,
        fsdp=config.mesh.fsdp,
        tensor=config.mesh.tensor,
        micro_tokens=micro,
        rows=rows,
        gib=max(update.hbm_gib_per_chip, decode.hbm_gib_per_chip),
    )
    if not (update.fits and decode.fits) or update.roofline is None or decode.roofline is None:
        return choice
    updates, decoding = step_parts(config, update.roofline, decode.roofline)
    step = max(updates, decoding) if config.mesh.engine else updates + decoding
    return dataclasses.replace(choice, update_s=updates, tokens_per_s=decode.roofline.tokens_per_s, step_s=step)


def step_parts(config: TrainConfig, update: Estimate, decode: Estimate) -> tuple[float, float]:
    """Seconds of a step's updates, and of decoding all tokens that its sequences can have, by the estimates of a call."""
    assert decode.tokens_per_s is not None, "of a program that decodes"
    decoding = sequences_of_step(config) * config.engine.max_length / decode.tokens_per_s
    return update.seconds * config.learner.updates, decoding
