"""All device programs of a run, lowered from shapes, without weights or a cache, for devices that need not be attached."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from routerl_jax.core.config import naming
from routerl_jax.engine import programs
from routerl_jax.engine.cache import CacheKind, Qtype
from routerl_jax.engine.device_calls import cache_kind
from routerl_jax.engine.images import MOST_PATCHES
from routerl_jax.engine.rows import PrefillShapes, most_rows
from routerl_jax.engine.stops import STATE_BUCKET
from routerl_jax.engine.weights import WeightCopier
from routerl_jax.learning.batch import BatchLayout
from routerl_jax.learning.learner import abstract_state, jit_programs, trained_parameters
from routerl_jax.learning.losses import LossConfig
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.experts import own_share
from routerl_jax.models.family import FAMILIES
from routerl_jax.models.lora import adapters, apply_lora, lower_merge, merged
from routerl_jax.models.patches import abstract_images
from routerl_jax.models.projection import MODULES
from routerl_jax.models.published import architecture_of
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.models.work import Work
from routerl_jax.parallel.mesh import batch_sharding, batch_shards, replicated
from routerl_jax.parallel.sharding import shardings
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.setup import engine_layout, random_architecture

# --- the engine's programs ---


FED_TOKENS = 512  # of a row in one call of the prefill that is lowered


def fed_at_once(
    model: Decoder,
    mesh: Mesh,
    rows: int,
    max_length: int,
    *,
    prompt_tokens: int = FED_TOKENS,
    cache: CacheKind = "auto",
    cache_qtype: Qtype = "",
) -> tuple[int, int]:
    """The entries of a shard, and the tokens of an entry, in the largest prefill call of an engine with `rows` rows.

    Args:
      prompt_tokens: tokens of the rows that are fed, if an entry may have as many.
    """
    kind = cache_kind(model.config, mesh, model.compute_dtype, cache, cache_qtype)
    per_shard = -(-rows // batch_shards(mesh))
    shapes = PrefillShapes.of(per_shard, max_length, mesh, chunked=kind.takes_chunks(mesh))
    steps = min(prompt_tokens, shapes.steps[-1])
    return most_rows(shapes.sizes, steps), steps


def lower_programs(
    model: Decoder,
    mesh: Mesh,
    *,
    rows: int,
    max_length: int,
    segment: int,
    layout: str = "tensor",
    prompt_rows: int | None = None,
    prompt_tokens: int = FED_TOKENS,
    truncate: bool = False,
    drafts: int = 0,
    cache: CacheKind = "auto",
    weight_qtype: Qtype = "",
    cache_qtype: Qtype = "",
) -> dict[str, jax.stages.Lowered]:
    """Lowers the programs of an `Engine` with these settings under full load: every row is full and decoding.

    Args:
      model: the policy; shapes are enough: `nnx.eval_shape(lambda: Decoder(config, jax.random.key(0), ...))`.
      mesh: may consist of the devices of a topology (jax.experimental.topologies), which need not exist.
      rows, max_length, segment, layout, drafts, cache, weight_qtype, cache_qtype: see Engine. Without a layout, the model's
        shapes must have shardings.
      prompt_rows: entries of a shard in the prefill call, at most one of each row; None: as many as the engine's largest has.
      prompt_tokens: tokens of an entry, at most max_length, and a chunk if the engine feeds chunks.
      truncate: whether some rows sample with top-p or top-k.

    Returns:
      `prefill` and `decode`, and for a vision model `encode` with the largest number of patches per call. `.compile()` gives
      text, memory and cost.
    """
    config, dtype = model.config, model.compute_dtype
    copier, params = WeightCopier(model, mesh, layout, dtype, weight_qtype), nnx.state(model)
    if layout:
        params = copier.abstract(params)
    shards = batch_shards(mesh)
    per_shard = -(-rows // shards)
    kind = cache_kind(config, mesh, dtype, cache, cache_qtype)
    stored = kind.abstract(config, mesh, shards, per_shard, max_length + drafts, dtype, cache_qtype)
    unsplit = replicated(mesh)

    def host(shape: tuple[int, ...], dtype: Any = jnp.int32, sharding: NamedSharding = unsplit) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    jitted = programs.jit_programs(copier.graph, mesh, stored)
    options = {"prompt_tokens": prompt_tokens, "cache": cache, "cache_qtype": cache_qtype}
    entries, steps = fed_at_once(model, mesh, rows, max_length, **options)
    entry_shape = (shards, entries if prompt_rows is None else min(prompt_rows, per_shard))
    fed = (*entry_shape, steps)
    image_inputs: dict[str, Any] = {}
    lowered = {}
    if isinstance(model, VisionLanguageModel):
        vision = model.vl_config.vision
        images = abstract_images((shards,), MOST_PATCHES, vision, dtype, batch_sharding(mesh))
        lowered["encode"] = jitted.encode.lower(params=params, images=images)
        deep = (1 + len(vision.deep_layers),) if vision.deep_layers else ()
        features = (shards, MOST_PATCHES // vision.group, *deep, config.embed)
        image_inputs = {"image_values": host(features, dtype, batch_sharding(mesh)), "image_index": host(fed)}
    lowered["prefill"] = jitted.extend.lower(
        params=params,
        cache=stored,
        rows=host(entry_shape),
        starts=host(entry_shape),
        tokens=host(fed),
        positions=host((*fed, 3) if image_inputs else fed),
        counts=host(entry_shape),
        **image_inputs,
        span=max_length,
    )
    every = (shards, per_shard)
    table = (STATE_BUCKET, config.vocab_size)
    lowered["decode"] = jitted.decode.lower(
        params=params,
        layers=None if jitted.layers is None else jitted.layers.eval_shape(params),
        cache=stored,
        inputs=programs.DecodeInputs(
            rows=host(every),
            starts=host(every),
            offsets=host(every),
            tokens=host(every),
            limits=host(every),
            states=host(every),
            stop_masks=host(every, jnp.uint32),
            identity=host((*every, 3), jnp.uint32),
            temperature=host(every, jnp.float32),
            top_p=host(every, jnp.float32),
            top_k=host(every),
            history=host((*every, max_length + 1 + segment)) if drafts else None,
        ),
        transition=host(table),
        hits=host(table, jnp.uint32),
        seed=host(()),
        leave_at=host(()),
        steps=segment,
        span=max_length,
        truncate=truncate,
        drafts=drafts,
    )
    return lowered


# --- all programs of a run ---


# reference: its log-probabilities; merge: an adapter into its base; copy: the learner's weights to the engine; encode: images
PROGRAMS = ("update", "reference", "merge", "copy", "encode", "prefill", "decode")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A lowered program, at the largest sizes that the run can have.

    Attributes:
      mesh: its devices.
      resident: bytes that a device keeps meanwhile for the run's other programs.
      trips: iterations of loops whose number is an argument: the micro-batches of an update.
      grouped: share of the rows of grouped products that are in a group (hlo_costs.count).
      useful: FLOPs that the work needs on one device; None: those that the program has.
      decoded: for the program that decodes: steps of a call, and rows of all devices.
      least_bytes: the least that a device moves in a call that decodes: its weights and its cache, once a step.
      moves_weights: the program is meant to move weights between devices.
    """

    lowered: jax.stages.Lowered
    mesh: Mesh
    resident: int = 0
    trips: int = 1
    grouped: float = 1.0
    useful: float | None = None
    decoded: tuple[int, int] | None = None
    least_bytes: float | None = None
    moves_weights: bool = False


