"""Trials of a finished run's policy under other conditions: one mode for all searches, other numbers of passages, or other
retrievers."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.agents.agent import Agent, SearchTool
from routerl_jax.core.types import Episode
from routerl_jax.engine.engine import Engine
from routerl_jax.evaluation.benchmark import score
from routerl_jax.evaluation.metrics import summarize
from routerl_jax.evaluation.paired import Record
from routerl_jax.evaluation.records import episode_record
from routerl_jax.extras.analysis.numbers import behaviour
from routerl_jax.knowledge.encoders import COLOURS
from routerl_jax.knowledge.graph.build import TRIPLES
from routerl_jax.knowledge.store import Manifest, nested
from routerl_jax.recipes.vrag_rl.agents import VanillaRAG
from routerl_jax.rewards.retrieval import found
from routerl_jax.training.config import KnowledgeConfig, TrainConfig
from routerl_jax.training.knowledge import kb_cache_directory, kb_directory
from routerl_jax.training.load import load_policy
from routerl_jax.training.setup import (
    build_mesh,
    build_recipe,
    evaluated_agent,
    evaluation_examples,
    make_engine,
    open_knowledge,
)

USUAL = "trained"  # row of the policy as the run evaluated it, on the questions of a trial


class Trials:
    """Greedy trials on a run's first test questions. Each returns `extras.analysis.numbers.behaviour` by name.

    Args:
      config: the run's configuration.
      workdir: the run's directory. Weights and knowledge bases are loaded when a trial needs them.
      trained: the episode records of its final evaluation, for the rows `USUAL`.
      limit: number of questions; -1: all.

    Raises:
      ValueError: the records do not belong to the run's test questions.
    """

    def __init__(self, config: TrainConfig, workdir: pathlib.Path, trained: Sequence[Record], limit: int) -> None:
        self._config, self._workdir = config, workdir
        self._agent = evaluated_agent(config, build_recipe(config))
        count = min((n for n in (limit, config.evaluation.final_examples) if n != -1), default=-1)
        self._questions = evaluation_examples(config, "test", count)
        records = {str(record["id"]): record for record in trained}
        missing = [question.id for question in self._questions if question.id not in records]
        if missing:
            raise ValueError(
                f"the run's final evaluation lacks {len(missing)} of its test questions, such as {missing[0]!r}: "
                "launch.evaluate has written others there. launch.train --resume evaluates again"
            )
        self._usual = [records[question.id] for question in self._questions]

    def single_modes(self) -> dict[str, Any]:
        """For each knowledge base: all searches go to it. {} if there is only one."""
        baselines = self._agent.baselines(tuple(self._config.knowledge))
        agents = {name: agent for name, agent in baselines.items() if name.startswith("only_")}
        tried = {name: self._behaviour(agent, self._tools, name) for name, agent in agents.items()}
        return {USUAL: self._usual_row, **tried} if tried else {}

    def top_k(self, ks: Sequence[int]) -> dict[str, Any]:
        """Other numbers of passages per search."""
        return {str(k): self._with_k(k) for k in sorted(set(ks))}

    def pages_at_once(self, counts: Sequence[int]) -> dict[int, Any]:
        """VRAG-RL's vanilla RAG with other numbers of pages (arXiv 2505.22019, figure 3).

        Returns:
          By number of pages `evaluation.metrics.summarize`; and `sufficient`, its entries about EM on the questions whose gold
          pages are all shown with the smallest number already (absent if there are none). These are the same questions with
          every number.

        Raises:
          ValueError: the run's agent is not VRAG-RL's.
        """
        usual = self._agent.vanilla_rag(tuple(self._config.knowledge)).get("vanilla_rag")
        if not isinstance(usual, VanillaRAG):
            raise ValueError(f"a run of {self._config.recipe} has no pages to show at once")
        tried: dict[int, Any] = {}
        sufficient: set[str] = set()  # questions whose gold pages are shown with the smallest number
        for count in sorted(set(counts)):
            agent = dataclasses.replace(usual, pages=count, max_turns=1, k=max(usual.k, count))
            row, episodes = self._scored(agent, self._tools, f"{count} pages")
            sufficient = (
                sufficient if tried else {str(episode.example.id) for episode in episodes if found([episode]) == [1.0]}
            )
            if sufficient_episodes := [episode for episode in episodes if str(episode.example.id) in sufficient]:
                metrics = summarize(sufficient_episodes, self._config.evaluation.normalizer)
                row["sufficient"] = {key: metrics[key] for key in ("em", "em_interval", "n")}
            tried[count] = row
        return tried

    def retrievers(self, names: Sequence[str]) -> dict[str, Any]:
        """Other retrievers: see `with_retriever`."""
        configs = {name: with_retriever(self._config, name) for name in names}  # mistakes show before anything is tried
        tried = {
            name: self._behaviour(self._agent, open_knowledge(changed, self._workdir), name)
            for name, changed in configs.items()
        }
        return {USUAL: self._usual_row, **tried} if tried else {}

    def _with_k(self, k: int) -> dict[str, Any]:
        if k == (self._config.evaluation.k or self._config.agent.k):
            return self._usual_row
        return self._behaviour(self._agent.with_passages(k), self._tools, f"k = {k}")

    def _behaviour(self, agent: Agent, tools: Mapping[str, SearchTool], label: str) -> dict[str, Any]:
        _, episodes = self._scored(agent, tools, label)
        return behaviour([episode_record(episode) for episode in episodes], self._config.evaluation.normalizer)

    def _scored(
        self, agent: Agent, tools: Mapping[str, SearchTool], label: str
    ) -> tuple[dict[str, Any], list[Episode]]:
        normalizer, timeout = self._config.evaluation.normalizer, self._config.rollout.tool_timeout
        return score(agent, self._questions, self._engine, tools, normalizer, tool_timeout=timeout, progress=label)

    @functools.cached_property
    def _usual_row(self) -> dict[str, Any]:
        return behaviour(self._usual, self._config.evaluation.normalizer)

    @functools.cached_property
    def _engine(self) -> Engine:
        return make_engine(self._config, load_policy(self._workdir, self._config, build_mesh(self._config.mesh)))

    @functools.cached_property
    def _tools(self) -> dict[str, SearchTool]:
        return open_knowledge(self._config, self._workdir)


def with_retriever(config: TrainConfig, name: str) -> TrainConfig:
    """The configuration with another retriever. Its knowledge bases are built anew from their sources.

    The name of an encoder replaces every other encoder, and BM25 by dense retrieval. `bm25` replaces dense retrieval by BM25. A
    knowledge base that exists only as a directory is built anew from its own passages and settings, and a graph from its own
    triples, so that no language model is asked again. Query and passage prefixes are those of the new encoder.

    Raises:
      ValueError: a knowledge base is served, does not consist of passages, or does not exist; or nothing would change.
    """
    changed = {key: _with_retriever(key, spec, name) for key, spec in config.knowledge.items()}
    if changed == dict(config.knowledge):
        raise ValueError(
            f"retriever {name!r}: the run has no knowledge base in which it would stand in another's place"
        )
    return dataclasses.replace(config, knowledge=changed)


_REBUILT = ("dense_text", "bm25", "graph")  # kinds whose corpora are passages
_OF_ENCODER = ("query_encoder", "query_prefix", "passage_prefix", "fact_prefix")
_OF_EXTRACTION = ("extractor", "triples", "llm", "entities_first")
_OF_CORPUS = ("passage_words", "least_words")  # settings that say how a corpus is cut into passages
_OF_KB = ("kind", "name", "encoder")  # keys of KnowledgeConfig itself


def _with_retriever(key: str, spec: KnowledgeConfig, name: str) -> KnowledgeConfig:
    if spec.members or spec.kind == "tool":  # a hybrid changes with its members, and a tool has no retriever to change
        return spec
    if spec.served:
        raise ValueError(
            f"config.knowledge.{key} is served ({spec.source}), so no other retriever can be tried in it. Give its directory "
            f"on this machine: config.knowledge.{key}.directory, with an empty source"
        )
    if name == "bm25":
        if spec.kind != "dense_text":
            return spec
        spec = _buildable(key, spec)
        return dataclasses.replace(spec, kind="bm25", directory="", settings=_of_corpus(spec))
    spec = _buildable(key, spec)
    settings = {setting: value for setting, value in spec.settings.items() if setting not in _OF_ENCODER}
    if spec.kind == "bm25":
        return dataclasses.replace(spec, kind="dense_text", encoder=name, directory="", settings=_of_corpus(spec))
    pictures = COLOURS if spec.encoder.startswith(COLOURS) else ""
    return dataclasses.replace(spec, encoder=pictures + name, directory="", settings=settings)


def _of_corpus(spec: KnowledgeConfig) -> dict[str, Any]:
    """The settings of the passages, which all kinds share, so that another kind has the same passages."""
    return {setting: value for setting, value in spec.settings.items() if setting in _OF_CORPUS}


def _buildable(key: str, spec: KnowledgeConfig) -> KnowledgeConfig:
    """The same knowledge base with a source to build it from, and without a language model that would read it again."""
    if spec.source:
        return _with_triples(spec, kb_cache_directory(key, spec)) if spec.settings.get("extractor") == "llm" else spec
    directory = kb_directory(key, spec)
    try:
        manifest = Manifest.read(directory)
    except ValueError as error:
        raise ValueError(f"config.knowledge.{key}.directory: {error}") from error
    if manifest.kind not in _REBUILT:
        raise ValueError(
            f"config.knowledge.{key} ({manifest.kind}, in {directory}) is not built by the run, and no other retriever can be "
            f"tried in it: only {', '.join(_REBUILT)} are built anew from their own passages"
        )
    settings = nested(manifest.config)
    index = str(settings.pop("index", spec.index))
    for setting in (*_OF_KB, *_OF_CORPUS):
        settings.pop(setting, None)
    spec = dataclasses.replace(spec, source=str(directory), kind=manifest.kind, index=index, settings=settings)
    return _with_triples(spec, directory) if manifest.kind == "graph" else spec


def _with_triples(spec: KnowledgeConfig, built: pathlib.Path) -> KnowledgeConfig:
    """A graph with the triples of one that is already built; unchanged if none is built."""
    triples = pathlib.Path(spec.directory or built).expanduser() / TRIPLES
    if not triples.is_file():
        return spec
    settings = {setting: value for setting, value in spec.settings.items() if setting not in _OF_EXTRACTION}
    return dataclasses.replace(spec, settings=settings | {"extractor": "given", "triples": str(triples)})
