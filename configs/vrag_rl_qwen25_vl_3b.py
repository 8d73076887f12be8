"""VRAG-RL (arXiv 2505.22019) at its paper's settings with Qwen2.5-VL-3B."""

import ml_collections

from configs.vrag_rl_qwen25_vl_7b import vrag_run
from routerl_jax.core.config import to_config_dict


def get_config(variant: str = "after_sft") -> ml_collections.ConfigDict:
    """As configs/vrag_rl_qwen25_vl_7b.py, with the smaller model and all else alike, as in the paper.

    python -m launch.train --config=configs/vrag_rl_qwen25_vl_3b.py --distributed --workdir=/mnt/bucket/vrag_rl_3b \
        --config.data.train=vrag:train.parquet --config.data.test=vidoseek:vidoseek.json \
        --config.warm_start.demonstrations=messages:sft.jsonl
    python -m launch.compile_check --config=configs/vrag_rl_qwen25_vl_3b.py --topology=v5e:16x16

    Compiled for v5e:16x16 (docs/accelerators.md), not run: no step time, no result.
    """
    return to_config_dict(vrag_run("Qwen/Qwen2.5-VL-3B-Instruct", tensor=2, variant=variant))
