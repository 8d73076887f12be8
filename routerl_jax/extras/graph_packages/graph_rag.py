"""GraphRAG (Edge et al., arXiv 2404.16130) through its authors' package, graphrag (packaged.py): its local search."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib
import os
import pathlib
import types
import uuid
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from routerl_jax.core.config import Count, Size, checked
from routerl_jax.core.packages import needs
from routerl_jax.core.types import Message, Passage
from routerl_jax.extras.graph_packages.packaged import FILES, Helpers, PackagedConfig, PackagedKB, build_packaged
from routerl_jax.knowledge.builds import Builder, BuildReport
from routerl_jax.knowledge.store import Store

_TYPE = "routerl_jax"  # of our models in the package's configuration
_ENTITIES = "entity_description"  # the package's vectors of entities
_helpers: weakref.WeakValueDictionary[str, Helpers] = (
    weakref.WeakValueDictionary()
)  # by the key in the package's configuration


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class GraphRAGConfig(PackagedConfig):
    """Configuration of `build_graphrag`."""

    kind: str = "graphrag"  # kind of the knowledge base
    chunk_tokens: Size = 1200  # longer passages are split for the extraction
    gleanings: Count = 1  # further extractions of a passage, for what the first one missed
    community_level: Count = 2  # communities down to this level of the hierarchy are searched
    top_k: Size = 10  # entities that a search begins from, and relations that it shows

    def __post_init__(self) -> None:
        if self.kind != "graphrag":
            raise ValueError(f"kind={self.kind!r} is not 'graphrag'")


class GraphRAGKB(PackagedKB):
    """Searches with GraphRAG's local search: entities near the query, their relations, reports of their communities, and their
    passages. A search asks the chat model nothing."""

    config_class = GraphRAGConfig

    def __init__(self, store: Store, helpers: Helpers) -> None:
        super().__init__(store, helpers)
        self._engine, self._rows = _opened(store.directory / FILES, helpers)

    def _search(self, queries: list[str], k: int) -> list[list[Passage]]:
        return [self._search_one(query, k) for query in queries]

    def _search_one(self, query: str, k: int) -> list[Passage]:
        settings = self._engine.context_builder_params
        context = self._engine.context_builder.build_context(query, **settings).context_records
        records = {name: frame.to_dict("records") for name, frame in context.items()}
        entities = [f"{record['entity']}: {record['description']}" for record in records.get("entities", ())]
        relations = [
            f"{record['source']} and {record['target']}: {record['description']}"
            for record in records.get("relationships", ())
        ]
        reports = [record["content"] for record in records.get("reports", ())]
        return self.results(
            (entities, relations, reports), [self._rows[str(record["id"])] for record in records.get("sources", ())], k
        )


def build_graphrag(
    config: GraphRAGConfig, directory: str | pathlib.Path, *, progress: bool = True, **options: Any
) -> BuildReport:
    """`packaged.build_packaged` with GraphRAG. Raises ValueError also if the package is missing."""
    _package()  # raises before anything is written
    return build_packaged(config, directory, _inserted, progress=progress, **options)


def _inserted(files: pathlib.Path, helpers: Helpers, texts: Iterable[tuple[int, str]]) -> Mapping[str, Any]:
    package = _package()
    rows = [
        {"id": str(row), "title": str(row), "text": text, "creation_date": "", "raw_data": None} for row, text in texts
    ]
    settings = _settings(files, helpers)
    with _quiet():
        outputs = asyncio.run(package.build_index(settings, input_documents=package.DataFrame(rows)))
    for output in outputs:
        if output.error is not None:
            reasons = "; ".join(helpers.failures[:3]) or str(output.error)
            raise ValueError(f"GraphRAG's step {output.workflow!r} failed ({reasons}). The answers so far are kept")
    return {}


def _opened(files: pathlib.Path, helpers: Helpers) -> tuple[Any, dict[str, int]]:
    """The search engine on the package's files, and the rows of our passages by its short ids of texts."""
    package, config, settings = _package(), helpers.config, _settings(files, helpers)
    assert isinstance(config, GraphRAGConfig)
    names = ("entities", "communities", "community_reports", "text_units", "relationships")
    try:
        tables = {name: package.read_parquet(files / "output" / f"{name}.parquet") for name in names}
    except (OSError, ValueError) as error:
        raise ValueError(f"{files} is damaged ({error}); build the knowledge base again") from error
    communities, level, read = tables["communities"], config.community_level, package.read
    with _quiet():
        engine = package.get_local_search_engine(
            config=settings,
            reports=read.read_indexer_reports(tables["community_reports"], communities, level),
            text_units=read.read_indexer_text_units(tables["text_units"]),
            entities=read.read_indexer_entities(tables["entities"], communities, level),
            relationships=read.read_indexer_relationships(tables["relationships"]),
            covariates={},
            description_embedding_store=package.get_embedding_store(
                config=settings.vector_store, embedding_name=_ENTITIES
            ),
            response_type="",
        )
    units = tables["text_units"]
    return engine, dict(zip(map(str, units["human_readable_id"]), map(int, units["document_id"])))


