"""MMSearch-R1's training data (arXiv 2506.20670, sections 3 and 4.2): questions about concepts, questions balanced by the
searches that they need, and demonstrations."""

from typing import Any

import ml_collections

from routerl_jax.core.config import to_config_dict
from routerl_jax.extras.curation.balance import BalanceConfig
from routerl_jax.extras.curation.teaching import TeachingConfig
from routerl_jax.extras.curation.vqa import VqaConfig
from routerl_jax.services.config import ChatModelConfig
from routerl_jax.training import config as schema


def _balance() -> BalanceConfig:
    return BalanceConfig(policy="runs/pool", attempts=8, amounts="search_free:1600,search_required:3400")


def _sft() -> TeachingConfig:
    return TeachingConfig(
        data="questions.jsonl",
        student="Qwen/Qwen2.5-VL-7B-Instruct",
        llm=ChatModelConfig(
            model="gpt-4o-2024-11-20", base_url="https://api.openai.com/v1", api_key_env="OPENAI_API_KEY"
        ),
        agent=schema.AgentConfig(max_searches=2, k=5, max_turn_tokens=2048, answer_tokens=64, instruct=True),
        knowledge={
            "image": schema.KnowledgeConfig(kind="reverse_image", directory="kb/image"),
            "text": schema.KnowledgeConfig(source="corpus.jsonl"),
        },
    )


def _vqa() -> VqaConfig:
    return VqaConfig(
        concepts="concepts.txt",
        llm=ChatModelConfig(
            model="gpt-4o-2024-11-20", base_url="https://api.openai.com/v1", api_key_env="OPENAI_API_KEY"
        ),
        knowledge={"pictures": schema.KnowledgeConfig(kind="text_image", directory="kb/pictures")},
        sample=6000,
        test=600,
    )


_JOBS: dict[str, Any] = {"balance": _balance, "sft": _sft, "vqa": _vqa}


def get_config(job: str = "balance") -> ml_collections.ConfigDict:
    r"""The paper's settings. The job comes after a colon.

    `:balance` needs the finished run of a policy that was trained on the whole pool of questions:

    python -m launch.construct_data --config=configs/mmsearch_r1_data.py:balance --workdir=data/balance \
        --config.policy=runs/pool

    It makes 8 attempts at each question, and keeps about 3,400 questions that need a search and 1,600 that need none. For the
    paper's pool of 13,200 questions, this takes 105,600 rollouts. Not run with the paper's model.

    `:sft` needs a teacher behind any OpenAI-compatible server, and the knowledge bases of the run to be trained:

    python -m launch.construct_data --config=configs/mmsearch_r1_data.py:sft --workdir=data/sft --config.data=questions.jsonl \
        --config.llm.model=NAME --config.llm.base_url=http://host:8000/v1 --config.llm.api_key_env= \
        --config.student=Qwen/Qwen2.5-VL-7B-Instruct

    A question takes up to three replies and two searches. The paper's teacher, GPT-4o, was right on 8,000 of 13,200. Not run
    with it.

    `:vqa` needs concepts, a knowledge base that finds pictures with text for them, and a vision model:

    python -m launch.construct_data --config=configs/mmsearch_r1_data.py:vqa --workdir=data/vqa --config.concepts=concepts.txt \
        --config.llm.model=NAME --config.llm.base_url=http://host:8000/v1 --config.llm.api_key_env=

    A concept takes two replies or more, and a search. The paper uses 10,000 concepts from MetaCLIP's list, pictures of the web
    and GPT-4o. It keeps 5,400 questions for training and 600 for the test. Not run with these.
    """
    if job not in _JOBS:
        raise ValueError(f"variant {job!r} of the configuration is none of {', '.join(_JOBS)}")
    return to_config_dict(_JOBS[job]())
