"""Comparison of text baselines with SmolLM2-135M-Instruct on HotpotQA, 2WikiMultihopQA and MuSiQue."""

import ml_collections

from routerl_jax.core.config import to_config_dict
from routerl_jax.extras.comparison import config as schema
from routerl_jax.training.config import EngineConfig, MeshConfig, ModelConfig


def get_config() -> ml_collections.ConfigDict:
    """A small pretrained model as eight baselines over the passages that come with the questions, found by BM25.

    python -m launch.evaluate --config=configs/eval/smollm2.py --output=results/smollm2 --config.data=DATA --limit=200

    DATA has hotpotqa/, 2wikimultihopqa/ and musique/ (launch.evaluate --benchmarks=help). Prompts have two worked questions and
    two documents per search, so that they are short: a question of vanilla_rag takes 300 tokens, of hipporag_reader 460. On a
    CPU most of the time of a short run is compilation.
    """
    shots = {"shots": 2}
    return to_config_dict(
        schema.ComparisonConfig(
            agents=(
                "direct",
                "vanilla_rag",
                "hipporag_reader",
                "iter_retgen",
                "ircot",
                "self_ask",
                "react",
                "search_o1",
            ),
            benchmarks=("hotpotqa", "2wikimultihopqa", "musique"),
            k=2,
            searches=2,
            turn_tokens=64,
            metrics=("f1", "cover_em", "em"),
            reference="vanilla_rag",
            retriever="bm25",
            retriever_settings={"words": {"split": "latin"}},
            settings={
                "iter_retgen": shots,
                "ircot": {**shots, "sentence_tokens": 48},
                "self_ask": shots,
                "react": shots,
                "search_o1": {"reading_tokens": 64},
            },
            model=ModelConfig(path="SmolLM2-135M-Instruct"),
            mesh=MeshConfig(cpu_devices=1),
            engine=EngineConfig(rows=32, max_length=1536),
        )
    )
