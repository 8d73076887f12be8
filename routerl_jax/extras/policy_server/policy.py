"""A policy behind the OpenAI protocol: its replies, whole or as chunks of a stream, and the calls of functions in them."""

from __future__ import annotations

import dataclasses
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any

from routerl_jax.agents.tool_calls import FORMS
from routerl_jax.core.files import check_depth
from routerl_jax.core.text import replace_surrogates, split_thoughts
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.engine.loop import EngineLoop
from routerl_jax.engine.policy import TopLogprobs
from routerl_jax.extras.policy_server.generator import Admission, ChoiceDelta, Generator
from routerl_jax.extras.policy_server.protocol import GenerationSettings, Prompt, Prompts, read_chat, read_text

# --- Calls of functions in a served reply, in the forms of agents/tool_calls.py. ---


_OPENING, _CLOSING = (re.escape(mark) for mark in FORMS["hermes"].marks[:2])
_HERMES = re.compile(rf"{_OPENING}(.*?)(?:{_CLOSING}|\Z)", re.DOTALL)
_BETWEEN = re.compile(r"\s*(;?)\s*")
(_LLAMA,) = FORMS["llama"].marks
_KEYS = [form.key for form in FORMS.values()]


def read_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The text of a reply without its calls, and the calls as the OpenAI protocol has them, in order.

    Hermes: `<tool_call>{"name": .., "arguments": {..}}</tool_call>`, any number of them among other text. Llama 3: the whole
    reply is `{"name": .., "parameters": {..}}`, perhaps after `<|python_tag|>`, several with `;` between them. Text that has
    neither form stays text, and so do thoughts, whatever they name.
    """
    said = split_thoughts(text)[1]
    if matches := list(_HERMES.finditer(said)):
        calls = [_call(match[1].strip()) for match in matches]
        if all(calls):
            edges = [0, *(edge for match in matches for edge in match.span()), len(text)]
            kept = "".join(text[begin:end] for begin, end in zip(edges[::2], edges[1::2]))
            return kept.strip(), [call for call in calls if call]
        return text, []
    whole = said.strip().removeprefix(_LLAMA).strip()
    if whole.startswith("{"):
        calls = [_call(part) for part in _split(whole)]
        if calls and all(calls):
            before = text[: said.index(whole)].strip().removesuffix(_LLAMA)
            return before.strip(), [call for call in calls if call]
    return text, []


def _split(text: str) -> list[str]:
    """The JSON objects of a text that has `;` between them; the text itself if it has another form."""
    decoder, parts, at = json.JSONDecoder(), [], 0
    while at < len(text):
        try:
            _, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return [text]
        parts.append(text[at:end])
        between = _BETWEEN.match(text, end)
        assert between is not None
        at = between.end()
        if at < len(text) and not between[1]:
            return [text]
    return parts


def _call(text: str) -> dict[str, Any] | None:
    """The call of a JSON text; None if it is no call."""
    try:
        parsed = json.loads(text, parse_constant=_no_json)
        check_depth(parsed)
    except (ValueError, RecursionError):
        return None
    if not isinstance(parsed, dict) or not isinstance(parsed.get("name"), str):
        return None
    arguments = next((parsed[key] for key in _KEYS if key in parsed), None)
    if not isinstance(arguments, dict):
        return None
    function = {"name": parsed["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
    function = {key: replace_surrogates(value) for key, value in function.items()}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON, though Python reads it")


# --- Replies of the OpenAI protocol: one JSON object, or the chunks of a stream. ---


_LEAST = -9999.0  # stands for minus infinity, as JSON has none
_GROWS = ("text", "prompt", "tokens", "logprobs", "tops")


def new_head(prefix: str, model: str) -> dict[str, Any]:
    """The fields that all chunks of a reply have in common."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}


def usage(read: int, written: int) -> dict[str, int]:
    """Numbers of tokens, as the protocol has them."""
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def no_usage(generation: GenerationSettings) -> dict[str, None]:
    """The usage of a chunk that is not the last: null if the client asked for usage, else absent."""
    return {"usage": None} if generation.usage else {}


