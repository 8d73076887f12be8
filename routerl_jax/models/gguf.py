"""Turns a llama.cpp GGUF file of the Llama architecture into a Hugging Face directory (float32 safetensors)."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
from safetensors.numpy import save_file

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
    """Dequantizes `source` and writes config.json, model.safetensors and the tokenizer to `target`.

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
            weights = _unpermute(weights, heads if "q_proj" in name else kv_heads)
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
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
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


def _unpermute(weights: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the two rotary halves of each head, which llama.cpp interleaves and Hugging Face separates."""
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


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
