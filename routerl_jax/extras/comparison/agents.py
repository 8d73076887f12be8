"""Resolves a name of config.agents to the agents that are run on a benchmark, and opens their policies."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax import nnx

from routerl_jax.agents.agent import Agent
from routerl_jax.core.config import naming, override
from routerl_jax.engine.policy import Policy
from routerl_jax.extras.baselines.known import BASELINES
from routerl_jax.extras.baselines.registry import Entry, baseline_agents
from routerl_jax.extras.baselines.registry import listing as baseline_listing
from routerl_jax.extras.comparison.config import ComparisonConfig
from routerl_jax.extras.comparison.papers.table import PAPERS
from routerl_jax.models.lora import digest
from routerl_jax.recipes.recipe import RECIPES, AgentConfig
from routerl_jax.services.policy import ChatModel
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.load import load_config, load_policy
from routerl_jax.training.setup import build_mesh, build_policy, build_recipe, make_engine


class Inapplicable(ValueError):
    """An agent can't be run on a benchmark: it needs something that the benchmark or the policy lacks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentRow:
    """A row of the report: an agent that is run on a benchmark.

    Attributes:
      name: name of the row.
      run: directory of the run whose policy it uses; "" for the policy of the configuration.
      about: what defines the agent, JSON-serialisable. Two agents with equal values work alike.
      tools: names of the benchmark's knowledge bases that it may use. A run's policy uses those that it was trained with.
    """

    name: str
    agent: Agent
    run: str
    about: Mapping[str, Any]
    tools: tuple[str, ...]


def listing() -> list[tuple[str, str, str, str]]:
    """(name, paper, what it needs, description) of everything that config.agents may name."""
    about = "the agent of this recipe, prompted"
    papers = {"search_r1": "2503.09516"} | {recipe: file["paper"] for recipe, file in PAPERS.items()}
    recipes = [(name, papers.get(name, ""), "knowledge bases", about) for name in RECIPES]
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


def agent_rows(name: str, tools: Sequence[str], config: ComparisonConfig, benchmark: str) -> list[AgentRow]:
    """The rows of one name of config.agents on a benchmark.

    Args:
      name: one of these:
        - a baseline. If there are several knowledge bases, one whose `searches` is "each" has a row for every single one,
          NAME_KB, and one for all, NAME_all.
        - a single row of a baseline,
        - a recipe, or the directory of a run,
        - `RECIPE:ROUTING` or `DIRECTORY:ROUTING` (Agent.baselines and Agent.vanilla_rag),
        - `package.module:attribute` of a baseline.
      tools: names of the benchmark's knowledge bases.

    Raises:
      Inapplicable: the agent needs something that the benchmark or the policy lacks.
      ValueError: there is no such agent.
    """
    base, _, routing = name.partition(":")
    if (pathlib.Path(base).expanduser() / "config.json").is_file():
        return [_run(name, base, routing, tools, config, benchmark)]
    if base in RECIPES:
        return [_recipe(name, base, routing, tools, config)]
    if name in BASELINES or (":" in name and "/" not in name):
        return _baselines(name, "", tools, config)
    if baseline := max((baseline for baseline in BASELINES if name.startswith(f"{baseline}_")), key=len, default=""):
        if (kb := name.removeprefix(f"{baseline}_")) not in (*tools, "all"):
            raise Inapplicable(f"agent {name!r} asks {kb!r}, and benchmark {benchmark!r} has {', '.join(tools)}")
        return _baselines(baseline, name, tools, config)
    if "/" in name or pathlib.Path(name).expanduser().is_dir():
        raise ValueError(
            f"agent {name!r} holds no run of launch.train (config.json is missing), and no agent is called so"
        )
    raise ValueError(
        f"unknown agent {name!r}; {_suggestion(name, (*BASELINES, *RECIPES))}. --agents=help tells of them"
    )


def _baselines(name: str, row: str, tools: Sequence[str], config: ComparisonConfig) -> list[AgentRow]:
    """The rows of a baseline, or only the one with the name `row`."""
    settings = dict(config.settings.get(name, {}))
    entry = BASELINES.get(name)
    if isinstance(entry, Entry) and entry.scores and config.chat_model.model:
        raise Inapplicable(
            f"agent {name!r} asks for log-probabilities, which no endpoint tells (config.chat_model.model="
            f"{config.chat_model.model!r}): leave it out, or give config.model.path"
        )
    agents = baseline_agents(name, tools, settings)
    if row:
        made = name if len(tools) == 1 and name in agents else row
        if made not in agents:
            raise Inapplicable(f"agent {row!r}: of {name!r} there is {', '.join(agents)}")
        agents = {row: agents[made]}
    rows = []
    for key, agent in agents.items():
        agent = with_common_settings(agent, config, settings)
        if "instruct" not in settings and "instruct" in _fields(agent):
            agent = override(agent, {"instruct": config.instruct}, "config")
        about = {"baseline": name, "settings": settings, **_settings_of(agent)}
        rows.append(AgentRow(name=key, agent=agent, run="", about=about, tools=tuple(tools)))
    return rows


