"""The configuration of a comparison: which agents, on which benchmarks, with what in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from routerl_jax.comparison.benchmarks.benchmark import Benchmark
from routerl_jax.comparison.captions import CaptionConfig
from routerl_jax.comparison.papers.known import PAPER_TABLES
from routerl_jax.core.checked import Count, NonNegative, Positive, Seed, Size, checked
from routerl_jax.core.config import naming
from routerl_jax.core.patience import USUAL
from routerl_jax.evaluation.metrics import ANSWER, JUDGE
from routerl_jax.rewards.normalize import NORMALIZERS
from routerl_jax.training.config import EngineConfig, JudgeConfig, MeshConfig, ModelConfig, PolicyModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ComparisonConfig:
    """Agents on benchmarks. What is set here is the same for all of them."""

    # baselines, recipes and run directories (comparison.agents); --agents of launch.evaluate stands in their place
    agents: tuple[str, ...] = ("direct", "vanilla_rag")
    benchmarks: tuple[str, ...] = (
        "atlas",
    )  # comparison.benchmarks, or names of `own`; --benchmarks stands in their place
    questions: Count = 200  # of each benchmark, the first so many; 0: all
    k: Size = 3  # documents that a search shows, of each knowledge base that it asks
    searches: Size = 3  # rounds of searching on a question, at most
    turn_tokens: Count = 0  # most tokens of a turn; 0: each agent's own number
    instruct: bool = True  # agents say how to work, for policies that were not trained to work as they do
    # other fields of single agents, by the name in `agents`: {"ircot": {"reader": "none"}, "search_r1": {"answer_tokens": 32}}
    settings: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    metrics: tuple[str, ...] = (
        "em",
        "f1",
    )  # of evaluation.metrics.ANSWER, or judge: what is told with intervals and tested
    normalizer: str = "search_r1"  # rewards.normalize.NORMALIZERS
    reference: str = ""  # the agent that all others are tested against; empty: every two of them
    papers: tuple[str, ...] = ()  # tables of papers that the report has (comparison.papers), such as r1_searcher.table2
    temperature: NonNegative = 0.0  # of the sampling; 0 is greedy
    seed: Seed = 0  # of the sampling
    tool_timeout: Positive = USUAL  # seconds
    data: str = ""  # directory of the benchmarks' files
    encoder: str = ""  # of passages and tables, in the place of the benchmarks' own
    picture_encoder: str = ""  # of text_image, reverse_image and pages, likewise
    index: str = ""  # of passages and tables, likewise: scann, exact, auto
    retriever: str = ""  # in the place of dense_text: the kind of knowledge base that passages become, such as bm25
    # of the retriever's own configuration: {"llm": {"model": ..}} of "tree"
    retriever_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    own: Mapping[str, Benchmark] = dataclasses.field(default_factory=dict)  # benchmarks of one's own
    # the policy of all agents but runs, which have their own: a model on this machine's devices, or one behind an endpoint
    model: ModelConfig = ModelConfig()
    mesh: MeshConfig = MeshConfig()
    engine: EngineConfig = EngineConfig()
    chat_model: PolicyModelConfig = PolicyModelConfig()
    captions: CaptionConfig = (
        CaptionConfig()
    )  # with a `model`, pictures of questions become words, for policies that see none
    judge: JudgeConfig = JudgeConfig()  # with a `model`, it is asked about every answer

    def of_paper(self, name: str) -> ComparisonConfig:
        """With the agents, benchmarks and metrics of a paper's table, as far as they are ours and measured. Raises ValueError
        for a table that there is not."""
        table = PAPER_TABLES.get(name)
        metrics = tuple(metric for metric in table.metrics if metric != JUDGE or self.judge.model)
        return dataclasses.replace(
            self, agents=table.agents, benchmarks=table.benchmarks, metrics=metrics, papers=(*self.papers, name)
        )

    def __post_init__(self) -> None:
        with naming("config.normalizer"):
            NORMALIZERS.get(self.normalizer)
        for table in self.papers:
            with naming("config.papers"):
                PAPER_TABLES.get(table)
        for section in ("agents", "benchmarks", "metrics"):
            names = getattr(self, section)
            if not names:
                raise ValueError(f"config.{section} is empty: name at least one")
            if again := next((name for name in names if names.count(name) > 1), None):
                raise ValueError(f"config.{section} names {again!r} twice")
        if self.retriever_settings and not self.retriever:
            raise ValueError("config.retriever_settings say nothing without config.retriever: name the kind")
        for metric in self.metrics:
            if metric not in (*ANSWER, JUDGE):
                raise ValueError(f"config.metrics: {metric!r} is none of {', '.join((*ANSWER, JUDGE))}")
        if JUDGE in self.metrics and not self.judge.model:
            raise ValueError("config.metrics: 'judge' is never measured: name the language model, config.judge.model")
        if self.model.path and self.chat_model.model:
            raise ValueError(
                "config.model.path and config.chat_model.model are both set: there is one policy; clear one"
            )
