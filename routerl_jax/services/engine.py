"""Our own engine as a chat model. Callers from all threads share its batches."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax

from routerl_jax.core.time_limit import seconds_left
from routerl_jax.core.types import Message
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.loop import EngineLoop
from routerl_jax.engine.policy import Generated
from routerl_jax.engine.sampling import Sampling
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.models.lora import merged
from routerl_jax.services.base import Completion, conversation_json, with_schema
from routerl_jax.services.config import ChatModelConfig


class EngineModel:
    """A ChatModel over a generation engine. From now on, nothing else may use the engine.

    A conversation joins those that are being decoded as soon as a row of the KV cache is free. Its answer depends on the
    conversation, the settings, the sample and the engine's seed, not on the other conversations in the batch. A schema is put
    in the prompt; nothing forces the model to obey it.

    Args:
      engine: its tokenizer must have a chat template.
      name: name of the model; default: the source of its tokenizer.

    Raises:
      ValueError: the tokenizer has no chat template, or the job has several processes (each would need the same
        conversations).
    """

    def __init__(self, engine: Engine, name: str = "") -> None:
        if not engine.tokenizer.has_chat_template:
            raise ValueError(
                "the model's tokenizer has no chat template, so it can't hold a conversation: use another model"
            )
        if jax.process_count() > 1:
            raise ValueError("an EngineModel runs in a single process: serve the model over HTTP and use OpenAIModel")
        self.name = name or str(getattr(engine.tokenizer.hf, "name_or_path", "") or "engine")
        self.settings = {"max_length": engine.max_length, "seed": engine.seed}
        self._engine = engine
        self._loop = EngineLoop(engine, "engine-model")

    def complete(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        max_tokens: int = 1024,
        temperature: float = 0.0,
        schema: Mapping[str, Any] | None = None,
        sample: int = 0,
    ) -> list[Completion]:
        """One answer per conversation, in order. A conversation that fails has `error` set."""
        prompts = [with_schema(conversation, schema) if schema else conversation for conversation in conversations]
        sampling = Sampling(temperature=temperature)
        futures = [self._loop.submit(self._answer(prompt, max_tokens, sampling, sample)) for prompt in prompts]
        return [_result(future) for future in futures]

    def close(self) -> None:
        """Ends the thread after the conversations in progress."""
        self._loop.close()

    async def _answer(
        self, conversation: Sequence[Message], max_tokens: int, sampling: Sampling, sample: int
    ) -> Completion:
        engine, stream = self._engine, None
        try:
            prompt = engine.tokenizer.chat([self._marked(message) for message in conversation])
            images = [image for message in conversation for image in message.images]
            identity = hashlib.sha256(json.dumps(conversation_json(conversation)).encode()).hexdigest()
            stream = engine.open(prompt, identity, sample, images=images)
            engine.request(stream, max_tokens=max_tokens, sampling=sampling)
            generated = await self._loop.turn(stream)
            assert generated is not None, "nothing ends a turn early"
            return self._completion(generated, len(stream.ledger))
        except Exception as error:  # the template or the prompt can't be used, or the engine failed: the caller goes on
            return Completion(error=f"{type(error).__name__}: {error}", finish="error")
        finally:
            if stream is not None:
                engine.close(stream)

    def _marked(self, message: Message) -> Message:
        """The message with one image mark before its content per picture. Marks within the content are plain text."""
        tokenizer, content = self._engine.tokenizer, self._engine.tokenizer.plain(message.content)
        if message.images and (reader := self._engine.images) is not None:  # without one the engine rejects pictures
            content = tokenizer.decode(reader.marker) * len(message.images) + content
        return dataclasses.replace(message, content=content)

    def _completion(self, generated: Generated, length: int) -> Completion:
        tokens = generated.tokens
        if generated.stop_reason == "eos":
            tokens = tokens[:-1]
        return Completion(
            text=self._engine.tokenizer.decode(tokens).strip(),
            finish="length" if generated.stop_reason == "length" else "stop",
            prompt_tokens=length - len(generated.tokens),
            tokens=len(generated.tokens),
        )


def _result(job: Future[Completion]) -> Completion:
    """The answer of a job. Waits as long as the caller's time limit allows, then cancels the job."""
    seconds = seconds_left(math.inf)
    try:
        return job.result(None if seconds == math.inf else seconds)
    except TimeoutError:
        job.cancel()
        return Completion(error="no answer in the time that was left", finish="error")


def engine_model(config: ChatModelConfig) -> EngineModel:
    """A model on an engine of its own. Raises ValueError if the directory holds no decoder."""
    model = load_pretrained(config.model, dtype=config.dtype)
    if not isinstance(model, Decoder):
        raise ValueError(f"model={config.model!r} is no decoder, so it can't answer")
    model = merged(model)
    engine = Engine(model, rows=config.rows, max_length=min(config.max_length, model.config.max_length))
    return EngineModel(engine, config.model)
