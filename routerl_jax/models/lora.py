"""Low-rank adapters (LoRA, arXiv 2106.09685) on a decoder, also on a quantised one (QLoRA, arXiv 2305.14314).

    apply_lora(model, LoraConfig(rank=16, alpha=32, base_qtype="nf4").build(), jax.random.key(0))   # in place
    plain = merged(model)                                                                           # W + alpha / rank * A B

projection.py computes with adapters. In a model with an adapter, only the adapter is trained (learning/learner.py).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from routerl_jax.core.config import Count, NonNegative, Positive, checked
from routerl_jax.models import projection
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.projection import MODULES, QTYPES, Scales
from routerl_jax.parallel.sharding import bit_sums

if TYPE_CHECKING:
    import qwix

# PEFT's initial distribution of A: uniform within 1 / sqrt(inputs).
_INIT_A = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


M = TypeVar("M", bound=nnx.Module)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class LoraRule:
    """Another rank or alpha for some modules."""

    modules: str  # regular expression over q, k, v, o, gate, up, down
    rank: Count = 0  # 0: as LoraConfig.rank
    alpha: NonNegative = 0.0  # 0: as LoraConfig.alpha


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class LoraConfig:
    """A low-rank adapter; all other weights are frozen.

    Raises:
      ValueError: settings that contradict each other, an unknown type, a broken regular expression.
    """

    rank: Count = 0  # 0: no adapter, all weights are trained
    alpha: Positive = 16.0  # the adapter counts alpha / rank
    # regular expression: which matrices of a block get one; empty: those of rules
    modules: str = "q|k|v|o|gate|up|down"
    # exceptions, by any name; the first match is used
    rules: Mapping[str, LoraRule] = dataclasses.field(default_factory=dict)
    dtype: str = "float32"  # dtype of the adapter and its optimiser state
    base_qtype: str = ""  # quantise the blocks' frozen matrices: int8, int4, nf4; empty: as config.model.dtype
    tile_size: Count = 64  # quantisation: input channels that share a scale; 0: all

    def __post_init__(self) -> None:
        if not self.rank and (self.rules or self.base_qtype):
            named = "rules" if self.rules else "base_qtype"
            raise ValueError(f"{named} is set but rank=0, which means no adapter: set rank, or leave {named} empty")
        if self.base_qtype and self.base_qtype not in QTYPES:
            raise ValueError(f"base_qtype={self.base_qtype!r} is not known; known: {', '.join(QTYPES)}, or empty")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r} must be float32 or bfloat16")
        for name, rule in {"": LoraRule(modules=self.modules), **self.rules}.items():
            where = f"rules.{name}" if name else "modules"
            try:
                re.compile(rule.modules)
            except re.error as error:
                raise ValueError(f"{where}: {rule.modules!r} is not a regular expression ({error})") from error

    def build(self) -> list[qwix.QuantizationRule]:
        """qwix's rules, in order of precedence. The last one quantises matrices without an adapter."""
        import qwix  # here and below, because it takes a second, and most models have no adapter

        qtype = self.base_qtype if self.base_qtype in ("", "nf4") else jnp.dtype(self.base_qtype)
        quantized: dict[str, Any] = {"weight_qtype": qtype or None, "tile_size": self.tile_size or None}
        chosen = list(self.rules.values())
        if self.modules:
            chosen.append(LoraRule(modules=self.modules))
        rules: list[qwix.QuantizationRule] = [
            qwix.LoraRule(
                module_path=f"blocks/(?:{rule.modules})",
                rank=rule.rank or self.rank,
                alpha=rule.alpha or self.alpha,
                lora_a_initializer=_INIT_A,
                **quantized,
            )
            for rule in chosen
        ]
        return [*rules, qwix.QuantizationRule(module_path="blocks/.*", **quantized)] if self.base_qtype else rules


@dataclasses.dataclass(frozen=True)
class Adapter:
    """The adapter of one module. Its factor is alpha / rank."""

    rank: int
    alpha: float


