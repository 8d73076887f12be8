"""Other authors' retrieval packages as knowledge bases. A package gets our chat model, encoder and passages.

DIR/passages         the passages
DIR/package          the package's own files
DIR.answers.sqlite   answers of the chat model, beside DIR, so that they survive rebuilds
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import pathlib
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32

from routerl_jax.core.config import Count, Fraction, Size, checked, from_config_dict
from routerl_jax.core.progress import Bar
from routerl_jax.core.types import Message, Passage
from routerl_jax.knowledge.base import KnowledgeBase
from routerl_jax.knowledge.build import Vectoriser
from routerl_jax.knowledge.builds import (
    VERSIONS,
    BuildReport,
    Clock,
    EncoderSettings,
    SplitSettings,
    changes,
    corpus_source,
    digest_of,
    is_built,
    report,
    stamp,
)
from routerl_jax.knowledge.corpus import corpus_files, read_corpus
from routerl_jax.knowledge.encoders import TextEncoder, encoder_digest, resolved_encoder, shared_encoder
from routerl_jax.knowledge.store import Embedding, Manifest, Store, StoredPassages, nested
from routerl_jax.knowledge.writer import StoreWriter
from routerl_jax.services.base import ChatModel
from routerl_jax.services.cache import SqliteCache
from routerl_jax.services.config import ChatModelConfig
from routerl_jax.services.load import CachedModel, chat_model

FILES = "package"
_EMBEDDING = "embedding"  # in kb.json's settings


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class PackagedConfig(EncoderSettings, SplitSettings):
    """The fields that the configurations of all such knowledge bases share."""

    llm: ChatModelConfig = dataclasses.field(default_factory=ChatModelConfig)  # answers the package's requests
    answer_tokens: Size = 2048  # most tokens of an answer
    # most words of the descriptions from the graph, which are the first of a search's k results; 0: k passages alone
    graph_words: Count = 150
    max_failures: Fraction = 0.05  # share of the answers that may fail during the build; beyond it the build stops


class Helpers:
    """The chat model and the encoder, as a package asks for them. Safe to use from several threads.

    Attributes:
      asked: number of questions to the chat model.
      failures: reasons why some of them have no answer.
    """

    def __init__(self, config: PackagedConfig, model: ChatModel, encoder: TextEncoder, embedding: Embedding) -> None:
        self.config, self.embedding = config, embedding
        self.asked = 0
        self.failures: list[str] = []
        self._model, self._encoder = model, encoder
        self._lock = threading.Lock()

    @property
    def model_name(self) -> str:
        """The chat model's."""
        return self._model.name

    def answer(self, conversation: Sequence[Message], schema: Mapping[str, Any] | None = None) -> str:
        """The chat model's answer. Raises ValueError if there is none."""
        (reply,) = self._model.complete([conversation], max_tokens=self.config.answer_tokens, schema=schema)
        with self._lock:
            self.asked += 1
            if reply.error is not None:
                self.failures.append(reply.error)
        if reply.error is not None:
            raise ValueError(f"{self._model.name}: {reply.error}")
        return reply.text

    def embed(self, texts: Sequence[str], *, query: bool) -> Float32[np.ndarray, "N D"]:
        """One vector per text, with the prefix of queries or of other texts."""
        prefix = self.embedding.query_prefix if query else self.embedding.passage_prefix
        size = {"batch_size": self.config.embed_batch} if self.config.embed_batch else {}
        return self._encoder.embed(list(texts), prefix=prefix, **size)


# Inserts passages, given by row and text, into new files of a package in a directory, and returns settings for opening it.
Insert = Callable[[pathlib.Path, Helpers, Iterable[tuple[int, str]]], Mapping[str, Any]]


class PackagedKB(KnowledgeBase, abc.ABC):
    """Searches with a package. The first result says what its graph knows (id `KIND#graph`), the others are passages.

    Results are in the package's order. It gives passages no scores, so their score is 1 / rank.

    Attributes:
      config_class: the class of the configuration.
    """

    config_class: type[PackagedConfig]

    def __init__(self, store: Store, helpers: Helpers) -> None:
        self.name = store.manifest.name
        self.store, self.helpers = store, helpers

    @classmethod
    def open(cls, store: Store, *, mesh: Mesh | None, index: str | None, encoder: str | TextEncoder | None) -> Self:
        """Opens a built store. Its index is the package's own, so it can't be replaced.

        Raises:
          ValueError: `index` is given, files are missing, the package is not installed, or the encoder is another one.
        """
        kind, files = store.manifest.kind, store.directory / FILES
        if index is not None:
            raise ValueError(f"{store.directory} is of kind {kind}, which has an index of its own: leave out index")
        if not files.is_dir():
            raise ValueError(f"{files} is missing. {store.hint}")
        config: PackagedConfig = from_config_dict(cls.config_class, nested(store.manifest.config))
        cache = SqliteCache(_answers(store.directory), max_bytes=None)
        model = CachedModel(chat_model(config.llm), cache, save_every=1)
        embedding, chosen = _embedding(store.manifest), encoder or config.encoder
        texts = shared_encoder(chosen, mesh, instead="") if isinstance(chosen, str) else chosen
        digest = encoder_digest(texts)
        if embedding.digest and digest and embedding.digest != digest:
            raise ValueError(
                f"{store.directory} was built with other weights or another tokenizer than {config.encoder!r} has now. "
                f"{store.hint}"
            )
        return cls(store, Helpers(config, model, texts, embedding))

    def __len__(self) -> int:
        return len(self.store)

    def results(self, sentences_by_kind: Sequence[Sequence[str]], rows: Sequence[int], k: int) -> list[Passage]:
        """The k best results.

        Args:
          sentences_by_kind: sentences of the graph, by kind (entities, relations, ..), the most important ones first.
          rows: passages, best first; repetitions are left out.
        """
        text = _text_of(sentences_by_kind, self.helpers.config.graph_words)
        graph = Passage(id=f"{self.store.manifest.kind}#graph", title="What the graph says", text=text)
        distinct = list(dict.fromkeys(rows))[:k]
        passages = self.store.passages.take(np.asarray(distinct, np.int64)) if distinct else []
        best = [*([graph] if text else []), *passages][:k]
        return [dataclasses.replace(passage, score=1 / rank) for rank, passage in enumerate(best, 1)]


