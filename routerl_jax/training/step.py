"""What a step does with its rollouts: advantages, updates, metrics, and a record of some episodes."""

from __future__ import annotations

import codecs
import pathlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from routerl_jax.agents.agent import SearchTool
from routerl_jax.core import stopping
from routerl_jax.core.types import Episode
from routerl_jax.core.types import Sequence as TokenSequence
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.policy import EngineStats
from routerl_jax.evaluation.records import write_records
from routerl_jax.learning.batch import BatchIndex
from routerl_jax.parallel import multihost
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.credit import (
    NO_ADVANTAGE,
    Credit,
    assign,
    attempts_of,
    correct,
    corrects,
    portions,
    sequences_of,
    with_logprobs,
)
from routerl_jax.training.finer_credit import sample_branches
from routerl_jax.training.health import (
    gap_metrics,
    memory_metrics,
    promoted_metrics,
    ratio_metrics,
    rollout_metrics,
    staleness_metrics,
    why_no_signal,
)
from routerl_jax.training.profiler import Clock
from routerl_jax.training.rollouts import Rollouts
from routerl_jax.training.run import Run
from routerl_jax.training.stages import RunStage
from routerl_jax.training.watch import NO_SIGNAL, WHY_NO_SIGNAL


def learn(
    stage: RunStage, run_: Run, engine: Engine, tools: Mapping[str, SearchTool], rollouts: Rollouts, clock: Clock
) -> dict[str, Any]:
    """Updates the policy from a step's rollouts, and logs them. Returns the step's metrics.

    Args:
      stage: that of the rollouts' step.
      engine: it may be generating in another thread.

    Raises:
      NotFinite: a reward or an advantage is not finite.
    """
    config, learner, step = stage.config, run_.learner, rollouts.step
    if stage.restart and step == stage.start:
        learner.restart()
    learner.switch(config.learner.loss, config.rollout.temperature or 1.0, run_.optimizer(stage.updates))
    episodes, groups, stats = rollouts.episodes, rollouts.groups, rollouts.driver
    unforked = sample_branches(episodes, [config.seed, step]) if config.rollout.forks else range(len(episodes))
    metrics = rollout_metrics(
        [episodes[i] for i in unforked], groups[list(unforked)], config.evaluation.normalizer, tuple(tools)
    )
    metrics |= {"stage": stage.name, "rollout/tool_calls": stats.tool_calls, "rollout/tool_errors": stats.tool_errors}
    metrics |= rollouts.tools | staleness_metrics(episodes, step) | rollouts.partial
    if config.rollout.refill:
        metrics["rollout/refills"] = rollouts.refills
        metrics["rollout/replaced_groups"] = len(np.unique(groups[rollouts.replaced]))
    trained = [episodes[i] for i in rollouts.learned]
    learned, credit = _learn(stage, run_, trained, groups[rollouts.learned], step, clock)
    metrics |= learned
    signal = any(np.abs(credit.advantages[i]).max(initial=0.0) > NO_ADVANTAGE for i in credit.keep)
    metrics[NO_SIGNAL] = float(not signal)
    if not signal:
        metrics[WHY_NO_SIGNAL] = why_no_signal(episodes)
    if multihost.is_main():
        log_episodes(run_.workdir, step, trained, credit, config, engine.tokenizer.token_bytes)
    clock.add(rollouts.seconds)
    generated = sum(len(sequence) for episode in episodes for sequence in episode.sequences)
    return metrics | {
        "perf/rollout_tokens_per_s": generated / rollouts.seconds["rollout"],
        "perf/update_tokens_per_s": metrics["perf/trained_tokens_unshared"] / clock.seconds.get("update", 1.0),
        **_engine_metrics(rollouts.engine),
        "perf/compilations": engine.compilations + learner.compilations,
        "timing_s/generate": stats.generate_seconds,
        "timing_s/tools": stats.tool_seconds,
        **memory_metrics(),
    }