def adapters(model: nnx.Module) -> dict[str, Adapter]:
    """The modules (q, k, ...) that have an adapter."""
    blocks, result = getattr(model, "blocks", None), {}
    for name in MODULES:
        if (b := getattr(blocks, f"{name}_lora_b", None)) is not None:
            result[name] = Adapter(b.shape[1], b.get_metadata()["alpha"])
    return result


def apply_lora(
    model: nnx.Module, rules: Sequence[qwix.QuantizationRule], key: jax.Array, dtype: str = "float32"
) -> None:
    """Puts adapters on a decoder and quantises its matrices, in place, by qwix's rules.

    A matrix's path is `blocks/q` (k, v, o, gate, up, down). The first rule whose `module_path` matches the whole path is used.
    Routers and experts get no adapter: they stay frozen and are not quantised. A `qwix.LoraRule` gives `rank`, `alpha` and the
    initialisers. `weight_qtype` and `tile_size` of any rule quantise. Adapters are sharded like their matrix. B starts at 0, so
    the model's function does not change. An existing adapter (from a PEFT directory) is kept. A model of shapes
    (jax.ShapeDtypeStruct with shardings) gets an adapter of shapes.

    Args:
      key: random key of A.
      dtype: dtype of new adapters.

    Raises:
      ValueError: the model is no decoder, a rule matches nothing or is not supported, or an existing adapter differs from the
        rules.
    """
    import qwix

    if not isinstance(model, Decoder):
        raise ValueError(
            f"LoRA works on decoders, and this is a {type(model).__name__}; leave the LoRA configuration empty"
        )
    plan = _plan(rules, _modules(model))
    existing = adapters(model)
    wanted = {name: Adapter(rule.rank, rule.alpha) for name, rule in plan.items() if isinstance(rule, qwix.LoraRule)}
    if not wanted:
        raise ValueError("no rule is a qwix.LoraRule: there would be nothing to train")
    if existing and existing != wanted:
        raise ValueError(
            f"the model has the adapter {_described(existing)}, but the rules ask for {_described(wanted)}"
        )
    if not model.base_identity:
        model.base_identity = base_digest(model)
    for number, name in enumerate(MODULES):  # not the rules' order: another rule changes no other module's values
        if name in wanted and name not in existing:
            a, b = _draw(model, name, plan[name], jax.random.fold_in(key, number), dtype)
            attach(model, name, a, b, plan[name].alpha)
    for name, rule in plan.items():
        if rule.weight_qtype is not None:
            _quantize(model, name, _qtype(rule), int(rule.tile_size or 0))


def attach(model: Decoder, name: str, a: jax.Array, b: jax.Array, alpha: float) -> None:
    """Puts an adapter on matrix `name`: A [L, *inputs, rank] and B [L, rank, *outputs]."""
    axes = getattr(model.blocks, name).get_metadata()["axes"]
    split = 1 + MODULES[name]
    setattr(model.blocks, f"{name}_lora_a", nnx.LoRAParam(a, axes=(*axes[:split], "lora_rank")))
    setattr(
        model.blocks, f"{name}_lora_b", nnx.LoRAParam(b, axes=(axes[0], "lora_rank", *axes[split:]), alpha=float(alpha))
    )


def merged(model: M, dtype: Any = None) -> M:
    """The model with its adapter added to the matrices. Other parameters are shared with `model`, not copied.

    Args:
      dtype: dtype of the merged matrices; default: dtype of the frozen matrices (of their scales, if they are quantised).
    """
    state = nnx.state(model)
    new = merge_state(state, dtype)
    if new is state:
        return model
    plain: Any = nnx.merge(*nnx.split(model))
    for name in _modules(plain):
        for suffix in ("_scale", "_lora_a", "_lora_b"):
            if hasattr(plain.blocks, name + suffix):
                delattr(plain.blocks, name + suffix)
        setattr(plain.blocks, name, new["blocks"][name])
    plain.base_identity = ""  # a next adapter has these weights as its base
    return plain


