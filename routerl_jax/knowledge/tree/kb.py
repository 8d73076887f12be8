"""A tree of summaries, searched as RAPTOR's collapsed tree: leaves and summaries of all levels compete by their vectors."""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Mapping

from routerl_jax.knowledge.base import KB_KINDS
from routerl_jax.knowledge.dense import DenseKB

TREE = "tree.jsonl.gz"


class TreeKB(DenseKB):
    """Passages and summaries of them found by the inner product of embeddings, each by its own.

    RAPTOR takes the best until 2,000 tokens are full; here k of a search says how many.
    """

    @functools.cached_property
    def children(self) -> Mapping[str, tuple[str, ...]]:
        """What each summary was made of, by its id: passages, or summaries of the level below."""
        place = self.store.directory / TREE
        try:
            with gzip.open(place, "rt", encoding="utf-8") as file:
                return {row["id"]: tuple(row["children"]) for row in map(json.loads, file)}
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise ValueError(f"{place} is damaged or missing ({error}). {self.store.hint}") from error

    def leaves(self, name: str) -> tuple[str, ...]:
        """Ids of the passages below a summary, each once; of a passage its own."""
        below = self.children.get(name)
        return (
            (name,) if below is None else tuple(dict.fromkeys(leaf for child in below for leaf in self.leaves(child)))
        )


KB_KINDS.register("tree")(TreeKB.open)
