"""Checks whether the gold passages of a benchmark's questions are in its knowledge bases."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from routerl_jax.core.types import Example
from routerl_jax.data.gold_paths import GoldHop, bare_title
from routerl_jax.knowledge.store import MANIFEST, Store
from routerl_jax.rewards.retrieval import gold_passages_of
from routerl_jax.training.config import KnowledgeConfig
from routerl_jax.training.knowledge import kb_directory

_MOST = 2_000_000  # most passages that are read for this
_CHUNK = 20_000


@dataclasses.dataclass
class Names:
    """Ids of passages (of a table's rows also the table's), their titles, and these without what stands in brackets."""

    ids: set[str] = dataclasses.field(default_factory=set)
    titles: set[str] = dataclasses.field(default_factory=set)
    bare_titles: set[str] = dataclasses.field(default_factory=set)

    def hold(self, hop: GoldHop) -> bool:
        """Whether the gold passage of a hop is among the passages. True if neither its id nor its title is known."""
        return hop.named_in(self.ids, self.titles, self.bare_titles)

    def add(self, directory: pathlib.Path) -> bool:
        """Adds the passages of a built knowledge base. Returns False if they are not stored there, or too many."""
        if not (directory / MANIFEST).is_file():
            return False
        store = Store(directory)
        if not store.manifest.stored or len(store) > _MOST:
            return False
        rows = len(store.passages)
        for start in range(0, rows, _CHUNK):
            for _, passage in store.live(start, min(start + _CHUNK, rows)):
                self.ids |= {passage.id, passage.id.partition("#")[0]}
                self.titles.add(passage.title)
                self.bare_titles.add(bare_title(passage.title))
        return True


def without_gold(examples: Sequence[Example], knowledge: Mapping[str, KnowledgeConfig]) -> int | None:
    """Number of questions with a gold passage that no knowledge base of the benchmark holds.

    No search can find all that such a question needs: its gold passage is named wrongly, or the corpus is a part of another.

    Returns:
      None if that can't be said: no gold passage is named by id or title, or a knowledge base is served, has pictures of pages,
      or is too large to be read for this.
    """
    gold = [[hop for hop in gold_passages_of(example) if hop.passage_id or hop.title] for example in examples]
    if not any(gold):
        return None
    names = Names()
    for name, spec in knowledge.items():
        if spec.source.startswith(("http://", "https://")) or spec.kind in ("tool", "hybrid", "pages"):
            return None
        if not names.add(kb_directory(name, spec)):
            return None
    return sum(not all(map(names.hold, hops)) for hops in gold)
