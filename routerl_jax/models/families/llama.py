"""Text decoders of Llama's build: Llama 3 and SmolLM2 (`llama`), Mistral, Qwen2.5 (`qwen2`), Qwen3, Qwen3-MoE."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from routerl_jax.models.config import (
    DecoderConfig,
    ExpertsConfig,
    RopeScaling,
    UnsupportedModelError,
    refuse_quantized,
    require,
)
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.family import (
    FROM_HEADS,
    HEADS_BIAS,
    MATRIX,
    NEEDED,
    TO_HEADS,
    TRANSPOSED,
    VECTOR,
    Family,
    Rule,
    Rules,
    read_keys,
    write_keys,
)

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_KEYS = {
    "vocab_size": ("vocab_size", NEEDED),
    "embed": ("hidden_size", NEEDED),
    "layers": ("num_hidden_layers", NEEDED),
    "heads": ("num_attention_heads", NEEDED),
    "mlp": ("intermediate_size", NEEDED),
    "max_length": ("max_position_embeddings", 2048),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "init_scale": ("initializer_range", 0.02),
    "bos_id": ("bos_token_id", None),
}


def decoder_from_hf(config: Mapping[str, Any], source: str = "config.json") -> DecoderConfig:
    """Reads a decoder's config.json. Raises UnsupportedModelError for features that would change the logits."""
    kind = config["model_type"]
    refuse_quantized(config, source)
    require(config, source, "hidden_act", ("silu", None))
    require(config, source, "mlp_bias", (False, None))
    read = read_keys(config, _KEYS)
    bias = bool(config.get("attention_bias", False)) and kind != "mistral"
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    eos = config.get("eos_token_id")
    return DecoderConfig(
        model_type=kind,
        **read,
        kv_heads=config.get("num_key_value_heads") or read["heads"],
        head_dim=config.get("head_dim") or read["embed"] // read["heads"],
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        rope_scaling=_rope_scaling(rope, read["max_length"], source),
        mrope_sections=tuple(rope.get("mrope_section") or ()),
        mrope_interleaved=bool(rope.get("mrope_interleaved")),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2" or bias,
        output_bias=kind != "qwen2" and bias,
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        experts=_experts(config) if kind == "qwen3_moe" else None,
        **_windows(config),
        eos_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
    )


