"""Weights in other files than safetensors, which are converted once: what torch pickled, and llama.cpp's GGUF.

Contriever and BGE-M3 are on the hub only as torch's pickles (pytorch_model.bin, .pth). They are read without torch and without
running code of the pickle, and memory-mapped, so the host holds only some of their pages. Of GGUF, the Llama family is read.
"""

from __future__ import annotations

import collections
import hashlib
import math
import pathlib
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from absl import logging
from safetensors.numpy import save_file

from routerl_jax.core.files import cache_directory
from routerl_jax.models.family import write_json
from routerl_jax.models.safetensors_files import weight_map

_INDEX, _WHOLE = "pytorch_model.bin.index.json", "pytorch_model.bin"
_DTYPES = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}


def as_safetensors(directory: pathlib.Path) -> pathlib.Path:
    """The directory to read weights from: this one or, if it has only pickled weights, their conversion in the cache.

    Raises:
      ValueError: a file is missing, was not written by torch, or holds something other than named tensors; or the directory has
        two sets of pickled weights.
    """
    if any(directory.glob("model*.safetensors")) or (directory / "model.safetensors.index.json").exists():
        return directory
    if (directory / _INDEX).is_file() and (directory / _WHOLE).is_file():
        raise ValueError(
            f"{directory} holds two sets of weights: {_WHOLE}, and the files of {_INDEX}; delete one of them"
        )
    if (directory / _INDEX).is_file():
        files = sorted({directory / name for name in weight_map(directory / _INDEX).values()})
    elif (directory / _WHOLE).is_file():
        files = [directory / _WHOLE]
    else:
        return directory
    if absent := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"{directory}: {', '.join(absent)} missing, which {_INDEX} names; download the model again")
    from filelock import FileLock

    states = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    name = f"{directory.resolve().name}-{hashlib.sha256(repr(states).encode()).hexdigest()[:12]}"
    target = cache_directory() / "converted" / name / "model.safetensors"
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target.parent}.lock"):
        if not target.is_file():
            logging.info("%s: converting pickled weights to safetensors, once, in %s", directory, target.parent)
            tensors = {key: tensor for file in files for key, tensor in read_state(file).items()}
            scratch = target.with_suffix(".part")
            save_file({key: np.ascontiguousarray(tensor) for key, tensor in tensors.items()}, scratch)
            scratch.rename(target)
    return target.parent


