"""Replies of the OpenAI protocol: one JSON object, or the chunks of a stream."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Sequence
from typing import Any

from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.engine.streams import TopLogprobs
from routerl_jax.extras.policy_server.generator import ChoiceDelta
from routerl_jax.extras.policy_server.protocol import GenerationSettings
from routerl_jax.extras.policy_server.tool_calls import read_calls

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
class ReplyBuilder:
    """Collects the deltas of a request's choices, and writes them as the protocol's JSON.

    Attributes:
      chat: the reply is of /v1/chat/completions, else of /v1/completions.
      tools: the policy was offered functions, so its text may be calls of them.
      choices: by number, all that has come of a choice as one delta.
      sent: by number, letters of the tokens' own texts that have been sent (`text_offset`).
    """

    tokenizer: Tokenizer
    generation: GenerationSettings
    chat: bool
    tools: bool = False
    head: dict[str, Any] = dataclasses.field(default_factory=dict)
    choices: dict[int, ChoiceDelta] = dataclasses.field(default_factory=dict)
    sent: dict[int, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.head = new_head("chatcmpl" if self.chat else "cmpl", self.generation.model)

    def take(self, delta: ChoiceDelta) -> None:
        """Adds a delta to its choice."""
        before = self.choices.get(delta.index)
        self.choices[delta.index] = delta if before is None else _joined(before, delta)

    def whole(self) -> dict[str, Any]:
        """The reply, when all deltas have been taken."""
        choices = [self._choice(self.choices[index], whole=True) for index in sorted(self.choices)]
        kind = "chat.completion" if self.chat else "text_completion"
        reply = {**self.head, "object": kind, "choices": choices, "usage": self.usage()}
        if self.generation.token_ids and self.chat:
            reply["prompt_token_ids"] = list(self.choices[0].prompt)
        return reply

    def chunks(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """The chunks to send for a delta that `take` has got. Where the policy may call functions, a choice is sent when it is
        over, as its text may turn out to be a call until then."""
        first = not delta.tokens and not delta.finish
        if self.tools and not first:
            if not delta.finish:
                return []
            delta = dataclasses.replace(self.choices[delta.index], prompt=())
        visible = (
            delta.text or delta.finish or (delta.tokens and (self.generation.logprobs or self.generation.token_ids))
        )
        if not visible and not (first and (self.chat or self.generation.token_ids)):
            return []
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
        return [chunk]

    def end(self) -> list[dict[str, Any]]:
        """The chunks to send after the last delta."""
        return [{**self._chunk([]), "usage": self.usage()}] if self.generation.usage else []

    def usage(self) -> dict[str, int]:
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


def _joined(before: ChoiceDelta, delta: ChoiceDelta) -> ChoiceDelta:
    joined = {name: getattr(before, name) + getattr(delta, name) for name in _GROWS}
    return dataclasses.replace(delta, **joined)


def _shown(token_bytes: bytes) -> str:
    """A token as text; the bytes of one that is a part of a character, as OpenAI writes them."""
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)
