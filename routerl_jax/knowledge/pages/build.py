"""Builds knowledge bases of page images (documents -> pages -> vectors -> pooled vectors -> index), and of their texts.

After a kill, every stage continues where it stopped: pages one by one, vectors and pooled vectors in shards.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from typing import Any

import numpy as np
from absl import logging
from jaxtyping import Float32

from routerl_jax.core.config import Count, PositiveFraction, Size, checked
from routerl_jax.core.rows import read_rows
from routerl_jax.knowledge.bm25 import Words
from routerl_jax.knowledge.builds import (
    KB_BUILDERS,
    Builder,
    BuildReport,
    BuildSettings,
    Clock,
    Source,
    batch_size,
    corpus_source,
    digest_of,
    is_built,
    report,
    stamp,
)
from routerl_jax.knowledge.corpus import string_field
from routerl_jax.knowledge.encoders import encoder_digest, own_prefix, resolved_encoder, shared_encoder
from routerl_jax.knowledge.index import INDEXES, backend_of
from routerl_jax.knowledge.pages.index import (
    FirstStage,
    PageIndex,
    Pooling,
    Precision,
    Ragged,
    RaggedWriter,
    page_recall,
    pool,
)
from routerl_jax.knowledge.pages.kb import POOLED, VECTORS, open_index
from routerl_jax.knowledge.pages.reading import PageConfig, PageWriter, corpus_digest, skipped_pages
from routerl_jax.knowledge.picture_files import PICTURES, PictureFiles
from routerl_jax.knowledge.store import EMBEDDINGS, FORMAT, INDEX, TEXTS, Embedding, Manifest, Store, StoredPassages
from routerl_jax.knowledge.writer import StoreWriter
from routerl_jax.models.families.colqwen import LateInteraction

_COMPARE_ALL = 1000  # pages up to which index="auto" compares all of them
_POOLED = ((100_000, 32), (1_000_000, 8))  # (up to this many pages, pooled vectors per page); beyond that, one
_CANDIDATES = (32, 64, 128, 256, 512, 1024)
_DEPTH = 256  # fewest pooled vectors that each vector of a query looks up
_PARTS = ("passages", PICTURES, VECTORS, POOLED, EMBEDDINGS, INDEX, TEXTS)  # parts whose size on disk is reported
_MEANS = 8192  # pages whose mean vectors are committed together
_SAMPLE = 16  # vectors of a page that serve as a query if no questions are given


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class PagesConfig(BuildSettings):
    """Configuration of `build_pages`."""

    corpus: str = ""  # a directory of PDFs and pictures, one of them, or a list of pages (pages.reading)
    kind: str = "pages"  # kind of the knowledge base
    encoder: str = "vidore/colqwen2-v1.0-hf"  # a late-interaction model: a Hugging Face directory or a hub id
    query_prefix: str | None = None  # put before every query; default: the prefix of the encoder's authors
    pages: PageConfig = dataclasses.field(default_factory=PageConfig)
    precision: Precision = "bfloat16"  # of the vectors on disk: float32, bfloat16 (as VRAG-RL has them) or int8
    # "maxsim" (all pages are compared), a first stage over pooled vectors ("scann", "exact"), or "auto": by size, the first
    # stage as in knowledge.build
    index: str = "auto"
    pooling: Pooling = "ward"  # how vectors are pooled: ward (clusters) or runs (neighbours)
    pooled: Count = 0  # pooled vectors of a page; 0: by the number of pages
    candidates: Count = 0  # pages that are compared in full; 0: as many as `recall_target` takes, measured by the build
    # of the 10 best pages by exact MaxSim, the share that is to be among the candidates
    recall_target: PositiveFraction = 0.95
    questions: str = ""  # rows with `question` to measure recall with (.jsonl, .json); default: vectors of the pages
    check_queries: Count = 64  # queries of that measurement; 0: none, and 256 candidates
    embed_batch: Count = 0  # pages that the encoder reads at a time; 0: 1 on a CPU, 4 per device elsewhere
    shard_size: Size = 64  # pages that are saved together; fewer if they take longer than a minute

    def __post_init__(self) -> None:
        if self.index not in ("auto", "maxsim"):
            INDEXES.get(self.index)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OcrConfig(BuildSettings):
    """Configuration of `build_ocr`: pages are found by their text, in a text knowledge base of any kind."""

    corpus: str = ""  # as in PagesConfig
    kind: str = "ocr"  # kind of the knowledge base
    pages: PageConfig = PageConfig(text="ocr")
    retriever: str = "dense_text"  # kind of the knowledge base of texts: dense_text, bm25, ..
    encoder: str = ""  # encoder of that knowledge base, if it has one; default: that of its kind
    index: str = ""  # index of that knowledge base; default: that of its kind
    words: Words = dataclasses.field(default_factory=Words)  # of bm25

    def __post_init__(self) -> None:
        if self.pages.text == "none":
            raise ValueError("pages.text='none' leaves nothing to search; set it to 'ocr', 'layer' or 'either'")
        self.inner("")

    def inner(self, corpus: str) -> Any:
        """Configuration of the knowledge base of texts."""
        kind = KB_BUILDERS.get(self.retriever).config
        chosen = {key: getattr(self, key) for key in ("encoder", "index") if getattr(self, key)}
        chosen |= {} if self.words == Words() else {"words": self.words}
        for key in {"corpus", *chosen} - {field.name for field in dataclasses.fields(kind)}:
            raise ValueError(f"retriever={self.retriever!r} has no {key}")
        return kind(kind=self.retriever, corpus=corpus, **chosen)


def build_pages(
    config: PagesConfig, directory: str | pathlib.Path, *, progress: bool = True, encoder: LateInteraction | None = None
) -> BuildReport:
    """Builds a knowledge base of page images. After a kill, another call continues where it stopped.

    Args:
      directory: directory of the knowledge base; it appears only when it is complete.
      progress: show progress bars.
      encoder: embed with this model; `config.encoder` is only its name then.

    Raises:
      ValueError: a file, a page or a setting is wrong; names it.
    """
    config = dataclasses.replace(config, encoder=resolved_encoder(config.encoder))
    clock, source = Clock(), _source(config)
    model = encoder or shared_encoder(
        config.encoder, instead="find pages by their text: a knowledge base of kind 'ocr'"
    )
    if not isinstance(model, LateInteraction):
        raise ValueError(
            f"encoder={config.encoder!r} is not a late-interaction model; pages need one, such as ColQwen2"
        )
    embedding = Embedding(
        encoder=config.encoder,
        digest=encoder_digest(model),
        dim=model.dim,
        dtype=config.precision,
        query_prefix=own_prefix(model, "query") if config.query_prefix is None else config.query_prefix,
    )
    parts = [FORMAT, config.kind, source.digest, embedding.encoder, embedding.digest, dataclasses.asdict(config.pages)]
    parts += [config.precision, config.shard_size, config.pooling, config.pooled]
    with StoreWriter(directory, digest_of(parts), overwrite=config.overwrite) as writer:
        build = _PagesBuild(config, writer, model, clock, progress)
        if not is_built(writer, config, source, embedding):
            build.run(source, embedding)
    store = Store(writer.directory)
    recall = store.manifest.settings["recall"]
    if recall is not None and recall < config.recall_target:
        logging.warning("only %.3f of the best pages are among the candidates; consider index='maxsim'", recall)
    numbers = {"embedded": build.embedded, "vectors": int(open_index(store).vectors.offsets[-1])}
    details = {"encoder": config.encoder, "dim": embedding.dim, "index": _search_description(store), "recall": recall}
    return report(store, clock, _PARTS, numbers=numbers | _left_out(store), **details)


def build_ocr(config: OcrConfig, directory: str | pathlib.Path, *, progress: bool = True) -> BuildReport:
    """Builds a knowledge base of pages that are found by their text. The results of OCR are cached page by page, for later
    builds too.

    Raises:
      ValueError: a file, a page or a setting is wrong; names it.
    """
    clock, source = Clock(), _source(config)
    parts = [FORMAT, config.kind, source.digest, dataclasses.asdict(config.pages)]
    fingerprint = digest_of([*parts, config.retriever, config.encoder, config.index, dataclasses.asdict(config.words)])
    with StoreWriter(directory, fingerprint, overwrite=config.overwrite) as writer:
        if not is_built(writer, config, source):
            pages = PageWriter(config.corpus, config.pages, writer, keep_blank=False, progress=progress)
            count = writer.passages(pages.passages())
            clock.lap("pages")
            _build_texts(config, writer, progress)
            clock.lap("texts")
            writer.commit(_manifest(config, writer, count, source))
    store = Store(writer.directory)
    return report(store, clock, _PARTS, numbers=_left_out(store), notes={"index": f"texts in {config.retriever}"})


class _PagesBuild:
    """The stages of `build_pages`."""

    def __init__(
        self, config: PagesConfig, writer: StoreWriter, encoder: LateInteraction, clock: Clock, progress: bool
    ) -> None:
        self.embedded = 0  # pages embedded by this run
        self._config, self._writer, self._encoder = config, writer, encoder
        self._clock, self._progress = clock, progress

    def run(self, source: Source, embedding: Embedding) -> None:
        """Runs all stages. The parts that an earlier run has finished are skipped."""
        config, writer = self._config, self._writer
        if config.index not in ("auto", "maxsim"):
            INDEXES.get(config.index).require()
        pages = PageWriter(config.corpus, config.pages, writer, progress=self._progress)
        count = writer.passages(pages.passages())
        self._clock.lap("pages")
        vectors = self._embed(count)
        self._clock.lap("embed")
        name, pooled = self._chosen(count)
        index: dict[str, Any] = {"backend": name}
        settings: dict[str, Any] = {"precision": config.precision, "picture_format": config.pages.picture_format}
        settings["recall"] = None
        if pooled:
            rows = self._pool(vectors, pooled)
            self._clock.lap("pool")
            shutil.rmtree(writer.index_directory, ignore_errors=True)
            stage = INDEXES.get(name).build(rows.values, {})
            index |= stage.save(writer.index_directory)
            self._clock.lap("index")
            first = FirstStage(stage, rows.owner(), 0, 0)
            settings |= self._measured(PageIndex(vectors, first)) | {"pooled": pooled}
            self._clock.lap("check")
        manifest = _manifest(config, writer, count, source)
        settings = {**manifest.settings, **settings}
        writer.commit(dataclasses.replace(manifest, embedding=embedding, index=index, settings=settings))

    def _embed(self, count: int) -> Ragged:
        config, writer = self._config, self._writer
        files = PictureFiles(writer.scratch, config.pages.picture_format)
        batch = batch_size(config.embed_batch, self._encoder, on_cpu=1, per_device=4)
        ragged = RaggedWriter(
            writer.scratch,
            writer.progress,
            VECTORS,
            width=self._encoder.dim,
            precision=config.precision,
            count=count,
            step=config.shard_size,
            batch=batch,
        )
        bar = ragged.bar("embedding", self._progress)

        def embed(start: int, stop: int) -> list[Float32[np.ndarray, "n D"]]:
            vectors = self._encoder.embed([files.path(row) for row in range(start, stop)], batch_size=batch)
            bar.update(stop - start)
            self.embedded += stop - start
            return vectors

        with bar:
            ragged.write(embed)
        vectors = Ragged(writer.scratch / VECTORS, config.precision)

        def means(start: int, stop: int) -> Float32[np.ndarray, "N D"]:
            return np.stack([page.astype(np.float32).mean(0) for page in vectors.read(start, stop)])

        # one mean vector per page, because every store with an encoder has one vector per passage
        writer.embeddings(vectors.width, _MEANS).write_rows(means)
        return vectors

    def _chosen(self, count: int) -> tuple[str, int]:
        """Backend of the first stage, and pooled vectors of a page (0: no first stage)."""
        config = self._config
        if config.index == "maxsim" or (config.index == "auto" and count <= _COMPARE_ALL):
            return "maxsim", 0
        pooled = config.pooled or next((number for most, number in _POOLED if count <= most), 1)
        return backend_of(config.index), pooled

    def _pool(self, vectors: Ragged, pooled: int) -> Ragged:
        config, writer = self._config, self._writer
        ragged = RaggedWriter(
            writer.scratch,
            writer.progress,
            POOLED,
            width=vectors.width,
            precision="float32",
            count=len(vectors),
            step=1024,
        )
        bar = ragged.bar("pooling", self._progress)

        def make(start: int, stop: int) -> list[Float32[np.ndarray, "n D"]]:
            pooled_pages = [pool(page, pooled, config.pooling) for page in vectors.read(start, stop)]
            bar.update(stop - start)
            return pooled_pages

        with bar:
            ragged.write(make)
        return Ragged(writer.scratch / POOLED, "float32")

    def _measured(self, index: PageIndex) -> dict[str, Any]:
        """Candidates and depth, with the measured recall."""
        assert index.first is not None
        config, count = self._config, len(index.vectors)
        counts = [config.candidates] if config.candidates else [n for n in _CANDIDATES if n < count] or [count]
        first = index.first._replace(depth=max(_DEPTH, max(counts)))
        if not config.check_queries:
            return {"candidates": min(config.candidates or 256, count), "depth": _DEPTH, "recall": None}
        queries = self._queries(index.vectors)
        recalls = page_recall(PageIndex(index.vectors, first), queries, counts)
        candidates = next((n for n in counts if recalls[n] >= config.recall_target), counts[-1])
        depth = max(_DEPTH, candidates)
        if depth < first.depth:
            remeasured = page_recall(PageIndex(index.vectors, first._replace(depth=depth)), queries, [candidates])
            if remeasured[candidates] < config.recall_target:
                depth = first.depth
            else:
                recalls = remeasured
        return {"candidates": candidates, "depth": depth, "recall": recalls[candidates]}

    def _queries(self, vectors: Ragged) -> list[np.ndarray]:
        config = self._config
        if config.questions:
            rows = [string_field(row, "question", location) for location, row in read_rows(config.questions)]
            if not rows:
                raise ValueError(f"questions={config.questions!r} holds no rows with a 'question'")
            prefix = own_prefix(self._encoder, "query") if config.query_prefix is None else config.query_prefix
            return self._encoder.embed(rows[: config.check_queries], prefix=prefix)
        rng = np.random.default_rng(0)
        indices = np.unique(np.linspace(0, len(vectors) - 1, min(config.check_queries, len(vectors))).astype(np.int64))
        pages = vectors.take(indices)
        return [page[rng.permutation(len(page))[:_SAMPLE]].astype(np.float32) for page in pages]


def _build_texts(config: OcrConfig, writer: StoreWriter, progress: bool) -> None:
    """Builds the knowledge base of texts inside that of pages."""
    builder = KB_BUILDERS.get(config.retriever)
    corpus = writer.scratch / "texts.jsonl"
    with corpus.open("w", encoding="utf-8") as file:
        for passage in StoredPassages(writer.scratch):
            row = {"id": passage.id, "title": passage.title, "text": passage.text}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    builder.build(config.inner(str(corpus)), writer.scratch / TEXTS, progress=progress)
    manifest = Manifest.read(writer.scratch / TEXTS)
    dataclasses.replace(manifest, corpus=str(writer.directory / corpus.name)).write(writer.scratch / TEXTS)
    (writer.scratch / f".{TEXTS}.lock").unlink(missing_ok=True)


def _source(config: PagesConfig | OcrConfig) -> Source:
    expected = "the directory of PDFs and pictures"
    return corpus_source(config.corpus, expected, lambda *_, **__: (), digest=corpus_digest)  # a PageWriter reads them


def _manifest(config: PagesConfig | OcrConfig, writer: StoreWriter, count: int, source: Source) -> Manifest:
    settings = {"picture_format": config.pages.picture_format}
    return stamp(config, writer.directory, source, count=count, settings=settings)


def _search_description(store: Store) -> str:
    """How pages are found: the first stage, pooled vectors of a page, candidates."""
    settings = store.manifest.settings
    if "pooled" not in settings:
        return "all pages in full"
    stage, pooled = store.manifest.index["backend"], settings["pooled"]
    return f"{stage} over {pooled} pooled vectors of a page, then {settings['candidates']} pages in full"


def _left_out(store: Store) -> dict[str, int]:
    """Numbers of documents or pages that can't be read, and of pages without text if texts are searched."""
    return {why: len(pages) for why, pages in skipped_pages(store.directory).items()}


BUILDER = Builder(PagesConfig, build_pages, corpus_digest)
OCR_BUILDER = Builder(OcrConfig, build_ocr, corpus_digest)
