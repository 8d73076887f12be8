"""A chat with a scripted policy, for tests of the terminal and of the page."""

from __future__ import annotations

import pathlib
from typing import Any

from routerl_jax.agents.agent import Agent
from routerl_jax.engine.loop import EngineLoop
from routerl_jax.engine.sampling import GREEDY
from routerl_jax.extras.chat.session import Chat
from routerl_jax.extras.policy_server.answerer import Searcher
from routerl_jax.extras.policy_server.live import LiveAgent
from tests.agents.scripted import AGENT, ANSWER, SEARCH, knowledge


def script(name: str, sample: int, turn: int) -> str:
    """One search, then an answer that tells the question's number."""
    return SEARCH.format("table") if turn == 0 else ANSWER.replace("Accra", f"Accra {name.split()[-1]}")


def chat_with(
    engine: Any, pictures: pathlib.Path, *, agent: Agent = AGENT, tools: dict[str, Any] | None = None, earlier: int = 0
) -> Chat:
    """A chat with this engine."""
    loop, tools = EngineLoop(engine), knowledge() if tools is None else tools
    searcher = Searcher(loop=loop, live=LiveAgent(agent, loop, tools, 20), tools=tools)
    kinds = dict.fromkeys(tools, "scripted")
    return Chat(
        searcher=searcher, name="tiny", kinds=kinds, pictures=pictures, sampling=GREEDY, seed=7, earlier=earlier
    )
