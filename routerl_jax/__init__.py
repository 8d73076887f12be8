"""routerl_jax: reinforcement learning of when, where and what to retrieve, in JAX.

    import routerl_jax as rj
    model = rj.load_pretrained(path_or_id)
    engine = rj.Engine(model, rows=64, max_length=2048)
    kb = rj.load_kb(directory)
    episodes = rj.run(agent, examples, engine, {"text": kb}, samples=8)

Names are resolved on first use, so that programs that need no JAX start fast.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from routerl_jax.moved import refuse
from routerl_jax.parallel.platform import skip_absent_tpu

__version__ = "0.2.0"

# before transformers is imported anywhere: it would warn that PyTorch is missing, which is not needed here
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
refuse()
skip_absent_tpu()  # before JAX is imported anywhere, such as by bm25s, which looks for devices when it is imported

if TYPE_CHECKING:
    from routerl_jax.agents.agent import Agent
    from routerl_jax.agents.driver import run
    from routerl_jax.agents.search_agent import SearchAgent
    from routerl_jax.core.types import Action, Call, Episode, Example, Passage, Shown, TextAndImage
    from routerl_jax.engine.engine import Engine
    from routerl_jax.engine.sampling import Sampling
    from routerl_jax.knowledge.load import load_kb
    from routerl_jax.models.huggingface import load_pretrained, save_pretrained
    from routerl_jax.parallel.mesh import make_mesh
    from routerl_jax.rewards import metrics
    from routerl_jax.services.policy import ChatModel
    from routerl_jax.training.config import TrainConfig
    from routerl_jax.training.knowledge import open_knowledge_bases
    from routerl_jax.training.rl import train_rl
    from routerl_jax.training.sections import KnowledgeConfig

_MODULES = {
    "Action": "core.types",
    "Agent": "agents.agent",
    "Call": "core.types",
    "ChatModel": "services.policy",
    "Engine": "engine.engine",
    "Episode": "core.types",
    "Example": "core.types",
    "KnowledgeConfig": "training.sections",
    "Passage": "core.types",
    "Sampling": "engine.sampling",
    "SearchAgent": "agents.search_agent",
    "Shown": "core.types",
    "TextAndImage": "core.types",
    "TrainConfig": "training.config",
    "load_kb": "knowledge.load",
    "load_pretrained": "models.huggingface",
    "make_mesh": "parallel.mesh",
    "metrics": "rewards.metrics",
    "open_knowledge_bases": "training.knowledge",
    "run": "agents.driver",
    "save_pretrained": "models.huggingface",
    "train_rl": "training.rl",
}

__all__ = [
    "Action",
    "Agent",
    "Call",
    "ChatModel",
    "Engine",
    "Episode",
    "Example",
    "KnowledgeConfig",
    "Passage",
    "Sampling",
    "SearchAgent",
    "Shown",
    "TextAndImage",
    "TrainConfig",
    "load_kb",
    "load_pretrained",
    "make_mesh",
    "metrics",
    "open_knowledge_bases",
    "run",
    "save_pretrained",
    "train_rl",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'routerl_jax' has no attribute {name!r}")
    module = importlib.import_module(f"routerl_jax.{_MODULES[name]}")
    return module if _MODULES[name].endswith(f".{name}") else getattr(module, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
