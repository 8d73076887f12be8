"""The learner: one jitted, donated update per mini-batch, and log-probabilities under any weights."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from routerl_jax.core.checked import NonNegative, checked
from routerl_jax.core.types import Sequence as TokenSequence
from routerl_jax.learning.batch import TOKEN_FIELDS, Batch, BatchIndex, BatchLayout
from routerl_jax.learning.logprobs import Scores, target_scores
from routerl_jax.learning.losses import POLICY_LOSSES, KLKind, Ratio, kl_estimate, sequence_sums
from routerl_jax.models.attention import Attention
from routerl_jax.models.decoder import Decoder, Remat
from routerl_jax.models.layers import matmul_precision
from routerl_jax.models.lora import adapters
from routerl_jax.parallel.compilation import compiled_programs
from routerl_jax.parallel.mesh import replicated


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class LossConfig:
    """The per-token objective."""

    kind: str = "clip"  # of learning.losses.POLICY_LOSSES
    # of each token, or of the whole sequence: the product over its trained tokens (RouteRAG, arXiv 2512.09487, eq. 5)
    ratio: Ratio = "token"
    clip_low: NonNegative = 0.2
    clip_high: NonNegative = 0.2  # above clip_low: DAPO's clip-higher
    kl: KLKind = "k3"  # an estimate from the sampled tokens, or the sum over the vocabulary (forward, reverse)
    kl_coef: NonNegative = 0.0  # KL to the reference, added to the loss
    entropy_coef: float = 0.0  # entropy bonus
    min_entropy: NonNegative = (
        0.0  # nats; below it a token takes part in the KL but not in the policy gradient (decisions only)
    )

    def __post_init__(self) -> None:
        POLICY_LOSSES.get(self.kind)  # raises ValueError for an unknown one
        if self.ratio not in typing.get_args(Ratio):
            raise ValueError(f"loss.ratio={self.ratio!r} is neither 'token' nor 'sequence'")
        if self.ratio == "sequence" and self.kind == "reinforce":
            raise ValueError(
                "loss.ratio='sequence' with loss.kind='reinforce', which has no ratio: take loss.kind='clip'"
            )
        if self.ratio == "sequence" and self.min_entropy:
            raise ValueError(
                f"loss.min_entropy={self.min_entropy} leaves tokens out, and loss.ratio='sequence' is one term of a whole "
                "sequence: set one of them back (min_entropy=0, or ratio='token')"
            )

    @property
    def exact_kl(self) -> bool:
        """Whether the KL is summed over the vocabulary, which takes the reference's weights in the update."""
        return bool(self.kl_coef) and self.kl in ("forward", "reverse")


# (trained params, frozen params, the reference's, fields of a micro-batch as [rows, time]) -> scores of the targets
Score = Callable[[nnx.State, nnx.State, nnx.State | None, dict[str, Any]], Scores]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["params", "opt_state", "updates"], meta_fields=[])
@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerState:
    """All that an update changes; `params` are the trained ones alone."""

    params: nnx.State
    opt_state: Any
    updates: Array


