"""Requests of an attempt to a tool."""

from __future__ import annotations

from typing import Literal, NamedTuple

from routerl_jax.core.types import Query

Want = Literal["passages", "listing", "pictures"]


class Request(NamedTuple):
    """A request to a tool, of one of three kinds (`want`).

    "passages": `k` passages with their pictures. "listing": `k` passages, without the pictures that a server would have to
    send. "pictures": the picture of one passage; the query is the passage's id.
    """

    tool: str
    query: Query
    k: int
    want: Want = "passages"
