"""Whether a conversation has room for an agent's prompts at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from routerl_jax.agents.agent import LLM, Agent, Tools
from routerl_jax.agents.conversation import Rollout
from routerl_jax.core.types import Example
from routerl_jax.generation.policy import Policy
from routerl_jax.generation.sampling import Sampling
from routerl_jax.generation.streams import DoesNotFit
from routerl_jax.remote.background import run_to_end


class _Asked(BaseException):
    """The agent waits for the policy or a tool. No Exception: an agent may catch those."""


def no_room(agent: Agent, examples: Iterable[Example], engine: Policy, tools: Sequence[str]) -> str:
    """Runs an agent on examples up to the first thing that it waits for; nothing is computed on a device.

    Returns:
      "" as soon as it asks the policy for a turn, or a tool, on one of them; else why it does not on the first.
    """
    reasons: list[str] = []
    for example in examples:
        reason = run_to_end(_try(agent, example, engine, tools))
        if not reason:
            return ""
        reasons.append(reason)
    return reasons[0] if reasons else ""


async def _try(agent: Agent, example: Example, engine: Policy, tools: Sequence[str]) -> str:
    async def asked(*_: Any) -> NoReturn:
        raise _Asked

    rollout = Rollout(example, 0, engine, Sampling(), asked, asked)
    try:
        episode = await agent.run(example, LLM(rollout), Tools(rollout, tools))
    except _Asked:
        return ""
    except DoesNotFit as error:
        return str(error)
    finally:
        rollout.close()
    if episode.turns or not episode.truncated:
        return ""
    taken = max((len(sequence) for sequence in episode.sequences), default=0)
    return f"the prompt of example {example.id!r} has {taken} tokens, and a turn does not fit beside it"
