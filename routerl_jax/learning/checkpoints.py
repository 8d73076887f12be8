"""Checkpoints of a run: weights, optimiser, step, stage and data iterator. Only this file uses orbax.

Under gs:// orbax reads and writes in the bucket; several processes of a job each write their share there. Under s3://, which
orbax does not know, checkpoints are directories here, which are copied (parallel/mirrors.py).

A checkpoint holds the weights that the learner trains, and a digest of the frozen ones (config.model.freeze, or all weights but
the adapter of a model that has one).

Beside them lie digests (`DIGESTS`): the size of every file, SHA-256 of small files, and sums over the bits of every array,
which the devices compute. What is restored is compared with them. So no large file is read twice.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from absl import logging
from flax import nnx

from routerl_jax.core.buckets import in_bucket, listing, url_of
from routerl_jax.learning.learner import LearnerState
from routerl_jax.models.config import DecoderConfig
from routerl_jax.parallel import multihost
from routerl_jax.parallel.mirrors import MARK
from routerl_jax.parallel.sharding import bit_sums

DIGESTS = "digests"  # in a checkpoint: SHA-256 of the second line, which is JSON
_COMMITTED = "commit_success.txt"  # orbax's last file of a checkpoint in a bucket
_UNFINISHED = ".orbax-checkpoint-tmp"
_SMALL = 2**20  # bytes; larger files are those of arrays


class Damaged(ValueError):
    """A checkpoint does not hold what was written; `damage` says where and what. The message says what to do."""

    def __init__(self, place: str, damage: str, earlier: list[int]) -> None:
        self.damage = f"{place} is damaged: {damage}"
        fix = f"take an earlier step ({', '.join(map(str, earlier))}), or " if earlier else ""
        super().__init__(
            f"{self.damage}; {fix}put back a copy of it"
            + ("" if earlier else f". There is no earlier checkpoint: remove {place}, and the run begins again")
        )


class Checkpoints:
    """Saves and restores training state in `directory`.

    A checkpoint appears only when it is complete: orbax writes to a temporary name and renames, or in a bucket writes a last
    file that says so. A kill at any moment leaves the previous one valid.

    Args:
      directory: made if missing; or the mirror of a directory in a bucket.
      keep: number of newest checkpoints that are kept.
    """

    def __init__(self, directory: str | pathlib.Path, keep: int) -> None:
        import orbax.checkpoint as ocp  # not with this module: it takes most of a second

        self._ocp = ocp
        self.directory = _root(pathlib.Path(directory))
        self._sums: dict[str, int] = {}  # of the checkpoint that is being written
        self._writing = 0  # its step
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=True,
            enable_async_checkpointing=True,
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._write_digests),
        )
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def latest(self) -> int | None:
        """The newest step, None if there is no checkpoint."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """All steps, the newest first."""
        return sorted(self._manager.all_steps(), reverse=True)

    def save(
        self,
        step: int,
        state: LearnerState,
        reference: nnx.State | None,
        extra: dict[str, Any],
        rollouts: bytes = b"",
    ) -> None:
        """Saves after `step` steps. Arrays are copied before this returns; writing continues in the background.

        Checkpoints of this and later steps are replaced: they are damaged, or the run would not have come here again.

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
            extra = {**extra, "rollout_bytes": len(rollouts), "rollout_sha256": hashlib.sha256(rollouts).hexdigest()}
        self.wait()  # for an earlier one, whose digests these would replace
        for replaced in [other for other in self.steps() if other >= step]:
            self._manager.delete(replaced)
        self._writing, self._sums = step, bit_sums(_named(_items(state, reference)))
        extra = {**extra, DIGESTS: True}
        items = {name: self._ocp.args.StandardSave(tree) for name, tree in trees.items()}
        self._manager.save(step, args=self._ocp.args.Composite(extra=self._ocp.args.JsonSave(extra), **items))

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
          Damaged: it does not hold what was written.
        """
        extra, sums = self._check(step, model, lora, frozen)
        restored = self._restore(step, _items(like, reference), sums)
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
        extra = self._read(step, extra=self._ocp.args.JsonRestore())["extra"]
        if not (count := extra.get("rollout_bytes", 0)):
            return b""
        like = self._ocp.args.StandardRestore({"bytes": np.zeros(count, np.uint8)})
        rollouts = np.asarray(self._read(step, rollouts=like)["rollouts"]["bytes"]).tobytes()
        if hashlib.sha256(rollouts).hexdigest() != extra.get("rollout_sha256", hashlib.sha256(rollouts).hexdigest()):
            raise self._damaged(step, "the waiting rollouts have other bytes than were written")
        return rollouts

    def restore_params(
        self,
        step: int,
        like: nnx.State,
        model: DecoderConfig,
        lora: dict[str, Any] | None = None,
        frozen: str = "",
    ) -> nnx.State:
        """Restores only the trained weights of a step, with the shardings of `like`."""
        _, sums = self._check(step, model, lora, frozen)
        return _refill(like, self._restore(step, {"params": nnx.to_pure_dict(like)}, sums)["params"])

    def _check(
        self, step: int, model: DecoderConfig, lora: dict[str, Any] | None, frozen: str
    ) -> tuple[dict[str, Any], dict[str, int]]:
        """The `extra` of a step whose files are whole and that belongs to the model, and the sums of its arrays."""
        if step not in self._manager.all_steps():
            raise ValueError(
                f"{self.directory} has no checkpoint of step {step}; it has {sorted(self._manager.all_steps())}"
            )
        sums = self._check_files(step)
        extra = self._read(step, extra=self._ocp.args.JsonRestore())["extra"]
        check_same_model(extra["model"], model, f"{self.directory} step {step}")
        check_same_adapter(extra.get("lora"), lora, f"{self.directory} step {step}")
        if extra.get("frozen", "") != frozen:
            raise ValueError(
                f"{self.directory} step {step} was trained beside other frozen weights than these; use the base model, in the "
                f"dtype, that it was trained on, and config.model.freeze as it was"
            )
        return extra, sums

    def _restore(self, step: int, trees: dict[str, Any], written: dict[str, int]) -> Any:
        shapes = jax.tree.map(self._ocp.utils.to_shape_dtype_struct, trees)
        restored = self._read(step, **{name: self._ocp.args.StandardRestore(tree) for name, tree in shapes.items()})
        if written:
            sums = bit_sums(_named({name: restored[name] for name in trees}))
            if changed := [name for name, value in sums.items() if value != written.get(name)]:
                raise self._damaged(step, f"the array {changed[0]} has other values than were written")
        return restored

    def _read(self, step: int, **items: Any) -> Any:
        """orbax's `restore`, whose many errors (of parsers, decoders, checksums) become one."""
        restored, failure = None, ""
        try:
            restored = self._manager.restore(step, args=self._ocp.args.Composite(**items))
        except (jax.errors.JaxRuntimeError, MemoryError):
            raise  # too little memory
        except Exception as error:
            failure = f"{', '.join(items)} can't be read ({str(error).strip().splitlines()[0]:.150})"
        if failures := [text for text in multihost.exchange(failure) if text]:
            raise self._damaged(step, failures[0])
        return restored

    def _damaged(self, step: int, damage: str) -> Damaged:
        return Damaged(f"{self.directory}/{step}", damage, [other for other in self.steps() if other < step])

    def _write_digests(self) -> None:
        """Called when all files of a checkpoint are written, before it gets its name."""
        if not multihost.is_main():
            return
        root, name = self._manager.directory, str(self._writing)
        places = [path for path in root.iterdir() if path.name == name or path.name.startswith(f"{name}{_UNFINISHED}")]
        place = min(places, key=lambda path: len(path.name))  # beside it may lie what a killed session left
        files = {}
        for path in _files(place):
            if path.name == MARK:  # gets the time at which it was complete
                continue
            size = path.stat().length
            files[str(path.relative_to(place))] = [size, _sha256(path) if size <= _SMALL else ""]
        text = json.dumps({"step": self._writing, "files": files, "arrays": self._sums}).encode()
        (place / DIGESTS).write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)

    def _check_files(self, step: int) -> dict[str, int]:
        """Compares a checkpoint's files with its digests, in the main process for all. Returns the sums of its arrays; {} for a
        checkpoint of an earlier version, which has no digests."""
        damage, sums = multihost.exchange(self._compare_files(step) if multihost.is_main() else None)[0]
        if damage:
            raise self._damaged(step, damage)
        return sums

    def _compare_files(self, step: int) -> tuple[str, dict[str, int]]:
        place = self._manager.directory / str(step)
        if not (place / DIGESTS).exists():
            try:
                marked = DIGESTS in json.loads((place / "extra" / "metadata").read_bytes())
            except (ValueError, OSError):
                return "extra/metadata is missing or can't be read", {}
            if not marked:
                logging.warning("%s has no digests, as it is of an earlier version: damage may go unnoticed", place)
            return (f"{DIGESTS} is missing" if marked else ""), {}
        digest, _, text = (place / DIGESTS).read_bytes().partition(b"\n")
        if hashlib.sha256(text).hexdigest().encode() != digest:
            return f"{DIGESTS} has other bytes than were written", {}
        written = json.loads(text)
        if written.get("step", step) != step:
            return f"it is a copy of step {written['step']}", {}
        try:
            json.loads((place / MARK).read_bytes())
        except (ValueError, OSError):
            return f"{MARK} is missing or can't be read", {}
        for name, (size, sha256) in written["files"].items():
            path = place / name
            if not path.exists() or path.is_dir():
                return f"{name} is missing", {}
            if (now := path.stat().length) != size:
                return f"{name} has {now:,} bytes of {size:,}", {}
            if sha256 and _sha256(path) != sha256:
                return f"{name} has other bytes than were written", {}
        return "", written["arrays"]

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


def _named(items: dict[str, Any]) -> dict[str, jax.Array]:
    """The arrays of trees by their paths."""
    leaves, _ = jax.tree.flatten_with_path(items)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _files(directory: Any) -> Iterator[Any]:
    """The files below a directory, as orbax's paths (of file systems and buckets)."""
    for path in directory.iterdir():
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def _sha256(path: Any) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _refill(like: Any, leaves: Any) -> Any:
    """The structure of `like` with the leaves of an equally ordered plain tree."""
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(leaves))
