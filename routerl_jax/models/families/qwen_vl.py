"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL in Hugging Face's terms: config.json, tensors, image processing."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from routerl_jax.core.files import read_json
from routerl_jax.models.config import UnsupportedModelError, VisionConfig, VisionLanguageConfig, require
from routerl_jax.models.families.llama import decoder_from_hf, decoder_rules, decoder_to_hf
from routerl_jax.models.family import (
    FROM_HEADS,
    MATRIX,
    TRANSPOSED,
    VECTOR,
    Family,
    Modules,
    Rule,
    Rules,
    read_keys,
    with_biases,
    write_json,
    write_keys,
)
from routerl_jax.models.images import processor_from_hf
from routerl_jax.models.vision_language import VisionLanguageModel

VISION_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")

_CLASSES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}
_ACTIVATIONS = {"qwen2_vl": "quick_gelu", "qwen2_5_vl": "silu", "qwen3_vl": "gelu_pytorch_tanh"}

_FUSED = ((0, 2, 3), (1,))  # ours [3, embed, heads, width], theirs [3 * heads * width, embed]
_KERNEL = ((4,), (0,), (1,), (2,), (3,))  # ours [channels, frames, side, side, embed], theirs with embed first


_KEYS = {
    "heads": ("num_heads", 16),
    "temporal_patch": ("temporal_patch_size", 2),
    "merge": ("spatial_merge_size", 2),
    "init_scale": ("initializer_range", 0.02),
}


def vision_from_hf(config: Mapping[str, Any], source: str = "config.json") -> VisionConfig:
    """Reads the vision tower's part of a model's config.json. Missing keys have transformers' defaults.

    Raises:
      UnsupportedModelError: another architecture, or a feature that would change the features of images.
    """
    kind = config.get("model_type")
    if kind not in VISION_TYPES:
        raise UnsupportedModelError(
            f"{source}: no vision tower for model_type {kind!r}; supported: {', '.join(VISION_TYPES)}"
        )
    vision = config.get("vision_config") or {}
    source = f"{source}: vision_config"
    newest, newer = kind == "qwen3_vl", kind == "qwen2_5_vl"
    rope = vision.get("rope_parameters") or {}
    for key, supported in {"hidden_act": _ACTIVATIONS[kind], "in_channels": 3}.items():
        require({key: supported, **vision}, source, key, (supported,))
    require({"rope_type": "axial", **rope}, source, "rope_type", ("axial",))
    for key in ("patch_size", "temporal_patch_size"):
        if not isinstance(vision.get(key, 1), int):
            raise UnsupportedModelError(f"{source}: {key}={vision[key]!r} is not supported; supported: one number")
    if newest:
        embed = vision.get("hidden_size", 1152)
    else:
        embed = vision.get("hidden_size", 3584) if newer else vision.get("embed_dim", 1280)
    common: dict[str, Any] = read_keys(vision, _KEYS) | {
        "model_type": kind,
        "depth": vision.get("depth", 27 if newest else 32),
        "embed": embed,
        "patch": vision.get("patch_size", 16 if newest else 14),
        "rope_theta": float(rope.get("rope_theta", 10_000.0)),
    }
    if newest:
        positions = vision.get("num_position_embeddings", 2304)
        if math.isqrt(positions) ** 2 != positions:
            raise UnsupportedModelError(
                f"{source}: num_position_embeddings={positions} is no square; supported: a square grid"
            )
        return VisionConfig(
            **common,
            mlp=vision.get("intermediate_size", 4304),
            out=vision.get("out_hidden_size", 3584),
            norm="layer",
            gated=False,
            table=math.isqrt(positions),
            deep_layers=tuple(vision.get("deepstack_visual_indexes", (8, 16, 24))),
        )
    if not newer:
        mlp = int(embed * vision.get("mlp_ratio", 4))
        return VisionConfig(**common, mlp=mlp, out=vision.get("hidden_size", 3584), norm="layer", gated=False)
    return VisionConfig(
        **common,
        mlp=vision.get("intermediate_size", 3420),
        out=vision.get("out_hidden_size", 3584),
        window=vision.get("window_size", 112),
        full_layers=tuple(vision.get("fullatt_block_indexes", (7, 15, 23, 31))),
    )


