"""AdamW or Muon with a schedule, from configuration."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import optax
import optax.contrib
from flax import nnx

from routerl_jax.core.config import BelowOne, Count, Fraction, NonNegative, Positive, checked

# Muon works on matrices. For each weight of a (stacked) layer: its input axes (summed over) and its output axes. The weights of
# experts (models/experts.py) have one axis more, the experts', before them.
_MATRICES = {
    "q": ((1,), (2, 3)),
    "k": ((1,), (2, 3)),
    "v": ((1,), (2, 3)),
    "o": ((1, 2), (3,)),
    "gate": ((1,), (2,)),
    "up": ((1,), (2,)),
    "down": ((1,), (2,)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class OptimizerConfig:
    """Optimiser settings. Durations are in updates, not in rollout steps."""

    kind: Literal["adamw", "muon"] = "adamw"  # muon: for layers' matrices, scaled to AdamW's step size; AdamW elsewhere
    lr: NonNegative = 1e-6  # learning rate, after the warm-up
    adam_lr: NonNegative = 0.0  # muon: rate of the weights that AdamW trains (embeddings, norms, biases); 0: lr
    # schedule of the learning rate after the warm-up, from `lr` to its end
    schedule: Literal["constant", "linear", "cosine", "sigmoid"] = "constant"
    warmup: Count = 0  # updates of linear warm-up from 0
    decay_to: Fraction = 0.1  # final learning rate as a share of lr (linear, cosine and sigmoid)
    # sigmoid: number of updates after the warm-up at which the rate is midway between lr and its end; 0: half of all
    midpoint: Count = 0
    # decoupled; adamw: of all but norm scales and biases, muon: of the layers' matrices alone (so not of embeddings)
    weight_decay: NonNegative = 0.01
    b1: BelowOne = 0.9  # decay of Adam's mean of gradients
    b2: BelowOne = 0.95  # adamw: decay of Adam's mean of squared gradients; muon: 0.999, whatever is set here
    max_grad_norm: Positive = 1.0  # gradients of a larger norm are scaled down to it

    def __post_init__(self) -> None:
        if self.midpoint and self.schedule != "sigmoid":
            raise ValueError(
                f"optimizer.midpoint={self.midpoint} is of schedule='sigmoid', not of {self.schedule!r}: set it to 0"
            )

    def learning_rate(self, updates: int, peak: float = 0.0) -> optax.Schedule:
        """The learning rate by update number, for a run of `updates` updates; `peak` instead of `lr` if given."""
        peak = peak or self.lr
        rest = max(updates - self.warmup, 1)
        if self.schedule == "linear":
            main = optax.linear_schedule(peak, peak * self.decay_to, rest)
        elif self.schedule == "cosine":
            main = optax.cosine_decay_schedule(peak, rest, alpha=self.decay_to)
        elif self.schedule == "sigmoid":
            main = _sigmoid_decay(peak, peak * self.decay_to, self.midpoint or rest / 2)
        else:
            main = optax.constant_schedule(peak)
        if not self.warmup:
            return main
        return optax.join_schedules([optax.linear_schedule(0.0, peak, self.warmup), main], [self.warmup])

    def build(self, updates: int) -> optax.GradientTransformation:
        """The gradient transformation. With AdamW, all weights decay but norm scales and biases; with Muon, what AdamW trains
        beside it (embeddings, the head, norm scales, biases) does not decay.

        Equal optimisers are the same object, so that learners share the programs that are compiled for them."""
        return _build(self, 0 if self.schedule == "constant" else updates)


@functools.lru_cache(maxsize=64)
def _build(settings: OptimizerConfig, updates: int) -> optax.GradientTransformation:
    lr = settings.learning_rate(updates)
    if settings.kind == "muon":
        step = optax.contrib.muon(
            lr,
            adam_learning_rate=settings.learning_rate(updates, settings.adam_lr),
            adam_b1=settings.b1,
            adam_b2=settings.b2,
            weight_decay=settings.weight_decay,
            muon_weight_dimension_numbers=_matrices,
            consistent_rms=0.2,  # the size of AdamW's steps (arXiv 2502.16982, section 2.2)
        )
    else:
        step = optax.adamw(lr, b1=settings.b1, b2=settings.b2, weight_decay=settings.weight_decay, mask=_decayed)
    return optax.chain(optax.clip_by_global_norm(settings.max_grad_norm), step)


def _sigmoid_decay(start: float, end: float, midpoint: float) -> optax.Schedule:
    """end + (start - end) * sigmoid((midpoint - t) / width), where the width is a tenth of the midpoint.

    So 98 % of the decay lies between 0.54 and 1.46 times the midpoint, whatever the run's length. This is the schedule of
    MMSearch-R1's released code (there, `lr_sigmoid_decay_ratio` is 1 - end / start, `lr_sigmoid_decay_warmup_steps` the
    midpoint).
    """
    return lambda count: end + (start - end) * jax.nn.sigmoid(10 * (midpoint - count) / midpoint)


def _matrices(params: Any) -> Any:
    """The matrix axes of each parameter for Muon, or None if AdamW trains it."""
    flat = []
    for path, variable in nnx.to_flat_state(params):
        axes = _MATRICES.get(str(path[-1]))
        if axes and "experts" in path:
            axes = tuple(tuple(axis + 1 for axis in group) for group in axes)
        flat.append((path, variable.replace(axes and optax.contrib.MuonDimensionNumbers(*axes))))
    return nnx.from_flat_state(flat)


def _decayed(params: nnx.State) -> nnx.State:
    """True for parameters with weight decay: all but norm scales and biases, which are recognised by their names."""
    flat = [
        (path, variable.replace(not any(word in str(path[-1]) for word in ("norm", "bias"))))
        for path, variable in nnx.to_flat_state(params)
    ]
    return nnx.from_flat_state(flat)
