"""What an attempt asks a tool for."""

from __future__ import annotations

from typing import Literal, NamedTuple

from routerl_jax.core.types import Query

Want = Literal["passages", "listing", "pictures"]


class Request(NamedTuple):
    """`k` passages ("passages"); the same, whose pictures may be left for later where they would have to be sent here
    ("listing"); or the picture of one passage, whose id the query is ("pictures")."""

    tool: str
    query: Query
    k: int
    want: Want = "passages"
