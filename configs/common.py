"""Parts that several configurations share."""

from __future__ import annotations

import dataclasses

from routerl_jax.training import config as schema

# Atlas's knowledge bases: MiniLM embeddings, built into the cache in seconds on first use.
ATLAS_KNOWLEDGE = {
    name: schema.KnowledgeConfig(source=f"atlas/{name}", kind=kind)
    for name, kind in (("text", "dense_text"), ("table", "dense_table"), ("elements", "dense_text"))
}

# The small policy of the quickstart: 0.9 M parameters, Llama architecture, trained from scratch on Atlas's language.
ATLAS_POLICY = {
    "model_type": "llama",
    "vocab_size": 1024,
    "embed": 128,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "mlp": 384,
    "max_length": 512,
    "tied_embeddings": True,
}


def with_tool_calls(run: schema.TrainConfig) -> schema.TrainConfig:
    """The run with JSON tool calls instead of its recipe's tags. Qwen2.5-VL's own chat template shows no tools, so it gets one
    that does."""
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, chat_template="hermes"),
        agent=dataclasses.replace(run.agent, grammar="tool_calls"),
    )
