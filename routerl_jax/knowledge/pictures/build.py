"""Builds knowledge bases of pictures: rows -> pictures on disk -> CLIP vectors -> index. Resumes after a kill."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float32

from routerl_jax.core.config import Count, Range, Size, checked
from routerl_jax.core.files import read_json
from routerl_jax.core.progress import Bar
from routerl_jax.core.rows import RowLocation, checked_path, read_rows
from routerl_jax.core.types import Passage, TextAndImage
from routerl_jax.knowledge.build import recall
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
from routerl_jax.knowledge.dense import open_index
from routerl_jax.knowledge.encoders import COLOURS, encoder_digest, resolved_encoder, shared_encoder
from routerl_jax.knowledge.index import AUTO, INDEXES, backend_of, opening_backend
from routerl_jax.knowledge.pages.reading import PICTURE_SUFFIXES, OnError, Problems, documents
from routerl_jax.knowledge.picture_files import PICTURES, PictureFiles, PictureFormat, PictureJournal, smaller
from routerl_jax.knowledge.pictures.kb import BYTES, FINGERPRINTS, difference_hash
from routerl_jax.knowledge.scann_index import ScannSettings
from routerl_jax.knowledge.store import EMBEDDINGS, FORMAT, INDEX, Embedding, Store, create_array
from routerl_jax.knowledge.writer import StoreWriter, finish, finished
from routerl_jax.models.embedding import PictureEmbedder
from routerl_jax.models.families.clip import uniir_text
from routerl_jax.models.images import ImageSource


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

    corpus: str = ""  # rows {id, title?, text? or caption?, image?}, or a directory of pictures (pictures.build)
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
