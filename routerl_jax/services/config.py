"""The configurations of chat models and of judges."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from routerl_jax.core.config import Count, NonNegative, Positive, Size, checked
from routerl_jax.services.judge_styles import JUDGE_STYLES

Form = Literal["turns", "continue"]  # how a conversation becomes messages (services.transcript)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class EndpointConfig:
    """A language model behind an OpenAI-compatible endpoint. It holds no keys, only the names of environment variables with
    keys."""

    model: str = ""  # the model's name on the server
    base_url: str = "http://127.0.0.1:8000/v1"  # URL of the endpoint, with its /v1
    api_key_env: str = ""  # environment variable with the key; empty: no key is sent
    concurrency: Size = 32  # requests under way at once
    timeout: Positive = 120.0  # seconds for one attempt
    retries: Count = 4  # attempts after the first
    rate: NonNegative = 0.0  # requests per second; 0: no limit
    redis_env: str = ""  # environment variable with the URL of a Redis server that shares the limit among processes
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # further fields of every request


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ChatModelConfig(EndpointConfig):
    """A language model and how to reach it."""

    # openai: behind an endpoint; engine: on this machine's devices (`model` is a directory, hub id or packaged model)
    kind: str = "openai"
    rows: Size = 16  # engine: number of conversations at once
    max_length: Size = 4096  # engine: most tokens of prompt and answer; the model's own limit holds, too
    dtype: str = "bfloat16"  # engine: dtype of the weights

    def __post_init__(self) -> None:
        if self.kind == "engine" and self.extra:
            raise ValueError(
                f"extra={dict(self.extra)!r} is of requests to an endpoint, and kind='engine' sends none: leave it out"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class PolicyModelConfig(EndpointConfig):
    """An endpoint's language model as the policy of agents (`services.policy.ChatModel`). An empty `model` means none."""

    max_length: Size = 32768  # most tokens of a conversation; an estimate by the usual vocabularies
    # how observations within the policy's turn are sent. turns: as a user's message; continue: as part of the model's own
    # unfinished message, which the endpoint continues (`continue_final_message` of vLLM, SGLang and llama.cpp)
    form: Form = "turns"
    pictures: bool = True  # the model sees pictures
    min_pixels: Size = 56 * 56  # fewest pixels of a picture that is sent
    max_pixels: Size = 28 * 28 * 1280  # most pixels of a picture that is sent
    token_rate: NonNegative = 0.0  # tokens per minute, read and written together; 0: no limit
    price_read: NonNegative = 0.0  # money per million tokens of prompts
    price_written: NonNegative = 0.0  # money per million tokens of replies
    budget: NonNegative = 0.0  # most money that a process may spend on replies; 0: no bound

    def __post_init__(self) -> None:
        if self.budget and not (self.price_read or self.price_written):
            raise ValueError(f"budget={self.budget:g} needs a price: set price_read and price_written")
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels={self.min_pixels} is above max_pixels={self.max_pixels}")


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class JudgeConfig(ChatModelConfig):
    """A language model that says whether answers are right. An empty `model` means no judge."""

    style: str = "default"  # how the judge is asked: services.judge_styles.JUDGE_STYLES
    pictures: bool = False  # the judge sees the question's pictures, too
    # how an answer counts if its verdict failed or can't be read. zero: as wrong; em: exact match decides; leave_out: it is
    # left out of means, and its rollout out of the loss; refuse: the program ends with an error
    failed: Literal["zero", "em", "leave_out", "refuse"] = "zero"
    asks: Size = 3  # most requests for one verdict, until one can be read
    temperature: NonNegative = 0.0  # of the first reply; further replies have at least 0.7
    max_tokens: Size = 512  # most tokens of a reply
    seconds: Positive = 300.0  # limit for all verdicts of a step or an evaluation; those missing then have failed

    def __post_init__(self) -> None:
        super().__post_init__()
        JUDGE_STYLES.get(self.style)
