"""Agents by name: the rows that a name of config.agents has on a benchmark."""

from __future__ import annotations

import dataclasses
import difflib
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.agents.agent import Agent
from routerl_jax.agents.config import AgentConfig
from routerl_jax.baselines.known import BASELINES
from routerl_jax.baselines.registry import Entry, baseline_agents
from routerl_jax.baselines.registry import listing as baseline_listing
from routerl_jax.comparison.config import ComparisonConfig
from routerl_jax.core.config import override
from routerl_jax.recipes.known import RECIPES
from routerl_jax.training.load import load_config
from routerl_jax.training.setup import build_recipe

_PAPERS = {
    "mmsearch_r1": "2506.20670",
    "r1_router": "2505.22095",
    "r1_searcher": "2503.05592",
    "routerag": "2512.09487",
    "search_r1": "2503.09516",
    "vrag_rl": "2505.22019",
}


class Unfit(ValueError):
    """An agent can't be asked a benchmark: it takes what the benchmark or the policy lacks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entrant:
    """A row: an agent that is to be asked a benchmark's questions.

    Attributes:
      name: of the row.
      run: the directory of the run whose policy it is; "" for the configuration's.
      about: what it is made of, JSON-serialisable; two of which that are equal work alike.
      tools: names of the benchmark's knowledge bases that there are for it: of a run's policy those that it was trained with.
    """

    name: str
    agent: Agent
    run: str
    about: Mapping[str, Any]
    tools: tuple[str, ...]


def listing() -> list[tuple[str, str, str, str]]:
    """(name, paper, tools that it needs, a line) of whatever config.agents may name."""
    said = "the agent of this recipe, prompted"
    recipes = [(name, _PAPERS.get(name, ""), "knowledge bases", said) for name in RECIPES]
    run = (
        "DIRECTORY",
        "",
        "its run's knowledge bases",
        "the policy of a run of launch.train, as it was trained to work",
    )
    routed = (
        "RECIPE:ROUTING, DIRECTORY:ROUTING",
        "",
        "several knowledge bases",
        "the same with every search sent elsewhere: only_KB, random_kb; or no_search, vanilla_rag, .. where it has them",
    )
    return [*baseline_listing(), *recipes, run, routed]


def entrants(name: str, tools: Sequence[str], config: ComparisonConfig, benchmark: str) -> list[Entrant]:
    """The rows of one of config.agents on a benchmark.

    Args:
      name: a baseline (one that asks each knowledge base has a row for each of several, NAME_KB, and NAME_all), one of its
        rows, a recipe, the directory of a run, `RECIPE:ROUTING` or `DIRECTORY:ROUTING` (Agent.baselines and Agent.vanilla_rag),
        or `package.module:attribute` of a baseline.
      tools: names of the benchmark's knowledge bases.

    Raises:
      Unfit: it takes what the benchmark or the policy lacks.
      ValueError: there is no such agent.
    """
    whole, _, routing = name.partition(":")
    if (pathlib.Path(whole).expanduser() / "config.json").is_file():
        return [_run(name, whole, routing, tools, config, benchmark)]
    if whole in RECIPES:
        return [_recipe(name, whole, routing, tools, config)]
    if name in BASELINES or (":" in name and "/" not in name):
        return _baselines(name, "", tools, config)
    if one := max((one for one in BASELINES if name.startswith(f"{one}_")), key=len, default=""):
        if (kb := name.removeprefix(f"{one}_")) not in (*tools, "all"):
            raise Unfit(f"agent {name!r} asks {kb!r}, and benchmark {benchmark!r} has {', '.join(tools)}")
        return _baselines(one, name, tools, config)
    raise _unknown(name)


def _baselines(name: str, row: str, tools: Sequence[str], config: ComparisonConfig) -> list[Entrant]:
    """The rows of a baseline, or the one that is called `row`."""
    settings = dict(config.settings.get(name, {}))
    entry = BASELINES.get(name)
    if isinstance(entry, Entry) and entry.scores and config.chat_model.model:
        raise Unfit(
            f"agent {name!r} asks for log-probabilities, which no endpoint tells (config.chat_model.model="
            f"{config.chat_model.model!r}): leave it out, or give config.model.path"
        )
    made = baseline_agents(name, tools, settings)
    if row and len(tools) == 1 and name in made:
        made = {row: made[name]}
    elif row and row not in made:
        raise Unfit(f"agent {row!r}: of {name!r} there is {', '.join(made)}")
    elif row:
        made = {row: made[row]}
    found = []
    for key, agent in made.items():
        agent = in_common(agent, config, settings)
        if "instruct" not in settings and "instruct" in _fields(agent):
            agent = override(agent, {"instruct": config.instruct}, "config")
        about = {"baseline": name, "settings": settings, **_plain(agent)}
        found.append(Entrant(name=key, agent=agent, run="", about=about, tools=tuple(tools)))
    return found


def _recipe(name: str, recipe: str, routing: str, tools: Sequence[str], config: ComparisonConfig) -> Entrant:
    settings, path = dict(config.settings.get(recipe, {})), f"config.settings.{recipe}"
    usual = AgentConfig(instruct=config.instruct, max_turn_tokens=512, answer_tokens=64)  # as baselines have them
    section = override(usual, settings, path)
    try:
        agent = RECIPES.get(recipe)(section, {}, tuple(tools), config.normalizer).agent
    except ValueError as error:
        raise Unfit(f"agent {name!r}: {error}") from error
    agent = override(agent, section.settings, f"{path}.settings") if section.settings else agent
    agent = in_common(agent, config, settings)
    about = {"recipe": recipe, "routing": routing, "tools": list(tools), "settings": settings, **_plain(agent)}
    return Entrant(name=name, agent=_routed(agent, name, routing, tools), run="", about=about, tools=tuple(tools))


def _run(
    name: str, directory: str, routing: str, tools: Sequence[str], config: ComparisonConfig, benchmark: str
) -> Entrant:
    run = load_config(pathlib.Path(directory).expanduser())
    if lacking := [kb for kb in run.knowledge if kb not in tools]:
        raise Unfit(
            f"agent {name!r} was trained with the knowledge bases {', '.join(run.knowledge)}, and benchmark {benchmark!r} has "
            f"{', '.join(tools)}: it lacks {', '.join(lacking)}"
        )
    agent = in_common(build_recipe(run).agent, config, {})
    bases = list(run.knowledge)
    about = {"recipe": run.recipe, "routing": routing, "tools": bases, "settings": dataclasses.asdict(run.agent)}
    made = _routed(agent, name, routing, bases)
    about |= _plain(agent)
    return Entrant(name=name.rstrip("/"), agent=made, run=directory, about=about, tools=tuple(bases))


def in_common(agent: Agent, config: ComparisonConfig, own: Mapping[str, Any]) -> Agent:
    """The agent with what all agents of a comparison have in common, but for its `own` settings.

    Raises:
      ValueError: it has no number of documents to set.
    """
    agent = agent if "k" in own else agent.with_passages(config.k)
    agent = agent if agent.searches_field in own else agent.with_searches(config.searches)
    if config.turn_tokens and "max_turn_tokens" in _fields(agent) - own.keys():
        agent = override(agent, {"max_turn_tokens": config.turn_tokens}, "config")
    return agent


def _fields(agent: Agent) -> set[str]:
    return {field.name for field in dataclasses.fields(agent)} if dataclasses.is_dataclass(agent) else set()


def _plain(agent: Agent) -> dict[str, Any]:
    """The class of an agent, and those of its fields that are numbers, texts or lists of them."""
    values = {name: getattr(agent, name) for name in sorted(_fields(agent))}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    kept = {name: value for name, value in plain.items() if isinstance(value, bool | int | float | str | list)}
    return {"agent": type(agent).__name__, "fields": kept}


def check_settings(config: ComparisonConfig) -> None:
    """Raises ValueError for settings of an agent that there is not."""
    for name in config.settings:
        if name not in BASELINES and name not in RECIPES and ":" not in name:
            raise ValueError(f"config.settings.{name}: no agent is called so; {_near(name, (*BASELINES, *RECIPES))}")


def _routed(agent: Agent, name: str, routing: str, tools: Sequence[str]) -> Agent:
    if not routing:
        return agent
    ways = {**agent.baselines(tools), **agent.vanilla_rag(tools)}
    if routing not in ways:
        raise Unfit(f"agent {name!r}: there is no {routing!r}; {_near(routing, ways)}")
    return ways[routing]


def _unknown(name: str) -> ValueError:
    if "/" in name or pathlib.Path(name).expanduser().is_dir():
        return ValueError(
            f"agent {name!r} holds no run of launch.train (config.json is missing), and no agent is called so"
        )
    known = (*BASELINES, *RECIPES)
    return ValueError(f"unknown agent {name!r}; {_near(name, known)}. --agents=help tells of them")


def _near(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, list(known), n=3)
    return f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(known)}"


def file_name(name: str) -> str:
    """A name as that of a file."""
    return re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "agent"
