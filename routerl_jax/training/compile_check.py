"""The memory, kernels and collectives of a run's programs on a TPU slice, from the TPU compiler and without a TPU.

The programs are those of the learner and the engine, lowered from shapes, so no weights are needed.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
import tempfile
import time
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from routerl_jax.generation.kinds import cache_kind
from routerl_jax.generation.lowering import lower_programs
from routerl_jax.generation.weights import WeightCopier
from routerl_jax.learning.batch import BatchLayout
from routerl_jax.learning.learner import trained_parameters
from routerl_jax.learning.objective import LossConfig
from routerl_jax.learning.programs import abstract_state, jit_programs
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.family import FAMILIES
from routerl_jax.models.published import architecture_of
from routerl_jax.parallel.mesh import batch_shards, make_mesh
from routerl_jax.parallel.sharding import shardings
from routerl_jax.parallel.topology import hbm_gib, topology_devices
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.setup import random_architecture

PROGRAMS = ("update", "encode", "prefill", "decode")  # encode: only for models that see images
_GIB = 2**30
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """One compiled program, per chip; memory in GiB."""

    hbm_gib_per_chip: float  # sum of all below: the memory that must be free to run it
    arguments_gib: float = 0.0
    outputs_gib: float = 0.0  # outputs that do not reuse an argument's memory
    temporaries_gib: float = 0.0
    code_gib: float = 0.0
    resident_gib: float = 0.0  # memory that the run keeps meanwhile for its other programs
    fits: bool = True
    compile_s: float = 0.0
    kernels: Mapping[str, int] = dataclasses.field(default_factory=dict)  # custom kernels in the compiled text
    collectives: Mapping[str, int] = dataclasses.field(default_factory=dict)
    problems: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """All programs of a run on a slice."""

    fits: bool
    topology: str
    device: str
    devices: int
    mesh: Mapping[str, int]
    hbm_gib: float  # memory of a chip that programs can use
    programs: Mapping[str, ProgramReport]


def check(config: TrainConfig, topology: str, programs: Collection[str] = PROGRAMS) -> Report:
    """Compiles a run's programs (or some of them) for a slice such as `v5e:16x16`.

    Sizes are the largest that the run can meet: full rows, every conversation at `engine.max_length`.

    Raises:
      ValueError: the slice, the model or a program is unknown, the slice can't form the mesh, or the run trains an adapter.
    """
    if config.model.lora.rank:
        raise ValueError(
            "config.model.lora: runs that train an adapter can't be checked yet; with config.model.lora.rank=0 the check "
            "says what training all weights takes, which is more"
        )
    unknown = set(programs) - set(PROGRAMS)
    if unknown or not programs:
        raise ValueError(f"--programs={','.join(programs)}: choose some of {', '.join(PROGRAMS)}")
    devices = topology_devices(topology)
    mesh = make_mesh({"data": config.mesh.data, "fsdp": config.mesh.fsdp, "tensor": config.mesh.tensor}, devices)
    available = hbm_gib(devices[0])
    model = abstract_policy(config, mesh)
    lowered, resident = _lower(config, model, mesh)
    reports = {}
    for name in [name for name in lowered if name.split("/")[0] in programs]:
        weights = set() if name.startswith("update") else _weight_shapes(model, mesh)
        reports[name] = _compile(name, lowered[name], resident[name] / _GIB, available, weights)
    return Report(
        fits=all(program.fits for program in reports.values()),
        topology=topology,
        device=devices[0].device_kind,
        devices=len(devices),
        mesh=dict(mesh.shape),
        hbm_gib=available,
        programs=reports,
    )


def abstract_policy(config: TrainConfig, mesh: Mesh) -> Decoder:
    """The run's policy as shapes with the shardings of `build_policy`. A published architecture may replace missing files."""
    architecture = architecture_of(config.model.path) if config.model.path else random_architecture(config.model)
    family = FAMILIES.get(architecture.model_type)
    if family.role != "decoder":
        raise ValueError(f"config.model.path={config.model.path!r} is an encoder; a policy must be a decoder")
    dtypes = {
        "param_dtype": jnp.dtype(config.model.dtype),
        "compute_dtype": jnp.dtype(config.model.compute_dtype or config.model.dtype),
    }
    model = nnx.eval_shape(lambda: family.create(architecture, jax.random.key(0), **dtypes))
    params = nnx.state(model, nnx.Param)
    placements = shardings(params, mesh, config.mesh.layout)

    def place(leaf: jax.ShapeDtypeStruct, home: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=home)

    nnx.update(model, jax.tree.map(place, params, placements))
    return model


