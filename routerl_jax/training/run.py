"""The parts that supervised and reinforcement runs share: the workdir, the learner, checkpoints and the saved policy."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax
from absl import logging
from clu import parameter_overview as clu_overview
from flax import nnx
from jax.sharding import Mesh

from routerl_jax.core.buckets import in_bucket, url_of
from routerl_jax.core.files import read_json, write_atomic
from routerl_jax.core.packages import code_version
from routerl_jax.core.secrets import without_secrets
from routerl_jax.knowledge.corpus import file_sha256
from routerl_jax.learning.batch import BatchLayout
from routerl_jax.learning.checkpoints import Checkpoints, Damaged, model_fields
from routerl_jax.learning.learner import Learner, trained_parameters
from routerl_jax.learning.losses import LossConfig
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.huggingface import save_pretrained
from routerl_jax.models.lora import adapters, digest, lora_fields, merge_state
from routerl_jax.parallel import multihost
from routerl_jax.parallel.mirrors import send
from routerl_jax.training.callbacks import Callback, Step
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.credit import NotFinite
from routerl_jax.training.loggers import MetricWriter
from routerl_jax.training.profiler import Clock
from routerl_jax.training.watch import Watch

WARM_START = "warm_start"  # in a workdir: the directory of its supervised phase
POLICY = "policy.json"  # in a workdir: size and SHA-256 of the files of the exported policy


class Run:
    """A training run in its workdir.

    Args:
      config: the run's configuration; written to `config.json`.
      workdir: the run's directory, already checked by `checks.check_workdir`; made if missing.
      model: the initial policy.
      mesh: its devices.
      loss: the first objective.
      updates: number of optimiser updates that the first schedule spans.
      resume: continue from the newest checkpoint, if there is one.
      keep_reference: keep the initial weights; default: if config.learner measures a KL to them.

    Raises:
      ValueError: conversations may be longer than the model's context; or the checkpoint has another architecture, adapter or
        base, or more steps than the run.
    """

    def __init__(
        self,
        config: TrainConfig,
        workdir: pathlib.Path,
        model: Decoder,
        mesh: Mesh,
        loss: LossConfig,
        updates: int,
        resume: bool,
        keep_reference: bool | None = None,
    ) -> None:
        self.config = config
        self.workdir = workdir
        self.model = model
        check_context(config, model)
        workdir.mkdir(parents=True, exist_ok=True)
        buckets = config.learner.length_buckets or (config.engine.max_length,)
        self.layout = BatchLayout(
            mesh,
            buckets,
            config.learner.micro_tokens,
            model,
            share=config.learner.share_prefixes,
            replay=config.learner.replay_routing,
        )
        self._width = self.layout.width
        self.learner = Learner(
            model,
            self.optimizer(updates),
            loss,
            self.layout,
            remat=config.learner.remat,
            keep_reference=bool(config.learner.reward_kl_coef) if keep_reference is None else keep_reference,
            trainable=trained_parameters(model, config.model.freeze),
        )
        self.checkpoints = Checkpoints(workdir / "checkpoints", config.checkpoint.keep)
        self.start = self.saved = 0  # steps that the session begins after; steps of its newest checkpoint
        self.restored: dict[str, Any] = {}
        self.restored_rollouts = b""
        self._lora = lora_fields(model)
        self._frozen = frozen_digest(model, config.model.freeze)
        if resume:
            self.start = self.back_to_checkpoint()
        if self.start > config.steps:
            raise ValueError(
                f"{workdir} has {self.start} steps already, more than config.steps={config.steps}: raise it"
            )
        self.policy()  # makes the model drop the initial weights, which would stay on the devices otherwise
        # callbacks see a step again whose end was interrupted, and the writer is one of them
        seen = self.start - ("ending" in self.restored)
        self.writer = MetricWriter(
            workdir, seen, enabled=multihost.is_main(), log=config.log, config=without_secrets(as_json(config))
        )
        if multihost.is_main():
            # A policy exported by an earlier session will be older than the checkpoints from here on.
            shutil.rmtree(workdir / "policy", ignore_errors=True)
            (workdir / POLICY).unlink(missing_ok=True)
            # Written last, so that a run refused above can be started again with a corrected configuration.
            write_atomic(workdir / "config.json", json.dumps(as_json(config), indent=2) + "\n")
            write_atomic(workdir / "code.json", json.dumps(code_version(), indent=2) + "\n")
            write_atomic(workdir / "parameters.txt", parameter_overview(model, config.model.freeze))
        send(workdir)

    def save(self, step: int, *, into: Checkpoints | None = None, rollouts: bytes = b"", **extra: Any) -> None:
        """Writes a checkpoint after `step` steps, into the run's own checkpoints or `into` others.

        Args:
          rollouts: rollouts that were generated ahead (`Ahead.state`).

        Raises:
          NotFinite: some weights are not finite; nothing was written.
        """
        self._check_weights()
        extra["model"] = model_fields(self.model.config)
        extra["micro_batches"] = self.layout.capacity
        if self.layout.width < self._width:  # the devices were out of memory
            extra["micro_width"] = self.layout.width
        if self._lora is not None:
            extra["lora"] = self._lora
        if self._frozen:
            extra["frozen"] = self._frozen
        self.checkpoints.wait()  # the earlier one; orbax would now wait for it, too
        send(self.workdir)  # before the checkpoint: a session that resumes from it needs the metrics that belong to it
        (into or self.checkpoints).save(step, self.learner.state, self.learner.reference, extra, rollouts)
        self.saved = self.saved if into else step

    def _check_weights(self) -> None:
        if not self.learner.finite():
            raise NotFinite("actor/weights", "some weights of the policy are NaN or infinite")

    def back_to_checkpoint(self) -> int:
        """Restores weights and optimiser from the newest checkpoint that is not damaged. Returns its number of steps; 0 if
        there is none.

        Raises:
          Damaged: all checkpoints are.
        """
        self.checkpoints.wait()
        learner = self.learner
        if not (steps := self.checkpoints.steps()):
            return 0
        learner.state, learner.reference = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding),
            (learner.state, learner.reference),
        )
        self.policy()  # makes the model drop its weights: the restored ones need their memory
        for step, earlier in zip(steps, [*steps[1:], None]):
            try:
                state, reference, self.restored = self.checkpoints.restore(
                    step, learner.state, learner.reference, self.model.config, self._lora, self._frozen
                )
                self.restored_rollouts = self.checkpoints.rollouts(step)
                break
            except Damaged as error:
                if earlier is None:
                    raise
                if multihost.is_main():
                    logging.warning("%s; going back to the checkpoint of step %d", error.damage, earlier)
        learner.state, learner.reference = state, reference
        self.layout.capacity = max(self.layout.capacity, self.restored.get("micro_batches", 1))
        self.layout.width = min(self.layout.width, self.restored.get("micro_width", self.layout.width))
        self.policy()
        self.saved = step
        return step

    def optimizer(self, updates: int) -> optax.GradientTransformation:
        """The run's optimiser with a schedule over this many updates."""
        return self.config.learner.optimizer.build(updates)

    def due(self, step: int) -> bool:
        """True if a checkpoint is due after `step` steps."""
        every = self.config.checkpoint.every
        return step == self.config.steps or bool(every and step % every == 0)

    def served_params(self) -> nnx.State:
        """The learner's current weights in the form for the run's engine (config.engine.lora)."""
        params = self.learner.params
        return merge_state(params, self.model.compute_dtype) if self.config.engine.lora == "merged" else params

    def policy(self) -> Decoder:
        """The model with the learner's current weights; valid until the next update."""
        nnx.update(self.model, self.learner.params)
        return self.model

    def finish(self, *, export: bool = True) -> None:
        """Waits for checkpoints. If `export`, writes the policy as a Hugging Face directory, `workdir/policy`; an adapter is
        merged.

        Raises:
          NotFinite: some weights are not finite; no policy was written.
        """
        self.checkpoints.close()
        self.writer.close()
        if export:
            self._check_weights()
            save_pretrained(self.policy(), self.workdir / "policy")
            multihost.on_main(self._note_policy)
            send(self.workdir)
            multihost.barrier("policy saved")

    def _note_policy(self) -> None:
        files = sorted(file for file in (self.workdir / "policy").iterdir() if file.is_file())
        sizes = {file.name: [file.stat().st_size, file_sha256(file)] for file in files}
        write_atomic(self.workdir / POLICY, json.dumps(sizes) + "\n")


