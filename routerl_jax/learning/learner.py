"""The learner: one jitted update per mini-batch (it donates the state), and log-probabilities under any weights.

`Learner` is what the host does; below it is what the devices compute (`Computation`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from routerl_jax.core.types import Sequence as TokenSequence
from routerl_jax.learning.batch import TOKEN_FIELDS, Batch, BatchIndex, BatchLayout
from routerl_jax.learning.logprobs import Scores, target_scores
from routerl_jax.learning.losses import POLICY_LOSSES, ROUTING_METRICS, LossConfig, objective
from routerl_jax.models.attention import Attention
from routerl_jax.models.decoder import Decoder, Remat, for_programs
from routerl_jax.models.layers import matmul_precision
from routerl_jax.models.lora import adapters
from routerl_jax.parallel.devices import compiled_programs, with_less
from routerl_jax.parallel.mesh import replicated

T = TypeVar("T")
_REMEDY = (
    'lower config.learner.micro_tokens or set config.learner.remat="full" (a run may be resumed with either); or begin anew '
    "with a lower config.engine.max_length, weights on more devices (config.mesh.fsdp), or an adapter (config.model.lora)"
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerState:
    """The state that an update changes. `params` are only the trained parameters."""

    params: nnx.State
    opt_state: Any
    updates: Array


class Learner:
    """Updates a decoder on mini-batches of sequences.

    One program accumulates the gradients over all micro-batches. Token weights contain the normalisation over the whole
    mini-batch, so neither micro-batches nor sharding change the result.

    Args:
      model: the initial weights; their sharding is kept. The learner copies those that it trains, and the reference is the
        original arrays.
      optimizer: the gradient transformation.
      loss: the objective.
      layout: how sequences are cut into micro-batches.
      temperature: temperature at which the sequences were sampled; log-probabilities are computed at it.
      remat: what the backward pass recomputes.
      keep_reference: keep the initial values of the trained weights as a reference (implied by a KL term in the loss). Frozen
        weights are the same for both.
      trainable: which parameters are trained (a filter of flax.nnx). The others get neither gradients nor optimiser state.
        Default: the adapter of a model that has one (models/lora.py), else all.

    Raises:
      ValueError: nothing is trainable.
    """

    def __init__(
        self,
        model: Decoder,
        optimizer: optax.GradientTransformation,
        loss: LossConfig,
        layout: BatchLayout,
        *,
        temperature: float = 1.0,
        remat: Remat = "none",
        keep_reference: bool = False,
        trainable: Any = None,
    ) -> None:
        trainable = trained_parameters(model) if trainable is None else trainable
        _, params, self.frozen = nnx.split(model, trainable, ...)
        if not jax.tree.leaves(params):
            raise ValueError(f"no parameter of the model is trainable ({trainable} selects none)")
        self.layout = layout
        self._finite = jax.jit(
            lambda params: jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]).all(),
            out_shardings=replicated(layout.mesh),
        )
        self._begin = jax.jit(optimizer.init, out_shardings=optimizer_shardings(optimizer, params, layout.mesh))
        self.state = LearnerState(
            params=_copied(params),
            opt_state=self._begin(params),
            updates=jax.device_put(jnp.int32(0), replicated(layout.mesh)),
        )
        # The same arrays in new variables, because the values of the model's variables may be replaced.
        self.reference = jax.tree.map(lambda leaf: leaf, params) if loss.kl_coef or keep_reference else None
        placements = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        self._jit = functools.partial(jit_programs, _shapes(model), placements, layout, remat=remat)
        self._objective = optimizer, loss, temperature
        self._compiled_before = 0  # programs, before the last switch
        self._use(self._jit(optimizer, loss, temperature=temperature))

    @property
    def params(self) -> nnx.State:
        """The current weights, frozen ones included; valid until the next update."""
        return nnx.merge_state(self.state.params, self.frozen)

    def switch(
        self, loss: LossConfig, temperature: float, optimizer: optax.GradientTransformation | None = None
    ) -> None:
        """Switches to another objective or sampling temperature. The new programs are compiled on first use.

        Args:
          optimizer: an optimiser with the same state, such as one with another schedule; default: unchanged.

        Raises:
          ValueError: the loss has a KL term, and the initial weights were not kept.
        """
        objective = optimizer or self._objective[0], loss, temperature
        if objective == self._objective:
            return
        if loss.kl_coef and self.reference is None:
            raise ValueError(
                "the loss has a KL term, but the reference was not kept: Learner(..., keep_reference=True)"
            )
        self._compiled_before = self.compilations
        self._objective = objective
        self._use(self._jit(objective[0], loss, temperature=temperature))

    def _use(self, programs: Programs) -> None:
        self._programs, self._compiled_elsewhere = programs, programs.compiled()

    def restart(self) -> None:
        """Restarts from the current weights: resets the optimiser's state and schedule, and makes these weights the reference
        if there is one."""
        params = self.state.params
        self.state = dataclasses.replace(self.state, opt_state=None)  # frees the old state before the new one is made
        self.state = dataclasses.replace(self.state, opt_state=self._begin(params))
        if self.reference is not None:
            self.reference = None
            self.reference = _copied(params)

    def update(self, batch: Batch) -> tuple[dict[str, float], np.ndarray]:
        """One optimiser step on a mini-batch.

        Returns:
          Metrics, and the log-probability of every target before the step that the policy wrote ([M, D, W], 0 elsewhere; see
          BatchIndex.split).
        """
        reference = self.reference if self._objective[1].exact_kl else None
        state, metrics, logprobs = self._programs.update(
            state=self.state, frozen=self.frozen, reference=reference, batch=batch
        )
        host = {name: float(value) for name, value in jax.device_get(metrics).items()}
        self.state = state  # here at the earliest, because a program may fail when its results are read
        return host, np.asarray(logprobs)

    def logprobs(
        self, sequences: Sequence[TokenSequence], params: nnx.State | None = None, *, portion: int | None = None
    ) -> list[np.ndarray]:
        """Per sequence, the log-probability of each token that the policy wrote ([T], 0 for the others) under `params`.

        Args:
          params: values of the trained weights, such as `reference`; default: the current ones.
          portion: sequences per batch; default: all. Batches larger than those of updates would enlarge these too, from then
            on (`BatchLayout`).
        """

        def of_part(part: Sequence[TokenSequence]) -> list[np.ndarray]:
            nothing = [np.zeros(len(sequence)) for sequence in part]  # no token is trained, so all may be shared
            batch, index = self.layout.build(part, nothing, [0.0] * len(part))
            return self.batch_logprobs(batch, index, params)

        result = []
        for start in range(0, len(sequences), portion or len(sequences) or 1):
            part = sequences[start : start + (portion or len(sequences))]
            result += self.within_memory(functools.partial(of_part, part))
        return result

    def within_memory(self, work: Callable[[], T]) -> T:
        """The result of work that lays out batches and computes with them. It is done again, with micro-batches half as large
        from then on, whenever the devices are out of memory.

        Raises:
          OutOfMemory: micro-batches can't be smaller, the weights were lost, or the job has several processes.
        """
        return with_less(work, self._smaller_layout, "the learner", _REMEDY)

    def _smaller_layout(self) -> str | None:
        # Accelerators find no room before a program has its donated arguments, when it is compiled or its scratch allocated.
        # CPUs find none afterwards; then the weights are gone.
        lost = any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))
        return None if lost else self.layout.halve()

    def batch_logprobs(self, batch: Batch, index: BatchIndex, params: nnx.State | None = None) -> list[np.ndarray]:
        """`logprobs` for a batch that is already laid out."""
        params = self.state.params if params is None else params
        return index.split(np.asarray(self._programs.logprobs(params, self.frozen, batch)))

    def with_reference(self, batch: Batch) -> Batch:
        """The batch with the reference's log-probabilities of its targets. They never leave the devices."""
        logprobs = self._programs.logprobs(self.reference, self.frozen, batch)
        placed = jax.device_put(logprobs, batch.ref_logprobs.sharding)
        return dataclasses.replace(batch, ref_logprobs=jax.block_until_ready(placed))

    def finite(self) -> bool:
        """Whether all trained weights are finite. A finite loss only shows this for the weights before its update."""
        return bool(self._finite(self.state.params))

    @property
    def compilations(self) -> int:
        """Number of programs compiled since this learner was made, by it or by others that share them (`jit_programs`)."""
        return self._compiled_before + self._programs.compiled() - self._compiled_elsewhere