def _lower(config: TrainConfig, model: Decoder, mesh: Mesh) -> tuple[dict[str, jax.stages.Lowered], dict[str, int]]:
    """Programs by name, and the bytes per chip that the run keeps besides each program's arguments.

    A stage whose update differs from that of the first stage has its own program, `update/STAGE`.
    """
    settings, rl = config.learner, config.kind == "rl"
    optimizer = settings.optimizer.build(max(config.steps * settings.minibatches, 1))
    params = nnx.state(model)
    trainable = trained_parameters(model, config.model.freeze)
    _, trained, frozen = nnx.split(model, trainable, ...)
    state = abstract_state(trained, optimizer, mesh)
    stages = [config.in_stage(name) for name in config.stages] if rl else [config]
    reference_bytes = _bytes(trained) if rl and any(_has_reference(stage) for stage in stages) else 0
    layout = BatchLayout(
        mesh,
        settings.length_buckets or (config.engine.max_length,),
        settings.micro_tokens,
        model,
        share=settings.share_prefixes,
    )
    lowered, beside = {}, {}
    for name, stage in _updates(config).items():
        loss = stage.learner.loss if rl else LossConfig(kind="reinforce")
        jitted = jit_programs(
            model,
            trainable,
            jax.tree.map(lambda leaf: leaf.sharding, state),
            layout,
            optimizer,
            loss,
            temperature=stage.rollout.temperature or 1.0,
            remat=settings.remat,
        )
        batch = layout.abstract(_sequences(stage), config.engine.max_length)
        exact = trained if loss.exact_kl else None
        lowered[name] = jitted.update.lower(state=state, frozen=frozen, reference=exact, batch=batch)
        beside[name] = 0 if exact is not None else reference_bytes  # a reference that is an argument is counted there
    if not rl:
        return lowered, beside
    engine = config.engine
    lowered |= lower_programs(
        model,
        mesh,
        rows=engine.rows,
        max_length=engine.max_length,
        segment=engine.segment,
        layout=engine.layout,
        truncate=any(stage.rollout.top_p < 1 or stage.rollout.top_k > 0 for stage in stages),
    )
    copied = 0
    if engine.layout:
        copied = _bytes(WeightCopier(mesh, engine.layout, model.compute_dtype).abstract(params))
    shards = batch_shards(mesh)
    cache = cache_kind(model.config, mesh, model.compute_dtype).abstract(
        model.config, mesh, shards, -(-engine.rows // shards), engine.max_length, model.compute_dtype
    )
    learner = (
        _bytes(state) + _bytes(frozen) + reference_bytes - (0 if copied else _bytes(params))
    )  # shared with the engine
    beside |= dict.fromkeys(("encode", "prefill", "decode"), learner)
    beside["encode"] += _bytes(cache)
    return lowered, beside  # the engine rests during the update


def _updates(config: TrainConfig) -> dict[str, TrainConfig]:
    """Settings of the run's different updates, by name: that of the first stage, and those that differ from it."""
    if config.kind != "rl":
        return {"update": config}
    updates: dict[str, TrainConfig] = {}
    for name in sorted(config.stages, key=lambda name: (bool(config.stages[name].after), config.stages[name].start)):
        stage = config.in_stage(name)
        if not any(_compiled(stage) == _compiled(update) for update in updates.values()):
            updates[f"update/{name}" if updates else "update"] = stage
    return updates


def _compiled(stage: TrainConfig) -> tuple[Any, ...]:
    """The settings that stages may change and on which an update's program depends."""
    return stage.learner.loss, stage.rollout.temperature, _sequences(stage)


def _sequences(stage: TrainConfig) -> int:
    """Sequences of an update."""
    if stage.kind != "rl":
        return stage.warm_start.examples
    branches = len(stage.knowledge) ** stage.rollout.forks
    return -(-stage.rollout.examples * stage.rollout.samples * branches // stage.learner.minibatches)


def _has_reference(stage: TrainConfig) -> bool:
    return bool(stage.learner.loss.kl_coef or stage.learner.reward_kl_coef)


def _bytes(tree: Any) -> int:
    """Bytes of abstract arrays with shardings on one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _compile(
    name: str, lowered: jax.stages.Lowered, resident: float, available: float, weights: set[tuple[int, ...]]
) -> ProgramReport:
    """Compiles one program and measures it. `weights`: shapes of gathered weights to report; empty if gathering is expected."""
    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as dump:
            compiled = lowered.compile(compiler_options={"xla_dump_to": dump, "xla_dump_hlo_as_text": True})
            text = _text(compiled, pathlib.Path(dump))
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
    gathered = sorted({shape for shape in _results(text, "all-gather") if _squeezed(shape) in weights})
    problems += [f"{name} gathers a weight of shape {list(shape)} from other chips" for shape in gathered]
    return ProgramReport(
        hbm_gib_per_chip=total,
        fits=total <= available,
        compile_s=seconds,
        kernels=_kernels(text),
        collectives={kind: len(_results(text, kind)) for kind in _COLLECTIVES if _results(text, kind)},
        problems=tuple(problems),
        **parts,
    )


def _text(compiled: jax.stages.Compiled, dump: pathlib.Path) -> str:
    """The compiled program, from libtpu's own dump: jaxlib can't read all of it (asynchronous collectives on v5p)."""
    files = sorted(dump.glob("*.after_codegen.txt"), key=lambda path: path.stat().st_size)
    if files:
        return files[-1].read_text()
    text = compiled.as_text()
    assert text is not None
    return text


def _kernels(text: str) -> dict[str, int]:
    """Number of calls of each custom kernel in compiled text, by name."""
    lines = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    names = [re.sub(r"[.\d]+$", "", line.split(" = ")[0].split()[-1].lstrip("%")) for line in lines]
    return {name: names.count(name) for name in sorted(set(names))}


def _results(text: str, kind: str) -> list[tuple[int, ...]]:
    """Shapes of the results of all collectives of a kind, asynchronous ones too. A combined one gives one shape per array."""
    results = []
    for match in re.finditer(rf" = (\S.*?) {kind}(-start)?\(", text):
        shapes = re.findall(r"\w+\[([\d,]*)\]", match.group(1))
        if match.group(2):  # the operands come first
            shapes = shapes[len(shapes) // 2 :]
        results += [tuple(int(size) for size in shape.split(",") if size) for shape in shapes]
    return results


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
