"""Adds and deletes passages of a knowledge base on disk. An update takes effect as a whole or not at all.

Changes are written beside the main part, into DIR/delta-GENERATION: the added passages (with vectors, which are compared one by
one) and the deleted rows. Then kb.json is replaced atomically, so that opening the directory gives the state before or after
the update. When the changes exceed a share of the main part, a new main part is built from both.

An opened knowledge base keeps the state at which it was opened; open it again to see changes. After it was compacted, parts
that are not in memory are gone, and reading them is an error (`store.StoredArray`).
"""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Float32

from routerl_jax.core.files import sync, sync_tree
from routerl_jax.core.progress import Bar
from routerl_jax.core.types import Passage
from routerl_jax.knowledge.bm25 import Bm25Config, Words, index_words, passages_or_rows
from routerl_jax.knowledge.build import BuildConfig, Vectoriser, encoder_again, read_source
from routerl_jax.knowledge.builds import digest_of, write_index
from routerl_jax.knowledge.corpus import checked_passages, read_corpus
from routerl_jax.knowledge.encoders import TextEncoder, shared_encoder
from routerl_jax.knowledge.graph.build import rebuild_graph
from routerl_jax.knowledge.index import AUTO, FAISS_IVF, backend_of, opening_backend
from routerl_jax.knowledge.store import (
    DELETED,
    EMBEDDINGS,
    VECTORS,
    Delta,
    Manifest,
    Store,
    create_array,
    delta_directory,
    replaced_directory,
)
from routerl_jax.knowledge.writer import StoreWriter, explained, left_out, write_passages
from routerl_jax.services.base import ChatModel

KINDS = ("dense_text", "dense_table", "bm25", "graph")
COMPACT_ABOVE = 0.2  # share of the main part's passages
_SHARD = 8192  # vectors in a file
_NAMED = 3  # most ids in a message
_SPLIT = ("passage_words", "least_words")
_TABLES = ("rows_per_passage", "table_budget", "table_format")


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateReport:
    """The result of an update. `str(report)` is one line."""

    directory: str
    added: int
    deleted: int
    count: int  # passages after the update
    compacted: bool  # whether a new main part was built
    seconds: float

    def __str__(self) -> str:
        summary = f"{self.added:,} passages added, {self.deleted:,} deleted, {self.count:,} in {self.directory}"
        return f"{summary}{' (compacted)' if self.compacted else ''}, {self.seconds:.1f} s"


def add(
    directory: str | pathlib.Path,
    passages: Sequence[Passage],
    *,
    encoder: TextEncoder | None = None,
    progress: bool = False,
) -> UpdateReport:
    """Adds passages to a knowledge base; see `update`."""
    return update(directory, add=passages, encoder=encoder, progress=progress)


def delete(directory: str | pathlib.Path, ids: Iterable[str]) -> UpdateReport:
    """Deletes passages of a knowledge base by their ids; see `update`."""
    return update(directory, delete=ids)


def update(
    directory: str | pathlib.Path,
    *,
    add: Sequence[Passage] = (),
    delete: Iterable[str] = (),
    compact_above: float = COMPACT_ABOVE,
    encoder: TextEncoder | None = None,
    llm: ChatModel | None = None,
    progress: bool = False,
) -> UpdateReport:
    """Deletes, then adds, in one step. An id in both is replaced. Other processes that build or update wait.

    First all ids are searched, which takes about a minute for 20 million passages.

    Args:
      compact_above: build a new main part once added and deleted passages exceed this share of it; 0: always. BM25 and graphs
        always do this, because everything in them depends on all passages.
      encoder: embed with this object instead of loading the encoder of kb.json.
      llm: extract the triples of new passages with this model instead of that of kb.json.

    Raises:
      ValueError: an id to add exists already or occurs twice; an id to delete does not exist; a passage is empty; the kind
        can't be changed; nothing would be left; or the encoder differs from that of the build.
    """
    start = time.perf_counter()
    directory = pathlib.Path(directory).expanduser().resolve()
    add, delete = list(add), list(dict.fromkeys(delete))
    list(checked_passages(add)) if add else None
    _manifest(directory)  # raises before a lock is made beside a directory that is no knowledge base
    with StoreWriter(directory, lambda: _fingerprint(directory, add, delete), overwrite=True) as writer:
        store = Store(directory)
        _check_kind(directory, store.manifest)
        deleted_rows = _rows_to_delete(store, delete, add)
        if len(store) - len(deleted_rows) + len(add) == 0:
            raise ValueError(f"{directory}: nothing would be left. Delete the directory instead")

        def remaining() -> Iterator[Passage]:
            """The passages that stay, then the new ones."""
            yield from (passage for row, passage in _live(store, progress) if row not in deleted_rows)
            yield from add

        manifest = store.manifest
        if manifest.embedding is None:
            count = writer.passages(remaining(), left_out(store.directory))
            index_words(writer.scratch, Words.of(manifest.index), progress)
            writer.commit(dataclasses.replace(manifest, count=count, updates=manifest.updates + 1))
            compacted = True
        elif manifest.kind == "graph":
            rebuild_graph(writer, store, remaining, add, encoder=encoder, llm=llm, progress=progress)
            compacted = True
        else:
            if add or deleted_rows:
                with explained(directory / EMBEDDINGS, "All that was there is kept"):
                    _write_delta(store, deleted_rows, add, encoder, progress)
            compacted = _compact(writer, Store(directory), compact_above, progress)
    return UpdateReport(
        directory=str(directory),
        added=len(add),
        deleted=len(deleted_rows),
        count=len(Store(directory)),
        compacted=compacted,
        seconds=time.perf_counter() - start,
    )


