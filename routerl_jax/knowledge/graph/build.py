"""Building a graph knowledge base: corpus -> triples -> phrases and facts -> embeddings -> synonyms -> graph -> directory.

DIR/passages, DIR/embeddings    as in dense knowledge bases
DIR/entities/, DIR/facts/       phrases and facts with their embeddings, stored in the same way (a fact's three parts are
                                separated by tabs)
DIR/index/graph.npz             adjacency in compressed rows, ends of facts, passages per entity
DIR/triples.jsonl.gz            the extracted triples, in the form that `triples` of another build reads
DIR.extractions.sqlite          answers of the language model, beside DIR, so that they survive rebuilds

In an update, passages that stay are neither extracted nor embedded again. Phrases, synonyms and edges depend on all passages,
so they are made again. The slow parts, language model and encoder, only work on new passages.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gzip
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from absl import logging
from jaxtyping import Float32

from routerl_jax.core.config import Fraction, PositiveFraction, Size, checked, from_config_dict
from routerl_jax.core.files import atomic_file, read_json
from routerl_jax.core.progress import Bar
from routerl_jax.core.rows import checked_path, read_rows
from routerl_jax.core.types import Passage
from routerl_jax.knowledge.build import Vectoriser, encoder_again
from routerl_jax.knowledge.builds import (
    VERSIONS,
    Builder,
    BuildReport,
    Clock,
    EncoderSettings,
    Source,
    check_vectors,
    check_width,
    corpus_source,
    digest_of,
    is_built,
    passages_source,
    report,
    stamp,
)
from routerl_jax.knowledge.corpus import corpus_files, file_sha256, passage_text, read_corpus
from routerl_jax.knowledge.encoders import TextEncoder, resolved_encoder, shared_encoder
from routerl_jax.knowledge.graph.graph import MOST, Graph, Phrases, make_graph, phrases_of, synonyms
from routerl_jax.knowledge.graph.hipporag import PASSAGES, HippoRAGDirectory
from routerl_jax.knowledge.graph.kb import ENTITIES, FACTS, WalkSettings
from routerl_jax.knowledge.graph.triples import (
    Extraction,
    ModelExtractor,
    PrecomputedTriples,
    Triple,
    rule_extraction,
    to_row,
)
from routerl_jax.knowledge.index import INDEXES, VectorSource, backend_of
from routerl_jax.knowledge.store import (
    EMBEDDINGS,
    INDEX,
    JoinedPassages,
    Manifest,
    Store,
    StoredArray,
    StoredPassages,
    nested,
)
from routerl_jax.knowledge.writer import Part, StoreWriter
from routerl_jax.services.base import ChatModel
from routerl_jax.services.cache import SqliteCache
from routerl_jax.services.config import ChatModelConfig
from routerl_jax.services.load import chat_model

EXTRACTORS = ("llm", "rules", "given", "hipporag")


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class SynonymSettings:
    """Which phrases count as synonyms."""

    threshold: PositiveFraction = 0.8  # smallest cosine of synonyms
    most: Size = MOST  # most synonyms of a phrase
    index: str = ""  # "": compare all with all; "scann": about the same result, faster for very many phrases


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class GraphConfig(EncoderSettings):
    """Configuration of `build_graph`."""

    kind: str = "graph"  # kind of the knowledge base
    # where triples come from: "llm", "rules" (names and dates by their form), "given" (`triples`), "hipporag" (`corpus` is a
    # working directory of HippoRAG 2, whose passages, triples and vectors are taken; knowledge.graph.hipporag)
    extractor: str = "rules"
    # for extractor="given": a file of triples (knowledge.graph.triples); for "hipporag": its file, if it is elsewhere
    triples: str = ""
    llm: ChatModelConfig = dataclasses.field(default_factory=ChatModelConfig)  # only for extractor="llm": which model
    entities_first: bool = True  # only for extractor="llm": two calls per passage, first for entities, then for triples
    # share of passages whose extraction may fail; beyond it the build stops, to be resumed
    max_failures: Fraction = 0.05
    # put before queries that are compared with passages; default: the prefix of the encoder's authors
    query_prefix: str | None = None
    fact_prefix: str | None = None  # put before queries that are compared with facts; default: the same
    # put before passages, phrases and facts; default: the prefix of the encoder's authors
    passage_prefix: str | None = None
    synonyms: SynonymSettings = dataclasses.field(default_factory=SynonymSettings)
    walk: WalkSettings = dataclasses.field(default_factory=WalkSettings)  # settings of the search
    shard_size: Size = 8192  # vectors of a file; the progress of one that takes long is saved every minute

    def __post_init__(self) -> None:
        if self.kind != "graph":
            raise ValueError(f"kind={self.kind!r} is not 'graph'")
        if self.extractor not in EXTRACTORS:
            raise ValueError(f"extractor={self.extractor!r} is not one of {', '.join(EXTRACTORS)}")
        if bool(self.triples) != (self.extractor == "given") and self.extractor != "hipporag":
            raise ValueError(
                f"triples={self.triples!r} with extractor={self.extractor!r}: a file of triples goes with 'given'"
            )
        for key, default in (("entities_first", True), ("llm", ChatModelConfig())):
            if getattr(self, key) != default and self.extractor != "llm":
                raise ValueError(f"{key} is set, but extractor={self.extractor!r} does not use it; it needs 'llm'")


TRIPLES = "triples.jsonl.gz"
Extract = Callable[[Sequence[Passage]], list[Extraction]]

_SLICE = 2048  # passages to extract from, and texts to embed, between two updates of the progress bar
_LISTED = 20  # failures that a report names
_STATS = "graph.json"  # in the directory: counts of the extraction and the graph


def build_graph(
    config: GraphConfig,
    directory: str | pathlib.Path,
    *,
    progress: bool = True,
    encoder: TextEncoder | None = None,
    llm: ChatModel | None = None,
) -> BuildReport:
    """Builds a graph knowledge base from `config.corpus`. After a kill, another call continues where it was.

    Args:
      directory: directory of the knowledge base; it appears only when it is complete.
      encoder: embed with this object; `config.encoder` is only its name then.
      llm: extracts triples instead of `config.llm`, for extractor="llm".

    Raises:
      ValueError: a file, a row or a setting is wrong (names it), or more extractions failed than `max_failures` allows.
    """
    if config.extractor != "hipporag":
        source = corpus_source(config.corpus, "the file of passages", read_corpus, check=corpus_files)
        return _build(config, directory, source, progress, encoder, llm)
    released = HippoRAGDirectory(config.corpus, config.triples)
    source = Source(str(released.directory), released.digest, released.passages)
    earlier = EarlierBuild(triples=PrecomputedTriples(released.triples), changed=frozenset(), vectors=released)
    config = dataclasses.replace(config, triples=str(released.triples))
    return _build(config, directory, source, progress, encoder, llm, earlier)


def build_graph_from_passages(
    passages: Sequence[Passage],
    config: GraphConfig,
    directory: str | pathlib.Path,
    *,
    progress: bool = True,
    encoder: TextEncoder | None = None,
    llm: ChatModel | None = None,
) -> BuildReport:
    """Like `build_graph`, for passages in memory with distinct ids (`config.corpus` must be empty)."""
    return _build(config, directory, passages_source(passages, config.corpus), progress, encoder, llm)


def _build(
    config: GraphConfig,
    directory: str | pathlib.Path,
    source: Source,
    progress: bool,
    encoder: TextEncoder | None,
    llm: ChatModel | None,
    earlier: EarlierBuild | None = None,
) -> BuildReport:
    config = dataclasses.replace(config, encoder=resolved_encoder(config.encoder))
    if config.synonyms.index:
        INDEXES.get(backend_of(config.synonyms.index)).require()
    if config.extractor == "llm" and llm is None:
        llm = chat_model(config.llm)
    clock, vectors = Clock(), Vectoriser(config, encoder or shared_encoder(config.encoder))
    embedding = vectors.manifest
    triples_digest = file_sha256(checked_path(config.triples)) if config.triples else ""
    extractor: list[Any] = [config.extractor]
    if llm is not None and config.extractor == "llm":
        extractor += [llm.name, config.entities_first, dict(llm.settings)]
    parts = [*VERSIONS, "graph", source.digest, extractor, triples_digest, embedding.digest, embedding.encoder]
    parts += [embedding.passage_prefix, config.shard_size, dataclasses.asdict(config.synonyms)]
    with StoreWriter(directory, digest_of(parts), overwrite=config.overwrite) as writer:
        if not is_built(writer, config, source, embedding):
            writer.commit(
                write_graph(config, writer, source, vectors, clock, llm=llm, earlier=earlier, progress=progress)
            )
    store = Store(writer.directory)
    graph, stats = Graph.load(store.index_directory), read_json(store.directory / _STATS, store.hint)
    sizes = {"entities": graph.entities, "facts": len(graph.fact_ends), "edges": graph.adjacency.nnz // 2}
    return report(
        store,
        clock,
        ("passages", EMBEDDINGS, ENTITIES, FACTS, INDEX),
        numbers=sizes | {key: value for key, value in stats.items() if key != "failed"},
        failed=stats["failed"],
        encoder=config.encoder,
        dim=store.embeddings.shape[1],
    )


class VectorsByText(Protocol):
    """Vectors that were computed before."""

    def of(
        self, texts: Sequence[str], embed: Callable[[list[str]], Float32[np.ndarray, "M D"]], part: str
    ) -> Float32[np.ndarray, "N D"]:
        """One vector per text. `embed` computes those of unknown texts. `part`: "passages", ENTITIES or FACTS."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlierBuild:
    """Results of an earlier build.

    Attributes:
      triples: the triples of its passages.
      changed: ids of passages that have changed since, so that their triples are invalid.
      vectors: the vectors of its texts.
    """

    triples: PrecomputedTriples
    changed: frozenset[str]
    vectors: VectorsByText

    def extraction(self, passage: Passage) -> Extraction | None:
        """The extraction of a passage in that build; None if there is none."""
        return None if passage.id in self.changed else self.triples.of(passage)


