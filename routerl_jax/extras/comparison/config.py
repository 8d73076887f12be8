"""The configuration of a comparison: the agents, the benchmarks, and the common settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from routerl_jax.core.config import Amount, Count, Fraction, NonNegative, Positive, Seed, Size, checked, naming
from routerl_jax.core.time_limit import DEFAULT_SECONDS
from routerl_jax.evaluation.metrics import ANSWER, JUDGE, MOST_FAILED
from routerl_jax.extras.comparison.benchmarks import BENCHMARKS, Benchmark
from routerl_jax.extras.comparison.papers.figure import PAPER_FIGURES
from routerl_jax.extras.comparison.papers.table import PAPER_TABLES
from routerl_jax.rewards.metrics import NORMALIZERS
from routerl_jax.services.config import ChatModelConfig
from routerl_jax.training.config import (
    EngineConfig,
    JudgeConfig,
    KnowledgeConfig,
    MeshConfig,
    ModelConfig,
    PolicyModelConfig,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class CaptionConfig(ChatModelConfig):
    """A vision model that describes the questions' pictures. With an empty `model`, pictures are not replaced."""

    max_tokens: Size = 256  # most tokens of a caption


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ComparisonConfig:
    """A comparison of agents on benchmarks. All settings are common to all agents."""

    # baselines, recipes and run directories (extras.comparison.agents); --agents of launch.evaluate replaces them
    agents: tuple[str, ...] = ("direct", "vanilla_rag")
    # extras.comparison.benchmarks, or names of `own`; --benchmarks of launch.evaluate replaces them
    benchmarks: tuple[str, ...] = ("atlas",)
    questions: Amount = 200  # the first so many questions of each benchmark; -1: all
    k: Size = 3  # documents per search and knowledge base
    searches: Size = 3  # most rounds of searching per question
    turn_tokens: Count = 0  # most tokens of a turn; 0: each agent's own limit
    instruct: bool = True  # agents give instructions, for policies that were not trained with them
    # other fields of single agents, by the name in `agents`: {"ircot": {"reader": "none"}, "search_r1": {"answer_tokens": 32}}
    settings: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    # metrics of evaluation.metrics.ANSWER, or judge; they are reported with intervals and tested
    metrics: tuple[str, ...] = ("em", "f1")
    normalizer: str = "search_r1"  # rewards.metrics.NORMALIZERS
    reference: str = ""  # the agent that all others are tested against; empty: every pair of agents is tested
    # tables of papers in the report (extras.comparison.papers), such as r1_searcher.table2
    papers: tuple[str, ...] = ()
    # further agents, by the rows of the papers' tables that they fill: {"grpo": "runs/a", "reinforce_pp": "runs/b"}
    rows: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # directories of other comparisons (of another policy, corpus or encoder) whose rows are added to the papers' tables
    compare_with: tuple[str, ...] = ()
    # if a benchmark or the policy lacks what an agent needs. True: leave the agent out and report it; False: raise an error
    skip_unfit: bool = False
    # if the files of a benchmark are not there. True: leave the benchmark out and report it; False: raise an error
    skip_absent: bool = False
    temperature: NonNegative = 0.0  # temperature of the sampling; 0 is greedy
    seed: Seed = 0  # seed of the sampling
    # attempts of each agent at each question, with the seeds `seed`, `seed` + 1, ..; their variance is in the intervals
    seeds: Size = 1
    # greatest share of an agent's questions without a whole reply of the policy, or without a verdict. Above it the agent is
    # not tested on the benchmark, nothing is bold there, and launch.evaluate exits with 1 (with --allow_failures: 0)
    most_failed: Fraction = MOST_FAILED
    tool_timeout: Positive = DEFAULT_SECONDS  # seconds after which a search counts as failed
    data: str = ""  # directory with the files of the benchmarks
    encoder: str = ""  # encoder of passages and tables; replaces the benchmarks' own
    picture_encoder: str = ""  # encoder of text_image, reverse_image and pages; replaces likewise
    index: str = ""  # index of passages and tables: scann, exact, auto; replaces likewise
    retriever: str = ""  # kind of knowledge base that replaces dense_text, such as bm25
    # settings of `retriever`, such as {"llm": {"model": ..}} of "tree"
    retriever_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # knowledge bases of all benchmarks, instead of their own. A source "own:text" is that of the benchmark's own `text`
    knowledge: Mapping[str, KnowledgeConfig] = dataclasses.field(default_factory=dict)
    own: Mapping[str, Benchmark] = dataclasses.field(default_factory=dict)  # your own benchmarks
    # the policy of all agents except runs, which have their own: a model on this machine's devices, or behind an endpoint
    model: ModelConfig = ModelConfig()
    mesh: MeshConfig = MeshConfig()
    engine: EngineConfig = EngineConfig()
    chat_model: PolicyModelConfig = PolicyModelConfig()
    # with a `model`, captions replace the pictures of questions, for policies that see no pictures
    captions: CaptionConfig = CaptionConfig()
    judge: JudgeConfig = JudgeConfig()  # with a `model`, the judge is asked about every answer
    # judged answers of each agent and benchmark on which the judge is checked for bias (services.judge); 0: none
    judge_checks: Count = 0

    @property
    def all_agents(self) -> tuple[str, ...]:
        """All agents, including those of `rows`. Raises ValueError if a row is in none of the papers' tables."""
        if not self.rows:
            return self.agents
        tables = [PAPER_TABLES.get(name) for name in self.papers]
        keys = [key for table in tables for key in table.keys]
        for key in self.rows:
            if key not in keys:
                known_keys = ", ".join(dict.fromkeys(keys)) or "none (config.papers, --report)"
                raise ValueError(
                    f"config.rows: no table of a paper has a row {key!r} that is to be named; there are {known_keys}"
                )
        return tuple(dict.fromkeys([*self.agents, *(agent for table in tables for agent in table.added(self.rows))]))

    def of_paper(self, name: str) -> ComparisonConfig:
        """This configuration with the agents, benchmarks, knowledge bases and metrics of a paper's table that exist here.

        Raises:
          ValueError: there is no such table, it is a figure, it needs runs that `rows` does not name, or its benchmarks do not
            exist here.
        """
        if name in PAPER_FIGURES:
            figure = PAPER_FIGURES.get(name)
            raise ValueError(f"{figure.title} is a picture of what was run ({figure.needs}): name it alone")
        table = PAPER_TABLES.get(name)
        if not table.agents and not self.rows:
            keys = ", ".join(f"'{key}': DIRECTORY" for key in table.keys)
            raise ValueError(f'{table.title} is of trained runs: name yours, --config.rows="{{{keys}}}", all or some')
        benchmarks = tuple(
            benchmark for benchmark in table.benchmarks if benchmark in BENCHMARKS or benchmark in self.own
        )
        if not benchmarks:
            raise ValueError(
                f"{table.title} is on {', '.join(table.benchmarks)}, and no benchmark is called so yet: describe them in "
                "config.own (docs/evaluation.md)"
            )
        metrics = tuple(
            metric for metric in table.metrics if metric in ANSWER or (metric == JUDGE and self.judge.model)
        )
        return dataclasses.replace(
            self,
            agents=table.agents,
            benchmarks=benchmarks,
            metrics=metrics or self.metrics,
            knowledge=self.knowledge or table.knowledge,
            papers=(*self.papers, name),
            skip_unfit=True,
            skip_absent=True,
        )

    def __post_init__(self) -> None:
        with naming("config.normalizer"):
            NORMALIZERS.get(self.normalizer)
        for table in self.papers:
            with naming("config.papers"):
                PAPER_TABLES.get(table)
        for section in ("agents", "benchmarks", "metrics"):
            names = getattr(self, section)
            if not names and not (section == "agents" and self.rows):
                raise ValueError(f"config.{section} is empty: name at least one")
            if duplicate := next((name for name in names if names.count(name) > 1), None):
                raise ValueError(f"config.{section} names {duplicate!r} twice")
        if self.retriever_settings and not self.retriever:
            raise ValueError("config.retriever_settings say nothing without config.retriever: name the kind")
        for metric in self.metrics:
            if metric not in (*ANSWER, JUDGE):
                raise ValueError(f"config.metrics: {metric!r} is none of {', '.join((*ANSWER, JUDGE))}")
        if self.seeds > 1 and not self.temperature:
            raise ValueError(
                f"config.seeds={self.seeds} with config.temperature=0 would make the same attempts again: set a temperature"
            )
        if JUDGE in self.metrics and not self.judge.model:
            raise ValueError("config.metrics: 'judge' is never measured: name the language model, config.judge.model")
        if self.judge_checks and not self.judge.model:
            raise ValueError(
                f"config.judge_checks={self.judge_checks}: there is no judge; name one, config.judge.model"
            )
        if self.model.path and self.chat_model.model:
            raise ValueError(
                "config.model.path and config.chat_model.model are both set: there is one policy; clear one"
            )
