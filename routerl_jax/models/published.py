"""Architectures of published models, so that a program can be sized before its weights are on this machine.

The facts are those of the config.json files on the Hugging Face hub (November 2025), without keys that have the default value
of the family. Nothing is trained from this table.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from routerl_jax.core.files import read_json
from routerl_jax.models import pretrained
from routerl_jax.models.family import family_of


def _qwen2(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool
) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }


def _llama3(hidden: int, mlp: int, layers: int, heads: int, head_dim: int, factor: float, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "max_position_embeddings": 131072,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
    }


def _qwen3(hidden: int, mlp: int, tied: bool) -> dict[str, Any]:
    return _qwen2(hidden, mlp, 36, 32, 8, 151936, tied) | {
        "model_type": "qwen3",
        "head_dim": 128,
        "max_position_embeddings": 40960,
    }


def _qwen3_moe(hidden: int, layers: int, heads: int, mlp: int, expert_mlp: int) -> dict[str, Any]:
    return _qwen2(hidden, mlp, layers, heads, 4, 151936, False) | {
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "moe_intermediate_size": expert_mlp,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    }


def _qwen25_vl(text: dict[str, Any]) -> dict[str, Any]:
    return text | {
        "model_type": "qwen2_5_vl",
        "max_position_embeddings": 128000,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {"hidden_size": 1280, "out_hidden_size": text["hidden_size"]},
    }


def _qwen3_vl(text: dict[str, Any], depth: int, width: int, mlp: int, deep: list[int]) -> dict[str, Any]:
    return {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text
        | {
            "max_position_embeddings": 262144,
            "rope_theta": 5e6,
            "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
        },
        "vision_config": {
            "depth": depth,
            "hidden_size": width,
            "intermediate_size": mlp,
            "out_hidden_size": text["hidden_size"],
            "deepstack_visual_indexes": deep,
        },
    }


_QWEN25_HALF_B = _qwen2(896, 4864, 24, 14, 2, 151936, tied=True)
_QWEN25_1_5B = _qwen2(1536, 8960, 28, 12, 2, 151936, tied=True)
_QWEN25_3B = _qwen2(2048, 11008, 36, 16, 2, 151936, tied=True)
_QWEN25_7B = _qwen2(3584, 18944, 28, 28, 4, 152064, tied=False)
_QWEN25_14B = _qwen2(5120, 13824, 48, 40, 8, 152064, tied=False)
_QWEN25_32B = _qwen2(5120, 27648, 64, 40, 8, 152064, tied=False)
_QWEN25_72B = _qwen2(8192, 29568, 80, 64, 8, 152064, tied=False)
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": _QWEN25_HALF_B,
    "Qwen/Qwen2.5-1.5B-Instruct": _QWEN25_1_5B,
    "Qwen/Qwen2.5-3B": _QWEN25_3B | {"eos_token_id": 151643},
    "Qwen/Qwen2.5-3B-Instruct": _QWEN25_3B,
    "Qwen/Qwen2.5-7B": _QWEN25_7B | {"eos_token_id": 151643, "max_position_embeddings": 131072},
    "Qwen/Qwen2.5-7B-Instruct": _QWEN25_7B,
    "Qwen/Qwen2.5-14B-Instruct": _QWEN25_14B,
    "Qwen/Qwen2.5-32B-Instruct": _QWEN25_32B,
    "Qwen/Qwen2.5-72B-Instruct": _QWEN25_72B,
    "Qwen/Qwen2.5-VL-3B-Instruct": _qwen25_vl(_QWEN25_3B),
    "Qwen/Qwen2.5-VL-7B-Instruct": _qwen25_vl(_QWEN25_7B),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, tied=False),
    "Qwen/Qwen3-VL-4B-Instruct": _qwen3_vl(_qwen3(2560, 9728, tied=True), 24, 1024, 4096, [5, 11, 17]),
    "Qwen/Qwen3-VL-8B-Instruct": _qwen3_vl(_qwen3(4096, 12288, tied=False), 27, 1152, 4304, [8, 16, 24]),
    "Qwen/Qwen3-30B-A3B": _qwen3_moe(2048, 48, 32, 6144, 768),
    "Qwen/Qwen3-235B-A22B": _qwen3_moe(4096, 94, 64, 12288, 1536),
    "meta-llama/Llama-3.1-8B-Instruct": _llama3(4096, 14336, 32, 32, 128, 8.0, tied=False),
    "meta-llama/Llama-3.2-1B": _llama3(2048, 8192, 16, 32, 64, 32.0, tied=True) | {"eos_token_id": 128001},
    "meta-llama/Llama-3.2-3B": _llama3(3072, 8192, 28, 24, 128, 32.0, tied=True) | {"eos_token_id": 128001},
    "SmolLM2-135M-Instruct": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 1e5,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}


def architecture_of(path_or_id: str) -> Any:
    """The architecture of a model: of its directory where there is one, else of the table; its weights are not touched.

    Raises:
      ValueError: there is neither, an incomplete config.json, or an unsupported architecture.
    """
    directory = pathlib.Path(path_or_id).expanduser()
    directory = pretrained.PACKAGED_MODELS.get(path_or_id, directory)
    source = f"the published {path_or_id}"
    if directory.is_dir():
        source = str(directory / "config.json")
        if not pathlib.Path(source).is_file():
            raise ValueError(f"{source} is missing; expected a Hugging Face model directory")
        config = read_json(directory / "config.json")
    elif path_or_id in PUBLISHED:
        config = PUBLISHED[path_or_id]
    else:
        raise ValueError(
            f"no directory {path_or_id!r} here, and its architecture is not in the table of published ones: "
            f"{', '.join(PUBLISHED)}. Give a directory that holds its config.json (weights are not needed)"
        )
    return family_of(config, source).architecture(config, source)
