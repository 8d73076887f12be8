"""Golden trajectories for R1-Router (arXiv 2505.22095, appendix A.2), made by any language model from any questions."""

import ml_collections

from routerl_jax.core.config import to_config_dict
from routerl_jax.extras.curation.attempts import AttemptConfig
from routerl_jax.extras.curation.golden import AmountConfig, ConstructConfig
from routerl_jax.services.load import ChatModelConfig
from routerl_jax.training import config as schema

_BASES = {
    "text": schema.KnowledgeConfig(source="corpus.jsonl", encoder="BAAI/bge-m3"),
    "text_image": schema.KnowledgeConfig(kind="text_image", directory="kb/captions"),
    "table": schema.KnowledgeConfig(source="tables.jsonl", kind="dense_table", encoder="BAAI/bge-m3"),
}


def get_config(knowledge: str = "text+text_image+table") -> ml_collections.ConfigDict:
    """The paper's settings, with an OpenAI-compatible server. The knowledge bases come after a colon, such as `text+table`.

    python -m launch.construct_data --config=configs/r1_router_data.py:text+table --workdir=data/golden \
        --config.data=2wikimultihopqa.json,open_wikitable.jsonl --config.llm.model=deepseek-ai/DeepSeek-R1-Distill-Qwen-32B \
        --config.llm.base_url=http://127.0.0.1:8000/v1 --config.knowledge.text.source=corpus.jsonl.gz

    The paper uses DeepSeek-R1-Distill-Qwen-32B for text and tables and Qwen2.5-VL-7B for questions with pictures. These are two
    jobs with two workdirs. `--config.llm.kind=engine --config.llm.model=DIR` runs a local checkpoint with our own engine. The
    paper gives neither the attempts per question nor the length of a reply; these are our choice.

    A question takes two replies per sub-question and up to two more, and a search per sub-question. The time depends on the
    server. Not run with these models; docs/r1_router.md says with which ones.
    """
    names = knowledge.split("+")
    if unknown := [name for name in names if name not in _BASES]:
        raise ValueError(
            f"variant {knowledge!r} of the configuration: {unknown[0]!r} is none of {', '.join(_BASES)}; join them with +"
        )
    return to_config_dict(
        ConstructConfig(
            data="questions.jsonl",
            llm=ChatModelConfig(model="deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", timeout=600.0),
            knowledge={name: _BASES[name] for name in names},
            attempt=AttemptConfig(max_searches=3, k=5, attempts=4, temperature=1.0, max_tokens=4096),
            amount=AmountConfig(per_dataset=1000, validation=0.2, concurrency=32),
        )
    )
