"""Baselines by name: what each is, where it comes from, and the agents that it makes for some knowledge bases."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from routerl_jax.agents.agent import Agent
from routerl_jax.core.config import override
from routerl_jax.core.registry import Registry

# nothing: it never searches. each: every search goes to all knowledge bases that it is given. chosen: the policy names one.
Searches = Literal["nothing", "each", "chosen"]
Made = TypeVar("Made", bound=Callable[..., Agent])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A registered baseline.

    Attributes:
      paper: its arXiv number, "" for what needs none.
      about: a line.
      searches: which knowledge bases it asks.
      scores: it asks for log-probabilities, which an engine tells and an endpoint does not.
      make: makes the agent; with `tools`, their names, where it searches.
    """

    name: str
    paper: str
    about: str
    searches: Searches
    scores: bool
    make: Callable[..., Agent]

    @property
    def needs(self) -> str:
        """The tools that it needs, in words."""
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
      name: as registered, or `package.module:attribute`, which is searched as `each` is.
      tools: names of the knowledge bases. A baseline that asks each of those it is given is made for every one of several,
        as NAME_KB, and for all of them together, as NAME_all.
      settings: other values of the agent's fields, and arguments of the function that makes it.

    Raises:
      ValueError: there is no such baseline or field, or there is no knowledge base where one is needed.
    """
    found: Any = BASELINES.get(name)
    entry = found if isinstance(found, Entry) else _unregistered(name, found)
    settings = dict(settings or {})
    taken = () if isinstance(entry.make, type) else inspect.signature(entry.make).parameters
    own = {key: settings.pop(key) for key in list(settings) if key in taken}
    if entry.searches == "nothing":
        made = {name: entry.make(**own)}
    elif not tools:
        raise ValueError(f"baseline {name!r} needs {entry.needs}, and there is none (config.knowledge)")
    elif entry.searches == "chosen" or len(tools) == 1:
        made = {name: entry.make(tools=tuple(tools), **own)}
    else:
        made = {f"{name}_{tool}": entry.make(tools=(tool,), **own) for tool in tools}
        made[f"{name}_all"] = entry.make(tools=tuple(tools), **own)
    return {row: override(agent, settings, f"baseline {name!r}") for row, agent in made.items()}


def _unregistered(name: str, make: Callable[..., Agent]) -> Entry:
    return Entry(name=name, paper="", about="", searches="each", scores=False, make=make)


def listing() -> list[tuple[str, str, str, str]]:
    """(name, paper, tools that it needs, a line) of every baseline, sorted by name."""
    entries = [BASELINES.get(name) for name in BASELINES]
    return [(entry.name, entry.paper, entry.needs, entry.about) for entry in entries]
