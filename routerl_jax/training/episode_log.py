"""Records some episodes of a step in WORKDIR/episodes, with their advantages."""

from __future__ import annotations

import codecs
import pathlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from routerl_jax.core.types import Episode
from routerl_jax.core.types import Sequence as TokenSequence
from routerl_jax.evaluation.records import write_records
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.credit import Credit

_DIGITS = 4  # of log-probabilities and advantages in a record


def log_episodes(
    workdir: pathlib.Path,
    step: int,
    episodes: Sequence[Episode],
    credit: Credit,
    config: TrainConfig,
    token_bytes: Sequence[bytes],
) -> None:
    """Writes WORKDIR/episodes/step-STEP.jsonl: `config.log_episodes` of the step's episodes, each with `advantage` (mean over
    its sampled tokens) and `trained` (whether it was learnt from); with `config.log_tokens` also `tokens`.

    Args:
      credit: of the step's sequences, in the order of the episodes.
      token_bytes: the bytes behind each token id (`Tokenizer.token_bytes`).
    """
    chosen = _groups(episodes, config.log_episodes) if config.log_groups else _spread(episodes, config.log_episodes)
    if not chosen:
        return
    before = np.cumsum([0, *(len(episode.sequences) for episode in episodes)])
    trained_indices = set(credit.keep.tolist())
    learned = []
    for index in chosen:
        indices = range(before[index], before[index + 1])
        advantages = [credit.advantages[i] for i in indices]
        fields: dict[str, Any] = {
            "advantage": _mean(episodes[index].sequences, advantages),
            "trained": any(i in trained_indices for i in indices),
        }
        if config.log_tokens:
            pairs = zip(episodes[index].sequences, advantages, strict=True)
            fields["tokens"] = [_tokens(sequence, values, token_bytes) for sequence, values in pairs]
        learned.append(fields)
    path = workdir / "episodes" / f"step-{step:06d}.jsonl"
    write_records(path, [episodes[index] for index in chosen], learned, step=step)


def _spread(episodes: Sequence[Episode], count: int) -> list[int]:
    """Attempts spread evenly over the step, as many as fit in `count` episodes; of a forked attempt all branches."""
    attempts = _grouped_indices(episodes, lambda episode: (episode.example.id, episode.sample))
    stride = max(len(episodes) // max(count, 1), 1)
    return _fitting(attempts[::stride], count)


def _groups(episodes: Sequence[Episode], count: int) -> list[int]:
    """All attempts at the step's first questions, as many questions as fit in `count` episodes."""
    return _fitting(_grouped_indices(episodes, lambda episode: episode.example.id), count)


def _grouped_indices(episodes: Sequence[Episode], key: Callable[[Episode], Hashable]) -> list[list[int]]:
    """Indices of the episodes that have a key in common."""
    groups: dict[Hashable, list[int]] = {}
    for index, episode in enumerate(episodes):
        groups.setdefault(key(episode), []).append(index)
    return list(groups.values())


def _fitting(groups: Sequence[list[int]], count: int) -> list[int]:
    """The first groups, each whole, as many as fit in `count`; the first one even if it is larger. None if `count` is 0."""
    chosen: list[int] = []
    for group in groups if count else ():
        if chosen and len(chosen) + len(group) > count:
            break
        chosen += group
    return chosen


def _mean(sequences: Sequence[TokenSequence], advantages: Sequence[np.ndarray]) -> float:
    sampled = [values[sequence.loss_mask] for sequence, values in zip(sequences, advantages, strict=True)]
    joined = np.concatenate([np.zeros(0), *sampled])
    return round(float(joined.mean()), _DIGITS) if len(joined) else 0.0


def _tokens(sequence: TokenSequence, advantages: np.ndarray, token_bytes: Sequence[bytes]) -> dict[str, list[Any]]:
    """A sequence for the reader: per token its text, whether the policy sampled it (the loss mask), its behaviour
    log-probability and its advantage; the last two are 0 on tokens that were fed."""
    return {
        "text": token_texts(sequence.tokens.tolist(), token_bytes),
        "sampled": sequence.loss_mask.astype(int).tolist(),
        "logprob": np.round(sequence.logprobs.astype(np.float64), _DIGITS).tolist(),
        "advantage": np.round(advantages.astype(np.float64), _DIGITS).tolist(),
    }


def token_texts(ids: Iterable[int], token_bytes: Sequence[bytes]) -> list[str]:
    """The text that each token adds. A letter whose bytes are spread over several tokens belongs to the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return [decoder.decode(token_bytes[i] if 0 <= i < len(token_bytes) else b"\xff") for i in ids]
