"""Checks that the settings of rollouts fit the other sections of a configuration."""

from __future__ import annotations

from routerl_jax.learning.advantages import advantage_named
from routerl_jax.training.credit.kinds import credit_named
from routerl_jax.training.learner_config import LearnerConfig
from routerl_jax.training.sections import CheckpointConfig, DataConfig, EngineConfig, MeshConfig, RolloutConfig

Checks = list[tuple[bool, str]]  # whether all is fine, and the error if not


def refill_checks(rollout: RolloutConfig, learner: LearnerConfig, data: DataConfig) -> Checks:
    """Whether groups without signal can be replaced (config.rollout.refill)."""
    if not rollout.refill:
        return []
    start = f"config.rollout.refill={rollout.refill} replaces groups whose rewards are all equal, and "
    grouped, whole = advantage_named(learner.advantage).grouped, credit_named(learner.credit).whole
    return [
        (grouped, f"{start}config.learner.advantage={learner.advantage!r} learns from them: set refill to 0"),
        (learner.drop_no_signal, f"{start}config.learner.drop_no_signal=False keeps them: set one of both back"),
        (whole, f"{start}with config.learner.credit={learner.credit!r} they may teach: take 'episode', or refill=0"),
        (
            not learner.reward_kl_coef,
            f"{start}with config.learner.reward_kl_coef={learner.reward_kl_coef} they teach all the same: take a KL in the "
            "loss, or refill=0",
        ),
        (
            not data.epochs,
            f"{start}config.data.epochs={data.epochs} counts steps that draw rollout.examples questions each: give "
            "config.steps instead",
        ),
    ]


def ahead_checks(rollout: RolloutConfig, learner: LearnerConfig, mesh: MeshConfig) -> Checks:
    """Whether rollouts can be ahead of the updates, and the engine on devices of its own."""
    return [
        (
            not mesh.engine or rollout.ahead > 0,
            f"config.mesh.engine={mesh.engine} with config.rollout.ahead=0: engine and learner would wait for each other; set "
            "config.rollout.ahead=1",
        ),
        (not rollout.ahead or _corrects(learner), f"config.rollout.ahead=1 {_UNCORRECTED}"),
    ]


def partial_checks(rollout: RolloutConfig, learner: LearnerConfig, checkpoint: CheckpointConfig) -> Checks:
    """Whether attempts may be unfinished when a step's batch is taken (config.rollout.partial)."""
    if not rollout.partial:
        return []
    start = f"config.rollout.partial={rollout.partial}"
    return [
        (
            rollout.partial <= rollout.examples,
            f"{start} exceeds config.rollout.examples={rollout.examples}: more groups would be under way than a step learns "
            "from, and they could not keep max_staleness; lower it",
        ),
        (
            rollout.max_staleness > rollout.ahead,
            f"{start} with config.rollout.max_staleness={rollout.max_staleness} and ahead={rollout.ahead}: every group would "
            f"be waited for; raise max_staleness to {rollout.ahead + 1} or more",
        ),
        (
            checkpoint.every != 1,
            f"{start} with config.checkpoint.every=1: a step before a checkpoint waits for all its groups, and so every step "
            "would; write fewer checkpoints, or set partial to 0",
        ),
        (_corrects(learner), f"{start} {_UNCORRECTED}"),
    ]


def quantized_checks(engine: EngineConfig, learner: LearnerConfig) -> Checks:
    """Whether the learner corrects for an engine that computes with int8 (config.engine.weight_qtype, cache_qtype)."""
    types = [f"{name}={value!r}" for name in ("weight_qtype", "cache_qtype") if (value := getattr(engine, name))]
    if not types:
        return []
    start = (
        f"config.engine.{' and '.join(types)}: the sampler's probabilities are not the learner's. Set config.learner."
    )
    if learner.loss.ratio == "sequence":  # goes with no importance_cap
        masked = bool(learner.mask_sequence_ratio or learner.mask_mean_ratio)
        return [(masked, f"{start}mask_mean_ratio, e.g. 1.05: with loss.ratio='sequence' it corrects")]
    return [(learner.importance_cap > 0, f"{start}importance_cap, e.g. 2, which corrects for it token by token")]


_UNCORRECTED = (
    "with config.learner.loss.kind='reinforce': nothing corrects for the weights that sampled; set "
    "config.learner.importance_cap, e.g. 2, or take loss.kind='clip'"
)


def _corrects(learner: LearnerConfig) -> bool:
    return learner.loss.kind != "reinforce" or learner.importance_cap > 0
