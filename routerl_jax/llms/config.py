"""The configuration of a chat model, and of one that judges answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from routerl_jax.core.checked import Count, NonNegative, Positive, Size, checked
from routerl_jax.llms.judge_styles import JUDGE_STYLES

Form = Literal["turns", "continue"]  # how a conversation becomes messages (llms.transcript)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class EndpointConfig:
    """A language model behind an OpenAI-compatible endpoint. Keys are never in here, only the names of variables that hold
    them."""

    model: str = ""  # its name on the server
    base_url: str = "http://127.0.0.1:8000/v1"  # URL of the endpoint, with its /v1
    api_key_env: str = ""  # environment variable with the key; empty: none is sent
    concurrency: Size = 32  # requests under way at once
    timeout: Positive = 120.0  # seconds for one attempt
    retries: Count = 4  # attempts after the first
    rate: NonNegative = 0.0  # requests per second; 0: no limit
    redis_env: str = ""  # variable with the URL of a Redis that holds the limit for all processes
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # further fields of every request


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ChatModelConfig(EndpointConfig):
    """Which language model, and how to reach it."""

    # "openai": behind an endpoint; "engine": on this machine's devices, with a directory, hub id or packaged model for `model`
    kind: str = "openai"
    rows: Size = 16  # engine: conversations at once
    max_length: Size = 4096  # engine: tokens of prompt and answer, at most what the model takes
    dtype: str = "bfloat16"  # engine: of the weights


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class PolicyModelConfig(EndpointConfig):
    """A language model behind an endpoint as the policy of agents (`llms.policy.ChatModel`); without a `model` none."""

    max_length: Size = 32768  # tokens of a conversation, about: they are counted as the usual vocabularies have them
    # what an agent's surroundings say within its turn. turns: as a user's message; continue: as a part of the model's own
    # unfinished message, with which the endpoint goes on (`continue_final_message` of vLLM and SGLang)
    form: Form = "turns"
    pictures: bool = True  # it sees pictures
    min_pixels: Size = 56 * 56  # of a picture that is sent
    max_pixels: Size = 28 * 28 * 1280  # likewise, at most
    token_rate: NonNegative = 0.0  # tokens per minute, read and written; 0: no limit
    price_read: NonNegative = 0.0  # money per million tokens of prompts
    price_written: NonNegative = 0.0  # money per million tokens of replies
    budget: NonNegative = 0.0  # most money for all replies of a process, in the same unit; 0: no bound

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise ValueError(f"form={self.form!r} must be one of {', '.join(get_args(Form))}")
        if self.budget and not (self.price_read or self.price_written):
            raise ValueError(f"budget={self.budget:g} needs a price: set price_read and price_written")
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels={self.min_pixels} is above max_pixels={self.max_pixels}")


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class JudgeConfig(ChatModelConfig):
    """A language model that says whether answers are right. Without a `model` there is no judge."""

    style: str = "default"  # how it is asked: llms.judge_styles.JUDGE_STYLES
    pictures: bool = False  # it sees the question's pictures, too
    # score of an answer whose verdict failed or can't be read. zero: wrong; em: exact match decides; leave_out: it is out of
    # means, and its attempt out of the loss
    failed: Literal["zero", "em", "leave_out"] = "zero"
    asks: Size = 3  # times that a verdict is asked for, until one can be read
    temperature: NonNegative = 0.0  # of the first reply; further ones have at least 0.7
    max_tokens: Size = 512  # of a reply
    seconds: Positive = 300.0  # time for all verdicts of a step or an evaluation; those still missing have failed

    def __post_init__(self) -> None:
        JUDGE_STYLES.get(self.style)
