"""Knowledge bases of pictures, their search and their build: captions and pictures found by text, picture or both (R1-Router's
UniIR), and pictures found by a picture (MMSearch-R1).

Build: rows -> pictures on disk -> CLIP vectors -> index. It continues after a kill.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float32, UInt8
from PIL import Image

from routerl_jax.core.config import Count, Range, Size, checked
from routerl_jax.core.files import read_json
from routerl_jax.core.progress import Bar
from routerl_jax.core.rows import RowLocation, checked_path, read_rows
from routerl_jax.core.types import Passage, Query, TextAndImage
from routerl_jax.knowledge.base import KnowledgeBase, query_image, query_key, query_text
from routerl_jax.knowledge.builds import (
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
    write_index,
)
from routerl_jax.knowledge.corpus import DistinctIds, file_sha256, string_field
from routerl_jax.knowledge.dense import QueryCache, open_index, query_encoder, stored_embedding
from routerl_jax.knowledge.encoders import COLOURS, TextEncoder, encoder_digest, resolved_encoder, shared_encoder
from routerl_jax.knowledge.index import AUTO, INDEXES, VectorIndex, backend_of, opening_backend, recall
from routerl_jax.knowledge.pages.reading import PICTURE_SUFFIXES, OnError, Problems, documents
from routerl_jax.knowledge.picture_files import PICTURES, PictureFiles, PictureFormat, PictureJournal, smaller
from routerl_jax.knowledge.scann_index import ScannSettings
from routerl_jax.knowledge.store import EMBEDDINGS, FORMAT, INDEX, Embedding, Store, StoredArray, create_array
from routerl_jax.knowledge.writer import StoreWriter, finish, finished
from routerl_jax.models.embedding import PictureEmbedder
from routerl_jax.models.families.clip import uniir_text
from routerl_jax.models.images import ImageSource, decode_image, is_url

_SIDE = 16
BYTES = _SIDE * _SIDE // 8 + 3
_STEP = 2  # levels of 255; smaller ones are noise of compression
# of 256 that may differ: of 182 real pictures, halved JPEG copies differ in 14 at most, others in 33 at least
_MOST_BITS = 16
_MOST_COLOUR = 12  # largest difference of mean colours, of 255


def difference_hash(picture: Image.Image) -> UInt8[np.ndarray, " F"]:
    """A picture's fingerprint: the grid points at which it gets brighter to the right (a difference hash), and its mean
    colour."""
    grey = np.asarray(picture.convert("L").convert("F").resize((_SIDE + 1, _SIDE), Image.Resampling.BOX))
    bits = np.packbits(grey[:, 1:] - grey[:, :-1] > _STEP)
    colour = np.asarray(picture.convert("RGB").resize((1, 1), Image.Resampling.BOX), np.uint8).reshape(3)
    return np.concatenate([bits, colour])


def near_duplicates(
    fingerprint: UInt8[np.ndarray, " F"], fingerprints: UInt8[np.ndarray, "N F"]
) -> Bool[np.ndarray, " N"]:
    """Whether each of the other fingerprints belongs to the same picture."""
    differ = np.unpackbits(np.bitwise_xor(fingerprint[:-3], fingerprints[:, :-3]), axis=1).sum(1)
    colours = np.abs(fingerprint[-3:].astype(np.int16) - fingerprints[:, -3:].astype(np.int16)).max(1)
    return (differ <= _MOST_BITS) & (colours <= _MOST_COLOUR)


FINGERPRINTS = "fingerprints"
_QUERY_BATCH = 16  # fixed number of rows of encoder calls, so that a vector does not depend on the other queries
_REMEMBERED = 16_384  # cached query vectors (3 KB each at 768 dimensions)


class PictureKB(KnowledgeBase):
    """Base of both kinds: vectors of CLIP or another `PictureEmbedder`, an index over them, and pictures on disk.

    Args:
      store: an opened store with embeddings.
      encoder: the encoder of queries.
      index: the index over the store's embeddings.
    """

    def __init__(self, store: Store, encoder: PictureEmbedder, index: VectorIndex) -> None:
        self.name = store.manifest.name
        self.store, self.encoder, self.index = store, encoder, index
        self.cache = QueryCache(_REMEMBERED)
        self._files = PictureFiles(store.directory, store.manifest.settings["picture_format"])
        self._fingerprints = StoredArray(store.directory / FINGERPRINTS, 2**30, store.hint)

    @classmethod
    def open(cls, store: Store, *, mesh: Mesh | None, index: str | None, encoder: str | TextEncoder | None) -> Self:
        """Opens a built store with its encoder and index, or the given ones."""
        model = query_encoder(store, encoder, mesh)
        if not isinstance(model, PictureEmbedder):
            name = encoder or stored_embedding(store).encoder
            raise ValueError(f"{name!r} reads no pictures, which {store.directory} is searched with")
        return cls(store, model, open_index(store, index, mesh))

    def __len__(self) -> int:
        return len(self.store)

    def embed_queries(self, queries: Sequence[Query]) -> Float32[np.ndarray, "Q D"]:
        """The queries' vectors: the sum of text and picture, at unit length.

        Raises:
          ValueError: a picture can't be read, or only its URL is given; names the query.
        """
        if url := next((query.image for query in queries if not isinstance(query, str) and is_url(query.image)), None):
            raise ValueError(
                f"knowledge base {self.name!r} compares pictures and opens no URLs: give the picture itself, or use a web "
                f"knowledge base (mode='image'). Asked was {url}"
            )

        def embed(missing: list[Query]) -> Float32[np.ndarray, "M D"]:
            return self.encoder.embed([self._input(query) for query in missing], prefix="", batch_size=_QUERY_BATCH)

        keys = [query_key(query) for query in queries]
        vectors = self.cache.fetch(dict(zip(keys, queries)), embed)
        return np.stack([vectors[key] for key in keys])

    def _input(self, query: Query) -> TextAndImage:
        """A query in the form for the encoder."""
        if isinstance(query, str):
            return TextAndImage(text=query)
        return dataclasses.replace(query, image=decode_image(query.image, name="the query's picture"))

    def _passages(self, rows: Sequence[int] | np.ndarray) -> dict[int, Passage]:
        """Passages by row, with their pictures if they have any."""
        distinct = np.unique(np.asarray(rows, np.int64))
        have_pictures = (
            [bool(fingerprint.any()) for fingerprint in self._fingerprints.take(distinct)] if len(distinct) else []
        )
        return {
            row: dataclasses.replace(passage, image=str(self._files.path(row)) if has_picture else "")
            for row, passage, has_picture in zip(distinct.tolist(), self.store.passages.take(distinct), have_pictures)
        }


class TextImageKB(PictureKB):
    """Finds texts, pictures, or texts with pictures by a text, a picture, or both.

    The instruction before a query's text belongs to the trained model (UniIR has one per task).
    """

    reads: ClassVar[frozenset[str]] = frozenset({"text", "image"})

    def _input(self, query: Query) -> TextAndImage:
        has_picture = bool(query_image(query))
        instruction = str(self.store.manifest.settings["image_instruction" if has_picture else "instruction"])
        text = uniir_text(query_text(query), instruction)
        return dataclasses.replace(super()._input(query), text=text or None)

    def _search(self, queries: list[Query], k: int) -> list[list[Passage]]:
        ids, scores = self.index.search(self.embed_queries(queries), k)
        passages = self._passages(ids[ids >= 0])
        return [
            [dataclasses.replace(passages[i], score=score) for i, score in zip(ids_row, scores_row) if i >= 0]
            for ids_row, scores_row in zip(ids.tolist(), scores.tolist())
        ]


class ReverseImageKB(PictureKB):
    """Finds the nearest pictures to a picture, with the titles of their sources. `Passage.image` is a thumbnail.

    Copies of a picture (also re-encoded or resized ones) are one result, whose text lists the other titles.
    """

    reads: ClassVar[frozenset[str]] = frozenset({"image"})

    def _search(self, queries: list[Query], k: int) -> list[list[Passage]]:
        vectors = self.embed_queries(queries)
        results: list[list[Passage]] = [[] for _ in queries]
        open_queries, count = np.arange(len(queries)), min(4 * k, len(self))
        while len(open_queries):
            unclear = []
            for query, ids, scores in zip(open_queries, *self.index.search(vectors[open_queries], count)):
                groups = self._groups(ids[ids >= 0])
                if len(groups) < k and count < len(self):
                    unclear.append(query)
                else:
                    results[query] = self._merged(groups[:k], dict(zip(ids.tolist(), scores.tolist())))
            open_queries, count = np.asarray(unclear, np.int64), min(4 * count, len(self))
        return results

    def _groups(self, rows: np.ndarray) -> list[list[int]]:
        """Groups the rows of the same picture. A group has the position of its best row."""
        prints = self._fingerprints.take(rows)
        groups: list[list[int]] = []
        ungrouped = np.ones(len(rows), bool)
        for i, row in enumerate(rows):
            if ungrouped[i]:
                same = ungrouped & near_duplicates(prints[i], prints)
                same[i] = True
                ungrouped &= ~same
                groups.append([int(row), *(int(other) for other in rows[same] if other != row)])
        return groups

    def _merged(self, groups: list[list[int]], scores: dict[int, float]) -> list[Passage]:
        passages = self._passages([row for group in groups for row in group])
        results = []
        for first, *others in groups:
            passage = passages[first]
            titles = dict.fromkeys(passages[row].title for row in others)
            titles.pop(passage.title, None)
            lines = [passage.text] if passage.text.strip() else []
            lines += [f"The same picture: {title}" for title in titles if title]
            results.append(dataclasses.replace(passage, text="\n".join(lines), score=scores[first]))
        return results


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of a corpus; `image` is a path, a `data:` URI, or None."""

    id: str
    title: str
    text: str
    image: ImageSource | None
    location: str  # its position, for messages


