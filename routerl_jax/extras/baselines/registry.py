"""The registry of baselines: their descriptions and papers, and the agents that they make for given knowledge bases."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from routerl_jax.agents.agent import Agent
from routerl_jax.core.config import override
from routerl_jax.core.registry import Registry

# nothing: the baseline never searches. each: every search goes to all its knowledge bases. chosen: the policy names one.
Searches = Literal["nothing", "each", "chosen"]
Made = TypeVar("Made", bound=Callable[..., Agent])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A registered baseline.

    Attributes:
      paper: its arXiv number; "" if there is none.
      about: a description in one line.
      searches: which knowledge bases it asks.
      scores: it needs log-probabilities, which an engine gives and an endpoint does not.
      make: makes the agent. If the agent searches, it takes `tools`, the names of its knowledge bases.
    """

    name: str
    paper: str
    about: str
    searches: Searches
    scores: bool
    make: Callable[..., Agent]

    @property
    def needs(self) -> str:
        """The baseline's requirements, in words."""
        tools = {"nothing": "none", "each": "a knowledge base", "chosen": "knowledge bases"}[self.searches]
        return f"{tools}, an engine" if self.scores else tools


BASELINES: Registry[Entry] = Registry("baseline")


def baseline(
    name: str, *, paper: str, about: str, searches: Searches = "each", scores: bool = False
) -> Callable[[Made], Made]:
    """Decorator that registers an agent's class, or a function that makes an agent."""

    def add(make: Made) -> Made:
        entry = Entry(name=name, paper=paper, about=about, searches=searches, scores=scores, make=make)
        BASELINES.register(name)(entry)
        return make

    return add


def baseline_agents(name: str, tools: Sequence[str], settings: Mapping[str, Any] | None = None) -> dict[str, Agent]:
    """The agents of a baseline, by the name of their row in a table.

    Args:
      name: the registered name, or `package.module:attribute`, whose searches count as `each`.
      tools: names of the knowledge bases. If there are several, a baseline whose `searches` is "each" is made for every single
        one, as NAME_KB, and for all together, as NAME_all.
      settings: values of the agent's fields, and arguments of the function that makes it.

    Raises:
      ValueError: there is no such baseline or field, or no knowledge base although one is needed.
    """
    registered: Any = BASELINES.get(name)
    entry = (
        registered
        if isinstance(registered, Entry)
        else Entry(name=name, paper="", about="", searches="each", scores=False, make=registered)
    )
    settings = dict(settings or {})
    parameters = () if isinstance(entry.make, type) else inspect.signature(entry.make).parameters
    arguments = {key: settings.pop(key) for key in list(settings) if key in parameters}
    if entry.searches == "nothing":
        agents = {name: entry.make(**arguments)}
    elif not tools:
        raise ValueError(f"baseline {name!r} needs {entry.needs}, and there is none (config.knowledge)")
    elif entry.searches == "chosen" or len(tools) == 1:
        agents = {name: entry.make(tools=tuple(tools), **arguments)}
    else:
        agents = {f"{name}_{tool}": entry.make(tools=(tool,), **arguments) for tool in tools}
        agents[f"{name}_all"] = entry.make(tools=tuple(tools), **arguments)
    return {row: override(agent, settings, f"baseline {name!r}") for row, agent in agents.items()}


def listing() -> list[tuple[str, str, str, str]]:
    """(name, paper, what it needs, description) of every baseline, sorted by name."""
    entries = [BASELINES.get(name) for name in BASELINES]
    return [(entry.name, entry.paper, entry.needs, entry.about) for entry in entries]
