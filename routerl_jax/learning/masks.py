"""Masks: named functions that say whether an episode is left out of the loss. It still counts in its group."""

from __future__ import annotations

from collections.abc import Callable

from routerl_jax.core.registry import Registry
from routerl_jax.core.types import Episode

EPISODE_MASKS: Registry[Callable[[Episode], bool]] = Registry("episode mask")


@EPISODE_MASKS.register("void_turns")
def void_turns(episode: Episode) -> bool:
    """Some turn has neither a complete call nor an answer (SimpleTIR, arXiv 2509.02479).

    Text after such turns is often unlikely under the policy itself, and its gradients are large and useless.
    """
    return episode.invalid_actions > 0


@EPISODE_MASKS.register("overlong")
def overlong(episode: Episode) -> bool:
    """A token limit ended the episode, so its reward says little about it (DAPO, arXiv 2503.14476, section 3.4)."""
    return episode.truncated


@EPISODE_MASKS.register("unjudged")
def unjudged(episode: Episode) -> bool:
    """The judge gave no verdict that counts.

    Such episodes are always left out, whether or not this mask is configured: nothing is known about their answers, and their
    reward is a placeholder (rewards.verdicts.judge_reward).
    """
    return episode.verdict is not None and episode.verdict.counts is None
