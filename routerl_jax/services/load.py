"""Makes chat models from their configurations; keeps their answers in a cache, and their cost within a budget."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from routerl_jax.core.files import cache_directory
from routerl_jax.core.progress import Bar
from routerl_jax.core.registry import Registry
from routerl_jax.core.types import Message
from routerl_jax.services import faults
from routerl_jax.services.base import ChatModel, Completion, conversation_json
from routerl_jax.services.cache import Cache, LayeredCache, SqliteCache, cache_key
from routerl_jax.services.config import ChatModelConfig
from routerl_jax.services.limits import RateLimiter

# --- from a configuration ----------------------------------------------------------------------------------------------
# Makes chat models from their configurations.

CHAT_MODELS: Registry[Callable[[ChatModelConfig], ChatModel]] = Registry(
    "kind of chat model",
    {"openai": "routerl_jax.services.openai:endpoint_model", "engine": "routerl_jax.services.engine:engine_model"},
)


def chat_model(config: ChatModelConfig) -> ChatModel:
    """The chat model of a configuration.

    Raises:
      ValueError: no model is named, the kind is unknown, or an environment variable is not set.
    """
    if not config.model:
        raise ValueError(
            "the chat model's `model` is not set: give its name on the server, or a directory for kind='engine'"
        )
    return CHAT_MODELS.get(config.kind)(config)


# --- answers in a cache ------------------------------------------------------------------------------------------------
# A chat model with a cache of its answers: it is asked no question twice, in any run.


class CachedModel:
    """A ChatModel with a cache of its answers.

    The key of an answer is made of the model's name, its settings, the messages (pictures by their content) and the arguments
    of the call. Answers above temperature 0 are kept as well: equal calls get equal answers. Failures, and answers without
    text, are not kept. Within a call, equal conversations are asked once.

    Args:
      cache: default: `llms.sqlite` in $ROUTERL_CACHE, without a bound on its size.
      save_every: a long call saves its answers after this many conversations. A killed run loses no more than these.
      progress: label of a progress bar over long calls; no bar if empty.
    """

    def __init__(
        self, model: ChatModel, cache: Cache | None = None, *, save_every: int = 256, progress: str = ""
    ) -> None:
        self.name = model.name
        self.settings = dict(model.settings)
        self._model = model
        if cache is None:
            cache = LayeredCache([SqliteCache(cache_directory() / "llms.sqlite", max_bytes=None)])
        self._cache = cache
        self._save_every, self._progress = save_every, progress

    def complete(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        max_tokens: int = 1024,
        temperature: float = 0.0,
        schema: Mapping[str, Any] | None = None,
        sample: int = 0,
        **more: Any,
    ) -> list[Completion]:
        """One answer per conversation, in order: from the cache, or from the model. A conversation that fails has `error` set.

        Args:
          more: arguments that this model takes beyond those of every ChatModel; JSON-serialisable.
        """
        key_parts: list[Any] = [self.name, self.settings, max_tokens, temperature, schema]
        key_parts += [sample] if sample or more else []
        key_parts += [more] if more else []
        answers: dict[str, Completion] = {}
        keys = []
        for number, messages in enumerate(conversations):
            try:
                keys.append(cache_key("llm", key_parts, conversation_json(messages)))
            except ValueError as error:  # a picture that can't be read
                keys.append(f"unreadable {number}")
                answers[keys[-1]] = Completion(error=str(error), finish="error", fault=faults.PICTURE)
        cached = self._cache.get_many([key for key in keys if key not in answers])
        kept = {key: Completion(**json.loads(value), cached=True) for key, value in cached.items()}
        answers |= {key: answer for key, answer in kept.items() if answer.text.strip()}
        missing = {key: messages for key, messages in zip(keys, conversations) if key not in answers}
        new_keys = list(missing)
        with Bar(total=len(new_keys), desc=self._progress, unit="answer", disable=not self._progress) as bar:
            for start in range(0, len(new_keys), self._save_every):
                chunk = new_keys[start : start + self._save_every]
                new_answers = self._model.complete(
                    [missing[key] for key in chunk],
                    max_tokens=max_tokens,
                    temperature=temperature,
                    schema=schema,
                    sample=sample,
                    **more,
                )
                written = {}
                for key, answer in zip(chunk, new_answers):
                    if answer.error is None and answer.text.strip():
                        fields = dataclasses.asdict(answer)
                        del fields["cached"]
                        written[key] = json.dumps(fields).encode()
                self._cache.set_many(written)
                answers |= dict(zip(chunk, new_answers))
                bar.update(len(chunk))
        return [answers[key] for key in keys]

    def close(self) -> None:
        """Closes the cache, and the model if it can be closed."""
        self._cache.close()
        getattr(self._model, "close", lambda: None)()


# --- the cost of replies -----------------------------------------------------------------------------------------------
# The cost of replies: prices, a budget that is never exceeded, and a limit of tokens per minute.

_LETTERS = 3  # characters of a prompt per token, a low guess: estimates should be on the safe side
_PICTURE = 1500  # estimated tokens of a picture


@dataclasses.dataclass(frozen=True, kw_only=True)
class Price:
    """Money per million tokens."""

    read: float = 0.0
    written: float = 0.0

    def of(self, prompt_tokens: int, tokens: int) -> float:
        """The cost of a reply."""
        return (self.read * prompt_tokens + self.written * tokens) / 1e6


class Budget:
    """Money that is spent, or reserved for requests in progress. It is safe to use from several threads.

    Args:
      most: most money that may be spent; 0: no limit.
    """

    def __init__(self, most: float = 0.0) -> None:
        self.most = most if most else math.inf
        self.spent = 0.0
        self._aside = 0.0
        self._lock = threading.Lock()

    def set_aside(self, cost: float) -> bool:
        """Reserves money until `spend`. False if not so much is left."""
        with self._lock:
            if self.spent + self._aside + cost > self.most:
                return False
            self._aside += cost
            return True

    def spend(self, cost: float, aside: float = 0.0) -> None:
        """Records money as spent, and releases the amount that was reserved for it (`aside`)."""
        with self._lock:
            self.spent += cost
            self._aside -= aside


class MeteredModel:
    """A chat model with a budget and a limit on the rate of tokens. It also measures the seconds of its replies.

    Before a request, the most that it can cost is reserved: its prompt, by a cautious estimate, and `max_tokens`. If the budget
    has less left, the request is not sent, and the reply is an error of the kind `faults.BUDGET`. The tokens that the endpoint
    counts are paid for, also those of replies that were of no use; if it counts none, the estimate is. A request without a
    reply is taken to cost nothing.

    Args:
      tokens: limit on tokens, read and written together. The same estimate is reserved.
    """

    def __init__(self, model: ChatModel, price: Price, budget: Budget, tokens: RateLimiter | None = None) -> None:
        self.name, self.settings = model.name, model.settings
        self._model, self._price, self._budget, self._tokens = model, price, budget, tokens

    def complete(self, conversations: Sequence[Sequence[Message]], **options: Any) -> list[Completion]:
        """One answer per conversation, in order, asked one after the other. A conversation that fails has `error` set."""
        return [self._complete_one(conversation, **options) for conversation in conversations]

    def _complete_one(self, conversation: Sequence[Message], *, max_tokens: int = 1024, **options: Any) -> Completion:
        prompt_tokens = sum(
            len(message.content) // _LETTERS + _PICTURE * len(message.images) + 8 for message in conversation
        )
        reserved = self._price.of(prompt_tokens, max_tokens)
        if not self._budget.set_aside(reserved):
            return Completion(
                error=f"{self.name}: of the budget of {self._budget.most:g}, {self._budget.spent:.4g} are spent, and this "
                f"request may cost {reserved:.2g}: it was not asked; raise the budget and run again, what was answered is kept",
                finish="error",
                fault=faults.BUDGET,
            )
        cost = 0.0
        try:
            if self._tokens is not None:
                self._tokens.acquire("tokens", prompt_tokens + max_tokens)
            started = time.perf_counter()
            [answer] = self._model.complete([conversation], max_tokens=max_tokens, **options)
            if answer.error is None and not (answer.prompt_tokens or answer.tokens):
                answer = dataclasses.replace(
                    answer, prompt_tokens=prompt_tokens, tokens=1 + len(answer.text) // _LETTERS
                )
            cost = self._price.of(answer.prompt_tokens, answer.tokens)
            return dataclasses.replace(answer, seconds=time.perf_counter() - started)
        finally:
            self._budget.spend(cost, reserved)

    def close(self) -> None:
        """Closes the model's connections."""
        getattr(self._model, "close", lambda: None)()