def write_graph(
    config: GraphConfig,
    writer: StoreWriter,
    source: Source,
    vectors: Vectoriser,
    clock: Clock,
    *,
    llm: ChatModel | None = None,
    earlier: EarlierBuild | None = None,
    progress: bool = False,
) -> Manifest:
    """Runs all stages of a build except the commit of the manifest. The parts that an earlier run has finished are skipped.

    Args:
      earlier: earlier results that need not be extracted and embedded again.
    """
    count = source.write(writer, progress)
    clock.lap("read")
    stored = StoredPassages(writer.scratch)
    extracted = writer.once("triples", lambda: _extract(config, writer, stored, llm, earlier, progress))
    phrases = phrases_of(_read_triples(writer.scratch / TRIPLES))
    clock.lap("extract")
    dim = vectors.width()
    released = earlier.vectors if earlier and isinstance(earlier.vectors, HippoRAGDirectory) else None
    if released is not None:
        check_width(released.directory, released.width, dim)

    def embed_part(target: StoreWriter | Part, name: str, text: Callable[[Passage], str]) -> None:
        """Embeds the missing vectors of a part, or takes them from the earlier build."""
        shards = target.embeddings(dim, config.shard_size)
        with shards.bar(f"embedding {name}", "text", progress) as bar:

            def embed(passages: Sequence[Passage]) -> Float32[np.ndarray, "N D"]:
                texts = [text(passage) for passage in passages]
                found = earlier.vectors.of(texts, vectors.embed, name) if earlier else vectors.embed(texts)
                bar.update(len(texts))
                return found

            shards.write(embed)

    embed_part(writer, PASSAGES, passage_text)
    if released is not None:
        check_vectors(released.directory, StoredArray(writer.scratch / EMBEDDINGS), stored, vectors)
    for part, lines in ((ENTITIES, phrases.entities), (FACTS, ["\t".join(fact) for fact in phrases.facts])):
        if lines:
            target = writer.part(part)
            target.passages(Passage(id=str(row), title="", text=line) for row, line in enumerate(lines))
            embed_part(target, part, _line_text)
    clock.lap("embed")
    stats = writer.once("graph", lambda: _make_graph(config, writer, phrases, count, progress))
    clock.lap("graph")
    walk = dataclasses.asdict(config.walk)
    fact_prefix = vectors.manifest.query_prefix if config.fact_prefix is None else config.fact_prefix
    (writer.scratch / _STATS).write_text(json.dumps(extracted | stats, ensure_ascii=False))
    return stamp(
        config,
        writer.directory,
        source,
        count=count,
        embedding=dataclasses.replace(vectors.manifest, dim=dim),
        index={"backend": "graph", "fact_prefix": fact_prefix, "walk": walk},
    )


