"""Files in the safetensors format: read straight into sharded arrays, and written tensor by tensor.

Every process reads the slices that its devices hold, once. The library reads whole tensors and writes whole files. Here a
file's pages are in memory only while their rows are copied.
Format: https://github.com/huggingface/safetensors (8 bytes of length, a JSON header, the tensors).
"""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from absl import logging
from flax import nnx
from jax.sharding import Mesh, Sharding
from safetensors import SafetensorError, safe_open

from routerl_jax.core.files import read_json
from routerl_jax.core.progress import Bar
from routerl_jax.models.config import UnsupportedModelError
from routerl_jax.models.family import Rule, Rules, spelled
from routerl_jax.parallel import multihost
from routerl_jax.parallel.sharding import shardings

# Types of weights that can be read and written.
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    file: pathlib.Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors calls it; `DTYPES` has those that are floating point
    offset: int  # of its first byte in the file

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of the first axis, mapped: read when they are used, and given back with the last reference."""
        width = math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize
        shape = (stop - start, *self.shape[1:])
        return np.memmap(self.file, DTYPES[self.dtype], "r", self.offset + start * width, shape)


def tensors_of(file: pathlib.Path) -> list[StoredTensor]:
    """The tensors of a safetensors file.

    Raises:
      ValueError: the file is absent, damaged, or cut short at any byte.
    """
    if not file.is_file():
        raise ValueError(f"{file} is missing; expected weights in safetensors format")
    try:
        with safe_open(file, "np"):  # checks the header, and that its tensors fill the file
            pass
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or not a safetensors file: {error}") from error
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    return [
        StoredTensor(file, name, tuple(entry["shape"]), entry["dtype"], 8 + size + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    ]


class TensorWriter:
    """Writes a safetensors file, one tensor at a time, in the order of `tensors`.

    Args:
      path: the file; its mode follows the umask.
      tensors: shape and dtype by name, of all that will be written.
    """

    def __init__(self, path: pathlib.Path, tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (shape, dtype) in tensors.items():
            start, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 64)  # data begin at a multiple of 8; of 64, memory that is mapped is well aligned
        self._due = list(tensors.items())
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, tensor: np.ndarray) -> None:
        """Appends the next tensor."""
        name, (shape, dtype) = self._due.pop(0)
        assert tensor.shape == shape, (name, tensor.shape, shape)
        assert tensor.dtype == dtype, (name, tensor.dtype, dtype)
        self._file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)

    def close(self) -> None:
        """Ends the file."""
        self._file.close()

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Tensors of checkpoints that no model here has a use for: buffers, and heads for other tasks. (transformers drops them too.)
_SPARE_TENSORS = re.compile(r"(rotary_emb\.inv_freq|position_ids)$|(^|\.)pooler\.|^cls\.")
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# What trainers save beside weights.
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin")
_TIED = "config.json ties them: set tie_word_embeddings to false in config.json to use both, or"
_SHOWN = 20  # names in an error
_SHOW_FROM = 10**9  # bytes that are worth a progress bar
_WINDOW_BYTES = 64 * 2**20  # of a file that are mapped at a time
_HOST_BYTES = 4 * 2**30  # of blocks on their way to devices
_TILE_ROWS = 256

Bounds = tuple[tuple[int, int], ...]  # (start, stop) on each axis


def fill(model: nnx.Module, rules: Rules, checkpoint: Checkpoint, mesh: Mesh, layout: str) -> None:
    """Gives an abstract model (shapes without values) the weights of a checkpoint, sharded by a layout.

    Beside the target arrays the host holds a window of one tensor's file. For devices with memory of their own it holds
    blocks of one parameter too, `_HOST_BYTES` of them or one. Large checkpoints show a progress bar on the main process.

    Raises:
      ValueError: tensors that are missing, of a wrong shape, or more than the architecture has (by name).
      UnsupportedModelError: quantized weights.
    """
    abstract = nnx.state(model, nnx.Param)
    targets = dict(nnx.to_flat_state(shardings(abstract, mesh, layout)))
    parameters = nnx.to_flat_state(abstract)
    checkpoint.check({path: tuple(variable.get_value().shape) for path, variable in parameters}, rules)
    devices = {
        path: _block_devices(targets[path].get_value(), variable.get_value().shape) for path, variable in parameters
    }
    total = sum(
        math.prod(stop - start for start, stop in bounds) * variable.get_value().dtype.itemsize
        for path, variable in parameters
        for bounds in devices[path]
    )
    filled = []
    with progress_bar("reading weights", total) as bar:
        for path, variable in parameters:
            value = variable.get_value()
            parts = _read_parameter(checkpoint, rules[path], value.shape, np.dtype(value.dtype), devices[path], bar)
            array = jax.make_array_from_single_device_arrays(value.shape, targets[path].get_value(), parts)
            filled.append((path, variable.replace(array)))
    nnx.update(model, nnx.from_flat_state(filled))


def progress_bar(description: str, total: int) -> Bar:
    """A progress bar of bytes. Only the main process shows it, and only if reading takes a while."""
    hidden = total < _SHOW_FROM or not multihost.is_main()
    return Bar(total=total, desc=description, unit="B", unit_scale=True, disable=hidden)


class Checkpoint:
    """The tensors of a safetensors directory, sharded or not.

    Args:
      directory: with model.safetensors, or model.safetensors.index.json and the files that it names.
      spellings: (prefix of a name, another prefix in some checkpoints); tried in order after the name itself.

    Attributes:
      bytes_read: of tensors, so far, by this process.

    Raises:
      ValueError: a file is missing or damaged, or does not hold what the index says; or two files hold a tensor, or the
        directory two sets of weights.
    """

    def __init__(self, directory: pathlib.Path, spellings: Sequence[tuple[str, str]] = ()) -> None:
        self.directory = directory
        self.bytes_read = 0
        self._spellings = tuple(spellings)
        self._stored: dict[str, StoredTensor] = {}
        index, whole = directory / _INDEX, directory / _WHOLE
        files = weight_map(index) if index.is_file() else {}
        names = sorted(set(files.values())) or [_WHOLE]
        shards = sorted(path.name for path in directory.glob("model-*-of-*.safetensors"))
        if whole.is_file() and names != [_WHOLE]:  # transformers reads the whole file, other programs the index
            raise ValueError(
                f"{directory} holds two sets of weights: {_WHOLE}, and the files of {_INDEX} ({_shortened(names)}); delete "
                f"{_WHOLE}, or the index and its files"
            )
        if shards and not files and not whole.is_file():
            raise ValueError(f"{index} is missing, which says what {_shortened(shards)} hold; download it")
        for file in names:
            tensors = {stored.name: stored for stored in tensors_of(directory / file)}
            absent = [name for name, stored_in in files.items() if stored_in == file and name not in tensors]
            if absent:
                raise ValueError(f"{directory / file} lacks {_shortened(absent)}, which {_INDEX} says it holds")
            if twice := sorted(tensors.keys() & self._stored.keys()):
                raise ValueError(
                    f"{directory / file} holds {_shortened(twice)}, which {self._stored[twice[0]].file.name} holds too; "
                    f"delete one of them: programs differ in which one they read"
                )
            self._stored |= tensors
        others = {path.name for ending in ("safetensors", "bin", "gguf") for path in directory.glob(f"*.{ending}")}
        if others := sorted(name for name in others - set(names) if name not in _NO_WEIGHTS):
            logging.warning(
                "%s: weights are read from %s; not from %s", directory, _shortened(names), _shortened(others)
            )

    def __contains__(self, name: str) -> bool:
        return bool(self._spelled(name))

    def check(self, shapes: dict[Any, tuple[int, ...]], rules: Rules) -> None:
        """Raises if parameters of these shapes can't be read by these rules; see `fill`."""
        missing, wrong, used, copies = [], [], set(), []
        for path, shape in shapes.items():
            rule = rules[path]
            for name, expected in _tensors(rule, shape):
                same = self._spelled(name)
                if not same:
                    missing.append(name)
                    continue
                stored, tied = same[0], [copy for other in rule.copies for copy in self._spelled(other)]
                used |= {copy.name for copy in (*same, *tied)}
                copies += [(stored, copy, "is the same parameter:") for copy in same[1:]]
                copies += [(stored, copy, _TIED) for copy in tied]
                if stored.dtype not in DTYPES:
                    raise UnsupportedModelError(
                        f"{self.directory}: tensor {name!r} is stored as {stored.dtype}; quantized weights are not supported, "
                        f"use the model's float32, float16 or bfloat16 version"
                    )
                if stored.shape != expected:
                    wrong.append(f"{name!r} of shape {stored.shape} (needed as {expected})")
        if missing:
            raise ValueError(
                f"{self.directory}: {_counted(missing, 'tensor')} missing: {_shortened(missing)}; the weights belong to "
                f"another architecture than config.json"
            )
        if wrong:
            raise ValueError(
                f"{self.directory}: does not fit the architecture in config.json: tensor {_shortened(wrong)}"
            )
        for stored, copy, why in copies:
            if not _equal(stored, copy):
                raise ValueError(
                    f"{self.directory}: tensor {copy.name!r} differs from {stored.name!r}, but {why} delete {copy.name!r} from "
                    f"{copy.file.name}"
                )
        self._check_others(sorted(set(self._stored) - used), used)

    def _check_others(self, names: list[str], used: set[str]) -> None:
        """Tensors among those of the model's layers change its results: an error. Others are heads for other tasks."""
        names = [name for name in names if not _SPARE_TENSORS.search(name)]
        prefixes = {re.sub(r"\.\d+\..*", ".", name) for name in used if re.search(r"\.\d+\.", name)}
        inside = [name for name in names if name.startswith(tuple(prefixes))]
        if inside:
            raise ValueError(
                f"{self.directory}: {_counted(inside, 'tensor')} in excess of the architecture in config.json: "
                f"{_shortened(inside)}"
            )
        if names:
            logging.warning(
                "%s: %d tensors are not of this architecture and unused: %s",
                self.directory,
                len(names),
                _shortened(names),
            )

    def read(self, name: str, rule: Rule, shape: tuple[int, ...], blocks: list[tuple[Bounds, np.ndarray]]) -> None:
        """Copies a tensor into blocks of a parameter (of one layer), each given with where it lies in it."""
        stored = self._spelled(name)[0]  # `check` comes first
        if not shape:
            for _, block in blocks:
                block[...] = stored.rows(0, 1).reshape(())
            self.bytes_read += DTYPES[stored.dtype].itemsize
            return
        axis, per = rule.rows(shape)
        row_bytes = per * DTYPES[stored.dtype].itemsize * math.prod(stored.shape[1:])
        begin = min(bounds[axis][0] for bounds, _ in blocks)
        end = max(bounds[axis][1] for bounds, _ in blocks)
        step = max(1, _WINDOW_BYTES // row_bytes)
        for start in range(begin, end, step):
            stop = min(start + step, end)
            window_shape = (*shape[:axis], stop - start, *shape[axis + 1 :])
            window = rule.to_ours(stored.rows(start * per, stop * per), window_shape)
            for bounds, block in blocks:
                self.bytes_read += _copy(window, start, stop, bounds, block, axis, max(1, _TILE_ROWS // per))

    def _spelled(self, name: str) -> list[StoredTensor]:
        """The tensors under the spellings of a name; the first one counts, and the others must be equal."""
        names = dict.fromkeys(spelled(name, self._spellings))
        return [self._stored[name] for name in names if name in self._stored]


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two stored tensors have equal values, read a window at a time."""
    if one.shape != other.shape or other.dtype not in DTYPES:
        return False
    step = max(
        1, _WINDOW_BYTES // (max(DTYPES[one.dtype].itemsize, DTYPES[other.dtype].itemsize) * math.prod(one.shape[1:]))
    )
    ranges = ((start, min(start + step, one.shape[0])) for start in range(0, one.shape[0], step))
    return all(np.array_equal(one.rows(*rows), other.rows(*rows)) for rows in ranges)


def weight_map(index: pathlib.Path) -> dict[str, str]:
    """Which file an index says that a tensor is in. Raises ValueError if it does not say, or names files elsewhere."""
    content = read_json(index)
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{index}: weight_map is missing, or not a mapping of tensors to files; download it again")
    outside = [file for file in files.values() if pathlib.PurePath(file).name != file]
    if outside:
        raise ValueError(f"{index}: weight_map names {outside[0]!r}; files must lie beside the index")
    return files


def _block_devices(target: Sharding, shape: tuple[int, ...]) -> dict[Bounds, list[Any]]:
    """The distinct blocks of an array that this process holds, and the devices that hold each."""
    devices: dict[Bounds, list[Any]] = {}
    for device, index in target.addressable_devices_indices_map(shape).items():
        assert index is not None
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape))
        devices.setdefault(bounds, []).append(device)
    return devices


def _read_parameter(
    checkpoint: Checkpoint,
    rule: Rule,
    shape: tuple[int, ...],
    dtype: np.dtype,
    devices: dict[Bounds, list[Any]],
    bar: Bar,
) -> list[jax.Array]:
    """One of our (stacked) parameters, tensor by tensor, as this process's part of it on each of its devices."""
    parts, outer = [], rule.outer
    for group in _groups(list(devices), dtype.itemsize):
        blocks = {bounds: _aligned([stop - start for start, stop in bounds], dtype) for bounds in group}
        for index in np.ndindex(*shape[:outer]):
            inside = [
                (bounds[outer:], block[(*(i - start for i, (start, _) in zip(index, bounds)), ...)])
                for bounds, block in blocks.items()
                if all(start <= i < stop for i, (start, stop) in zip(index, bounds))
            ]
            if inside:
                checkpoint.read(rule.name_at(index), rule, shape[outer:], inside)
                bar.update(sum(block.nbytes for _, block in inside))
        inside = []
        for bounds in group:
            block = blocks.pop(bounds)
            parts.extend(jax.device_put(block, device) for device in devices[bounds])
            del block
        jax.block_until_ready(parts)  # they may still be read from the host's blocks
    return parts


def _groups(blocks: list[Bounds], itemsize: int) -> Iterator[list[Bounds]]:
    """Blocks that are read together: as many as the host may hold, at least one."""
    group, group_bytes = [], 0
    for bounds in blocks:
        size = math.prod(stop - start for start, stop in bounds) * itemsize
        if group and group_bytes + size > _HOST_BYTES:
            yield group
            group, group_bytes = [], 0
        group.append(bounds)
        group_bytes += size
    yield group


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Memory that JAX takes over on a CPU instead of copying it: its address is a multiple of 64."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def _copy(window: np.ndarray, start: int, stop: int, bounds: Bounds, block: np.ndarray, axis: int, tile: int) -> int:
    """Copies entries [start, stop) of an axis, as far as they are the block's, and returns their size in bytes.

    In tiles: most matrices are transposed on the way, and rows of a tile stay in the processor's cache meanwhile.
    """
    if window.dtype == block.dtype == DTYPES["BF16"]:  # numpy copies its own types several times faster
        window, block = window.view(np.uint16), block.view(np.uint16)
    first, last = max(start, bounds[axis][0]), min(stop, bounds[axis][1])
    source, target = [slice(*pair) for pair in bounds], [slice(None)] * len(bounds)
    copied = 0
    for at in range(first, last, tile):
        end = min(at + tile, last)
        source[axis] = slice(at - start, end - start)
        target[axis] = slice(at - bounds[axis][0], end - bounds[axis][0])
        part = window[tuple(source)]
        block[tuple(target)] = part
        copied += part.nbytes
    return copied


def _tensors(rule: Rule, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors that fill a parameter of this shape."""
    for index in np.ndindex(*shape[: rule.outer]):
        yield rule.name_at(index), rule.their_shape(shape[rule.outer :])


def _counted(items: list[str], noun: str) -> str:
    return f"{len(items)} {noun} is" if len(items) == 1 else f"{len(items)} {noun}s are"


def _shortened(items: list[str]) -> str:
    rest = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
