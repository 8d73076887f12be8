"""Llama-3.1-8B-Instruct learns to search, on a TPU slice."""

import ml_collections

from configs.search_qwen25_7b import search_run
from routerl_jax.core.config import to_config_dict


def get_config() -> ml_collections.ConfigDict:
    """As configs/search_qwen25_7b.py in everything but the model.

    python -m launch.train --config=configs/search_llama31_8b.py --distributed --workdir=/mnt/bucket/search_llama31_8b \
        --config.data.train=questions.jsonl --config.knowledge.text.source=corpus.jsonl
    python -m launch.compile_check --config=configs/search_llama31_8b.py --topology=v5e:16x16

    It has been compiled for v5e:16x16 (docs/accelerators.md) and not been run. The weights need Meta's
    licence: give the directory you downloaded, --config.model.path=DIR.
    """
    return to_config_dict(search_run("meta-llama/Llama-3.1-8B-Instruct"))
