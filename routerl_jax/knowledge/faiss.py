"""The vectors of a FAISS index file (`faiss.write_index`), read where they lie and searched as FAISS does, without FAISS.

The layout is that of faiss/impl/index_write.cpp (versions 1.6 to 1.15), little-endian. A file begins with four letters that
say what it is, and a head:

    int32 d, int64 ntotal, int64 and int64 of no meaning, bool is_trained, int32 metric (0: inner product, 1: L2),
    float metric_arg if metric > 1

    IxFI, IxF2, IxFl    IndexFlat: uint64 number of floats, then the floats, row by row
    IwFl                IndexIVFFlat: uint64 nlist, uint64 nprobe, the quantizer (an index), its direct map (a char, a vector of
                        int64; if the char is 2, a vector of pairs), then "ilar", uint64 nlist, uint64 bytes of a vector,
                        "full" and a vector of sizes (or "sprs" and a vector of pairs list, size), and for each list that is
                        not empty its vectors, then their ids as int64
    IHNf                IndexHNSWFlat: five vectors (double, int32, int32, uint64, int32), five int32, then an IndexFlat

A vector is a uint64 count and its items.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import os
import pathlib
from collections.abc import Mapping
from typing import Any, BinaryIO, Self

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32, Int

from routerl_jax.knowledge.index import FAISS_IVF, VectorIndex, VectorSource

_INNER_PRODUCT = 0
_FLAT = ("IxFI", "IxF2", "IxFl")
_EDGE = 2**20  # bytes at the beginning and at the end of a file, by which it is known again
_READABLE = "Flat, IVF..,Flat and HNSW..,Flat can be read"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lists:
    """How an IndexIVFFlat partitions its vectors.

    Attributes:
      centroids: centroids of the lists, [L, D].
      ids: ids of the vectors of each list, in the order of the file.
      offsets: position of each list's first vector, in bytes from the beginning of the file.
      probes: lists that a search looks into (`nprobe`).
    """

    centroids: Float32[np.ndarray, "L D"]
    ids: tuple[Int[np.ndarray, " S"], ...]
    offsets: tuple[int, ...]
    probes: int


class FaissVectors:
    """The vectors of a FAISS index file by their ids, from 0 on; a `vector_index.VectorSource`. The file is mapped, not copied.

    Attributes:
      lists: the lists of an IndexIVFFlat; None for other indexes.

    Raises:
      ValueError: the file is missing, cut short, or no index that can be read here; names it, and what can be.
    """

    def __init__(self, path: str | pathlib.Path) -> None:
        self.path = pathlib.Path(path).expanduser().resolve()
        try:
            with self.path.open("rb") as file:
                self._file = _Reader(file, self.path)
                self._read()
        except OSError as error:
            raise ValueError(f"{self.path}: can't be read ({error.strerror})") from error

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, D)."""
        return self._shape

    def __len__(self) -> int:
        return self._shape[0]

    def read(self, start: int, stop: int) -> Float32[np.ndarray, "R D"]:
        """Vectors start..stop."""
        if self.lists is None:
            return np.array(self._matrix(self._start, len(self))[start:stop], np.float32)
        return self.take(np.arange(start, min(stop, len(self))))

    def take(self, rows: Int[np.ndarray, "..."]) -> Float32[np.ndarray, "... D"]:
        """Vectors of the given ids."""
        rows = np.asarray(rows)
        if self.lists is None:
            return np.array(self._matrix(self._start, len(self))[rows], np.float32)
        offsets = self._offsets[rows.reshape(-1)].tolist()
        vectors = [np.frombuffer(self._bytes, "<f4", self._shape[1], offset) for offset in offsets]
        return np.array(vectors, np.float32).reshape(*rows.shape, self._shape[1])

    def of_list(self, number: int) -> Float32[np.ndarray, "S D"]:
        """The vectors of a list, in the order of its ids."""
        assert self.lists is not None, "only an IndexIVFFlat has lists"
        return self._matrix(self.lists.offsets[number], len(self.lists.ids[number]))

    @functools.cached_property
    def digest(self) -> str:
        """Identifies the file's content: its size, and the SHA-256 of its first and last MiB."""
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            first = file.read(_EDGE)
            file.seek(max(size - _EDGE, 0))
            return f"{size}:{hashlib.sha256(first + file.read(_EDGE)).hexdigest()}"

    # --- reading ---

    @functools.cached_property
    def _bytes(self) -> Any:
        return np.memmap(self.path, np.uint8, "r")

    def _matrix(self, offset: int, rows: int) -> np.ndarray:
        """Vectors that lie one after the other; a view, perhaps not aligned."""
        size = rows * self._shape[1] * 4
        return self._bytes[offset : offset + size].view("<f4").reshape(rows, self._shape[1])

    def _read(self) -> None:
        file, kind = self._file, self._file.letters()
        self.lists: Lists | None = None
        if kind == "IHNf":  # its graph is for FAISS's search: the vectors are in the flat index behind it
            file.head()
            for size in (8, 4, 4, 8, 4):
                file.skip_vector(size)
            file.skip(5 * 4)
            kind = file.letters()
        if kind in _FLAT:
            self._start, self._shape = self._flat()
        elif kind == "IwFl":
            self._shape = file.head()
            self.lists = self._read_lists()
        else:
            raise file.error(f"an index of kind {kind!r} has no vectors that can be read here: {_READABLE}")

    def _flat(self) -> tuple[int, tuple[int, int]]:
        """Offset of an IndexFlat's floats, after its letters, and its shape."""
        count, width = self._file.head()
        floats = self._file.number("<u8")
        if floats != count * width:
            raise self._file.error(f"holds {floats} numbers, but is said to have {count} vectors of width {width}")
        offset = self._file.offset
        self._file.skip(4 * floats)
        return offset, (count, width)

    def _read_lists(self) -> Lists:
        file, (count, width) = self._file, self._shape
        number, probes = file.number("<u8"), file.number("<u8")
        if (kind := file.letters()) not in _FLAT:
            raise file.error(f"its quantizer is of kind {kind!r}; only a flat one can be read")
        offset, (centroids, _) = self._flat()
        if file.number("u1") == 2:
            raise file.error("it keeps its ids in a hash table; write it without a direct map")
        file.skip_vector(8)
        if (kind := file.letters()) != "ilar":
            raise file.error(
                f"its lists are of kind {kind!r}, which lie in another file; only those in this one can be read"
            )
        if (file.number("<u8"), file.number("<u8"), centroids) != (number, 4 * width, number):
            raise file.error("is damaged: its numbers of lists differ")
        sizes = self._sizes(number)
        ids, offsets, vector_offsets = [], [], np.full(count, -1, np.int64)
        for size in sizes.tolist():
            offsets.append(file.offset)
            file.skip(4 * width * size)
            ids.append(file.array("<i8", size))
            list_ids = ids[-1]
            if size and (list_ids.min() < 0 or list_ids.max() >= count):
                raise file.error(
                    f"its ids must be 0 to {count - 1}, the rows of a corpus; it was made with ids of its own"
                )
            vector_offsets[list_ids] = offsets[-1] + 4 * width * np.arange(size)
        if (vector_offsets < 0).any():
            raise file.error(
                f"has no vector of id {int(np.argmin(vector_offsets))}: vectors were removed, or ids were given twice"
            )
        self._offsets = vector_offsets
        matrix = self._matrix(offset, centroids)
        return Lists(
            centroids=np.array(matrix, np.float32), ids=tuple(ids), offsets=tuple(offsets), probes=max(1, probes)
        )

    def _sizes(self, lists: int) -> Int[np.ndarray, " L"]:
        file = self._file
        if (kind := file.letters()) == "full":
            sizes = file.array("<u8", file.number("<u8")).astype(np.int64)
        elif kind == "sprs":
            sizes = np.zeros(lists, np.int64)
            pairs = file.array("<u8", file.number("<u8")).astype(np.int64).reshape(-1, 2)
            sizes[pairs[:, 0]] = pairs[:, 1]
        else:
            raise file.error(f"is damaged: lists of kind {kind!r}")
        if len(sizes) != lists or sizes.sum() != len(self):
            raise file.error("is damaged: the sizes of its lists do not add up")
        return sizes


