"""Turns the texts and messages of a request into the engine's inputs: token ids and pictures."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from routerl_jax.core.text import replace_surrogates
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.extras.policy_server.errors import invalid
from routerl_jax.extras.policy_server.protocol import ChatRequest
from routerl_jax.models.image_tokens import PictureReader

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
      tags: special tokens that messages may hold: those of the policy's own protocol. Others become plain text.
    """

    tokenizer: Tokenizer
    reader: PictureReader | None
    size: int
    tags: Collection[str] = ()

    def of_text(self, prompt: str | list[int]) -> Prompt:
        """The prompt of a text or of token ids. Special tokens in the text are special tokens. Raises ApiError."""
        ids = self.tokenizer.encode_prompt(replace_surrogates(prompt)) if isinstance(prompt, str) else prompt
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
            )
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
        if not (isinstance(call, dict) and _names_function(call)):
            raise invalid(f"{field} must have a function with a name and arguments", field)
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError) as error:
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


def _names_function(call: Mapping[str, Any]) -> bool:
    function = call.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str)
