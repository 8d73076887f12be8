"""Configurations of architectures. models/families reads and writes them as config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

DECODER_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
POOLINGS = ("mean", "cls", "pooler")


class UnsupportedModelError(ValueError):
    """A config.json that describes something this package does not implement; the message lists what it does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings: `linear`, `llama3` (Llama 3.1's piecewise rule) or `yarn` (arXiv 2309.00071).

    llama3 uses `low_freq_factor` and `high_freq_factor`. yarn uses `beta_fast` and `beta_slow` (a frequency with more rotations
    within the original context than `beta_fast` is kept, one with fewer than `beta_slow` is interpolated), `truncate` (to whole
    dimensions) and `attention_factor` (a factor of cosines and sines).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_length: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Sparse layers: in place of one feed-forward, a router sends each token to a few of many (models/experts.py)."""

    count: int
    chosen: int  # experts of a token
    mlp: int  # channels of an expert
    normalized: bool = False  # whether the weights of a token's experts add up to 1
    dense_layers: tuple[int, ...] = ()  # layers with one feed-forward, of DecoderConfig.mlp channels
    balance_coef: float = 0.001  # config.json's weight of the load-balancing loss; runs have a setting of their own

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.count:
            raise ValueError(f"chosen={self.chosen} experts of a token must be from 1 to count={self.count}")
        if list(self.dense_layers) != sorted(set(self.dense_layers)):
            raise ValueError(f"dense_layers={self.dense_layers} must be layers in order, each once")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A Llama-style decoder: RMSNorm, rotary grouped-query attention, gated SiLU feed-forward, of experts or not."""

    # llama (also SmolLM2), mistral, qwen2 (also the text part of Qwen2-VL and Qwen2.5-VL), qwen3 (also of Qwen3-VL), qwen3_moe
    model_type: str
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
    mrope_sections: tuple[int, ...] = ()  # frequencies that turn with time, height, width (vision-language models)
    mrope_interleaved: bool = False  # the three take turns from frequency to frequency (Qwen3-VL), or lie in blocks
    norm_eps: float = 1e-6
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # bias on the attention output projection
    qk_norm: bool = False  # RMSNorm over head_dim of queries and keys (Qwen3)
    window: int | None = None  # tokens that a windowed layer's query sees, itself included
    windowed: tuple[bool, ...] = ()  # by layer; empty: every layer if `window` is set
    experts: ExpertsConfig | None = None  # of qwen3_moe
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
            "qk_norm": self.model_type in ("qwen3", "qwen3_moe"),
            "qkv_bias": self.model_type == "qwen2" or (self.qkv_bias and self.model_type != "mistral"),
            "output_bias": self.model_type not in ("qwen2", "mistral") and self.qkv_bias,
        }
        for key, value in required.items():
            if getattr(self, key) != value:
                raise ValueError(f"{key}={getattr(self, key)} makes no {self.model_type}; set {key}={value}")
        if (self.experts is None) == (self.model_type == "qwen3_moe"):
            raise ValueError(
                f"experts={self.experts} makes no {self.model_type}; qwen3_moe has experts, the others none"
            )
        beyond = [layer for layer in self.experts.dense_layers if layer >= self.layers] if self.experts else []
        if beyond or (self.experts and len(self.experts.dense_layers) == self.layers):
            raise ValueError(f"experts.dense_layers {beyond or 'are all layers'}: the decoder has {self.layers} layers")
        if self.window is not None and self.model_type == "llama":
            raise ValueError("window makes no llama; set window=None, or model_type='mistral'")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1: a query sees itself")
        if self.windowed and (self.window is None or len(self.windowed) != self.layers):
            raise ValueError(f"windowed={self.windowed} needs a window, and an entry for each of {self.layers} layers")
        if self.mrope_sections and sum(self.mrope_sections) * 2 != self.head_dim:
            raise ValueError(f"mrope_sections={self.mrope_sections} must add up to head_dim / 2 = {self.head_dim // 2}")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None where a query sees everything before it."""
        windowed = self.windowed or (self.window is not None,) * self.layers
        return tuple(self.window if flag else None for flag in windowed)

    @property
    def sparse(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        return tuple(bool(self.experts) and i not in self.experts.dense_layers for i in range(self.layers))


TextKind = Literal["query", "passage"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """A vision tower: patches, layers with window or full attention, and a merger to the language model's width."""

    model_type: Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
    depth: int
    embed: int
    heads: int
    mlp: int
    out: int  # width of the language model
    channels: int = 3
    patch: int = 14  # side, pixels
    temporal_patch: int = 2  # frames
    merge: int = 2  # side of the group of patches that becomes one image token
    window: int | None = None  # side of an attention window, pixels; None: every layer has full attention
    full_layers: tuple[int, ...] = ()  # layers with full attention beside windowed ones
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    # SiLU-gated feed-forward (Qwen2.5-VL), or without a gate: quick-GELU (Qwen2-VL), GELU by tanh (Qwen3-VL)
    gated: bool = True
    table: int = 0  # side of the grid of learned positions, stretched over every picture (Qwen3-VL); 0: none
    # layers whose output is merged, too, and added to the first layers of the language model (DeepStack, arXiv 2406.04334)
    deep_layers: tuple[int, ...] = ()
    rope_theta: float = 10_000.0
    init_scale: float = 0.02

    def __post_init__(self) -> None:
        if self.embed % self.heads or self.head_dim % 4:
            raise ValueError(
                f"embed={self.embed} over heads={self.heads}: the width of a head must be a multiple of 4, half of it "
                f"for rows and half for columns"
            )
        if self.window is not None and self.window < self.patch * self.merge:
            raise ValueError(f"window={self.window} is smaller than a merge group of {self.patch * self.merge} pixels")
        for name in ("full_layers", "deep_layers"):
            beyond = [layer for layer in getattr(self, name) if not 0 <= layer < self.depth]
            if beyond:
                raise ValueError(f"{name} {beyond} are not layers of a tower of depth {self.depth}")
        if list(self.deep_layers) != sorted(set(self.deep_layers)):
            raise ValueError(f"deep_layers={self.deep_layers} must be in order, each once")
        if (self.model_type == "qwen3_vl") != bool(self.table) or (self.deep_layers and not self.table):
            raise ValueError(
                f"table={self.table} and deep_layers={self.deep_layers} make no {self.model_type}: qwen3_vl has learned "
                f"positions, and deep layers as it likes; the others have neither"
            )
        # What a family fixes, config.json does not say: an export of another combination would load as another model.
        newer = self.model_type == "qwen2_5_vl"
        for key, value in {"norm": "rms" if newer else "layer", "gated": newer}.items():
            if getattr(self, key) != value:
                raise ValueError(f"{key}={getattr(self, key)!r} makes no {self.model_type}; set {key}={value!r}")
        if newer != (self.window is not None):
            raise ValueError(f"window={self.window} makes no {self.model_type}: qwen2_5_vl has windows, qwen2_vl none")

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads

    @property
    def patch_dim(self) -> int:
        """Values of a flattened patch."""
        return self.channels * self.temporal_patch * self.patch**2

    @property
    def group(self) -> int:
        """Patches per image token."""
        return self.merge**2

    @property
    def window_patches(self) -> int:
        """Patches of an attention window; arrays hold a multiple of this many."""
        return self.group * (1 if self.window is None else (self.window // (self.patch * self.merge)) ** 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionLanguageConfig:
    """A decoder, a vision tower, and the ids that stand for images in text."""

    model_type: str  # qwen2_vl, qwen2_5_vl, qwen3_vl
    text: DecoderConfig
    vision: VisionConfig
    image_id: int  # stands once for every merged patch of an image
    video_id: int
    vision_start_id: int
    vision_end_id: int

    def __post_init__(self) -> None:
        if self.vision.out != self.text.embed:
            raise ValueError(f"vision.out={self.vision.out} must be text.embed={self.text.embed}")
        if len(self.text.mrope_sections) != 3:
            raise ValueError(f"text.mrope_sections={self.text.mrope_sections} must be three: time, row, column")
        if len(self.vision.deep_layers) > self.text.layers:
            raise ValueError(f"{len(self.vision.deep_layers)} vision.deep_layers for {self.text.layers} layers of text")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts:
    """The prefixes of texts with which an encoder was trained."""

    query: str = ""
    passage: str = ""
    default: str = ""  # before texts of unknown kind

    def of(self, kind: TextKind | None) -> str:
        """The prefix for a kind of text. Raises ValueError for anything else than query, passage or None."""
        if kind not in ("query", "passage", None):
            raise ValueError(f"kind={kind!r} must be 'query', 'passage' or None")
        return getattr(self, kind or "default")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """A BERT-style encoder: learned positions, post-LayerNorm, GELU.

    `pooling` and `normalize` default to the mean over tokens at unit length, as most sentence encoders use them.
    """

    # bert; roberta and xlm-roberta, whose positions begin after the padding id; ..ForSequenceClassification of a cross-encoder
    model_type: str
    vocab_size: int
    embed: int
    layers: int
    heads: int
    mlp: int
    max_length: int  # tokens
    first_position: int = 0  # of the first token; RoBERTa: padding id + 1, the rows before it belong to no token
    type_vocab_size: int = 2
    norm_eps: float = 1e-12
    init_scale: float = 0.02
    pad_id: int = 0
    # mean (over the mask), cls (the first token) or pooler (BERT's tanh layer on the first token)
    pooling: str = "mean"
    normalize: bool = True  # unit length embeddings
    text_length: int | None = None  # tokens of a text that `embed` reads; None: max_length
    prompts: Prompts = Prompts()

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise UnsupportedModelError(f"pooling={self.pooling!r} is not supported; supported: {', '.join(POOLINGS)}")
        if self.embed % self.heads:
            raise ValueError(f"embed={self.embed} must be a multiple of heads={self.heads}")
        if "roberta" in self.model_type.lower() and self.first_position != self.pad_id + 1:
            raise ValueError(f"first_position={self.first_position} makes no {self.model_type}; set pad_id + 1")


def refuse_quantized(config: Mapping[str, Any], source: str) -> None:
    """Raises UnsupportedModelError for a config.json of quantized weights."""
    quantization = config.get("quantization_config")
    if quantization:
        raise UnsupportedModelError(
            f"{source}: quantization_config ({quantization.get('quant_method', 'of unknown method')}) is not supported; "
            f"use the model's float32, float16 or bfloat16 version"
        )


def require(config: Mapping[str, Any], source: str, key: str, allowed: tuple[Any, ...]) -> None:
    """Raises UnsupportedModelError unless config.json has one of the allowed values; `None` stands for an absent key."""
    if config.get(key) not in allowed:
        raise UnsupportedModelError(f"{source}: {key}={config[key]!r} is not supported; supported: {allowed[0]!r}")
