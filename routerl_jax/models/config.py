"""Architecture descriptions, read from and written to Hugging Face's config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

DECODER_TYPES = ("llama", "qwen2", "qwen3")
ENCODER_TYPES = ("bert",)


class UnsupportedModelError(ValueError):
    """A config.json that describes something this package does not implement; the message lists what it does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings: `linear`, or `llama3` (Llama 3.1's piecewise rule)."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_length: int = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A Llama-style decoder: RMSNorm, rotary grouped-query attention, gated SiLU feed-forward."""

    model_type: str  # llama (also SmolLM2), qwen2, qwen3
    vocab_size: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    max_length: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # bias on the attention output projection
    qk_norm: bool = False  # RMSNorm over head_dim of queries and keys (Qwen3)
    init_scale: float = 0.02
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary embeddings")
        if self.model_type not in DECODER_TYPES:
            raise UnsupportedModelError(
                f"model_type={self.model_type!r} is not supported; decoders: {', '.join(DECODER_TYPES)}"
            )
        # What a family fixes, config.json does not say: an export of another combination would load as another model.
        required = {
            "qk_norm": self.model_type == "qwen3",
            "qkv_bias": self.model_type == "qwen2" or self.qkv_bias,
            "output_bias": self.model_type != "qwen2" and self.qkv_bias,
        }
        for key, value in required.items():
            if getattr(self, key) != value:
                raise ValueError(f"{key}={getattr(self, key)} makes no {self.model_type}; set {key}={value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """A BERT-style encoder: learned positions, post-LayerNorm, GELU.

    `pooling` and `normalize` default to the mean over tokens at unit length, as most sentence encoders use them.
    """

    model_type: str
    vocab_size: int
    embed: int
    layers: int
    heads: int
    mlp: int
    max_length: int
    type_vocab_size: int = 2
    norm_eps: float = 1e-12
    init_scale: float = 0.02
    pooling: str = "mean"  # how `embed` pools token vectors: mean (over the mask) or cls
    normalize: bool = True  # unit length embeddings
    text_length: int | None = None  # tokens of a text that `embed` reads; None: max_length

    @property
    def longest_text(self) -> int:
        """Tokens of a text that `embed` reads, special tokens included."""
        return min(self.text_length or self.max_length, self.max_length)


def decoder_from_hf(config: Mapping[str, Any], source: str = "config.json") -> DecoderConfig:
    """Reads a decoder's config.json. Raises UnsupportedModelError for features that would change the logits."""
    kind = config.get("model_type")
    if kind not in DECODER_TYPES:
        raise UnsupportedModelError(
            f"{source}: model_type {kind!r} is not supported; decoders: {', '.join(DECODER_TYPES)}; "
            f"encoders: {', '.join(ENCODER_TYPES)}"
        )
    _refuse_quantized(config, source)
    _require(config, source, "hidden_act", ("silu", None))
    _require(config, source, "mlp_bias", (False, None))
    if config.get("use_sliding_window"):
        raise UnsupportedModelError(
            f"{source}: use_sliding_window is not supported; set it to false or use another model"
        )
    heads = config["num_attention_heads"]
    bias = bool(config.get("attention_bias", False))
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    eos = config.get("eos_token_id")
    return DecoderConfig(
        model_type=kind,
        vocab_size=config["vocab_size"],
        embed=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        mlp=config["intermediate_size"],
        max_length=config.get("max_position_embeddings", 2048),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        rope_scaling=_rope_scaling(rope, source),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2" or bias,
        output_bias=kind != "qwen2" and bias,
        qk_norm=kind == "qwen3",
        init_scale=config.get("initializer_range", 0.02),
        bos_id=config.get("bos_token_id"),
        eos_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
    )


def decoder_to_hf(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """The config.json that `transformers` loads as the same architecture."""
    architecture = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.rope_scaling is not None:
        rope |= {"rope_type": config.rope_scaling.kind, "factor": config.rope_scaling.factor}
        if config.rope_scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": config.rope_scaling.low_freq_factor,
                "high_freq_factor": config.rope_scaling.high_freq_factor,
                "original_max_position_embeddings": config.rope_scaling.original_max_length,
            }
    result: dict[str, Any] = {
        "architectures": [architecture[config.model_type]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        "initializer_range": config.init_scale,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) if len(config.eos_ids) > 1 else next(iter(config.eos_ids), None),
        "rope_parameters": rope,
        # transformers 4 reads these two instead of rope_parameters
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else {k: v for k, v in rope.items() if k != "rope_theta"},
        "torch_dtype": dtype,
    }
    if config.model_type != "qwen2":
        result["attention_bias"] = config.qkv_bias
    return result


def encoder_from_hf(config: Mapping[str, Any], source: str = "config.json") -> EncoderConfig:
    """Reads a BERT config.json. Raises UnsupportedModelError for features that would change the vectors."""
    _refuse_quantized(config, source)
    _require(config, source, "hidden_act", ("gelu", None))
    _require(config, source, "position_embedding_type", ("absolute", None))
    return EncoderConfig(
        model_type=config["model_type"],
        vocab_size=config["vocab_size"],
        embed=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        mlp=config["intermediate_size"],
        max_length=config["max_position_embeddings"],
        type_vocab_size=config.get("type_vocab_size", 2),
        norm_eps=config.get("layer_norm_eps", 1e-12),
        init_scale=config.get("initializer_range", 0.02),
    )


def _rope_scaling(rope: Mapping[str, Any], source: str) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
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
    raise UnsupportedModelError(f"{source}: rope_type {kind!r} is not supported; supported: default, linear, llama3")


def _refuse_quantized(config: Mapping[str, Any], source: str) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        raise UnsupportedModelError(
            f"{source}: quantization_config ({quantization.get('quant_method', 'of unknown method')}) is not supported; "
            f"use the model's float32, float16 or bfloat16 version"
        )


def _require(config: Mapping[str, Any], source: str, key: str, allowed: tuple[Any, ...]) -> None:
    if config.get(key) not in allowed:
        raise UnsupportedModelError(f"{source}: {key}={config[key]!r} is not supported; supported: {allowed[0]!r}")