class Learner:
    """Updates a decoder on mini-batches of sequences.

    Gradients are accumulated over micro-batches inside the one program. Token weights carry the normalisation of the
    whole mini-batch, so neither micro-batches nor sharding change the result.

    Args:
      model: initial weights; their sharding is kept. The learner works on a copy of those that it trains, and the reference
        is these very arrays.
      optimizer: gradient transformation.
      loss: objective.
      layout: how sequences are cut into micro-batches.
      temperature: of the sampling that produced the sequences; log-probabilities are taken at it.
      remat: what the backward pass recomputes.
      keep_reference: keep the initial weights (implied by a KL term in the loss), of those that are trained: the frozen
        ones are the reference's too.
      trainable: which parameters are trained (a filter of flax.nnx); the others get neither gradients nor optimiser state.
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
        self._begin = jax.jit(optimizer.init, out_shardings=_optimizer_homes(optimizer, params, layout.mesh))
        self.state = LearnerState(
            params=_copied(params),
            opt_state=self._begin(params),
            updates=jax.device_put(jnp.int32(0), replicated(layout.mesh)),
        )
        # The same arrays in variables of their own: the model's may be given other values.
        self.reference = jax.tree.map(lambda leaf: leaf, params) if loss.kl_coef or keep_reference else None
        homes = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        self._jit = functools.partial(jit_programs, model, trainable, homes, layout, remat=remat)
        self._objective = optimizer, loss, temperature
        self._programs = self._jit(optimizer, loss, temperature=temperature)
        self._compiled_before = 0

    @property
    def params(self) -> nnx.State:
        """Current weights, the frozen ones included; valid until the next update."""
        return nnx.merge_state(self.state.params, self.frozen)

    def switch(
        self, loss: LossConfig, temperature: float, optimizer: optax.GradientTransformation | None = None
    ) -> None:
        """Goes on with another objective, or sequences of another temperature; its programs are compiled when they are used.

        Args:
          optimizer: one with the same state, such as one of another schedule; default: as it was.

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
        self._programs = self._jit(objective[0], loss, temperature=temperature)

    def restart(self) -> None:
        """Goes on as a run that starts from the current weights would: with a new state of the optimiser, whose schedule
        begins anew, and with these weights as the reference, if there is one."""
        params = self.state.params
        self.state = dataclasses.replace(self.state, opt_state=None)  # gone before its successor comes
        self.state = dataclasses.replace(self.state, opt_state=self._begin(params))
        if self.reference is not None:
            self.reference = None
            self.reference = _copied(params)

    def update(self, batch: Batch) -> tuple[dict[str, float], np.ndarray]:
        """One optimiser step on a mini-batch.

        Returns:
          Metrics, and the log-probability of every target before the step ([M, D, W]; see BatchIndex.split).
        """
        reference = self.reference if self._objective[1].exact_kl else None
        self.state, metrics, logprobs = self._programs.update(
            state=self.state, frozen=self.frozen, reference=reference, batch=batch
        )
        host = jax.device_get(metrics)
        return {name: float(value) for name, value in host.items()}, np.asarray(logprobs)

    def logprobs(
        self, sequences: Sequence[TokenSequence], params: nnx.State | None = None, *, portion: int | None = None
    ) -> list[np.ndarray]:
        """Per sequence, the log-probability of each token ([T], 0 for the first) under `params`.

        Args:
          params: trained weights, such as `reference`; default: the current ones.
          portion: sequences of one batch; default: all. Batches that are larger than the updates' would enlarge the arrays
            of those, too, from then on (`BatchLayout`).
        """
        result = []
        for start in range(0, len(sequences), portion or len(sequences) or 1):
            part = sequences[start : start + (portion or len(sequences))]
            batch, index = self.layout.build(part, [s.loss_mask for s in part], [0.0] * len(part))
            result += self.batch_logprobs(batch, index, params)
        return result

    def batch_logprobs(self, batch: Batch, index: BatchIndex, params: nnx.State | None = None) -> list[np.ndarray]:
        """`logprobs` of a batch that is laid out already."""
        params = self.state.params if params is None else params
        return index.split(np.asarray(self._programs.logprobs(params, self.frozen, batch)))

    def with_reference(self, batch: Batch) -> Batch:
        """The batch with the reference's log-probabilities of its targets, which never leave the devices."""
        logprobs = self._programs.logprobs(self.reference, self.frozen, batch)
        placed = jax.device_put(logprobs, batch.ref_logprobs.sharding)
        return dataclasses.replace(batch, ref_logprobs=jax.block_until_ready(placed))

    def finite(self) -> bool:
        """Whether no trained weight is NaN or infinite. A loss tells of the weights before its update, not after."""
        return bool(self._finite(self.state.params))

    @property
    def compilations(self) -> int:
        """Number of programs compiled so far."""
        return self._compiled_before + compiled_programs(self._programs.logprobs, self._programs.update)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """The jitted programs of one learner; `update` donates the state."""

    update: (
        Any  # (state=, frozen=, reference=, batch=) -> (state, metrics, log-probs); reference: of an exact KL, or None
    )
    logprobs: Any  # (params, frozen, batch) -> log-probs