def quantized(model: M, qtype: str) -> M:
    """The model with its blocks' matrices quantised, one scale per output channel (`o`: per head and output channel).

    Matrices that are quantised already stay as they are, and so do adapters and all other parameters, which are shared with
    `model`. It may be called inside jit, or with a model of shapes.

    Args:
      qtype: one of projection.QTYPES.
    """
    copy: Any = nnx.merge(*nnx.split(model))
    for name in _modules(copy):
        if not hasattr(copy.blocks, f"{name}_scale"):
            _quantize(copy, name, qtype, tile=0)
    return copy


def merge_state(params: nnx.State, dtype: Any = None) -> nnx.State:
    """`merged` for the whole state of a model. One jitted program changes only the matrices with an adapter.

    Returns `params` itself if there is nothing to merge.
    """
    flat, arrays, plan = _plan_merge(params, dtype)
    if not plan:
        return params
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(arrays)):
        placements = {entry.name: entry.sharding for entry in plan}
        shapes = jax.eval_shape(functools.partial(_merge_all, plan=plan), arrays)
        merged_arrays = {name: _shape_at(shape, placements[name]) for name, shape in shapes.items()}
    else:
        merged_arrays = _merge_all(arrays, plan)
    for name, value in merged_arrays.items():
        flat[("blocks", name)] = flat[("blocks", name)].replace(value)
    return nnx.from_flat_state(flat)


def lower_merge(params: nnx.State, dtype: Any = None) -> jax.stages.Lowered | None:
    """The program of `merge_state`, lowered for arrays or shapes; None if there is nothing to merge."""
    _, arrays, plan = _plan_merge(params, dtype)
    return _merge_all.lower(arrays, plan=plan) if plan else None


def _plan_merge(params: nnx.State, dtype: Any) -> tuple[dict[Any, Any], dict[str, tuple], tuple[_Merge, ...]]:
    """The state without the adapters; the arrays to merge, by matrix; and the properties of each matrix."""
    flat = dict(nnx.to_flat_state(params))
    arrays, plan = {}, []
    for name in MODULES:
        weight, *others = (flat.pop(("blocks", name + suffix), None) for suffix in ("", "_scale", "_lora_a", "_lora_b"))
        scale, _, b = others
        if weight is None:
            continue
        if scale is None and b is None:
            flat[("blocks", name)] = weight
            continue
        arrays[name] = tuple(None if part is None else part.get_value() for part in (weight, *others))
        codes, values = arrays[name][0], (weight if scale is None else scale).get_value()
        plan.append(
            _Merge(
                name,
                0.0 if b is None else b.get_metadata()["alpha"],
                weight.get_metadata().get("qtype", ""),
                jnp.dtype(values.dtype if dtype is None else dtype).name,
                codes.sharding if isinstance(codes.sharding, NamedSharding) else None,
            )
        )
        flat[("blocks", name)] = nnx.Param(None, axes=weight.get_metadata()["axes"])
    return flat, arrays, tuple(plan)


@dataclasses.dataclass(frozen=True)
class _Merge:
    """The static properties of a matrix."""

    name: str
    alpha: float
    qtype: str
    dtype: str
    sharding: NamedSharding | None


@functools.partial(jax.jit, static_argnames="plan")
def _merge_all(arrays: dict[str, tuple], plan: tuple[_Merge, ...]) -> dict[str, jax.Array]:
    result = {}
    for entry in plan:
        value = projection.merge(
            *arrays[entry.name], alpha=entry.alpha, qtype=entry.qtype, dtype=jnp.dtype(entry.dtype)
        )
        result[entry.name] = (
            value if entry.sharding is None else jax.lax.with_sharding_constraint(value, entry.sharding)
        )
    return result


