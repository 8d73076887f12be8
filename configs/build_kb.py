"""Building a dense knowledge base; every key can be given on the command line."""

import ml_collections

from routerl_jax.core.config import to_config_dict
from routerl_jax.knowledge.build import BuildConfig


def get_config() -> ml_collections.ConfigDict:
    """A dense knowledge base over MiniLM embeddings, searched with ScaNN.

    python -m launch.build_kb --config=configs/build_kb.py --workdir=DIR --config.corpus=FILE.jsonl.gz

    About 35 passages of 90 words, or 170 of 20 words, a second on two CPU cores: 4 minutes for the 7,795 passages of
    HotpotQA's distractor pool. `knowledge.build.BuildConfig` explains the keys.
    """
    return to_config_dict(BuildConfig())
