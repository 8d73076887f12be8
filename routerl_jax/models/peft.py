"""Adapters in the format of the `peft` library: adapter_config.json (with the base model's name) and
adapter_model.safetensors."""

from __future__ import annotations

import math
import pathlib
import re
import shutil
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from routerl_jax.core.files import read_json
from routerl_jax.models.config import UnsupportedModelError
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.family import FAMILIES, Family, spelled, write_json
from routerl_jax.models.lora import adapters, attach, base_digest
from routerl_jax.models.projection import MODULES
from routerl_jax.parallel import multihost
from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.parallel.sharding import shardings

CONFIG = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # prefix of peft's wrapper around the model
# Settings that change the result and are not done here, with the values that leave it as it is.
_UNSUPPORTED = {
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "modules_to_save": ([], None),
    "layer_replication": ([], None),
    "target_parameters": ([], None),
    "trainable_token_indices": ([], {}, None),
    "alora_invocation_tokens": ([], None),
}
# How an adapter began that took nothing from its base: after other ways (pissa, olora, corda, ...) peft changes the base's
# weights whenever it loads the adapter.
_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


def save_adapter(model: Decoder, directory: str | pathlib.Path, base: str, dtype: str | None = None) -> None:
    """Writes a model's adapter as a directory that `peft.PeftModel.from_pretrained` loads with equal results.

    The directory is written atomically. With several processes, all must call this; the main one writes.

    Args:
      directory: the directory to write; it must be empty or not exist.
      base: the adapter's base model: a Hugging Face directory or hub id.
      dtype: dtype of the tensors; default: unchanged.

    Raises:
      ValueError: the model has no adapter, or the directory is not empty.
    """
    directory = pathlib.Path(directory).resolve()
    by_name = adapters(model)
    if not by_name:
        raise ValueError("the model has no adapter; save_pretrained writes all its weights")
    multihost.on_main(lambda: _refuse_filled(directory))
    tensors: dict[str, np.ndarray] = {}
    for name in by_name:
        a, b = (multihost.to_host(getattr(model.blocks, f"{name}_lora_{side}")[...]) for side in "ab")
        a, b = (array if dtype is None else array.astype(jax.numpy.dtype(dtype)) for array in (a, b))
        for layer, number in enumerate(_layers(model, name)):
            stem = _PREFIX + _module(model, name).format(number)
            tensors[f"{stem}.lora_A.weight"] = np.ascontiguousarray(a[layer].reshape(-1, a.shape[-1]).T)
            tensors[f"{stem}.lora_B.weight"] = np.ascontiguousarray(b[layer].reshape(b.shape[1], -1).T)
    multihost.on_main(lambda: _write(model, directory, base, tensors))


def _refuse_filled(directory: pathlib.Path) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} is not empty; give a directory that can be written afresh")


def _write(model: Decoder, directory: pathlib.Path, base: str, tensors: dict[str, np.ndarray]) -> None:
    scratch = directory.with_name(f".{directory.name}.new")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    write_json(scratch / CONFIG, _config(model, base))
    save_file(tensors, scratch / _TENSORS, metadata={"format": "pt"})
    shutil.copymode(scratch / CONFIG, scratch / _TENSORS)  # safetensors lets the owner alone read it
    if model.tokenizer is not None:
        model.tokenizer.save(scratch)
    if directory.exists():
        directory.rmdir()
    scratch.rename(directory)


def load_adapter(model: Decoder, directory: pathlib.Path, mesh: Mesh | None = None, layout: str = "replicated") -> None:
    """Puts the adapter of a PEFT directory on its base model, in place, in the dtype of its tensors.

    Args:
      mesh, layout: as of the model.

    Raises:
      ValueError: missing, damaged or ill-shaped tensors, or one in excess (by name), or a base that already has an adapter.
      UnsupportedModelError: a kind of adapter, or a setting, that this package does not have.
    """
    config = _read_config(directory)
    try:
        tensors = load_file(directory / _TENSORS)
    except FileNotFoundError as error:
        raise ValueError(f"{directory / _TENSORS} is missing; expected an adapter in safetensors format") from error
    except SafetensorError as error:
        raise ValueError(f"{directory / _TENSORS} is damaged or not a safetensors file: {error}") from error
    if adapters(model):
        raise ValueError(f"{directory}: the model has an adapter already")
    model.base_identity = base_digest(model)
    for name, inputs in MODULES.items():
        if not hasattr(model.blocks, name):
            continue
        stems = _stems(model, name, tensors)
        keys = [f"{_PREFIX}{stem}.lora_{side}.weight" for side in "AB" for stem in stems]
        missing = [key for key in keys if key not in tensors]
        if len(missing) == len(keys):
            continue
        if missing:
            raise UnsupportedModelError(
                f"{directory}: {missing[0]} is missing, though other layers have it; adapters must be on all layers"
            )
        parts = [tensors.pop(key) for key in keys]
        alphas = {_alpha(config, stem, part.shape[0]) for stem, part in zip(stems, parts)}
        shape = getattr(model.blocks, name).shape
        rank = parts[0].shape[0]
        fan_in, fan_out = math.prod(shape[1 : 1 + inputs]), math.prod(shape[1 + inputs :])
        for i, (key, part) in enumerate(zip(keys, parts)):
            expected = (rank, fan_in) if i < len(stems) else (fan_out, rank)
            if part.shape != expected:
                raise ValueError(f"{directory}: {key} of shape {part.shape} does not fit (needed as {expected})")
        if len(alphas) != 1:
            raise UnsupportedModelError(f"{directory}: alpha differs between the layers' {stems[0].rpartition('.')[2]}")
        a, b = (np.stack([part.T for part in half]) for half in (parts[: len(stems)], parts[len(stems) :]))
        attach(
            model,
            name,
            jax.numpy.asarray(a.reshape(len(stems), *shape[1 : 1 + inputs], rank)),
            jax.numpy.asarray(b.reshape(len(stems), rank, *shape[1 + inputs :])),
            alphas.pop(),
        )
    if tensors:
        shown = ", ".join(sorted(tensors)[:5])
        raise ValueError(
            f"{directory}: {len(tensors)} tensors do not belong to a {model.architecture.model_type}: {shown}"
        )
    if not adapters(model):
        raise ValueError(f"{directory / _TENSORS} holds no tensors")
    state = nnx.state(model, nnx.LoRAParam)
    nnx.update(model, jax.tree.map(jax.device_put, state, shardings(state, mesh or single_device_mesh(), layout)))


