"""The configuration of a chat model, and of one that judges answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from routerl_jax.core.checked import Count, NonNegative, Positive, Size, checked
from routerl_jax.llms.judge_styles import JUDGE_STYLES


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


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class JudgeConfig(ChatModelConfig):
    """A language model that says whether answers are right. Without a `model` there is no judge."""

    style: str = "default"  # how it is asked: llms.judge_styles.JUDGE_STYLES
    pictures: bool = False  # it sees the question's pictures, too
    # what an answer counts whose verdict failed or can't be read. zero: wrong; em: exact match decides; leave_out: it is out of
    # means, and its attempt out of the loss
    failed: Literal["zero", "em", "leave_out"] = "zero"
    asks: Size = 3  # times that a verdict is asked for, until one can be read
    temperature: NonNegative = 0.0  # of the first reply; further ones have at least 0.7
    max_tokens: Size = 512  # of a reply
    seconds: Positive = 300.0  # for all verdicts of a step or an evaluation; those that are missing then have failed

    def __post_init__(self) -> None:
        JUDGE_STYLES.get(self.style)
