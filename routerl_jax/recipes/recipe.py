"""Recipes: an agent, which says how the policy works on a question, and rewards for each stage of training. And the section
`agent` of a run's configuration, from which recipes make their agents."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from routerl_jax.agents.agent import Agent
from routerl_jax.agents.search_agent import OnInvalid
from routerl_jax.core.config import Count, Size, checked
from routerl_jax.core.registry import Registry
from routerl_jax.core.types import Episode


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class AgentConfig:
    """How the policy works on a question. Training and evaluation use the same agent (except for evaluation.k)."""

    grammar: str = ""  # agents.grammar.GRAMMARS; empty: the recipe's own; every recipe takes tool_calls
    max_searches: Count = 3  # most searches per question
    k: Size = 2  # passages per search
    max_turn_tokens: Size = 64  # most tokens that the policy writes in a turn
    # most tokens of a search's result: whole passages, or the beginning of the first one; 0: all that fit
    max_observation_tokens: Count = 0
    answer_tokens: Size = 24  # room kept for the last turn
    # text with {question}, and {sources} for a line per knowledge base with its description; empty: the model's chat template,
    # or `Question: ...`
    prompt: str = ""
    instruct: bool = False  # explain the protocol in the prompt (pretrained models)
    prompt_suffix: str = ""  # beginning of the policy's first turn, e.g. <think>
    # after a turn without query or answer; not used by recipes "r1_router", "mmsearch_r1", "vrag_rl"
    on_invalid: OnInvalid = "remind"
    # knowledge bases that are searched with the question's picture. Recipe "r1_router": picture and query (empty: text_image);
    # "mmsearch_r1": the picture alone (empty: the one called image or reverse_image)
    sees: tuple[str, ...] = ()
    # show results of searches with the protocol's tags in them, as the released code of Search-R1, R1-Searcher, RouteRAG and
    # R1-Router does: a passage may then end its block, and write an answer. False: such tags are broken up
    raw_results: bool = False
    # other fields of the recipe's agent, such as {"attempts": 2} for r1_router, or of your own agent (docs/extending.md)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# (episodes of a step) -> for each episode, its reward terms by name and their sum as `total`
Reward = Callable[[Sequence[Episode]], list[dict[str, float]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of training, which begins at step `start`."""

    name: str
    start: int
    reward: Reward


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """An agent and its stages, in order of their start.

    Attributes:
      headline: the main metrics of its paper.
      reward: the paper's reward, for attempts outside of a run with stages (launch.score).
    """

    agent: Agent
    stages: Sequence[Stage]
    headline: tuple[str, ...] = ("em",)
    reward: Mapping[str, float | Mapping[str, Any]] = dataclasses.field(default_factory=dict)


TOOL_CALLS = "tool_calls"  # the grammar that recipes with a protocol of their own take, too

# (config.agent, config.stages, names of the knowledge bases, config.evaluation.normalizer) -> Recipe
RECIPES: Registry[Callable[..., Recipe]] = Registry(
    "recipe",
    {
        "mmsearch_r1": "routerl_jax.recipes.mmsearch_r1.agents:mmsearch_r1",
        "r1_router": "routerl_jax.recipes.r1_router.agents:r1_router",
        "r1_searcher": "routerl_jax.recipes.r1_searcher:recipe",
        "routerag": "routerl_jax.recipes.routerag:recipe",
        "search": "routerl_jax.recipes.search:recipe",
        "search_r1": "routerl_jax.recipes.search_r1:recipe",
        "vrag_rl": "routerl_jax.recipes.vrag_rl.agents:vrag_rl",
    },
)


def check_own_protocol(agent: AgentConfig, recipe: str, prompt: str, instead_of_on_invalid: str) -> None:
    """Checks that no setting is changed which a recipe decides with its own protocol.

    Args:
      prompt: where the recipe's prompt comes from, for the error.
      instead_of_on_invalid: what decides what follows a turn that can't be read, for the error.

    Raises:
      ValueError: another grammar than `tool_calls`, a prompt or `raw_results` is set, or `on_invalid` is not the default.
    """
    if agent.grammar not in ("", TOOL_CALLS):
        raise ValueError(
            f"config.agent.grammar={agent.grammar!r}: config.recipe={recipe!r} has tags of its own; leave it empty, or take "
            f"{TOOL_CALLS!r}"
        )
    if agent.raw_results:
        raise ValueError(f"config.agent.raw_results: config.recipe={recipe!r} always breaks up tags; leave it False")
    if agent.prompt or agent.prompt_suffix:
        raise ValueError(
            f"config.agent.prompt and prompt_suffix: config.recipe={recipe!r} has {prompt}; leave them empty"
        )
    if agent.on_invalid != "remind":
        raise ValueError(
            f"config.agent.on_invalid={agent.on_invalid!r}: config.recipe={recipe!r} {instead_of_on_invalid}; leave "
            "on_invalid='remind'"
        )
