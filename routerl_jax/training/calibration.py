"""Checks that a price on searches can matter: compares the untrained policy's answers without searches and with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from routerl_jax.training.sections import CalibrationConfig


def calibration(table: Mapping[str, Mapping[str, Any]], config: CalibrationConfig) -> dict[str, dict[str, Any]]:
    """By kind of question: `closed_book` and `open_book` (EM of the untrained policy without a search and with all searches),
    and `n`, the number of questions. {} if the configuration does not ask for this, or it was not measured.

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


def check_calibration(measured: Mapping[str, Mapping[str, Any]], config: CalibrationConfig) -> None:
    """Refuses a start at which a price on searches could teach nothing.

    Raises:
      ValueError: there are no questions of the kind. Or accuracy without a search is not slightly below that with searches: a
        search then always pays, or never does.
    """
    if not config.kind:
        return
    where = "config.evaluation.calibration"
    if config.kind not in measured:
        kinds = ", ".join(measured) or "no kinds"
        raise ValueError(f"{where}.kind={config.kind!r}: the test questions have {kinds} (metadata 'kind')")
    closed, opened = (measured[config.kind][name] for name in ("closed_book", "open_book"))
    if (1 - config.penalty) * opened < closed < opened:
        return
    lacks = closed <= (1 - config.penalty) * opened
    outcome = "so every search pays" if lacks else "so that no search pays, with or without the price"
    mend = "teach it what it shall know" if lacks else "teach it to read, or less by heart"
    raise ValueError(
        f"{where}: of the {config.kind} questions the untrained policy answers {100 * closed:.1f} % without a search and "
        f"{100 * opened:.1f} % with all searches, {outcome} (searches cost {100 * config.penalty:.0f} % of a right answer); "
        f"{mend} (config.warm_start), or set {where}.kind='' to train all the same"
    )
