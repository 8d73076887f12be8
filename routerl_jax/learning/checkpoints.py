"""Checkpoints of a run: weights, optimiser, step, stage and data iterator. Only this file uses orbax.

Under gs:// orbax reads and writes in the bucket; several processes of a job each write their share there. Under s3://, which
orbax does not know, checkpoints are directories here, which are copied (parallel/mirrors.py).

A checkpoint holds the weights that the learner trains, and a digest of the frozen ones (config.model.freeze, or all weights but
the adapter of a model that has one).
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from flax import nnx

from routerl_jax.core.buckets import in_bucket, listing, url_of
from routerl_jax.learning.programs import LearnerState
from routerl_jax.models.config import DecoderConfig

_COMMITTED = "commit_success.txt"  # orbax's last file of a checkpoint in a bucket


class Checkpoints:
    """Saves and restores training state in `directory`.

    A checkpoint appears only when it is complete: orbax writes to a temporary name and renames, or in a bucket writes a last
    file that says so. A kill at any moment leaves the previous one valid.

    Args:
      directory: made if missing; or the mirror of a directory in a bucket.
      keep: number of newest checkpoints that are kept.
    """

    def __init__(self, directory: str | pathlib.Path, keep: int) -> None:
        self.directory = _root(pathlib.Path(directory))
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def latest(self) -> int | None:
        """The newest step, None if there is no checkpoint."""
        return self._manager.latest_step()

    def save(
        self,
        step: int,
        state: LearnerState,
        reference: nnx.State | None,
        extra: dict[str, Any],
        rollouts: bytes = b"",
    ) -> None:
        """Saves after `step` steps. Arrays are copied before this returns; writing continues in the background.

        Args:
          reference: weights of the KL reference; None if there is none.
          extra: JSON-serialisable state (data iterator, ...). It must have "model", the architecture's fields. For a model with
            an adapter it must also have "lora" (`models.lora.lora_fields`), and with frozen parts "frozen", their digest
            (`models.lora.digest`).
          rollouts: bytes of rollouts that wait for an update; b"": none do.
        """
        trees = _items(state, reference)
        if rollouts:
            trees["rollouts"] = {"bytes": np.frombuffer(rollouts, np.uint8)}
            extra = {**extra, "rollout_bytes": len(rollouts)}
        items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        self._manager.save(step, args=ocp.args.Composite(extra=ocp.args.JsonSave(extra), **items))

    def restore(
        self,
        step: int,
        like: LearnerState,
        reference: nnx.State | None,
        model: DecoderConfig,
        lora: dict[str, Any] | None = None,
        frozen: str = "",
    ) -> tuple[LearnerState, nnx.State | None, dict[str, Any]]:
        """Restores a step with the shapes and shardings of `like` (and `reference`).

        Args:
          like, reference: arrays, or jax.ShapeDtypeStruct with shardings. With arrays, the state exists twice for a while.
          model, lora, frozen: what the weights must belong to: the architecture; with an adapter, `models.lora.lora_fields`;
            with frozen parts, their `models.lora.digest`.

        Raises:
          ValueError: there is no such step, or it belongs to another architecture, adapter or base (names what differs).
        """
        extra = self._check(step, model, lora, frozen)
        restored = self._restore(step, _items(like, reference))
        optimizer = restored["optimizer"]
        state = LearnerState(
            params=_refill(like.params, restored["params"]),
            opt_state=_refill(like.opt_state, optimizer["opt_state"]),
            updates=optimizer["updates"],
        )
        if reference is not None:
            reference = _refill(reference, restored["reference"])
        logging.info("restored step %d from %s", step, self.directory)
        return state, reference, extra

    def rollouts(self, step: int) -> bytes:
        """The bytes of rollouts that were saved with a step; b"" if there are none."""
        extra = self._manager.restore(step, args=ocp.args.Composite(extra=ocp.args.JsonRestore()))["extra"]
        if not (count := extra.get("rollout_bytes", 0)):
            return b""
        like = ocp.args.StandardRestore({"bytes": np.zeros(count, np.uint8)})
        saved = self._manager.restore(step, args=ocp.args.Composite(rollouts=like))["rollouts"]
        return np.asarray(saved["bytes"]).tobytes()

    def restore_params(
        self,
        step: int,
        like: nnx.State,
        model: DecoderConfig,
        lora: dict[str, Any] | None = None,
        frozen: str = "",
    ) -> nnx.State:
        """Restores only the trained weights of a step, with the shardings of `like`."""
        self._check(step, model, lora, frozen)
        return _refill(like, self._restore(step, {"params": nnx.to_pure_dict(like)})["params"])

    def _check(self, step: int, model: DecoderConfig, lora: dict[str, Any] | None, frozen: str) -> dict[str, Any]:
        if step not in self._manager.all_steps():
            raise ValueError(
                f"{self.directory} has no checkpoint of step {step}; it has {sorted(self._manager.all_steps())}"
            )
        extra = self._manager.restore(step, args=ocp.args.Composite(extra=ocp.args.JsonRestore()))["extra"]
        check_same_model(extra["model"], model, f"{self.directory} step {step}")
        check_same_adapter(extra.get("lora"), lora, f"{self.directory} step {step}")
        if extra.get("frozen", "") != frozen:
            raise ValueError(
                f"{self.directory} step {step} was trained beside other frozen weights than these; use the base model, in the "
                f"dtype, that it was trained on, and config.model.freeze as it was"
            )
        return extra

    def _restore(self, step: int, trees: dict[str, Any]) -> Any:
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, trees)
        items = {name: ocp.args.StandardRestore(tree) for name, tree in shapes.items()}
        return self._manager.restore(step, args=ocp.args.Composite(**items))

    def wait(self) -> None:
        """Waits until everything is written."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Finishes writing and releases the directory."""
        self._manager.close()