def vision_to_hf(config: VisionConfig) -> dict[str, Any]:
    """The `vision_config` of the config.json that `transformers` loads as the same tower."""
    common = {
        "model_type": config.model_type,
        "depth": config.depth,
        **write_keys(config, _KEYS),
        "in_channels": config.channels,
        "patch_size": config.patch,
        "spatial_patch_size": config.patch,
    }
    if config.rope_theta != VisionConfig.rope_theta:  # transformers 4 knows of one only
        common["rope_parameters"] = {"rope_type": "axial", "rope_theta": config.rope_theta}
    if config.model_type == "qwen2_vl":
        if config.mlp % config.embed:
            raise ValueError(
                f"mlp={config.mlp} is no multiple of embed={config.embed}, as qwen2_vl's config.json needs it"
            )
        return common | {
            "embed_dim": config.embed,
            "mlp_ratio": config.mlp // config.embed,
            "hidden_size": config.out,
            "hidden_act": "quick_gelu",
        }
    common |= {"hidden_size": config.embed, "intermediate_size": config.mlp, "out_hidden_size": config.out}
    if config.model_type == "qwen3_vl":
        return common | {
            "hidden_act": "gelu_pytorch_tanh",
            "num_position_embeddings": config.table**2,
            "deepstack_visual_indexes": list(config.deep_layers),
        }
    return common | {
        "window_size": config.window,
        "fullatt_block_indexes": list(config.full_layers),
        "hidden_act": "silu",
    }


def vision_rules(config: VisionConfig) -> Rules:
    """Our parameter path in the tower -> tensor name in the published checkpoints.

    In transformers 5 the names have the prefix `model.`, but it saves them without.
    """
    layer = "visual.blocks.{}."
    first, second = ("linear_fc1", "linear_fc2") if config.table else ("fc1", "fc2")
    plain = {"up": first, "down": second}
    feed_forward = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"} if config.gated else plain
    modules: Modules = {
        ("blocks", "attention_norm"): (layer + "norm1", VECTOR),
        ("blocks", "qkv"): (layer + "attn.qkv", _FUSED),
        ("blocks", "o"): (layer + "attn.proj", FROM_HEADS),
        ("blocks", "mlp_norm"): (layer + "norm2", VECTOR),
        **{("blocks", ours): (f"{layer}mlp.{theirs}", TRANSPOSED) for ours, theirs in feed_forward.items()},
    }
    norm, up, down = ("norm", "linear_fc1", "linear_fc2") if config.table else ("ln_q", "mlp.0", "mlp.2")
    deep = {"deep": "visual.deepstack_merger_list.{}."} if config.deep_layers else {}
    for ours, stem in ({"merger": "visual.merger."} | deep).items():
        modules[(f"{ours}_norm",)] = (stem + norm, VECTOR)
        modules[(f"{ours}_up",)], modules[(f"{ours}_down",)] = (stem + up, TRANSPOSED), (stem + down, TRANSPOSED)
    rules = with_biases(modules)
    if config.norm == "rms":  # such norms have no bias
        rules = {path: rule for path, rule in rules.items() if not path[-1].endswith("norm_bias")}
    rules[("patch",)] = Rule("visual.patch_embed.proj.weight", _KERNEL)
    if config.table:
        rules[("patch_bias",)] = Rule("visual.patch_embed.proj.bias", VECTOR)
        rules[("places",)] = Rule("visual.pos_embed.weight", MATRIX)
    return rules


