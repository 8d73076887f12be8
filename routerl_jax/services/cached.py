"""A chat model with a cache of its answers: it is asked no question twice, in any run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.core.cache_directory import cache_directory
from routerl_jax.core.progress import Bar
from routerl_jax.core.types import Message
from routerl_jax.services import faults
from routerl_jax.services.base import ChatModel, Completion, conversation_json
from routerl_jax.services.cache import Cache, LayeredCache, SqliteCache, cache_key


class CachedModel:
    """A ChatModel with a cache of its answers.

    The key of an answer is made of the model's name, its settings, the messages (pictures by their content) and the arguments
    of the call. Answers above temperature 0 are kept as well: equal calls get equal answers. Failures are not kept. Within a
    call, equal conversations are asked once.

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
        answers |= {key: _read(value) for key, value in cached.items()}
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
                self._cache.set_many(
                    {key: _write(answer) for key, answer in zip(chunk, new_answers) if answer.error is None}
                )
                answers |= dict(zip(chunk, new_answers))
                bar.update(len(chunk))
        return [answers[key] for key in keys]

    def close(self) -> None:
        """Closes the cache, and the model if it can be closed."""
        self._cache.close()
        getattr(self._model, "close", lambda: None)()


def _write(answer: Completion) -> bytes:
    return json.dumps({key: value for key, value in dataclasses.asdict(answer).items() if key != "cached"}).encode()


def _read(value: bytes) -> Completion:
    return Completion(**json.loads(value), cached=True)