def abstract_policy(config: TrainConfig, mesh: Mesh) -> Decoder:
    """The run's policy as shapes, with the shardings of `build_policy`. A published architecture may replace missing files."""
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

    def sharded(leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    nnx.update(model, jax.tree.map(sharded, params, placements))
    if config.model.lora.rank:
        with naming("config.model.lora"):
            apply_lora(model, config.model.lora.build(), jax.random.key(0), config.model.lora.dtype)
    return model


def run_programs(config: TrainConfig, mesh: Mesh, engine: Mesh) -> tuple[Decoder, dict[str, Program]]:
    """The run's policy as shapes, and its programs by name.

    A stage whose update differs from the first stage's has its own program, `update/STAGE`. A run has `reference` if it scores
    a reference apart from the update, `merge` if an adapter is merged for the engine, `copy` if the engine has weights of its
    own, and `encode` if the model sees images.

    Args:
      mesh: the learner's devices.
      engine: the engine's devices (`setup.engine_mesh`).

    Raises:
      ValueError: settings that no model or layout can have.
    """
    model = abstract_policy(config, mesh)
    learner = _Learner(config, model, mesh)
    programs = learner.programs()
    return model, programs | (_generation(config, model, mesh, engine, learner) if config.kind == "rl" else {})


class _Learner:
    """The learner's programs, and the bytes that it holds on a device."""

    def __init__(self, config: TrainConfig, model: Decoder, mesh: Mesh) -> None:
        self._config, self._model, self._mesh = config, model, mesh
        settings, self._rl = config.learner, config.kind == "rl"
        self._optimizer = settings.optimizer.build(max(config.steps * settings.updates, 1))
        _, self._trained, self._frozen = nnx.split(model, trained_parameters(model, config.model.freeze), ...)
        self._state = abstract_state(self._trained, self._optimizer, mesh)
        self.stages = [config.in_stage(name) for name in config.stages] if self._rl else [config]
        self._reference_bytes = (
            bytes_per_device(self._trained) if self._rl and any(map(_has_reference, self.stages)) else 0
        )
        self._layout = BatchLayout(
            mesh,
            settings.length_buckets or (config.engine.max_length,),
            settings.micro_tokens,
            model,
            share=settings.share_prefixes,
            replay=settings.replay_routing,
        )
        self.holds = bytes_per_device(self._state) + bytes_per_device(self._frozen) + self._reference_bytes

    @property
    def moments(self) -> int:
        """Bytes of the optimiser's moments and of the reference."""
        return bytes_per_device(self._state.opt_state) + self._reference_bytes

    def programs(self) -> dict[str, Program]:
        length, programs = self._config.engine.max_length, {}
        for name, stage in _updates(self._config).items():
            loss = stage.learner.loss if self._rl else LossConfig(kind="reinforce")
            jitted = jit_programs(
                self._model,
                jax.tree.map(lambda leaf: leaf.sharding, self._state),
                self._layout,
                self._optimizer,
                loss,
                temperature=stage.rollout.temperature or 1.0,
                remat=self._config.learner.remat,
            )
            sequences = _sequences(stage)
            batch = self._layout.abstract(sequences, length)
            exact = self._trained if loss.exact_kl else None
            trips = self._layout.micro_batches(sequences, length)
            programs[name] = Program(
                lowered=jitted.update.lower(state=self._state, frozen=self._frozen, reference=exact, batch=batch),
                mesh=self._mesh,
                resident=0 if exact is not None else self._reference_bytes,  # an argument is counted as such
                trips=trips,
                grouped=own_share(self._model.config.experts, self._mesh),
                useful=self._useful(sequences, length)
                + (self._useful(sequences, length, forward=True) if exact is not None else 0),
                moves_weights=True,
            )
            if self._rl and "reference" not in programs and _has_reference(stage) and exact is None:
                programs["reference"] = Program(
                    lowered=jitted.logprobs.lower(self._trained, self._frozen, batch),
                    mesh=self._mesh,
                    resident=bytes_per_device(self._state),
                    trips=trips,
                    grouped=own_share(self._model.config.experts, self._mesh),
                    useful=self._useful(sequences, length, forward=True),
                    moves_weights=True,
                )
        return programs

    def _useful(self, sequences: int, length: int, *, forward: bool = False) -> float:
        """FLOPs of a mini-batch, per device. For a vision model, half of the tokens are image tokens, which its tower reads."""
        work, lengths = Work(config=self._model.config), [length] * sequences
        trained = bool(adapters(self._model))
        flops = work.forward_flops(lengths) if forward else work.update_flops(lengths, adapter=trained)
        if isinstance(self._model, VisionLanguageModel):
            tower = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(self._model.visual, nnx.Param)))
            patches = sequences * length / 2 * self._model.vl_config.vision.group
            still = forward or trained or "visual" in self._config.model.freeze
            flops += (2 if still else 6) * tower * patches
        return flops / self._mesh.size