def read_added(directory: str | pathlib.Path, path: str | pathlib.Path) -> list[Passage]:
    """Passages of a file or of a directory of files, made with the settings of this knowledge base's build (such as the
    number of words, or the format of tables).

    Raises:
      ValueError: an error of `corpus.read_corpus` or `tables.read_tables`; or there is no knowledge base that can be changed.
    """
    directory = pathlib.Path(directory).expanduser().resolve()
    manifest = _manifest(directory)
    _check_kind(directory, manifest)
    if manifest.kind == "graph":
        return list(read_corpus(path))
    if manifest.kind == "bm25" or manifest.embedding is None:
        splitting = Bm25Config(**{key: manifest.config[key] for key in _SPLIT if key in manifest.config})
        return list(passages_or_rows(splitting, pathlib.Path(path).expanduser()))
    keys = {key: manifest.config[key] for key in (*_SPLIT, *_TABLES) if key in manifest.config}
    config = BuildConfig(kind=manifest.kind, encoder=manifest.embedding.encoder, **keys)
    return list(read_source(config, pathlib.Path(path).expanduser(), lambda: shared_encoder(config.encoder)))


def _rows_to_delete(store: Store, delete: Sequence[str], add: Sequence[Passage]) -> set[int]:
    """Rows of the ids to delete. Checks that no id to add remains after that."""
    affected = {*delete, *(passage.id for passage in add)}
    rows = {passage.id: row for row, passage in store.live() if passage.id in affected}
    missing = [name for name in delete if name not in rows]
    if missing:
        raise ValueError(f"{store.directory} has no passage {_listed(missing)}, which should be deleted")
    deleted = set(delete)
    clashing = [passage.id for passage in add if passage.id in rows and passage.id not in deleted]
    if clashing:
        raise ValueError(
            f"{store.directory} has a passage {_listed(clashing)} already. Give the new one another id, or delete the old "
            f"one in the same call to replace it"
        )
    return {rows[name] for name in delete}


def _write_delta(
    store: Store, deleted_rows: set[int], new: Sequence[Passage], encoder: TextEncoder | None, progress: bool
) -> None:
    """Writes the next generation, with all changes since the main part was built, and makes it current."""
    manifest = store.manifest
    first, stop = manifest.count, len(store.passages)
    earlier = store.passages.read(first, stop) if stop > first else []
    kept_rows = np.array([row for row in range(first, stop) if row not in deleted_rows], np.int64)
    vectors = np.concatenate([_vectors(store, kept_rows), _embed(manifest, new, encoder, progress)])
    deleted = np.union1d(store.deleted, np.array([row for row in deleted_rows if row < manifest.count], np.int64))
    generation = manifest.updates + 1
    target = delta_directory(store.directory, generation)
    scratch = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)  # left by an update that was killed before it became current
    scratch.mkdir()
    passages = [*(earlier[row - first] for row in kept_rows), *new]
    if passages:
        write_passages(scratch, passages)
        array = create_array(scratch / EMBEDDINGS, vectors.shape, "float32", _SHARD, 16, compress=False)
        array.write(vectors).result()
    np.save(scratch / DELETED, deleted.astype(np.int64))
    sync_tree(scratch)
    scratch.rename(target)
    sync(store.directory)  # on disk before kb.json names it
    delta = Delta(generation=generation, added=len(passages), deleted=len(deleted))
    dataclasses.replace(manifest, delta=delta, updates=generation).write(store.directory)
    previous_generation = manifest.delta.generation if manifest.delta else generation
    for old_delta in store.directory.glob("delta-*"):  # the last one stays for those who have it open
        if old_delta.name not in {target.name, delta_directory(store.directory, previous_generation).name}:
            shutil.rmtree(old_delta, ignore_errors=True)


