"""Builds a knowledge base of any kind. Every key can be set on the command line."""

import ml_collections

from routerl_jax.core.config import to_config_dict
from routerl_jax.knowledge.builds import KB_BUILDERS


def get_config(kind: str = "dense_text") -> ml_collections.ConfigDict:
    """A knowledge base of the kind after the colon; by default, passages with MiniLM embeddings and ScaNN.

    python -m launch.build_kb --config=configs/build_kb.py --workdir=DIR --config.corpus=FILE.jsonl.gz
    python -m launch.build_kb --config=configs/build_kb.py:dense_table --workdir=DIR --config.corpus=TABLES.jsonl.gz

    Two idle CPU cores embed 28 passages of 90 words per second: five minutes for the 7,795 passages of HotpotQA's distractor
    pool. The class of the kind explains the keys: `knowledge.build.BuildConfig` for these two.
    """
    return to_config_dict(KB_BUILDERS.get(kind).config(kind=kind))
