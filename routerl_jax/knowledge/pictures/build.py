"""Building knowledge bases of pictures: rows -> pictures on disk -> vectors (CLIP's) -> index. Resumes after a kill."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32
from tqdm.auto import tqdm

from routerl_jax.core.types import Passage, TextAndImage
from routerl_jax.knowledge.base import KB_BUILDERS, Builder
from routerl_jax.knowledge.build import recall
from routerl_jax.knowledge.dense import open_index
from routerl_jax.knowledge.encoders import COLOURS, encoder_digest, encoder_place, shared_encoder
from routerl_jax.knowledge.index import AUTO, INDEXES, ScannSettings, backend_of, opening_backend, same_settings
from routerl_jax.knowledge.measures import Clock, peak_rss, size_on_disk
from routerl_jax.knowledge.pages.documents import OnError, Problems
from routerl_jax.knowledge.picture_files import PICTURES, Journal, PictureFiles, PictureFormat, smaller
from routerl_jax.knowledge.pictures.corpus import Entry, pictures_digest, read_pictures
from routerl_jax.knowledge.pictures.kb import FINGERPRINTS
from routerl_jax.knowledge.pictures.likeness import BYTES, fingerprint
from routerl_jax.knowledge.store import EMBEDDINGS, FORMAT, INDEX, Embedding, Manifest, Store, StoredArray, create_array
from routerl_jax.knowledge.writer import StoreWriter, finish
from routerl_jax.models.clip import uniir_text
from routerl_jax.models.embedding import PictureEmbedder

_KINDS = ("text_image", "reverse_image")
_SKIPPED = "skipped.json"
_JOURNAL = "kept.jsonl"
_PRINTS_SHARD, _PRINTS_CHUNK = 2**18, 2**10


@dataclasses.dataclass(frozen=True, kw_only=True)
class PicturesConfig:
    """What `build_pictures` makes."""

    corpus: str = ""  # rows {id, title?, text? or caption?, image?}, or a directory of pictures (pictures.corpus)
    kind: str = "text_image"  # "text_image" (UniIR), or "reverse_image" (a picture finds pictures)
    name: str = ""  # what the knowledge base calls itself; default: the name of its directory
    encoder: str = (
        "openai/clip-vit-large-patch14"  # a CLIP model: a Hugging Face directory or a hub id; or colours+NAME
    )
    instruction: str = ""  # only for text_image: put before queries of text alone, as the model was trained
    image_instruction: str = ""  # only for text_image: put before queries with a picture
    index: str = AUTO  # as in knowledge.build
    scann: ScannSettings = dataclasses.field(default_factory=ScannSettings)  # only where ScaNN is the index
    side: int = 384  # of the pictures that are kept: the shorter side, pixels; they are what is embedded
    picture_format: PictureFormat = "jpeg"  # jpeg or png
    on_error: OnError = "raise"  # what to do with a damaged picture: raise, or skip the row and report
    embed_batch: int = 0  # rows that the encoder reads at a time; 0: 32 on a CPU, 256 per device elsewhere
    shard_size: int = 8192  # rows that are embedded and committed together
    check_queries: int = 256  # rows whose neighbours are looked up to measure the index's recall; 0: no check
    overwrite: bool = False  # replace a knowledge base that is at the same place already

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"kind={self.kind!r} is not one of {', '.join(_KINDS)}")
        for key, least in (("shard_size", 1), ("embed_batch", 0), ("check_queries", 0), ("side", 32)):
            if getattr(self, key) < least:
                raise ValueError(f"{key}={getattr(self, key)} must be at least {least}")
        if self.kind == "reverse_image" and (self.instruction or self.image_instruction):
            raise ValueError("instructions go before texts; a reverse image search has none. Leave them empty")
        if self.index not in ("scann", AUTO) and self.scann != ScannSettings():
            raise ValueError(f"scann is set, but index={self.index!r} does not use it")

    def changes(self) -> dict[str, Any]:
        """What makes this another knowledge base than the defaults would from the same corpus, under dotted keys."""
        without = ("corpus", "scann", "embed_batch", "check_queries", "overwrite")
        default = PicturesConfig()
        result = {key: value for key, value in vars(self).items() if key not in without}
        if self.index == "scann":  # as "auto" says it; which it was is the manifest's `index`
            del result["index"]
        result = {key: value for key, value in result.items() if key == "kind" or value != getattr(default, key)}
        scann = vars(self.scann).items()
        return result | {f"scann.{key}": value for key, value in scann if value != getattr(default.scann, key)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PicturesReport:
    """What a build made and what it took. `str(report)` is a table."""

    name: str
    kind: str
    directory: str
    count: int  # rows
    pictures: int  # of these, with a picture
    damaged: int  # rows that were left out because their picture can't be read
    embedded: int  # rows that this run gave vectors
    dim: int
    encoder: str
    index: str
    recall: float | None  # share of the true 10 nearest neighbours that the index finds; None: not checked
    seconds: Mapping[str, float]
    bytes: Mapping[str, int]  # on disk
    peak_rss_bytes: int  # of the whole process
    devices: str

    def __str__(self) -> str:
        found = "not checked" if self.recall is None else f"{self.recall:.4f} of the 10 nearest neighbours"
        rows = {
            "knowledge base": f"{self.name} ({self.kind}) at {self.directory}",
            "rows": f"{self.count:,}, {self.pictures:,} with pictures; left out: {self.damaged} damaged",
            "vectors": f"{self.dim} wide, {self.encoder}; {self.embedded:,} embedded now on {self.devices}",
            "index": f"{self.index}, recall {found}",
            "seconds": ", ".join(f"{stage} {value:.1f}" for stage, value in self.seconds.items()),
            "on disk": ", ".join(f"{part} {value / 1e6:.1f} MB" for part, value in self.bytes.items()),
            "peak memory": f"{self.peak_rss_bytes / 1e9:.2f} GB",
        }
        return "\n".join(f"{key:<15} {value}" for key, value in rows.items())


def build_pictures(
    config: PicturesConfig,
    directory: str | pathlib.Path,
    *,
    progress: bool = True,
    encoder: PictureEmbedder | None = None,
) -> PicturesReport:
    """Builds a knowledge base of pictures. Run again after a kill, it goes on with the next shard.

    Args:
      directory: where it will be; nothing is there until all is done.
      progress: show progress bars.
      encoder: embed with this model, which `config.encoder` then merely names.

    Raises:
      ValueError: names the file, row or config key that is at fault.
    """
    if not config.corpus:
        raise ValueError("corpus must be set: rows with pictures, or a directory of them (--config.corpus=FILE)")
    config = dataclasses.replace(config, encoder=encoder_place(config.encoder))
    clock, corpus = Clock(), pictures_digest(config.corpus)
    model = encoder or shared_encoder(config.encoder)
    if not isinstance(model, PictureEmbedder):
        raise ValueError(
            f"encoder={config.encoder!r} reads no pictures; give a CLIP model, or {COLOURS}all-MiniLM-L6-v2 (models.colours)"
        )
    made = Embedding(encoder=config.encoder, digest=encoder_digest(model), dim=model.dim)
    parts = [FORMAT, config.kind, corpus, made.encoder, made.digest, config.side, config.picture_format]
    fingerprints = json.dumps([*parts, config.on_error, config.shard_size])
    with StoreWriter(
        directory, hashlib.sha256(fingerprints.encode()).hexdigest(), overwrite=config.overwrite
    ) as writer:
        there = writer.existing
        same = (
            there is not None
            and there.corpus_sha256 == corpus
            and same_settings(config.index, config.changes(), there.config, there.index)
        )
        build = _Build(config, writer, model, clock, progress)
        if config.overwrite or not same or there is None or there.embedding != made:
            build.run(corpus, made)
    store = Store(writer.directory)
    found = _check(config, store)
    clock.lap("check")
    skipped = json.loads((store.directory / _SKIPPED).read_text("utf-8"))
    parts = ("passages", PICTURES, EMBEDDINGS, FINGERPRINTS, INDEX)
    return PicturesReport(
        name=store.manifest.name,
        kind=config.kind,
        directory=str(writer.directory),
        count=len(store),
        pictures=store.manifest.settings["pictures"],
        damaged=len(skipped),
        embedded=build.embedded,
        dim=model.dim,
        encoder=config.encoder,
        index=opening_backend(None, str(store.manifest.index["backend"])),
        recall=found,
        seconds=clock.laps | {"total": sum(clock.laps.values())},
        bytes={part: size_on_disk(store.directory / part) for part in parts},
        peak_rss_bytes=peak_rss(),
        devices=f"{jax.local_device_count()} x {jax.local_devices()[0].device_kind}",
    )


class _Build:
    """The stages of `build_pictures`."""

    def __init__(
        self, config: PicturesConfig, writer: StoreWriter, encoder: PictureEmbedder, clock: Clock, progress: bool
    ) -> None:
        self.embedded = 0  # rows, by this run
        self._config, self._writer, self._encoder = config, writer, encoder
        self._clock, self._progress = clock, progress
        self._files = PictureFiles(writer.scratch, config.picture_format)

    def run(self, corpus: str, made: Embedding) -> None:
        """All stages, each as far as an earlier run has not finished it."""
        config, writer = self._config, self._writer
        name = backend_of(config.index)
        backend = INDEXES.get(name)
        backend.require()
        bar = tqdm(desc="pictures", unit="row", disable=not self._progress, smoothing=0.05)
        with bar:
            count = writer.passages(self._passages(bar))
        pictures = self._finger_prints(count)
        self._clock.lap("pictures")
        shards = writer.embeddings(self._encoder.dim, config.shard_size)
        self._row = shards.resumed_rows
        self._bar = tqdm(
            total=count, initial=self._row, desc="embedding", unit="row", disable=not self._progress, smoothing=0.05
        )
        with self._bar:
            shards.write(self._embed)
        self._clock.lap("embed")
        vectors = StoredArray(writer.scratch / EMBEDDINGS, memory_limit=2**30, hint="")
        shutil.rmtree(writer.index_directory, ignore_errors=True)
        settings = dataclasses.asdict(config.scann) if name == "scann" else {}
        saved = backend.build(vectors, settings).save(writer.index_directory)
        self._clock.lap("index")
        writer.commit(
            Manifest(
                kind=config.kind,
                name=config.name or writer.directory.name,
                count=count,
                corpus=str(pathlib.Path(config.corpus).expanduser().resolve()),
                corpus_sha256=corpus,
                config=config.changes(),
                created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                embedding=made,
                index={"backend": name, **saved},
                settings={
                    "picture_format": config.picture_format,
                    "instruction": config.instruction,
                    "image_instruction": config.image_instruction,
                    "pictures": pictures,
                },
            )
        )

    def _passages(self, bar: tqdm) -> Iterator[Passage]:
        """Passages in order; their pictures are written on the way."""
        problems, row = Problems(self._config.on_error), 0
        with Journal(self._writer.progress / _JOURNAL, self._files) as journal:
            for entry in read_pictures(self._config.corpus, problems):
                bar.update()
                try:
                    self._keep(row, entry, journal)
                except ValueError as error:
                    problems.handle(ValueError(f"{entry.place}: {error}"))
                    continue
                yield Passage(id=entry.id, title=entry.title, text=entry.text)
                row += 1
        if not row:
            raise ValueError(f"{self._config.corpus}: none of its {len(problems.skipped)} rows can be used")
        (self._writer.scratch / _SKIPPED).write_text(json.dumps(problems.skipped, ensure_ascii=False), "utf-8")

    def _keep(self, row: int, entry: Entry, journal: Journal) -> None:
        if entry.image is None:
            if self._config.kind == "reverse_image":
                raise ValueError("no picture, which a reverse image search is about; fill in 'image' or remove the row")
            self._files.path(row).unlink(missing_ok=True)  # of another row, before a killed build's corpus was mended
        elif journal.row(entry.id) != row:
            journal.write(entry.id, row, self._files.encode(smaller(entry.image, self._config.side)))

    def _finger_prints(self, count: int) -> int:
        """Writes the pictures' fingerprints, zeros where there is none; returns the number of pictures."""
        marker = self._writer.progress / FINGERPRINTS
        if marker.is_file():
            return json.loads(marker.read_text())["pictures"]
        path = self._writer.scratch / FINGERPRINTS
        array = create_array(path, (count, BYTES), "uint8", _PRINTS_SHARD, _PRINTS_CHUNK, compress=False)
        pictures = 0
        for start in range(0, count, _PRINTS_SHARD):
            prints = np.zeros((min(_PRINTS_SHARD, count - start), BYTES), np.uint8)
            for i in range(len(prints)):
                if (file := self._files.path(start + i)).is_file():
                    prints[i] = fingerprint(smaller(file, 64))
                    prints[i, -1] |= not prints[i].any()  # a black picture is one too
                    pictures += 1
            array[start : start + len(prints)].write(prints).result()
        finish(marker, {"pictures": pictures})
        return pictures

    def _embed(self, passages: Sequence[Passage]) -> Float32[np.ndarray, "N D"]:
        parts, batch = [], self._config.embed_batch or _batch_size(self._encoder)
        for start in range(0, len(passages), 16 * batch):
            inputs = []
            for passage in passages[start : start + 16 * batch]:
                file = self._files.path(self._row)
                inputs.append(self._input(passage, file if file.is_file() else None))
                self._row += 1
            parts.append(self._encoder.embed(inputs, prefix="", batch_size=batch))
            self.embedded += len(inputs)
            self._bar.update(len(inputs))
        return np.concatenate(parts)

    def _input(self, passage: Passage, image: pathlib.Path | None) -> TextAndImage:
        """What of a row is embedded: all of it, or the picture alone where pictures look for pictures."""
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
    KB_BUILDERS.register(_kind)(Builder(PicturesConfig, build_pictures))
