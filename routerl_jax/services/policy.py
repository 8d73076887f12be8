"""A chat model behind an OpenAI-compatible endpoint as the policy of agents. It replaces the engine, and has no token ids."""

from __future__ import annotations

import dataclasses
import queue
import re
import threading
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from routerl_jax.core.ledger import Ledger
from routerl_jax.core.text import replace_surrogates, sentence_ends, split_thoughts
from routerl_jax.core.types import Failure, StopReason, Usage
from routerl_jax.engine.policy import DoesNotFit, Endpoint, Generated, PromptTooLong, Stream, TurnFailed
from routerl_jax.engine.sampling import GREEDY, Sampling
from routerl_jax.models.images import ImageProcessor, ImageSource
from routerl_jax.services import faults
from routerl_jax.services.base import Completion
from routerl_jax.services.cache import Cache
from routerl_jax.services.config import PolicyModelConfig
from routerl_jax.services.limits import LocalRateLimiter
from routerl_jax.services.load import Budget, CachedModel, MeteredModel, Price
from routerl_jax.services.openai import endpoint_model
from routerl_jax.services.transcript import PICTURE, ChatRequest, SentPictures, Transcript, chat_request

# --- the policy's own text in a reply ----------------------------------------------------------------------------------
# Finds the beginning of the policy's own text in an endpoint's reply, and the stop string that ended it.

MOST = 4  # the most that OpenAI takes
_SENTENCE = re.compile(r"[.?!]+\s+")  # a stop string that ends a sentence,
_LINE = re.compile(r"^\n|:$")  # and one that ends a line
_NO_THOUGHTS = re.compile(r"<think>\s*</think>")


class Ended(NamedTuple):
    """A turn's text, including the stop string that ended it, and the reason why it ended."""

    text: str
    reason: StopReason


def opening_of(stop: str) -> str:
    """The opening tag of a stop string: `<search>` for `</search>`, `<|begin_of_query|>` for `<|end_of_query|>` (or any
    other name after `end_`), `[tool]` for `[/tool]`; "" if the string closes nothing."""
    if match := re.fullmatch(r"([<\[])/([^<>\[\]]+)([>\]])", stop):
        return "".join(match.groups())
    if match := re.fullmatch(r"<\|end_(.+)\|>", stop):
        return f"<|begin_{match[1]}|>"
    return ""


def to_send(stops: Sequence[str], begun: str = "") -> list[str]:
    """The stop strings that are sent to the endpoint, at most `MOST`.

    A reply comes without the stop string that ended it. So only those are sent without which the reply says the same: closing
    tags, which can be put back, and what ends a line, which is a line break before other text, or the label of the next line
    ("Observation:"). At the others, the reply is cut here. Among these are the ends of sentences, since a server would stop at
    "J. Lee".

    Args:
      begun: a beginning that the reply is to repeat. What stands in it would end the reply too early, as may any line break.
    """
    closers = [*filter(opening_of, stops), *filter(_LINE.search, stops)]
    return [stop for stop in closers if not begun or (stop.strip() and stop not in begun)][:MOST]


def ended(reply: Completion, text: str, stops: Sequence[str], begun: str = "") -> Ended:
    """How a reply ended.

    The reply is cut after the first stop string in it, whatever the endpoint did. ". " counts where a sentence ends
    (`core.text.sentence_ends`), and a line break after some text. Otherwise, unless `max_tokens` cut it off, the stop string
    that the endpoint names is put back. If it names none, the one that closes the last open tag is put back. (If the model
    itself ended before it closed the tag, that looks the same.)

    Args:
      text: the part of the reply that belongs to the turn.
      begun: the forced beginning of the turn, which the text continues.
    """
    stop_ends = [(at + len(stop), stop) for stop in stops if (at := _find(text, stop)) >= 0]
    if stop_ends:
        return Ended(text[: min(stop_ends)[0]], "stop")
    if reply.finish == "length":
        return Ended(text, "length")
    if reply.stopped_by in stops:
        return Ended(text + reply.stopped_by, "stop")
    turn = begun + text
    unclosed = [
        (at, stop)
        for stop in to_send(stops)
        if opening_of(stop) and (at := turn.rfind(opening_of(stop))) >= 0 and at > turn.rfind(stop)
    ]
    return Ended(text + max(unclosed)[1], "stop") if unclosed else Ended(text, "eos")