def read_pictures(corpus: str | pathlib.Path, problems: Problems) -> Iterator[Entry]:
    """The rows of a corpus, in order.

    Args:
      corpus: one of three forms. A .jsonl, .jsonl.gz or .json file with rows {id, title?, text? or caption?, image?}; images
        are paths relative to the file, or `data:` URIs. M-BEIR's candidates {did, txt, img_path, modality}; paths are relative
        to a directory above the file (cand_pool/local/mbeir_*_cand_pool.jsonl). A directory of pictures; the paths below it are
        ids, and the file names titles.

    Raises:
      ValueError: the corpus does not exist or is empty; a row has no id, or neither text nor picture; or a picture is missing,
        unless `problems` skips it. Names file and row.
    """
    root = pathlib.Path(corpus).expanduser()
    count = 0
    for entry in _files(root) if root.is_dir() else _rows(root, problems):
        count += 1
        yield entry
    if not count:
        raise ValueError(f"{root} holds nothing that can be used. Expected rows like {{id, title, text, image}}")


def pictures_digest(corpus: str | pathlib.Path) -> str:
    """Hex digest of a corpus: a file's bytes, or names, sizes and times of a directory's pictures."""
    root = pathlib.Path(corpus).expanduser()
    if not root.is_dir():
        return file_sha256(checked_path(root))
    digest = hashlib.sha256()
    for path in documents(root, PICTURE_SUFFIXES):
        status = os.stat(path)
        digest.update(f"{path.relative_to(root)}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _files(root: pathlib.Path) -> Iterator[Entry]:
    for path in documents(root, PICTURE_SUFFIXES):
        name = path.relative_to(root).as_posix()
        yield Entry(id=name, title=path.stem.replace("_", " "), text="", image=path, location=str(path))


def _rows(path: pathlib.Path, problems: Problems) -> Iterator[Entry]:
    ids = DistinctIds()
    for location, row in read_rows(checked_path(path)):
        row = _of_mbeir(row, location) if "did" in row else row
        name = ids.add(string_field(row, "id", location), location)
        title = string_field(row, "title", location, default="")
        text = string_field(row, "text" if row.get("text") is not None else "caption", location, default="")
        image = string_field(row, "image", location, default="")
        if not (title.strip() or text.strip() or image.strip()):
            raise location.error(
                "neither text nor picture: fill in 'title', 'text', 'caption' or 'image', or remove the row"
            )
        try:
            source = _source(path, image, location) if image.strip() else None
        except ValueError as error:
            problems.handle(error)
            continue
        yield Entry(
            id=name, title=title, text=text, image=source, location=f"{path}, {location.unit} {location.number}"
        )
    ids.finish()


def _of_mbeir(row: dict[str, Any], location: RowLocation) -> dict[str, Any]:
    """A candidate of M-BEIR (Wei et al. 2023, arXiv 2311.17136) in this module's keys."""
    image = string_field(row, "img_path", location, default="")
    above = (folder / image for folder in location.path.parents)
    path = next((file for file in above if file.is_file()), image) if image.strip() else ""
    return {"id": row["did"], "text": row.get("txt"), "image": str(path)}


def _source(path: pathlib.Path, image: str, location: RowLocation) -> ImageSource:
    if image.startswith("data:"):
        return image
    if "://" in image:
        raise location.error(f"key 'image': {image[:80]!r} is not on this machine; fetch it and give its path")
    source = path.parent / pathlib.Path(image).expanduser()
    if not source.is_file():
        raise location.error(f"key 'image': {source} does not exist. Paths are relative to the file")
    return source


_KINDS = ("text_image", "reverse_image")
_SKIPPED = "skipped.json"
_JOURNAL = "kept.jsonl"
_PRINTS_SHARD, _PRINTS_CHUNK = 2**18, 2**10


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class PicturesConfig(BuildSettings):
    """Configuration of `build_pictures`."""

    corpus: str = ""  # rows {id, title?, text? or caption?, image?}, or a directory of pictures (knowledge.pictures)
    kind: str = "text_image"  # "text_image" (UniIR), or "reverse_image" (a picture finds pictures)
    # a CLIP model: a Hugging Face directory or a hub id; or colours+NAME
    encoder: str = "openai/clip-vit-large-patch14"
    instruction: str = ""  # only for text_image: put before queries of text alone, as in the model's training
    image_instruction: str = ""  # only for text_image: put before queries with a picture
    index: str = AUTO  # index of the vectors, as in knowledge.build
    scann: ScannSettings = dataclasses.field(default_factory=ScannSettings)  # only if ScaNN is the index
    # shorter side, in pixels, of the stored pictures, which are also the ones that are embedded
    side: Annotated[int, Range(least=32)] = 384
    picture_format: PictureFormat = "jpeg"  # jpeg or png
    on_error: OnError = "raise"  # what to do with a damaged picture: raise, or skip the row and report
    embed_batch: Count = 0  # rows that the encoder reads at a time; 0: 32 on a CPU, 256 per device elsewhere
    shard_size: Size = 8192  # vectors of a file; the progress of one that takes long is saved every minute
    check_queries: Count = 256  # rows whose neighbours are looked up to measure the index's recall; 0: no check

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"kind={self.kind!r} is not one of {', '.join(_KINDS)}")
        if self.kind == "reverse_image" and (self.instruction or self.image_instruction):
            raise ValueError("instructions go before texts; a reverse image search has none. Leave them empty")
        if self.index not in ("scann", AUTO) and self.scann != ScannSettings():
            raise ValueError(f"scann is set, but index={self.index!r} does not use it")


