"""Opens the policies of a comparison: that of the configuration (on local devices or behind an endpoint), and those of runs."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

from flax import nnx

from routerl_jax.core.config import naming
from routerl_jax.engine.policy import Policy
from routerl_jax.extras.comparison.config import ComparisonConfig
from routerl_jax.models.lora import digest
from routerl_jax.services.policy import ChatModel
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.load import load_config, load_policy
from routerl_jax.training.setup import build_mesh, build_policy, make_engine


@contextlib.contextmanager
def open_policy(run: str, config: ComparisonConfig) -> Iterator[tuple[Policy, dict[str, Any]]]:
    """Opens a policy, with its description.

    The description identifies it: the model of the endpoint, or a digest of the weights. For a run it also has the `model` that
    the run started from.

    Args:
      run: directory of the run whose policy it is; "": the policy of the configuration.

    Raises:
      ValueError: there is no policy, or it can't be used as the configuration says.
    """
    if not run and config.chat_model.model:
        with naming("config.chat_model"):
            endpoint = ChatModel(config.chat_model)
        try:
            yield endpoint, {"chat model": endpoint.about}
        finally:
            endpoint.end()
        return
    mesh = build_mesh(config.mesh)
    if run:
        directory = pathlib.Path(run).expanduser()
        trained = load_config(directory)
        model = load_policy(directory, trained, mesh)
    else:
        trained = TrainConfig(kind="sft", model=config.model, mesh=config.mesh, engine=config.engine)
        model = build_policy(trained, mesh)
    yield make_engine(trained, model), {**names(run, config), "weights digest": digest(nnx.state(model))}


def names(run: str, config: ComparisonConfig) -> dict[str, str]:
    """The part of a policy's description that says what it is called, without opening it."""
    if run:
        return {"name": run, "model": load_config(pathlib.Path(run).expanduser()).model.path}
    return {} if config.chat_model.model else {"name": config.model.path}


def check(config: ComparisonConfig) -> None:
    """Raises ValueError if the configuration names no policy."""
    if not (config.model.path or config.model.architecture or config.chat_model.model):
        raise ValueError(
            "the agents need a policy: give config.model.path (a directory, hub id or packaged model), or "
            "config.chat_model.model of an endpoint"
        )
