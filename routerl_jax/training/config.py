"""The configuration of a run: sections (sections.py), stages, controls, and checks that they fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from routerl_jax.core.config import Count, Seed, checked, from_config_dict, naming, override, unknown_key
from routerl_jax.core.registry import import_extension
from routerl_jax.learning.advantages import advantage_named
from routerl_jax.learning.losses import LossConfig
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.recipes.recipe import AgentConfig
from routerl_jax.services.config import JudgeConfig, PolicyModelConfig
from routerl_jax.training.credit import credit_named
from routerl_jax.training.loggers import check_log
from routerl_jax.training.profiler import profiled_steps
from routerl_jax.training.sections import (
    CalibrationConfig,
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    ForkCreditConfig,
    KnowledgeConfig,
    LearnerConfig,
    MeshConfig,
    ModelConfig,
    RolloutConfig,
    TurnCreditConfig,
    WarmStartConfig,
    WatchConfig,
    WebSnapshotConfig,
)

__all__ = [
    "AgentConfig",
    "CalibrationConfig",
    "CheckpointConfig",
    "ControlConfig",
    "DataConfig",
    "EngineConfig",
    "EvaluationConfig",
    "ForkCreditConfig",
    "JudgeConfig",
    "KnowledgeConfig",
    "LearnerConfig",
    "LossConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PolicyModelConfig",
    "RolloutConfig",
    "StageConfig",
    "TrainConfig",
    "TurnCreditConfig",
    "WarmStartConfig",
    "WatchConfig",
    "WebSnapshotConfig",
]

# Settings that a stage may change, by section.
STAGED = {
    "data": ("train", "train_range", "epochs"),
    "rollout": ("examples", "samples", "temperature", "top_p", "top_k", "tool_timeout", "forks", "refill"),
    "learner": tuple(
        field.name
        for field in dataclasses.fields(LearnerConfig)
        if field.name
        not in ("optimizer", "micro_tokens", "length_buckets", "share_prefixes", "replay_routing", "remat")
    ),
}


def _plain(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Changed settings with tuples instead of lists, so that a configuration read back from JSON equals the original."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in changes.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class StageConfig:
    """A phase of training with its own reward and, if given, its own settings.

    `data`, `rollout` and `learner` hold settings by their names in these sections, `learner.loss` included:
    `learner={"advantage": "reinforce_pp_baseline", "loss": {"kl_coef": 0.0}}`. A setting that a stage does not name is that of
    the run, not that of the stage before. Within `data`, a stage may change the training questions. It may not change
    `learner.optimizer` or the shapes of batches (`STAGED`).
    """

    start: Count = 0  # the stage's first step
    after: str = ""  # instead of `start`: begin at the end of the stage of this name, which must have data.epochs
    # restart the optimiser and its schedule, and measure a KL to the policy at the stage's start
    restart: bool = False
    # weights of rewards.terms.REWARD_TERMS, or their options: {"em": 1.0, "routerag.efficiency": {"weight": 1.0, "by": "cost"}}
    reward: Mapping[str, float | Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    data: Mapping[str, Any] = dataclasses.field(
        default_factory=dict
    )  # settings of config.data: train, train_range, epochs
    # settings of config.rollout: all but deterministic
    rollout: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # settings of config.learner: advantage, credit, loss, minibatches and others (STAGED)
    learner: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for section in ("data", "rollout", "learner"):
            object.__setattr__(self, section, _plain(getattr(self, section)))


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ControlConfig:
    """A second run for comparison with the main run, of one of three kinds:

    - `without` a stage: it starts where that stage began. The stage before it takes over its steps; those of the first stage go
      to the second.
    - with other `stages`, other training questions (`data`), other settings of the agent (`agent`), or several of these: it
      repeats all steps from the main run's initial policy.
    - `supervised`: supervised learning instead of all steps, from the main run's initial policy.
    """

    without: str = ""  # name of the stage to leave out
    # stages that replace the run's
    stages: Mapping[str, StageConfig] = dataclasses.field(default_factory=dict)
    # settings that replace those of config.data: train, train_range
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # settings that replace those of config.agent, in evaluation, too. Its `settings` are replaced one by one:
    # {"settings": {"looks": False}}
    agent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    supervised: WarmStartConfig = WarmStartConfig()  # used if its `steps` > 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", _plain(self.data))
        object.__setattr__(self, "agent", _plain(self.agent))


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class TrainConfig:
    """A whole run."""

    # rl: reinforcement learning; sft: a whole run of supervised learning on demonstrations
    kind: Literal["rl", "sft"] = "rl"
    # name in recipes.recipe.RECIPES: search, search_r1, r1_searcher, routerag, r1_router, mmsearch_r1, vrag_rl
    recipe: str = "search"
    # modules of your own that register what has no dotted path, such as a model family; imported before anything else
    imports: tuple[str, ...] = ()
    seed: Seed = 0  # seed of everything that is drawn at random
    steps: Count = 100  # training steps; 0 if data.epochs sets the length
    model: ModelConfig = ModelConfig()
    mesh: MeshConfig = MeshConfig()
    engine: EngineConfig = EngineConfig()
    agent: AgentConfig = AgentConfig()
    # the knowledge bases that the agent may search, by the names that it uses for them
    knowledge: Mapping[str, KnowledgeConfig] = dataclasses.field(default_factory=dict)
    snapshot: WebSnapshotConfig = WebSnapshotConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    # parts of training, in the order of their starts; one is enough
    stages: Mapping[str, StageConfig] = dataclasses.field(default_factory=lambda: {"main": StageConfig()})
    # comparison runs after the main one, in workdir/controls/NAME; their scores are listed beside its own
    controls: Mapping[str, ControlConfig] = dataclasses.field(default_factory=dict)
    learner: LearnerConfig = LearnerConfig()
    chat_model: PolicyModelConfig = PolicyModelConfig()  # an endpoint as the policy of launch.evaluate and launch.ask
    judge: JudgeConfig = JudgeConfig()  # the judge for reward terms such as `judge`, and for config.evaluation.judge
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watch: WatchConfig = WatchConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    # callbacks of your own, "package.module:Class", with their settings (training.callbacks)
    callbacks: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    log_episodes: Count = 16  # number of episodes per step that are written to workdir/episodes
    log_groups: bool = False  # write all attempts at a few questions instead of one attempt at each of many
    log_tokens: bool = False  # write the text, mask, log-probability and advantage of every token, too
    # steps that JAX's profiler traces, FIRST:END, such as 10:12 for steps 10 and 11 (training.profiler); empty: none
    profile: str = ""
    log: tuple[str, ...] = ()  # loggers besides metrics.jsonl: tensorboard, wandb (training.loggers)

    @property
    def aggregation_constant(self) -> int:
        """The tokens per sequence by which config.learner.aggregation='constant' divides."""
        return self.learner.aggregation_tokens or self.engine.max_length

    @property
    def uncounted(self) -> list[str]:
        """Stages whose length is given in passes over the questions and not yet counted in steps (training.stages)."""
        stages = self.stages if self.kind == "rl" else {}
        return [name for name, stage in stages.items() if stage.data.get("epochs", self.data.epochs)]

    def __post_init__(self) -> None:
        for module in self.imports:
            import_extension(module, "config.imports")
        self._check_passes()
        self._check_models()
        if self.kind == "sft":
            self._check_supervised()
        else:
            self._check_reinforced()
        self._check_learning()
        self._check_watch()
        self._check_controls()
        self._check_names()
        check_log(self.log)
        profiled_steps(self.profile, None if self.uncounted else self.steps)
        for name in self.stages:
            self.in_stage(name)

    def _check_models(self) -> None:
        """Checks the settings of the models: the policy or its chat model, and the judge."""
        if not (self.model.path or self.model.architecture):
            raise ValueError("config.model.path is empty: give it, or an architecture")
        if self.model.sight and not self.model.path:
            raise ValueError("config.model.sight is for a policy whose language is learnt: give config.model.path")
        if self.model.lora.rank and self.learner.optimizer.kind != "adamw":
            raise ValueError(
                "config.learner.optimizer.kind='muon' works on the layers' matrices, which config.model.lora freezes; use "
                "'adamw'"
            )
        if self.chat_model.model and not self.agent.instruct:
            raise ValueError(
                f"config.chat_model.model={self.chat_model.model!r} has to be told how to work: set config.agent.instruct=True"
            )
        if self.evaluation.judge and not self.judge.model:
            raise ValueError(
                "config.evaluation.judge is on, and config.judge.model is empty: name the language model that judges"
            )

    def _check_supervised(self) -> None:
        """Checks that a supervised run has no settings that it would ignore."""
        if self.warm_start.steps:
            raise ValueError(
                "config.warm_start.steps comes before reinforcement learning; a run of kind 'sft' has config.steps"
            )
        if self.mesh.engine:
            raise ValueError(
                f"config.mesh.engine={self.mesh.engine}: a run of kind 'sft' generates nothing; set it to 0"
            )
        if self.warm_start.train_frozen:
            raise ValueError(
                "config.warm_start.train_frozen is for the phase before reinforcement learning: in a run of kind 'sft', leave "
                "config.model.freeze empty instead"
            )

    def _check_reinforced(self) -> None:
        """Checks that a run of reinforcement learning has what it needs, and what only some runs use."""
        if not self.knowledge:
            raise ValueError("config.knowledge is empty: name at least one knowledge base")
        if self.rollout.refill:
            _check_refill(self)
        if self.rollout.ahead or self.rollout.partial or self.mesh.engine:
            _check_asynchronous(self)
        if self.engine.weight_qtype or self.engine.cache_qtype:
            _check_quantized(self)
        if not any(stage.start == 0 and not stage.after for stage in self.stages.values()):
            raise ValueError("config.stages: no stage starts at step 0")

    def _check_learning(self) -> None:
        """Checks that stages, rollouts and learner fit each other."""
        rollout, learner, advantage = self.rollout, self.learner, self.learner.advantage
        if len({stage.after or stage.start for stage in self.stages.values()}) < len(self.stages):
            raise ValueError("config.stages: two stages start at the same step, so one of them would never be")
        if learner.minibatches > rollout.examples * rollout.samples:
            raise ValueError(
                "config.learner.minibatches exceeds the episodes of a step (rollout.examples * rollout.samples)"
            )
        if rollout.forks and not rollout.deterministic:
            raise ValueError(
                f"config.rollout.forks={rollout.forks} with config.rollout.deterministic=False: a forked attempt replays what "
                "was done in a fixed order; leave deterministic on"
            )
        if credit_named(learner.credit).forked != (rollout.forks > 0):
            raise ValueError(
                f"config.learner.credit={learner.credit!r} and config.rollout.forks={rollout.forks}: attempts are forked for "
                "credit='counterfactual', which takes forks of at least 1, and for nothing else"
            )
        if learner.loss.kl_coef and learner.reward_kl_coef:
            raise ValueError("config.learner.loss.kl_coef and config.learner.reward_kl_coef are both set; use one")
        alone = rollout.samples == 1 and not rollout.forks
        if self.kind == "rl" and alone and advantage_named(advantage).grouped:
            raise ValueError(
                f"config.learner.advantage={advantage!r} compares attempts: set config.rollout.samples above 1"
                + (" (or let it say that it compares none: @advantage(grouped=False))" if ":" in advantage else "")
            )
        if learner.length_buckets and max(learner.length_buckets) < self.engine.max_length:
            raise ValueError(
                f"config.learner.length_buckets={learner.length_buckets} end below config.engine.max_length="
                f"{self.engine.max_length}: add a bucket of that length"
            )

    def _check_passes(self) -> None:
        """Checks that a run whose length is given in passes has no other length, and that a supervised run has no stages."""
        if self.kind == "sft":
            return
        for name, stage in self.stages.items():
            if stage.after and (stage.after not in self.uncounted or stage.after == name):
                raise ValueError(
                    f"config.stages.{name}.after={stage.after!r} is no stage whose data.epochs says where it ends; give "
                    f"config.stages.{name}.start, or that stage data={{'epochs': ..}}"
                )
            if stage.after and stage.start:
                raise ValueError(
                    f"config.stages.{name} has both start={stage.start} and after={stage.after!r}: give one of them"
                )
        if self.uncounted and self.steps:
            raise ValueError(
                f"config.steps={self.steps} and data.epochs (stage {self.uncounted[0]!r}) are both given: set config.steps=0, "
                "as passes over the questions say how many steps there are, or data.epochs=0"
            )

    def _check_watch(self) -> None:
        """Checks that the run measures the metrics that are watched."""
        watched = {*self.watch.least, *self.watch.most, *self.watch.falls, *self.watch.drops}
        for prefix, kind, settings in (
            ("validation/", "rl", ("every",)),
            ("canary/", "rl", ("every", "canary")),
            ("held_out/", "sft", ("every",)),
        ):
            name = next((name for name in sorted(watched) if name.startswith(prefix)), "")
            if name and self.kind != kind:
                raise ValueError(f"config.watch bounds {name}, which no run of kind={self.kind!r} measures")
            missing = next((setting for setting in settings if not getattr(self.evaluation, setting)), "")
            if name and missing:
                raise ValueError(
                    f"config.watch bounds {name}, which is never measured: set config.evaluation.{missing}"
                )

    def _check_controls(self) -> None:
        """Checks that each control is of exactly one kind, and that its settings fit."""
        for name, control in self.controls.items():
            kinds = [control.without, control.stages or control.data or control.agent, control.supervised.steps]
            if sum(map(bool, kinds)) != 1:
                raise ValueError(
                    f"config.controls.{name}: give one of `without`, a stage; some of `stages`, `data` and `agent`; "
                    "`supervised` with steps above 0"
                )
            if kinds[1]:
                self.otherwise(name)
            if not control.without:
                continue
            if control.without not in self.stages:
                raise ValueError(
                    f"config.controls.{name}.without={control.without!r} is no stage; there are: {', '.join(self.stages)}"
                )
            if len(self.stages) == 1:
                raise ValueError(
                    f"config.controls.{name}: {control.without!r} is the only stage, and nothing would be left without it"
                )
            if self.uncounted:
                continue  # checked later, when the steps of its stages are counted
            if self.stages[control.without].start >= self.steps:
                raise ValueError(
                    f"config.controls.{name}: the stage {control.without!r} must begin before the run's end, "
                    f"config.steps={self.steps}"
                )
            if self.learner.optimizer.schedule != "constant" and self._has_updates_of_its_own(control.without):
                raise ValueError(
                    f"config.controls.{name}: the stage {control.without!r} and {self.neighbour(control.without)!r}, which has "
                    "its steps in the control, do not share a schedule (a restart lies between them, or they make other "
                    "numbers of updates a step), so it would be longer or shorter than in the main run; take "
                    "config.learner.optimizer.schedule='constant'"
                )

    def otherwise(self, name: str) -> TrainConfig:
        """The run with a control's stages, training questions and settings of the agent instead of its own.

        Raises:
          ValueError: the control changes a setting that it may not change, or its settings don't fit together.
        """
        control, path = self.controls[name], f"config.controls.{name}"
        for key in control.data:
            if key not in ("train", "train_range"):
                raise ValueError(unknown_key(f"{path}.data", key, ("train", "train_range")))
        for stage, settings in control.stages.items():
            if settings.after or settings.data.get("epochs"):
                raise ValueError(
                    f"{path}.stages.{stage}: a control takes as many steps as the run; give `start`, and no `after` or epochs"
                )
        with naming(path):
            data = override(self.data, control.data, f"{path}.data")
            changes = dict(control.agent)
            if isinstance(settings := changes.get("settings"), Mapping):
                changes["settings"] = {**self.agent.settings, **settings}
            agent = override(self.agent, changes, f"{path}.agent")
            return dataclasses.replace(self, controls={}, data=data, agent=agent, stages=control.stages or self.stages)

    def neighbour(self, name: str) -> str:
        """The stage that takes over another's steps in a run without it: the one before it, or the second for the first."""
        order = sorted(self.stages, key=lambda stage: self.stages[stage].start)
        index = order.index(name)
        return order[index - 1] if index else order[1]

    def _has_updates_of_its_own(self, name: str) -> bool:
        """Whether a schedule would span another number of updates if a stage's neighbour replaced it."""
        pair = sorted((name, self.neighbour(name)), key=lambda stage: self.stages[stage].start)
        updates = [self.in_stage(stage).learner.updates for stage in pair]
        return self.stages[pair[1]].restart or updates[0] != updates[1]

    def _check_names(self) -> None:
        """Checks that all entries of results.json have different names."""
        for section, reserved in (("stages", ()), ("controls", self.stages)):
            if name := next(
                (name for name in getattr(self, section) if name in ("warm_start", "trained", *reserved)), None
            ):
                raise ValueError(
                    f"config.{section}.{name}: call it something else; results.json has another policy so named"
                )
        called = [*self.evaluation.names.values(), *self.controls]
        if repeated := next((name for name in called if called.count(name) > 1), None):
            raise ValueError(
                f"config.evaluation.names: two agents would be {repeated!r} in results.json; call one something else"
            )

    def in_stage(self, name: str) -> TrainConfig:
        """The settings of a run that consists of this stage alone.

        Raises:
          ValueError: the stage changes a setting that no stage may change, or its settings don't fit together.
        """
        stage, path = self.stages[name], f"config.stages.{name}"
        if len(self.stages) == 1 and not (stage.start or stage.data or stage.rollout or stage.learner):
            return self
        changed = {section: getattr(stage, section) for section in STAGED}
        for section, changes in changed.items():
            for key in changes:
                if key not in STAGED[section]:
                    raise ValueError(unknown_key(f"{path}.{section}", key, STAGED[section]))
        sections = {
            section: override(getattr(self, section), changes, f"{path}.{section}")
            for section, changes in changed.items()
        }
        try:
            return dataclasses.replace(self, stages={name: StageConfig(reward=stage.reward)}, controls={}, **sections)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def kept_config(kept: Any) -> TrainConfig:
    """The configuration in a run's config.json. In earlier versions 0 questions of an evaluation were all.

    Raises:
      ValueError: a key is unknown or a value has the wrong type; names the key.
    """
    if isinstance(kept, dict) and isinstance(evaluation := kept.get("evaluation"), dict):
        everything = {key: -1 for key in ("examples", "final_examples") if evaluation.get(key) == 0}
        kept = {**kept, "evaluation": {**evaluation, **everything}}
    return from_config_dict(TrainConfig, kept)


