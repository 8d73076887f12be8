"""The section `agent` of a run's configuration, from which recipes make their agents."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from routerl_jax.agents.search_agent import OnInvalid
from routerl_jax.core.config import Count, Size, checked


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
    # other fields of the recipe's agent, such as {"attempts": 2} for r1_router, or of your own agent (docs/extending.md)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