def _line_text(line: Passage) -> str:
    """A phrase or a fact as it is embedded."""
    return line.text.replace("\t", " ")


def _extract(
    config: GraphConfig,
    writer: StoreWriter,
    stored: StoredPassages,
    llm: ChatModel | None,
    earlier: EarlierBuild | None,
    progress: bool,
) -> dict[str, Any]:
    """Writes the triples of all passages. Returns counts and the first failures."""
    isolated = dropped = matched = 0
    failed: dict[str, str] = {}
    failures = 0
    count = len(stored)
    with _extractor(config, writer.directory, llm) as extract, atomic_file(writer.scratch / TRIPLES) as output:
        if earlier is not None:
            extract = _reusing(extract, earlier)
        with (
            gzip.GzipFile("", "wb", compresslevel=3, fileobj=output, mtime=0) as file,  # equal builds make equal files
            Bar(total=count, desc="triples", unit="passage", disable=not progress) as bar,
        ):
            for start in range(0, count, _SLICE):
                passages = stored.read(start, min(start + _SLICE, count))
                for passage, extraction in zip(passages, extract(passages)):
                    file.write(json.dumps(to_row(passage.id, extraction)).encode() + b"\n")
                    isolated += not extraction.triples
                    matched += extraction is not _NOTHING
                    dropped += extraction.dropped
                    if extraction.error:
                        failures += 1
                        if len(failed) < _LISTED:
                            failed[passage.id] = extraction.error
                bar.update(len(passages))
        if failures > config.max_failures * count:
            first = "; ".join(f"{key!r}: {why}" for key, why in list(failed.items())[:3])
            raise ValueError(
                f"the extraction of {failures} of {count} passages failed, more than max_failures={config.max_failures} allows "
                f"({first}). What succeeded is kept: mend the model and run the same command again, or allow more failures"
            )
        if failures:
            logging.warning("the extraction of %d of %d passages failed: %s", failures, count, failed)
        if config.triples and not matched:
            raise ValueError(
                f"{config.triples} has triples for none of the {count} passages: its ids or texts are of another corpus"
            )
    return {"isolated": isolated, "dropped": dropped, "failed": failed, "failures": failures}


