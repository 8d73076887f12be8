"""Modules that version 0.2 moved: importing one by its old name is refused with its new one. To be removed in 0.3."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

# A folder or file before -> the one now.
MOVED = {
    "baselines": "extras.baselines",
    "chat": "extras.chat",
    "comparison": "extras.comparison",
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
    "evaluation.analysis": "extras.analysis.numbers",
    "evaluation.analysis_figure": "extras.analysis.figure",
    "evaluation.panels": "extras.analysis.panels",
    "generation": "engine",
    "generation.lowering": "extras.compile_check.lowering",
    "knowledge.client.mcp": "extras.mcp_tools",
    "knowledge.serving": "extras.kb_server",
    "knowledge.serving.schema": "knowledge.client.schema",
    "learning.counterfactual": "learning.advantages",
    "learning.masks": "learning.advantages",
    "learning.off_policy": "learning.advantages",
    "learning.prefixes": "learning.batch",
    "learning.turn_advantages": "learning.advantages",
    "llms": "services",
    "parallel.chips": "extras.compile_check.chips",
    "parallel.hlo_collectives": "extras.compile_check.hlo_collectives",
    "parallel.hlo_costs": "extras.compile_check.hlo_costs",
    "parallel.hlo_loops": "extras.compile_check.hlo_loops",
    "parallel.hlo_products": "extras.compile_check.hlo_products",
    "parallel.hlo_text": "extras.compile_check.hlo_text",
    "parallel.topology": "extras.compile_check.topology",
    "recipes.known": "recipes.recipe",
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
