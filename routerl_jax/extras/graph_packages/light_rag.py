"""LightRAG (Guo et al., arXiv 2410.05779) through its authors' package, lightrag-hku (packaged.py)."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib
import itertools
import logging
import pathlib
import threading
import types
import uuid
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from jaxtyping import Float32
from numpy import ndarray

from routerl_jax.core.config import Count, Size, checked
from routerl_jax.core.packages import needs
from routerl_jax.core.types import Message, Passage
from routerl_jax.extras.graph_packages.packaged import FILES, Helpers, PackagedConfig, PackagedKB, build_packaged
from routerl_jax.knowledge.builds import Builder, BuildReport
from routerl_jax.knowledge.store import Store

_WORKSPACE = "workspace"  # in kb.json's settings
_LETTERS = 4  # letters per token. The package counts tokens; its own tokenizer needs a download, so ours counts letters
_AT_ONCE = 64  # passages inserted together
_SHORTEST = 3  # letters of a query; the package refuses shorter ones
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class LightRAGConfig(PackagedConfig):
    """Configuration of `build_lightrag`."""

    kind: str = "lightrag"  # kind of the knowledge base
    gleanings: Count = 1  # further extractions of a passage, for what the first one missed
    # local: entities; global: relations; hybrid: both; mix: both and passages by their vectors; naive: passages alone
    mode: Literal["local", "global", "hybrid", "mix", "naive"] = "mix"
    top_k: Size = 40  # entities, and relations, that a search begins from

    def __post_init__(self) -> None:
        if self.kind != "lightrag":
            raise ValueError(f"kind={self.kind!r} is not 'lightrag'")


class LightRAGKB(PackagedKB):
    """Searches with LightRAG. A search asks the chat model for the keywords of its query, except in the mode `naive`. Answers
    are kept, so the same query asks once."""

    config_class = LightRAGConfig

    def __init__(self, store: Store, helpers: Helpers) -> None:
        super().__init__(store, helpers)
        self._rag = _run(_opened(store.directory / FILES, str(store.manifest.settings[_WORKSPACE]), helpers))

    def _search(self, queries: list[str], k: int) -> list[list[Passage]]:
        async def search_all() -> list[list[Passage]]:
            return list(await asyncio.gather(*(self._search_one(query, k) for query in queries)))

        return _run(search_all())

    async def _search_one(self, query: str, k: int) -> list[Passage]:
        config = self.helpers.config
        assert isinstance(config, LightRAGConfig)
        parameters = _package().QueryParam(
            mode=config.mode,
            top_k=config.top_k,
            chunk_top_k=k,
            max_entity_tokens=6000 * _LETTERS,
            max_relation_tokens=8000 * _LETTERS,
            max_total_tokens=30000 * _LETTERS,
            enable_rerank=False,
        )
        reply = await self._rag.aquery_data(query.ljust(_SHORTEST, "."), parameters)
        data = reply.get("data") or {}
        entities = [f"{item['entity_name']}: {item['description']}" for item in data.get("entities", [])]
        relations = [
            f"{item['src_id']} and {item['tgt_id']}: {item['description']}" for item in data.get("relationships", [])
        ]
        sentences_by_kind = [[line.replace("<SEP>", " ") for line in lines] for lines in (entities, relations)]
        return self.results(sentences_by_kind, [int(chunk["file_path"]) for chunk in data.get("chunks", [])], k)


def build_lightrag(
    config: LightRAGConfig, directory: str | pathlib.Path, *, progress: bool = True, **options: Any
) -> BuildReport:
    """`packaged.build_packaged` with LightRAG. Raises ValueError also if the package is missing."""
    _package()  # raises before anything is written
    return build_packaged(config, directory, _inserted, progress=progress, **options)


def _inserted(files: pathlib.Path, helpers: Helpers, texts: Iterable[tuple[int, str]]) -> Mapping[str, Any]:
    workspace = uuid.uuid4().hex[:12]  # the package keeps what it has read in the process, by this name

    async def work() -> None:
        rag, remaining = await _opened(files, workspace, helpers), iter(texts)
        try:
            while batch := list(itertools.islice(remaining, _AT_ONCE)):
                names = [str(row) for row, _ in batch]
                await rag.ainsert([text for _, text in batch], ids=names, file_paths=names)
        finally:
            await rag.finalize_storages()

    _run(work())
    return {_WORKSPACE: workspace}


async def _opened(files: pathlib.Path, workspace: str, helpers: Helpers) -> Any:
    """The package's object on files in a directory, which it makes if they are missing."""
    package, config = _package(), helpers.config
    assert isinstance(config, LightRAGConfig)

    async def answer(prompt: str, system_prompt: str | None = None, history_messages: Any = (), **_: Any) -> str:
        conversation = [Message(role="system", content=system_prompt)] if system_prompt else []
        conversation += [
            Message(role=message["role"], content=message["content"]) for message in history_messages or ()
        ]
        return await asyncio.to_thread(helpers.answer, [*conversation, Message(role="user", content=prompt)])

    async def embed(texts: list[str], context: str = "document") -> Float32[ndarray, "N D"]:
        return await asyncio.to_thread(functools.partial(helpers.embed, texts, query=context == "query"))

    rag = package.LightRAG(
        working_dir=str(files),
        workspace=workspace,
        llm_model_func=answer,
        llm_model_name=helpers.model_name,
        llm_model_max_async=config.llm.concurrency,
        enable_llm_cache=False,  # ours keeps the answers
        enable_llm_cache_for_entity_extract=False,
        entity_extract_max_gleaning=config.gleanings,
        embedding_func=package.EmbeddingFunc(embedding_dim=helpers.embedding.dim, func=embed, supports_asymmetric=True),
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


@functools.cache
def _package() -> Any:
    """The parts of the package that are used here. Raises ValueError if it is not installed."""
    with needs("LightRAG", "lightrag"):
        main, utils = map(importlib.import_module, ("lightrag", "lightrag.utils"))
    logging.getLogger("lightrag").setLevel(logging.WARNING)  # it has a line for every query
    return types.SimpleNamespace(
        LightRAG=main.LightRAG,
        QueryParam=main.QueryParam,
        EmbeddingFunc=utils.EmbeddingFunc,
        Tokenizer=utils.Tokenizer,
    )


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop, in a thread of its own, of all objects of the package: its locks belong to one loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="lightrag", daemon=True).start()
    return loop


def _run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, _loop()).result()


BUILDER = Builder(LightRAGConfig, build_lightrag)
