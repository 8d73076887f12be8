"""A policy that writes for many clients at once: requests become conversations of one engine, and pieces of text come back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Literal

from routerl_jax.core.ledger import Ledger
from routerl_jax.generation.loop import EngineLoop
from routerl_jax.generation.stops import STATE_BUCKET
from routerl_jax.generation.streams import Generated, PromptTooLong, TopLogprobs
from routerl_jax.serving.errors import ApiError, invalid
from routerl_jax.serving.prompts import Prompt
from routerl_jax.serving.protocol import Writing
from routerl_jax.serving.written import Written

_DEVICE_STOPS = 16  # different stop strings that the engine looks for itself


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """What has been written of a choice since its last piece; the first one is empty.

    Attributes:
      index: of the choice.
      prompt: the prompt's token ids, images expanded; in the first piece only.
      tokens, logprobs, tops: of the tokens as they were sampled, the end token and a stop string's included.
      finish: why it is over, in the last piece; "" in others.
      stop: the stop string that ended it.
    """

    index: int
    text: str = ""
    prompt: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    tops: tuple[TopLogprobs, ...] = ()
    finish: Literal["", "stop", "length"] = ""
    stop: str | None = None


class Queue:
    """How many conversations a server has under way. Used from the thread of HTTP alone."""

    def __init__(self, most: int) -> None:
        self.most, self.open = most, 0

    @contextlib.contextmanager
    def admitted(self, count: int):
        """While it lasts, so many more are under way. Raises ApiError if that would be too many."""
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


class Writer:
    """Goes on with prompts, as an engine does.

    What is written depends on the prompt, the request's settings and its seed, never on who else asks.
    """

    def __init__(self, loop: EngineLoop, queue: Queue) -> None:
        self._loop, self._queue = loop, queue
        self._known: tuple[str, ...] = ()  # stop strings that the engine looks for

    async def pieces(self, prompts: Sequence[Prompt], writing: Writing) -> AsyncIterator[Piece]:
        """Pieces of all choices as they come: `n` of the first prompt, then of the next. Who stops asking gives the rows back.

        Raises:
          ApiError: a prompt can't be used, or too much waits: before the first piece. Later: the engine failed.
        """
        events: asyncio.Queue[Piece | BaseException] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(event: Piece | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(events.put_nowait, event)

        def told_of(future: Future[None]) -> None:
            if not future.cancelled() and (error := future.exception()) is not None:
                tell(error)

        name = f"seed {writing.seed}" if writing.seed is not None else uuid.uuid4().hex
        with self._queue.admitted(len(prompts) * writing.n):
            futures: list[Future[None]] = []
            try:
                for number, prompt in enumerate(prompts):
                    for sample in range(writing.n):
                        work = self._write(number * writing.n + sample, prompt, writing, name, sample, tell)
                        futures.append(self._loop.submit(work))
                        futures[-1].add_done_callback(told_of)
                left = len(futures)
                while left:
                    event = await events.get()
                    if isinstance(event, BaseException):
                        raise _refused(event) from event
                    left -= bool(event.finish)
                    yield event
            finally:
                for future in futures:
                    future.cancel()

    async def _write(
        self, index: int, prompt: Prompt, writing: Writing, name: str, sample: int, tell: Callable[[Piece], None]
    ) -> None:
        """One choice, on the engine's thread."""
        engine = self._loop.engine
        try:
            stream = engine.open(prompt.ids, name, sample, images=prompt.images)
        except PromptTooLong as error:
            pictures = " without its pictures" if prompt.images else ""
            said = (
                f"this model's maximum context length is {engine.max_length} tokens, one of which is to be written, and the "
                f"prompt has {len(prompt.ids)}{pictures}"
            )
            raise ApiError(400, "context_length_exceeded", said, prompt.field) from error
        except ValueError as error:
            raise invalid(str(error.__cause__ or error), prompt.field) from error  # the cause does not name the stream
        try:
            engine.request(
                stream,
                stops=self._on_device(writing.stops),
                max_tokens=writing.max_tokens,
                sampling=writing.sampling,
                top=writing.top,
            )
            start = len(stream.ledger)
            tell(Piece(index=index, prompt=tuple(stream.ledger.tokens)))
            written = Written(engine.tokenizer, writing.stops, keep_stop=writing.keep_stop)
            choice = _Choice(index=index, ledger=stream.ledger, start=start, at=start, written=written)

            def told(generated: Generated | None) -> bool:
                tops = generated.tops if generated is not None else stream.turn_request.tops
                piece = choice.piece(generated, tops)
                tell(piece)
                return bool(piece.finish)

            await self._loop.turn(stream, told)
        finally:
            engine.close(stream)

    def _on_device(self, stops: tuple[str, ...]) -> tuple[str, ...]:
        """The stop strings, if the engine may look for them itself: its tables take few, and forget none. Others are found in
        the text, some tokens later."""
        known = tuple(dict.fromkeys((*self._known, *stops)))
        if len(known) > _DEVICE_STOPS or sum(len(stop.encode()) for stop in known) >= STATE_BUCKET:
            return ()
        self._known = known
        return stops


@dataclasses.dataclass(kw_only=True)
class _Choice:
    """A choice while it is written."""

    index: int
    ledger: Ledger
    start: int  # of its tokens
    at: int  # where those begin that no piece has had
    written: Written

    def piece(self, generated: Generated | None, tops: Sequence[TopLogprobs]) -> Piece:
        """What is new; `generated`: the turn, if it is over."""
        new = self.ledger.tokens[self.at :]
        ended = generated is not None and generated.stop_reason == "eos"
        text, count = self.written.add(new[:-1] if ended else new)
        if self.written.stop is None:
            count = len(new)
            if generated is not None:
                text += self.written.end()
        first, last = self.at, self.at + count
        self.at = last
        finish: Literal["", "stop", "length"] = ""
        stop = self.written.stop
        if stop is not None:
            finish = "stop"
        elif generated is not None:
            finish, stop = ("length" if generated.stop_reason == "length" else "stop"), generated.stop
        return Piece(
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
