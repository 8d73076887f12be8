"""Our own engine as a chat model: whoever asks, from whatever thread, shares its batches."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
from absl import logging

from routerl_jax.core.patience import seconds_left
from routerl_jax.core.types import Message
from routerl_jax.generation.engine import Engine
from routerl_jax.generation.sampling import Sampling
from routerl_jax.generation.streams import Generated, Stream
from routerl_jax.llms.base import Completion, spoken
from routerl_jax.llms.schemas import with_schema


@dataclasses.dataclass(frozen=True)
class _Job:
    conversation: Sequence[Message]
    max_tokens: int
    temperature: float
    sample: int
    done: Future[Completion]


class EngineModel:
    """A ChatModel over a generation engine, which it alone may use from now on.

    Conversations join those that are being decoded as soon as a row is free. What a conversation's answer is depends on it,
    its settings, its sample and the engine's seed, not on the company. A schema is put in the prompt; nothing forces the
    model to obey it.

    Args:
      engine: its tokenizer must have a chat template.
      name: of the model; default: what the tokenizer was loaded from.

    Raises:
      ValueError: no chat template, or one of several processes of a job (each would need the same conversations).
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
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._running: dict[int, tuple[Stream, _Job]] = {}
        self._worker: threading.Thread | None = None
        self._lock = threading.Lock()

    def complete(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        max_tokens: int = 1024,
        temperature: float = 0.0,
        schema: Mapping[str, Any] | None = None,
        sample: int = 0,
    ) -> list[Completion]:
        """One answer per conversation, in order; what fails has `error` set."""
        asked = [with_schema(conversation, schema) if schema else conversation for conversation in conversations]
        jobs = [_Job(conversation, max_tokens, temperature, sample, Future()) for conversation in asked]
        with self._lock:
            if self._worker is None or not self._worker.is_alive():
                self._worker = threading.Thread(target=self._work, daemon=True, name="engine-model")
                self._worker.start()
            for job in jobs:
                self._jobs.put(job)
        return [_result(job) for job in jobs]

    def close(self) -> None:
        """Ends the thread after the conversations that are under way."""
        with self._lock:
            if self._worker is not None and self._worker.is_alive():
                self._jobs.put(None)
                self._worker.join()

    def _work(self) -> None:
        open_ = True
        while open_ or self._running:
            open_ = self._take_jobs(block=open_ and not self._running) and open_
            try:
                finished = self._engine.step() if self._running else []
            except (
                Exception
            ) as error:  # out of memory, a device that is gone: fails what is under way, not the callers' runs
                logging.exception("the engine failed; %d conversations end with an error", len(self._running))
                self._fail_all(f"{type(error).__name__}: {error}")
                continue
            for stream, generated in finished:
                _, job = self._running.pop(id(stream))
                length = len(stream.ledger)
                self._engine.close(stream)
                try:
                    answer = self._completion(generated, length)
                except Exception as error:  # whoever waits must hear of it
                    answer = Completion(error=f"{type(error).__name__}: {error}", finish="error")
                job.done.set_result(answer)

    def _take_jobs(self, block: bool) -> bool:
        """Opens conversations for all jobs that wait; False if the model is to be closed."""
        while True:
            try:
                job = self._jobs.get(block=block)
            except queue.Empty:
                return True
            if job is None:
                return False
            block = False
            self._open(job)

    def _open(self, job: _Job) -> None:
        stream = None
        try:
            prompt = self._engine.tokenizer.chat([self._marked(message) for message in job.conversation])
            images = [image for message in job.conversation for image in message.images]
            stream = self._engine.open(prompt, _identity(job.conversation), job.sample, images=images)
            sampling = Sampling(temperature=job.temperature)
            self._engine.request(stream, max_tokens=job.max_tokens, sampling=sampling)
        except Exception as error:  # a template or a prompt that can't be used
            if stream is not None:
                self._engine.close(stream)
            job.done.set_result(Completion(error=f"{type(error).__name__}: {error}", finish="error"))
            return
        self._running[id(stream)] = (stream, job)

    def _marked(self, message: Message) -> Message:
        """The message with the model's mark before its content for each of its pictures; marks in the content are text."""
        tokenizer, content = self._engine.tokenizer, self._engine.tokenizer.plain(message.content)
        if message.images and (reader := self._engine.images) is not None:  # else the engine says that it sees none
            content = tokenizer.decode(reader.marker) * len(message.images) + content
        return dataclasses.replace(message, content=content)

    def _fail_all(self, message: str) -> None:
        for stream, job in self._running.values():
            with contextlib.suppress(Exception):
                self._engine.close(stream)
            job.done.set_result(Completion(error=message, finish="error"))
        self._running.clear()

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


def _result(job: _Job) -> Completion:
    """A job's answer, waited for as long as the caller has time. One that comes later is nobody's."""
    seconds = seconds_left(math.inf)
    try:
        return job.done.result(None if seconds == math.inf else seconds)
    except TimeoutError:
        return Completion(error="no answer in the time that was left", finish="error")


def _identity(conversation: Sequence[Message]) -> str:
    return hashlib.sha256(json.dumps(spoken(conversation)).encode()).hexdigest()