def _compact(writer: StoreWriter, store: Store, above: float, progress: bool) -> bool:
    """Builds a new main part from all present passages if there are many changes. Returns whether it did."""
    delta = store.manifest.delta
    if delta is None or delta.added + delta.deleted <= above * store.manifest.count:
        return False
    built = str(store.manifest.index["backend"])
    name = backend_of(AUTO) if built == FAISS_IVF else opening_backend(None, built)  # a file's lists go with the file
    settings = _chosen(store.manifest) if name == built else {}
    count = writer.passages((passage for _, passage in _live(store, progress)), left_out(store.directory))
    rows = np.setdiff1d(np.arange(len(store.passages)), store.deleted)
    shards = writer.embeddings(store.embeddings.shape[1], _SHARD)
    shards.write_rows(lambda start, stop: _vectors(store, rows[start:stop]))
    kept = "The change is kept, and so is the new main part without its index"
    index = write_index(writer, name, settings, kept=kept)
    kept_settings = {key: value for key, value in store.manifest.settings.items() if key != VECTORS}
    writer.commit(dataclasses.replace(store.manifest, count=count, delta=None, index=index, settings=kept_settings))
    return True


def _chosen(manifest: Manifest) -> dict[str, object]:
    """The settings of the index, without those that were tuned for the old vectors."""
    scann_settings = {
        key.removeprefix("scann."): value for key, value in manifest.config.items() if key.startswith("scann.")
    }
    if manifest.index["backend"] == "scann":
        return scann_settings
    return {key: value for key, value in manifest.index.items() if key != "backend"}


def _embed(
    manifest: Manifest, new: Sequence[Passage], encoder: TextEncoder | None, progress: bool
) -> Float32[np.ndarray, "N D"]:
    embedding = manifest.embedding
    assert embedding is not None
    if not new:
        return np.zeros((0, embedding.dim), np.float32)
    config = BuildConfig(kind=manifest.kind, encoder=embedding.encoder, passage_prefix=embedding.passage_prefix)
    vectoriser = Vectoriser(config, encoder_again(embedding, encoder))
    with Bar(total=len(new), desc="embedding", unit="passage", disable=not progress) as vectoriser.bar:
        vectors = vectoriser(new)
    if vectors.shape[1] != embedding.dim or not np.isfinite(vectors).all():
        raise ValueError(
            f"the encoder gave vectors of shape {vectors.shape}, some perhaps not finite; expected [N, {embedding.dim}]"
        )
    return np.asarray(vectors, np.float32)


def _live(store: Store, progress: bool) -> Iterator[tuple[int, Passage]]:
    yield from Bar(store.live(), total=len(store), desc="compacting", unit="passage", disable=not progress)


def _vectors(store: Store, rows: np.ndarray) -> Float32[np.ndarray, "N D"]:
    """Vectors of rows of either part; those of the main part come first."""
    main = rows[rows < store.manifest.count]
    added = rows[rows >= store.manifest.count] - store.manifest.count
    parts = [store.embeddings.take(main)] if len(main) else []
    if len(added) and store.added_embeddings is not None:
        parts.append(store.added_embeddings.take(added))
    return np.concatenate(parts) if parts else np.zeros((0, store.embeddings.shape[1]), np.float32)


def _check_kind(directory: pathlib.Path, manifest: Manifest) -> None:
    if manifest.kind not in KINDS:
        raise ValueError(
            f"{directory} is of kind {manifest.kind!r}, which can't be changed in place (only {', '.join(KINDS)} can): "
            f"build it anew"
        )


def _manifest(directory: pathlib.Path) -> Manifest:
    """The manifest. If `directory` is missing after a kill, that of the knowledge base which will be restored there."""
    aside = replaced_directory(directory)
    return Manifest.read(aside if not directory.exists() and aside.is_dir() else directory)


def _fingerprint(directory: pathlib.Path, add: Sequence[Passage], delete: Sequence[str]) -> str:
    """Fingerprint of a new main part's content. With a delta, it is that of the current state, so that any later call can
    continue the compaction. For kinds without deltas, it is that of the old state and the change."""
    manifest = Manifest.read(directory)
    parts: list[object] = [manifest.created, manifest.updates + bool(add or delete)]
    if manifest.embedding is None or manifest.kind == "graph":
        parts += [[[p.id, p.title, p.text] for p in add], list(delete)]
    return digest_of(parts)


def _listed(names: Sequence[str]) -> str:
    more = f" (and {len(names) - _NAMED} more)" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more
