"""Format checks: pure functions of an episode. The agent's grammar decides whether a single turn is well formed."""

from __future__ import annotations

from routerl_jax.core.types import Episode


def answered(episode: Episode) -> bool:
    """True if the episode ended with an answer that is not blank."""
    return bool(episode.answer and episode.answer.strip())


def well_formed(episode: Episode) -> bool:
    """True if there is an answer, every turn follows the grammar to the letter, and no action was invalid."""
    return answered(episode) and episode.invalid_actions == 0 and all(turn.well_formed for turn in episode.turns)
