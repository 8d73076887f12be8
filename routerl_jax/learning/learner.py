"""The learner: one jitted update per mini-batch (it donates the state), and log-probabilities under any weights."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array

from routerl_jax.core.types import Sequence as TokenSequence
from routerl_jax.learning.batch import Batch, BatchIndex, BatchLayout
from routerl_jax.learning.objective import LossConfig
from routerl_jax.learning.programs import LearnerState, Programs, jit_programs, optimizer_shardings
from routerl_jax.models.decoder import Decoder, Remat
from routerl_jax.models.lora import adapters
from routerl_jax.parallel.devices import with_less
from routerl_jax.parallel.mesh import replicated

T = TypeVar("T")
_REMEDY = (
    'lower config.learner.micro_tokens or set config.learner.remat="full" (a run may be resumed with either); or begin anew '
    "with a lower config.engine.max_length, weights on more devices (config.mesh.fsdp), or an adapter (config.model.lora)"
)


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
        self._finite = jax.jit(_all_finite, out_shardings=replicated(layout.mesh))
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
        result = []
        for start in range(0, len(sequences), portion or len(sequences) or 1):
            part = sequences[start : start + (portion or len(sequences))]
            result += self.within_memory(functools.partial(self._part_logprobs, part, params))
        return result

    def _part_logprobs(self, part: Sequence[TokenSequence], params: nnx.State | None) -> list[np.ndarray]:
        batch, index = self.layout.build(part, [np.zeros(len(s)) for s in part], [0.0] * len(part))  # all may be shared
        return self.batch_logprobs(batch, index, params)

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


def _all_finite(params: nnx.State) -> Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]).all()


@jax.jit
def _copied(params: nnx.State) -> nnx.State:
    return jax.tree.map(jnp.copy, params)


def _shapes(model: Decoder) -> Decoder:
    """The model with shapes instead of arrays, so that the programs do not keep the initial weights alive."""
    graph, state = nnx.split(model)
    return nnx.merge(
        graph, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    )