def decoder_to_hf(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """The config.json that `transformers` loads as the same architecture."""
    rope = _rope_to_hf(config)
    result: dict[str, Any] = {
        "architectures": [_CLASSES[config.model_type]],
        "model_type": config.model_type,
        **write_keys(config, _KEYS),
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        "eos_token_id": list(config.eos_ids) if len(config.eos_ids) > 1 else next(iter(config.eos_ids), None),
        "rope_parameters": rope,
        # transformers 4 reads these two instead of rope_parameters
        "rope_theta": config.rope_theta,
        "rope_scaling": None
        if rope["rope_type"] == "default" and not config.mrope_sections
        else {k: v for k, v in rope.items() if k != "rope_theta"},
        "torch_dtype": dtype,
    }
    if config.model_type == "mistral":
        result["sliding_window"] = config.window
    elif config.model_type != "llama":
        windowed = config.windowed or (config.window is not None,) * config.layers
        result["use_sliding_window"] = config.window is not None
        if config.window is not None:
            result["sliding_window"] = config.window
            result["max_window_layers"] = windowed.index(True) if True in windowed else config.layers
            result["layer_types"] = ["sliding_attention" if narrow else "full_attention" for narrow in windowed]
    if config.model_type in ("llama", "qwen3", "qwen3_moe"):
        result["attention_bias"] = config.qkv_bias
    if config.experts is not None:
        result |= {
            "num_experts": config.experts.count,
            "num_experts_per_tok": config.experts.chosen,
            "moe_intermediate_size": config.experts.mlp,
            "norm_topk_prob": config.experts.normalized,
            "router_aux_loss_coef": config.experts.balance_coef,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(config.experts.dense_layers),
        }
    return result


def decoder_rules(config: DecoderConfig) -> Rules:
    """Our parameter path -> Hugging Face tensor."""
    layer = "model.layers.{}."
    copies = ("lm_head.weight",) if config.tied_embeddings else ()
    rules = {
        ("embedding",): Rule("model.embed_tokens.weight", MATRIX, copies=copies),
        ("final_norm",): Rule("model.norm.weight", VECTOR),
        ("blocks", "attention_norm"): Rule(layer + "input_layernorm.weight", VECTOR),
        ("blocks", "mlp_norm"): Rule(layer + "post_attention_layernorm.weight", VECTOR),
        ("blocks", "q"): Rule(layer + "self_attn.q_proj.weight", TO_HEADS),
        ("blocks", "k"): Rule(layer + "self_attn.k_proj.weight", TO_HEADS),
        ("blocks", "v"): Rule(layer + "self_attn.v_proj.weight", TO_HEADS),
        ("blocks", "o"): Rule(layer + "self_attn.o_proj.weight", FROM_HEADS),
    }
    sparse = tuple(i for i, experts in enumerate(config.sparse) if experts)
    dense = tuple(i for i, experts in enumerate(config.sparse) if not experts) if sparse else ()
    for part in ("gate", "up", "down"):
        if dense or not sparse:
            rules[("blocks", part)] = Rule(layer + f"mlp.{part}_proj.weight", TRANSPOSED, dense)
        if sparse:
            name = layer + f"mlp.experts.{{}}.{part}_proj.weight"
            rules[("blocks", "experts", part)] = Rule(name, TRANSPOSED, sparse)
    if sparse:
        rules[("blocks", "experts", "router")] = Rule(layer + "mlp.gate.weight", TRANSPOSED, sparse)
    if config.qkv_bias:
        for part in "qkv":
            rules[("blocks", f"{part}_bias")] = Rule(layer + f"self_attn.{part}_proj.bias", HEADS_BIAS)
    if config.output_bias:
        rules[("blocks", "o_bias")] = Rule(layer + "self_attn.o_proj.bias", VECTOR)
    if config.qk_norm:
        rules[("blocks", "q_norm")] = Rule(layer + "self_attn.q_norm.weight", VECTOR)
        rules[("blocks", "k_norm")] = Rule(layer + "self_attn.k_norm.weight", VECTOR)
    if not config.tied_embeddings:
        rules[("head",)] = Rule("lm_head.weight", TRANSPOSED)
    return rules


def _experts(config: Mapping[str, Any]) -> ExpertsConfig:
    """Every `decoder_sparse_step`-th layer has experts, but for `mlp_only_layers`. transformers 5 writes num_local_experts."""
    step, plain = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    layers = range(config["num_hidden_layers"])
    return ExpertsConfig(
        count=config["num_experts"] if "num_experts" in config else config["num_local_experts"],
        chosen=config["num_experts_per_tok"],
        mlp=config["moe_intermediate_size"],
        normalized=bool(config.get("norm_topk_prob", False)),
        dense_layers=tuple(i for i in layers if i in plain or (i + 1) % step),
        balance_coef=config.get("router_aux_loss_coef", 0.001),
    )


def _windows(config: Mapping[str, Any]) -> dict[str, Any]:
    """The layers with a window. Mistral: all, if the config has a window. Qwen: those from `max_window_layers` on."""
    window, kind = config.get("sliding_window"), config["model_type"]
    if kind == "llama" or window is None or (kind != "mistral" and not config.get("use_sliding_window")):
        return {}
    if kind == "mistral":
        return {"window": window}
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if kinds is not None:
        windowed = tuple(layer_type == "sliding_attention" for layer_type in kinds)
    else:
        windowed = tuple(i >= config.get("max_window_layers", 28) for i in range(layers))
    if not any(windowed):
        return {}
    return {"window": window} if all(windowed) else {"window": window, "windowed": windowed}


def _rope_scaling(rope: Mapping[str, Any], max_length: int, source: str) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in ("default", "mrope"):
        return None
    if kind == "linear":
        return RopeScaling(kind="linear", factor=float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_length=int(rope["original_max_position_embeddings"]),
        )
    if kind == "yarn":
        original = int(rope.get("original_max_position_embeddings") or max_length)
        factor = float(rope.get("factor") or max_length / original)
        return RopeScaling(
            kind="yarn",
            factor=factor,
            original_max_length=original,
            beta_fast=float(rope.get("beta_fast") or 32),
            beta_slow=float(rope.get("beta_slow") or 1),
            truncate=bool(rope.get("truncate", True)),
            attention_factor=_attention_factor(rope, factor),
        )
    raise UnsupportedModelError(
        f"{source}: rope_type {kind!r} is not supported; supported: default, linear, llama3, yarn"
    )


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """YaRN's temperature (arXiv 2309.00071, equation 22), unless the file gives another."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)


def _rope_to_hf(config: DecoderConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.mrope_sections:
        rope["mrope_section"] = list(config.mrope_sections)
    if config.mrope_interleaved:
        rope["mrope_interleaved"] = True
    scaling = config.rope_scaling
    if scaling is None:
        return rope
    rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        rope |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        rope |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
        rope["attention_factor"] = scaling.attention_factor
    if scaling.kind != "linear":
        rope["original_max_position_embeddings"] = scaling.original_max_length
    return rope


FAMILY = Family(
    role="decoder",
    read=decoder_from_hf,
    write=decoder_to_hf,
    create=Decoder,
    rules=decoder_rules,
    spellings=(("model.", ""), ("", "model.")),
)
