"""Serves knowledge bases. Every key can be set on the command line; the most common ones have flags of their own."""

import ml_collections

from routerl_jax.core.config import to_config_dict
from routerl_jax.extras.kb_server.app import ServeConfig


def get_config(knowledge_bases: str = "") -> ml_collections.ConfigDict:
    """A server of the knowledge bases after the colon, NAME=DIRECTORY separated by commas.

    python -m launch.serve_kb --config=configs/serve_kb.py:wiki=kb/wiki,tables=kb/tables --config.port=8000

    `extras.kb_server.app.ServeConfig` explains the keys.
    """
    pairs = (pair.partition("=") for pair in knowledge_bases.split(",") if pair)
    return to_config_dict(ServeConfig(knowledge_bases={name: directory for name, _, directory in pairs}))
