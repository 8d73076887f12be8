"""Requests of the OpenAI protocol: read and checked, their texts and messages as the engine's inputs, and errors.

Beside the protocol's own fields: `top_k`, `include_stop_str_in_output`, `return_token_ids`, `continue_final_message`,
`add_generation_prompt` and `chat_template_kwargs`, as vLLM has them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from routerl_jax.core.files import parse_json
from routerl_jax.core.text import replace_surrogates
from routerl_jax.core.tokenizer import DoesNotFit, Tokenizer
from routerl_jax.engine.sampling import MOST_TOP, Sampling
from routerl_jax.models.image_tokens import PictureReader
from routerl_jax.services.asgi import Refusal

# --- Errors as the OpenAI protocol writes them: `{"error": {"message", "type", "param", "code"}}`. ---


class ApiError(Refusal):
    """A refused request. `kind` is the protocol's `code`; `param` the field that is wrong, "" where it is none."""

    def __init__(
        self, status: int, kind: str, message: str, param: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, kind, message, headers)
        self.param = param


def invalid(message: str, param: str = "", kind: str = "invalid_value") -> ApiError:
    """The error for a field with an invalid value."""
    return ApiError(400, kind, message, param)


def too_long(most: int, has: str, field: str) -> ApiError:
    """The error for a prompt that leaves no room in a context of `most` tokens. `has`: what the prompt has, as its length."""
    message = (
        f"this model's maximum context length is {most} tokens, one of which is to be written, and the prompt has {has}"
    )
    return ApiError(400, "context_length_exceeded", message, field)


def error_body(refusal: Refusal) -> dict[str, Any]:
    """The reply to a refused request."""
    code = {"unauthorized": "invalid_api_key"}.get(refusal.kind, refusal.kind)
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    return {
        "error": {"message": str(refusal), "type": kind, "param": getattr(refusal, "param", "") or None, "code": code}
    }


# --- The fields of a request: each is read once and checked; fields that have not been read are refused. ---


# Fields that do not change the reply.
_IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "parallel_tool_calls",
    }
)
# Fields that are not supported, with the values that ask for nothing and so are accepted.
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "functions": ([],),
    "skip_special_tokens": (False,),
}


