"""The recipe "mmsearch_r1": a vision policy learns when to search, by the picture or by text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from routerl_jax.agents.config import AgentConfig
from routerl_jax.recipes.mmsearch_r1.agents import MMSearchAgent
from routerl_jax.recipes.mmsearch_r1.calls import MMSearchCalls
from routerl_jax.recipes.mmsearch_r1.rewards import REWARD
from routerl_jax.recipes.recipe import Recipe, check_own_protocol
from routerl_jax.recipes.search import StageSettings, stages_of

IMAGE_TOOLS = (
    "image",
    "reverse_image",
)  # names of a knowledge base that is searched by pictures, if config.agent.sees is empty


def mmsearch_r1(
    agent: AgentConfig, stages: Mapping[str, StageSettings], tools: Sequence[str], normalizer: str
) -> Recipe:
    """Builds the recipe from its configuration. config.agent.max_searches is the limit of searches in all. The other limits,
    `image_k` and `force_answer` are in config.agent.settings.

    Raises:
      ValueError: there are other knowledge bases than one for pictures and one for text; another grammar than
        `tool_calls`, a prompt or `on_invalid` is set, which this recipe does not have; or a reward term is unknown.
    """
    check_own_protocol(
        agent,
        "mmsearch_r1",
        prompt="a prompt for every round",
        instead_of_on_invalid="says with config.agent.settings.force_answer what follows a turn that can't be read",
    )
    image = tuple(agent.sees) or tuple(name for name in tools if name in IMAGE_TOOLS)
    text = [name for name in tools if name not in image]
    if len(image) != 1 or image[0] not in tools or len(text) != 1:
        sees = f", config.agent.sees {tuple(agent.sees)}" if agent.sees else ""
        raise ValueError(
            "config.recipe='mmsearch_r1' needs two knowledge bases, one searched by pictures, which config.agent.sees names "
            f"(or which is called {' or '.join(IMAGE_TOOLS)}), and one searched in words; config.knowledge has "
            f"{', '.join(tools) or 'none'}{sees}"
        )
    return Recipe(
        agent=MMSearchAgent(
            image_tool=image[0],
            text_tool=text[0],
            searches=agent.max_searches,
            k=agent.k,
            max_turn_tokens=agent.max_turn_tokens,
            max_observation_tokens=agent.max_observation_tokens,
            answer_tokens=agent.answer_tokens,
            instruct=agent.instruct,
            grammar=MMSearchCalls(tools=tuple(tools), image_tool=image[0]) if agent.grammar else None,
        ),
        stages=stages_of(stages, normalizer),
        reward=REWARD,
    )
