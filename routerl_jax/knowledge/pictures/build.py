"""Builds knowledge bases of pictures: rows -> pictures on disk -> CLIP vectors -> index. Resumes after a kill."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Annotated

import jax
import numpy as np
from jaxtyping import Float32

from routerl_jax.core.config import Count, Range, Size, checked
from routerl_jax.core.files import read_json
from routerl_jax.core.progress import Bar
from routerl_jax.core.types import Passage, TextAndImage
from routerl_jax.knowledge.base import KB_BUILDERS, Builder
from routerl_jax.knowledge.build import recall
from routerl_jax.knowledge.builds import BuildReport, Source, corpus_source, digest_of, is_built, report, stamp
from routerl_jax.knowledge.dense import open_index
from routerl_jax.knowledge.encoders import COLOURS, encoder_digest, resolved_encoder, shared_encoder
from routerl_jax.knowledge.index import AUTO, INDEXES, ScannSettings, backend_of, opening_backend
from routerl_jax.knowledge.measures import Clock
from routerl_jax.knowledge.pages.documents import OnError, Problems
from routerl_jax.knowledge.picture_files import PICTURES, PictureFiles, PictureFormat, PictureJournal, smaller
from routerl_jax.knowledge.pictures.corpus import Entry, pictures_digest, read_pictures
from routerl_jax.knowledge.pictures.kb import FINGERPRINTS
from routerl_jax.knowledge.pictures.near_duplicates import BYTES, difference_hash
from routerl_jax.knowledge.store import EMBEDDINGS, FORMAT, INDEX, Embedding, Store, StoredArray, create_array
from routerl_jax.knowledge.writer import StoreWriter, finish, finished
from routerl_jax.models.clip import uniir_text
from routerl_jax.models.embedding import PictureEmbedder

_KINDS = ("text_image", "reverse_image")
_SKIPPED = "skipped.json"
_JOURNAL = "kept.jsonl"
_PRINTS_SHARD, _PRINTS_CHUNK = 2**18, 2**10


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class PicturesConfig:
    """Configuration of `build_pictures`."""

    corpus: str = ""  # rows {id, title?, text? or caption?, image?}, or a directory of pictures (pictures.corpus)
    kind: str = "text_image"  # "text_image" (UniIR), or "reverse_image" (a picture finds pictures)
    name: str = ""  # name of the knowledge base; default: that of its directory
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
    overwrite: bool = False  # replace a knowledge base in the same directory

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
        backend = INDEXES.get(name)
        backend.require()
        bar = Bar(desc="pictures", unit="row", disable=not self._progress, smoothing=0.05)
        with bar:
            count = writer.passages(self._passages(bar))
        pictures = self._finger_prints(count)
        self._clock.lap("pictures")
        shards = writer.embeddings(self._encoder.dim, config.shard_size)
        resumed = shards.resumed_rows
        self._bar = Bar(
            total=count, initial=resumed, desc="embedding", unit="row", disable=not self._progress, smoothing=0.05
        )
        with self._bar:
            shards.write_rows(lambda start, stop: self._embed(shards.passages.read(start, stop), start))
        self._clock.lap("embed")
        vectors = StoredArray(writer.scratch / EMBEDDINGS, memory_limit=2**30, hint="")
        shutil.rmtree(writer.index_directory, ignore_errors=True)
        settings = dataclasses.asdict(config.scann) if name == "scann" else {}
        saved = backend.build(vectors, settings).save(writer.index_directory)
        self._clock.lap("index")
        writer.commit(
            stamp(
                config,
                writer.directory,
                corpus=source.path,
                digest=source.digest,
                count=count,
                embedding=embedding,
                index={"backend": name, **saved},
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
        parts, batch = [], self._config.embed_batch or _batch_size(self._encoder)
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


def _batch_size(encoder: PictureEmbedder) -> int:
    devices = jax.local_devices() if encoder.mesh is None else list(encoder.mesh.devices.flat)
    return 32 if devices[0].platform == "cpu" else 256 * len(devices)


for _kind in _KINDS:
    KB_BUILDERS.register(_kind)(Builder(PicturesConfig, build_pictures, pictures_digest))