class _Reader:
    """A file that is read in order. Missing data is an error that names the file."""

    def __init__(self, file: BinaryIO, path: pathlib.Path) -> None:
        self._file, self._path = file, path
        self._size = os.fstat(file.fileno()).st_size

    @property
    def offset(self) -> int:
        return self._file.tell()

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{self._path}: {problem}")

    def skip(self, size: int) -> None:
        if not 0 <= size <= self._size - self.offset:
            raise self.error(f"is cut short, or no FAISS index: {self._size:,} bytes are too few. {_READABLE}")
        self._file.seek(size, os.SEEK_CUR)

    def array(self, dtype: str, count: int) -> np.ndarray:
        offset, size = self.offset, int(count) * np.dtype(dtype).itemsize
        self.skip(size)
        self._file.seek(offset)
        return np.frombuffer(self._file.read(size), dtype)

    def number(self, dtype: str) -> int:
        return int(self.array(dtype, 1)[0])

    def letters(self) -> str:
        return self.array("u1", 4).tobytes().decode("latin-1")

    def skip_vector(self, size: int) -> None:
        self.skip(size * self.number("<u8"))

    def head(self) -> tuple[int, int]:
        """(N, D), after the letters."""
        width, count = self.number("<i4"), self.number("<i8")
        self.skip(2 * 8 + 1)
        metric = self.number("<i4")
        if metric != _INNER_PRODUCT:
            problem = "L2 distances" if metric == 1 else f"metric {metric}"
            raise self.error(f"is made for {problem}; searches here go by inner products (faiss.METRIC_INNER_PRODUCT)")
        if count < 1 or width < 1:
            raise self.error(f"holds {count} vectors of width {width}")
        return count, width