def vision_language_from_hf(config: Mapping[str, Any], source: str = "config.json") -> VisionLanguageConfig:
    """Reads the config.json of a whole model: the text part flat, as published, or under `text_config`."""
    text = dict(config.get("text_config") or config)
    for key in ("eos_token_id", "bos_token_id", "tie_word_embeddings"):  # the outer ones count
        if config.get(key) is not None:
            text[key] = config[key] or text.get(key)
    rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    rope.setdefault("rope_theta", text.get("rope_theta") or 1_000_000.0)
    if "mrope_section" not in rope:
        raise UnsupportedModelError(
            f"{source}: rope_parameters without mrope_section; expected those of a Qwen2-VL model"
        )
    newest = config["model_type"] == "qwen3_vl"
    if newest and not rope.setdefault("mrope_interleaved", True):  # transformers knows no other way
        raise UnsupportedModelError(f"{source}: mrope_interleaved=False is not supported; supported: True")
    kind = "qwen3" if newest else "qwen2"
    return VisionLanguageConfig(
        model_type=config["model_type"],
        text=decoder_from_hf({**text, "rope_parameters": rope, "model_type": kind}, source),
        vision=vision_from_hf(config, source),
        image_id=config.get("image_token_id", 151655),
        video_id=config.get("video_token_id", 151656),
        vision_start_id=config.get("vision_start_token_id", 151652),
        vision_end_id=config.get("vision_end_token_id", 151653),
    )


def vision_language_to_hf(config: VisionLanguageConfig, dtype: str) -> dict[str, Any]:
    """The config.json that `transformers` loads as the same model, with the text part as in published checkpoints: flat, but of
    Qwen3-VL under `text_config`."""
    text = decoder_to_hf(config.text, dtype)
    if config.model_type == "qwen3_vl":
        outer = {"tie_word_embeddings": config.text.tied_embeddings, "torch_dtype": dtype}
        text = outer | {"text_config": text | {"model_type": "qwen3_vl_text"}}
    return text | {
        "architectures": [_CLASSES[config.model_type]],
        "model_type": config.model_type,
        "vision_config": vision_to_hf(config.vision),
        "image_token_id": config.image_id,
        "video_token_id": config.video_id,
        "vision_start_token_id": config.vision_start_id,
        "vision_end_token_id": config.vision_end_id,
    }


def vision_language_rules(config: VisionLanguageConfig) -> Rules:
    """Our parameter path -> Hugging Face tensor."""
    tower = {("visual", *path): rule for path, rule in vision_rules(config.vision).items()}
    rules = decoder_rules(config.text) | tower
    if config.model_type != "qwen3_vl":
        return rules
    prefixes = {"model.": "model.language_model.", "visual.": "model.visual."}  # as this model is published

    def published(name: str) -> str:
        return next((new + name.removeprefix(old) for old, new in prefixes.items() if name.startswith(old)), name)

    return {path: dataclasses.replace(rule, name=published(rule.name)) for path, rule in rules.items()}


def read_processor(model: VisionLanguageModel, directory: pathlib.Path) -> None:
    """Sets the image processing of preprocessor_config.json (or processor_config.json), if there is one."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        path = directory / name
        if path.is_file():
            model.image_processor = processor_from_hf(read_json(path), str(path), window=model.vl_config.vision.window)
            return


def save_processor(model: VisionLanguageModel, directory: pathlib.Path) -> None:
    """Writes preprocessor_config.json."""
    write_json(directory / "preprocessor_config.json", model.image_processor.to_hf())


QWEN2 = Family(
    role="decoder",
    read=vision_language_from_hf,
    write=vision_language_to_hf,
    create=VisionLanguageModel,
    rules=vision_language_rules,
    spellings=(
        ("model.", "model.language_model."),
        ("visual.", "model.visual."),
        ("model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
    ),
    modules=("model.", "model.language_model."),
    finish=read_processor,
    save=save_processor,
)
QWEN3 = dataclasses.replace(QWEN2, spellings=(), modules=("model.language_model.", "model.language_model."))
