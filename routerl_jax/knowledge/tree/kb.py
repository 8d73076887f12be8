"""Search in a tree of summaries, as in RAPTOR's collapsed tree: leaves and summaries of all levels are ranked together."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from routerl_jax.core.rows import read_rows
from routerl_jax.knowledge.dense import DenseKB

TREE = "tree.jsonl.gz"


class TreeKB(DenseKB):
    """Finds passages and their summaries by the inner product of embeddings.

    RAPTOR takes the best results up to 2,000 tokens; here k of the search is their number.
    """

    @functools.cached_property
    def children(self) -> Mapping[str, tuple[str, ...]]:
        """The children of each summary, by its id: passages, or summaries of the level below."""
        path = self.store.directory / TREE
        try:
            return {row["id"]: tuple(row["children"]) for _, row in read_rows(path)}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged or missing ({error}). {self.store.hint}") from error

    def leaves(self, name: str) -> tuple[str, ...]:
        """Ids of the passages below a summary, each once; for a passage, its own id."""
        below = self.children.get(name)
        return (
            (name,) if below is None else tuple(dict.fromkeys(leaf for child in below for leaf in self.leaves(child)))
        )
