"""Qwen2.5-VL-7B learns to search for questions about pictures, on a TPU slice. The vision tower is not trained."""

import dataclasses

import ml_collections

from configs.r1_searcher_qwen25_7b import searcher_run
from routerl_jax.core.config import to_config_dict


def get_config() -> ml_collections.ConfigDict:
    """configs/r1_searcher_qwen25_7b.py with a vision model. Questions may have images, which stand before their text.

    python -m launch.compile_check --config=configs/search_qwen25_vl_7b.py --topology=v5e:16x16

    Compiled (docs/accelerators.md), not run: no step time, no result. Rows of questions name their images (docs/data.md).
    """
    run = searcher_run("Qwen/Qwen2.5-VL-7B-Instruct")
    run = dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, freeze=("visual",)),
        agent=dataclasses.replace(run.agent, prompt="", instruct=True),
    )
    return to_config_dict(run)