class FaissIVFIndex(VectorIndex):
    """Compares a query with the vectors of `probes` lists.

    Args:
      vectors: of a FAISS file with lists.
      probes: default: the file's `nprobe`, which is 1 unless it was set before the file was written.

    Raises:
      ValueError: the vectors are of no FAISS file with lists, or `probes` is not from 1 to their number.
    """

    def __init__(self, vectors: VectorSource, probes: int = 0) -> None:
        super().__init__(vectors)
        lists = vectors.lists if isinstance(vectors, FaissVectors) else None
        if lists is None or not isinstance(vectors, FaissVectors):
            raise ValueError(f"index={FAISS_IVF!r} searches the lists of a FAISS IndexIVFFlat; these vectors have none")
        self._lists: Lists = lists
        self._file = vectors
        self.probes = probes or lists.probes
        if not 1 <= self.probes <= len(lists.ids):
            raise ValueError(f"probes={probes} must be from 1 to {len(lists.ids)}, the number of lists")

    @property
    def regime(self) -> str:
        """How it searches, for reports."""
        return f"{self.probes} of {len(self._lists.ids)} lists"

    @classmethod
    def build(cls, vectors: VectorSource, settings: Mapping[str, Any], *, mesh: Mesh | None = None) -> Self:
        if unknown := set(settings) - {"probes"}:
            raise ValueError(f"index={FAISS_IVF!r} has no setting {sorted(unknown)[0]!r}; it has probes")
        return cls(vectors, **settings)

    def save(self, directory: pathlib.Path) -> dict[str, Any]:
        return {"probes": self.probes}

    def candidates(self, queries: Float32[np.ndarray, "Q D"], count: int) -> Int[np.ndarray, "Q C"]:
        lists, count = self._lists, min(count, len(self))
        near = queries @ lists.centroids.T
        probed = np.argpartition(-near, self.probes - 1, axis=1)[:, : self.probes]
        rows_of_list: dict[int, list[int]] = collections.defaultdict(list)
        for query, numbers in enumerate(probed.tolist()):
            for number in numbers:
                rows_of_list[number].append(query)
        best: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in queries]
        for number, query_rows in rows_of_list.items():
            if not len(ids := lists.ids[number]):
                continue
            scores = queries[query_rows] @ self._file.of_list(number).T
            for query, row in zip(query_rows, scores):
                nearest = np.argpartition(-row, count - 1)[:count] if len(row) > count else np.arange(len(row))
                best[query].append((row[nearest], ids[nearest]))
        result = np.full((len(queries), count), -1, np.int64)
        for query, parts in enumerate(best):
            if parts:
                scores, ids = (np.concatenate(arrays) for arrays in zip(*parts))
                order = np.argsort(-scores, kind="stable")[:count]
                result[query, : len(order)] = ids[order]
        return result
