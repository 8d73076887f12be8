"""A knowledge base on disk: its manifest, and its passages and embeddings as sharded zarr arrays, which are read lazily.

    DIR/kb.json           the manifest
    DIR/passages/bytes    uint8 [bytes]: id, title and text of all passages, one after the other, UTF-8
    DIR/passages/offsets  int64 [3 N + 1]: the start of each of those strings
    DIR/embeddings        float32 [N, D], one file per build shard (absent for kinds without vectors, and where kb.json names
                          a FAISS file that has them)
    DIR/index             files of the search index (in the backend's format)
    DIR/sizes.json        bytes of these files
    DIR/delta-3           passages and embeddings added since, and the rows that were deleted (deleted.npy)

A file has many small chunks, so that one passage or vector is read without its neighbours.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts
from jaxtyping import Int

from routerl_jax.core.buckets import fetched, in_bucket, listing
from routerl_jax.core.config import from_config_dict
from routerl_jax.core.files import read_json, write_atomic
from routerl_jax.core.types import Passage
from routerl_jax.knowledge.faiss import FaissVectors
from routerl_jax.knowledge.index import VectorSource

FORMAT = 1
DELETED = "deleted.npy"
MANIFEST, EMBEDDINGS, INDEX = "kb.json", "embeddings", "index"
VECTORS = "vectors"  # in a manifest's settings: a FAISS file with the vectors of the main part
TEXTS = "texts"  # in a knowledge base of kind ocr: the one of its pages' texts
SIZES = "sizes.json"  # bytes of the files that were built; knowledge bases of earlier versions have none
PASSAGES, BYTES, OFFSETS = "passages", "passages/bytes", "passages/offsets"
BLOCK = 8192  # passages read at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embedding:
    """How passages became vectors. Queries must be embedded in the same manner."""

    encoder: str  # name or absolute directory, for `models.load_pretrained`
    digest: str = ""  # digest of the encoder's weights and tokenizer (encoders.encoder_digest); empty: unknown
    query_encoder: str = ""  # embeds queries instead of `encoder`; empty: `encoder` does
    query_digest: str = ""  # digest of `query_encoder`
    dim: int
    dtype: str = "float32"
    query_prefix: str = ""  # put before every query
    passage_prefix: str = ""  # was put before every passage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
    """Changes since the main part was built. The files are in DIR/delta-GENERATION."""

    generation: int
    added: int  # number of added passages
    deleted: int  # number of deleted passages of the main part


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """kb.json: the description of the knowledge base, with all that is needed to build it again."""

    format: int = FORMAT
    kind: str
    name: str
    count: int  # passages of the main part: without those added since, with those deleted since
    corpus: str  # the file it was built from; empty: from passages in memory
    corpus_sha256: str
    reading: int = 1  # `knowledge.corpus.READING` when the corpus was read
    # dotted keys of the build that were not defaults
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    created: str  # UTC, ISO 8601
    embedding: Embedding | None = None
    # its `backend`, and the settings to load it with
    index: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    updates: int = 0  # number of updates since it was built from the corpus
    delta: Delta | None = None
    stored: bool = True  # whether passages are stored here; False: a kind that gets them from elsewhere
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # further settings for opening it

    @classmethod
    def read(cls, directory: pathlib.Path) -> Manifest:
        """Reads DIR/kb.json. Raises ValueError with path and rebuild command if it is missing, damaged or has another
        format."""
        path = directory / MANIFEST
        if not path.is_file():
            raise ValueError(f"{path} is missing: {directory} is not a knowledge base. {_manifest_hint(directory)}")
        fields = read_json(path, rebuild_hint(directory))
        version = fields.get("format") if isinstance(fields, dict) else None
        if version != FORMAT:
            raise ValueError(f"{path} has format {version!r}, this version reads {FORMAT}. {rebuild_hint(directory)}")
        try:
            return from_config_dict(cls, fields, path=str(path))
        except ValueError as error:
            raise ValueError(f"{error}. {rebuild_hint(directory)}") from error

    def write(self, directory: pathlib.Path) -> None:
        """Replaces DIR/kb.json atomically: a reader sees the old one or the new one."""
        text = json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"
        write_atomic(directory / MANIFEST, text, sync=True)


def built_at(source: str) -> pathlib.Path | None:
    """The local directory of the knowledge base at a path or URL (for a bucket, a copy in the cache); None if there is none
    yet. Raises ValueError if a bucket can't be read."""
    if in_bucket(source) and MANIFEST not in listing(source):
        return None
    directory = fetched(source)
    return directory if (directory / MANIFEST).is_file() else None


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turns settings with dotted keys into nested sections."""
    result: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, last = key.split(".")
        section_fields = result
        for section in sections:
            section_fields = section_fields.setdefault(section, {})
        section_fields[last] = value
    return result


def rebuild_hint(directory: pathlib.Path, manifest: Manifest | None = None) -> str:
    """How to build the knowledge base again, with the command if there is one."""
    if manifest is not None and not manifest.corpus:
        return f"It was built from passages in memory: delete {directory} and let the program that made it do so again"
    values = {"corpus": manifest.corpus, **manifest.config} if manifest else {"corpus": "FILE"}
    kind = values.pop("kind", "")
    config = f"--config=configs/build_kb.py:{kind}" if kind else "--config=configs/build_kb.py"
    flags = " ".join(shlex.quote(f"--config.{key}={value}") for key, value in values.items())
    workdir = shlex.quote(f"--workdir={directory}")
    return f"Rebuild it: python -m launch.build_kb {config} {workdir} {flags} --config.overwrite"


def _manifest_hint(directory: pathlib.Path) -> str:
    """Advice about a directory without a manifest. Its other content is never touched, so nothing can be built there."""
    entries = sorted(directory.iterdir()) if directory.is_dir() else []
    inside = [path for path in entries if (path / MANIFEST).is_file()]
    if inside:
        return f"Give one of those in it: {', '.join(map(str, inside[:8]))}{', ..' if len(inside) > 8 else ''}"
    workdir = "DIR" if entries else shlex.quote(str(directory))
    command = f"python -m launch.build_kb --config=configs/build_kb.py --workdir={workdir} --config.corpus=FILE"
    return f"Give the directory of one{', or build one elsewhere' if entries else ', or build it here'}: {command}"


class StoredArray:
    """A zarr array that is read lazily, or held in memory after its first use if it is small enough.

    Reading raises ValueError if a file is damaged, and RuntimeError once `path` has another array. Otherwise a knowledge
    base that was opened before it was compacted or rebuilt would read old rows from new files.
    """

    def __init__(self, path: pathlib.Path, memory_limit: int = 0, hint: str = "") -> None:
        try:
            self._array = ts.open(_location(path), open=True, read=True).result()
        except ValueError as error:
            raise ValueError(f"{path} is missing or damaged ({_first_sentence(error)}). {hint}") from error
        self.path, self._hint = path, hint
        self._opened = _identity(path)
        self._small = self._array.size * self._array.dtype.numpy_dtype.itemsize <= memory_limit
        columns = ["0"] * (len(self.shape) - 1)
        rows_per_file = self._array.spec().to_json()["metadata"]["chunk_grid"]["configuration"]["chunk_shape"][0]
        for shard in range(-(-len(self) // rows_per_file)):  # zarr would read a missing file as zeros
            file = path.joinpath("c", str(shard), *columns)
            if not file.is_file():
                raise ValueError(f"{file} is missing. {hint}")

    def __len__(self) -> int:
        return self._array.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        return self._array.shape

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the rows."""
        return self._array.dtype.numpy_dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows start..stop."""
        return self._memory[start:stop] if self._small else self._results([self._array[start:stop].read()])[0]

    def take(self, rows: np.ndarray) -> np.ndarray:
        """The rows with the given numbers, in their order."""
        return self._memory[rows] if self._small else self._results([self._array[rows].read()])[0]

    def ranges(self, starts: Sequence[int], stops: Sequence[int]) -> list[np.ndarray]:
        """Several ranges of rows, read at once."""
        if self._small:
            return [self._memory[start:stop] for start, stop in zip(starts, stops)]
        with ts.Batch() as batch:
            pending = [self._array[int(a) : int(b)].read(batch=batch) for a, b in zip(starts, stops)]
        return self._results(pending)

    @functools.cached_property
    def _memory(self) -> np.ndarray:
        return self._results([self._array.read()])[0]

    def _results(self, pending: Sequence[Any]) -> list[np.ndarray]:
        damage: ValueError | None = None
        arrays = []
        try:
            arrays = [future.result() for future in pending]
        except ValueError as error:
            damage = error
        # This is checked after the read: an array that is the same at the end was there during the read.
        if _identity(self.path) != self._opened:
            raise RuntimeError(
                f"{self.path} was replaced since the knowledge base was opened (it was compacted, or built anew): open it again"
            ) from damage
        if damage is not None:
            raise ValueError(f"{self.path} is damaged ({_first_sentence(damage)}). {self._hint}") from damage
        return arrays


class StoredPassages:
    """The passages of a store, by row number. Iteration reads them block by block."""

    def __init__(self, directory: pathlib.Path, memory_limit: int = 0, hint: str = "") -> None:
        self._bytes = StoredArray(directory / BYTES, memory_limit, hint)
        self._offsets = StoredArray(directory / OFFSETS, memory_limit, hint)

    def __len__(self) -> int:
        return (len(self._offsets) - 1) // 3

    def __iter__(self) -> Iterator[Passage]:
        for start in range(0, len(self), BLOCK):
            yield from self.read(start, min(start + BLOCK, len(self)))

    def take(self, rows: Sequence[int] | Int[np.ndarray, " R"]) -> list[Passage]:
        """The passages of the given rows, with score 0. Only their bytes are read."""
        starts = 3 * np.asarray(rows, np.int64).reshape(-1)
        edges = self._offsets.take(starts[:, None] + np.arange(4))
        texts = self._bytes.ranges(edges[:, 0].tolist(), edges[:, 3].tolist())
        return [_passage(raw.tobytes(), row - row[0]) for raw, row in zip(texts, edges)]

    def read(self, start: int, stop: int) -> list[Passage]:
        """The passages of rows start..stop, read in one piece."""
        edges = self._offsets.read(3 * start, 3 * stop + 1)
        raw = self._bytes.read(int(edges[0]), int(edges[-1])).tobytes()
        return [_passage(raw, edges[i : i + 4] - edges[0]) for i in range(0, len(edges) - 1, 3)]


class JoinedPassages:
    """The passages of the main part, then the added ones. Deleted passages keep their row numbers."""

    def __init__(self, main: StoredPassages, added: StoredPassages) -> None:
        self._main, self._added = main, added

    def __len__(self) -> int:
        return len(self._main) + len(self._added)

    def __iter__(self) -> Iterator[Passage]:
        yield from self._main
        yield from self._added

    def take(self, rows: Sequence[int] | Int[np.ndarray, " R"]) -> list[Passage]:
        """The passages of the given rows, with score 0."""
        rows = np.asarray(rows, np.int64).reshape(-1)
        main = rows < len(self._main)
        parts = iter(self._main.take(rows[main])), iter(self._added.take(rows[~main] - len(self._main)))
        return [next(parts[0 if in_main else 1]) for in_main in main]

    def read(self, start: int, stop: int) -> list[Passage]:
        """The passages of rows start..stop."""
        edge = len(self._main)
        passages = self._main.read(start, min(stop, edge)) if start < edge else []
        return passages + (self._added.read(max(start, edge) - edge, stop - edge) if stop > edge else [])


class Store:
    """A knowledge base on disk, opened for reading. Safe to use from several threads.

    Arrays of at most `memory_limit` bytes are held in memory after their first use; larger ones stay on disk.

    Raises:
      ValueError: there is no knowledge base, its format is another, files are missing or damaged, or the lengths of arrays do
        not fit the manifest; names the path and the command that rebuilds it.
    """

    def __init__(self, directory: str | pathlib.Path, *, memory_limit: int = 2**30) -> None:
        self.directory = pathlib.Path(directory).expanduser()
        if not self.directory.is_dir():
            replaced = replaced_directory(self.directory)
            if (replaced / MANIFEST).is_file():
                raise ValueError(
                    f"{self.directory}: no such directory, but {replaced} is what was there when a build or an update "
                    f"was killed at its last step: run that again, or rename it"
                )
            raise ValueError(f"{self.directory}: no such directory. {_manifest_hint(self.directory)}")
        self.manifest = Manifest.read(self.directory)
        self.hint = rebuild_hint(self.directory, self.manifest)
        self._embeddings: VectorSource | None = None
        self.added_embeddings: StoredArray | None = None
        self.deleted = np.zeros(0, np.int64)  # rows of the main part
        if not self.manifest.stored:
            return
        self.passages: StoredPassages | JoinedPassages = StoredPassages(self.directory, memory_limit, self.hint)
        self._check(OFFSETS, (len(self.passages),), (self.manifest.count,))
        if self.manifest.embedding is not None:
            self._embeddings = self._open_vectors(memory_limit)
            self._check(EMBEDDINGS, self._embeddings.shape, (self.manifest.count, self.manifest.embedding.dim))
        if self.manifest.delta is not None:
            self._open_delta(self.manifest.delta, self.passages, memory_limit)
        sizes = read_json(path, self.hint) if (path := self.directory / SIZES).is_file() else {}
        for name, size in sizes.items():
            file = self.directory / name
            if name.startswith(f"{INDEX}/") and not self.index_directory.is_dir():
                continue  # one may do without: load_kb(.., index="exact")
            if (now := file.stat().st_size if file.is_file() else None) != size:
                damage = "is missing" if now is None else f"has {now:,} bytes of {size:,}"
                raise ValueError(f"{file} {damage}. {self.hint}")

    def __len__(self) -> int:
        """Number of passages, without deleted ones."""
        return self.manifest.count + (self.manifest.delta.added if self.manifest.delta else 0) - len(self.deleted)

    @property
    def index_directory(self) -> pathlib.Path:
        """Directory of the index's files."""
        return self.directory / INDEX

    @property
    def embeddings(self) -> VectorSource:
        """The vectors, [N, D] float32. Raises ValueError for a kind without vectors."""
        if self._embeddings is None:
            raise ValueError(f"{self.directory} ({self.manifest.kind}) has no embeddings")
        return self._embeddings

    def scored(self, rows: Sequence[np.ndarray], scores: Sequence[np.ndarray]) -> list[list[Passage]]:
        """The passages of each query's rows with their scores. Rows below 0 are none."""
        distinct = np.unique(np.concatenate([ids[ids >= 0] for ids in rows]))
        passages = dict(zip(distinct.tolist(), self.passages.take(distinct)))
        return [
            [
                dataclasses.replace(passages[row], score=score)
                for row, score in zip(ids.tolist(), best.tolist())
                if row >= 0
            ]
            for ids, best in zip(rows, scores)
        ]

    def live(self) -> Iterator[tuple[int, Passage]]:
        """The passages that were not deleted, with their row numbers, which count from 0 to len(passages)."""
        stays = np.ones(len(self.passages), bool)
        stays[self.deleted] = False
        return ((row, passage) for row, passage in enumerate(self.passages) if stays[row])

    def _open_vectors(self, memory_limit: int) -> VectorSource:
        """The vectors of the main part: its own, or those of the FAISS file that it was built over."""
        recorded = self.manifest.settings.get(VECTORS)
        if recorded is None:
            return StoredArray(self.directory / EMBEDDINGS, memory_limit, self.hint)
        vectors = FaissVectors(recorded["file"])
        if vectors.digest != recorded["digest"]:
            raise ValueError(f"{vectors.path} is not the file that {self.directory} was built with. {self.hint}")
        return vectors

    def _open_delta(self, delta: Delta, main: StoredPassages, memory_limit: int) -> None:
        directory = delta_directory(self.directory, delta.generation)
        try:
            self.deleted = np.load(directory / DELETED)
        except (OSError, ValueError) as error:
            raise ValueError(f"{directory / DELETED} is missing or damaged ({error}). {self.hint}") from error
        self._check(f"{directory.name}/{DELETED}", (len(self.deleted),), (delta.deleted,))
        if not delta.added:
            return
        added = StoredPassages(directory, memory_limit, self.hint)
        self._check(f"{directory.name}/{OFFSETS}", (len(added),), (delta.added,))
        self.passages = JoinedPassages(main, added)
        if self.manifest.embedding is not None:
            self.added_embeddings = StoredArray(directory / EMBEDDINGS, memory_limit, self.hint)
            expected = (delta.added, self.manifest.embedding.dim)
            self._check(f"{directory.name}/{EMBEDDINGS}", self.added_embeddings.shape, expected)

    def _check(self, part: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if shape != expected:
            found, wanted = (" x ".join(map(str, sizes)) for sizes in (shape, expected))
            raise ValueError(
                f"{self.directory / part} holds {found}, but {self.directory / MANIFEST} calls for {wanted}: they are of "
                f"different builds. {self.hint}"
            )


def delta_directory(directory: pathlib.Path, generation: int) -> pathlib.Path:
    """Directory of a generation of changes."""
    return directory / f"delta-{generation}"


def replaced_directory(directory: pathlib.Path) -> pathlib.Path:
    """Temporary directory of a knowledge base while another one replaces it."""
    return directory.with_name(f".{directory.name}.replaced")


def create_array(path: pathlib.Path, shape: tuple[int, ...], dtype: str, shard: int, chunk: int, compress: bool) -> Any:
    """A new zarr array: files of `shard` rows, with chunks of `chunk` rows that are read separately."""
    codecs: list[dict[str, Any]] = [{"name": "bytes"}]
    if np.dtype(dtype).itemsize > 1:
        codecs[0]["configuration"] = {"endian": "little"}
    if compress:
        codecs.append({"name": "zstd", "configuration": {"level": 3}})
    grid = {"chunk_shape": [shard, *shape[1:]]}
    sharding = {"chunk_shape": [chunk, *shape[1:]], "codecs": codecs}
    metadata = {
        "shape": list(shape),
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": grid},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    return ts.open({**_location(path), "metadata": metadata}, create=True, delete_existing=True).result()


def open_array(path: pathlib.Path) -> Any:
    """An existing zarr array, opened for writing."""
    return ts.open(_location(path), open=True, read=True, write=True).result()


def _location(path: pathlib.Path) -> dict[str, Any]:
    return {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path.resolve()}/"}}


def _identity(path: pathlib.Path) -> tuple[int, int, int] | None:
    """An identity that distinguishes an array from one that replaces it; None if there is no array."""
    try:
        status = os.stat(path / "zarr.json")
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _first_sentence(error: Exception) -> str:
    return str(error).partition(" [")[0]


def _passage(raw: bytes, edges: np.ndarray) -> Passage:
    title, text, end = (int(edge) for edge in edges[1:])
    return Passage(id=raw[int(edges[0]) : title].decode(), title=raw[title:text].decode(), text=raw[text:end].decode())
