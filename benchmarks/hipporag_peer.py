"""HippoRAG's own code on the triples and vectors of a graph knowledge base of ours.

Its graph construction, fact linking and `retrieve` run unchanged, from a checkout that the caller names. What they need
around them is put in place here: embeddings come from our store and our encoder (one query a call), the recognition filter
keeps every fact (as RouteRAG uses it), and third-party modules that only its hosted models need and that are not installed
are empty shells.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import json
import logging
import pathlib
import sys
import types
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np

from routerl_jax.core.types import Passage
from routerl_jax.knowledge.corpus import passage_text
from routerl_jax.knowledge.graph.build import TRIPLES
from routerl_jax.knowledge.graph.kb import ENTITIES, GraphKB
from routerl_jax.knowledge.store import EMBEDDINGS, StoredArray, StoredPassages


class HippoRag:
    """The reference, indexed with what a knowledge base of ours was built from."""

    def __init__(self, source: pathlib.Path, kb: GraphKB, scratch: pathlib.Path) -> None:
        module = _module(source)
        misc = importlib.import_module("hipporag.utils.misc_utils")
        config = importlib.import_module("hipporag.utils.config_utils").BaseConfig()
        store = kb.store
        passages = store.passages.read(0, len(store))
        texts = [passage_text(passage) for passage in passages]
        self.passages: dict[str, Passage] = dict(zip(texts, passages))
        with gzip.open(store.directory / TRIPLES, "rt", encoding="utf-8") as file:
            triples = [json.loads(line)["triples"] for line in file]
        rag = object.__new__(module.HippoRAG)
        rag.global_config, rag.working_dir = config, str(scratch)
        rag.graph = module.ig.Graph(directed=False)
        rag._graph_pickle_filename = str(scratch / "graph.pickle")
        rag.embedding_model = _Encoder(kb)
        rag.chunk_embedding_store = _Store(misc, "chunk", texts, store.embeddings.read(0, len(store)))
        normal = [[misc.text_processing(triple) for triple in some] for some in triples]
        nodes, of_passage = misc.extract_entity_nodes(normal)
        facts = misc.flatten_facts(normal)
        rag.entity_embedding_store = _Store(misc, "entity", nodes, _vectors(kb, ENTITIES, nodes, kb.encoder))
        spoken = [" ".join(fact) for fact in facts]
        vectors = _vectors(kb, "facts", spoken, kb.encoder)
        rag.fact_embedding_store = _Store(misc, "fact", [str(fact) for fact in facts], vectors)
        keys = rag.chunk_embedding_store.get_all_ids()
        rows = [
            {"idx": key, "passage": text, "extracted_entities": [], "extracted_triples": some}
            for key, text, some in zip(keys, texts, triples)
        ]
        rag.openie_results_path = str(scratch / "openie.json")
        pathlib.Path(rag.openie_results_path).write_text(json.dumps({"docs": rows}), encoding="utf-8")
        rag.rerank_filter = lambda query, facts, indices, len_after_rerank: (indices, facts, {})
        rag.ready_to_retrieve, rag.chunk_metadata = False, {}
        rag.ppr_time = rag.rerank_time = rag.all_retrieval_time = 0
        rag.node_to_node_stats, rag.ent_node_to_chunk_ids = {}, {}
        rag.add_fact_edges(keys, normal)
        rag.add_passage_edges(keys, of_passage)
        config.synonymy_edge_topk = 128  # of 2,047: the same edges, as it takes no more than 101, in less time
        rag.add_synonymy_edges()
        rag.get_graph_info = dict
        with contextlib.redirect_stdout(sys.stderr):
            rag.augment_graph()  # it prints
        rag.prepare_retrieval_objects()
        self.rag = rag

    def retrieve(self, query: str, k: int, *, reembed: bool = True) -> list[tuple[str, float]]:
        """(passage id, score) of the k best; `reembed`: the query is embedded even if it was asked before."""
        if reembed:
            self.rag.query_to_embedding = {"triple": {}, "passage": {}}
        solution = self.rag.retrieve([query], num_to_retrieve=k)[0]
        return [(self.passages[text].id, float(score)) for text, score in zip(solution.docs, solution.doc_scores)]

    def edges(self) -> int:
        """Pairs of nodes that are joined."""
        return self.rag.graph.copy().simplify(combine_edges="sum").ecount()

    def weight(self) -> float:
        """Sum of the weights of all edges."""
        return float(np.sum(self.rag.graph.es["weight"]))


class _Encoder:
    def __init__(self, kb: GraphKB) -> None:
        self._kb = kb

    def batch_encode(self, texts: Sequence[str] | str, instruction: str = "", norm: bool = True) -> np.ndarray:
        texts = [texts] if isinstance(texts, str) else list(texts)
        return self._kb.encoder.embed(texts, prefix=self._kb.fact_prefix, batch_size=1)


class _Store:
    """The part of HippoRAG's embedding stores that retrieval uses, in memory."""

    def __init__(self, misc: Any, kind: str, texts: Sequence[str], vectors: np.ndarray) -> None:
        self._keys = [misc.compute_mdhash_id(text, prefix=f"{kind}-") for text in texts]
        self._rows = {key: {"hash_id": key, "content": text} for key, text in zip(self._keys, texts)}
        self._vectors = dict(zip(self._keys, vectors))

    def get_all_ids(self) -> list[str]:
        return list(self._rows)

    def get_all_id_to_rows(self) -> dict[str, dict[str, str]]:
        return {key: dict(row) for key, row in self._rows.items()}

    def get_embeddings(self, keys: Sequence[str], dtype: Any = np.float32) -> list[np.ndarray]:
        return [self._vectors[key] for key in keys]

    def get_row(self, key: str) -> dict[str, str]:
        return self._rows[key]

    def get_rows(self, keys: Sequence[str]) -> dict[str, dict[str, str]]:
        return {key: self._rows[key] for key in keys}


def _vectors(kb: GraphKB, part: str, texts: Sequence[str], encoder: Any) -> np.ndarray:
    """Vectors of texts, those that our store has from there."""
    directory = kb.store.directory / part
    lines = StoredPassages(directory, 2**30, "")
    matrix = StoredArray(directory / EMBEDDINGS, 2**30, "").read(0, len(lines))
    vectors = {line.text.replace("\t", " "): row for line, row in zip(lines.read(0, len(lines)), matrix)}
    missing = [text for text in dict.fromkeys(texts) if text not in vectors]
    if missing:
        vectors |= dict(zip(missing, encoder.embed(missing, prefix="")))
    return np.stack([vectors[text] for text in texts])


def _module(source: pathlib.Path) -> types.ModuleType:
    """`hipporag.HippoRAG` of a checkout; modules of its hosted models that are not installed become empty shells."""
    sys.path.insert(0, str(source / "src"))
    shells: list[str] = []
    while True:
        try:
            module = importlib.import_module("hipporag.HippoRAG")
            break
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] in ("hipporag", "igraph"):
                raise
            shells.append(error.name)
            sys.modules[error.name] = mock.MagicMock(name=error.name)
            for name in [name for name in sys.modules if name.partition(".")[0] == "hipporag"]:
                del sys.modules[name]  # half imported
    for name in shells:
        del sys.modules[name]
    vars(module)["tqdm"] = lambda items, **_: items
    logging.getLogger("hipporag").setLevel(logging.ERROR)
    return module
