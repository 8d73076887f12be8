"""Episodes that are left out of the loss, by name: pure functions of an episode. They still count in their group."""

from __future__ import annotations

from collections.abc import Callable

from routerl_jax.core.registry import Registry
from routerl_jax.core.types import Episode

EPISODE_MASKS: Registry[Callable[[Episode], bool]] = Registry("episode mask")


@EPISODE_MASKS.register("void_turns")
def void_turns(episode: Episode) -> bool:
    """Some turn holds neither a whole call nor an answer (SimpleTIR, arXiv 2509.02479): what follows such turns is often text
    that the policy finds unlikely itself, whose gradients are large and useless."""
    return episode.invalid_actions > 0


@EPISODE_MASKS.register("overlong")
def overlong(episode: Episode) -> bool:
    """A token limit ended it, so that its reward says little of its course (DAPO, arXiv 2503.14476, section 3.4)."""
    return episode.truncated


@EPISODE_MASKS.register("unjudged")
def unjudged(episode: Episode) -> bool:
    """A judge gave no verdict that counts. These are left out whether or not they are named: nothing is known of their answers,
    and their reward is made up (rewards.judge)."""
    return episode.verdict is not None and episode.verdict.counts is None