def base_of(directory: pathlib.Path) -> str:
    """The base model of the adapter in a PEFT directory. Raises ValueError if the directory doesn't name one."""
    base = _read_config(directory).get("base_model_name_or_path")
    if not base:
        raise ValueError(
            f"{directory / CONFIG} has no base_model_name_or_path; set it to the base model's directory or id"
        )
    return str(base)


def _read_config(directory: pathlib.Path) -> dict[str, Any]:
    path = directory / CONFIG
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise UnsupportedModelError(f"{path}: peft_type {config.get('peft_type')!r} is not supported; supported: LORA")
    for key, allowed in _UNSUPPORTED.items():
        if config.get(key) not in allowed:
            raise UnsupportedModelError(f"{path}: {key}={config[key]!r} is not supported; supported: {allowed[0]!r}")
    if config.get("init_lora_weights") not in _INITS:
        raise UnsupportedModelError(
            f"{path}: init_lora_weights={config['init_lora_weights']!r} changes the base; give peft's save_pretrained "
            f"path_initial_model_for_weight_conversion, which makes it a plain one"
        )
    return config


def _config(model: Decoder, base: str) -> dict[str, Any]:
    """adapter_config.json: rank and alpha of most modules, and patterns for the others."""
    by_name = adapters(model)
    theirs = {name: _module(model, name).rpartition(".")[2] for name in by_name}
    beginning = _family(model).modules[1]  # other modules may have equal names
    rank = Counter(adapter.rank for adapter in by_name.values()).most_common(1)[0][0]
    alpha = Counter(adapter.alpha for adapter in by_name.values()).most_common(1)[0][0]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {theirs[name]: adapter.rank for name, adapter in by_name.items() if adapter.rank != rank},
        "alpha_pattern": {theirs[name]: adapter.alpha for name, adapter in by_name.items() if adapter.alpha != alpha},
        "target_modules": rf"{re.escape(beginning)}.*\.({'|'.join(theirs.values())})"
        if beginning
        else list(theirs.values()),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _family(model: Decoder) -> Family:
    return FAMILIES.get(model.architecture.model_type)


def _stored(model: Decoder, name: str) -> str:
    """The name of matrix `name` in a checkpoint, with `{}` for the layer."""
    rule = _family(model).rules(model.architecture)[("blocks", name)]
    assert rule.axes[1] == tuple(range(MODULES[name])), "theirs are [outputs, inputs], merged in our order"
    return rule.name.removesuffix(".weight")


def _layers(model: Decoder, name: str) -> Sequence[int]:
    """The layers that have matrix `name`."""
    return _family(model).rules(model.architecture)[("blocks", name)].layers or range(model.config.layers)


def _module(model: Decoder, name: str) -> str:
    """The module that holds matrix `name` in transformers, with `{}` for the layer."""
    old, new = _family(model).modules
    return new + _stored(model, name).removeprefix(old)


def _stems(model: Decoder, name: str, tensors: Container[str]) -> list[str]:
    """The modules that hold matrix `name` in each layer, as an adapter spells them."""
    spellings = spelled(_stored(model, name), _family(model).spellings)
    candidates = [[spelling.format(i) for i in _layers(model, name)] for spelling in spellings]
    used = (stems for stems in candidates if any(f"{_PREFIX}{stem}.lora_A.weight" in tensors for stem in stems))
    return next(used, candidates[0])


def _alpha(config: Mapping[str, Any], stem: str, rank: int) -> float:
    """A module's alpha (the adapter's factor is alpha / rank). Patterns match the end of the module's name."""
    alpha = config["lora_alpha"]
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", stem):
            alpha = value
            break
    return float(alpha) * math.sqrt(rank) if config.get("use_rslora") else float(alpha)  # rsLoRA: alpha / sqrt(rank)
