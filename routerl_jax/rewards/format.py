"""Format checks: pure functions of an episode. What is well formed within a turn is the agent's grammar's matter."""

from __future__ import annotations

from routerl_jax.core.types import Episode


def answered(episode: Episode) -> bool:
    """True if the episode ended in an answer that is more than blanks."""
    return bool(episode.answer and episode.answer.strip())


def well_formed(episode: Episode) -> bool:
    """True if there is an answer, every turn obeys the grammar to the letter and no action was invalid."""
    return answered(episode) and episode.invalid_actions == 0 and all(turn.well_formed for turn in episode.turns)