def trained_parameters(model: Decoder, frozen: Sequence[str] = ()) -> Any:
    """The filter (of flax.nnx) of what is trained: the adapter of a model that has one, else all but the named parts.

    Args:
      frozen: attributes of the model that are left as they are, such as `visual`.

    Raises:
      ValueError: the model has no such part.
    """
    parts = {path[0] for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    for name in frozen:
        if name not in parts:
            kind, known = model.architecture.model_type, ", ".join(sorted(map(str, parts)))
            raise ValueError(f"config.model.freeze: a {kind} model has no part {name!r}; it has {known}")
    if adapters(model):
        return nnx.LoRAParam
    return nnx.All(nnx.Param, lambda path, _: path[0] not in frozen) if frozen else nnx.Param


def jit_programs(
    model: Decoder,
    trainable: Any,
    homes: Any,
    layout: BatchLayout,
    optimizer: optax.GradientTransformation,
    loss: LossConfig,
    *,
    temperature: float,
    remat: Remat,
) -> Programs:
    """Programs for a model (or an abstract one); arguments as the Learner's. `homes`: shardings of its LearnerState."""
    attention, graph = Attention.on(layout.mesh), nnx.split(model, trainable, ...)[0]

    def score(params: nnx.State, frozen: nnx.State, reference: nnx.State | None, fields: dict[str, Any]) -> Scores:
        return target_scores(
            nnx.merge(graph, params, frozen),
            fields["tokens"],
            fields["targets"],
            fields["positions"],
            fields["segment_ids"],
            temperature=temperature,
            entropy=bool(loss.entropy_coef or loss.min_entropy),
            reference=None if reference is None else nnx.merge(graph, reference, frozen),
            direction="reverse" if loss.kl == "reverse" else "forward",
            remat=remat,
            attention=attention,
            images=fields.get("images"),
            image_index=fields.get("image_index"),
            segment_ends=fields.get("segment_ends"),
        )

    def logprobs(params: nnx.State, frozen: nnx.State, batch: Batch) -> Array:
        return _logprobs(layout, score, params, frozen, batch)

    def update(
        state: LearnerState, frozen: nnx.State, reference: nnx.State | None, batch: Batch
    ) -> tuple[LearnerState, dict[str, Array], Array]:
        with matmul_precision(model.compute_dtype):  # backward passes of kernels are traced outside of the model
            return _update(layout, score, optimizer, loss, state, frozen, reference, batch)

    small = replicated(layout.mesh)
    return Programs(
        logprobs=jax.jit(logprobs, out_shardings=small),
        update=jax.jit(update, donate_argnames="state", out_shardings=(homes, small, small)),
    )


def _all_finite(params: nnx.State) -> Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]).all()


@jax.jit
def _copied(params: nnx.State) -> nnx.State:
    return jax.tree.map(jnp.copy, params)


def abstract_state(params: nnx.State, optimizer: optax.GradientTransformation, mesh: Mesh) -> LearnerState:
    """The state of a learner as shapes with shardings, for abstract parameters that have them."""

    def place(leaf: jax.ShapeDtypeStruct, home: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=home)

    homes = _optimizer_homes(optimizer, params, mesh)
    return LearnerState(
        params=params,
        opt_state=jax.tree.map(place, jax.eval_shape(optimizer.init, params), homes),
        updates=jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh)),  # type: ignore[arg-type]
    )


def _optimizer_homes(optimizer: optax.GradientTransformation, params: nnx.State, mesh: Mesh) -> Any:
    """Of the optimiser's state: moments lie like their parameters (told by the path's end), the rest is replicated."""
    homes = {str(path): leaf.sharding for path, leaf in jax.tree.leaves_with_path(params)}

    def home(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.sharding.Sharding:
        ends = (str(path[i:]) for i in range(len(path)))
        return next((homes[end] for end in ends if end in homes), replicated(mesh)) if leaf.ndim else replicated(mesh)

    return jax.tree.map_with_path(home, jax.eval_shape(optimizer.init, params))


def _on_micro_batch(layout: BatchLayout, function: Callable[[dict[str, Any]], Any], batch: Batch, micro: Array) -> Any:
    """Applies `function` to micro-batch `micro`: [rows, time] arrays by field name, and its images; one branch per bucket.

    Gradients are taken inside `function`: differentiating through the branches would keep every branch's residuals.
    """
    fields = {name: getattr(batch, name) for name in TOKEN_FIELDS if getattr(batch, name) is not None}
    picked, images = jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(leaf, micro, keepdims=False), (fields, batch.images)
    )

    def branch(bucket: int) -> Callable[[dict[str, Array], Any], Any]:
        rows, length = layout.rows(bucket), layout.buckets[bucket]

        def run(picked: dict[str, Array], images: Any) -> Any:
            folded = {
                name: value[:, : rows * length].reshape(layout.shards * rows, length, *value.shape[2:])
                for name, value in picked.items()
            }
            return function(folded | ({} if images is None else {"images": images}))

        return run

    return jax.lax.switch(batch.buckets[micro], [branch(i) for i in range(len(layout.buckets))], picked, images)


def _unfold(layout: BatchLayout, values: Array) -> Array:
    """Per-token results [rows, time] of a micro-batch in the batch's arrangement, [D, W]."""
    flat = values.reshape(layout.shards, -1)
    return jnp.pad(flat, ((0, 0), (0, layout.width - flat.shape[1])))


def _logprobs(layout: BatchLayout, score: Score, params: nnx.State, frozen: nnx.State, batch: Batch) -> Array:
    """Log-probabilities of all targets, [M, D, W]."""

    def one(micro: Array, result: Array) -> Array:
        logprobs = _on_micro_batch(
            layout, lambda fields: _unfold(layout, score(params, frozen, None, fields).logprobs), batch, micro
        )
        return jax.lax.dynamic_update_index_in_dim(result, logprobs, micro, axis=0)

    return jax.lax.fori_loop(0, batch.count, one, jnp.zeros(batch.weights.shape, jnp.float32))


