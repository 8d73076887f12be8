"""Makes chat models from their configurations."""

from __future__ import annotations

from collections.abc import Callable

from routerl_jax.core.registry import Registry
from routerl_jax.services.base import ChatModel
from routerl_jax.services.config import ChatModelConfig, EndpointConfig
from routerl_jax.services.limits import open_limiter
from routerl_jax.services.openai import OpenAIModel
from routerl_jax.services.secrets import secret

CHAT_MODELS: Registry[Callable[[ChatModelConfig], ChatModel]] = Registry("kind of chat model")


def chat_model(config: ChatModelConfig) -> ChatModel:
    """The chat model of a configuration.

    Raises:
      ValueError: no model is named, the kind is unknown, or an environment variable is not set.
    """
    if not config.model:
        raise ValueError(
            "the chat model's `model` is not set: give its name on the server, or a directory for kind='engine'"
        )
    return CHAT_MODELS.get(config.kind)(config)


@CHAT_MODELS.register("openai")
def endpoint_model(config: EndpointConfig) -> ChatModel:
    """A model behind an endpoint. Raises ValueError as `OpenAIModel` does."""
    limiter = open_limiter(config.rate, redis=secret(config.redis_env)) if config.rate else None
    return OpenAIModel(
        config.model,
        config.base_url,
        api_key_env=config.api_key_env,
        concurrency=config.concurrency,
        timeout=config.timeout,
        retries=config.retries,
        extra=config.extra,
        limiter=limiter,
    )


@CHAT_MODELS.register("engine")
def _engine(config: ChatModelConfig) -> ChatModel:
    from routerl_jax.engine.engine import Engine
    from routerl_jax.models.decoder import Decoder
    from routerl_jax.models.huggingface import load_pretrained
    from routerl_jax.models.lora import merged
    from routerl_jax.services.engine import EngineModel

    model = load_pretrained(config.model, dtype=config.dtype)
    if not isinstance(model, Decoder):
        raise ValueError(f"model={config.model!r} is no decoder, so it can't answer")
    model = merged(model)
    engine = Engine(model, rows=config.rows, max_length=min(config.max_length, model.config.max_length))
    return EngineModel(engine, config.model)
