"""The configuration of a job in which a planner and a grounder make VRAG-RL's supervised data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from routerl_jax.agents.config import AgentConfig
from routerl_jax.core.checked import Count, NonNegative, Positive, PositiveFraction, Seed, Size, checked
from routerl_jax.core.config import naming
from routerl_jax.llms.config import ChatModelConfig, JudgeConfig
from routerl_jax.llms.judge import settings_that_count
from routerl_jax.recipes.vrag_rl.agents import VRAGAgent
from routerl_jax.rewards.metrics import ANSWER_METRICS
from routerl_jax.rewards.normalize import NORMALIZERS
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.sections import KnowledgeConfig, ModelConfig
from routerl_jax.training.setup import build_recipe

_FREE = ("data", "knowledge", "questions", "concurrency", "patience", "search_timeout", "steps_share", "actions_share")
_PRICES = ("read_price", "write_price")


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ExpertsConfig:
    """A job in which two language models demonstrate how to search pages, look closer, and answer."""

    job: Literal["experts"] = "experts"  # says which job it is
    data: str = ""  # questions, as data.readers.open_dataset takes them; several are separated by commas
    planner: ChatModelConfig = dataclasses.field(default_factory=ChatModelConfig)  # thinks, searches, answers
    # finds where the planner wants to look
    grounder: ChatModelConfig = dataclasses.field(default_factory=ChatModelConfig)
    judge: JudgeConfig = JudgeConfig(style="vrag")  # judge of answers; without a model `metric` decides
    # the policy that is to learn, in whose frame boxes are written: directory, hub id or packaged model. Its tokenizer and
    # image processing are read, its weights are not
    student: str = ""
    min_pixels: Count = 0  # fewest pixels of a picture that the policy sees (config.model.min_pixels of its run)
    max_pixels: Count = 0  # most pixels, likewise
    agent: AgentConfig = AgentConfig(max_searches=6, k=10, instruct=True)  # max_searches: turns, the answer included
    knowledge: Mapping[str, KnowledgeConfig] = dataclasses.field(default_factory=dict)  # one knowledge base, of pages
    picture_pixels: Size = 1280 * 28 * 28  # most pixels of a picture as the planner and the grounder get it
    box_scale: NonNegative = 0  # the grounder's coordinates run from 0 to this; 0: they are pixels of its picture
    released: bool = False  # the grounder also writes the thought of a look, as in the released code
    oracle: bool = False  # among the pages that a search finds, gold ones that were not shown yet come first
    attempts: Size = 1  # most attempts per question; the first right one is the last
    retries: Count = 1  # further requests if a reply can't be used; the model is told why
    temperature: NonNegative = 0.0  # of the replies
    max_tokens: Size = 2048  # most tokens of a reply
    max_length: Count = 0  # most tokens of a trajectory as the policy reads it; longer ones are rejected; 0: no limit
    least_steps: Size = 2  # fewest steps of a trajectory, including the answer; config.agent.max_searches is the most
    metric: str = "em"  # rewards.metrics.ANSWER_METRICS; without a judge an answer is right if it is 1
    normalizer: str = "search_r1"  # rewards.normalize.NORMALIZERS
    steps_share: PositiveFraction = 0.4  # largest share of trajectories with the same number of steps
    actions_share: PositiveFraction = 0.4  # largest share of trajectories with the same sequence of actions
    questions: Count = 0  # most questions that are tried per data set; 0: all
    concurrency: Size = 32  # questions in progress at once
    patience: Size = 20  # the job stops after so many failed questions in a row
    search_timeout: Positive = 60.0  # seconds after which a search counts as failed
    read_price: NonNegative = 0.0  # price of a million tokens that the planner reads, for the report
    write_price: NonNegative = 0.0  # price of a million tokens that the planner writes
    seed: Seed = 0  # seed of the order in which questions are tried

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("config.data is not set: name the questions (--config.data=FILE,FILE; docs/data.md)")
        if not self.student:
            raise ValueError(
                "config.student is not set: name the policy that is to learn, in whose frame boxes are written"
            )
        if self.attempts > 1 and self.temperature == 0:
            raise ValueError(
                f"config.temperature=0.0: all {self.attempts} attempts would be the same; set attempts=1, or a temperature"
            )
        if self.least_steps > self.agent.max_searches:
            raise ValueError(
                f"config.least_steps={self.least_steps}: a trajectory has at most config.agent.max_searches="
                f"{self.agent.max_searches} steps"
            )
        if self.metric not in ANSWER_METRICS:
            raise ValueError(f"config.metric={self.metric!r}: known are {', '.join(ANSWER_METRICS)}")
        with naming("config.normalizer"):
            NORMALIZERS.get(self.normalizer)

    def decisive(self) -> dict[str, Any]:
        """The settings that trajectories depend on, besides the questions. Other values make another job."""
        excluded = (*_FREE, *_PRICES, "planner", "grounder", "judge", "agent")
        settings = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in excluded
        }
        return {
            **settings,
            "planner": _identity(self.planner),
            "grounder": _identity(self.grounder),
            "judge": dict(settings_that_count(self.judge)) if self.judge.model else None,
            "agent": dataclasses.asdict(self.agent),
            "knowledge": {name: dataclasses.asdict(section) for name, section in self.knowledge.items()},
        }

    def build_agent(self) -> VRAGAgent:
        """The student's agent.

        Raises:
          ValueError: a setting is wrong (the message names its key), or the agent does not show pictures or look at them.
        """
        run = TrainConfig(
            kind="sft", recipe="vrag_rl", model=self.student_model(), agent=self.agent, knowledge=self.knowledge
        )
        agent = build_recipe(run).agent
        assert isinstance(agent, VRAGAgent)
        if agent.shows != "picture" or not agent.looks:
            raise ValueError(
                f"config.agent.settings: shows={agent.shows!r}, looks={agent.looks}: the experts show how to look at pictures; "
                "leave these two as they are"
            )
        return agent

    def student_model(self) -> ModelConfig:
        """The student in the form of a run's configuration."""
        return ModelConfig(path=self.student, min_pixels=self.min_pixels, max_pixels=self.max_pixels)


def _identity(model: ChatModelConfig) -> dict[str, Any]:
    return {key: getattr(model, key) for key in ("kind", "model", "extra", "max_length", "dtype")}