def saved_steps(directory: pathlib.Path) -> list[int]:
    """The steps of the checkpoints in a directory, ascending; makes nothing there."""
    location = _root(directory)
    if not in_bucket(location):
        return sorted(int(path.name) for path in directory.glob("*") if path.name.isdecimal())
    names = (name.split("/") for name in listing(location))
    return sorted({int(step) for step, *rest in names if step.isdecimal() and rest == [_COMMITTED]})


def _root(directory: pathlib.Path) -> str:
    """The location of checkpoints: the URL in a bucket if orbax supports its kind, else the absolute path here."""
    path = url_of(directory)
    if not path.startswith("s3://"):
        return path
    if jax.process_count() > 1:
        raise ValueError(
            f"{path}: several processes can't write checkpoints under s3://; use gs://, or mount the bucket on all hosts"
        )
    return str(directory.absolute())


def check_same_model(saved: dict[str, Any], model: DecoderConfig, source: str) -> None:
    """Raises ValueError that names the differing fields if a checkpoint was made by another architecture."""
    current = model_fields(model)
    keys = {*saved, *current} - {"bos_id", "eos_ids"}  # the weights do not depend on these tokens
    differing = [key for key in sorted(keys) if saved.get(key) != current.get(key)]
    if differing:
        shown = ", ".join(f"{key}: {saved.get(key)!r} there, {current.get(key)!r} here" for key in differing[:5])
        raise ValueError(f"{source} is a checkpoint of another architecture ({shown}); use the model it was made with")


def check_same_adapter(saved: dict[str, Any] | None, current: dict[str, Any] | None, source: str) -> None:
    """Raises ValueError if a checkpoint's adapter or its base differs from the current one (None: all weights are trained)."""
    if saved is None or current is None:
        if saved is not current:
            kinds = ("a LoRA adapter", "all weights")
            saved_kind, current_kind = kinds if saved is not None else reversed(kinds)
            raise ValueError(
                f"{source} holds {saved_kind}, but the run trains {current_kind}; set config.model.lora as it was"
            )
        return
    for key, noun in (("adapters", "adapter"), ("qtypes", "quantisation")):
        names = {*saved[key], *current[key]}
        differing = [name for name in sorted(names) if saved[key].get(name) != current[key].get(name)]
        if differing:
            shown = ", ".join(f"{n}: {saved[key].get(n)} there, {current[key].get(n)} here" for n in differing[:5])
            raise ValueError(f"{source} has another {noun} ({shown}); set config.model.lora as it was")
    if saved["base"] != current["base"]:
        raise ValueError(
            f"{source} is an adapter on other weights than these (digest {saved['base'][:12]} there, {current['base'][:12]} "
            f"here); use the base model, in the dtype, that it was trained on"
        )


def model_fields(model: DecoderConfig) -> dict[str, Any]:
    """The fields of the architecture, as JSON gives them back: lists for tuples, also in the fields of `experts`."""
    return json.loads(json.dumps(dataclasses.asdict(model)))


def _items(state: LearnerState, reference: nnx.State | None) -> dict[str, Any]:
    """The trees to save. They are plain trees of arrays that do not depend on flax's or optax's classes."""
    items: dict[str, Any] = {
        "params": nnx.to_pure_dict(state.params),
        "optimizer": {"opt_state": jax.tree.leaves(state.opt_state), "updates": state.updates},
    }
    if reference is not None:
        items["reference"] = nnx.to_pure_dict(reference)
    return items


def _refill(like: Any, leaves: Any) -> Any:
    """The structure of `like` with the leaves of an equally ordered plain tree."""
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(leaves))
