"""A language model as a judge of answers. One process asks it, within a time limit; all processes get the same verdicts."""

from __future__ import annotations

import contextvars
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from absl import logging

from routerl_jax.core.background import in_thread, shared_loop
from routerl_jax.core.progress import waiting
from routerl_jax.core.time_limit import seconds_left, time_limit
from routerl_jax.core.types import Episode, Message, Verdict, VerdictKind
from routerl_jax.models.pretrained import resolve
from routerl_jax.parallel import multihost
from routerl_jax.rewards.metrics import accepted_answers, exact_match, f1
from routerl_jax.rewards.terms import Judge
from routerl_jax.services.base import ChatModel, Completion
from routerl_jax.services.cache import Cache
from routerl_jax.services.config import JudgeConfig
from routerl_jax.services.judge_styles import JUDGE_STYLES
from routerl_jax.services.load import CachedModel, chat_model

_AGAIN = 0.7  # least temperature of a second reply: at 0 it would repeat the first one
_SHARE = 0.75  # share of the remaining time for a round of replies: if one hangs, there is time to ask the others again
_SHOWN = 300  # characters of a reply that a verdict keeps
_TROUBLES: tuple[VerdictKind, ...] = ("failed", "unreadable")
_GRACE = 1.0  # extra seconds in which a model that keeps the time limit itself can report it


class _Reply(NamedTuple):
    """A reply and the verdict in it."""

    kind: VerdictKind
    reply: Completion


