"""Modules that version 0.2 moved: importing one by its old name is refused with its new one. To be removed in 0.3."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

# A folder or file before -> the one now.
MOVED = {
    "agents.calling": "agents.agent",
    "agents.config": "recipes.recipe",
    "agents.demonstrated": "agents.observation",
    "agents.fitting": "agents.chat",
    "agents.forced": "agents.chat",
    "agents.looking_calls": "agents.tool_calls",
    "agents.request": "agents.conversation",
    "agents.room": "agents.driver",
    "agents.routing": "agents.agent",
    "agents.tool_forms": "agents.tool_calls",
    "baselines": "extras.baselines",
    "chat": "extras.chat",
    "comparison": "extras.comparison",
    "comparison.benchmarks.benchmark": "extras.comparison.benchmarks",
    "core.cache_directory": "core.files",
    "core.chat_templates": "core.tokenizer",
    "core.checked": "core.config",
    "core.compressed": "core.rows",
    "core.described": "core.config",
    "core.extras": "core.packages",
    "core.journal": "core.files",
    "core.tool_schema": "core.types",
    "core.version": "core.packages",
    "core.words": "core.text",
    "curation": "extras.curation",
    "data.atlas.drills": "data.atlas.demonstrations",
    "data.atlas.plans": "data.atlas.sight",
    "data.atlas.recoloured": "data.atlas.invented",
    "data.atlas.steps": "data.atlas.demonstrations",
    "data.atlas.visual": "data.atlas.questions",
    "data.messages": "data.rounds",
    "evaluation.analysis": "extras.analysis.numbers",
    "evaluation.analysis_figure": "extras.analysis.figure",
    "evaluation.canary": "evaluation.benchmark",
    "evaluation.routing": "evaluation.metrics",
    "generation": "engine",
    "knowledge.card": "knowledge.builds",
    "knowledge.client.breaker": "knowledge.client.transport",
    "knowledge.client.documents": "knowledge.client.schema",
    "evaluation.panels": "extras.analysis.figure",
    "generation.lowering": "extras.compile_check.run_programs",
    "knowledge.client.mcp": "extras.mcp_tools",
    "knowledge.client.policy": "knowledge.client.transport",
    "knowledge.client.retrieve": "knowledge.client.kb",
    "knowledge.corpora.ids": "knowledge.corpus",
    "knowledge.corpora.linked_tables": "knowledge.corpora.wikipedia",
    "knowledge.corpora.splitting": "knowledge.corpus",
    "knowledge.corpora.tsv": "knowledge.corpus",
    "knowledge.counts": "knowledge.base",
    "knowledge.faiss_file": "knowledge.faiss",
    "knowledge.faiss_index": "knowledge.faiss",
    "knowledge.graph.config": "knowledge.graph.build",
    "knowledge.graph.extraction": "knowledge.graph.triples",
    "knowledge.graph.linking": "knowledge.graph.kb",
    "knowledge.graph.parsing": "knowledge.graph.triples",
    "knowledge.graph.rules": "knowledge.graph.triples",
    "knowledge.graph.synonyms": "knowledge.graph.graph",
    "knowledge.graph.update": "knowledge.graph.build",
    "knowledge.graph_rag": "extras.graph_packages.graph_rag",
    "knowledge.kinds": "knowledge.builds",
    "knowledge.light_rag": "extras.graph_packages.light_rag",
    "knowledge.measures": "knowledge.builds",
    "knowledge.packaged": "extras.graph_packages.packaged",
    "knowledge.pages.documents": "knowledge.pages.reading",
    "knowledge.pages.maxsim": "knowledge.pages.index",
    "knowledge.pages.ocr": "knowledge.pages.reading",
    "knowledge.pages.pooling": "knowledge.pages.index",
    "knowledge.pages.ragged": "knowledge.pages.index",
    "knowledge.pages.reader": "knowledge.corpora.documents",
    "knowledge.pages.rendering": "knowledge.pages.reading",
    "knowledge.pictures.corpus": "knowledge.pictures.build",
    "knowledge.pictures.near_duplicates": "knowledge.pictures.kb",
    "knowledge.precomputed_vectors": "knowledge.builds",
    "knowledge.query": "knowledge.base",
    "knowledge.recall": "knowledge.index",
    "knowledge.reranked": "knowledge.hybrid",
    "knowledge.serving": "extras.kb_server",
    "knowledge.serving.schema": "knowledge.client.schema",
    "knowledge.table_formats": "knowledge.tables",
    "knowledge.timing": "knowledge.base",
    "knowledge.together": "knowledge.base",
    "knowledge.updated_index": "knowledge.dense",
    "knowledge.vector_index": "knowledge.index",
    "knowledge.web.addresses": "knowledge.web.reading",
    "knowledge.web.build": "knowledge.web.kb",
    "knowledge.web.charset": "knowledge.corpora.documents",
    "knowledge.web.fetch": "knowledge.web.reading",
    "knowledge.web.reader": "knowledge.web.reading",
    "learning.counterfactual": "learning.advantages",
    "learning.masks": "learning.advantages",
    "learning.off_policy": "learning.advantages",
    "learning.prefixes": "learning.batch",
    "learning.turn_advantages": "learning.advantages",
    "llms": "services",
    "models.clip": "models.families.clip",
    "models.cross_encoder": "models.families.bert",
    "models.encoder": "models.families.bert",
    "models.late_interaction": "models.families.colqwen",
    "models.mapping": "models.family",
    "models.nv_embed": "models.families.nv_embed",
    "parallel.chips": "extras.compile_check.chips",
    "parallel.hlo_collectives": "extras.compile_check.hlo_costs",
    "parallel.hlo_costs": "extras.compile_check.hlo_costs",
    "parallel.hlo_loops": "extras.compile_check.hlo",
    "parallel.hlo_products": "extras.compile_check.hlo_costs",
    "parallel.hlo_text": "extras.compile_check.hlo",
    "parallel.topology": "extras.compile_check.chips",
    "recipes.known": "recipes.recipe",
    "recipes.mmsearch_r1.calls": "recipes.mmsearch_r1.protocol",
    "recipes.mmsearch_r1.recipe": "recipes.mmsearch_r1.agents",
    "recipes.r1_router.calls": "recipes.r1_router.steps",
    "recipes.r1_router.recipe": "recipes.r1_router.agents",
    "recipes.r1_router.turns": "recipes.r1_router.rewards",
    "recipes.vrag_rl.recipe": "recipes.vrag_rl.agents",
    "remote": "services",
    "rewards.format": "rewards.terms",
    "rewards.garbled": "core.text",
    "rewards.normalize": "rewards.metrics",
    "rewards.ranges": "rewards.metrics",
    "rewards.verdicts": "rewards.terms",
    "services.cached": "services.load",
    "services.judge_checks": "services.judge",
    "services.metered": "services.load",
    "services.retries": "services.http",
    "services.schemas": "services.base",
    "services.secrets": "services.http",
    "services.sent_pictures": "services.transcript",
    "services.stop_strings": "services.policy",
    "serving": "extras.policy_server",
    "training.compile_check": "extras.compile_check.check",
    "training.layout_search": "extras.compile_check.layout_search",
    "training.roofline": "extras.compile_check.roofline",
    "training.run_programs": "extras.compile_check.run_programs",
    "training.trials": "extras.analysis.trials",
    "viewer": "extras.viewer",
}
PACKAGE = "routerl_jax."


class Refusal(importlib.abc.MetaPathFinder):
    """Stands before the other finders, so that a folder of old compiled files is not taken for the module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        old = fullname.removeprefix(PACKAGE)
        if fullname == PACKAGE + old and old in MOVED:
            inside = [name for name in MOVED if name == old or name.startswith(f"{old}.")]
            now = ", ".join(f"{PACKAGE}{name} is {PACKAGE}{MOVED[name]}" for name in inside)
            raise ImportError(f"since version 0.2, {now}: change the name", name=fullname)
        return None


def refuse() -> None:
    """Called once, by the package."""
    sys.meta_path.insert(0, Refusal())
