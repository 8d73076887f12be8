"""The configuration of a chat model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from routerl_jax.core.checked import Count, NonNegative, Positive, Size, checked


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ChatModelConfig:
    """Which language model, and how to reach it. Keys are never in here, only the names of variables that hold them."""

    kind: str = "openai"  # "openai": behind an OpenAI-compatible endpoint; "engine": on this machine's devices
    model: str = ""  # openai: its name on the server; engine: a directory, hub id or packaged model
    base_url: str = "http://127.0.0.1:8000/v1"  # openai
    api_key_env: str = ""  # openai: environment variable with the key; empty: none is sent
    concurrency: Size = 32  # openai: requests under way at once
    timeout: Positive = 120.0  # openai: seconds for one attempt
    retries: Count = 4  # openai: attempts after the first
    rate: NonNegative = 0.0  # openai: requests per second; 0: no limit
    redis_env: str = ""  # openai: variable with the URL of a Redis that holds the limit for all processes
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # openai: further fields of every request
    rows: Size = 16  # engine: conversations at once
    max_length: Size = 4096  # engine: tokens of prompt and answer, at most what the model takes
    dtype: str = "bfloat16"  # engine: of the weights
