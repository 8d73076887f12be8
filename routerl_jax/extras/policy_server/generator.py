"""Generation for many clients at once: requests become conversations of one engine, and new text is sent back as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Literal

from routerl_jax.core.ledger import Ledger
from routerl_jax.engine.loop import EngineLoop
from routerl_jax.engine.stops import STATE_BUCKET
from routerl_jax.engine.streams import Generated, PromptTooLong, TopLogprobs
from routerl_jax.extras.policy_server.detokenizer import Detokenizer
from routerl_jax.extras.policy_server.errors import ApiError, invalid
from routerl_jax.extras.policy_server.prompts import Prompt
from routerl_jax.extras.policy_server.protocol import GenerationSettings

_DEVICE_STOPS = 16  # most stop strings that the engine looks for itself


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoiceDelta:
    """The new tokens and text of a choice since its last delta. The first delta of a choice is empty.

    Attributes:
      index: the number of the choice.
      prompt: the prompt's token ids, images expanded; in the first delta only.
      tokens: the ids as they were sampled, with the end token and those of a stop string.
      logprobs, tops: their log-probabilities, and the likeliest tokens in their places.
      finish: why the choice is over, in its last delta; "" in others.
      stop: the stop string that ended it; None if none did.
    """

    index: int
    text: str = ""
    prompt: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    tops: tuple[TopLogprobs, ...] = ()
    finish: Literal["", "stop", "length"] = ""
    stop: str | None = None


class Admission:
    """Admission control: how many conversations a server has under way or waiting. Only the HTTP thread uses it.

    Attributes:
      most: how many there may be.
      open: how many there are.
    """

    def __init__(self, most: int) -> None:
        self.most, self.open = most, 0

    @contextlib.contextmanager
    def admit(self, count: int):
        """A context in which `count` more conversations are under way. Raises ApiError if they would be too many."""
        if count > self.most:
            raise invalid(f"{count} choices in one request; this server writes {self.most} at most", "n")
        if self.open + count > self.most:
            message = f"{self.open} conversations are under way or wait, {self.most} may; try again in a second"
            raise ApiError(503, "overloaded", message, headers={"Retry-After": "1"})
        self.open += count
        try:
            yield
        finally:
            self.open -= count


class Generator:
    """Continues prompts with an engine.

    The text depends on the prompt, the request's settings and its seed. It never depends on the other requests.
    """

    def __init__(self, loop: EngineLoop, admission: Admission) -> None:
        self._loop, self._admission = loop, admission
        self._device_stops: tuple[str, ...] = ()  # stop strings that the engine looks for

    async def deltas(self, prompts: Sequence[Prompt], generation: GenerationSettings) -> AsyncIterator[ChoiceDelta]:
        """Deltas of all choices as they come. Choices are numbered prompt by prompt, `n` of each. When the iteration is closed,
        the conversations end and their rows are free.

        Raises:
          ApiError: a prompt can't be used, or too many conversations wait (before the first delta); or the engine failed.
        """
        events: asyncio.Queue[ChoiceDelta | BaseException] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(event: ChoiceDelta | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(events.put_nowait, event)

        def emit_error(future: Future[None]) -> None:
            if not future.cancelled() and (error := future.exception()) is not None:
                emit(error)

        name = f"seed {generation.seed}" if generation.seed is not None else uuid.uuid4().hex
        with self._admission.admit(len(prompts) * generation.n):
            futures: list[Future[None]] = []
            try:
                for number, prompt in enumerate(prompts):
                    for sample in range(generation.n):
                        work = self._generate(number * generation.n + sample, prompt, generation, name, sample, emit)
                        futures.append(self._loop.submit(work))
                        futures[-1].add_done_callback(emit_error)
                unfinished = len(futures)
                while unfinished:
                    event = await events.get()
                    if isinstance(event, BaseException):
                        raise _refused(event) from event
                    unfinished -= bool(event.finish)
                    yield event
            finally:
                for future in futures:
                    future.cancel()

    async def _generate(
        self,
        index: int,
        prompt: Prompt,
        generation: GenerationSettings,
        name: str,
        sample: int,
        emit: Callable[[ChoiceDelta], None],
    ) -> None:
        """One choice, on the engine's thread."""
        engine = self._loop.engine
        try:
            stream = engine.open(prompt.ids, name, sample, images=prompt.images)
        except PromptTooLong as error:
            pictures = " without its pictures" if prompt.images else ""
            message = (
                f"this model's maximum context length is {engine.max_length} tokens, one of which is to be written, and the "
                f"prompt has {len(prompt.ids)}{pictures}"
            )
            raise ApiError(400, "context_length_exceeded", message, prompt.field) from error
        except ValueError as error:
            raise invalid(str(error.__cause__ or error), prompt.field) from error  # the cause does not name the stream
        try:
            engine.request(
                stream,
                stops=self._on_device(generation.stops),
                max_tokens=generation.max_tokens,
                sampling=generation.sampling,
                top=generation.top,
            )
            start = len(stream.ledger)
            emit(ChoiceDelta(index=index, prompt=tuple(stream.ledger.tokens)))
            detokenizer = Detokenizer(engine.tokenizer, generation.stops, keep_stop=generation.keep_stop)
            choice = _Choice(index=index, ledger=stream.ledger, start=start, at=start, detokenizer=detokenizer)

            def on_step(generated: Generated | None) -> bool:
                tops = generated.tops if generated is not None else stream.turn_request.tops
                delta = choice.delta(generated, tops)
                emit(delta)
                return bool(delta.finish)

            await self._loop.turn(stream, on_step)
        finally:
            engine.close(stream)

    def _on_device(self, stops: tuple[str, ...]) -> tuple[str, ...]:
        """The stop strings, if the engine can look for them itself; else none. Its tables are small and forget nothing. Other
        stop strings are found in the text, some tokens later."""
        device_stops = tuple(dict.fromkeys((*self._device_stops, *stops)))
        if len(device_stops) > _DEVICE_STOPS or sum(len(stop.encode()) for stop in device_stops) >= STATE_BUCKET:
            return ()
        self._device_stops = device_stops
        return stops


@dataclasses.dataclass(kw_only=True)
class _Choice:
    """A choice while it is generated."""

    index: int
    ledger: Ledger
    start: int  # index of its first token in the ledger
    at: int  # index of the first token that no delta has had
    detokenizer: Detokenizer

    def delta(self, generated: Generated | None, tops: Sequence[TopLogprobs]) -> ChoiceDelta:
        """The next delta. `generated` is the turn if it is over."""
        new = self.ledger.tokens[self.at :]
        ended = generated is not None and generated.stop_reason == "eos"
        text, count = self.detokenizer.add(new[:-1] if ended else new)
        if self.detokenizer.stop is None:
            count = len(new)
            if generated is not None:
                text += self.detokenizer.end()
        first, last = self.at, self.at + count
        self.at = last
        finish: Literal["", "stop", "length"] = ""
        stop = self.detokenizer.stop
        if stop is not None:
            finish = "stop"
        elif generated is not None:
            finish, stop = ("length" if generated.stop_reason == "length" else "stop"), generated.stop
        return ChoiceDelta(
            index=self.index,
            text=text,
            tokens=tuple(self.ledger.tokens[first:last]),
            logprobs=tuple(self.ledger.logprobs[first:last]),
            tops=tuple(tops[first - self.start : last - self.start]),
            finish=finish,
            stop=stop,
        )


def _refused(error: BaseException) -> ApiError:
    if isinstance(error, ApiError):
        return error
    return ApiError(500, "engine_failed", f"{type(error).__name__}: {error}")
