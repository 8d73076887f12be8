"""Reading safetensors straight into sharded arrays: every process reads the slices that its devices hold, once."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from flax import nnx
from jax.sharding import Mesh, Sharding
from safetensors import SafetensorError, safe_open

from routerl_jax.models.config import UnsupportedModelError
from routerl_jax.models.mapping import Rule, Rules
from routerl_jax.parallel.sharding import shardings

# Tensors of checkpoints that no model here has a use for: buffers, copies, heads for other tasks.
_SPARE_TENSORS = re.compile(r"(rotary_emb\.inv_freq|position_ids|^lm_head\.weight)$|(^|\.)pooler\.|^cls\.")
_FLOATS = ("F64", "F32", "F16", "BF16")
_SHOWN = 20

Bounds = tuple[tuple[int, int], ...]  # (start, stop) on each axis


def read_json(path: pathlib.Path) -> Any:
    """A JSON file's content. Raises ValueError that names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def fill(model: nnx.Module, rules: Rules, checkpoint: Checkpoint, mesh: Mesh, layout: str) -> None:
    """Gives an abstract model (shapes without values) the weights of a checkpoint, sharded by a layout.

    The host holds no more than the target arrays and the slices of one tensor: a file is mapped for as long as one tensor
    of it is read.

    Raises:
      ValueError: tensors that are missing, of a wrong shape, or more than the architecture has (by name).
      UnsupportedModelError: quantized weights.
    """
    abstract = nnx.state(model, nnx.Param)
    targets = dict(nnx.to_flat_state(shardings(abstract, mesh, layout)))
    parameters = nnx.to_flat_state(abstract)
    checkpoint.check({path: tuple(variable.get_value().shape) for path, variable in parameters}, rules)
    filled = []
    for path, variable in parameters:
        shape, dtype = variable.get_value().shape, variable.get_value().dtype
        array = _read_parameter(checkpoint, rules[path], shape, dtype, targets[path].get_value())
        filled.append((path, variable.replace(array)))
    nnx.update(model, nnx.from_flat_state(filled))


class _Stored(NamedTuple):
    file: pathlib.Path
    name: str  # in the file
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """The tensors of a safetensors directory, sharded or not.

    Args:
      directory: with model.safetensors, or model.safetensors.index.json and what it names.
      spellings: (beginning of a name, what may be stored in its place); tried in order after the name itself.

    Raises:
      ValueError: a file is missing or damaged.
    """

    def __init__(self, directory: pathlib.Path, spellings: Sequence[tuple[str, str]] = ()) -> None:
        self.directory = directory
        self._spellings = (("", ""), *spellings)
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            files = {directory / name for name in read_json(index)["weight_map"].values()}
        else:
            files = {directory / "model.safetensors"}
        for file in sorted(files):
            if not file.is_file():
                raise ValueError(f"{file} is missing; expected weights in safetensors format")
        self._stored: dict[str, _Stored] = {}
        for file in sorted(files):
            try:
                with safe_open(file, "np") as reader:
                    for name in reader.keys():  # noqa: SIM118 - not a dict
                        tensor = reader.get_slice(name)
                        self._stored[name] = _Stored(file, name, tuple(tensor.get_shape()), tensor.get_dtype())
            except SafetensorError as error:
                raise ValueError(f"{file} is damaged or not a safetensors file: {error}") from error

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def check(self, shapes: dict[Any, tuple[int, ...]], rules: Rules) -> None:
        """Raises if parameters of these shapes can't be read by these rules; see `fill`."""
        missing, wrong, used = [], [], set()
        for path, shape in shapes.items():
            rule = rules[path]
            for name, expected in _tensors(rule, shape):
                found = self._find(name)
                if found is None:
                    missing.append(name)
                    continue
                used.add(found.name)
                if found.dtype not in _FLOATS:
                    raise UnsupportedModelError(
                        f"{self.directory}: tensor {name!r} is stored as {found.dtype}; quantized weights are not supported, "
                        f"use the model's float32, float16 or bfloat16 version"
                    )
                if found.shape != expected:
                    wrong.append(f"{name!r} of shape {found.shape} (needed as {expected})")
        if missing:
            raise ValueError(
                f"{self.directory}: {_count(missing, 'tensor')} missing: {_some(missing)}; the weights belong to another "
                f"architecture than config.json"
            )
        if wrong:
            raise ValueError(f"{self.directory}: does not fit the architecture in config.json: tensor {_some(wrong)}")
        self._check_others(sorted(set(self._stored) - used), used)

    def _check_others(self, names: list[str], used: set[str]) -> None:
        """Tensors among those of the model's layers change its results: an error. Others are heads for other tasks."""
        names = [name for name in names if not _SPARE_TENSORS.search(name)]
        places = {re.sub(r"\.\d+\..*", ".", name) for name in used if re.search(r"\.\d+\.", name)}
        inside = [name for name in names if name.startswith(tuple(places))]
        if inside:
            raise ValueError(
                f"{self.directory}: {_count(inside, 'tensor')} in excess of the architecture in config.json: {_some(inside)}"
            )
        if names:
            logging.warning(
                "%s: %d tensors are not of this architecture and unused: %s", self.directory, len(names), _some(names)
            )

    @contextlib.contextmanager
    def tensor(self, name: str) -> Iterator[Any]:
        """A tensor to take slices of; its file is mapped meanwhile, and its pages are given back after."""
        stored = self._find(name)
        assert stored is not None, "check comes first"
        with safe_open(stored.file, "np") as reader:
            yield reader.get_slice(stored.name)

    def _find(self, name: str) -> _Stored | None:
        names = (new + name[len(old) :] for old, new in self._spellings if name.startswith(old))
        return next((self._stored[name] for name in names if name in self._stored), None)


def _read_parameter(
    checkpoint: Checkpoint, rule: Rule, shape: tuple[int, ...], dtype: Any, target: Sharding
) -> jax.Array:
    """One of our (stacked) parameters, tensor by tensor, into the blocks that this process's devices hold."""
    devices: dict[Bounds, list[Any]] = {}
    for device, index in target.addressable_devices_indices_map(shape).items():
        assert index is not None
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape))
        devices.setdefault(bounds, []).append(device)
    blocks = {bounds: np.empty([stop - start for start, stop in bounds], dtype) for bounds in devices}
    outer = rule.outer
    for place in np.ndindex(*shape[:outer]):
        with checkpoint.tensor(rule.name_at(place)) as tensor:
            for bounds, block in blocks.items():
                if all(start <= i < stop for i, (start, stop) in zip(place, bounds)):
                    inside = tuple(i - start for i, (start, _) in zip(place, bounds))
                    block[inside] = rule.read(tensor, bounds[outer:], shape[outer:])
    parts = []
    for bounds in list(blocks):
        block = blocks.pop(bounds)
        parts.extend(jax.device_put(block, device) for device in devices[bounds])
        jax.block_until_ready(parts[-1])  # a device's copy, or none, but never one of each at once
        del block
    return jax.make_array_from_single_device_arrays(shape, target, parts)


def _tensors(rule: Rule, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors that fill a parameter of this shape."""
    for place in np.ndindex(*shape[: rule.outer]):
        yield rule.name_at(place), rule.their_shape(shape[rule.outer :])


def _count(items: list[str], noun: str) -> str:
    return f"{len(items)} {noun} is" if len(items) == 1 else f"{len(items)} {noun}s are"


def _some(items: list[str]) -> str:
    rest = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