def _learn(
    stage: RunStage, run_: Run, episodes: Sequence[Episode], groups: np.ndarray, step: int, clock: Clock
) -> tuple[dict[str, Any], Credit]:
    """Assigns credit, and makes one update per mini-batch of each pass. Returns their metrics and the credit."""
    settings, learner = stage.config.learner, run_.learner
    sequences, owner = sequences_of(episodes)
    portion = -(-len(sequences) // settings.minibatches)
    reference = None
    stopping.check()
    if settings.reward_kl_coef:
        with clock("reference"):
            reference = learner.logprobs(sequences, learner.reference, portion=portion)
    credit = assign(settings, episodes, groups, reference)
    learned = sequences
    if corrects(settings):
        with clock("old_logprobs"):
            scored = learner.logprobs([sequences[i] for i in credit.keep], portion=portion)
        learned = with_logprobs(sequences, credit.keep, scored)
        credit = correct(settings, credit, sequences, scored)
    order = np.random.default_rng([stage.config.seed, step])
    together = None
    if settings.share_prefixes:  # what begins alike
        together = attempts_of(episodes) if stage.config.rollout.forks else groups[owner]
    updates = _Updates(step)
    for _ in range(settings.passes):
        for minibatch in portions(credit.keep, settings.minibatches, order, together):
            if len(minibatch):
                stopping.hold()  # from the first update on, the weights of the last whole step are gone
                _update(stage, run_, sequences, learned, credit, minibatch, updates, clock)
    if not len(credit.keep):  # nothing to learn from; sampler and learner are compared all the same
        scored = learner.logprobs(sequences, portion=portion)
        updates.compare(sequences, [lp[s.loss_mask] for s, lp in zip(sequences, scored)])
    metrics = credit.metrics | {
        **updates.metrics(),
        "actor/trained_sequences": len(credit.keep),
        "perf/trained_tokens": updates.computed,
        "perf/trained_tokens_unshared": updates.unshared,
    }
    return metrics, credit


def _update(
    stage: RunStage,
    run_: Run,
    sequences: Sequence[TokenSequence],
    learned: Sequence[TokenSequence],
    credit: Credit,
    minibatch: np.ndarray,
    updates: _Updates,
    clock: Clock,
) -> None:
    """One update on some of the sequences. `learned` have the log-probabilities at which ratios are 1."""
    settings, learner = stage.config.learner, run_.learner
    constant = stage.config.aggregation_constant
    weights = credit.token_weights(sequences, minibatch, settings.aggregation, constant)
    advantages = [credit.advantages[i] for i in minibatch]
    sampled, chosen = [sequences[i] for i in minibatch], [learned[i] for i in minibatch]
    ends = [int(np.flatnonzero(np.abs(values) > NO_ADVANTAGE).max(initial=-1)) + 1 for values in advantages]
    if settings.drop_tails and any(ends):
        rest = [(i, end) for i, end in enumerate(ends) if end]
        sampled, chosen = [sampled[i].first(end) for i, end in rest], [chosen[i].first(end) for i, end in rest]
        weights, advantages = [weights[i][:end] for i, end in rest], [advantages[i][:end] for i, end in rest]

    def work() -> tuple[dict[str, float], np.ndarray, BatchIndex]:
        with clock("update"):
            batch, index = run_.layout.build(chosen, weights, advantages, merge=settings.loss.merges)
        if settings.loss.kl_coef and not settings.loss.exact_kl:
            with clock("reference"):
                batch = learner.with_reference(batch)
        with clock("update"):
            return *learner.update(batch), index

    metrics, logprobs, index = learner.within_memory(work)
    updates.add(
        metrics,
        sampled=sampled,
        scored=[lp[s.loss_mask] for s, lp in zip(chosen, index.split(logprobs))],
        gains=[values[s.loss_mask] > 0 for s, values in zip(chosen, advantages)],
        tokens=index.tokens,
    )


class _Updates:
    """Collects statistics of the updates of a step."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.gap: dict[str, float] = {}
        self.computed = 0  # tokens
        self.unshared = 0  # tokens, if each sequence were computed alone
        self._behaviour: list[np.ndarray] = []
        self._current: list[np.ndarray] = []
        self._promoted: list[np.ndarray] = []
        self._sums: dict[str, list[float]] = {}

    def compare(self, sampled: Sequence[TokenSequence], scored: Sequence[np.ndarray]) -> None:
        """Compares sampler and learner on tokens that the step's weights both sampled and scored; on all if there are none, as
        where rollouts are ahead.

        Args:
          scored: per sequence, log-probabilities of its sampled tokens under the weights before the step's updates.
        """
        behaviour = [sequence.logprobs[sequence.loss_mask] for sequence in sampled]
        same = [sequence.versions[sequence.loss_mask] == self._step for sequence in sampled]
        if any(map(np.any, same)):
            behaviour = [values[mask] for values, mask in zip(behaviour, same)]
            scored = [values[mask] for values, mask in zip(scored, same)]
        self.gap = gap_metrics(behaviour, scored)

    def add(
        self,
        metrics: Mapping[str, float],
        *,
        sampled: Sequence[TokenSequence],
        scored: list[np.ndarray],
        gains: list[np.ndarray],
        tokens: int,
    ) -> None:
        """Adds one update: sequences; per sampled token of each, the log-probability and whether its advantage is positive."""
        if not self.gap:  # the first mini-batch was scored before any update
            self.compare(sampled, scored)
        self._behaviour += [sequence.logprobs[sequence.loss_mask] for sequence in sampled]
        self._current += scored
        self._promoted += [logprobs[gain] for logprobs, gain in zip(scored, gains)]
        self.computed += tokens
        self.unshared += sum(map(len, sampled))
        for name, value in metrics.items():
            self._sums.setdefault(f"actor/{name}", []).append(value)

    def metrics(self) -> dict[str, float]:
        """Means over the updates, and how far the policy moved."""
        means = {name: float(np.mean(values)) for name, values in self._sums.items()} | self.gap
        if not self._behaviour:
            return means
        return means | ratio_metrics(self._behaviour, self._current) | promoted_metrics(self._promoted)


def _engine_metrics(stats: EngineStats) -> dict[str, float]:
    return {
        "perf/prefilled_tokens": stats.prefilled_tokens,
        "perf/shared_prompt_tokens": stats.forked_tokens,
        "perf/decoded_tokens": stats.decoded_tokens,
        "perf/prefill_occupancy": stats.prefilled_tokens / max(stats.prefill_slots, 1),
        "perf/decode_occupancy": stats.decoded_tokens / max(stats.decode_slots, 1),
        "perf/tokens_per_decode_step": stats.decoded_tokens / max(stats.decode_passes, 1),
    }


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
    chosen = _logged(episodes, config.log_episodes, by_question=config.log_groups)
    if not chosen:
        return
    before = np.cumsum([0, *(len(episode.sequences) for episode in episodes)])
    trained_indices = set(credit.keep.tolist())
    learned = []
    for index in chosen:
        indices = range(before[index], before[index + 1])
        pairs = [
            (sequence, credit.advantages[i]) for sequence, i in zip(episodes[index].sequences, indices, strict=True)
        ]
        sampled = np.concatenate([np.zeros(0), *(values[sequence.loss_mask] for sequence, values in pairs)])
        fields: dict[str, Any] = {
            "advantage": round(float(sampled.mean()), _DIGITS) if len(sampled) else 0.0,
            "trained": any(i in trained_indices for i in indices),
        }
        if config.log_tokens:
            fields["tokens"] = [_tokens(sequence, values, token_bytes) for sequence, values in pairs]
        learned.append(fields)
    path = workdir / "episodes" / f"step-{step:06d}.jsonl"
    write_records(path, [episodes[index] for index in chosen], learned, step=step)


def _logged(episodes: Sequence[Episode], count: int, *, by_question: bool) -> list[int]:
    """Indices of the episodes to record: whole attempts (all branches of a forked one) that are spread evenly over the step, or
    all attempts at its first questions. As many as fit in `count`, the first even if it is larger; none if `count` is 0."""
    units: dict[Hashable, list[int]] = {}
    for index, episode in enumerate(episodes):
        key = episode.example.id if by_question else (episode.example.id, episode.sample)
        units.setdefault(key, []).append(index)
    stride = 1 if by_question else max(len(episodes) // max(count, 1), 1)
    chosen: list[int] = []
    for unit in list(units.values())[::stride] if count else ():
        if chosen and len(chosen) + len(unit) > count:
            break
        chosen += unit
    return chosen


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