class Checkpointing(Callback):
    """Writes a checkpoint where one is due. While a watched metric is bad it waits, to keep those from before the trouble.

    Args:
      state: what a checkpoint keeps beside weights and optimiser, as arguments of `Run.save`.
      clock: of the whole run.
    """

    saves = True

    def __init__(self, run: Run, watch: Watch, state: Callable[[Step], Mapping[str, Any]], clock: Clock) -> None:
        self._run, self._watch, self._state, self._clock = run, watch, state, clock
        self._pending = False  # one was due and is still to be written

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after `step` steps, if all is well."""
        return self._pending or self._run.due(step)

    def on_step_end(self, step: Step) -> None:
        self._pending = self.due(step.completed)
        if self._pending and (step.completed == self._run.config.steps or not self._watch.worried):
            with self._clock("checkpoint"):
                self._run.save(step.completed, **self._state(step))
            self._pending = False

    def interrupted(self, completed: int, state: Mapping[str, Any] | None) -> None:
        """Writes a checkpoint of a run that is interrupted, unless there is one of this step, and waits until it is written.

        Args:
          completed: whole steps.
          state: as arguments of `Run.save`; None if attempts are under way, which no checkpoint holds.
        """
        if completed != self._run.saved:
            reason = "a watched metric is bad (config.watch)" if self._watch.worried else ""
            if state is None:
                reason = "attempts are under way, which no checkpoint holds (config.rollout.partial)"
            elif not reason:
                try:
                    self._run.save(completed, **state)
                except NotFinite as error:
                    reason = str(error)
            if reason and multihost.is_main():
                logging.warning("no checkpoint of step %d is written: %s", completed, reason)
        self._run.checkpoints.wait()


def policy_damage(workdir: pathlib.Path) -> str:
    """What in `workdir/policy` is not as it was written; "" if nothing is, or if it is of an earlier version, which noted
    nothing. Reads all of it, about a second per GB."""
    path = workdir / POLICY
    written = read_json(path, f"delete it to use {workdir / 'policy'} unchecked") if path.is_file() else {}
    for name, (size, sha256) in written.items():
        file = workdir / "policy" / name
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != size:
            return f"{file} has {file.stat().st_size:,} bytes of {size:,}"
        if file_sha256(file) != sha256:
            return f"{file} has other bytes than were written"
    return ""


def parameter_overview(model: Decoder, frozen: Sequence[str] = ()) -> str:
    """A table of the parameters (name, shape, dtype, number, and the mesh axes that split each), and how many are trained.

    Args:
      frozen: config.model.freeze.
    """

    def named(node_filter: Any) -> dict[str, Any]:
        leaves, _ = jax.tree.flatten_with_path(nnx.to_pure_dict(nnx.state(model, node_filter)))
        return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}

    everything, trained = named(...), named(trained_parameters(model, frozen))
    counts = [clu_overview.count_parameters(part) for part in (trained, everything)]
    table = clu_overview.get_parameter_overview(everything, include_stats="sharding")
    return f"{table}\nTrained: {counts[0]:,} of {counts[1]:,}\n"


def check_context(config: TrainConfig, model: Decoder) -> None:
    """Raises ValueError if conversations may be longer than the model's context."""
    if config.engine.max_length > model.config.max_length:
        raise ValueError(
            f"config.engine.max_length={config.engine.max_length} exceeds the model's context of "
            f"{model.config.max_length} tokens; lower it"
        )


