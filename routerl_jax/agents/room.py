"""Checks that an agent's prompts fit into a conversation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from routerl_jax.agents.agent import LLM, Agent, Tools, UnknownTool, begun
from routerl_jax.agents.conversation import Rollout
from routerl_jax.core.types import Episode, Example
from routerl_jax.engine.policy import Policy
from routerl_jax.engine.sampling import Sampling
from routerl_jax.engine.streams import DoesNotFit
from routerl_jax.services.background import run_coroutine


class _Asked(BaseException):
    """Raised when the agent asks the policy or a tool. Not an Exception, because an agent may catch those."""


def no_room(agent: Agent, examples: Iterable[Example], engine: Policy, tools: Sequence[str]) -> str:
    """Runs an agent on each example up to its first request to the policy or a tool. Nothing is computed on a device.

    Returns:
      "" if the agent makes such a request on one of the examples; else the reason why it does not on the first one.

    Raises:
      ValueError: the agent asks for a tool that does not exist, or its `run` is no coroutine.
    """
    reasons: list[str] = []
    for example in examples:
        reason = run_coroutine(_try(agent, example, engine, tools))
        if not reason:
            return ""
        reasons.append(reason)
    return reasons[0] if reasons else ""


async def _try(agent: Agent, example: Example, engine: Policy, tools: Sequence[str]) -> str:
    async def asked(*_: Any) -> NoReturn:
        raise _Asked

    rollout = Rollout(example, 0, engine, Sampling(), asked, asked, tags=agent.special_tokens)
    try:
        episode = await begun(agent, example, LLM(rollout), Tools(rollout, tools))
    except _Asked:
        return ""
    except DoesNotFit as error:
        return str(error)
    except UnknownTool as error:
        raise ValueError(f"the agent failed on example {example.id!r}: {error}") from error
    finally:
        rollout.close()
    if not isinstance(episode, Episode):  # the driver says so
        return ""
    if episode.turns or not episode.truncated:
        return ""
    prompt_tokens = max((len(sequence) for sequence in episode.sequences), default=0)
    return f"the prompt of example {example.id!r} has {prompt_tokens} tokens, and a turn does not fit beside it"
