"""A run's agent with its knowledge bases on an engine of its own, which answers questions as they come."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping

from routerl_jax.agents.agent import SearchTool
from routerl_jax.agents.live import LiveAgent
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.loop import EngineLoop
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.setup import build_recipe, evaluated_agent, open_knowledge


@dataclasses.dataclass(frozen=True, kw_only=True)
class Searcher:
    """An agent that answers questions on an engine's thread; `tools` are its knowledge bases by name."""

    loop: EngineLoop
    live: LiveAgent
    tools: Mapping[str, SearchTool]

    @property
    def engine(self) -> Engine:
        """Its policy."""
        return self.loop.engine


def open_searcher(
    config: TrainConfig, engine: Engine, workdir: pathlib.Path | None, *, progress: bool = True
) -> Searcher:
    """The agent that a run's evaluations show, with the run's knowledge bases, on this engine.

    Args:
      workdir: of the run, with its snapshot of the web.

    Raises:
      ValueError: the recipe can't be built, or a knowledge base can't be opened.
    """
    agent = evaluated_agent(config, build_recipe(config))
    tools = open_knowledge(config, workdir, progress=progress)
    loop = EngineLoop(engine)
    return Searcher(loop=loop, live=LiveAgent(agent, loop, tools, config.rollout.tool_timeout), tools=tools)


def warm_up(engine: Engine) -> None:
    """Writes a little, so that nobody waits for compilers later."""
    engine.generate([[engine.tokenizer.pad_id] * 8], max_tokens=2)