def _find(text: str, stop: str) -> int:
    """Where a stop string ends a text first; -1 if it does not. Lines and sentences of thoughts, and empty lines before the
    text, do not count."""
    sentence = _SENTENCE.fullmatch(stop)
    if not sentence and not _LINE.search(stop):
        return text.find(stop)
    said = split_thoughts(text)[1]
    start = len(said) - len(said.lstrip())
    if not sentence:
        return said.find(stop, start)
    ends = set(sentence_ends(said))
    places = (match.start() for match in re.finditer(re.escape(stop), said))
    return next((at for at in places if at + len(stop.rstrip()) in ends), -1)


def continuation(text: str, begun: str) -> str:
    """A reply without the beginning that it was asked to repeat, and without anything before that. "" if it ends within the
    beginning. White space need not be the same."""
    beginning = begun.strip()
    last_line = beginning.splitlines()[-1].strip() if beginning else ""
    for repeated in dict.fromkeys((beginning, last_line if last_line.endswith(">") else "")):
        if repeated and (found := re.search(r"\s+".join(map(re.escape, repeated.split())), text)):
            return text[found.end() :]
    return "" if " ".join(beginning.split()).startswith(" ".join(text.split())) else text


def after_message(text: str, message: str) -> str:
    """A reply that continues an unfinished message, without that message.

    llama.cpp's server repeats the message, after the empty thoughts of a template that has them; vLLM's does not.
    """
    if not message.strip():
        return text
    before, repeated, after = text.partition(message if message in text else message.strip())
    return after if repeated and not _NO_THOUGHTS.sub("", before).strip() else text


# --- the policy --------------------------------------------------------------------------------------------------------

_MOST_SEED = 2**31 - 1  # servers store seeds as signed 32-bit integers