def trained_parameters(model: Decoder, frozen: Sequence[str] = ()) -> Any:
    """The filter (of flax.nnx) of trained parameters: the adapter of a model that has one, else all but the frozen parts.

    Args:
      frozen: attributes of the model that are not trained, such as `visual`.

    Raises:
      ValueError: the model has no such part.
    """
    parts = {path[0] for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    for name in frozen:
        if name not in parts:
            kind, names = model.architecture.model_type, ", ".join(sorted(map(str, parts)))
            raise ValueError(f"config.model.freeze: a {kind} model has no part {name!r}; it has {names}")
    if adapters(model):
        return nnx.LoRAParam
    return nnx.All(nnx.Param, lambda path, _: path[0] not in frozen) if frozen else nnx.Param


@jax.jit
def _copied(params: nnx.State) -> nnx.State:
    return jax.tree.map(jnp.copy, params)


def _shapes(model: Decoder) -> Decoder:
    """The model with shapes instead of arrays, so that the programs do not keep the initial weights alive."""
    graph, state = nnx.split(model)
    return nnx.merge(
        graph, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    )


# --- what the devices compute ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """The jitted programs of one learner.

    Attributes:
      update: (state=, frozen=, reference=, batch=) -> (state, metrics, log-probs). The state is donated; the reference is that
        of an exact KL, or None.
      logprobs: (params, frozen, batch) -> log-probs.
    """

    update: Any
    logprobs: Any

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
    computation = Computation(
        graph=nnx.graphdef(for_programs(model)),
        dtype=model.compute_dtype,
        mesh=layout.mesh,
        buckets=layout.buckets,
        optimizer=optimizer,
        loss=loss,
        policy_loss=POLICY_LOSSES.get(loss.kind),
        temperature=temperature,
        remat=remat,
    )
    return _shared_programs(computation, tuple(leaves), structure)


@functools.lru_cache(maxsize=8)  # programs hold no weights, but their code takes memory
def _shared_programs(computation: Computation, leaves: tuple[Any, ...], structure: Any) -> Programs:
    small, state_shardings = replicated(computation.mesh), jax.tree.unflatten(structure, leaves)
    return Programs(
        logprobs=jax.jit(computation.logprobs, out_shardings=small),
        update=jax.jit(computation.update, donate_argnames="state", out_shardings=(state_shardings, small, small)),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Computation:
    """The update and the log-probabilities of learners with these settings (see Learner), as pure functions."""

    graph: nnx.GraphDef
    dtype: jnp.dtype  # that the model computes in
    mesh: Mesh
    buckets: tuple[int, ...]
    optimizer: optax.GradientTransformation
    loss: LossConfig
    policy_loss: Any  # the function of loss.kind, so that that of a module that was reloaded makes other programs
    temperature: float
    remat: Remat

    def update(
        self, state: LearnerState, frozen: nnx.State, reference: nnx.State | None, batch: Batch
    ) -> tuple[LearnerState, dict[str, Array], Array]:
        """Accumulates gradients over the micro-batches and takes one optimiser step."""
        with matmul_precision(self.dtype):  # backward passes of kernels are traced outside of the model
            return self._update(state, frozen, reference, batch)

    def _update(
        self, state: LearnerState, frozen: nnx.State, reference: nnx.State | None, batch: Batch
    ) -> tuple[LearnerState, dict[str, Array], Array]:
        def total_loss(params: nnx.State, fields: dict[str, Any]) -> tuple[Array, tuple[dict[str, Array], Array]]:
            scores = self._score(params, frozen, reference, fields)
            total, metrics = objective(self.loss, scores, fields | {"share": 1 / jnp.maximum(batch.count, 1)})
            return total, (metrics, _unfold(batch, scores.logprobs))

        def on_fields(fields: dict[str, Any]) -> tuple[nnx.State, dict[str, Array], Array]:
            grads, (metrics, logprobs) = jax.grad(total_loss, has_aux=True)(state.params, fields)
            return grads, metrics, logprobs

        def gradient(micro: Array) -> tuple[nnx.State, dict[str, Array], Array]:
            return self._on_micro_batch(on_fields, batch, micro)

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
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        params = cast(nnx.State, optax.apply_updates(state.params, updates))
        weight = jnp.maximum(metrics.pop("weight"), 1e-9)
        whole = ("loss", *ROUTING_METRICS)  # sums already, or means over micro-batches
        metrics = {name: value if name.endswith(whole) else value / weight for name, value in metrics.items()}
        metrics["grad_norm"] = optax.global_norm(grads)
        return LearnerState(params=params, opt_state=opt_state, updates=state.updates + 1), metrics, logprobs

    def logprobs(self, params: nnx.State, frozen: nnx.State, batch: Batch) -> Array:
        """Log-probabilities of all targets, [M, D, W]."""

        def on_fields(fields: dict[str, Any]) -> Array:
            return _unfold(batch, self._score(params, frozen, None, fields).logprobs)

        def micro_batch(micro: Array, result: Array) -> Array:
            logprobs = self._on_micro_batch(on_fields, batch, micro)
            return jax.lax.dynamic_update_index_in_dim(result, logprobs, micro, axis=0)

        return jax.lax.fori_loop(0, batch.count, micro_batch, jnp.zeros(batch.weights.shape, jnp.float32))

    def _score(
        self, params: nnx.State, frozen: nnx.State, reference: nnx.State | None, fields: dict[str, Any]
    ) -> Scores:
        """Scores of the targets of a micro-batch, whose fields are [rows, time]."""
        return target_scores(
            nnx.merge(self.graph, params, frozen),
            fields["tokens"],
            fields["targets"],
            fields["positions"],
            fields["segment_ids"],
            temperature=self.temperature,
            entropy=self.loss.entropies,
            reference=None if reference is None else nnx.merge(self.graph, reference, frozen),
            direction="reverse" if self.loss.kl == "reverse" else "forward",
            remat=self.remat,
            attention=Attention.on(self.mesh),
            scored=fields["scored"],
            images=fields.get("images"),
            image_index=fields.get("image_index"),
            segment_ends=fields.get("segment_ends"),
            routes=fields.get("routes"),
        )

    def _on_micro_batch(self, function: Callable[[dict[str, Any]], Any], batch: Batch, micro: Array) -> Any:
        """Applies `function` to micro-batch `micro`, given as [rows, time] arrays by field name and its images.

        There is one branch of the program per bucket. Gradients are taken inside `function`, because differentiating through
        the branches would keep every branch's residuals.
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

        return jax.lax.switch(batch.buckets[micro], [branch(length) for length in self.buckets], picked, images)


def _unfold(batch: Batch, values: Array) -> Array:
    """Per-token results of a micro-batch, [rows, time], in the layout of the batch, [D, W]."""
    _, shards, width = batch.weights.shape
    flat = values.reshape(shards, -1)
    return jnp.pad(flat, ((0, 0), (0, width - flat.shape[1])))


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
        found = next((sharding_of[end] for end in ends if end in sharding_of), replicated(mesh))
        return found if leaf.ndim else replicated(mesh)

    return jax.tree.map_with_path(sharding, jax.eval_shape(optimizer.init, params))