def build_pictures(
    config: PicturesConfig,
    directory: str | pathlib.Path,
    *,
    progress: bool = True,
    encoder: PictureEmbedder | None = None,
) -> BuildReport:
    """Builds a knowledge base of pictures. After a kill, another call continues with the next shard.

    Args:
      directory: directory of the knowledge base; it appears only when it is complete.
      progress: show progress bars.
      encoder: embed with this model; `config.encoder` is only its name then.

    Raises:
      ValueError: a file, a row or a setting is wrong; names it.
    """
    config = dataclasses.replace(config, encoder=resolved_encoder(config.encoder))
    expected = "rows with pictures, or a directory of them,"
    clock, source = Clock(), corpus_source(config.corpus, expected, lambda *_, **__: (), digest=pictures_digest)
    colours = f"{COLOURS}all-MiniLM-L6-v2"
    model = encoder or shared_encoder(config.encoder, instead=f"{colours}, which finds equal pictures (models.colours)")
    if not isinstance(model, PictureEmbedder):
        raise ValueError(
            f"encoder={config.encoder!r} reads no pictures; give a CLIP model, or {colours} (models.colours)"
        )
    embedding = Embedding(encoder=config.encoder, digest=encoder_digest(model), dim=model.dim)
    parts = [
        FORMAT,
        config.kind,
        source.digest,
        embedding.encoder,
        embedding.digest,
        config.side,
        config.picture_format,
    ]
    parts += [config.on_error, config.shard_size]
    with StoreWriter(directory, digest_of(parts), overwrite=config.overwrite) as writer:
        build = _Build(config, writer, model, clock, progress)
        if not is_built(writer, config, source, embedding):
            build.run(source, embedding)
    store = Store(writer.directory)
    measured = _check(config, store)
    clock.lap("check")
    skipped = read_json(store.directory / _SKIPPED, store.hint)
    numbers = {"pictures": store.manifest.settings["pictures"], "damaged": len(skipped), "embedded": build.embedded}
    backend = opening_backend(None, str(store.manifest.index["backend"]))
    details = {"encoder": config.encoder, "dim": model.dim, "index": backend, "recall": measured}
    return report(store, clock, ("passages", PICTURES, EMBEDDINGS, FINGERPRINTS, INDEX), numbers=numbers, **details)