def objective(loss: LossConfig, scores: Scores, fields: dict[str, Any]) -> tuple[Array, dict[str, Array]]:
    """The weighted loss of a micro-batch and its terms.

    With `ratio="sequence"` every token of a sequence has the sequence's ratio, so that weights that add up to 1 / N in each of
    N sequences give the mean over sequences of min(r A, clip(r) A).

    Targets of weight 0 (whatever the policy did not sample) contribute exactly zero to value and gradient: they are
    masked before anything that could overflow. With `min_entropy`, only tokens at which the policy is undecided get the
    policy gradient (after arXiv 2506.01939, which takes the fifth with the highest entropy): where it is sure, sampling
    noise moves it and nothing is learnt.

    Args:
      scores: of the targets, [rows, time]; divergences where the KL is exact.
      fields: `weights`, `advantages`, `old_logprobs`, `ref_logprobs`, [rows, time] each; for the ratio of a sequence
        `segment_ids` too.

    Returns:
      The loss, and sums over tokens by name (`weight` is the sum of the weights).
    """
    weights = fields["weights"]
    trained = weights > 0
    logprobs = jnp.where(trained, scores.logprobs, 0.0)
    old = jnp.where(trained, fields["old_logprobs"], 0.0)
    now, then, advantages = logprobs, old, fields["advantages"]
    if loss.ratio == "sequence":
        now, then = sequence_sums(logprobs - old, fields["segment_ids"]), jnp.zeros_like(old)
        advantages = jnp.where(trained, advantages, 0.0)  # all tokens' gradients go through one ratio
    per_token, clipped = POLICY_LOSSES.get(loss.kind)(now, then, advantages, loss.clip_low, loss.clip_high)
    decided = trained & (jax.lax.stop_gradient(scores.entropies) >= loss.min_entropy) if loss.min_entropy else trained
    policy = (weights * jnp.where(decided, per_token, 0.0)).sum()
    total = policy
    metrics = {"pg_loss": policy, "clip_fraction": (weights * (clipped & decided)).sum(), "weight": weights.sum()}
    if loss.min_entropy:
        metrics["decision_share"] = (weights * decided).sum()
    if loss.kl_coef:
        if loss.kl in ("forward", "reverse"):
            divergences = scores.divergences
        else:
            divergences = kl_estimate(logprobs, jnp.where(trained, fields["ref_logprobs"], 0.0), loss.kl)
        divergence = (weights * jnp.where(trained, divergences, 0.0)).sum()
        total = total + loss.kl_coef * divergence
        metrics["kl"] = divergence
    if loss.entropy_coef:
        entropy = (weights * jnp.where(trained, scores.entropies, 0.0)).sum()
        total = total - loss.entropy_coef * entropy
        metrics["entropy"] = entropy
    metrics["loss"] = total
    return total, metrics


def _update(
    layout: BatchLayout,
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
        total, metrics = objective(loss, scores, fields)
        return total, (metrics, _unfold(layout, scores.logprobs))

    def gradient(micro: Array) -> tuple[nnx.State, dict[str, Array], Array]:
        def on_fields(fields: dict[str, Any]) -> tuple[nnx.State, dict[str, Array], Array]:
            grads, (metrics, logprobs) = jax.grad(total_loss, has_aux=True)(state.params, fields)
            return grads, metrics, logprobs

        return _on_micro_batch(layout, on_fields, batch, micro)

    def one(micro: Array, carry: tuple[Any, dict[str, Array], Array]) -> tuple[Any, dict[str, Array], Array]:
        grads, metrics, logprobs = gradient(micro)
        return (
            jax.tree.map(jnp.add, carry[0], grads),
            jax.tree.map(jnp.add, carry[1], metrics),
            jax.lax.dynamic_update_index_in_dim(carry[2], logprobs, micro, axis=0),
        )

    grads, metrics, _ = jax.eval_shape(gradient, jnp.int32(0))
    start = (grads, metrics, jax.eval_shape(lambda: jnp.zeros(batch.weights.shape, jnp.float32)))
    start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), start)
    grads, metrics, logprobs = jax.lax.fori_loop(0, batch.count, one, start)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = cast(nnx.State, optax.apply_updates(state.params, updates))
    weight = jnp.maximum(metrics.pop("weight"), 1e-9)
    metrics = {name: value if name.endswith("loss") else value / weight for name, value in metrics.items()}
    metrics["grad_norm"] = optax.global_norm(grads)
    return LearnerState(params=params, opt_state=opt_state, updates=state.updates + 1), metrics, logprobs
