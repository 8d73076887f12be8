"""VRAG-RL's supervised data (arXiv 2505.22019, section 2.2, appendix D): trajectories that a planner and a grounder make."""

import ml_collections

from routerl_jax.core.config import to_config_dict
from routerl_jax.extras.curation.experts import ExpertJobConfig
from routerl_jax.services.config import ChatModelConfig, JudgeConfig
from routerl_jax.training import config as schema

VARIANTS = ("paper", "released")
_DASHSCOPE = "https://dashscope.aliyuncs.com/compatible-mode/v1"
_TOKEN = 28 * 28  # pixels of an image token


def get_config(variant: str = "paper") -> ml_collections.ConfigDict:
    r"""Qwen-VL-max plans, Qwen2.5-VL-72B says where; any two chat models that see will do.

    python -m launch.construct_data --config=configs/vrag_rl_data.py --workdir=data/experts --config.data=vidoseek:train.json \
        --config.planner.model=NAME --config.planner.base_url=http://host:8000/v1 --config.planner.api_key_env= \
        --config.grounder.model=NAME --config.grounder.base_url=http://host:8001/v1 --config.grounder.api_key_env= \
        --config.judge.model=NAME --config.judge.base_url=http://host:8002/v1 --config.knowledge.pages.directory=kb/pages

    `:released` after the configuration's path takes what that code does where it differs: the grounder writes the thought of a
    look, too, a gold page that a search finds comes first, and a question has up to ten attempts.

    `--config.judge.model=` (empty) has exact match decide. With `--config.box_scale=1000` the grounder's boxes run from 0 to
    1000. The frame in which boxes are written is that of config.student with config.min_pixels and config.max_pixels, which
    must be those of the run that learns.

    A trajectory of n steps takes n replies of the planner, one of the grounder for each look, a search for each search and a
    verdict. Not run with these models.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r} of the configuration: expected one of {', '.join(VARIANTS)}")
    released = variant == "released"
    return to_config_dict(
        ExpertJobConfig(
            data="vidoseek:train.json",
            planner=_qwen("qwen-vl-max-latest"),
            grounder=_qwen("qwen2.5-vl-72b-instruct"),
            judge=JudgeConfig(model="Qwen/Qwen2.5-7B-Instruct", base_url="http://127.0.0.1:8000/v1", style="vrag"),
            student="Qwen/Qwen2.5-VL-7B-Instruct",
            min_pixels=256 * _TOKEN,
            max_pixels=512 * _TOKEN,
            agent=schema.AgentConfig(max_searches=6, k=10, max_turn_tokens=2048, instruct=True),
            knowledge={
                "pages": schema.KnowledgeConfig(kind="pages", encoder="vidore/colqwen2-v1.0-hf", directory="kb/pages")
            },
            released=released,
            oracle=released,
            attempts=10 if released else 1,
            temperature=0.7 if released else 0.0,
        )
    )


def _qwen(name: str) -> ChatModelConfig:
    return ChatModelConfig(model=name, base_url=_DASHSCOPE, api_key_env="DASHSCOPE_API_KEY")