def lora_fields(model: Decoder) -> dict[str, Any] | None:
    """The fields of an adapter's checkpoint that describe its model, as JSON; None without an adapter."""
    by_name = adapters(model)
    if not by_name:
        return None
    return {
        "adapters": {name: dataclasses.asdict(adapter) for name, adapter in by_name.items()},
        "qtypes": {name: getattr(model.blocks, name).get_metadata().get("qtype", "") for name in _modules(model)},
        "base": model.base_identity,
    }


def base_digest(model: Decoder) -> str:
    """The digest of a model's weights without its adapter. Every process must call this."""
    return digest(nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))))


def digest(params: nnx.State) -> str:
    """A digest of arrays that does not depend on their sharding: a hash of sums over their bits, weighted by index.

    Every process must call this.
    """
    flat = {"/".join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(params)}
    if any(isinstance(value, Tracer | jax.ShapeDtypeStruct) for value in flat.values()):
        return ""  # shapes without values
    sums = bit_sums(flat)
    lines = [f"{name} {flat[name].shape} {flat[name].dtype} {sums[name]}" for name in sorted(flat)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _modules(model: Decoder) -> list[str]:
    """The matrices of `MODULES` that the decoder has: one with experts in all layers has no gate, up and down."""
    return [name for name in MODULES if hasattr(model.blocks, name)]


def _plan(rules: Sequence[qwix.QuantizationRule], modules: Sequence[str]) -> dict[str, Any]:
    """The rule of each module, the first that matches. Raises ValueError for rules that can't be followed."""
    import qwix

    plan, used = {}, set()
    for name in modules:
        number = next((i for i, rule in enumerate(rules) if re.fullmatch(rule.module_path, f"blocks/{name}")), None)
        if number is not None:
            plan[name] = rules[number]
            used.add(number)
    for number, rule in enumerate(rules):
        where = f"LoRA rule {number + 1} ({rule.module_path!r})"
        if isinstance(rule, qwix.LoraRule):
            if number not in used:
                matching = [name for name in modules if re.fullmatch(rule.module_path, f"blocks/{name}")]
                why = f"earlier rules take {', '.join(matching)}" if matching else "it matches no module"
                raise ValueError(f"{where} applies to nothing: {why}; modules are {', '.join(modules)}, as in blocks/q")
            if rule.rank < 1 or rule.alpha <= 0:
                raise ValueError(f"{where}: rank={rule.rank} and alpha={rule.alpha} must be positive")
            if rule.dropout:
                raise ValueError(f"{where}: dropout is not supported; set it to 0")
        if rule.act_qtype is not None or rule.op_names:
            raise ValueError(f"{where}: act_qtype and op_names are not supported; leave them out")
        if rule.weight_qtype is not None and _qtype(rule) not in QTYPES:
            raise ValueError(f"{where}: weight_qtype={_qtype(rule)!r} is not known; known: {', '.join(QTYPES)}")
    return plan


def _qtype(rule: qwix.QuantizationRule) -> str:
    qtype = rule.weight_qtype
    return qtype if isinstance(qtype, str) else jnp.dtype(qtype).name


def _described(adapters: Mapping[str, Adapter]) -> str:
    return ", ".join(f"{name}: rank {adapter.rank} alpha {adapter.alpha:g}" for name, adapter in adapters.items())


def _draw(model: Decoder, name: str, rule: qwix.LoraRule, key: jax.Array, dtype: str) -> tuple[jax.Array, jax.Array]:
    """A and B for matrix `name`. Their axes are sharded like those of the matrix; the rank is not sharded."""
    value, split, placements = getattr(model.blocks, name).get_value(), 1 + MODULES[name], None
    if (layout := _mesh_and_spec(value)) is not None:
        mesh, spec = layout
        specs = PartitionSpec(*spec[:split], None), PartitionSpec(spec[0], None, *spec[split:])
        placements = tuple(NamedSharding(mesh, partition) for partition in specs)
    initializers = (rule.lora_a_initializer, rule.lora_b_initializer)

    def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _draw_stack(key, initializers, value.shape, split, rule.rank, dtype, placements)

    if isinstance(value, jax.ShapeDtypeStruct):
        a, b = (_shape_at(*pair) for pair in zip(jax.eval_shape(draw, key), placements or (None, None)))
        return a, b
    return draw(key)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5, 6))