def frozen_digest(model: Decoder, parts: Sequence[str]) -> str:
    """Digest of the frozen weights, which a checkpoint does not contain; "" if none are frozen, or with an adapter.

    Every process must call this.

    Args:
      parts: config.model.freeze.
    """
    if not parts or adapters(model):  # an adapter's checkpoint describes its base itself: lora_fields
        return ""
    _, _, frozen = nnx.split(model, trained_parameters(model, parts), ...)
    return digest(frozen)


def as_json(config: TrainConfig) -> dict[str, Any]:
    """The content of config.json."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def started(config: TrainConfig, workdir: pathlib.Path) -> TrainConfig:
    """The configuration of a run in `workdir`. If it has a warm start, the model is the warm start's policy."""
    if not config.warm_start.steps:
        return config
    policy = workdir / WARM_START / "policy"
    path = url_of(policy)  # where all processes of a job, and later sessions, find it
    model = dataclasses.replace(config.model, path=path if in_bucket(path) else str(policy), sight={})
    return dataclasses.replace(config, model=model)


def step_seed(seed: int, step: int) -> int:
    """The sampling seed of a training step. It differs for every (seed, step), so that a repeated question gets new samples."""
    return int(jax.random.randint(jax.random.fold_in(jax.random.key(seed), step), (), 0, 2**31 - 1))