class ChatModel(Endpoint):
    """A `engine.policy.Policy`: `rj.run(agent, examples, rj.ChatModel("gpt-4o-mini", base_url=..), tools)`.

    Agents, conversations and tools are the same as with an `Engine`. These things differ:

    - Episodes have no `sequences`, so nothing can be learnt from them. They have `usage`.
    - Lengths and room are counted in estimated tokens, of no particular vocabulary.
    - If the endpoint gives no reply, the episode ends there with `failure` set, and the run goes on.
    - Each reply is cached as soon as it arrives, under the model, its settings, the messages and the decoding. What was
      answered once is not asked again, in any run.

    A conversation's replies depend on (example id, sample, turn) and the seed, as an engine's do, if the endpoint honours
    `seed`.

    Args:
      model: the model's name on the server, or a whole configuration.
      cache: cache of replies; default: as in `CachedModel`.
      settings: fields of `PolicyModelConfig`: `base_url`, `api_key_env`, `concurrency`, `form`, `budget`, ..

    Raises:
      ValueError: a setting is impossible, there is no model, or an environment variable is not set.
    """

    def __init__(self, model: str | PolicyModelConfig, *, cache: Cache | None = None, **settings: Any) -> None:
        config = model if isinstance(model, PolicyModelConfig) else PolicyModelConfig(model=model, **settings)
        if isinstance(model, PolicyModelConfig) and settings:
            raise ValueError(f"{next(iter(settings))}=..: set it in the configuration that is given")
        if not config.model:
            raise ValueError("`model` is not set: give its name on the server")
        self.config = config
        self.seed = 0
        self.max_length = config.max_length
        self.transcript = Transcript()
        self.budget = Budget(config.budget)
        self.price = Price(read=config.price_read, written=config.price_written)
        limiter = None
        if config.token_rate:
            limiter = LocalRateLimiter(config.token_rate / 60, burst=config.token_rate)
        metered = MeteredModel(endpoint_model(config), self.price, self.budget, limiter)
        self.model = CachedModel(metered, cache)
        processor = ImageProcessor(min_pixels=config.min_pixels, max_pixels=config.max_pixels)
        self._pictures = SentPictures(processor, PICTURE) if config.pictures else None
        self._under_way: dict[int, tuple[Stream, _Request]] = {}
        self._jobs: queue.SimpleQueue[tuple[_Request, dict[str, Any]] | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[tuple[_Request, Completion]] = queue.SimpleQueue()
        # Threads are started as they are needed; the cache has a connection for each.
        self._workers: list[threading.Thread] = []

    @property
    def name(self) -> str:
        """The model's name on the server."""
        return self.config.model

    @property
    def about(self) -> dict[str, Any]:
        """The settings that replies depend on, besides messages and sampling; JSON-serialisable."""
        config = self.config
        pixels = {"min_pixels": config.min_pixels, "max_pixels": config.max_pixels} if config.pictures else {}
        return {"model": config.model, "form": config.form, "max_length": config.max_length, **pixels, **config.extra}

    @property
    def tokenizer(self) -> Transcript:
        """A `Transcript`, which is the vocabulary of no model."""
        return self.transcript

    @property
    def images(self) -> SentPictures | None:
        """Prepares pictures for sending; None if the model sees no pictures."""
        return self._pictures

    @property
    def rows(self) -> int:
        """Most conversations in progress at once."""
        return self.config.concurrency

    @property
    def busy(self) -> bool:
        """True if a reply is still expected."""
        return bool(self._under_way)

    # --- conversations ---

    def open(
        self, prompt: Sequence[int], example_id: str = "", sample: int = 0, *, images: Sequence[ImageSource] = ()
    ) -> Stream:
        """Starts a conversation.

        Raises:
          PromptTooLong: the prompt leaves no room for a reply.
          TurnFailed: a picture can't be read.
          ValueError: the prompt is empty; or there are pictures, and the model sees none, or the prompt does not have one mark
            per picture.
        """
        if not prompt:
            raise ValueError(f"the prompt of example {example_id!r} is empty")
        stream = Stream(
            identity=(zlib.crc32(example_id.encode()), sample), ledger=Ledger(), example_id=example_id, usage=Usage()
        )
        try:
            fed = self._feed_arguments(prompt, images)
        except TurnFailed:
            raise
        except ValueError as error:
            raise ValueError(f"the prompt of example {example_id!r}: {error}") from error
        if len(fed["tokens"]) >= self.max_length:
            raise PromptTooLong(
                f"the prompt of example {example_id!r} has about {len(fed['tokens'])} tokens, but a conversation may hold "
                f"{self.max_length}: shorten it or raise config.chat_model.max_length"
            )
        stream.ledger.feed(**fed)
        return stream

    def room(self, stream: Stream) -> int:
        """Estimated number of tokens that still fit into the conversation."""
        return self.max_length - len(stream.ledger)

    def feed(self, stream: Stream, tokens: Sequence[int], images: Sequence[ImageSource] = ()) -> None:
        """Appends tokens that the policy did not write. Raises DoesNotFit, and ValueError as `open` does."""
        fed = self._feed_arguments(tokens, images)
        if len(fed["tokens"]) > self.room(stream):
            raise DoesNotFit(f"{len(fed['tokens'])} tokens do not fit: {stream.name} has room for {self.room(stream)}")
        stream.ledger.feed(**fed)

    def _feed_arguments(self, tokens: Sequence[int], images: Sequence[ImageSource]) -> dict[str, Any]:
        if not images:
            return {"tokens": tokens}
        if self._pictures is None:
            raise ValueError(f"{self.name} sees no pictures, as config.chat_model.pictures says")
        return self._pictures.fed(tokens, images)

    def request(
        self,
        stream: Stream,
        *,
        stops: Sequence[str] = (),
        max_tokens: int | None = None,
        sampling: Sampling = GREEDY,
        given: Sequence[int] = (),
        begun: Sequence[int] = (),
        scored: bool = False,
    ) -> None:
        """Sends a request for the next turn at once. `step` returns the turn.

        Raises:
          DoesNotFit: the conversation is full.
          ValueError: a turn is in progress, `max_tokens` is below 1, or tokens are given, which no endpoint takes.
        """
        if scored:
            raise ValueError(
                "an endpoint tells no log-probabilities, so it scores no texts: take an Engine as the policy"
            )
        if given or begun:
            raise ValueError("an endpoint can't be given the ids that a turn begins with")
        if id(stream) in self._under_way:
            raise ValueError(f"{stream.name} has a turn under way already")
        room = self.room(stream)
        if room < 1:
            raise DoesNotFit(f"{stream.name} is full; check `room` before asking for a turn")
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} must be at least 1")
        chat = chat_request(stream.ledger, stream.forced, self.transcript, self.config.form)
        request = _Request(chat=chat, stops=tuple(stops), max_tokens=min(max_tokens or room, room), sampling=sampling)
        self._under_way[id(stream)] = (stream, request)
        if len(self._workers) < min(self.rows, len(self._under_way)):
            self._workers.append(threading.Thread(target=self._work, daemon=True, name="chat-model"))
            self._workers[-1].start()
        self._jobs.put((request, self._fields(stream, request)))

    def share(self, pairs: Sequence[tuple[Stream, Stream]]) -> None:
        """Does nothing: every request to an endpoint has the whole conversation."""

    def close(self, stream: Stream) -> None:
        """Ends a conversation. A reply that still arrives goes into the cache and is otherwise ignored."""
        self._under_way.pop(id(stream), None)

    def step(self) -> list[tuple[Stream, Generated | TurnFailed]]:
        """Waits for a reply. Returns all that have arrived."""
        finished: list[tuple[Stream, Generated | TurnFailed]] = []
        while self._under_way and not finished:
            arrived = [self._replies.get()]
            while not self._replies.empty():
                arrived.append(self._replies.get())
            streams = {id(request): stream for stream, request in self._under_way.values()}
            for request, reply in arrived:
                if (stream := streams.get(id(request))) is not None:
                    del self._under_way[id(stream)]
                    finished.append((stream, self._turn(stream, request, reply)))
        return finished

    def end(self) -> None:
        """Closes the cache and the connections, after the requests in progress."""
        for _ in self._workers:
            self._jobs.put(None)
        for worker in self._workers:
            worker.join()
        self._workers = []
        self.model.close()

    # --- requests ---

    def _fields(self, stream: Stream, request: _Request) -> dict[str, Any]:
        """Fields of a request besides messages, `max_tokens` and `temperature`."""
        sampling, fields = request.sampling, {}
        if stops := to_send(request.stops, "" if request.chat.continued else request.chat.begun.strip()):
            fields["stop"] = stops
        if request.chat.continued:
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        if sampling.temperature > 0:
            key = f"{self.seed}/{stream.example_id}/{stream.identity[1]}/{stream.turn}"
            fields["seed"] = zlib.crc32(key.encode()) & _MOST_SEED
            fields |= {"top_p": sampling.top_p} if sampling.top_p < 1 else {}
            fields |= {"top_k": sampling.top_k} if sampling.top_k else {}
        return fields

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._replies.put((job[0], self._ask(*job)))

    def _ask(self, request: _Request, fields: dict[str, Any]) -> Completion:
        try:
            return self.model.complete(
                [request.chat.messages],
                max_tokens=request.max_tokens,
                temperature=request.sampling.temperature,
                fields=fields,
            )[0]
        except Exception as error:  # the waiting thread must hear of it
            return Completion(error=f"{type(error).__name__}: {error}", finish="error", fault=faults.OTHER)

    def _turn(self, stream: Stream, request: _Request, reply: Completion) -> Generated | TurnFailed:
        """Adds a reply to its stream, and its cost to the usage."""
        cost = self.price.of(reply.prompt_tokens, reply.tokens)
        if reply.cached:
            self.budget.spend(cost)
        if request.chat.continued:
            whole = after_message(reply.text, request.chat.messages[-1].content)
        else:
            whole = continuation(reply.text, request.chat.begun)
        text, reason = ended(reply, replace_surrogates(whole), request.stops, request.chat.begun)
        # What was written behind the turn's end does not count; its share of the tokens is about that of the words.
        dropped = len(whole[len(text) :].split()) / max(len(reply.text.split()), 1)
        assert stream.usage is not None
        stream.usage += Usage(
            replies=1,
            kept=int(reply.cached),
            retries=reply.retries,
            prompt_tokens=reply.prompt_tokens,
            tokens=round(reply.tokens * (1 - dropped)),
            seconds=reply.seconds,
            cost=cost,
        )
        if reply.error is not None:
            return TurnFailed(Failure(kind=reply.fault or faults.OTHER, message=reply.error))
        # A continued message may end where it is; a reply that only repeats its beginning is an empty turn, too.
        if not reply.text.strip() and not request.chat.continued:
            message = f"{self.name} replied with no text (finish_reason {reply.finish!r}, {reply.tokens} tokens)"
            return TurnFailed(Failure(kind=faults.EMPTY, message=message))
        ids = self.transcript.encode_written(text)
        stream.ledger.sample(ids, [0.0] * len(ids), -1)
        stream.turn += 1
        stop = next((stop for stop in request.stops if text.endswith(stop)), None) if reason == "stop" else None
        return Generated(tokens=ids, stop_reason=reason, stop=stop)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Request:
    chat: ChatRequest
    stops: tuple[str, ...]
    max_tokens: int
    sampling: Sampling