def _draw_stack(
    key: jax.Array,
    initializers: tuple[Any, Any],
    shape: tuple[int, ...],
    split: int,
    rank: int,
    dtype: str,
    shardings: tuple[NamedSharding, NamedSharding] | None,
) -> tuple[jax.Array, jax.Array]:
    """Each layer is drawn by itself, as a matrix [inputs, rank] or [rank, outputs]."""
    layers, inputs, outputs = shape[0], shape[1:split], shape[split:]
    keys = jax.random.split(key, (layers, 2))
    a = jax.vmap(lambda k: initializers[0](k, (math.prod(inputs), rank), jnp.float32))(keys[:, 0])
    b = jax.vmap(lambda k: initializers[1](k, (rank, math.prod(outputs)), jnp.float32))(keys[:, 1])
    matrices = a.reshape(layers, *inputs, rank).astype(dtype), b.reshape(layers, rank, *outputs).astype(dtype)
    return matrices if shardings is None else jax.lax.with_sharding_constraint(matrices, shardings)


def _shape_at(shape: Any, sharding: NamedSharding | None) -> Any:
    """The shape and dtype of an array, with a sharding."""
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _mesh_and_spec(value: jax.Array) -> tuple[Mesh, list[Any]] | None:
    """The mesh of an array, and the sharding of each of its axes; None without a mesh."""
    if isinstance(value, Tracer) or not isinstance(getattr(value, "sharding", None), NamedSharding):
        return None
    sharding: Any = value.sharding
    return sharding.mesh, [*sharding.spec, *[None] * (value.ndim - len(sharding.spec))]


def _quantize(model: Decoder, name: str, qtype: str, tile: int) -> None:
    """Replaces a matrix by its codes and scales, which are sharded like it."""
    old = getattr(model.blocks, name)
    value, axes = old.get_value(), old.get_metadata()["axes"]
    settings = {"inputs": MODULES[name], "qtype": qtype, "tile": tile}
    try:
        shapes = jax.eval_shape(functools.partial(projection.quantize, **settings), value)
    except ValueError as error:
        raise ValueError(f"blocks/{name}: {error}") from error
    shardings = None
    if (layout := _mesh_and_spec(value)) is not None:
        mesh, spec = layout

        def devices(entry: str | tuple[str, ...] | None) -> int:
            return math.prod(mesh.shape[axis] for axis in ((entry,) if isinstance(entry, str) else entry or ()))

        def fitting_sharding(shape: tuple[int, ...]) -> NamedSharding:
            # An axis of codes or scales may be too short to be split.
            fitting = [entry if size % devices(entry) == 0 else None for size, entry in zip(shape, spec)]
            return NamedSharding(mesh, PartitionSpec(*fitting))

        shardings = tuple(fitting_sharding(leaf.shape) for leaf in shapes)
    if isinstance(value, jax.ShapeDtypeStruct):
        codes, scale = (_shape_at(*pair) for pair in zip(shapes, shardings or (None, None)))
    else:
        codes, scale = _quantize_stack(value, shardings=shardings, **settings)
    setattr(model.blocks, name, nnx.Param(codes, axes=axes, qtype=qtype))
    setattr(model.blocks, f"{name}_scale", Scales(scale, axes=axes))


@functools.partial(jax.jit, static_argnames=("inputs", "qtype", "tile", "shardings"))
def _quantize_stack(
    value: jax.Array, *, inputs: int, qtype: str, tile: int, shardings: tuple[NamedSharding, NamedSharding] | None
) -> tuple[jax.Array, jax.Array]:
    quantized = projection.quantize(value, inputs, qtype, tile)
    return quantized if shardings is None else jax.lax.with_sharding_constraint(quantized, shardings)