def _check_refill(config: TrainConfig) -> None:
    """Checks that groups without signal can be replaced (config.rollout.refill)."""
    learner = config.learner
    start = f"config.rollout.refill={config.rollout.refill} replaces groups whose rewards are all equal, and "
    if not advantage_named(learner.advantage).grouped:
        raise ValueError(f"{start}config.learner.advantage={learner.advantage!r} learns from them: set refill to 0")
    if not learner.drop_no_signal:
        raise ValueError(f"{start}config.learner.drop_no_signal=False keeps them: set one of both back")
    if not credit_named(learner.credit).whole:
        raise ValueError(
            f"{start}with config.learner.credit={learner.credit!r} they may teach: take 'episode', or refill=0"
        )
    if learner.reward_kl_coef:
        raise ValueError(
            f"{start}with config.learner.reward_kl_coef={learner.reward_kl_coef} they teach all the same: take a KL in the "
            "loss, or refill=0"
        )
    if config.data.epochs:
        raise ValueError(
            f"{start}config.data.epochs={config.data.epochs} counts steps that draw rollout.examples questions each: give "
            "config.steps instead"
        )


def _check_asynchronous(config: TrainConfig) -> None:
    """Checks that rollouts can be ahead of the updates, the engine on devices of its own, and attempts unfinished when a step's
    batch is taken (config.rollout.partial)."""
    rollout, learner = config.rollout, config.learner
    if config.mesh.engine and not rollout.ahead:
        raise ValueError(
            f"config.mesh.engine={config.mesh.engine} with config.rollout.ahead=0: engine and learner would wait for each "
            "other; set config.rollout.ahead=1"
        )
    uncorrected = learner.loss.kind == "reinforce" and not learner.importance_cap
    remedy = (
        "with config.learner.loss.kind='reinforce': nothing corrects for the weights that sampled; set "
        "config.learner.importance_cap, e.g. 2, or take loss.kind='clip'"
    )
    if rollout.ahead and uncorrected:
        raise ValueError(f"config.rollout.ahead=1 {remedy}")
    if not rollout.partial:
        return
    start = f"config.rollout.partial={rollout.partial}"
    if rollout.partial > rollout.examples:
        raise ValueError(
            f"{start} exceeds config.rollout.examples={rollout.examples}: more groups would be under way than a step learns "
            "from, and they could not keep max_staleness; lower it"
        )
    if rollout.max_staleness <= rollout.ahead:
        raise ValueError(
            f"{start} with config.rollout.max_staleness={rollout.max_staleness} and ahead={rollout.ahead}: every group would "
            f"be waited for; raise max_staleness to {rollout.ahead + 1} or more"
        )
    if config.checkpoint.every == 1:
        raise ValueError(
            f"{start} with config.checkpoint.every=1: a step before a checkpoint waits for all its groups, and so every step "
            "would; write fewer checkpoints, or set partial to 0"
        )
    if uncorrected:
        raise ValueError(f"{start} {remedy}")


def _check_quantized(config: TrainConfig) -> None:
    """Checks that the learner corrects for an engine that computes with int8 (config.engine.weight_qtype, cache_qtype)."""
    learner, names = config.learner, ("weight_qtype", "cache_qtype")
    types = [f"{name}={value!r}" for name in names if (value := getattr(config.engine, name))]
    start = (
        f"config.engine.{' and '.join(types)}: the sampler's probabilities are not the learner's. Set config.learner."
    )
    if learner.loss.ratio != "sequence" and not learner.importance_cap:
        raise ValueError(f"{start}importance_cap, e.g. 2, which corrects for it token by token")
    if learner.loss.ratio == "sequence" and not (learner.mask_sequence_ratio or learner.mask_mean_ratio):
        # which goes with no importance_cap
        raise ValueError(f"{start}mask_mean_ratio, e.g. 1.05: with loss.ratio='sequence' it corrects")
