"""Requests of the OpenAI protocol, read and checked: what to generate, and how to report it.

Beside the protocol's own fields: `top_k`, `include_stop_str_in_output`, `return_token_ids`, `continue_final_message`,
`add_generation_prompt` and `chat_template_kwargs`, as vLLM has them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.engine.sampling import MOST_TOP, Sampling
from routerl_jax.extras.policy_server.errors import invalid
from routerl_jax.extras.policy_server.fields import Fields

_MOST_N = 128  # choices of a prompt
_MOST_STOPS, _LONGEST_STOP = 16, 256  # strings, letters
_COMPLETION_TOKENS = 16  # of a text completion where the request does not say, as in OpenAI's


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """Settings of generation, and of the report.

    Attributes:
      model: the name that the request gives.
      n: number of choices for each prompt.
      stops: stop strings. A choice's text ends before the first one, or after it (`keep_stop`).
      max_tokens: most tokens of a choice; None: as many as there is room for.
      seed: the same seed gives the same text; None: the text is always another.
      logprobs: report the log-probability of each token, and of the `top` likeliest tokens in its place.
      token_ids: report the token ids of the prompt and the choices.
      stream: send chunks. `usage`: report the numbers of tokens in a last chunk.
    """

    model: str
    n: int = 1
    sampling: Sampling = Sampling()
    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    max_tokens: int | None = None
    seed: int | None = None
    logprobs: bool = False
    top: int = 0
    token_ids: bool = False
    stream: bool = False
    usage: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A chat to continue.

    Attributes:
      messages: the messages as they came.
      tools: descriptions of functions that the policy may call.
      continue_final: the policy continues the last message, which is the assistant's, instead of beginning a new one.
      template: further variables of the chat template.
    """

    generation: GenerationSettings
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    continue_final: bool = False
    template: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextRequest:
    """Texts, or token ids, to continue."""

    generation: GenerationSettings
    prompts: Sequence[str | list[int]]


def read_chat(body: Any, temperature: float = 1.0) -> ChatRequest:
    """A request to /v1/chat/completions. `temperature` is the default of its temperature. Raises ApiError."""
    fields = Fields(body)
    messages = fields.take("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise invalid("messages must be a list of at least one object with role and content", "messages")
    most = [fields.integer(name, None, 1, 2**31 - 1) for name in ("max_completion_tokens", "max_tokens")]
    logprobs = fields.boolean("logprobs")
    top = fields.integer("top_logprobs", 0, 0, MOST_TOP) or 0
    if top and not logprobs:
        raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
    tools = _tools(fields)
    template = fields.mapping("chat_template_kwargs")
    continue_final = fields.boolean("continue_final_message")
    if not fields.boolean("add_generation_prompt", not continue_final):
        template["add_generation_prompt"] = False
    elif continue_final:
        raise invalid("continue_final_message=true needs add_generation_prompt=false", "add_generation_prompt")
    generation = _generation(fields, temperature, max_tokens=most[0] or most[1], logprobs=logprobs, top=top)
    return ChatRequest(
        generation=generation, messages=messages, tools=tools, continue_final=continue_final, template=template
    )


def read_text(body: Any) -> TextRequest:
    """A request to /v1/completions. Raises ApiError."""
    fields = Fields(body)
    prompt = fields.take("prompt")
    prompts = [prompt] if isinstance(prompt, str) or _is_ids(prompt) else prompt
    if (
        not isinstance(prompts, list)
        or not prompts
        or not all(isinstance(item, str) or _is_ids(item) for item in prompts)
    ):
        raise invalid("prompt must be a string, a list of token ids, or a list of such", "prompt")
    top = fields.integer("logprobs", None, 0, MOST_TOP)
    most = fields.integer("max_tokens", _COMPLETION_TOKENS, 1, 2**31 - 1)
    return TextRequest(
        generation=_generation(fields, 1.0, max_tokens=most, logprobs=top is not None, top=top or 0), prompts=prompts
    )


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)


def _generation(fields: Fields, temperature: float, **settings: Any) -> GenerationSettings:
    """The fields that both kinds of requests have. Fields that have not been read by now are refused."""
    model = fields.string("model")
    if not model:
        raise invalid("model is missing: GET /v1/models lists what there is", "model", "missing_required_parameter")
    n = fields.integer("n", 1, 1, _MOST_N) or 1
    top_p = fields.number("top_p", 1.0, 0.0, 1.0)
    if not top_p:
        raise invalid("top_p=0 must be above 0 (temperature=0 is greedy)", "top_p")
    top_k = fields.integer("top_k", 0, -1, 2**31 - 1) or 0
    sampling = Sampling(
        temperature=fields.number("temperature", temperature, 0.0, 100.0), top_p=top_p, top_k=max(top_k, 0)
    )
    stream = fields.boolean("stream")
    options = fields.mapping("stream_options")
    if options and not stream:
        raise invalid("stream_options needs stream=true", "stream_options")
    streaming = Fields(options)
    usage = streaming.boolean("include_usage")
    streaming.take("include_obfuscation")  # random padding, which this server never sends
    streaming.end()
    generation = GenerationSettings(
        model=model,
        n=n,
        sampling=sampling,
        stops=_stops(fields),
        keep_stop=fields.boolean("include_stop_str_in_output"),
        seed=fields.integer("seed", None, -(2**63), 2**64 - 1),
        token_ids=fields.boolean("return_token_ids"),
        stream=stream,
        usage=usage,
        **settings,
    )
    fields.end()
    return generation


def _stops(fields: Fields) -> tuple[str, ...]:
    stops = fields.take("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise invalid("stop must be a string that is not empty, or a list of such", "stop")
    if len(stops) > _MOST_STOPS or any(len(stop) > _LONGEST_STOP for stop in stops):
        raise invalid(f"stop may have {_MOST_STOPS} strings of {_LONGEST_STOP} letters at most", "stop")
    return tuple(dict.fromkeys(stops))


def _tools(fields: Fields) -> list[dict[str, Any]]:
    """The functions that the policy may call. It can't be forced to call one, so a request for that is refused."""
    tools, choice = fields.take("tools", []), fields.take("tool_choice", "auto")
    if not isinstance(tools, list) or not all(map(_is_function, tools)):
        raise invalid('tools must be a list of {"type": "function", "function": {"name": .., ..}}', "tools")
    if choice == "none":
        return []
    if choice != "auto":
        raise invalid(
            f"tool_choice={choice!r}: a policy can't be made to call a function here; take auto or none",
            "tool_choice",
            "unsupported_value",
        )
    return tools


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
