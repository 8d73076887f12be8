"""Language models behind an OpenAI-compatible endpoint: OpenAI's own, vLLM, SGLang, llama.cpp, and others."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.core.background import shared_loop
from routerl_jax.core.secrets import secret
from routerl_jax.core.text import replace_surrogates, split_thoughts
from routerl_jax.core.time_limit import seconds_left
from routerl_jax.core.types import Message
from routerl_jax.models.images import image_uri
from routerl_jax.services import faults
from routerl_jax.services.base import Completion, with_schema
from routerl_jax.services.config import ChatModelConfig, EndpointConfig
from routerl_jax.services.http import HttpClient, HttpError, ReplyError, error_of
from routerl_jax.services.limits import RateLimiter, acquire_async, open_limiter

# Ways to ask for a schema, strictest first. Servers reject a way that they don't know with one of these statuses.
_FORMATS = ("json_schema", "json_object", "none")
_REJECTED = frozenset({400, 404, 415, 422, 501})
_NO_MESSAGE = "the reply has no choices[0].message"
_TAG = re.compile(r"[<\[].*[>\]]", re.DOTALL)
_NO_STOP = re.compile(r"(?i)unsupported[^.]*\bstop\b|\bstop\b[^.]*(not supported|unsupported)")


class OpenAIModel:
    """A model that answers `POST {base_url}/chat/completions`.

    A schema is sent as `response_format` of type json_schema. If the server rejects that, it is asked for json_object, then for
    plain text, with the schema in the prompt. The way that worked is used from then on. The request adapts in the same way to
    a server that wants `max_completion_tokens`, no temperature, or no stop strings.

    A reply that is of no use (half of one, no JSON, no text) is asked for again, as after a status 500. If there were stop
    strings in a request whose reply has no text, it is asked again without them: a server may stop at a line break before the
    text, or in a thought. A refusal, a filtered reply, and one whose tokens were spent before its text are final.

    Args:
      name: the model's name on the server.
      base_url: such as `https://api.openai.com/v1` or `http://127.0.0.1:8000/v1`; with /chat/completions, exactly that URL.
      api_key_env: environment variable that holds the key; "" sends no key.
      concurrency: most requests in progress at once.
      timeout: seconds for one attempt.
      retries: further attempts, see `services.http.HttpClient`.
      extra: further fields of every request (`{"chat_template_kwargs": {"enable_thinking": False}}`, `seed`, ...).
      limiter: rate limit of requests.

    Raises:
      ValueError: `base_url` is no URL, or the environment variable is not set.
    """

    def __init__(
        self,
        name: str,
        base_url: str,
        *,
        api_key_env: str = "",
        concurrency: int = ChatModelConfig.concurrency,
        timeout: float = ChatModelConfig.timeout,
        retries: int = ChatModelConfig.retries,
        extra: Mapping[str, Any] | None = None,
        limiter: RateLimiter | None = None,
        backoff: float = 0.5,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url={base_url!r} must begin with http:// or https:// (and usually end with /v1)")
        self.name = name
        self.settings = dict(extra or {})  # answers depend on them
        key = secret(api_key_env)
        # a whole address is the server's own, with its last slash
        whole = base_url.rstrip("/").endswith("/chat/completions")
        self._url = base_url if whole else f"{base_url.rstrip('/')}/chat/completions"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._format = 0
        self._tokens_key, self._temperature, self._stop = "max_tokens", True, True
        turn = None if limiter is None else functools.partial(acquire_async, limiter, self._url)
        self._http = HttpClient(
            timeout=timeout, retries=retries, concurrency=concurrency, secret=key, turn=turn, backoff=backoff
        )

    def complete(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        max_tokens: int = 1024,
        temperature: float = 0.0,
        schema: Mapping[str, Any] | None = None,
        sample: int = 0,
        fields: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """One answer per conversation, in order. A conversation that fails has `error` set.

        Args:
          sample: is added to the `seed` of the settings, if there is one.
          fields: further fields of these requests (`stop`, `top_p`, ..). They override those of the settings.
        """

        seconds = seconds_left(math.inf)

        async def ask(conversation: Sequence[Message]) -> Completion:
            options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "schema": schema}
            try:
                async with asyncio.timeout(None if seconds == math.inf else seconds):
                    return await self.complete_async(conversation, **options, sample=sample, fields=fields)
            except TimeoutError:
                return Completion(
                    error=f"{self._url}: no answer within the {seconds:.3g} s that are left",
                    finish="error",
                    fault=faults.NO_REPLY,
                )

        async def ask_all() -> list[Completion]:
            return await asyncio.gather(*map(ask, conversations))

        return shared_loop().run(ask_all())

    async def complete_async(
        self,
        conversation: Sequence[Message],
        *,
        max_tokens: int = 1024,
        temperature: float = 0.0,
        schema: Mapping[str, Any] | None = None,
        sample: int = 0,
        fields: Mapping[str, Any] | None = None,
    ) -> Completion:
        """One answer. For coroutines on the shared background loop."""
        level, spent = self._format, collections.Counter[str]()
        try:
            pictures = [[image_uri(image) for image in message.images] for message in conversation]
        except ValueError as error:
            return Completion(error=str(error), finish="error", fault=faults.PICTURE)
        while True:
            messages = (
                with_schema(conversation, schema) if schema and _FORMATS[level] != "json_schema" else conversation
            )
            body: dict[str, Any] = {
                "model": self.name,
                "messages": [
                    {"role": message.role, "content": _content(message, uris)}
                    for message, uris in zip(messages, pictures)
                ],
                **self.settings,
            }
            if sample and isinstance(body.get("seed"), int):
                body["seed"] += sample
            body |= fields or {}
            if schema is not None:
                body |= _response_format(_FORMATS[level], schema)
            try:
                answer = await self._post(body, max_tokens, temperature, spent)
            except HttpError as error:
                if schema is not None and error.status in _REJECTED and _FORMATS[level] != "none":
                    level += 1
                    continue
                fault = error.fault or faults.of_status(error.status, str(error))
                answer = Completion(error=str(error), finish="error", fault=fault)
            if schema is not None and level > self._format and answer.error is None:
                self._format = level
            added = {name: getattr(answer, name) + spent[name] for name in ("prompt_tokens", "tokens", "retries")}
            return dataclasses.replace(answer, **added)

    def close(self) -> None:
        """Closes the connections."""
        shared_loop().run(self._http.close())

    async def _post(
        self, fields: dict[str, Any], max_tokens: int, temperature: float, spent: collections.Counter[str]
    ) -> Completion:
        """Sends a request with the fields that the server accepts. `spent` counts retries, and tokens of useless replies."""
        stops: Sequence[str] = ()

        def failure(reply: Any) -> ReplyError | None:
            error = _failure(reply, stops, bool(fields.get("continue_final_message")))
            if error is not None and isinstance(reply, dict):
                spent["prompt_tokens"] += _count(reply.get("usage"), "prompt_tokens")
                spent["tokens"] += _count(reply.get("usage"), "completion_tokens")
            return error

        for _ in range(5):
            if not self._stop:
                fields = _without_stop(fields)
            stops = fields.get("stop", ()) if "stop" not in self.settings else ()
            sent = fields | {self._tokens_key: max_tokens} | ({"temperature": temperature} if self._temperature else {})
            try:
                reply = await self._http.request(
                    "POST", self._url, headers=self._headers, body=sent, failure=failure, only_json=True
                )
            except HttpError as error:
                spent["retries"] += error.tries - 1
                if error.fault == faults.EMPTY and error.status == 0:  # there were stop strings
                    spent["retries"] += 1
                    fields = _without_stop(fields)
                elif error.status not in _REJECTED or not self._learn_dialect(str(error), sent):
                    raise
                continue
            spent["retries"] += reply.tries - 1
            return _completion(reply.json())
        raise HttpError(f"{self._url}: the server accepts no form of the request", 400)

    def _learn_dialect(self, message: str, sent: Mapping[str, Any]) -> bool:
        """True if the server rejects a field that can be written in another way or left out. Later requests do so."""
        if "max_completion_tokens" in message and "max_tokens" in sent:
            self._tokens_key = "max_completion_tokens"
            return True
        if "temperature" in message and "temperature" in sent:
            self._temperature = False
            return True
        if "stop" in sent and _NO_STOP.search(message):
            self._stop = False
            return True
        return False


def _without_stop(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != "stop"}


def _content(message: Message, pictures: Sequence[str]) -> str | list[dict[str, Any]]:
    """A message's content: a string, or, if it has pictures, a list of parts with each picture at its place."""
    if not pictures:
        return message.content
    parts: list[dict[str, Any]] = []
    position = 0
    for offset, uri in zip(message.image_offsets or [0] * len(pictures), pictures, strict=True):
        if text := message.content[position:offset]:
            parts.append({"type": "text", "text": text})
        parts.append({"type": "image_url", "image_url": {"url": uri}})
        position = offset
    text = message.content[position:]
    return [*parts, {"type": "text", "text": text}] if text or not message.image_offsets else parts