def _generation(
    config: TrainConfig, model: Decoder, learner_mesh: Mesh, mesh: Mesh, learner: _Learner
) -> dict[str, Program]:
    """The engine's programs, on `mesh`, and those that make its weights, on the learner's mesh.

    On the same devices, the engine holds nothing during the update. On others, the learner's state takes nothing from it.
    """
    engine, params, programs = config.engine, nnx.state(model), {}
    layout, apart = engine_layout(config), bool(config.mesh.engine)
    served = merged(model, model.compute_dtype) if engine.lora == "merged" else model
    merge = lower_merge(params, model.compute_dtype) if engine.lora == "merged" else None
    if merge is not None:
        programs["merge"] = Program(
            lowered=merge,
            mesh=learner_mesh,
            resident=learner.moments + bytes_per_device(_unmerged(model)),
            moves_weights=True,
        )
    served_params = nnx.state(served)
    copier = WeightCopier(served, mesh, layout, model.compute_dtype, engine.weight_qtype)
    copy = copier.lower(served_params)
    if copy is not None:
        resident = learner.holds if merge is not None else learner.moments
        programs["copy"] = Program(lowered=copy, mesh=learner_mesh, resident=resident, moves_weights=True)
    lowered = lower_programs(
        served,
        mesh,
        rows=engine.rows,
        max_length=engine.max_length,
        segment=engine.segment,
        layout=layout,
        drafts=engine.drafts,
        cache=engine.cache,
        truncate=any(stage.rollout.top_p < 1 or stage.rollout.top_k > 0 for stage in learner.stages),
        weight_qtype=engine.weight_qtype,
        cache_qtype=engine.cache_qtype,
    )
    own = copy is not None or merge is not None
    shards = batch_shards(mesh)
    per_shard = -(-engine.rows // shards)
    kind = cache_kind(model.config, mesh, model.compute_dtype, engine.cache, engine.cache_qtype)
    cache = bytes_per_device(
        kind.abstract(
            model.config,
            mesh,
            shards,
            per_shard,
            engine.max_length + engine.drafts,
            model.compute_dtype,
            engine.cache_qtype,
        )
    )
    # weights that the engine shares are its arguments
    beside = 0 if apart else learner.holds - (0 if own else bytes_per_device(params))
    work = Work(config=model.config)
    entries, steps = fed_at_once(
        model, mesh, engine.rows, engine.max_length, cache=engine.cache, cache_qtype=engine.cache_qtype
    )
    fed = shards * entries
    useful = {
        "prefill": work.prefill_flops(fed, steps, engine.max_length) / mesh.size,
        "decode": engine.segment * work.decode_flops(engine.rows, engine.max_length) / mesh.size,
    }
    weights = copier.abstract(served_params) if layout else served_params
    least = engine.segment * (bytes_per_device(_read_by_decode(weights, served)) + cache)
    for name, program in lowered.items():
        programs[name] = Program(
            lowered=program,
            mesh=mesh,
            resident=beside + (cache if name == "encode" else 0),
            grouped=own_share(model.config.experts, mesh),
            useful=useful.get(name),
            decoded=(engine.segment, engine.rows) if name == "decode" else None,
            least_bytes=least if name == "decode" else None,
        )
    return programs


def _unmerged(model: Decoder) -> nnx.State:
    """The weights that a merge does not read."""
    read = {name for name in MODULES if name in adapters(model) or hasattr(model.blocks, f"{name}_scale")}
    parts = {("blocks", name + suffix) for name in read for suffix in ("", "_scale", "_lora_a", "_lora_b")}
    return nnx.from_flat_state(
        [(path, leaf) for path, leaf in nnx.to_flat_state(nnx.state(model)) if path not in parts]
    )


def _read_by_decode(params: nnx.State, model: Decoder) -> nnx.State:
    """Weights that every step reads whole: all but the vision tower and an embedding that is only looked up. All experts count,
    though few rows take only some of them."""
    unread = {"visual"} | (set() if model.config.tied_embeddings else {"embedding"})
    return nnx.from_flat_state([(path, leaf) for path, leaf in nnx.to_flat_state(params) if path[0] not in unread])


def _updates(config: TrainConfig) -> dict[str, TrainConfig]:
    """Settings of the run's different updates, by name: that of the first stage, and those that differ from it."""
    if config.kind != "rl":
        return {"update": config}
    configs: dict[str, TrainConfig] = {}
    for name in sorted(config.stages, key=lambda name: (bool(config.stages[name].after), config.stages[name].start)):
        stage = config.in_stage(name)
        if not any(_compiled(stage) == _compiled(other) for other in configs.values()):
            configs[f"update/{name}" if configs else "update"] = stage
    return configs


def _compiled(stage: TrainConfig) -> tuple[Any, ...]:
    """The settings that stages may change and on which an update's program depends."""
    return stage.learner.loss, stage.rollout.temperature, _sequences(stage)


def sequences_of_step(config: TrainConfig) -> int:
    """Number of sequences of a step of a run, or of a stage."""
    if config.kind != "rl":
        return config.warm_start.examples
    return config.rollout.examples * config.rollout.samples * len(config.knowledge) ** config.rollout.forks


def _sequences(stage: TrainConfig) -> int:
    """Number of sequences of an update."""
    return -(-sequences_of_step(stage) // (stage.learner.minibatches if stage.kind == "rl" else 1))


def _has_reference(stage: TrainConfig) -> bool:
    return bool(stage.learner.loss.kl_coef or stage.learner.reward_kl_coef)


def bytes_per_device(tree: Any) -> int:
    """Bytes of abstract arrays with shardings on one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
