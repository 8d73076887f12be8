"""Trees of summaries, as RAPTOR's collapsed tree (Sarthi et al. 2024, arXiv 2401.18059): all levels are ranked together.

corpus -> leaves -> [embeddings -> groups -> summaries by a chat model] level by level -> one index of all

DIR/passages, DIR/embeddings    leaves first, in the corpus's order, then the summaries of each level
DIR/tree.jsonl.gz               a row per summary: `{id, level, children}`
DIR.summaries.sqlite            answers of the language model, beside DIR, so that they survive rebuilds

Groups are soft clusters by mixtures of Gaussians in few dimensions (section 3): first coarse ones over all, then fine ones
within each. RAPTOR reduces dimensions with UMAP. We use principal components, which need no further package and are the same
in every run. The coarse clusters use the directions of largest variance over all texts, the fine ones those within their
cluster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import itertools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging
from jaxtyping import Float, Int

from routerl_jax.core.config import Fraction, PositiveFraction, Seed, Size, checked
from routerl_jax.core.files import atomic_file
from routerl_jax.core.packages import needs
from routerl_jax.core.progress import Bar
from routerl_jax.core.rows import read_rows
from routerl_jax.core.types import Message, Passage
from routerl_jax.knowledge.build import Vectoriser
from routerl_jax.knowledge.builds import (
    VERSIONS,
    Builder,
    BuildReport,
    Clock,
    EncoderSettings,
    Source,
    SplitSettings,
    corpus_source,
    digest_of,
    is_built,
    report,
    stamp,
    write_index,
)
from routerl_jax.knowledge.corpus import corpus_files, passage_text, read_corpus
from routerl_jax.knowledge.dense import DenseKB
from routerl_jax.knowledge.encoders import TextEncoder, resolved_encoder, shared_encoder
from routerl_jax.knowledge.index import AUTO, INDEXES, backend_of
from routerl_jax.knowledge.store import EMBEDDINGS, INDEX, Store, StoredArray, StoredPassages
from routerl_jax.knowledge.tables import count_words
from routerl_jax.knowledge.writer import Part, StoreWriter, left_out
from routerl_jax.services.base import ChatModel
from routerl_jax.services.cache import SqliteCache
from routerl_jax.services.config import ChatModelConfig
from routerl_jax.services.load import CachedModel, chat_model

# added to covariances, in units of the points' mean variance: with less, BIC likes clusters of two or three points, whose
# likelihood has no bound
_FLOOR = 1e-2
_NOTHING = 1e-5  # of the widest direction: as little counts as no variation
_PATIENCE = 8  # numbers of clusters without a better BIC after which no larger ones are tried


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """How texts are grouped.

    Attributes:
      dimensions: number of principal components.
      most: most clusters of one mixture; BIC decides how many.
      share: probability above which a text belongs to a cluster. It always belongs to its likeliest one.
    """

    dimensions: int = 10
    most: int = 50
    share: float = 0.1


def soft_clusters(
    vectors: Float[np.ndarray, "N D"],
    lengths: Sequence[int],
    longest: int,
    settings: ClusterSettings,
    seed: int,
) -> list[Int[np.ndarray, " M"]]:
    """Row numbers of each cluster, ascending; every row is in at least one. Equal arguments give equal clusters.

    Args:
      lengths: lengths of the rows' texts. A cluster with a total above `longest` is divided further, down to single rows.
    """
    rows = np.arange(len(vectors))
    clusters: list[Int[np.ndarray, " M"]] = []
    for rough in _mixed(vectors, rows, settings, seed):
        for fine in _mixed(vectors, rough, settings, seed):
            clusters += _short(vectors, fine, np.asarray(lengths), longest, settings, seed)
    distinct = {cluster.tobytes(): cluster for cluster in clusters}
    return sorted(distinct.values(), key=lambda cluster: cluster.tolist())


def reduced(vectors: Float[np.ndarray, "N D"], dimensions: int) -> Float[np.ndarray, "N d"]:
    """The coordinates along the directions of largest variance; at most N - 1 directions, and none without variance."""
    centred = np.asarray(vectors, np.float64) - np.mean(vectors, axis=0, dtype=np.float64)
    tall = len(centred) > centred.shape[1]
    _, spread, directions = np.linalg.svd(np.linalg.qr(centred, mode="r") if tall else centred, full_matrices=False)
    significant = np.flatnonzero(spread > spread[0] * _NOTHING)[: min(dimensions, len(centred) - 1)]
    directions = directions[significant].T
    signs = np.sign(directions[np.abs(directions).argmax(0), np.arange(len(significant))])  # which are left open
    return centred @ (directions * signs)


def best_mixture(points: Float[np.ndarray, "N d"], most: int, seed: int) -> Float[np.ndarray, "N K"]:
    """Each point's probability of each cluster, by the mixture with the lowest BIC among 1, 2, .. `most` Gaussians with full
    covariances. The search stops when BIC no longer falls.

    Raises:
      ValueError: scikit-learn is missing.
    """
    with needs("a tree of summaries", "tree"):
        from sklearn.mixture import GaussianMixture

    floor = _FLOOR * max(float(points.var(0).mean()), np.finfo(np.float64).tiny)
    best, shares, waited = np.inf, np.ones((len(points), 1)), 0
    distinct = len(np.unique(points, axis=0))
    for clusters in range(1, min(most, distinct, len(points) - 1) + 1):
        mixture = GaussianMixture(clusters, reg_covar=floor, random_state=seed).fit(points)
        waited += 1
        if (criterion := float(mixture.bic(points))) < best:
            best, shares, waited = criterion, mixture.predict_proba(points), 0
        if waited > _PATIENCE:
            break
    return shares


def _mixed(
    vectors: Float[np.ndarray, "N D"], rows: Int[np.ndarray, " M"], settings: ClusterSettings, seed: int
) -> list[Int[np.ndarray, " L"]]:
    """Clusters of some rows; a single one if there are hardly more rows than dimensions, or all are equal."""
    if len(rows) <= settings.dimensions + 1:
        return [rows]
    points = reduced(vectors[rows], settings.dimensions)
    if not points.shape[1]:
        return [rows]
    belongs = best_mixture(points, settings.most, seed)
    members = (belongs > settings.share) | (belongs == belongs.max(1, keepdims=True))
    return [rows[column] for column in members.T if column.any()]


def _short(
    vectors: Float[np.ndarray, "N D"],
    rows: Int[np.ndarray, " M"],
    lengths: Int[np.ndarray, " N"],
    longest: int,
    settings: ClusterSettings,
    seed: int,
) -> list[Int[np.ndarray, " L"]]:
    """The cluster, or smaller ones if its texts are too long together."""
    if len(rows) == 1 or lengths[rows].sum() <= longest:
        return [rows]
    parts = _mixed(vectors, rows, settings, seed)
    if any(len(part) == len(rows) for part in parts):  # the mixture does not split it
        parts = _halves(vectors, rows)
    return [short for part in parts for short in _short(vectors, part, lengths, longest, settings, seed)]


def _halves(vectors: Float[np.ndarray, "N D"], rows: Int[np.ndarray, " M"]) -> list[Int[np.ndarray, " L"]]:
    """Splits rows in two along the direction of largest variance; in their order if there is none."""
    points = reduced(vectors[rows], 1)
    order = np.argsort(points[:, 0], kind="stable") if points.shape[1] else np.arange(len(rows))
    half = len(rows) // 2
    return [np.sort(rows[order[:half]]), np.sort(rows[order[half:]])]


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class TreeConfig(EncoderSettings, SplitSettings):
    """Configuration of `build_tree`: passages, summaries of groups of them, summaries of groups of summaries, and so on."""

    kind: str = "tree"  # kind of the knowledge base
    llm: ChatModelConfig = dataclasses.field(default_factory=ChatModelConfig)  # writes the summaries
    summary_words: Size = 100  # words of a summary, in the prompt; the answer may have twice as many tokens
    read_words: Size = 2500  # most words of the texts of one summary (RAPTOR: 3,500 tokens)
    dimensions: Size = 10  # principal components in which texts are grouped
    most_clusters: Size = 50  # most clusters of one mixture of Gaussians; BIC chooses the number
    share: PositiveFraction = 0.1  # probability above which a text is in a group; it is always in its likeliest one
    levels: Size = 5  # most levels of summaries; fewer if at most `dimensions` + 1 texts are left
    # share of a level's summaries that may fail; beyond it the build stops, to be resumed
    max_failures: Fraction = 0.05
    seed: Seed = 0  # seed of the clusters
    index: str = AUTO  # index of the vectors, as in knowledge.build
    shard_size: Size = 8192  # vectors of a file; the progress of one that takes long is saved every minute

    def __post_init__(self) -> None:
        if self.kind != "tree":
            raise ValueError(f"kind={self.kind!r} is not 'tree'")

    @property
    def clusters(self) -> ClusterSettings:
        """How texts are grouped."""
        return ClusterSettings(dimensions=self.dimensions, most=self.most_clusters, share=self.share)


PROMPT = 1  # version of the prompt below; part of the cache's key
_SECOND_TEMPERATURE = 0.5  # temperature of the second attempt; greedy decoding would repeat the first answer
_TOKENS_PER_WORD = 2  # allows answers that are longer than requested
_TASK = (
    "Below are texts that belong together. Write one summary of them, of at most {words} words. Keep the names, dates, "
    "places and numbers, and say how things of different texts hang together. Write nothing that the texts don't say, and "
    "reply with the summary alone."
)


def summaries(
    model: ChatModel, groups: Sequence[Sequence[Passage]], *, words: int
) -> tuple[list[str | None], list[str]]:
    """One summary per group (None if it failed), and the reasons of failures in order. After an empty answer, the model is
    asked once more.

    Args:
      words: words of a summary, in the prompt.
    """
    task, tokens = _TASK.format(words=words), _TOKENS_PER_WORD * words
    prompts = [[Message(role="user", content="\n\n".join([task, *map(passage_text, group)]))] for group in groups]
    answers = model.complete(prompts, max_tokens=tokens) if prompts else []
    empty = [i for i, answer in enumerate(answers) if answer.error is None and not answer.text.strip()]
    if empty:
        again = model.complete(
            [prompts[i] for i in empty], max_tokens=tokens, temperature=_SECOND_TEMPERATURE, sample=1
        )
        for i, answer in zip(empty, again):
            answers[i] = answer
    texts: list[str | None] = []
    failures: list[str] = []
    for answer in answers:
        text = " ".join(answer.text.split())
        texts.append(text or None)
        if not text:
            failures.append(answer.error or "the answer is empty")
    return texts, failures


TREE = "tree.jsonl.gz"


class TreeKB(DenseKB):
    """Finds passages and their summaries by the inner product of embeddings.

    RAPTOR takes the best results up to 2,000 tokens; here k of the search is their number.
    """

    @functools.cached_property
    def children(self) -> Mapping[str, tuple[str, ...]]:
        """The children of each summary, by its id: passages, or summaries of the level below."""
        path = self.store.directory / TREE
        try:
            return {row["id"]: tuple(row["children"]) for _, row in read_rows(path)}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged or missing ({error}). {self.store.hint}") from error

    def leaves(self, name: str) -> tuple[str, ...]:
        """Ids of the passages below a summary, each once; for a passage, its own id."""
        below = self.children.get(name)
        return (
            (name,) if below is None else tuple(dict.fromkeys(leaf for child in below for leaf in self.leaves(child)))
        )


_SAVE_EVERY = 16  # summaries between two saves; a killed build may have to repeat these
_SUMMARY = "summary"  # ids of summaries begin so


def build_tree(
    config: TreeConfig,
    directory: str | pathlib.Path,
    *,
    progress: bool = True,
    encoder: TextEncoder | None = None,
    llm: ChatModel | None = None,
) -> BuildReport:
    """Builds a tree of summaries over `config.corpus` (RAPTOR, arXiv 2401.18059). After a kill, another call continues.

    Args:
      directory: directory of the knowledge base; it appears only when it is complete.
      encoder: embed with this object; `config.encoder` is only its name then.
      llm: writes the summaries instead of `config.llm`.

    Raises:
      ValueError: a file, a row or a setting is wrong (names it), or more summaries failed than `max_failures` allows.
    """
    read = functools.partial(read_corpus, split=config.split)
    source = corpus_source(config.corpus, "the file of passages", read, check=corpus_files)
    config = dataclasses.replace(config, encoder=resolved_encoder(config.encoder))
    llm, clock = llm or chat_model(config.llm), Clock()
    embedding = Vectoriser(config, encoder or shared_encoder(config.encoder))
    manifest = embedding.manifest
    parts: list[Any] = [
        *VERSIONS,
        "tree",
        PROMPT,
        source.digest,
        manifest.encoder,
        manifest.digest,
        manifest.passage_prefix,
    ]
    parts += [llm.name, dict(llm.settings), config.shard_size, config.passage_words, config.least_words]
    parts += [config.summary_words, config.read_words, config.levels, config.seed, dataclasses.asdict(config.clusters)]
    with StoreWriter(directory, digest_of(parts), overwrite=config.overwrite) as writer:
        if not is_built(writer, config, source, manifest):
            INDEXES.get(backend_of(config.index)).require()
            writer.check_target()
            path = writer.directory.with_name(f"{writer.directory.name}.summaries.sqlite")
            with contextlib.closing(SqliteCache(path, max_bytes=None)) as cache:
                model = CachedModel(llm, cache, save_every=_SAVE_EVERY)
                _Build(config, writer, model, embedding, clock, progress).run(source)
    store = Store(writer.directory)
    settings = store.manifest.settings
    return report(
        store,
        clock,
        ("passages", EMBEDDINGS, INDEX),
        numbers={"embedded": embedding.embedded, "cut": embedding.cut, "summaries": sum(settings["levels"][1:])},
        failed=settings["failed"],
        encoder=config.encoder,
        dim=store.embeddings.shape[1],
        index=str(store.manifest.index["backend"]),
        notes={"levels": ", ".join(map(str, settings["levels"]))},
    )


class _Build:
    """The stages of `build_tree`. The parts that an earlier run has finished are skipped."""

    def __init__(
        self,
        config: TreeConfig,
        writer: StoreWriter,
        llm: ChatModel,
        embedding: Vectoriser,
        clock: Clock,
        progress: bool,
    ) -> None:
        self._config, self._writer, self._llm, self._embedding = config, writer, llm, embedding
        self._clock, self._progress = clock, progress

    def run(self, source: Source) -> None:
        config, writer = self._config, self._writer
        counts = [source.write(self._part(0), self._progress)]
        self._clock.lap("read")
        failed: dict[str, str] = {}
        rows: list[dict[str, Any]] = []
        self._embed(0)
        while counts[-1] > config.dimensions + 1 and len(counts) <= config.levels:
            summarised = self._summarised(len(counts), failed)
            if not summarised or len(summarised) >= counts[-1]:  # nothing is left to summarise
                break
            level = len(counts)
            counts.append(self._part(level).passages(summary for summary, _ in summarised))
            rows += [{"id": summary.id, "level": level, "children": children} for summary, children in summarised]
            self._embed(level)
        index = self._join(len(counts))
        with atomic_file(writer.scratch / TREE) as output, gzip.GzipFile("", "wb", fileobj=output, mtime=0) as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        manifest = stamp(
            config,
            writer.directory,
            source,
            count=sum(counts),
            embedding=dataclasses.replace(self._embedding.manifest, dim=self._embedding.width()),
            index=index,
            settings={"levels": counts, "failed": failed},
        )
        writer.commit(manifest, drop=[self._part(level).directory.name for level in range(len(counts))])

    def _part(self, level: int) -> Part:
        return self._writer.part(f"level-{level}")

    def _embed(self, level: int) -> None:
        shards = self._part(level).embeddings(self._embedding.width(), self._config.shard_size)
        with shards.bar(f"embedding level {level}", "text", self._progress) as self._embedding.bar:
            shards.write(self._embedding)
        self._clock.lap("embed")

    def _summarised(self, level: int, failed: dict[str, str]) -> list[tuple[Passage, list[str]]]:
        """The summaries of a level with their children's ids, without failed ones."""
        config, below = self._config, self._part(level - 1).directory
        nodes = list(StoredPassages(below))
        vectors = StoredArray(below / EMBEDDINGS).read(0, len(nodes))
        lengths = [count_words(f"{node.title} {node.text}") for node in nodes]
        groups = soft_clusters(vectors, lengths, config.read_words, config.clusters, config.seed)
        self._clock.lap("group")
        texts, failures = self._ask([[nodes[row] for row in group] for group in groups], level)
        self._clock.lap("summarise")
        if len(failures) > config.max_failures * len(groups):
            raise ValueError(
                f"{len(failures)} of {len(groups)} summaries of level {level} failed, more than "
                f"max_failures={config.max_failures} allows ({'; '.join(failures[:3])}). What succeeded is kept: mend the "
                "model and run the same command again, or allow more failures"
            )
        reasons, pairs = iter(failures), []
        for number, (group, text) in enumerate(zip(groups, texts)):
            name = f"{_SUMMARY}#{level}.{number}"
            if text is None:
                failed[name] = next(reasons)
            else:
                pairs.append((Passage(id=name, title="", text=text), [nodes[row].id for row in group]))
        if failures:
            logging.warning("%d of %d summaries of level %d failed: %s", len(failures), len(groups), level, failures)
        return pairs

    def _ask(self, groups: Sequence[Sequence[Passage]], level: int) -> tuple[list[str | None], list[str]]:
        all_texts: list[str | None] = []
        failures: list[str] = []
        with Bar(total=len(groups), desc=f"summaries of level {level}", disable=not self._progress) as bar:
            for start in range(0, len(groups), _SAVE_EVERY):
                batch = groups[start : start + _SAVE_EVERY]
                texts, errors = summaries(self._llm, batch, words=self._config.summary_words)
                all_texts, failures = all_texts + texts, failures + errors
                bar.update(len(batch))
        return all_texts, failures

    def _join(self, levels: int) -> dict[str, Any]:
        """Joins all levels in one store with one index (the collapsed tree). Returns the index's entry for the manifest."""
        config, writer = self._config, self._writer
        parts = [self._part(level).directory for level in range(levels)]
        writer.passages(itertools.chain.from_iterable(map(StoredPassages, parts)), left_out(parts[0]))
        arrays = [StoredArray(part / EMBEDDINGS) for part in parts]
        firsts = np.cumsum([0, *map(len, arrays)])

        def rows(start: int, stop: int) -> np.ndarray:
            bounds = [
                (max(start - first, 0), min(stop - first, len(passages))) for first, passages in zip(firsts, arrays)
            ]
            return np.concatenate([passages.read(a, b) for passages, (a, b) in zip(arrays, bounds) if a < b])

        writer.embeddings(arrays[0].shape[1], config.shard_size).write_rows(rows)
        index = write_index(writer, backend_of(config.index))
        self._clock.lap("index")
        return index


BUILDER = Builder(TreeConfig, build_tree)
