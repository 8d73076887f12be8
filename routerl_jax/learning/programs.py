"""The device programs of the learner: an update per mini-batch, and log-probabilities under any weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from routerl_jax.learning.batch import TOKEN_FIELDS, Batch, BatchLayout
from routerl_jax.learning.logprobs import Scores, target_scores
from routerl_jax.learning.losses import POLICY_LOSSES
from routerl_jax.learning.objective import ROUTING_METRICS, LossConfig, objective
from routerl_jax.models.attention import Attention
from routerl_jax.models.decoder import Decoder, Remat, for_programs
from routerl_jax.models.layers import matmul_precision
from routerl_jax.parallel.devices import compiled_programs
from routerl_jax.parallel.mesh import replicated

# (trained params, frozen params, the reference's, fields of a micro-batch as [rows, time]) -> scores of the targets
Score = Callable[[nnx.State, nnx.State, nnx.State | None, dict[str, Any]], Scores]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["params", "opt_state", "updates"], meta_fields=[])
@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerState:
    """The state that an update changes. `params` are only the trained parameters."""

    params: nnx.State
    opt_state: Any
    updates: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """The jitted programs of one learner. `update` donates the state."""

    update: (
        Any  # (state=, frozen=, reference=, batch=) -> (state, metrics, log-probs); reference: of an exact KL, or None
    )
    logprobs: Any  # (params, frozen, batch) -> log-probs

    def compiled(self) -> int:
        """Number of programs that were compiled."""
        return compiled_programs(self.logprobs, self.update)


def jit_programs(
    model: Decoder,
    state_shardings: Any,
    layout: BatchLayout,
    optimizer: optax.GradientTransformation,
    loss: LossConfig,
    *,
    temperature: float,
    remat: Remat,
) -> Programs:
    """Programs for a model, which may be abstract. `state_shardings` are those of its LearnerState; others as for Learner.

    Learners of equal models, layouts and settings share them, and what is compiled.
    """
    leaves, structure = jax.tree.flatten(state_shardings)
    return _shared_programs(
        nnx.graphdef(for_programs(model)),
        model.compute_dtype,
        tuple(leaves),
        structure,
        layout.mesh,
        layout.buckets,
        optimizer,
        (loss, POLICY_LOSSES.get(loss.kind)),  # the function too: that of a module that was reloaded is another
        temperature,
        remat,
    )


@functools.lru_cache(maxsize=8)  # programs hold no weights, but their code takes memory
def _shared_programs(
    graph: nnx.GraphDef,
    dtype: jnp.dtype,
    leaves: tuple[Any, ...],
    structure: Any,
    mesh: Mesh,
    buckets: tuple[int, ...],
    optimizer: optax.GradientTransformation,
    objective_of: tuple[LossConfig, Any],
    temperature: float,
    remat: Remat,
) -> Programs:
    attention, loss = Attention.on(mesh), objective_of[0]

    def score(params: nnx.State, frozen: nnx.State, reference: nnx.State | None, fields: dict[str, Any]) -> Scores:
        return target_scores(
            nnx.merge(graph, params, frozen),
            fields["tokens"],
            fields["targets"],
            fields["positions"],
            fields["segment_ids"],
            temperature=temperature,
            entropy=loss.entropies,
            reference=None if reference is None else nnx.merge(graph, reference, frozen),
            direction="reverse" if loss.kl == "reverse" else "forward",
            remat=remat,
            attention=attention,
            scored=fields["scored"],
            images=fields.get("images"),
            image_index=fields.get("image_index"),
            segment_ends=fields.get("segment_ends"),
            routes=fields.get("routes"),
        )

    def logprobs(params: nnx.State, frozen: nnx.State, batch: Batch) -> Array:
        return _logprobs(buckets, score, params, frozen, batch)

    def update(
        state: LearnerState, frozen: nnx.State, reference: nnx.State | None, batch: Batch
    ) -> tuple[LearnerState, dict[str, Array], Array]:
        with matmul_precision(dtype):  # backward passes of kernels are traced outside of the model
            return _update(buckets, score, optimizer, loss, state, frozen, reference, batch)

    small, state_shardings = replicated(mesh), jax.tree.unflatten(structure, leaves)
    return Programs(
        logprobs=jax.jit(logprobs, out_shardings=small),
        update=jax.jit(update, donate_argnames="state", out_shardings=(state_shardings, small, small)),
    )


def abstract_state(params: nnx.State, optimizer: optax.GradientTransformation, mesh: Mesh) -> LearnerState:
    """The state of a learner as shapes with shardings, for abstract parameters with shardings."""

    def sharded(leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    placements = optimizer_shardings(optimizer, params, mesh)
    return LearnerState(
        params=params,
        opt_state=jax.tree.map(sharded, jax.eval_shape(optimizer.init, params), placements),
        updates=jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh)),  # type: ignore[arg-type]
    )


def optimizer_shardings(optimizer: optax.GradientTransformation, params: nnx.State, mesh: Mesh) -> Any:
    """Shardings of the optimiser's state. Moments have those of their parameters (matched by the end of the path); the rest is
    replicated."""
    sharding_of = {str(path): leaf.sharding for path, leaf in jax.tree.leaves_with_path(params)}

    def sharding(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.sharding.Sharding:
        ends = (str(path[i:]) for i in range(len(path)))
        return (
            next((sharding_of[end] for end in ends if end in sharding_of), replicated(mesh))
            if leaf.ndim
            else replicated(mesh)
        )

    return jax.tree.map_with_path(sharding, jax.eval_shape(optimizer.init, params))


def _on_micro_batch(
    buckets: tuple[int, ...], function: Callable[[dict[str, Any]], Any], batch: Batch, micro: Array
) -> Any:
    """Applies `function` to micro-batch `micro`, given as [rows, time] arrays by field name and its images.

    There is one branch of the program per bucket. Gradients are taken inside `function`, because differentiating through the
    branches would keep every branch's residuals.
    """
    fields = {name: getattr(batch, name) for name in TOKEN_FIELDS if getattr(batch, name) is not None}
    picked, images = jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, micro, keepdims=False), (fields, batch.images)
    )

    _, shards, width = batch.weights.shape

    def branch(length: int) -> Callable[[dict[str, Array], Any], Any]:
        rows = width // length

        def run(picked: dict[str, Array], images: Any) -> Any:
            folded = {
                name: value[:, : rows * length].reshape(shards * rows, length, *value.shape[2:])
                for name, value in picked.items()
            }
            return function(folded | ({} if images is None else {"images": images}))

        return run

    return jax.lax.switch(batch.buckets[micro], [branch(length) for length in buckets], picked, images)


def _unfold(batch: Batch, values: Array) -> Array:
    """Per-token results of a micro-batch, [rows, time], in the layout of the batch, [D, W]."""
    _, shards, width = batch.weights.shape
    flat = values.reshape(shards, -1)
    return jnp.pad(flat, ((0, 0), (0, width - flat.shape[1])))


def _logprobs(buckets: tuple[int, ...], score: Score, params: nnx.State, frozen: nnx.State, batch: Batch) -> Array:
    """Log-probabilities of all targets, [M, D, W]."""

    def micro_batch(micro: Array, result: Array) -> Array:
        logprobs = _on_micro_batch(
            buckets, lambda fields: _unfold(batch, score(params, frozen, None, fields).logprobs), batch, micro
        )
        return jax.lax.dynamic_update_index_in_dim(result, logprobs, micro, axis=0)

    return jax.lax.fori_loop(0, batch.count, micro_batch, jnp.zeros(batch.weights.shape, jnp.float32))


def _update(
    buckets: tuple[int, ...],
    score: Score,
    optimizer: optax.GradientTransformation,
    loss: LossConfig,
    state: LearnerState,
    frozen: nnx.State,
    reference: nnx.State | None,
    batch: Batch,
) -> tuple[LearnerState, dict[str, Array], Array]:
    """Accumulates gradients over the micro-batches and takes one optimiser step."""

    def total_loss(params: nnx.State, fields: dict[str, Any]) -> tuple[Array, tuple[dict[str, Array], Array]]:
        scores = score(params, frozen, reference, fields)
        total, metrics = objective(loss, scores, fields | {"share": 1 / jnp.maximum(batch.count, 1)})
        return total, (metrics, _unfold(batch, scores.logprobs))

    def gradient(micro: Array) -> tuple[nnx.State, dict[str, Array], Array]:
        def on_fields(fields: dict[str, Any]) -> tuple[nnx.State, dict[str, Array], Array]:
            grads, (metrics, logprobs) = jax.grad(total_loss, has_aux=True)(state.params, fields)
            return grads, metrics, logprobs

        return _on_micro_batch(buckets, on_fields, batch, micro)

    def accumulate(micro: Array, carry: tuple[Any, dict[str, Array], Array]) -> tuple[Any, dict[str, Array], Array]:
        grads, metrics, logprobs = gradient(micro)
        return (
            jax.tree.map(jnp.add, carry[0], grads),
            jax.tree.map(jnp.add, carry[1], metrics),
            jax.lax.dynamic_update_index_in_dim(carry[2], logprobs, micro, axis=0),
        )

    grads, metrics, _ = jax.eval_shape(gradient, jnp.int32(0))
    start = (grads, metrics, jax.eval_shape(lambda: jnp.zeros(batch.weights.shape, jnp.float32)))
    start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), start)
    grads, metrics, logprobs = jax.lax.fori_loop(0, batch.count, accumulate, start)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = cast(nnx.State, optax.apply_updates(state.params, updates))
    weight = jnp.maximum(metrics.pop("weight"), 1e-9)
    whole = ("loss", *ROUTING_METRICS)  # sums already, or means over micro-batches
    metrics = {name: value if name.endswith(whole) else value / weight for name, value in metrics.items()}
    metrics["grad_norm"] = optax.global_norm(grads)
    return LearnerState(params=params, opt_state=opt_state, updates=state.updates + 1), metrics, logprobs