_NOTHING = Extraction()


def _reusing(extract: Extract, earlier: EarlierBuild) -> Extract:
    """An extractor that reuses the extractions of an earlier build, and extracts only from other passages."""

    def extract_new(passages: Sequence[Passage]) -> list[Extraction]:
        extractions = [earlier.extraction(passage) for passage in passages]
        fresh = iter(extract([passage for passage, extraction in zip(passages, extractions) if extraction is None]))
        return [next(fresh) if extraction is None else extraction for extraction in extractions]

    return extract_new


@contextlib.contextmanager
def _extractor(config: GraphConfig, directory: pathlib.Path, llm: ChatModel | None) -> Iterator[Extract]:
    """The configured extractor of triples."""
    if config.extractor == "given":
        precomputed = PrecomputedTriples(config.triples)
        yield lambda passages: [precomputed.of(passage) or _NOTHING for passage in passages]
    elif config.extractor == "hipporag":  # HippoRAG's triples are an `EarlierBuild`; other passages have none
        yield lambda passages: [_NOTHING] * len(passages)
    elif config.extractor == "rules":
        yield lambda passages: list(map(rule_extraction, passages))
    else:
        assert llm is not None  # `_build` makes sure of it
        path = directory.with_name(f"{directory.name}.extractions.sqlite")
        with contextlib.closing(SqliteCache(path, max_bytes=None)) as cache:
            yield ModelExtractor(llm, cache, entities_first=config.entities_first).extract