class _Build:
    """The stages of `build_pictures`."""

    def __init__(
        self, config: PicturesConfig, writer: StoreWriter, encoder: PictureEmbedder, clock: Clock, progress: bool
    ) -> None:
        self.embedded = 0  # rows embedded by this run
        self._config, self._writer, self._encoder = config, writer, encoder
        self._clock, self._progress = clock, progress
        self._files = PictureFiles(writer.scratch, config.picture_format)

    def run(self, source: Source, embedding: Embedding) -> None:
        """Runs all stages. The parts that an earlier run has finished are skipped."""
        config, writer = self._config, self._writer
        name = backend_of(config.index)
        INDEXES.get(name).require()
        bar = Bar(desc="pictures", unit="row", disable=not self._progress, smoothing=0.05)
        with bar:
            count = writer.passages(self._passages(bar))
        pictures = self._finger_prints(count)
        self._clock.lap("pictures")
        shards = writer.embeddings(self._encoder.dim, config.shard_size)
        with shards.bar("embedding", "row", self._progress) as self._bar:
            shards.write_rows(lambda start, stop: self._embed(shards.passages.read(start, stop), start))
        self._clock.lap("embed")
        index = write_index(writer, name, dataclasses.asdict(config.scann) if name == "scann" else {})
        self._clock.lap("index")
        writer.commit(
            stamp(
                config,
                writer.directory,
                source,
                count=count,
                embedding=embedding,
                index=index,
                settings={
                    "picture_format": config.picture_format,
                    "instruction": config.instruction,
                    "image_instruction": config.image_instruction,
                    "pictures": pictures,
                },
            )
        )

    def _passages(self, bar: Bar) -> Iterator[Passage]:
        """Passages in order. Their pictures are written meanwhile."""
        problems, row = Problems(self._config.on_error), 0
        with PictureJournal(self._writer.progress / _JOURNAL, self._files) as journal:
            for entry in read_pictures(self._config.corpus, problems):
                bar.update()
                try:
                    self._keep(row, entry, journal)
                except ValueError as error:
                    problems.handle(ValueError(f"{entry.location}: {error}"))
                    continue
                yield Passage(id=entry.id, title=entry.title, text=entry.text)
                row += 1
        if not row:
            raise ValueError(f"{self._config.corpus}: none of its {len(problems.skipped)} rows can be used")
        (self._writer.scratch / _SKIPPED).write_text(json.dumps(problems.skipped, ensure_ascii=False), "utf-8")

    def _keep(self, row: int, entry: Entry, journal: PictureJournal) -> None:
        if entry.image is None:
            if self._config.kind == "reverse_image":
                raise ValueError("no picture, which a reverse image search is about; fill in 'image' or remove the row")
            # a file may belong to another row, from a killed build of a corpus that was corrected since
            self._files.path(row).unlink(missing_ok=True)
        elif journal.row(entry.id) != row:
            journal.write(entry.id, row, self._files.encode(smaller(entry.image, self._config.side)))

    def _finger_prints(self, count: int) -> int:
        """Writes the fingerprints of pictures, zeros for rows without one. Returns the number of pictures."""
        marker = self._writer.progress / FINGERPRINTS
        if (content := finished(marker)) is not None:
            return content["pictures"]
        path = self._writer.scratch / FINGERPRINTS
        array = create_array(path, (count, BYTES), "uint8", _PRINTS_SHARD, _PRINTS_CHUNK, compress=False)
        pictures = 0
        for start in range(0, count, _PRINTS_SHARD):
            prints = np.zeros((min(_PRINTS_SHARD, count - start), BYTES), np.uint8)
            for i in range(len(prints)):
                if (file := self._files.path(start + i)).is_file():
                    prints[i] = difference_hash(smaller(file, 64))
                    prints[i, -1] |= not prints[
                        i
                    ].any()  # keeps the fingerprint of a black picture from being all zeros
                    pictures += 1
            array[start : start + len(prints)].write(prints).result()
        finish(marker, {"pictures": pictures})
        return pictures

    def _embed(self, passages: Sequence[Passage], first: int) -> Float32[np.ndarray, "N D"]:
        """The vectors of the passages from row `first` on."""
        parts, batch = [], batch_size(self._config.embed_batch, self._encoder)
        for start in range(0, len(passages), 16 * batch):
            inputs = []
            for row, passage in enumerate(passages[start : start + 16 * batch], first + start):
                file = self._files.path(row)
                inputs.append(self._input(passage, file if file.is_file() else None))
            parts.append(self._encoder.embed(inputs, prefix="", batch_size=batch))
            self.embedded += len(inputs)
            self._bar.update(len(inputs))
        return np.concatenate(parts)

    def _input(self, passage: Passage, image: pathlib.Path | None) -> TextAndImage:
        """The parts of a row that are embedded: all, or for reverse image search the picture alone."""
        if self._config.kind == "reverse_image":
            return TextAndImage(image=image)
        text = uniir_text(" ".join(part for part in (passage.title.strip(), passage.text.strip()) if part))
        return TextAndImage(text=text or None, image=image)


def _check(config: PicturesConfig, store: Store) -> float | None:
    if not config.check_queries:
        return None
    index = open_index(store, None, None)
    rows = np.unique(np.linspace(0, len(store) - 1, min(config.check_queries, len(store))).astype(np.int64))
    return recall(index, store.embeddings, store.embeddings.take(rows))


BUILDER = Builder(PicturesConfig, build_pictures, pictures_digest)
