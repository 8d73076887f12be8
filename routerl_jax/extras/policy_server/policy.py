"""A policy by itself behind the OpenAI protocol: it continues chats and texts, and does nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any

from routerl_jax.engine.loop import EngineLoop
from routerl_jax.extras.policy_server.generator import Admission, Generator
from routerl_jax.extras.policy_server.prompts import Prompt, Prompts
from routerl_jax.extras.policy_server.protocol import GenerationSettings, read_chat, read_text
from routerl_jax.extras.policy_server.replies import ReplyBuilder


class PolicyModel:
    """A `serving.app.Model` over an engine.

    Args:
      admission: shared by all models of a server.
      tags: special tokens of the policy's own protocol, which messages may hold (`Agent.special_tokens`).
    """

    def __init__(self, loop: EngineLoop, admission: Admission, tags: Collection[str] = ()) -> None:
        engine = loop.engine
        self._engine = engine
        self._generator = Generator(loop, admission)
        self._prompts = Prompts(
            tokenizer=engine.tokenizer, reader=engine.images, size=engine.config.vocab_size, tags=tags
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
        return self._reply(
            [self._prompts.of_text(prompt) for prompt in request.prompts], request.generation, chat=False
        )

    def _reply(
        self, prompts: Sequence[Prompt], generation: GenerationSettings, *, chat: bool, tools: bool = False
    ) -> PolicyReply:
        builder = ReplyBuilder(tokenizer=self._engine.tokenizer, generation=generation, chat=chat, tools=tools)
        return PolicyReply(generator=self._generator, prompts=prompts, builder=builder)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyReply:
    """A `serving.app.Reply` with the policy's text."""

    generator: Generator
    prompts: Sequence[Prompt]
    builder: ReplyBuilder

    @property
    def stream(self) -> bool:
        """Whether it is wanted in chunks."""
        return self.builder.generation.stream

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks, as they come."""
        deltas = self.generator.deltas(self.prompts, self.builder.generation)
        try:
            async for delta in deltas:
                self.builder.take(delta)
                for chunk in self.builder.chunks(delta) if self.stream else ():
                    yield chunk
        finally:
            await deltas.aclose()  # type: ignore[attr-defined]
        for chunk in self.builder.end() if self.stream else ():
            yield chunk

    def whole(self) -> dict[str, Any]:
        """The reply, after the last chunk."""
        return self.builder.whole()
