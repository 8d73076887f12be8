"""All baselines of the package. Importing this module registers them."""

from __future__ import annotations

from routerl_jax.extras.baselines import (  # noqa: F401 - they register themselves
    cogplanner,
    compression,
    cr_planner,
    direct,
    few_shot,
    hipporag_reader,
    ircot,
    iter_retgen,
    omnisearch,
    react,
    recomp,
    replug,
    search_o1,
    self_ask,
    skr,
    sure,
    universal_rag,
    vanilla_rag,
)
from routerl_jax.extras.baselines.registry import BASELINES

__all__ = ["BASELINES"]
