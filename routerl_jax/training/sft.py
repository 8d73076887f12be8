"""Supervised runs: a policy learns an agent's grammar, and how to read passages, from demonstrations. Whole runs, or the
warm start before reinforcement learning, which belongs to the same command and workdir."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import pathlib
import time
from collections.abc import Iterable

import numpy as np
from absl import logging

from routerl_jax.agents.agent import Agent
from routerl_jax.agents.observation import demonstrated, texts
from routerl_jax.core import stopping
from routerl_jax.core.files import read_json, write_atomic
from routerl_jax.core.progress import Bar, note
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Sequence
from routerl_jax.data.atlas.demonstrations import ReadingDrills
from routerl_jax.data.vocabulary import train_tokenizer
from routerl_jax.learning.losses import LossConfig, token_weights
from routerl_jax.models.decoder import Decoder
from routerl_jax.parallel import multihost
from routerl_jax.parallel.devices import tell_compilations
from routerl_jax.parallel.workdir import job_directory_lock
from routerl_jax.training.alignment import ALIGNED, align, keep_tower, sheets_named
from routerl_jax.training.callbacks import Alarm, Step, Training, end_step, own_callbacks, running, states
from routerl_jax.training.checks import check_inputs, check_workdir, keep_inputs
from routerl_jax.training.config import EngineConfig, LearnerConfig, RolloutConfig, TrainConfig
from routerl_jax.training.credit import NotFinite
from routerl_jax.training.demonstrations import Demonstrations, open_demonstrations
from routerl_jax.training.health import memory_metrics
from routerl_jax.training.knowledge import check_snapshot, shared_snapshot
from routerl_jax.training.loggers import read_metrics, require_log
from routerl_jax.training.profiler import Clock, Profiler, profiled_steps
from routerl_jax.training.run import WARM_START, Checkpointing, Run, policy_damage, started
from routerl_jax.training.sections import SEARCHED
from routerl_jax.training.setup import build_mesh, build_policy, build_recipe
from routerl_jax.training.watch import RunStopped, Watch

_VOCABULARY_EXAMPLES = 6000
_HELD_OUT = 256
_LEARNT = 0.75  # of the loss of a guess by the frequency of tokens; policies that can work have a tenth of it and less


def train_sft(config: TrainConfig, workdir: pathlib.Path, *, resume: bool = False) -> dict[str, float]:
    """Trains on demonstrations. Writes checkpoints, metrics and `workdir/policy` (a Hugging Face directory).

    Returns:
      The last metrics, held-out negative log-likelihood per token (nats) included.

    Raises:
      RunStopped: the run went wrong (config.watch), and its checkpoints are from before the trouble; or its updates taught next
        to nothing.
      Interrupted: Ctrl-C or SIGTERM; there is a checkpoint of the last update.
      ValueError: the configuration or an input is wrong, or `workdir` belongs to another run or is in use.
    """
    tell_compilations()
    with job_directory_lock(workdir), multihost.watched():
        return _train(config, workdir, resume)


def _train(config: TrainConfig, workdir: pathlib.Path, resume: bool) -> dict[str, float]:
    check_workdir(config, workdir, resume)  # before anything slow starts
    multihost.on_main(lambda: require_log(config.log))
    own = own_callbacks(config.callbacks)
    if config.warm_start.demonstrations in SEARCHED:  # these contain real searches
        check_snapshot(config, workdir, resume=resume)
    check_inputs(config, workdir, resume)
    mesh = build_mesh(config.mesh)
    agent = build_recipe(config).agent
    sheets = sheets_named(config.warm_start.sheets)
    source, held_out = open_demonstrations(config, agent, workdir)
    drills = ReadingDrills(seed=config.seed)
    model = build_policy(config, mesh)
    if model.tokenizer is None:
        model.tokenizer = _vocabulary(config, agent, source)
    aligned = align(model, config.warm_start.align, config.seed, sheets, workdir, resume)
    run = Run(config, workdir, model, mesh, LossConfig(kind="reinforce"), config.steps, resume)
    if aligned:
        keep_tower(model, workdir / ALIGNED)  # once the run's config.json says what it was aligned by
    multihost.on_main(lambda: keep_inputs(config, workdir))
    watch = Watch(config.watch)
    if run.restored:
        watch.restore(run.restored["watch"])
    fitting = _Fitting(agent, model, config)
    metrics: dict[str, float] = {}
    tokens_seen, started = 0, time.perf_counter()
    shown = {"total": config.steps, "desc": "supervised", "unit": "step", "disable": not multihost.is_main()}
    checkpointing = Checkpointing(run, watch, lambda _: {"watch": watch.state(), **states(own)}, Clock())
    callbacks = [Profiler(profiled_steps(config.profile)), *own.values(), run.writer, watch, checkpointing]
    training = Training(config=config, workdir=workdir, learner=run.learner, start=run.start)
    alarm: Alarm | None = None
    with (
        stopping.deferred(),
        running(callbacks, training, own, run.restored.get("callbacks", {})),
        Bar(range(run.start, config.steps), initial=run.start, **shown) as bar,
    ):
        for step in bar:
            multihost.at_step(step)
            try:
                stopping.hold()
            except stopping.Interrupted:
                checkpointing.interrupted(step, {"watch": watch.state(), **states(own)})
                raise
            for callback in callbacks:
                callback.on_step_begin(step)
            metrics, tokens = _update(run, fitting, source, drills, step)
            tokens_seen += tokens
            completed = step + 1
            if config.evaluation.every and (completed % config.evaluation.every == 0 or completed == config.steps):
                metrics |= _validate(run, fitting, held_out)
                metrics |= {"perf/tokens_per_s": tokens_seen / (time.perf_counter() - started), **memory_metrics()}
                if multihost.is_main():
                    note(f"step {completed}: " + "  ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
            try:
                alarm = end_step(callbacks, Step(number=step, metrics=metrics))
            except NotFinite as error:
                alarm = Alarm(step, error.metric, str(error))
            stopping.release()
            if alarm:
                break
    if alarm:
        raise RunStopped(_stopped(run, alarm))
    if complaint := _nothing_learnt(run, fitting, source):
        if config.watch.idle and config.steps >= config.watch.idle:
            run.finish(export=False)
            raise RunStopped(
                f"stopped after {config.steps} supervised updates: {complaint}. Start again in another --workdir; "
                "config.watch.idle=0 with --resume goes on all the same"
            )
        logging.warning("after %d supervised updates: %s", config.steps, complaint)
    run.finish()
    if multihost.is_main():
        if not metrics and (rows := read_metrics(workdir)):  # an earlier session was killed after the last step
            metrics = {name: value for name, value in rows[-1].items() if name != "step"}
        write_atomic(workdir / "results.json", json.dumps({"sft": metrics, "seed": config.seed}, indent=2) + "\n")
    return metrics


def _update(
    run: Run, fitting: _Fitting, source: Demonstrations, drills: ReadingDrills, step: int
) -> tuple[dict[str, float], int]:
    """One update on the demonstrations and drills of a step. Returns its metrics and the number of tokens."""
    config, clock = run.config, Clock()
    batch_size = config.warm_start.examples
    with clock("demonstrations"):
        indices = range(step * batch_size, (step + 1) * batch_size)
        drilled = [i for i in indices if i % batch_size < config.warm_start.drills * batch_size]
        sequences = fitting.drills(drills, drilled) + fitting.worked(source, indices[len(drilled) :])
    if not sequences:
        raise ValueError(
            f"all {batch_size} demonstrations of update {step} have more than {fitting.longest} tokens: raise "
            "config.learner.length_buckets (or config.engine.max_length, where it is empty), or give shorter ones"
        )
    with clock("update"):
        kind = config.learner.aggregation
        if kind == "sequence" and config.warm_start.demonstrations == "drawn":
            kind = "token"  # a search that found nothing, and so has no answer after it, would weigh more than others
        aggregation = kind, config.aggregation_constant
        weights = token_weights([s.loss_mask for s in sequences], *aggregation)
        if config.warm_start.observation_weight:
            observation_weights = token_weights([~s.loss_mask for s in sequences], *aggregation)
            weights = [
                w + np.float32(config.warm_start.observation_weight) * o for w, o in zip(weights, observation_weights)
            ]
        advantages = [1.0] * len(sequences)
        learned, _ = run.learner.within_memory(
            lambda: run.learner.update(run.layout.build(sequences, weights, advantages)[0])
        )
    metrics = {f"actor/{name}": value for name, value in learned.items()}
    if len(sequences) < batch_size:
        metrics["perf/left_out"] = batch_size - len(sequences)
    return metrics, sum(len(s) for s in sequences)


def _nothing_learnt(run: Run, fitting: _Fitting, source: Demonstrations) -> str:
    """A complaint if the policy predicts what it was shown no better than a guess by how frequent each token is there."""
    sequences = fitting.worked(source, range(min(_HELD_OUT, len(source))))
    if not sequences:
        return ""
    counts = np.bincount(np.concatenate([sequence.tokens[sequence.loss_mask] for sequence in sequences]))
    shares = counts[counts > 0] / counts.sum()
    guess, few = float(-(shares * np.log(shares)).sum()), sequences[: run.config.warm_start.examples]
    logprobs = run.learner.logprobs(few, portion=run.config.warm_start.examples)
    loss = float(-np.concatenate([lp[s.loss_mask] for lp, s in zip(logprobs, few)]).mean())
    if loss <= _LEARNT * guess:
        return ""
    return (
        f"the policy has a loss of {loss:.2f} nats per token on what it was shown, and a guess by the frequency of tokens "
        f"alone has {guess:.2f}, so it has learnt next to nothing of how to work. Raise the number of steps or the learning "
        f"rate ({run.config.learner.optimizer.lr:g} here, by config.warm_start.optimizer.lr of a start, "
        "config.learner.optimizer.lr of a run of kind 'sft'; 1e-3 suits a small model from random weights)"
    )


def _stopped(run: Run, alarm: Alarm) -> str:
    run.finish(export=False)
    newest = run.checkpoints.latest()
    rest = "no checkpoint" if newest is None else f"the checkpoint of update {newest}"
    return (
        f"stopped after update {alarm.step + 1}: {alarm.complaint}. {run.workdir} holds {rest} and no policy: start again in "
        "another --workdir with a smaller lr, or loosen config.watch and --resume"
    )


def _vocabulary(config: TrainConfig, agent: Agent, source: Demonstrations) -> Tokenizer:
    """A tokenizer trained on demonstrations (for Atlas: invented ones and those of the training split)."""
    worked = (source[i] for i in range(_VOCABULARY_EXAMPLES))
    corpus = (
        [example.example.question, *(text for piece, _ in example.pieces for text in texts(piece))]
        for example in worked
    )
    size = config.warm_start.vocabulary
    if size != config.model.architecture.get("vocab_size"):
        raise ValueError(
            f"config.warm_start.vocabulary={size} differs from config.model.architecture.vocab_size="
            f"{config.model.architecture.get('vocab_size')}; make them equal"
        )
    return train_tokenizer(
        itertools.chain.from_iterable(corpus), size, agent.special_tokens, context=config.engine.max_length
    )


class _Fitting:
    """Demonstrations as sequences. Those longer than the longest bucket are left out; nothing is ever cut.

    Attributes:
      longest: most tokens of a sequence.
    """

    def __init__(self, agent: Agent, model: Decoder, config: TrainConfig) -> None:
        self._agent = agent
        self._model = model
        self._room = config.engine.max_length
        self.longest = max(config.learner.length_buckets or (self._room,))
        self._warned = False

    def worked(self, source: Demonstrations, indices: Iterable[int]) -> list[Sequence]:
        """The worked examples at these indices that fit."""
        examples = (source[i] for i in indices)
        return self._fitting_sequences(
            (example.example.id, example.sequence(self._agent, self._model, self._room)) for example in examples
        )

    def drills(self, source: ReadingDrills, indices: Iterable[int]) -> list[Sequence]:
        """The drills at these indices that fit."""
        assert self._model.tokenizer is not None
        tokenizer = self._model.tokenizer
        return self._fitting_sequences((f"drill {i}", demonstrated((), source[i], tokenizer)) for i in indices)

    def _fitting_sequences(self, named: Iterable[tuple[str, Sequence]]) -> list[Sequence]:
        sequences = []
        for name, sequence in named:
            if len(sequence) <= self.longest:
                sequences.append(sequence)
                continue
            if not self._warned:
                logging.warning(
                    "demonstration %r has %d tokens, more than the longest bucket of %d: it is left out, and so are others "
                    "that are longer (perf/left_out: how many of an update)",
                    *(name, len(sequence), self.longest),
                )
            self._warned = True
        return sequences


def _validate(run: Run, fitting: _Fitting, held_out: Demonstrations) -> dict[str, float]:
    """Loss per written token on held-out demonstrations and drills, of those that fit."""
    measured = {"held_out/nll": fitting.worked(held_out, range(min(_HELD_OUT, len(held_out))))}
    if run.config.warm_start.drills:
        source = ReadingDrills(seed=run.config.seed + 1)
        measured["held_out/drill_nll"] = fitting.drills(source, range(_HELD_OUT // 4))
    metrics = {}
    for name, sequences in measured.items():
        if sequences:
            logprobs = run.learner.logprobs(sequences, portion=run.config.warm_start.examples)
            written = np.concatenate([lp[s.loss_mask] for lp, s in zip(logprobs, sequences)])
            metrics[name] = float(-written.mean())
    return metrics


def warm_start(config: TrainConfig, workdir: pathlib.Path, *, resume: bool = False) -> TrainConfig:
    """Runs the supervised phase that `config.warm_start.steps` asks for, unless it is finished.

    The phase is a run of kind "sft" in `workdir/warm_start`.

    Args:
      resume: continue an interrupted phase.

    Returns:
      The configuration with the policy that reinforcement learning starts from: `started(config, workdir)`.

    Raises:
      ValueError: the directory holds another warm start, or an unfinished one and `resume` is False.
    """
    if config.warm_start.steps:
        phase, directory = supervised(config), workdir / WARM_START
        phase = dataclasses.replace(phase, snapshot=shared_snapshot(config, workdir))
        check_workdir(phase, directory, resume)
        if not _finished(phase, directory):
            train_sft(phase, directory, resume=resume)
        gc.collect()  # reference cycles still hold the phase's optimiser state; its memory is needed now
    return started(config, workdir)


def supervised(config: TrainConfig) -> TrainConfig:
    """The configuration of the supervised phase as a run of its own.

    Settings without effect on it are left out, so they may change before it resumes. The run's questions and its normaliser
    stay, for launch.evaluate; names of other policies do not.
    """
    shared = ("length_buckets", "micro_tokens", "aggregation", "aggregation_tokens", "remat")
    learner = {name: getattr(config.learner, name) for name in shared}
    watched = {  # the bounds about updates: the phase measures no other metrics of a run
        field: {name: bound for name, bound in getattr(config.watch, field).items() if name.startswith("actor/")}
        for field in ("least", "most", "falls", "drops")
    }
    return TrainConfig(
        kind="sft",
        recipe=config.recipe,
        seed=config.seed,
        steps=config.warm_start.steps,
        model=dataclasses.replace(config.model, freeze=()) if config.warm_start.train_frozen else config.model,
        mesh=config.mesh,
        engine=EngineConfig(max_length=config.engine.max_length),
        agent=config.agent,
        knowledge=config.knowledge,
        data=config.data,
        rollout=RolloutConfig(tool_timeout=config.rollout.tool_timeout),  # of searches for demonstrations
        learner=LearnerConfig(optimizer=config.warm_start.optimizer, **learner),
        judge=config.judge,
        evaluation=dataclasses.replace(config.evaluation, names={}),
        checkpoint=config.checkpoint,
        watch=dataclasses.replace(config.watch, **watched),
        log=config.log,
        warm_start=dataclasses.replace(config.warm_start, steps=0, train_frozen=False),
    )


def _finished(phase: TrainConfig, directory: pathlib.Path) -> bool:
    """True if all steps are done and the policy is written. The main process checks, and all get the result."""
    return multihost.exchange(_complete(phase, directory) if multihost.is_main() else None)[0]


def _complete(phase: TrainConfig, directory: pathlib.Path) -> bool:
    needed = [directory / name for name in ("config.json", "results.json", "policy/config.json")]
    fix = f"remove {directory}, and the warm start is done again"
    if not all(path.is_file() for path in needed) or read_json(needed[0], fix)["steps"] != phase.steps:
        return False
    if damage := policy_damage(directory):
        logging.warning("%s: it is exported again from the warm start's last checkpoint", damage)
    return not damage