def read_state(path: pathlib.Path) -> dict[str, np.ndarray]:
    """All tensors of a file that `torch.save` wrote, by name, mapped from the disk.

    The name of a tensor in nested dictionaries is their keys, joined by dots. Values that are no tensors are left out.

    Raises:
      ValueError: the file is damaged, or was saved by a torch older than 1.6.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            inner = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
            if inner is None:
                raise ValueError("no data.pkl in it")
            if archive.NameToInfo.get(inner.replace("data.pkl", "byteorder")) is not None:
                order = archive.read(inner.replace("data.pkl", "byteorder"))
                if order != b"little":
                    raise ValueError(f"byte order {order!r} is not supported")
            root = inner.removesuffix("data.pkl")
            entries = {info.filename: info for info in archive.infolist()}
            reader = _Reader(archive.open(inner), path, lambda key: entries[f"{root}data/{key}"])
            content = reader.load()
    except Exception as error:  # damaged archives and pickles raise errors of any class
        raise ValueError(
            f"{path}: can't be read as weights that torch 1.6 or later saved ({type(error).__name__}: {error}). Save the model "
            f"with save_pretrained(..., safe_serialization=True) of transformers"
        ) from error
    tensors: dict[str, np.ndarray] = {}
    _collect(content, "", tensors)
    if not tensors:
        raise ValueError(f"{path}: holds no tensors by name")
    return tensors


def _collect(value: Any, name: str, tensors: dict[str, np.ndarray]) -> None:
    if isinstance(value, np.ndarray):
        tensors[name] = value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _collect(inner, f"{name}.{key}" if name else str(key), tensors)


class _Storage(NamedTuple):
    dtype: np.dtype
    key: str


class _Nothing:
    """Replaces objects of unknown classes. It accepts everything from pickle and keeps nothing."""

    def __new__(cls, *_: Any, **__: Any) -> _Nothing:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, _: Any) -> None: ...

    def __setitem__(self, _: Any, __: Any) -> None: ...

    def append(self, _: Any) -> None: ...

    def extend(self, _: Any) -> None: ...


class _Reader(pickle.Unpickler):
    """Reads tensors and dictionaries. Any other object (such as options of a run) becomes an object without content."""

    def __init__(self, file: Any, path: pathlib.Path, zip_entry: Callable[[str], zipfile.ZipInfo]) -> None:
        super().__init__(file)
        self._path, self._zip_entry = path, zip_entry

    def find_class(self, module: str, name: str) -> Any:
        allowed: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_parameter"): lambda data, requires_grad, hooks: data,
        }
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        return allowed.get((module, name), _Nothing)

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise pickle.UnpicklingError(f"{pid!r} is no storage")
        return _Storage(dtype, str(key))

    def _tensor(self, storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Any:
        info = self._zip_entry(storage.key)
        if info.compress_type != zipfile.ZIP_STORED:
            raise pickle.UnpicklingError(f"storage {storage.key} is compressed")
        with self._path.open("rb") as file:  # names in the local header need not be as long as in the index
            file.seek(info.header_offset + 26)
            start = info.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
        width = storage.dtype.itemsize
        last = offset + sum((n - 1) * step for n, step in zip(size, stride))
        if math.prod(size) == 0:
            return np.zeros(size, storage.dtype)
        if min((offset, *stride), default=0) < 0 or (last + 1) * width > info.file_size:
            raise pickle.UnpicklingError(f"a tensor reaches beyond storage {storage.key}")
        flat = np.memmap(self._path, storage.dtype, "r", start, (info.file_size // width,))
        view = np.lib.stride_tricks.as_strided(flat[offset:], size, [step * width for step in stride], writeable=False)
        return np.asarray(view)


# --- GGUF ---

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def convert_llama(source: pathlib.Path, target: pathlib.Path) -> None:
    """Dequantizes a GGUF file of the Llama architecture; writes config.json, model.safetensors and the tokenizer to `target`.

    Raises:
      ValueError: the file is of another architecture, or its tokenizer is not byte-level BPE with a known rule for words.
    """
    import gguf

    reader = gguf.GGUFReader(source)

    def field(name: str, default: Any = None) -> Any:
        entry = reader.get_field(name)
        return default if entry is None else entry.contents()

    if field("general.architecture") != "llama":
        raise ValueError(
            f"{source}: GGUF architecture {field('general.architecture')!r} is not supported, only 'llama'"
        )
    heads = field("llama.attention.head_count")
    kv_heads = field("llama.attention.head_count_kv", heads)
    tensors = {}
    for tensor in reader.tensors:
        weights = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = _hugging_face_name(tensor.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # llama.cpp interleaves the two rotary halves of each head, which Hugging Face separates
            halves = weights.reshape(heads if "q_proj" in name else kv_heads, -1, 2, weights.shape[1])
            weights = halves.swapaxes(1, 2).reshape(weights.shape)
        tensors[name] = np.ascontiguousarray(weights)
    target.mkdir(parents=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tensors["model.embed_tokens.weight"]),
        "hidden_size": field("llama.embedding_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": field("llama.feed_forward_length"),
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": float(field("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": float(field("llama.rope.freq_base", 10_000.0)),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "hidden_act": "silu",
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }
    write_json(target / "config.json", config)
    _write_tokenizer(field, source, target)


def _hugging_face_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        if part in _LAYER_TENSORS:
            return f"model.layers.{layer}.{_LAYER_TENSORS[part]}.{suffix}"
    elif stem in _TOP_TENSORS:
        return f"{_TOP_TENSORS[stem]}.{suffix}"
    raise ValueError(
        f"GGUF tensor {name!r} is not supported (the file uses a feature that this converter does not know)"
    )


def _write_tokenizer(field: Any, source: pathlib.Path, target: pathlib.Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if field("tokenizer.ggml.model") != "gpt2":
        raise ValueError(f"{source}: tokenizer {field('tokenizer.ggml.model')!r} is not supported, only byte-level BPE")
    tokens, kinds = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # GGUF names the rule that splits text into words, but does not contain it.
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules = {
        "gpt-2": byte_level,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level]),
    }
    rule = field("tokenizer.ggml.pre")
    if rule not in rules:
        raise ValueError(
            f"{source}: pre-tokenizer {rule!r} (tokenizer.ggml.pre) is not supported, only {', '.join(rules)}; "
            f"use the model's Hugging Face directory"
        )
    tokenizer.pre_tokenizer = rules[rule]
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # gguf.TokenType.CONTROL
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in zip(tokens, kinds) if kind == control]
    )

    def name_of(key: str) -> str | None:
        token_id = field(key)
        return None if token_id is None else tokens[token_id]

    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=name_of("tokenizer.ggml.bos_token_id"),
        eos_token=name_of("tokenizer.ggml.eos_token_id"),
        pad_token=name_of("tokenizer.ggml.padding_token_id") or name_of("tokenizer.ggml.eos_token_id"),
        unk_token=name_of("tokenizer.ggml.unknown_token_id"),
        clean_up_tokenization_spaces=False,
        model_max_length=field("llama.context_length"),
    )
    wrapped.chat_template = field("tokenizer.chat_template")
    wrapped.save_pretrained(target)
