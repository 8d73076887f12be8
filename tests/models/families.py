"""Small random models of every supported family, made and saved by transformers: the other side of each comparison."""

from __future__ import annotations

import pathlib
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from flax import nnx

torch.set_num_threads(1)  # its threads wait by spinning: on a busy machine two are 10 times slower than one

_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
}
# Sizes are distinct, so that a wrong transposition can't fit.
_BASE = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {  # heads of width 12 over 32 trained positions: two frequencies kept, two blended, two stretched
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {  # heads of width 12 over 32 trained positions: two frequencies kept, one blended, three interpolated
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "beta_fast": 4,
    "original_max_position_embeddings": 32,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "head_dim": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_mha_tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama_mqa": ("llama", {"num_key_value_heads": 1, "eos_token_id": [2, 3]}),
    "llama_rope_llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama_rope_linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}, "head_dim": 20},
    ),
    "llama_bias": ("llama", {"attention_bias": True, "eos_token_id": None, "bos_token_id": None}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2_rope_yarn": ("qwen2", {"rope_parameters": _YARN}),
    "qwen3_rope_yarn": (
        "qwen3",
        {"rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False}, "head_dim": 24},
    ),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2_tied": ("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_tied": ("qwen3", {"head_dim": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen3_bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe_mixed": ("qwen3_moe", _EXPERTS | {"mlp_only_layers": [1], "num_experts": 5, "num_experts_per_tok": 1}),
    "qwen3_moe_every_second": ("qwen3_moe", _EXPERTS | {"decoder_sparse_step": 2, "num_experts_per_tok": 3}),
}


class Saved(NamedTuple):
    """A transformers model and the directory it was saved to."""

    hf: Any
    directory: pathlib.Path


def random_decoder(family: str, directory: pathlib.Path, **overrides: Any) -> Saved:
    """A model of the family with random weights (biases and norm scales too, which transformers starts at 0 and 1)."""
    kind, settings = FAMILIES[family]
    make_config, make_model = _CLASSES[kind]
    torch.manual_seed(0)
    model = make_model(make_config(**_BASE | settings | overrides)).eval()
    randomize(model)
    model.save_pretrained(directory)
    return Saved(model, directory)


def randomize(model: torch.nn.Module) -> None:
    """Weights of such a size that attention is far from uniform and logits are a few units wide."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # experts' stacks are [experts, outputs, inputs]
                parameter.normal_(0, 1.2 / parameter.shape[-1 if parameter.ndim == 3 else 1] ** 0.5)
            else:
                parameter.uniform_(0.5, 1.5)


def hf_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] of a transformers model."""
    with torch.no_grad():
        return model(torch.as_tensor(np.asarray(tokens, np.int64))).logits.float().numpy()


def parameters(model: nnx.Module) -> dict[Any, np.ndarray]:
    """All weights by their path."""
    return {path: np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def same_tensors(first: pathlib.Path, second: pathlib.Path) -> None:
    """Asserts that two directories hold equal tensors, to the last bit, under equal names."""
    from safetensors.numpy import load_file

    one, other = (load_file(directory / "model.safetensors") for directory in (first, second))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        np.testing.assert_array_equal(tensor, other[name], err_msg=name)
        assert tensor.dtype == other[name].dtype