def _text_of(sentences_by_kind: Sequence[Sequence[str]], words: int) -> str:
    """The first sentence of each kind, then the second, and so on, as long as there is room."""
    lines: list[str] = []
    for index in range(max(map(len, sentences_by_kind), default=0)):
        for sentences in sentences_by_kind:
            for sentence in sentences[index : index + 1]:
                words -= len(sentence.split())
                if words < 0:
                    return "\n".join(lines)
                lines.append(" ".join(sentence.split()))
    return "\n".join(lines)


def build_packaged(
    config: PackagedConfig,
    directory: str | pathlib.Path,
    insert: Insert,
    *,
    progress: bool = True,
    encoder: TextEncoder | None = None,
    llm: ChatModel | None = None,
) -> BuildReport:
    """Builds a knowledge base from `config.corpus`. After a kill, another call asks the chat model only for the rest.

    Texts that occur again are inserted once.

    Args:
      directory: directory of the knowledge base; it appears only when it is complete.
      encoder: embed with this object; `config.encoder` is only its name then.
      llm: answers instead of `config.llm` during the build.

    Raises:
      ValueError: a file, a row or a setting is wrong, or more answers failed than `max_failures` allows.
    """
    read = functools.partial(read_corpus, split=config.split)
    source = corpus_source(config.corpus, "the file of passages", read, check=corpus_files)
    config = dataclasses.replace(config, encoder=resolved_encoder(config.encoder))
    llm, model, clock = llm or chat_model(config.llm), encoder or shared_encoder(config.encoder), Clock()
    vectors = Vectoriser(config, model)
    embedding = dataclasses.replace(vectors.manifest, dim=vectors.width())
    fingerprint = digest_of([*VERSIONS, source.digest, embedding.digest, changes(config)])
    with StoreWriter(directory, fingerprint, overwrite=config.overwrite) as writer:
        built = is_built(writer, config, source)
        if not built or writer.existing is None or _embedding(writer.existing) != embedding:
            writer.check_target()
            count = source.write(writer, progress)
            clock.lap("read")
            shutil.rmtree(files := writer.scratch / FILES, ignore_errors=True)
            with contextlib.closing(SqliteCache(_answers(writer.directory), max_bytes=None)) as answers:
                helpers = Helpers(config, CachedModel(llm, answers, save_every=1), model, embedding)
                settings = dict(insert(files, helpers, _texts(writer.scratch, progress)))
            clock.lap("insert")
            failed = helpers.failures
            if len(failed) > config.max_failures * helpers.asked:
                raise ValueError(
                    f"{len(failed)} of {helpers.asked} answers failed, more than max_failures={config.max_failures} allows "
                    f"({'; '.join(failed[:3])}). The others are kept: mend the model and run the same command again, or "
                    "allow more failures"
                )
            settings |= {_EMBEDDING: dataclasses.asdict(embedding), "asked": helpers.asked, "failed": len(failed)}
            writer.commit(stamp(config, writer.directory, source, count=count, settings=settings))
    store = Store(writer.directory)
    numbers = {"answers": store.manifest.settings["asked"], "failed answers": store.manifest.settings["failed"]}
    return report(store, clock, ("passages", FILES), numbers=numbers, encoder=config.encoder, dim=embedding.dim)


def _texts(directory: pathlib.Path, progress: bool) -> Iterator[tuple[int, str]]:
    """(row, title and text) of the passages in DIRECTORY/passages, without repetitions of texts."""
    stored, seen_texts = StoredPassages(directory), set[str]()
    with Bar(total=len(stored), desc="inserting", unit="passage", disable=not progress) as bar:
        for row, passage in enumerate(stored):
            text = f"{passage.title}\n{passage.text}".strip()
            if text not in seen_texts:
                seen_texts.add(text)
                yield row, text
            bar.update(1)


def _embedding(manifest: Manifest) -> Embedding:
    """How texts became vectors, for the settings: the manifest's own entry is for vectors in the store."""
    return Embedding(**manifest.settings[_EMBEDDING])


def _answers(directory: pathlib.Path) -> pathlib.Path:
    return directory.with_name(f"{directory.name}.answers.sqlite")