class Fields:
    """The fields of a request's JSON object. A field that is null counts as absent.

    The methods that read a field raise ApiError if its value has another type or is out of bounds.
    """

    def __init__(self, body: Any) -> None:
        if not isinstance(body, dict):
            raise invalid(f"the body must be a JSON object, got {type(body).__name__}")
        self._unread: dict[str, Any] = {key: value for key, value in body.items() if value is not None}

    def take(self, name: str, default: Any = None) -> Any:
        """A value of any type."""
        return self._unread.pop(name, default)

    def boolean(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise invalid(f"{name}={value!r} must be true or false", name)
        return value

    def string(self, name: str) -> str:
        """A string; "" if it is not there."""
        value = self.take(name, "")
        if not isinstance(value, str):
            raise invalid(f"{name} must be a string, got {type(value).__name__}", name)
        return value

    def integer(self, name: str, default: int | None, least: int, most: int) -> int | None:
        """An integer within bounds."""
        value = self.take(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise invalid(f"{name}={value!r} must be a whole number from {least} to {most}", name)
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """A number within bounds."""
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise invalid(f"{name}={value!r} must be a number from {least:g} to {most:g}", name)
        return float(value)

    def mapping(self, name: str) -> dict[str, Any]:
        """An object; {} if it is not there."""
        value = self.take(name, {})
        if not isinstance(value, dict):
            raise invalid(f"{name} must be an object, got {type(value).__name__}", name)
        return value

    def end(self) -> None:
        """Raises ApiError if a field is left that asks for something."""
        for name, value in self._unread.items():
            if name in _IGNORED or value in _NEUTRAL.get(name, ()):
                continue
            if name in _NEUTRAL:
                raise invalid(
                    f"{name}={str(value)[:100]} is not supported here; leave it out", name, "unsupported_parameter"
                )
            raise invalid(f"there is no field {name!r} in this request", name, "unknown_parameter")


# --- Requests of the OpenAI protocol, read and checked: what to generate, and how to report it. ---


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
    if not isinstance(tools, list) or not all(
        _names_function(tool) and tool.get("type") == "function" for tool in tools
    ):
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


def _names_function(item: Any) -> bool:
    """Whether a tool, or a call of one, has a function with a name."""
    function = item.get("function") if isinstance(item, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


# --- Turns the texts and messages of a request into the engine's inputs: token ids and pictures. ---


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt for the engine.

    Attributes:
      images: pictures as `data:` URIs, one for each mark of an image among the ids.
      field: the field of the request that it comes from.
    """

    ids: Sequence[int]
    images: Sequence[str] = ()
    field: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture in a message: its `data:` URI, and its field in the request for errors."""

    uri: str
    field: str


def parts(content: Any, field: str) -> list[str | Picture]:
    """A message's content as texts and pictures in order. Raises ApiError."""
    if content is None or isinstance(content, str):
        return [content or ""]
    if not isinstance(content, list):
        raise invalid(f"{field} must be a string or a list of parts, got {type(content).__name__}", field)
    return [_part(part, f"{field}[{i}]") for i, part in enumerate(content)]


def _part(part: Any, field: str) -> str | Picture:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if kind != "image_url":
        raise invalid(f'{field} must be {{"type": "text", ..}} or {{"type": "image_url", ..}}', field)
    address = part.get("image_url")
    address = address.get("url") if isinstance(address, dict) else address
    if not isinstance(address, str) or not address.startswith("data:"):  # a path would be read on this machine
        raise invalid(
            f"{field}.image_url.url must be a data URI: data:image/png;base64,... (nothing is fetched)", field
        )
    return Picture(uri=address, field=field)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts:
    """Makes prompts for one policy.

    Attributes:
      reader: processes pictures; None if the policy sees none.
      size: number of ids in the vocabulary.
      most: tokens of the longest conversation. A prompt that surely has more is refused before it is encoded.
      tags: special tokens that messages may hold: those of the policy's own protocol. Others become plain text.
    """

    tokenizer: Tokenizer
    reader: PictureReader | None
    size: int
    most: int
    tags: Collection[str] = ()

    def of_text(self, prompt: str | list[int]) -> Prompt:
        """The prompt of a text or of token ids. Special tokens in the text are special tokens. Raises ApiError."""
        if isinstance(prompt, str) and self.tokenizer.exceeds(prompt := replace_surrogates(prompt), self.most):
            raise too_long(self.most, f"{len(prompt)} letters", "prompt")
        ids = self.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise invalid("the prompt is empty", "prompt")
        if unknown := next((token for token in ids if not 0 <= token < self.size), None):
            raise invalid(f"prompt: there is no token {unknown}; ids are from 0 to {self.size - 1}", "prompt")
        return Prompt(ids=ids, field="prompt")

    def of_chat(self, request: ChatRequest) -> Prompt:
        """The prompt of messages, in the model's chat template. Raises ApiError."""
        if not self.tokenizer.has_chat_template:
            raise invalid(
                "the model's tokenizer has no chat template: ask /v1/completions with its own text", "messages"
            )
        if request.tools and not self.tokenizer.takes_tools:
            raise invalid("the model's chat template takes no tools", "tools", "unsupported_parameter")
        images: list[str] = []
        messages = [self._message(message, f"messages[{i}]", images) for i, message in enumerate(request.messages)]
        if request.continue_final and messages[-1]["role"] != "assistant":
            raise invalid("continue_final_message: the last message must be the assistant's", "continue_final_message")
        try:
            ids = self.tokenizer.chat(
                messages,
                continue_final=request.continue_final,
                tools=self._plain_all(request.tools),
                settings=request.template,
                most=self.most,
            )
        except DoesNotFit as error:
            raise too_long(self.most, "more", "messages") from error
        except Exception as error:  # templates may raise any exception
            raise invalid(f"the model's chat template takes no such messages: {error}", "messages") from error
        return Prompt(ids=ids, images=images, field="messages")

    def _message(self, message: Mapping[str, Any], field: str, images: list[str]) -> dict[str, Any]:
        role = _ROLES.get(str(message.get("role")))
        if role is None:
            raise invalid(f"{field}.role={message.get('role')!r} must be one of {', '.join(_ROLES)}", f"{field}.role")
        converted: dict[str, Any] = {"role": role, "content": self._content(message.get("content"), field, images)}
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise invalid(f"{field}.tool_calls must be a list, got {type(calls).__name__}", f"{field}.tool_calls")
        if calls:
            converted["tool_calls"] = [self._call(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(calls)]
        for key in ("name", "tool_call_id"):
            if isinstance(value := message.get(key), str):
                converted[key] = self._plain(value)
        return converted

    def _content(self, content: Any, field: str, images: list[str]) -> str:
        texts = []
        for part in parts(content, f"{field}.content"):
            if isinstance(part, str):
                texts.append(self._plain(part))
                continue
            if self.reader is None:
                raise invalid(f"{part.field}: the model sees no pictures", part.field)
            images.append(part.uri)
            texts.append(self.tokenizer.decode(self.reader.marker))
        return "".join(texts)

    def _call(self, call: Any, field: str) -> dict[str, Any]:
        """An earlier call of the policy. Templates take its arguments as an object; requests have them as a string of JSON."""
        if not _names_function(call):
            raise invalid(f"{field} must have a function with a name and arguments", field)
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        try:
            arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
        except ValueError as error:
            raise invalid(f"{field}.function.arguments is no JSON: {error}", field) from error
        return {"type": "function", "function": self._plain_all({"name": function["name"], "arguments": arguments})}

    def _plain_all(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self._plain(key): self._plain_all(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._plain_all(item) for item in value]
        return self._plain(value) if isinstance(value, str) else value

    def _plain(self, text: str) -> str:
        return self.tokenizer.plain(replace_surrogates(text), self.tags)
