"""Replies of the OpenAI protocol: what was written as one JSON object, or piece by piece."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Sequence
from typing import Any

from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.generation.streams import TopLogprobs
from routerl_jax.serving.protocol import Writing
from routerl_jax.serving.tool_calls import read_calls
from routerl_jax.serving.writer import Piece

_LEAST = -9999.0  # stands for minus infinity, as JSON has none
_GROWS = ("text", "prompt", "tokens", "logprobs", "tops")


def new_head(prefix: str, model: str) -> dict[str, Any]:
    """What all pieces of a reply have in common."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}


def usage(read: int, written: int) -> dict[str, int]:
    """Numbers of tokens, as the protocol has them."""
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def no_usage(writing: Writing) -> dict[str, None]:
    """The field of all chunks but the last, where numbers of tokens are asked for."""
    return {"usage": None} if writing.usage else {}


@dataclasses.dataclass(kw_only=True)
class Replies:
    """The replies to one request.

    Attributes:
      chat: messages; else texts.
      tools: the policy was offered functions, so what it writes may be calls of them.
    """

    tokenizer: Tokenizer
    writing: Writing
    chat: bool
    tools: bool = False
    head: dict[str, Any] = dataclasses.field(default_factory=dict)
    # what has come of every choice, and what was fed for every prompt
    choices: dict[int, Piece] = dataclasses.field(default_factory=dict)
    # of every choice, how many letters of its tokens' own texts have been sent
    sent: dict[int, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.head = new_head("chatcmpl" if self.chat else "cmpl", self.writing.model)

    def take(self, piece: Piece) -> None:
        """Adds a piece to its choice."""
        before = self.choices.get(piece.index)
        self.choices[piece.index] = piece if before is None else _joined(before, piece)

    def whole(self) -> dict[str, Any]:
        """The reply, when all pieces have been taken."""
        choices = [self._choice(self.choices[index], whole=True) for index in sorted(self.choices)]
        kind = "chat.completion" if self.chat else "text_completion"
        reply = {**self.head, "object": kind, "choices": choices, "usage": self.usage()}
        if self.writing.token_ids and self.chat:
            reply["prompt_token_ids"] = list(self.choices[0].prompt)
        return reply

    def chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """What is sent of a piece; it must have been taken. Where the policy may call functions, a choice is sent when it is
        over: what it writes may turn out to be a call until then."""
        first = not piece.tokens and not piece.finish
        if self.tools and not first:
            if not piece.finish:
                return []
            piece = dataclasses.replace(self.choices[piece.index], prompt=())
        told = piece.text or piece.finish or (piece.tokens and (self.writing.logprobs or self.writing.token_ids))
        if not told and not (first and (self.chat or self.writing.token_ids)):
            return []
        choice = self._choice(piece, whole=False)
        if self.chat:
            delta = choice.pop("message")
            delta.pop("refusal", None)
            if first:
                delta["content"] = ""
            else:
                delta.pop("role")
            for number, call in enumerate(delta.get("tool_calls", ())):
                call["index"] = number
            choice["delta"] = delta
        chunk = self._chunk([choice])
        if first and self.chat and self.writing.token_ids:
            chunk["prompt_token_ids"] = list(piece.prompt)
        return [chunk]

    def end(self) -> list[dict[str, Any]]:
        """What is sent after the last piece."""
        return [{**self._chunk([]), "usage": self.usage()}] if self.writing.usage else []

    def usage(self) -> dict[str, int]:
        """Tokens read and written; a prompt counts once, however many choices it has."""
        read = sum(len(one.prompt) for index, one in self.choices.items() if index % self.writing.n == 0)
        written = sum(len(one.tokens) for one in self.choices.values())
        return usage(read, written)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self.head, "object": kind, "choices": choices, **no_usage(self.writing)}

    def _choice(self, piece: Piece, whole: bool) -> dict[str, Any]:
        """A choice, or what is new of one."""
        choice: dict[str, Any] = {"index": piece.index}
        finish: str | None = piece.finish or None
        if self.chat:
            message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
            if self.tools and piece.finish:
                text, calls = read_calls(piece.text)
                if calls:
                    message |= {"content": text or None, "tool_calls": calls}
                    finish = "tool_calls" if finish == "stop" else finish
            choice["message"] = message
        else:
            choice["text"] = piece.text
        choice["logprobs"] = None
        if self.writing.logprobs and piece.tokens:
            choice["logprobs"] = self._chat_logprobs(piece) if self.chat else self._text_logprobs(piece, whole)
        choice["finish_reason"] = finish
        choice["stop_reason"] = piece.stop
        if self.writing.token_ids:
            choice["token_ids"] = list(piece.tokens)
            if not self.chat and piece.prompt:
                choice["prompt_token_ids"] = list(piece.prompt)
        return choice

    def _chat_logprobs(self, piece: Piece) -> dict[str, Any]:
        tops: Sequence[TopLogprobs] = piece.tops or [()] * len(piece.tokens)
        content = [
            {**self._token(token, logprob), "top_logprobs": [self._token(*one) for one in top]}
            for token, logprob, top in zip(piece.tokens, piece.logprobs, tops, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        said = self._bytes(token)
        return {"token": _shown(said), "logprob": max(logprob, _LEAST), "bytes": list(said)}

    def _text_logprobs(self, piece: Piece, whole: bool) -> dict[str, Any]:
        """Offsets are those of the tokens' own texts, one after the other: of a piece in all of its choice."""
        tokens = [_shown(self._bytes(token)) for token in piece.tokens]
        at, offsets = 0 if whole else self.sent.get(piece.index, 0), []
        for token in tokens:
            offsets.append(at)
            at += len(token)
        self.sent[piece.index] = at
        tops = [{_shown(self._bytes(one)): max(value, _LEAST) for one, value in top} for top in piece.tops]
        return {
            "tokens": tokens,
            "token_logprobs": [max(one, _LEAST) for one in piece.logprobs],
            "top_logprobs": tops or None,
            "text_offset": offsets,
        }

    def _bytes(self, token: int) -> bytes:
        table = self.tokenizer.token_bytes
        return table[token] if token < len(table) else b""


def _joined(before: Piece, piece: Piece) -> Piece:
    joined = {name: getattr(before, name) + getattr(piece, name) for name in _GROWS}
    return dataclasses.replace(piece, **joined)


def _shown(said: bytes) -> str:
    """A token as text; the bytes of one that is a part of a character, as OpenAI writes them."""
    try:
        return said.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in said)