def _recipe(name: str, recipe: str, routing: str, tools: Sequence[str], config: ComparisonConfig) -> AgentRow:
    settings, path = dict(config.settings.get(recipe, {})), f"config.settings.{recipe}"
    default = AgentConfig(instruct=config.instruct, max_turn_tokens=512, answer_tokens=64)  # the defaults of baselines
    section = override(default, settings, path)
    try:
        agent = RECIPES.get(recipe)(section, {}, tuple(tools), config.normalizer).agent
    except ValueError as error:
        raise Inapplicable(f"agent {name!r}: {error}") from error
    agent = override(agent, section.settings, f"{path}.settings") if section.settings else agent
    agent = with_common_settings(agent, config, settings)
    about = {"recipe": recipe, "routing": routing, "tools": list(tools), "settings": settings, **_settings_of(agent)}
    return AgentRow(
        name=name, agent=_with_routing(agent, name, routing, tools), run="", about=about, tools=tuple(tools)
    )


def _run(
    name: str, directory: str, routing: str, tools: Sequence[str], config: ComparisonConfig, benchmark: str
) -> AgentRow:
    run = load_config(pathlib.Path(directory).expanduser())
    if lacking := [kb for kb in run.knowledge if kb not in tools]:
        raise Inapplicable(
            f"agent {name!r} was trained with the knowledge bases {', '.join(run.knowledge)}, and benchmark {benchmark!r} has "
            f"{', '.join(tools)}: it lacks {', '.join(lacking)}"
        )
    agent = with_common_settings(build_recipe(run).agent, config, {})
    bases = list(run.knowledge)
    about = {"recipe": run.recipe, "routing": routing, "tools": bases, "settings": dataclasses.asdict(run.agent)}
    routed = _with_routing(agent, name, routing, bases)
    about |= _settings_of(agent)
    return AgentRow(name=name.rstrip("/"), agent=routed, run=directory, about=about, tools=tuple(bases))


def with_common_settings(agent: Agent, config: ComparisonConfig, own_settings: Mapping[str, Any]) -> Agent:
    """The agent with the common settings of a comparison. Its own settings take precedence.

    Raises:
      ValueError: the number of documents of this agent can't be set.
    """
    agent = agent if "k" in own_settings else agent.with_passages(config.k)
    if not {agent.searches_field, "max_searches"} & own_settings.keys():  # a recipe's section calls it max_searches
        agent = agent.with_searches(config.searches)
    if config.turn_tokens and "max_turn_tokens" in _fields(agent) - own_settings.keys():
        agent = override(agent, {"max_turn_tokens": config.turn_tokens}, "config")
    return agent


def _fields(agent: Agent) -> set[str]:
    return {field.name for field in dataclasses.fields(agent)} if dataclasses.is_dataclass(agent) else set()


def _settings_of(agent: Agent) -> dict[str, Any]:
    """The class of an agent, and its fields that are numbers, texts or lists."""
    values = {name: getattr(agent, name) for name in sorted(_fields(agent))}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    fields = {name: value for name, value in plain.items() if isinstance(value, bool | int | float | str | list)}
    return {"agent": type(agent).__name__, "fields": fields}


def check_settings(config: ComparisonConfig) -> None:
    """Raises ValueError if config.settings names an agent that does not exist."""
    for name in config.settings:
        if name not in BASELINES and name not in RECIPES and ":" not in name:
            raise ValueError(
                f"config.settings.{name}: no agent is called so; {_suggestion(name, (*BASELINES, *RECIPES))}"
            )


def _with_routing(agent: Agent, name: str, routing: str, tools: Sequence[str]) -> Agent:
    if not routing:
        return agent
    routings = agent.alternatives(tools)
    if routing not in routings:
        raise Inapplicable(f"agent {name!r}: there is no {routing!r}; {_suggestion(routing, routings)}")
    return routings[routing]


def _suggestion(name: str, names: Sequence[str] | Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, list(names), n=3)
    return f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(names)}"


def file_name(name: str) -> str:
    """A name in the form of a file name."""
    return re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "agent"


@contextlib.contextmanager
def open_policy(run: str, config: ComparisonConfig) -> Iterator[tuple[Policy, dict[str, Any]]]:
    """Opens a policy, with its description.

    The description identifies it: the model of the endpoint, or a digest of the weights. For a run it also has the `model` that
    the run started from.

    Args:
      run: directory of the run whose policy it is; "": the policy of the configuration.

    Raises:
      ValueError: there is no policy, or it can't be used as the configuration says.
    """
    if not run and config.chat_model.model:
        with naming("config.chat_model"):
            endpoint = ChatModel(config.chat_model)
        try:
            yield endpoint, {"chat model": endpoint.about}
        finally:
            endpoint.end()
        return
    mesh = build_mesh(config.mesh)
    if run:
        directory = pathlib.Path(run).expanduser()
        trained = load_config(directory)
        model = load_policy(directory, trained, mesh)
    else:
        trained = TrainConfig(kind="sft", model=config.model, mesh=config.mesh, engine=config.engine)
        model = build_policy(trained, mesh)
    yield make_engine(trained, model), {**policy_names(run, config), "weights digest": digest(nnx.state(model))}


def policy_names(run: str, config: ComparisonConfig) -> dict[str, str]:
    """The part of a policy's description that says what it is called, without opening it."""
    if run:
        return {"name": run, "model": load_config(pathlib.Path(run).expanduser()).model.path}
    return {} if config.chat_model.model else {"name": config.model.path}


def check_policy(config: ComparisonConfig) -> None:
    """Raises ValueError if the configuration names no policy."""
    if not (config.model.path or config.model.architecture or config.chat_model.model):
        raise ValueError(
            "the agents need a policy: give config.model.path (a directory, hub id or packaged model), or "
            "config.chat_model.model of an endpoint"
        )
