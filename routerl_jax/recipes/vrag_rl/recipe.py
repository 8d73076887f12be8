"""The recipe "vrag_rl": a vision policy searches page images, looks closer at regions of them, and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from routerl_jax.agents.config import AgentConfig
from routerl_jax.agents.looking_calls import LookingCalls
from routerl_jax.recipes.recipe import Recipe, check_own_protocol
from routerl_jax.recipes.search import StageSettings, stages_of
from routerl_jax.recipes.vrag_rl.agents import VRAGAgent
from routerl_jax.recipes.vrag_rl.rewards import AFTER_SFT


def vrag_rl(agent: AgentConfig, stages: Mapping[str, StageSettings], tools: Sequence[str], normalizer: str) -> Recipe:
    """Builds the recipe from its configuration.

    config.agent.max_searches is the number of turns in which the policy may search, look closer or answer (4 in the released
    code). config.agent.k is the number of pages that a search finds (10), of which the best new one is shown. `shows`, `looks`,
    `regions`, `force_answer` and `thoughts` are in config.agent.settings.

    Raises:
      ValueError: there is not exactly one knowledge base, or no turn; another grammar than `tool_calls`, a prompt, `sees` or
        `on_invalid` is set, which this recipe does not have; or a reward term is unknown.
    """
    check_own_protocol(
        agent,
        "vrag_rl",
        prompt="a prompt of its own, which config.agent.instruct shows",
        instead_of_on_invalid="tells the policy why a turn can't be read",
    )
    if agent.sees:
        raise ValueError(
            f"config.agent.sees={tuple(agent.sees)}: config.recipe='vrag_rl' searches in words alone; leave it empty"
        )
    if len(tools) != 1:
        raise ValueError(
            "config.recipe='vrag_rl' needs one knowledge base, of pages; config.knowledge has "
            f"{', '.join(tools) or 'none'}"
        )
    if not agent.max_searches:
        raise ValueError(
            "config.agent.max_searches=0: config.recipe='vrag_rl' needs a turn at least; 4 is the paper's code's"
        )
    return Recipe(
        agent=VRAGAgent(
            tool=tools[0],
            max_turns=agent.max_searches,
            k=agent.k,
            max_turn_tokens=agent.max_turn_tokens,
            max_observation_tokens=agent.max_observation_tokens,
            answer_tokens=agent.answer_tokens,
            instruct=agent.instruct,
            grammar=LookingCalls(tools=tuple(tools)) if agent.grammar else None,
        ),
        stages=stages_of(stages, normalizer),
        reward=AFTER_SFT.reward,
    )
