"""The configuration of a job in which a planner and a grounder make VRAG-RL's supervised data."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from routerl_jax.core.checked import Count, NonNegative, PositiveFraction, Size, checked
from routerl_jax.extras.curation.demonstration_job import DemonstrationConfig
from routerl_jax.recipes.recipe import AgentConfig
from routerl_jax.recipes.vrag_rl.agents import VRAGAgent
from routerl_jax.services.config import ChatModelConfig, JudgeConfig
from routerl_jax.services.judge import settings_that_count
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.sections import ModelConfig
from routerl_jax.training.setup import build_recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ExpertJobConfig(DemonstrationConfig):
    """A job in which two language models demonstrate how to search pages, look closer, and answer."""

    job: Literal["experts"] = "experts"  # the job that this configuration is for
    planner: ChatModelConfig = dataclasses.field(default_factory=ChatModelConfig)  # thinks, searches, answers
    # finds where the planner wants to look
    grounder: ChatModelConfig = dataclasses.field(default_factory=ChatModelConfig)
    judge: JudgeConfig = JudgeConfig(style="vrag")  # judge of answers; without a model `metric` decides
    min_pixels: Count = 0  # fewest pixels of a picture that the policy sees (config.model.min_pixels of its run)
    max_pixels: Count = 0  # most pixels of a picture that the policy sees
    agent: AgentConfig = AgentConfig(max_searches=6, k=10, instruct=True)  # max_searches: turns, the answer included
    picture_pixels: Size = 1280 * 28 * 28  # most pixels of a picture as the planner and the grounder get it
    box_scale: NonNegative = 0  # the grounder's coordinates run from 0 to this; 0: they are pixels of its picture
    released: bool = False  # the grounder also writes the thought of a look, as in the released code
    oracle: bool = False  # among the pages that a search finds, gold ones that were not shown yet come first
    retries: Count = 1  # further requests if a reply can't be used; the model is told why
    least_steps: Size = 2  # fewest steps of a trajectory, including the answer; config.agent.max_searches is the most
    steps_share: PositiveFraction = 0.4  # largest share of trajectories with the same number of steps
    actions_share: PositiveFraction = 0.4  # largest share of trajectories with the same sequence of actions

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least_steps > self.agent.max_searches:
            raise ValueError(
                f"config.least_steps={self.least_steps}: a trajectory has at most config.agent.max_searches="
                f"{self.agent.max_searches} steps"
            )

    def decisive(self) -> dict[str, Any]:
        keys = (
            "job",
            "min_pixels",
            "max_pixels",
            "picture_pixels",
            "box_scale",
            "released",
            "oracle",
            "retries",
            "least_steps",
        )
        return {
            **super().decisive(),
            **{key: getattr(self, key) for key in keys},
            "least_steps": self.least_steps,
            "planner": _identity(self.planner),
            "grounder": _identity(self.grounder),
            "judge": dict(settings_that_count(self.judge)) if self.judge.model else None,
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
        agent.check_tags("a job that makes demonstrations")
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
