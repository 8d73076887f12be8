"""Comparison on text and tables: the packaged policy as many agents, on the packaged data set Atlas, on two CPU cores."""

import ml_collections

from routerl_jax.core.config import to_config_dict
from routerl_jax.extras.comparison import config as schema
from routerl_jax.training.config import EngineConfig, MeshConfig, ModelConfig


def get_config() -> ml_collections.ConfigDict:
    """The quickstart's initial policy: in its own protocol with its own and other routings, and as plain baselines.

    python -m launch.evaluate --config=configs/eval/text_qa.py --output=results/text_qa

    With --limit=20 it takes about three minutes of one core's time, most of it for compilation.

    This policy has 0.9 M parameters and knows only its own protocol. So results of baselines show that they run, not how good
    they are. For real results, use a run, another policy or an endpoint instead:

    --agents=search,search:random_kb,runs/quickstart
    --config.model.path=SmolLM2-135M-Instruct --config.instruct=True --config.turn_tokens=0 --config.engine.max_length=2048
    """
    return to_config_dict(
        schema.ComparisonConfig(
            agents=(
                "search",
                "search:random_kb",
                "search:only_table",
                "search:no_search",
                "direct",
                "vanilla_rag_all",
                "ircot_all",
                "iter_retgen_all",
                "universal_rag",
            ),
            benchmarks=("atlas_single", "atlas_multi"),
            questions=64,
            k=2,
            searches=2,
            turn_tokens=64,
            instruct=False,
            settings={"search": {"grammar": "r1_router", "answer_tokens": 24}},
            model=ModelConfig(path="atlas-warm-start"),
            mesh=MeshConfig(cpu_devices=2),
            engine=EngineConfig(rows=32, max_length=512),
        )
    )
