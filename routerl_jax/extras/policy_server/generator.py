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
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.engine.loop import EngineLoop
from routerl_jax.engine.policy import Generated, PromptTooLong, TopLogprobs
from routerl_jax.engine.stops import STATE_BUCKET
from routerl_jax.extras.policy_server.protocol import ApiError, GenerationSettings, Prompt, invalid, too_long

# --- generation ---


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

    def check(self, count: int) -> None:
        """Raises ApiError if a request wants more conversations than there may ever be."""
        if count > self.most:
            raise invalid(f"{count} choices in one request; this server writes {self.most} at most", "n")

    @contextlib.contextmanager
    def admit(self, count: int):
        """A context in which `count` more conversations are under way. Raises ApiError if they would be too many."""
        self.check(count)
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
                    if isinstance(event, ApiError):
                        raise event
                    if isinstance(event, BaseException):
                        raise ApiError(500, "engine_failed", f"{type(event).__name__}: {event}") from event
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
            raise too_long(engine.max_length, f"{len(prompt.ids)}{pictures}", prompt.field) from error
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


# --- Incremental detokenization: the text of a turn while it is sampled, in whole characters and without stop strings. ---


_BROKEN = "\ufffd"  # decoded from a part of a character
_WINDOW = 96  # most tokens that are decoded together
_OVERLAP = 8  # tokens that stay when the window is full; the next ones are decoded with them


class Detokenizer:
    """Turns tokens into text as they come. Its parts together are the text of all tokens up to the first stop string.

    Text that may be the beginning of a stop string is held back until more tokens decide it.

    Args:
      stops: stop strings. The text ends before the one that is complete first.
      keep_stop: the text ends after the stop string instead.

    Attributes:
      stop: the stop string that has ended the text; None if none has.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, keep_stop: bool = False) -> None:
        self._tokenizer, self._stops, self._keep_stop = tokenizer, tuple(stops), keep_stop
        self._window: list[int] = []
        self._emitted = 0  # letters of the window's text that have been released or held
        self._held = ""  # text that is held back, as it may begin a stop string
        self.stop: str | None = None

    def add(self, tokens: Sequence[int]) -> tuple[str, int]:
        """The text that is certain now, and how many of the tokens count: all, or those up to the end of a stop string."""
        if self.stop is not None:
            return "", 0
        saved = list(self._window), self._emitted, self._held
        piece = self._add(tokens)
        if self.stop is None or len(tokens) < 2:
            return piece, len(tokens)
        for count in range(1, len(tokens) + 1):  # once a turn
            self._window, self._emitted, self._held = list(saved[0]), saved[1], saved[2]
            self.stop = None
            piece = self._add(tokens[:count])
            if self.stop is not None:
                return piece, count
        raise AssertionError("a stop string was there and is not")

    def end(self) -> str:
        """The text that was held back. No token follows."""
        if self.stop is not None:
            return ""
        text = self._tokenizer.decode(self._window)
        piece = self._release(text[self._emitted :])
        self._emitted = len(text)
        held, self._held = self._held, ""
        return piece if self.stop is not None else piece + held

    def _add(self, tokens: Sequence[int]) -> str:
        self._window += tokens
        text = self._tokenizer.decode(self._window)
        certain = text.rstrip(_BROKEN)
        new = certain[self._emitted :]
        self._emitted = max(self._emitted, len(certain))
        if len(self._window) > _WINDOW and len(certain) == len(text):
            self._window = self._window[-_OVERLAP:]
            self._emitted = len(self._tokenizer.decode(self._window))
        return self._release(new)

    def _release(self, new: str) -> str:
        text, self._held = self._held + new, ""
        ends = [(start + len(stop), stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            end, self.stop = min(ends)
            return text[: end if self._keep_stop else end - len(self.stop)]
        held = max((_prefix_length(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _prefix_length(text: str, stop: str) -> int:
    """How many letters at the end of a text are the beginning of a stop string."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