class ModelJudge:
    """A `rewards.terms.Judge` that asks a language model.

    The judge is not asked about an episode without an answer, which counts 0. If a reply can't be read, the judge is asked
    again, at a temperature of at least 0.7 and at most `config.asks` times in all. An answer that has no verdict then, or whose
    request failed, counts as `config.failed` says ("refuse": that is an error). All verdicts of a call take at most
    `config.seconds` plus a second; verdicts still missing then have failed. Only the main process asks the model.

    Args:
      open_model: opens the model, on the main process. It is called when the model is first needed, and again after `close`.
      normalizer: normaliser of the exact match that decides with failed="em".
    """

    def __init__(self, open_model: Callable[[], ChatModel], config: JudgeConfig, normalizer: str = "search_r1") -> None:
        self._open, self._config, self._normalizer = open_model, config, normalizer
        self._model: ChatModel | None = None
        self._style = JUDGE_STYLES.get(config.style)
        self._told = config.pictures  # or that it sees no pictures

    def __call__(self, episodes: Sequence[Episode]) -> list[Verdict]:
        """One verdict per episode, in order, the same on every process (a collective call).

        Raises:
          ValueError, RuntimeError: the model can't be opened, or a verdict is missing and config.failed="refuse". Otherwise a
            request that goes wrong is a failed verdict.
        """
        with waiting("judge"):
            verdicts = multihost.on_main(lambda: [dataclasses.asdict(verdict) for verdict in self._verdicts(episodes)])
        return [Verdict(**fields) for fields in multihost.exchange(verdicts)[0]]

    def close(self) -> None:
        """Closes the cache and the model's connections, if they are open."""
        if self._model is not None:
            getattr(self._model, "close", lambda: None)()
            self._model = None

    def _verdicts(self, episodes: Sequence[Episode]) -> list[Verdict]:
        answered = [i for i, episode in enumerate(episodes) if (episode.answer or "").strip()]
        replies = self._replies([self._conversation(episodes[i]) for i in answered]) if answered else []
        reply_of = dict(zip(answered, replies))
        verdicts = []
        for i, episode in enumerate(episodes):
            kind, reply = reply_of.get(i, _Reply("unasked", Completion()))
            text = " ".join((reply.error or reply.text).split())[-_SHOWN:]
            verdicts.append(Verdict(kind=kind, counts=self._counts(kind, episode), kept=reply.cached, said=text))
        return verdicts

    def _conversation(self, episode: Episode) -> list[Message]:
        example, answer = episode.example, episode.answer or ""
        pictures = example.images if self._config.pictures else ()
        if example.images and not self._told:
            self._told = True
            logging.warning(
                "judge %s reads questions about pictures without their pictures; if it is a model that sees, set pictures=True",
                self._config.model,
            )
        return self._style.conversation(example.question, accepted_answers(example, answer), answer, pictures)

    def _replies(self, conversations: Sequence[Sequence[Message]]) -> list[_Reply]:
        """One reply per conversation: the last one that did not fail, if there is one."""
        if self._model is None:
            self._model = self._open()
        model, config = self._model, self._config
        replies: list[_Reply] = []
        pending = list(range(len(conversations)))
        with time_limit(config.seconds):
            for sample in range(config.asks):
                last = sample + 1 == config.asks
                with time_limit(seconds_left() * (1.0 if last else _SHARE)):
                    answers = model.complete(
                        [conversations[i] for i in pending],
                        max_tokens=config.max_tokens,
                        temperature=max(config.temperature, _AGAIN) if sample else config.temperature,
                        sample=sample,
                    )
                new_replies = [self._read(answer) for answer in answers]
                replies = replies or list(new_replies)
                for i, reply in zip(pending, new_replies):
                    if reply.kind != "failed":  # a failed request does not replace an unreadable reply
                        replies[i] = reply
                pending = [i for i in pending if replies[i].kind == "unreadable"]
                if not pending:
                    break
        self._complain(replies)
        return replies

    def _read(self, answer: Completion) -> _Reply:
        if answer.error is not None:
            return _Reply("failed", answer)
        right = self._style.read(answer.text)
        return _Reply("unreadable" if right is None else "right" if right else "wrong", answer)

    def _counts(self, kind: VerdictKind, episode: Episode) -> float | None:
        if kind not in _TROUBLES:
            return float(kind == "right")
        if self._config.failed == "em":
            return exact_match(episode.answer, accepted_answers(episode.example, episode.answer), self._normalizer)
        return 0.0 if self._config.failed == "zero" else None

    def _complain(self, all_replies: Sequence[_Reply]) -> None:
        for trouble in _TROUBLES:
            if replies := [reply for kind, reply in all_replies if kind == trouble]:
                logging.warning(
                    "judge %s: %d of %d verdicts are %s: %.200s",
                    *(self._config.model, len(replies), len(all_replies), trouble, replies[0].error or replies[0].text),
                )
        missing = [reply for kind, reply in all_replies if kind in _TROUBLES]
        if missing and self._config.failed == "refuse":
            raise ValueError(
                f"judge {self._config.model}: {len(missing)} of {len(all_replies)} answers have no verdict "
                f"({missing[0].error or missing[0].text:.200s}), and failed='refuse' gives no numbers without them. Verdicts "
                "that were given are kept: start again, with more seconds or asks, or with failed='leave_out'"
            )


def open_judge(config: JudgeConfig, normalizer: str = "search_r1", cache: Cache | None = None) -> ModelJudge:
    """The judge of a configuration. Every process must call this.

    Its replies are kept in `cache` (default: as in `CachedModel`). With kind="engine" the weights are loaded when the judge is
    first asked.

    Raises:
      ValueError: no model is named, it can't be reached as the configuration says, or an environment variable is not set.
    """
    if config.kind == "engine" and jax.process_count() > 1:
        raise ValueError(
            "kind='engine' is for a single process: serve the model over HTTP, and take kind='openai' and its base_url"
        )

    def opened() -> CachedModel:
        # All replies of a call are saved together. Otherwise one that hangs would take the others' time.
        return CachedModel(_Bounded(chat_model(config)), cache, save_every=1 << 30)

    def prepare() -> None:
        if config.kind == "engine" and config.model:
            resolve(config.model)
        else:
            opened().close()  # raises if the configuration is wrong

    multihost.on_main(prepare)
    return ModelJudge(opened, config, normalizer)