@dataclasses.dataclass(kw_only=True)
class PolicyReply:
    """A reply of the server. It collects the deltas of the policy's choices, and writes them as the protocol's JSON.

    Attributes:
      chat: the reply is of /v1/chat/completions, else of /v1/completions.
      tools: the policy was offered functions, so its text may be calls of them.
      choices: by number, all that has come of a choice as one delta.
      sent: by number, letters of the tokens' own texts that have been sent (`text_offset`).
    """

    generator: Generator
    prompts: Sequence[Prompt]
    tokenizer: Tokenizer
    generation: GenerationSettings
    chat: bool
    tools: bool = False
    head: dict[str, Any] = dataclasses.field(default_factory=dict)
    choices: dict[int, ChoiceDelta] = dataclasses.field(default_factory=dict)
    sent: dict[int, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.head = new_head("chatcmpl" if self.chat else "cmpl", self.generation.model)

    @property
    def stream(self) -> bool:
        """Whether it is wanted in chunks."""
        return self.generation.stream

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks, as they come."""
        deltas = self.generator.deltas(self.prompts, self.generation)
        try:
            async for delta in deltas:
                whole, before = delta, self.choices.get(delta.index)
                if before is not None:
                    joined = {name: getattr(before, name) + getattr(delta, name) for name in _GROWS}
                    whole = dataclasses.replace(delta, **joined)
                self.choices[delta.index] = whole
                if self.stream and (chunk := self._chunk_of(delta)) is not None:
                    yield chunk
        finally:
            await deltas.aclose()  # type: ignore[attr-defined]
        if self.stream and self.generation.usage:
            yield {**self._chunk([]), "usage": self._usage()}

    def whole(self) -> dict[str, Any]:
        """The reply, after the last chunk."""
        choices = [self._choice(self.choices[index], whole=True) for index in sorted(self.choices)]
        kind = "chat.completion" if self.chat else "text_completion"
        reply = {**self.head, "object": kind, "choices": choices, "usage": self._usage()}
        if self.generation.token_ids and self.chat:
            reply["prompt_token_ids"] = list(self.choices[0].prompt)
        return reply

    def _chunk_of(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        """The chunk to send for a delta that is in its choice; None if there is none. Where the policy may call functions, a
        choice is sent when it is over, as its text may turn out to be a call until then."""
        first = not delta.tokens and not delta.finish
        if self.tools and not first:
            if not delta.finish:
                return None
            delta = dataclasses.replace(self.choices[delta.index], prompt=())
        visible = (
            delta.text or delta.finish or (delta.tokens and (self.generation.logprobs or self.generation.token_ids))
        )
        if not visible and not (first and (self.chat or self.generation.token_ids)):
            return None
        choice = self._choice(delta, whole=False)
        if self.chat:
            message = choice.pop("message")
            message.pop("refusal", None)
            if first:
                message["content"] = ""
            else:
                message.pop("role")
            for number, call in enumerate(message.get("tool_calls", ())):
                call["index"] = number
            choice["delta"] = message
        chunk = self._chunk([choice])
        if first and self.chat and self.generation.token_ids:
            chunk["prompt_token_ids"] = list(delta.prompt)
        return chunk

    def _usage(self) -> dict[str, int]:
        """Tokens read and written; a prompt counts once, however many choices it has."""
        read = sum(len(choice.prompt) for index, choice in self.choices.items() if index % self.generation.n == 0)
        written = sum(len(choice.tokens) for choice in self.choices.values())
        return usage(read, written)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self.head, "object": kind, "choices": choices, **no_usage(self.generation)}

    def _choice(self, delta: ChoiceDelta, whole: bool) -> dict[str, Any]:
        """A choice, or its part in a chunk."""
        choice: dict[str, Any] = {"index": delta.index}
        finish: str | None = delta.finish or None
        if self.chat:
            message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
            if self.tools and delta.finish:
                text, calls = read_calls(delta.text)
                if calls:
                    message |= {"content": text or None, "tool_calls": calls}
                    finish = "tool_calls" if finish == "stop" else finish
            choice["message"] = message
        else:
            choice["text"] = delta.text
        choice["logprobs"] = None
        if self.generation.logprobs and delta.tokens:
            choice["logprobs"] = self._chat_logprobs(delta) if self.chat else self._text_logprobs(delta, whole)
        choice["finish_reason"] = finish
        choice["stop_reason"] = delta.stop
        if self.generation.token_ids:
            choice["token_ids"] = list(delta.tokens)
            if not self.chat and delta.prompt:
                choice["prompt_token_ids"] = list(delta.prompt)
        return choice

    def _chat_logprobs(self, delta: ChoiceDelta) -> dict[str, Any]:
        tops: Sequence[TopLogprobs] = delta.tops or [()] * len(delta.tokens)
        content = [
            {**self._token(token, logprob), "top_logprobs": [self._token(*candidate) for candidate in top]}
            for token, logprob, top in zip(delta.tokens, delta.logprobs, tops, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        token_bytes = self._bytes(token)
        return {"token": _shown(token_bytes), "logprob": max(logprob, _LEAST), "bytes": list(token_bytes)}

    def _text_logprobs(self, delta: ChoiceDelta, whole: bool) -> dict[str, Any]:
        """Offsets count letters of the tokens' own texts from the beginning of the choice."""
        tokens = [_shown(self._bytes(token)) for token in delta.tokens]
        at, offsets = 0 if whole else self.sent.get(delta.index, 0), []
        for token in tokens:
            offsets.append(at)
            at += len(token)
        self.sent[delta.index] = at
        tops = [{_shown(self._bytes(token)): max(value, _LEAST) for token, value in top} for top in delta.tops]
        return {
            "tokens": tokens,
            "token_logprobs": [max(token, _LEAST) for token in delta.logprobs],
            "top_logprobs": tops or None,
            "text_offset": offsets,
        }

    def _bytes(self, token: int) -> bytes:
        table = self.tokenizer.token_bytes
        return table[token] if token < len(table) else b""


def _shown(token_bytes: bytes) -> str:
    """A token as text; the bytes of one that is a part of a character, as OpenAI writes them."""
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


# --- A policy by itself behind the OpenAI protocol: it continues chats and texts, and does nothing else. ---


class PolicyModel:
    """A model of the server: an engine.

    Args:
      admission: shared by all models of a server.
      tags: special tokens of the policy's own protocol, which messages may hold (`Agent.special_tokens`).
    """

    def __init__(self, loop: EngineLoop, admission: Admission, tags: Collection[str] = ()) -> None:
        engine = loop.engine
        self._engine = engine
        self._admission, self._generator = admission, Generator(loop, admission)
        self._prompts = Prompts(
            tokenizer=engine.tokenizer,
            reader=engine.images,
            size=engine.config.vocab_size,
            most=engine.max_length,
            tags=tags,
        )

    @property
    def about(self) -> Mapping[str, Any]:
        """The model's fields in the list of models."""
        return {"max_model_len": self._engine.max_length, "pictures": self._engine.images is not None}

    def chat(self, body: Any) -> PolicyReply:
        """The reply to a chat. Raises ApiError."""
        request = read_chat(body)
        prompts = [self._prompts.of_chat(request)]
        return self._reply(prompts, request.generation, chat=True, tools=bool(request.tools))

    def text(self, body: Any) -> PolicyReply:
        """The reply to a text, or several. Raises ApiError."""
        request = read_text(body)
        self._admission.check(len(request.prompts) * request.generation.n)  # before all are encoded
        return self._reply(
            [self._prompts.of_text(prompt) for prompt in request.prompts], request.generation, chat=False
        )

    def _reply(
        self, prompts: Sequence[Prompt], generation: GenerationSettings, *, chat: bool, tools: bool = False
    ) -> PolicyReply:
        return PolicyReply(
            generator=self._generator,
            prompts=prompts,
            tokenizer=self._engine.tokenizer,
            generation=generation,
            chat=chat,
            tools=tools,
        )
