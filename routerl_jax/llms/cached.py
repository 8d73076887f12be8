"""Answers that are kept: a chat model that is asked no question twice, in any run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.core.cache_directory import cache_directory
from routerl_jax.core.progress import Bar
from routerl_jax.core.types import Message
from routerl_jax.llms import faults
from routerl_jax.llms.base import ChatModel, Completion, spoken
from routerl_jax.remote.cache import Cache, LayeredCache, SqliteCache, cache_key


class CachedModel:
    """A ChatModel with its answers in a cache, under its name, its settings, the messages (pictures by their content), and the
    call's arguments.

    Answers above temperature 0 are kept as well: equal calls get equal answers. Failures are not kept. Within a call, equal
    conversations are asked once.

    Args:
      cache: default `llms.sqlite` in $ROUTERL_CACHE, without a bound on its size.
      save_every: conversations after which a long call saves what it has, so that a killed run loses no more.
      progress: description for a progress bar over long calls; none if empty.
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
        """One answer per conversation, in order: a kept one, or the model's; what fails has `error` set.

        Args:
          more: arguments that this model takes beyond those of every ChatModel; JSON-serialisable.
        """
        about: list[Any] = [self.name, self.settings, max_tokens, temperature, schema]
        about += [sample] if sample or more else []
        about += [more] if more else []
        answers: dict[str, Completion] = {}
        keys = []
        for number, messages in enumerate(conversations):
            try:
                keys.append(cache_key("llm", about, spoken(messages)))
            except ValueError as error:  # a picture that can't be read
                keys.append(f"unreadable {number}")
                answers[keys[-1]] = Completion(error=str(error), finish="error", fault=faults.PICTURE)
        kept = self._cache.get_many([key for key in keys if key not in answers])
        answers |= {key: _read(value) for key, value in kept.items()}
        missing = {key: messages for key, messages in zip(keys, conversations) if key not in answers}
        asked = list(missing)
        with Bar(total=len(asked), desc=self._progress, unit="answer", disable=not self._progress) as bar:
            for start in range(0, len(asked), self._save_every):
                some = asked[start : start + self._save_every]
                fresh = self._model.complete(
                    [missing[key] for key in some],
                    max_tokens=max_tokens,
                    temperature=temperature,
                    schema=schema,
                    sample=sample,
                    **more,
                )
                self._cache.set_many({key: _write(answer) for key, answer in zip(some, fresh) if answer.error is None})
                answers |= dict(zip(some, fresh))
                bar.update(len(some))
        return [answers[key] for key in keys]

    def close(self) -> None:
        """Closes the cache, and the model if it can be closed."""
        self._cache.close()
        getattr(self._model, "close", lambda: None)()


def _write(answer: Completion) -> bytes:
    return json.dumps({key: value for key, value in dataclasses.asdict(answer).items() if key != "kept"}).encode()


def _read(value: bytes) -> Completion:
    return Completion(**json.loads(value), kept=True)
