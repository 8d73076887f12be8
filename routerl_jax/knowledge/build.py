"""Building knowledge bases: corpus -> passages -> embeddings -> index -> a directory that `load_kb` opens."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Float32

from routerl_jax.core.config import Count, PositiveFraction, Size, checked
from routerl_jax.core.progress import Bar
from routerl_jax.core.types import Passage
from routerl_jax.knowledge.builds import (
    VERSIONS,
    Builder,
    BuildReport,
    Clock,
    EncoderSettings,
    Source,
    SplitSettings,
    backend_over,
    batch_size,
    check_vectors,
    check_width,
    corpus_source,
    digest_of,
    embedding_of,
    is_built,
    passages_source,
    report,
    stamp,
    write_index,
)
from routerl_jax.knowledge.corpus import corpus_files, passage_text, read_corpus
from routerl_jax.knowledge.dense import open_index
from routerl_jax.knowledge.encoders import (
    TextEncoder,
    encoder_digest,
    resolved_encoder,
    shared_encoder,
    token_counter,
)
from routerl_jax.knowledge.faiss import FaissVectors
from routerl_jax.knowledge.index import AUTO, INDEXES, jittered, opening_backend, recall
from routerl_jax.knowledge.scann_index import ScannSettings
from routerl_jax.knowledge.store import (
    EMBEDDINGS,
    INDEX,
    VECTORS,
    Embedding,
    Store,
    StoredPassages,
)
from routerl_jax.knowledge.tables import FORMATS, count_words, read_tables, table_files, table_passages
from routerl_jax.knowledge.writer import StoreWriter
from routerl_jax.models.embedding import Embedder
from routerl_jax.parallel import multihost

KINDS = ("dense_text", "dense_table")
# Passages per encoder call, to batch by length.
_SLICE, _SLICE_BATCHES = 1024, 16
_LOW_RECALL = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class BuildConfig(EncoderSettings, SplitSettings):
    """Configuration of `build_kb`."""

    corpus: str = ""  # passages or tables: a file or a directory of files (knowledge.corpus, knowledge.tables)
    kind: str = "dense_text"  # what the corpus holds: "dense_text" (passages) or "dense_table" (tables)
    # only for passages: a FAISS index file (Flat, IVF..,Flat) whose vector i is the corpus's passage i, as Search-R1 has them.
    # It is searched where it lies, and `encoder` embeds only queries
    vectors: str = ""
    query_encoder: str = ""  # embeds queries, if they have their own model (Open-WikiTable); default: encoder
    # "scann" (CPU, approximate when large), or on the device mesh "exact", "exact_bf16", "exact_int8" (4, 2, 1 bytes a number);
    # "auto": "scann" where it is installed, "exact" elsewhere
    index: str = AUTO
    scann: ScannSettings = dataclasses.field(default_factory=ScannSettings)  # only if ScaNN is the index
    # only for index="exact": below 1, lax.approx_max_k with this target (faster on TPU)
    recall_target: PositiveFraction = 1.0
    rows_per_passage: Size = 1  # only for tables: most rows of a passage
    table_budget: Size = 200  # only for tables: most tokens of a passage; longer rows become several passages
    table_format: str = "compact"  # only for tables: how they are written; "open_wikitable" for its bi-encoder
    shard_size: Size = 8192  # vectors of a file; the progress of one that takes long is saved every minute
    # queries made from passages (index.jittered) to measure the index's recall; 0: no check
    check_queries: Count = 256

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is not one of {', '.join(KINDS)}")
        for key, needs, value in (
            ("vectors", "kind", "dense_text"),
            ("passage_words", "kind", "dense_text"),
            ("least_words", "kind", "dense_text"),
            ("rows_per_passage", "kind", "dense_table"),
            ("table_budget", "kind", "dense_table"),
            ("table_format", "kind", "dense_table"),
            ("scann", "index", "scann"),
        ):
            default = ScannSettings() if key == "scann" else getattr(BuildConfig, key)
            if getattr(self, needs) not in (value, AUTO) and getattr(self, key) != default:
                raise ValueError(
                    f"{key} is set, but {needs}={getattr(self, needs)!r} does not use it; it needs {value!r}"
                )
        if self.table_format not in FORMATS:
            raise ValueError(f"table_format={self.table_format!r} is not one of {', '.join(FORMATS)}")
        if self.recall_target != 1 and not self.index.startswith("exact"):
            raise ValueError(f"recall_target is set, but index={self.index!r} does not use it; it needs 'exact'")

    def index_settings(self, backend: str) -> dict[str, Any]:
        """The settings of the chosen index."""
        if backend == "scann":
            return dataclasses.asdict(self.scann)
        return {"recall_target": self.recall_target} if backend.startswith("exact") and ":" not in backend else {}


def build_kb(
    config: BuildConfig,
    directory: str | pathlib.Path,
    *,
    progress: bool = True,
    encoder: TextEncoder | None = None,
    together: bool = False,
) -> BuildReport:
    """Builds a knowledge base from `config.corpus`. After a kill, another call continues with the next shard.

    Args:
      directory: directory of the knowledge base; it appears only when it is complete.
      progress: show a progress bar.
      encoder: embed with this object; `config.encoder` is only its name then.
      together: all processes of the `jax.distributed` job call this and share the work. Each embeds its part of the shards
        into the same directory, on a file system that all of them see. The main process does the rest. Each process returns
        its own report.

    Raises:
      ValueError: a file, a row or a setting is wrong; names it.
    """
    check = corpus_files if config.kind == "dense_text" else table_files
    source = corpus_source(
        config.corpus,
        "the file of passages or tables",
        lambda path, left_out: read_source(config, path, lambda: model, left_out),
        check=check,
    )
    model = encoder or shared_encoder(config.encoder)
    return _build(config, directory, source, model, progress, together)


def build_from_passages(
    passages: Sequence[Passage],
    config: BuildConfig,
    directory: str | pathlib.Path,
    *,
    progress: bool = True,
    encoder: TextEncoder | None = None,
) -> BuildReport:
    """Like `build_kb`, for passages in memory (`config.corpus` must be empty).

    Raises:
      ValueError: there are no passages, one is empty, or an id repeats; or the config has a corpus.
    """
    source = passages_source(passages, config.corpus)
    return _build(config, directory, source, encoder or shared_encoder(config.encoder), progress)


def _build(
    config: BuildConfig,
    directory: str | pathlib.Path,
    source: Source,
    encoder: TextEncoder,
    progress: bool,
    together: bool = False,
) -> BuildReport:
    encoder_paths = {
        key: resolved_encoder(getattr(config, key)) for key in ("encoder", "query_encoder") if getattr(config, key)
    }
    config = dataclasses.replace(config, **encoder_paths)
    clock, embedding = Clock(), Vectoriser(config, encoder, config.query_encoder)
    faiss_vectors = FaissVectors(config.vectors) if config.vectors else None
    if faiss_vectors is not None:
        config = dataclasses.replace(config, vectors=str(faiss_vectors.path))
    fingerprint = _fingerprint(config, source.digest, embedding.manifest, faiss_vectors)
    steps = _together if together else _alone
    with StoreWriter(directory, fingerprint, overwrite=config.overwrite, together=together) as writer:
        if not steps.main(lambda: is_built(writer, config, source, embedding.manifest)):
            _write(config, writer, source, embedding, faiss_vectors, clock, progress, steps)
    store = Store(writer.directory)
    backend = opening_backend(None, str(store.manifest.index["backend"]))
    index = open_index(store, backend, None)
    queries = jittered(store.embeddings, config.check_queries, seed=1) if config.check_queries else None
    measured = None if queries is None else recall(index, store.embeddings, queries)
    clock.lap("check")
    regime = getattr(index, "regime", "")
    if measured is not None and measured < _LOW_RECALL:
        logging.warning("the index finds only %.3f of the nearest neighbours; consider index='exact'", measured)
    return report(
        store,
        clock,
        ("passages", EMBEDDINGS, INDEX),
        numbers={"embedded": embedding.embedded, "cut": embedding.cut},
        encoder=config.encoder,
        dim=store.embeddings.shape[1],
        index=f"{backend} ({regime})" if regime else backend,
        recall=measured,
    )


class _Steps(NamedTuple):
    """How the processes of a build share its steps: `main` runs a step on the main process only, `each` on every process.

    An error of one process is raised by all, so that none waits for one that has given up. Both return the main process's
    result, which must be JSON-serialisable.
    """

    main: Callable[[Callable[[], Any]], Any]
    each: Callable[[Callable[[], Any]], Any]


def _each(action: Callable[[], Any]) -> Any:
    result, error = None, None
    try:
        result = action()
    except Exception as raised:
        error = raised
    outcomes = multihost.exchange([result, None if error is None else f"{error}" or repr(error)])
    if error is not None:
        raise error
    failed = [(number, message) for number, (_, message) in enumerate(outcomes) if message is not None]
    if failed:
        raise ValueError(f"process {failed[0][0]} of the build failed: {failed[0][1]}")
    return outcomes[0][0]


_alone = _Steps(main=lambda action: action(), each=lambda action: action())
_together = _Steps(main=lambda action: _each(action if multihost.is_main() else lambda: None), each=_each)


def _write(
    config: BuildConfig,
    writer: StoreWriter,
    source: Source,
    embedding: Vectoriser,
    faiss_vectors: FaissVectors | None,
    clock: Clock,
    progress: bool,
    steps: _Steps,
) -> None:
    """Runs all stages of a build. The parts that an earlier run has finished are skipped."""
    backend = backend_over(config.index, faiss_vectors)
    INDEXES.get(backend).require()
    if faiss_vectors is not None:
        check_width(faiss_vectors.path, faiss_vectors.shape[1], embedding.width())
    count = steps.main(lambda: source.write(writer, progress))
    clock.lap("read")
    if faiss_vectors is not None:
        steps.main(lambda: check_vectors(faiss_vectors.path, faiss_vectors, StoredPassages(writer.scratch), embedding))
        embedding.embedded = 0
        clock.lap("check")
    else:
        steps.main(lambda: len(writer.embeddings(embedding.width(), config.shard_size).todo))  # allocates the array
        shards = writer.embeddings(embedding.width(), config.shard_size)
        with shards.bar("embedding", "passage", progress) as embedding.bar:
            steps.each(lambda: shards.write(embedding))
        clock.lap("embed")

    def finish() -> None:
        index = write_index(writer, backend, config.index_settings(backend), vectors=faiss_vectors)
        clock.lap("index")
        settings = {}
        if faiss_vectors is not None:
            settings = {VECTORS: {"file": str(faiss_vectors.path), "digest": faiss_vectors.digest}}
        made = dataclasses.replace(embedding.manifest, dim=embedding.width())
        writer.commit(
            stamp(config, writer.directory, source, count=count, embedding=made, index=index, settings=settings)
        )

    steps.main(finish)


class Vectoriser:
    """Embeds a shard: passages become texts, and texts become vectors. Counts all passages and those that the encoder cuts."""

    def __init__(self, config: EncoderSettings, encoder: TextEncoder, query_encoder: str = "") -> None:
        self.embedded = self.cut = 0
        self.bar: Bar | None = None
        self._encoder, self._batch = encoder, batch_size(config.embed_batch, encoder)
        self._with_title = config.kind != "dense_table"  # whose passages begin with the title
        self._counter = token_counter(encoder)
        query_model = shared_encoder(query_encoder) if query_encoder else encoder
        if query_model is not encoder and self.width() != _width(query_model):
            raise ValueError(
                f"query_encoder={query_encoder!r} gives vectors of width {_width(query_model)}, encoder="
                f"{config.encoder!r} of width {self.width()}; they must be the two halves of one model"
            )
        self.manifest = dataclasses.replace(
            embedding_of(config, encoder, query_model),
            query_encoder=query_encoder,
            query_digest=encoder_digest(query_model) if query_encoder else "",
        )

    def __call__(self, passages: Sequence[Passage]) -> Float32[np.ndarray, "N D"]:
        return self.embed([passage_text(passage) if self._with_title else passage.text for passage in passages])

    def embed(self, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        """Vectors of texts, with the prefix of passages."""
        size = max(_SLICE, _SLICE_BATCHES * self._batch)
        parts = [self._embed(texts[start : start + size]) for start in range(0, len(texts), size)]
        self.embedded += len(texts)
        return np.concatenate(parts)

    def width(self) -> int:
        """Width of the vectors."""
        return _width(self._encoder)

    def _embed(self, texts: Sequence[str]) -> Float32[np.ndarray, "N D"]:
        encoder, prefix = self._encoder, self.manifest.passage_prefix
        if not isinstance(encoder, Embedder) or self._counter is None:
            vectors = encoder.embed(texts, prefix=prefix, batch_size=self._batch)
            if self.bar is not None:
                self.bar.update(len(texts))
            return vectors
        count, longest = self._counter
        ids = [encoder.encode(text, prefix) for text in texts]
        # only a text that fills the encoder may have been cut, so only such texts are counted exactly
        self.cut += sum(len(i) == longest and count(prefix + text) > longest for i, text in zip(ids, texts))
        return encoder.embed(
            ids, prefix=prefix, batch_size=self._batch, progress=False if self.bar is None else self.bar
        )


def encoder_again(embedding: Embedding, encoder: TextEncoder | None) -> TextEncoder:
    """The encoder that a built knowledge base's passages were embedded with, or the given one.

    Raises:
      ValueError: it has other weights or another tokenizer.
    """
    model = encoder or shared_encoder(embedding.encoder, instead="")
    if embedding.digest and (digest := encoder_digest(model)) and digest != embedding.digest:
        raise ValueError(f"the encoder {embedding.encoder!r} has other weights than the knowledge base was built with")
    return model


def _width(encoder: TextEncoder) -> int:
    return encoder.dim if isinstance(encoder, Embedder) else encoder.embed(["width"]).shape[1]


def read_source(
    config: BuildConfig,
    path: pathlib.Path,
    encoder: Callable[[], TextEncoder],
    left_out: dict[str, str] | None = None,
) -> Iterator[Passage]:
    """The passages that a build makes from a corpus (`read_corpus`) or from tables. `encoder` is only called if tokens must be
    counted."""
    if config.kind == "dense_text":
        yield from read_corpus(path, split=config.split, left_out=left_out)
        return
    counter = token_counter(encoder())
    count = counter[0] if counter else count_words
    for table in read_tables(path):
        yield from table_passages(
            table,
            rows_per_passage=config.rows_per_passage,
            budget=config.table_budget,
            count=count,
            table_format=config.table_format,
        )


def _fingerprint(config: BuildConfig, corpus: str, embedding: Embedding, faiss_vectors: FaissVectors | None) -> str:
    """Fingerprint of everything that passages and embeddings depend on. A build only continues a killed one with the same."""
    tables = [config.rows_per_passage, config.table_budget] if config.kind == "dense_table" else []
    tables += [config.table_format] if config.table_format != "compact" else []
    tables += [config.passage_words, config.least_words] if config.passage_words or config.least_words != 7 else []
    tables += [faiss_vectors.digest] if faiss_vectors is not None else []
    parts = [
        *VERSIONS,
        config.kind,
        corpus,
        embedding.encoder,
        embedding.digest,
        embedding.passage_prefix,
        config.shard_size,
        tables,
    ]
    return digest_of(parts)


BUILDER = Builder(BuildConfig, build_kb)