def _response_format(level: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    if level == "json_schema":
        name = "".join(c for c in str(schema.get("title", "")) if c.isalnum() or c in "_-")[:64] or "answer"
        return {
            "response_format": {"type": level, "json_schema": {"name": name, "schema": dict(schema), "strict": True}}
        }
    return {"response_format": {"type": level}} if level == "json_object" else {}


def _failure(reply: Any, stops: Sequence[str], continued: bool) -> ReplyError | None:
    """Why a reply with status 200 is of no use: its own error, or that of its first choice; half a reply; no text.

    Args:
      stops: stop strings that can be left out. If one of them is no tag, the reply may end in the line of a thought.
      continued: the reply goes on with a message, and may be empty.
    """
    if (error := error_of(reply)) is not None:
        return error
    if isinstance(reply, dict) and "choices" in reply and not reply["choices"]:
        return ReplyError(502, "no choices")
    try:
        choice = reply["choices"][0]
        finish = choice.get("finish_reason")
        if (error := error_of({"error": choice.get("error")})) is not None:
            return error
        if finish in ("error", "abort"):  # OpenRouter's and vLLM's, perhaps with half a text
            return ReplyError(502, "the server ended the answer")
        answer = _completion(reply)
    except (LookupError, TypeError, AttributeError, ValueError):
        return ReplyError(502, f"{_NO_MESSAGE}: {json.dumps(reply)[:200]}", faults.HALF_REPLY)
    lines = not all(map(_TAG.fullmatch, stops))
    text = split_thoughts(answer.text)[1] if lines else answer.text
    final = answer.fault not in ("", faults.EMPTY) or (finish == "length" and answer.tokens > 0)  # it would be so again
    if text.strip() or final or (continued and answer.error is None):
        return None
    return ReplyError(
        0 if lines else 502, answer.error or f"an answer without text (finish_reason {finish!r})", faults.EMPTY
    )


def _completion(reply: Any) -> Completion:
    """A reply as a Completion. Raises ValueError if it breaks the protocol."""
    try:
        choice = reply["choices"][0]
        message = choice["message"]
        content = message.get("content")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"{_NO_MESSAGE}: {json.dumps(reply)[:200]}") from error
    if isinstance(content, list):  # a list of parts
        content = "".join(
            part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        )
    usage = reply.get("usage") or {}
    finish = choice.get("finish_reason") or "stop"
    text, error, fault = "", None, ""
    if message.get("refusal"):
        error, fault = f"the model refused: {message['refusal']}", faults.REFUSED
    elif finish == "content_filter":
        error, fault = "the server's filter withheld the answer", faults.FILTERED
    elif not isinstance(content, str):
        error, fault = f"an answer without text (finish_reason {finish!r})", faults.EMPTY
    else:
        text = replace_surrogates(content)
    return Completion(
        text=text,
        error=error,
        finish="error" if error else "length" if finish == "length" else "stop",
        prompt_tokens=_count(usage, "prompt_tokens"),
        tokens=_count(usage, "completion_tokens"),
        fault=fault,
        stopped_by=stopped_by if isinstance(stopped_by := choice.get("stop_reason"), str) else "",
    )


def _count(usage: Any, key: str) -> int:
    value = usage.get(key) if isinstance(usage, Mapping) else None
    return value if isinstance(value, int) else 0


def endpoint_model(config: EndpointConfig) -> OpenAIModel:
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
