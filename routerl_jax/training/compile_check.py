"""What a run's programs need on a TPU slice that isn't here: memory, kernels and collectives, from the TPU compiler.

The programs are the learner's and the engine's own, lowered from shapes: no weights, no TPU.
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

PROGRAMS = ("update", "encode", "prefill", "decode")  # encode: of models that see
_GIB = 2**30
_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """One compiled program, per chip; memory in GiB."""

    hbm_gib_per_chip: float  # all below together: what must be free for it to run
    arguments_gib: float = 0.0
    outputs_gib: float = 0.0  # those that do not take an argument's place
    temporaries_gib: float = 0.0
    code_gib: float = 0.0
    resident_gib: float = 0.0  # what the run keeps meanwhile for its other programs
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
    hbm_gib: float  # that programs can use on a chip
    programs: Mapping[str, ProgramReport]


def check(config: TrainConfig, topology: str, programs: Collection[str] = PROGRAMS) -> Report:
    """Compiles a run's programs (or some of them) for a slice such as `v5e:16x16`.

    Sizes are the largest that the run can meet: full rows, every conversation at `engine.max_length`.

    Raises:
      ValueError: an unknown slice, model or program, a mesh that the slice can't form, or a run that trains an adapter.
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
    """The run's policy as `build_policy` places it, as shapes with shardings; its architecture may be a published one's."""
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
    homes = shardings(params, mesh, config.mesh.layout)

    def place(leaf: jax.ShapeDtypeStruct, home: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=home)

    nnx.update(model, jax.tree.map(place, params, homes))
    return model


def _lower(config: TrainConfig, model: Decoder, mesh: Mesh) -> tuple[dict[str, jax.stages.Lowered], dict[str, int]]:
    """Programs by name, and how many bytes per chip the run keeps beside each one's arguments.

    Stages that learn otherwise than the first one have an update of their own, `update/STAGE`.
    """
    settings, rl = config.learner, config.kind == "rl"
    optimizer = settings.optimizer.build(max(config.steps * settings.minibatches, 1))
    params = nnx.state(model)
    trainable = trained_parameters(model, config.model.freeze)
    _, trained, frozen = nnx.split(model, trainable, ...)
    state = abstract_state(trained, optimizer, mesh)
    stages = [config.in_stage(name) for name in config.stages] if rl else [config]
    kept = _bytes(trained) if rl and any(_has_reference(stage) for stage in stages) else 0
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
        beside[name] = 0 if exact is not None else kept  # an argument of the update is weighed with it
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
    learner = _bytes(state) + _bytes(frozen) + kept - (0 if copied else _bytes(params))  # shared with the engine
    beside |= dict.fromkeys(("encode", "prefill", "decode"), learner)
    beside["encode"] += _bytes(cache)
    return lowered, beside  # the engine rests during the update


def _updates(config: TrainConfig) -> dict[str, TrainConfig]:
    """The different updates of a run, and settings with which each is: the first stage's, and those that are unlike it."""
    if config.kind != "rl":
        return {"update": config}
    found: dict[str, TrainConfig] = {}
    for name in sorted(config.stages, key=lambda name: (bool(config.stages[name].after), config.stages[name].start)):
        stage = config.in_stage(name)
        if not any(_compiled(stage) == _compiled(other) for other in found.values()):
            found[f"update/{name}" if found else "update"] = stage
    return found


def _compiled(stage: TrainConfig) -> tuple[Any, ...]:
    """What an update's program depends on, of what stages may change."""
    return stage.learner.loss, stage.rollout.temperature, _sequences(stage)


def _sequences(stage: TrainConfig) -> int:
    """Sequences of an update."""
    if stage.kind != "rl":
        return stage.warm_start.examples
    ways = len(stage.knowledge) ** stage.rollout.forks
    return -(-stage.rollout.examples * stage.rollout.samples * ways // stage.learner.minibatches)


def _has_reference(stage: TrainConfig) -> bool:
    return bool(stage.learner.loss.kl_coef or stage.learner.reward_kl_coef)


def _bytes(tree: Any) -> int:
    """What one device holds of abstract arrays with shardings."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _compile(
    name: str, lowered: jax.stages.Lowered, resident: float, available: float, weights: set[tuple[int, ...]]
) -> ProgramReport:
    """Compiles and weighs one program. `weights`: what a gathered weight would look like; empty where that is as it should."""
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
    """Custom kernels in compiled text, by name: how many calls."""
    lines = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    names = [re.sub(r"[.\d]+$", "", line.split(" = ")[0].split()[-1].lstrip("%")) for line in lines]
    return {name: names.count(name) for name in sorted(set(names))}


def _results(text: str, kind: str) -> list[tuple[int, ...]]:
    """Shapes of what the collectives of a kind give, asynchronous ones too; a combined one counts once for each array."""
    found = []
    for match in re.finditer(rf" = (\S.*?) {kind}(-start)?\(", text):
        shapes = re.findall(r"\w+\[([\d,]*)\]", match.group(1))
        if match.group(2):  # the operands come first
            shapes = shapes[len(shapes) // 2 :]
        found += [tuple(int(size) for size in shape.split(",") if size) for shape in shapes]
    return found


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size > 1))


def _weight_shapes(model: Decoder, mesh: Mesh) -> set[tuple[int, ...]]:
    """Sorted shapes that the matrices can have when some axes are gathered, stacked or by layer, heads merged or apart."""
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
    ways = mesh.shape["tensor"]
    found = {tuple(sorted(size for size in sizes if size > 1))}
    for i, size in enumerate(sizes):
        if size % ways == 0:
            found.add(_squeezed((*sizes[:i], size // ways, *sizes[i + 1 :])))
    return found
