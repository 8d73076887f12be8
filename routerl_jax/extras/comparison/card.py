"""Records everything that the numbers depend on: corpora, indexes, prompts, metrics, decoding, versions; and whether the gold
passages of the questions are in the knowledge bases.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import inspect
import json
import pathlib
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

import routerl_jax
from routerl_jax.core.types import Example
from routerl_jax.data.gold_paths import GoldHop, bare_title
from routerl_jax.knowledge.store import MANIFEST, Manifest, Store
from routerl_jax.rewards.metrics import ANSWER_METRICS, NORMALIZERS
from routerl_jax.rewards.retrieval import gold_passages_of
from routerl_jax.training.config import KnowledgeConfig
from routerl_jax.training.knowledge import kb_cache_directory, kb_directory

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "scipy", "tokenizers", "transformers", "scann")


def digest(value: Any) -> str:
    """A digest of a JSON value: sixteen hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def questions_digest(examples: Iterable[Example]) -> str:
    """A digest of questions with their ids and answers, in order."""
    return digest([[example.id, example.question, list(example.answers)] for example in examples])


def prompts_digest(records: Iterable[Mapping[str, Any]]) -> str:
    """A digest of the first prompt of each question, in order: task, worked examples, and documents if there are any."""
    return digest([record["prompt"] for record in records])


def knowledge_settings(name: str, spec: KnowledgeConfig) -> dict[str, str]:
    """How a knowledge base is built, and from what, without opening it. Those with equal settings find the same."""
    settings = {
        key: getattr(spec, key) for key in ("kind", "encoder", "index", "source", "directory") if getattr(spec, key)
    }
    if spec.directory or spec.served or spec.kind in ("tool", "hybrid"):
        return settings
    return settings | {
        "built": kb_cache_directory(name, spec).name
    }  # the directory's name is a digest of content and settings


def knowledge_card(name: str, spec: KnowledgeConfig) -> dict[str, Any]:
    """Facts about a knowledge base that has been opened: digest of the corpus, number of passages, encoder, index."""
    facts: dict[str, Any] = {"kind": spec.kind, "source": spec.source}
    if spec.served or spec.kind in ("tool", "hybrid"):
        return facts
    directory = kb_directory(name, spec)
    if not (directory / MANIFEST).is_file():
        return facts
    manifest = Manifest.read(directory)
    encoder = {}
    if manifest.embedding:
        name = manifest.embedding.encoder
        encoder["encoder"] = pathlib.PurePath(name).name if name.startswith("/") else name
        encoder["encoder digest"] = manifest.embedding.digest
    index = {"index": str(manifest.index["backend"])} if "backend" in manifest.index else {}
    updates = {"updates": manifest.updates} if manifest.updates else {}
    corpus = {"corpus sha256": manifest.corpus_sha256, "passages": manifest.count}
    return facts | {"kind": manifest.kind} | corpus | encoder | index | updates


def metric_definitions(metrics: Sequence[str], normalizer: str) -> dict[str, str]:
    """Definitions of the metrics and of the normaliser, from the docstrings of their functions."""
    definitions = {name: _first_lines(ANSWER_METRICS[name]) for name in metrics if name in ANSWER_METRICS}
    return definitions | {f"normalizer {normalizer}": _first_lines(NORMALIZERS.get(normalizer))}


def versions(devices: bool = True) -> dict[str, str]:
    """Versions of this package, Python and the main libraries, and the machine and, if asked for, its devices."""
    entries = {"routerl_jax": routerl_jax.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            entries[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    entries["machine"] = platform.machine()
    if devices:
        entries["devices"] = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    return entries


def _first_lines(function: Any) -> str:
    """The first paragraph of a function's docstring, in one line."""
    return " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())


_MOST = 2_000_000  # most passages that are read for this


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
        for _, passage in store.live():
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
        if spec.served or spec.kind in ("tool", "hybrid", "pages"):
            return None
        if not names.add(kb_directory(name, spec)):
            return None
    return sum(not all(map(names.hold, hops)) for hops in gold)
