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
    "core.extras": "core.packages",
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
    "evaluation.panels": "extras.analysis.panels",
    "evaluation.routing": "evaluation.metrics",
    "generation": "engine",
    "generation.lowering": "extras.compile_check.lowering",
    "knowledge.client.mcp": "extras.mcp_tools",
    "knowledge.serving": "extras.kb_server",
    "knowledge.serving.schema": "knowledge.client.schema",
    "llms": "services",
    "parallel.chips": "extras.compile_check.chips",
    "parallel.hlo_collectives": "extras.compile_check.hlo_collectives",
    "parallel.hlo_costs": "extras.compile_check.hlo_costs",
    "parallel.hlo_loops": "extras.compile_check.hlo_loops",
    "parallel.hlo_products": "extras.compile_check.hlo_products",
    "parallel.hlo_text": "extras.compile_check.hlo_text",
    "parallel.topology": "extras.compile_check.topology",
    "remote": "services",
    "serving": "extras.policy_server",
    "training.calibration": "training.evaluation",
    "training.clock": "training.profiler",
    "training.compile_check": "extras.compile_check.check",
    "training.contamination": "training.inputs",
    "training.data": "training.stages",
    "training.layout_search": "extras.compile_check.layout_search",
    "training.learner_config": "training.sections",
    "training.passes": "training.stages",
    "training.rollout_checks": "training.config",
    "training.roofline": "extras.compile_check.roofline",
    "training.run_files": "training.load",
    "training.run_programs": "extras.compile_check.run_programs",
    "training.snapshots": "training.knowledge",
    "training.tool_counts": "training.health",
    "training.tool_schemas": "training.knowledge",
    "training.trials": "extras.analysis.trials",
    "training.warm_start": "training.sft",
    "training.writer": "training.loggers",
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
