"""Qwen2.5-VL-7B learns to search for questions about pictures, on a TPU slice; the tower stays as it is."""

import dataclasses

import ml_collections

from configs.r1_searcher_qwen25_7b import searcher_run
from routerl_jax.core.config import to_config_dict


def get_config() -> ml_collections.ConfigDict:
    """configs/r1_searcher_qwen25_7b.py with a model that sees: questions may have images, which stand before their text.

    python -m launch.compile_check --config=configs/search_qwen25_vl_7b.py --topology=v5e:16x16

    It has been compiled (docs/accelerators.md) and not been run: no step time, no result. Questions with images are rows that
    name them (docs/data.md).
    """
    run = searcher_run("Qwen/Qwen2.5-VL-7B-Instruct")
    run = dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, freeze=("visual",)),
        agent=dataclasses.replace(run.agent, prompt="", instruct=True),
    )
    return to_config_dict(run)