def _read_triples(path: pathlib.Path) -> Iterator[list[Triple]]:
    try:
        for _, row in read_rows(path):
            yield [(s, p, o) for s, p, o in row["triples"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete {path.parent}, and the build begins anew") from error


def _make_graph(
    config: GraphConfig, writer: StoreWriter, phrases: Phrases, count: int, progress: bool
) -> dict[str, int]:
    settings = config.synonyms
    vectors: Any = np.zeros((0, 0), np.float32)
    if phrases.entities:
        vectors = StoredArray(writer.scratch / ENTITIES / EMBEDDINGS, memory_limit=2**30, hint="")
    alike = synonyms(
        phrases.entities,
        vectors,
        threshold=settings.threshold,
        most=settings.most,
        index=settings.index,
        progress=progress,
    )
    make_graph(phrases, count, alike).save(writer.index_directory)
    return {"synonyms": len(alike.sources)}


BUILDER = Builder(GraphConfig, build_graph)


def rebuild_graph(
    writer: StoreWriter,
    store: Store,
    passages: Callable[[], Iterable[Passage]],
    new: Sequence[Passage],
    *,
    encoder: TextEncoder | None = None,
    llm: ChatModel | None = None,
    progress: bool = False,
) -> None:
    """Builds the graph of other passages with the settings of a knowledge base, and replaces it.

    Args:
      writer: writer of the store's directory.
      passages: all passages of the new knowledge base, those of `new` included.
      new: passages whose triples the store does not know, even if it has a passage of the same id.
      llm: extracts the triples of `new`, if a model does this; default: the model of kb.json.

    Raises:
      ValueError: the encoder's weights differ from those that the store was built with, or kb.json has no model.
    """
    old = store.manifest
    assert old.embedding is not None
    config = from_config_dict(GraphConfig, nested(old.config), "config")
    config = dataclasses.replace(config, encoder=old.embedding.encoder)
    vectors = Vectoriser(config, encoder_again(old.embedding, encoder))
    if config.extractor == "llm" and llm is None:
        try:
            llm = chat_model(config.llm)
        except ValueError as error:
            raise ValueError(
                f"{store.directory}: its triples come from a language model, and kb.json describes none that can be asked "
                f"({error}). Give it: update(.., llm=MODEL)"
            ) from error
    earlier = EarlierBuild(
        triples=PrecomputedTriples(store.directory / TRIPLES),
        changed=frozenset(passage.id for passage in new),
        vectors=KnownVectors(store),
    )
    source = Source(old.corpus, old.corpus_sha256, passages)
    manifest = write_graph(config, writer, source, vectors, Clock(), llm=llm, earlier=earlier, progress=progress)
    writer.commit(
        dataclasses.replace(manifest, config=old.config, created=old.created, name=old.name, updates=old.updates + 1)
    )


class KnownVectors:
    """The vectors of a store's passages, phrases and facts, by their texts."""

    def __init__(self, store: Store) -> None:
        self._arrays: list[VectorSource] = []
        self._rows: dict[str, tuple[int, int]] = {}
        self._add(store.passages, store.embeddings, passage_text)
        for part in (ENTITIES, FACTS):
            directory = store.directory / part
            if directory.is_dir():
                lines = StoredPassages(directory, hint=store.hint)
                vectors = StoredArray(directory / EMBEDDINGS, hint=store.hint)
                self._add(lines, vectors, _line_text)

    def _add(
        self, texts: StoredPassages | JoinedPassages, vectors: VectorSource, text: Callable[[Passage], str]
    ) -> None:
        for row, passage in enumerate(texts):
            self._rows[text(passage)] = len(self._arrays), row
        self._arrays.append(vectors)

    def of(
        self, texts: Sequence[str], embed: Callable[[list[str]], Float32[np.ndarray, "M D"]], part: str
    ) -> Float32[np.ndarray, "N D"]:
        """One vector per text: from the store, or from `embed` if the store lacks it. A text is taken from any part."""
        rows: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
        missing = [i for i, text in enumerate(texts) if text not in self._rows]
        for i, text in enumerate(texts):
            if text in self._rows:
                array, row = self._rows[text]
                rows[array].append((i, row))
        parts = [(missing, embed([texts[i] for i in missing]))] if missing else []
        for array, pairs in rows.items():
            parts.append(([i for i, _ in pairs], self._arrays[array].take(np.asarray([row for _, row in pairs]))))
        result = np.empty((len(texts), parts[0][1].shape[1]), np.float32)
        for indices, vectors in parts:
            result[indices] = vectors
        return result
