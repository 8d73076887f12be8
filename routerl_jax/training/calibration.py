"""Whether a price on searches can decide anything: what the start knows, and what it finds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from routerl_jax.training.sections import CalibrationConfig


def calibration(table: Mapping[str, Mapping[str, Any]], config: CalibrationConfig) -> dict[str, dict[str, Any]]:
    """By kind of question: `closed_book` and `open_book`, the untrained policy's EM without a search and with all of them, and
    `n`. {} where it is not asked for, or was not measured.

    Args:
      table: the untrained policy's rows, by `before_agents`' names.
    """
    names = [f"warm_start_{name}" for name in (config.closed, config.open)]
    if not config.kind or not all(name in table for name in names):
        return {}
    closed, opened = (table[name].get("by", {}).get("kind", {}) for name in names)
    return {
        kind: {"closed_book": closed[kind]["em"], "open_book": opened[kind]["em"], "n": closed[kind]["n"]}
        for kind in closed
    }


def check_calibration(found: Mapping[str, Mapping[str, Any]], config: CalibrationConfig) -> None:
    """Complains about a start from which no price on searches could teach anything.

    Raises:
      ValueError: there are no questions of the kind, or they are not answered nearly, but not quite, as well without a search.
    """
    if not config.kind:
        return
    where = "config.evaluation.calibration"
    if config.kind not in found:
        kinds = ", ".join(found) or "no kinds"
        raise ValueError(f"{where}.kind={config.kind!r}: the test questions have {kinds} (metadata 'kind')")
    closed, opened = (found[config.kind][name] for name in ("closed_book", "open_book"))
    if (1 - config.penalty) * opened < closed < opened:
        return
    lacks = closed <= (1 - config.penalty) * opened
    what = "so every search pays" if lacks else "so that no search pays, with or without the price"
    mend = "teach it what it shall know" if lacks else "teach it to read, or less by heart"
    raise ValueError(
        f"{where}: of the {config.kind} questions the untrained policy answers {100 * closed:.1f} % without a search and "
        f"{100 * opened:.1f} % with all searches, {what} (searches cost {100 * config.penalty:.0f} % of a right answer); "
        f"{mend} (config.warm_start), or set {where}.kind='' to train all the same"
    )
