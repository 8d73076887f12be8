"""config.json of published models, as far as shapes depend on it. A family that is added needs an entry here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from routerl_jax.models.family import family_of


def _decoder(kind: str, vocab: int, embed: int, layers: int, heads: int, kv_heads: int, mlp: int, **more: Any) -> dict:
    return {
        "model_type": kind,
        "vocab_size": vocab,
        "hidden_size": embed,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "max_position_embeddings": 32768,
        **more,
    }


def _experts(mlp: int) -> dict[str, int]:
    return {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": mlp}


def _bert(embed: int, layers: int, mlp: int, kind: str = "bert", vocab: int = 30522, positions: int = 512) -> dict:
    return {
        "model_type": kind,
        "vocab_size": vocab,
        "hidden_size": embed,
        "num_hidden_layers": layers,
        "num_attention_heads": embed // 64,
        "intermediate_size": mlp,
        "max_position_embeddings": positions,
        "type_vocab_size": 2 if kind == "bert" else 1,
        "pad_token_id": 0 if kind == "bert" else 1,
    }


def _vision_language(kind: str, vision: dict[str, Any], *text: Any, **more: Any) -> dict[str, Any]:
    rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    return _decoder(kind, *text, **more, rope_scaling=rope) | {"vision_config": vision}


_TOWER = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "fullatt_block_indexes": [7, 15, 23, 31],
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen2.5-3B": _decoder("qwen2", 151936, 2048, 36, 16, 2, 11008, tie_word_embeddings=True),
    "Qwen2.5-7B": _decoder("qwen2", 152064, 3584, 28, 28, 4, 18944),
    "Llama-3.1-8B": _decoder("llama", 128256, 4096, 32, 32, 8, 14336),
    "Llama-3.2-1B": _decoder("llama", 128256, 2048, 16, 32, 8, 8192, head_dim=64, tie_word_embeddings=True),
    "Llama-3.2-3B": _decoder("llama", 128256, 3072, 28, 24, 8, 8192, head_dim=128, tie_word_embeddings=True),
    "SmolLM2-135M": _decoder("llama", 49152, 576, 30, 9, 3, 1536, tie_word_embeddings=True),
    "Qwen3-4B": _decoder("qwen3", 151936, 2560, 36, 32, 8, 9728, head_dim=128, tie_word_embeddings=True),
    "Qwen3-8B": _decoder("qwen3", 151936, 4096, 36, 32, 8, 12288, head_dim=128),
    "Qwen3-30B-A3B": _decoder(
        "qwen3_moe", 151936, 2048, 48, 32, 4, 6144, head_dim=128, **_experts(768), norm_topk_prob=True
    ),
    "Qwen3-235B-A22B": _decoder(
        "qwen3_moe", 151936, 4096, 94, 64, 4, 12288, head_dim=128, **_experts(1536), norm_topk_prob=True
    ),
    "Mistral-7B-v0.3": _decoder("mistral", 32768, 4096, 32, 32, 8, 14336, head_dim=128),
    "Qwen2.5-VL-3B": _vision_language(
        "qwen2_5_vl", _TOWER | {"out_hidden_size": 2048}, 151936, 2048, 36, 16, 2, 11008, tie_word_embeddings=True
    ),
    "Qwen2.5-VL-7B": _vision_language("qwen2_5_vl", _TOWER | {"out_hidden_size": 3584}, 152064, 3584, 28, 28, 4, 18944),
    "Qwen2-VL-7B": _vision_language(
        "qwen2_vl",
        {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "hidden_size": 3584},
        *(152064, 3584, 28, 28, 4, 18944),
    ),
    "Qwen3-VL-8B": {
        "model_type": "qwen3_vl",
        "text_config": _decoder(
            *("qwen3", 151936, 4096, 36, 32, 8, 12288),
            head_dim=128,
            rope_scaling={"mrope_section": [24, 20, 20], "mrope_interleaved": True},
        ),
        "vision_config": {"out_hidden_size": 4096},
    },
    "colqwen2-v1.0": {  # as transformers writes it
        "model_type": "colqwen2",
        "vlm_config": _vision_language(
            "qwen2_vl",
            {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "hidden_size": 1536},
            *(151936, 1536, 28, 12, 2, 8960),
        ),
    },
    "colqwen2.5-v0.2": _vision_language(  # as colpali-engine does
        "qwen2_5_vl", _TOWER | {"out_hidden_size": 2048}, 151936, 2048, 36, 16, 2, 11008, architectures=["ColQwen2_5"]
    ),
    "bert-base-uncased": _bert(768, 12, 3072),
    "bert-large-uncased": _bert(1024, 24, 4096),
    "roberta-large": _bert(1024, 24, 4096, "roberta", 50265, 514),
    "bge-m3": _bert(1024, 24, 4096, "xlm-roberta", 250002, 8194),
    "bge-reranker-v2-m3": _bert(1024, 24, 4096, "xlm-roberta", 250002, 8194)
    | {"architectures": ["XLMRobertaForSequenceClassification"], "id2label": {"0": "LABEL_0"}},
    "clip-vit-large-patch14": {
        "model_type": "clip",
        "projection_dim": 768,
        "text_config": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
        "vision_config": {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
        },
    },
    "NV-Embed-v2": {
        "model_type": "nvembed",
        "text_config": _decoder("bidir_mistral", 32000, 4096, 32, 32, 8, 14336),
        "latent_attention_config": {},
    },
}


def abstract_model(name: str) -> nnx.Module:
    """A published model in bfloat16: shapes without values."""
    config = PUBLISHED[name]
    family = family_of(config, name)
    architecture = family.read(config, name)
    return nnx.eval_shape(lambda: family.create(architecture, jax.random.key(0), param_dtype=jnp.bfloat16))