def _settings(files: pathlib.Path, helpers: Helpers) -> Any:
    """The package's configuration, with our models."""
    package, config = _package(), helpers.config
    assert isinstance(config, GraphRAGConfig)
    _helpers[key := uuid.uuid4().hex] = helpers
    model = {"type": _TYPE, "model_provider": _TYPE, "model": helpers.model_name, "metrics": None, "key": key}

    def storage(name: str) -> dict[str, str]:
        return {"type": "file", "base_dir": str(files / name)}

    return package.GraphRagConfig(
        completion_models={"default_completion_model": model},
        embedding_models={"default_embedding_model": model},
        concurrent_requests=config.llm.concurrency,
        input_storage=storage("input"),
        output_storage=storage("output"),
        update_output_storage=storage("update"),
        reporting=storage("logs"),
        cache={"type": "none"},  # ours keeps the answers
        vector_store={"type": "lancedb", "db_uri": str(files / "vectors"), "vector_size": helpers.embedding.dim},
        chunking={"type": "tokens", "size": config.chunk_tokens, "overlap": 100, "encoding_model": "cl100k_base"},
        extract_graph={"max_gleanings": config.gleanings},
        local_search={"top_k_entities": config.top_k, "top_k_relationships": config.top_k},
    )


def _completions(package: Any) -> type:
    """Our chat model as the package's class of models."""

    class Completions(package.LLMCompletion):
        def __init__(self, *, key: str, tokenizer: Any, metrics_store: Any, **_: Any) -> None:
            self._helpers, self._tokenizer, self._metrics_store = _helpers[key], tokenizer, metrics_store

        def completion(self, /, **arguments: Any) -> Any:
            messages, form = arguments["messages"], arguments.get("response_format")
            spoken: list[dict[str, Any]] = (
                [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
            )
            conversation = [Message(role=message["role"], content=message["content"]) for message in spoken]
            text = self._helpers.answer(conversation, form.model_json_schema() if form is not None else None)
            response = package.create_completion_response(text)
            if form is not None:
                response.formatted_response = package.structure_completion_response(text, form)
            return response

        async def completion_async(self, /, **arguments: Any) -> Any:
            return await asyncio.to_thread(functools.partial(self.completion, **arguments))

        metrics_store = property(lambda self: self._metrics_store)
        tokenizer = property(lambda self: self._tokenizer)

    return Completions


def _embeddings(package: Any) -> type:
    """Our encoder as the package's class of encoders. It embeds a query alone, and passages, entities and reports in lists."""

    class Embeddings(package.LLMEmbedding):
        def __init__(self, *, key: str, tokenizer: Any, metrics_store: Any, **_: Any) -> None:
            self._helpers, self._tokenizer, self._metrics_store = _helpers[key], tokenizer, metrics_store

        def embedding(self, /, **arguments: Any) -> Any:
            return self._embedded(arguments["input"], query=True)

        async def embedding_async(self, /, **arguments: Any) -> Any:
            return await asyncio.to_thread(self._embedded, arguments["input"], query=False)

        def _embedded(self, texts: Sequence[str], query: bool) -> Any:
            vectors = self._helpers.embed(texts, query=query)
            response = package.create_embedding_response([], batch_size=len(texts))
            for item, vector in zip(response.data, np.asarray(vectors, float)):
                item.embedding = vector.tolist()
            return response

        metrics_store = property(lambda self: self._metrics_store)
        tokenizer = property(lambda self: self._tokenizer)

    return Embeddings


@functools.cache
def _package() -> Any:
    """The parts of the package that are used here, with our models registered. Raises ValueError if it is not installed."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the web for prices

    def of(module: str) -> Any:
        return importlib.import_module(module)

    with needs("GraphRAG", "graphrag"), _quiet():
        llms = pathlib.Path(of("litellm").__file__).parent
        # a vocabulary that lies in litellm; else it would be downloaded
        os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(llms / "litellm_core_utils" / "tokenizers"))
        completion, embedding = of("graphrag_llm.completion"), of("graphrag_llm.embedding")
        package = types.SimpleNamespace(
            build_index=of("graphrag.api").build_index,
            GraphRagConfig=of("graphrag.config.models.graph_rag_config").GraphRagConfig,
            get_local_search_engine=of("graphrag.query.factory").get_local_search_engine,
            get_embedding_store=of("graphrag.utils.api").get_embedding_store,
            read=of("graphrag.query.indexer_adapters"),
            LLMCompletion=completion.LLMCompletion,
            LLMEmbedding=embedding.LLMEmbedding,
            create_completion_response=of("graphrag_llm.utils").create_completion_response,
            create_embedding_response=of("graphrag_llm.utils").create_embedding_response,
            structure_completion_response=of("graphrag_llm.utils").structure_completion_response,
            DataFrame=of("pandas").DataFrame,
            read_parquet=of("pandas").read_parquet,
        )
    completion.register_completion(_TYPE, _completions(package))
    embedding.register_embedding(_TYPE, _embeddings(package))
    return package


def _quiet() -> warnings.catch_warnings:
    return warnings.catch_warnings(action="ignore")


BUILDER = Builder(GraphRAGConfig, build_graphrag)
