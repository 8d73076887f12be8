"""RouteRAG with its paper's settings, for Qwen2.5-7B-Instruct and NV-Embed-v2."""

import ml_collections

from configs.routerag_qwen25_3b import routerag_run
from routerl_jax.core.config import to_config_dict


def get_config(variant: str = "stable") -> ml_collections.ConfigDict:
    """Like configs/routerag_qwen25_3b.py, with the larger policy and encoder, and triples by Llama-3.3-70B-Instruct.

    python -m launch.train --config=configs/routerag_qwen25_7b.py --distributed --workdir=/mnt/bucket/routerag_7b \
        --config.knowledge.passage.source=corpus.jsonl --config.knowledge.graph.directory=kb/graph
    python -m launch.compile_check --config=configs/routerag_qwen25_7b.py --topology=v5e:16x16

    Compiled for v5e:16x16 (docs/accelerators.md), not run: no step time, no result.
    """
    return to_config_dict(routerag_run("Qwen/Qwen2.5-7B-Instruct", "nvidia/NV-Embed-v2", tensor=4, variant=variant))