class _Bounded:
    """A chat model that keeps the caller's time limit even if the model hangs. Its exceptions become failed replies."""

    def __init__(self, model: ChatModel) -> None:
        self.name, self.settings = model.name, model.settings
        self._model = model

    def complete(self, conversations: Sequence[Sequence[Message]], **options: Any) -> list[Completion]:
        context = contextvars.copy_context()  # the time limit holds in the thread, too

        def work() -> list[Completion]:
            try:
                replies = list(context.run(self._model.complete, conversations, **options))
                if len(replies) != len(conversations):
                    raise ValueError(f"{self.name} gave {len(replies)} replies to {len(conversations)} conversations")
                return replies
            except Exception as error:
                return _failed(f"{type(error).__name__}: {error}", conversations)

        seconds = seconds_left(math.inf)
        try:
            return shared_loop().run(in_thread(work, "judge"), None if seconds == math.inf else seconds + _GRACE)
        except TimeoutError:
            return _failed(f"{self.name}: no reply within {seconds:.3g} s", conversations)

    def close(self) -> None:
        getattr(self._model, "close", lambda: None)()


def _failed(message: str, conversations: Sequence[Any]) -> list[Completion]:
    return [Completion(error=message, finish="error") for _ in conversations]


def settings_that_count(config: JudgeConfig) -> Mapping[str, Any]:
    """The settings that verdicts depend on. Two judges that share them count as the same; URL and speed may differ."""
    names = ("kind", "model", "extra", "style", "pictures", "failed", "asks", "temperature", "max_tokens")
    return {name: getattr(config, name) for name in names}


# --- is a judge biased? ------------------------------------------------------------------------------------------------
# Checks a judge for bias: does its verdict change if the same answer has another form?

_WORDY = "After looking at all that is known about this question, my answer to it is the following: {answer}"


def longer(episode: Episode) -> Episode:
    """The same answer in a longer sentence."""
    return dataclasses.replace(episode, answer=_WORDY.format(answer=episode.answer))


def swapped(episode: Episode) -> Episode:
    """The answer and the accepted answer that is most like it (by F1) in each other's places."""
    answer = episode.answer or ""
    accepted = max(accepted_answers(episode.example, answer), key=lambda gold: f1(answer, [gold]))
    example = dataclasses.replace(episode.example, answers=(answer,), metadata={})
    return dataclasses.replace(episode, example=example, answer=accepted)


def reversed_answers(episode: Episode) -> Episode | None:
    """The accepted answers in reverse order; None if there is only one."""
    answers = accepted_answers(episode.example, episode.answer)
    if len(answers) < 2:
        return None
    example = dataclasses.replace(episode.example, answers=tuple(reversed(answers)), metadata={})
    return dataclasses.replace(episode, example=example)


CHECKS: Mapping[str, Callable[[Episode], Episode | None]] = {
    "longer": longer,
    "swapped": swapped,
    "reversed": reversed_answers,
}


def check_judge(judge: Judge, episodes: Sequence[Episode], most: int) -> dict[str, dict[str, float]]:
    """Asks a judge about changed forms of answers that it has judged.

    Args:
      episodes: with their verdicts. Those that were found right or wrong are checked, `most` of them, from the first.

    Returns:
      By the name of a check: `n`, the episodes with a second verdict of right or wrong; and of these the shares `kept` (the
      same verdict again), `wrong_to_right` and `right_to_wrong`. Checks without a second verdict are absent.
    """
    judged = [e for e in episodes if e.verdict is not None and e.verdict.kind in ("right", "wrong")][:most]
    results: dict[str, dict[str, float]] = {}
    for name, change in CHECKS.items():
        pairs = [(episode, changed) for episode in judged if (changed := change(episode)) is not None]
        verdicts = judge([changed for _, changed in pairs]) if pairs else []
        kinds = [
            (episode.verdict.kind, verdict.kind)
            for (episode, _), verdict in zip(pairs, verdicts)
            if episode.verdict is not None and verdict.kind in ("right", "wrong")
        ]
        if kinds:
            shares = {
                "kept": sum(before == after for before, after in kinds),
                "wrong_to_right": kinds.count(("wrong", "right")),
                "right_to_wrong": kinds.count(("right", "wrong")),
            }
            results[name] = {"n": len(kinds), **{key: count / len(kinds) for key, count in shares.items()}}
    return results
