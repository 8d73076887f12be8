"""Checks whether the gold passages of a benchmark's questions are in its knowledge bases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from routerl_jax.core.types import Example
from routerl_jax.data.gold_paths import bare_title
from routerl_jax.knowledge.store import MANIFEST, Store
from routerl_jax.rewards.retrieval import gold_passages_of
from routerl_jax.training.config import KnowledgeConfig
from routerl_jax.training.knowledge import kb_place

_MOST = 2_000_000  # most passages that are read for this
_CHUNK = 20_000


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
    names, titles, bare_titles = set[str](), set[str](), set[str]()
    read = 0
    for name, spec in knowledge.items():
        if spec.source.startswith(("http://", "https://")) or spec.kind in ("tool", "hybrid", "pages"):
            return None
        directory = kb_place(name, spec)
        if not (directory / MANIFEST).is_file():
            return None
        store = Store(directory)
        read += len(store)
        if not store.manifest.stored or read > _MOST:
            return None
        rows = len(store.passages)
        for start in range(0, rows, _CHUNK):
            for _, passage in store.live(start, min(start + _CHUNK, rows)):
                names |= {passage.id, passage.id.partition("#")[0]}
                titles.add(passage.title)
                bare_titles.add(bare_title(passage.title))
    return sum(not all(hop.named_in(names, titles, bare_titles) for hop in hops) for hops in gold)
