"""A policy by itself behind the OpenAI protocol: it goes on with chats and texts, and does nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any

from routerl_jax.generation.loop import EngineLoop
from routerl_jax.serving.prompts import Prompt, Prompts
from routerl_jax.serving.protocol import Writing, read_chat, read_text
from routerl_jax.serving.replies import Replies
from routerl_jax.serving.writer import Queue, Writer


class PolicyModel:
    """A `serving.app.Model` over an engine.

    Args:
      queue: shared by all models of a server.
      tags: special tokens of the policy's own protocol, which messages may hold (`Agent.special_tokens`).
    """

    def __init__(self, loop: EngineLoop, queue: Queue, tags: Collection[str] = ()) -> None:
        engine = loop.engine
        self._engine = engine
        self._writer = Writer(loop, queue)
        self._prompts = Prompts(
            tokenizer=engine.tokenizer, reader=engine.images, size=engine.config.vocab_size, tags=tags
        )

    @property
    def about(self) -> Mapping[str, Any]:
        """What the list of models says of it."""
        return {"max_model_len": self._engine.max_length, "pictures": self._engine.images is not None}

    def chat(self, body: Any) -> PolicyAnswers:
        """The reply to a chat. Raises ApiError."""
        request = read_chat(body)
        prompts = [self._prompts.of_chat(request)]
        return self._written(prompts, request.writing, chat=True, tools=bool(request.tools))

    def text(self, body: Any) -> PolicyAnswers:
        """The reply to a text, or several. Raises ApiError."""
        request = read_text(body)
        return self._written([self._prompts.of_text(one) for one in request.prompts], request.writing, chat=False)

    def _written(
        self, prompts: Sequence[Prompt], writing: Writing, *, chat: bool, tools: bool = False
    ) -> PolicyAnswers:
        replies = Replies(tokenizer=self._engine.tokenizer, writing=writing, chat=chat, tools=tools)
        return PolicyAnswers(writer=self._writer, prompts=prompts, replies=replies)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyAnswers:
    """A `serving.app.Answers`: what the policy writes."""

    writer: Writer
    prompts: Sequence[Prompt]
    replies: Replies

    @property
    def stream(self) -> bool:
        """Whether it is wanted in pieces."""
        return self.replies.writing.stream

    async def pieces(self) -> AsyncIterator[dict[str, Any]]:
        """The pieces, as they come."""
        pieces = self.writer.pieces(self.prompts, self.replies.writing)
        try:
            async for piece in pieces:
                self.replies.take(piece)
                for chunk in self.replies.chunks(piece) if self.stream else ():
                    yield chunk
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]
        for chunk in self.replies.end() if self.stream else ():
            yield chunk

    def whole(self) -> dict[str, Any]:
        """The reply, after the last piece."""
        return self.replies.whole()
