"""Builds a tree of summaries: corpus -> leaves -> [embeddings -> groups -> summaries] level by level -> one index of all.

DIR/passages, DIR/embeddings    leaves first, in the corpus's order, then the summaries of each level
DIR/tree.jsonl.gz               a row per summary: `{id, level, children}`
DIR.summaries.sqlite            answers of the language model, beside DIR, so that they survive rebuilds
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import json
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging

from routerl_jax.core.files import atomic_file
from routerl_jax.core.progress import Bar
from routerl_jax.core.types import Passage
from routerl_jax.knowledge.base import KB_BUILDERS, Builder
from routerl_jax.knowledge.build import BuildConfig, Vectoriser
from routerl_jax.knowledge.builds import (
    VERSIONS,
    BuildReport,
    Source,
    corpus_source,
    digest_of,
    is_built,
    report,
    stamp,
)
from routerl_jax.knowledge.corpora.splitting import split_of
from routerl_jax.knowledge.corpus import corpus_files, read_corpus
from routerl_jax.knowledge.encoders import TextEncoder, resolved_encoder, shared_encoder
from routerl_jax.knowledge.index import INDEXES, backend_of
from routerl_jax.knowledge.measures import Clock
from routerl_jax.knowledge.store import EMBEDDINGS, INDEX, Store, StoredArray, StoredPassages
from routerl_jax.knowledge.tables import count_words
from routerl_jax.knowledge.tree.clusters import soft_clusters
from routerl_jax.knowledge.tree.config import TreeConfig
from routerl_jax.knowledge.tree.kb import TREE
from routerl_jax.knowledge.tree.summaries import PROMPT, summaries
from routerl_jax.knowledge.writer import Part, StoreWriter, explained, left_out
from routerl_jax.services.base import ChatModel
from routerl_jax.services.cache import SqliteCache
from routerl_jax.services.load import CachedModel, chat_model

_SAVE_EVERY = 16  # summaries between two saves; a killed build may have to repeat these
_BLOCK = 8192  # passages copied at a time
_SUMMARY = "summary"  # ids of summaries begin so


def build_tree(
    config: TreeConfig,
    directory: str | pathlib.Path,
    *,
    progress: bool = True,
    encoder: TextEncoder | None = None,
    llm: ChatModel | None = None,
) -> BuildReport:
    """Builds a tree of summaries over `config.corpus` (RAPTOR, arXiv 2401.18059). After a kill, another call continues.

    Args:
      directory: directory of the knowledge base; it appears only when it is complete.
      encoder: embed with this object; `config.encoder` is only its name then.
      llm: writes the summaries instead of `config.llm`.

    Raises:
      ValueError: a file, a row or a setting is wrong (names it), or more summaries failed than `max_failures` allows.
    """
    read = functools.partial(read_corpus, split=split_of(config.passage_words, config.least_words))
    source = corpus_source(config.corpus, "the file of passages", read, check=corpus_files)
    config = dataclasses.replace(config, encoder=resolved_encoder(config.encoder))
    llm, clock = llm or chat_model(config.llm), Clock()
    inner = BuildConfig(
        encoder=config.encoder,
        query_prefix=config.query_prefix,
        passage_prefix=config.passage_prefix,
        embed_batch=config.embed_batch,
    )
    embedding = Vectoriser(inner, encoder or shared_encoder(config.encoder))
    manifest = embedding.manifest
    parts: list[Any] = [
        *VERSIONS,
        "tree",
        PROMPT,
        source.digest,
        manifest.encoder,
        manifest.digest,
        manifest.passage_prefix,
    ]
    parts += [llm.name, dict(llm.settings), config.shard_size, config.passage_words, config.least_words]
    parts += [config.summary_words, config.read_words, config.levels, config.seed, dataclasses.asdict(config.clusters)]
    with StoreWriter(directory, digest_of(parts), overwrite=config.overwrite) as writer:
        if not is_built(writer, config, source, manifest):
            INDEXES.get(backend_of(config.index)).require()
            writer.check_target()
            with _keeping(llm, writer.directory) as model:
                _Build(config, writer, model, embedding, clock, progress).run(source)
    store = Store(writer.directory)
    settings = store.manifest.settings
    return report(
        store,
        clock,
        ("passages", EMBEDDINGS, INDEX),
        numbers={"embedded": embedding.embedded, "cut": embedding.cut, "summaries": sum(settings["levels"][1:])},
        failed=settings["failed"],
        encoder=config.encoder,
        dim=store.embeddings.shape[1],
        index=str(store.manifest.index["backend"]),
        notes={"levels": ", ".join(map(str, settings["levels"]))},
    )


@contextlib.contextmanager
def _keeping(llm: ChatModel, directory: pathlib.Path) -> Iterator[ChatModel]:
    path = directory.with_name(f"{directory.name}.summaries.sqlite")
    with contextlib.closing(SqliteCache(path, max_bytes=None)) as cache:
        yield CachedModel(llm, cache, save_every=_SAVE_EVERY)


class _Build:
    """The stages of `build_tree`. The parts that an earlier run has finished are skipped."""

    def __init__(
        self,
        config: TreeConfig,
        writer: StoreWriter,
        llm: ChatModel,
        embedding: Vectoriser,
        clock: Clock,
        progress: bool,
    ) -> None:
        self._config, self._writer, self._llm, self._embedding = config, writer, llm, embedding
        self._clock, self._progress = clock, progress

    def run(self, source: Source) -> None:
        config, writer = self._config, self._writer
        bar = Bar(source.read(), desc="reading", unit="passage", disable=not self._progress)
        counts = [self._part(0).passages(bar, source.left_out)]
        self._clock.lap("read")
        failed: dict[str, str] = {}
        rows: list[dict[str, Any]] = []
        self._embed(0)
        while counts[-1] > config.dimensions + 1 and len(counts) <= config.levels:
            summarised = self._summarised(len(counts), failed)
            if not summarised or len(summarised) >= counts[-1]:  # nothing is left to summarise
                break
            level = len(counts)
            counts.append(self._part(level).passages(summary for summary, _ in summarised))
            rows += [{"id": summary.id, "level": level, "children": children} for summary, children in summarised]
            self._embed(level)
        index = self._join(len(counts))
        with atomic_file(writer.scratch / TREE) as output, gzip.GzipFile("", "wb", fileobj=output, mtime=0) as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self._commit(source, counts, failed, index)

    def _part(self, level: int) -> Part:
        return self._writer.part(f"level-{level}")

    def _embed(self, level: int) -> None:
        shards = self._part(level).embeddings(self._embedding.width(), self._config.shard_size)
        with Bar(
            total=shards.rows, initial=shards.resumed_rows, desc=f"embedding level {level}", disable=not self._progress
        ) as self._embedding.bar:
            shards.write(self._embedding)
        self._clock.lap("embed")

    def _summarised(self, level: int, failed: dict[str, str]) -> list[tuple[Passage, list[str]]]:
        """The summaries of a level with their children's ids, without failed ones."""
        config, below = self._config, self._part(level - 1).directory
        stored = StoredPassages(below, memory_limit=0, hint="")
        nodes = stored.read(0, len(stored))
        vectors = StoredArray(below / EMBEDDINGS, memory_limit=0, hint="").read(0, len(stored))
        lengths = [count_words(f"{node.title} {node.text}") for node in nodes]
        groups = soft_clusters(vectors, lengths, config.read_words, config.clusters, config.seed)
        self._clock.lap("group")
        texts, failures = self._ask([[nodes[row] for row in group] for group in groups], level)
        self._clock.lap("summarise")
        if len(failures) > config.max_failures * len(groups):
            raise ValueError(
                f"{len(failures)} of {len(groups)} summaries of level {level} failed, more than "
                f"max_failures={config.max_failures} allows ({'; '.join(failures[:3])}). What succeeded is kept: mend the "
                "model and run the same command again, or allow more failures"
            )
        reasons, pairs = iter(failures), []
        for number, (group, text) in enumerate(zip(groups, texts)):
            name = f"{_SUMMARY}#{level}.{number}"
            if text is None:
                failed[name] = next(reasons)
            else:
                pairs.append((Passage(id=name, title="", text=text), [nodes[row].id for row in group]))
        if failures:
            logging.warning("%d of %d summaries of level %d failed: %s", len(failures), len(groups), level, failures)
        return pairs

    def _ask(self, groups: Sequence[Sequence[Passage]], level: int) -> tuple[list[str | None], list[str]]:
        all_texts: list[str | None] = []
        failures: list[str] = []
        with Bar(total=len(groups), desc=f"summaries of level {level}", disable=not self._progress) as bar:
            for start in range(0, len(groups), _SAVE_EVERY):
                batch = groups[start : start + _SAVE_EVERY]
                texts, errors = summaries(self._llm, batch, words=self._config.summary_words)
                all_texts, failures = all_texts + texts, failures + errors
                bar.update(len(batch))
        return all_texts, failures

    def _join(self, levels: int) -> dict[str, Any]:
        """Joins all levels in one store with one index (the collapsed tree). Returns the index's entry for the manifest."""
        config, writer = self._config, self._writer
        parts = [self._part(level).directory for level in range(levels)]
        stored = [StoredPassages(part, memory_limit=0, hint="") for part in parts]
        joined = (
            passage
            for passages in stored
            for start in range(0, len(passages), _BLOCK)
            for passage in passages.read(start, min(start + _BLOCK, len(passages)))
        )
        count = writer.passages(joined, left_out(parts[0]))
        arrays = [StoredArray(part / EMBEDDINGS, memory_limit=0, hint="") for part in parts]
        firsts = np.cumsum([0, *map(len, arrays)])

        def rows(start: int, stop: int) -> np.ndarray:
            bounds = [
                (max(start - first, 0), min(stop - first, len(passages))) for first, passages in zip(firsts, arrays)
            ]
            return np.concatenate([passages.read(a, b) for passages, (a, b) in zip(arrays, bounds) if a < b])

        writer.embeddings(arrays[0].shape[1], config.shard_size).write_rows(rows)
        vectors = StoredArray(writer.scratch / EMBEDDINGS, memory_limit=2**30, hint="")
        shutil.rmtree(writer.index_directory, ignore_errors=True)
        backend = backend_of(config.index)
        with explained(writer.index_directory, f"All {count:,} vectors are kept"):
            saved = INDEXES.get(backend).build(vectors, {}).save(writer.index_directory)
        self._clock.lap("index")
        return {"backend": backend, **saved}

    def _commit(self, source: Source, counts: list[int], failed: dict[str, str], index: dict[str, Any]) -> None:
        config, writer = self._config, self._writer
        dim = StoredArray(writer.scratch / EMBEDDINGS, memory_limit=0, hint="").shape[1]
        manifest = stamp(
            config,
            writer.directory,
            corpus=source.path,
            digest=source.digest,
            count=sum(counts),
            embedding=dataclasses.replace(self._embedding.manifest, dim=dim),
            index=index,
            settings={"levels": counts, "failed": failed},
        )
        writer.commit(manifest, drop=[self._part(level).directory.name for level in range(len(counts))])


KB_BUILDERS.register("tree")(Builder(TreeConfig, build_tree))
