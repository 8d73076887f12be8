"""CLIP (UniIR's CLIP-SF is one too): config.json, tensors, preprocessor_config.json.

UniIR publishes its weights as a .pth with the names of OpenAI's `clip` package; `models.openai_clip.convert` makes the
Hugging Face directory of it that is read here.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from routerl_jax.core.files import read_json
from routerl_jax.models.clip import ACTIVATIONS, Clip, ClipConfig, TowerConfig
from routerl_jax.models.clip_images import ClipImageProcessor, processor_from_hf
from routerl_jax.models.config import UnsupportedModelError, refuse_quantized
from routerl_jax.models.families.sentence import read_texts, save_texts, write_json
from routerl_jax.models.family import FAMILIES, Family
from routerl_jax.models.mapping import FROM_HEADS, HEADS_BIAS, MATRIX, TO_HEADS, TRANSPOSED, VECTOR, Rule, Rules

_KERNEL = ((3,), (0,), (1,), (2,))  # ours [channels, side, side, embed], theirs with embed first
# Defaults of transformers for missing keys.
_TOWER = {"layer_norm_eps": 1e-5, "hidden_act": "quick_gelu", "num_hidden_layers": 12}
_TEXT = _TOWER | {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "pad_token_id": 1,
    "bos_token_id": 49406,
    "eos_token_id": 49407,
}
_VISION = _TOWER | {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
}


def clip_from_hf(config: Mapping[str, Any], source: str = "config.json") -> ClipConfig:
    """Reads a CLIP config.json. Raises UnsupportedModelError for features that would change the vectors."""
    refuse_quantized(config, source)
    text, vision = _part(config, "text_config", _TEXT), _part(config, "vision_config", _VISION)
    for name, part, key, kind in (
        ("vision_config", vision, "image_size", "a number"),
        ("vision_config", vision, "patch_size", "a number"),
        ("text_config", text, "eos_token_id", "a number"),
        ("vision_config", vision, "num_channels", "3"),
    ):
        if not isinstance(part[key], int) or (key == "num_channels" and part[key] != 3):
            raise UnsupportedModelError(f"{source}: {name}: {key}={part[key]!r} is not supported; supported: {kind}")
    for name, part in (("text_config", text), ("vision_config", vision)):
        if part["hidden_act"] not in ACTIVATIONS:
            raise UnsupportedModelError(
                f"{source}: {name}: hidden_act={part['hidden_act']!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
            )
    return ClipConfig(
        text=_tower(text),
        vision=_tower(vision),
        vocab_size=text["vocab_size"],
        max_length=text["max_position_embeddings"],
        image_size=vision["image_size"],
        patch=vision["patch_size"],
        projection=config.get("projection_dim", 512),
        bos_id=text["bos_token_id"],
        eos_id=text["eos_token_id"],
        pad_id=text["pad_token_id"],
        images=ClipImageProcessor(size=vision["image_size"], crop=vision["image_size"]),
    )


def clip_to_hf(config: ClipConfig, dtype: str) -> dict[str, Any]:
    """The config.json that `transformers` loads as the same architecture."""
    text, vision = (
        _tower_to_hf(tower) | {"projection_dim": config.projection} for tower in (config.text, config.vision)
    )
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": config.projection,
        "text_config": text
        | {
            "model_type": "clip_text_model",
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_length,
            "bos_token_id": config.bos_id,
            "eos_token_id": config.eos_id,
            "pad_token_id": config.pad_id,
        },
        "vision_config": vision
        | {
            "model_type": "clip_vision_model",
            "num_channels": 3,
            "image_size": config.image_size,
            "patch_size": config.patch,
        },
        "torch_dtype": dtype,
    }


def clip_rules(config: ClipConfig) -> Rules:
    """Our parameter path -> Hugging Face tensor."""
    del config  # all have the same
    text, vision = "text_model.embeddings.", "vision_model.embeddings."
    return {
        ("logit_scale",): Rule("logit_scale", ()),
        ("text", "word"): Rule(text + "token_embedding.weight", MATRIX),
        ("text", "position"): Rule(text + "position_embedding.weight", MATRIX),
        ("text", "final_norm"): Rule("text_model.final_layer_norm.weight", VECTOR),
        ("text", "final_norm_bias"): Rule("text_model.final_layer_norm.bias", VECTOR),
        ("text", "projection"): Rule("text_projection.weight", TRANSPOSED),
        ("vision", "patch"): Rule(vision + "patch_embedding.weight", _KERNEL),
        ("vision", "cls"): Rule(vision + "class_embedding", VECTOR),
        ("vision", "position"): Rule(vision + "position_embedding.weight", MATRIX),
        ("vision", "first_norm"): Rule("vision_model.pre_layrnorm.weight", VECTOR),
        ("vision", "first_norm_bias"): Rule("vision_model.pre_layrnorm.bias", VECTOR),
        ("vision", "final_norm"): Rule("vision_model.post_layernorm.weight", VECTOR),
        ("vision", "final_norm_bias"): Rule("vision_model.post_layernorm.bias", VECTOR),
        ("vision", "projection"): Rule("visual_projection.weight", TRANSPOSED),
        **_block_rules("text"),
        **_block_rules("vision"),
    }


def complete(config: ClipConfig, directory: pathlib.Path, config_json: Mapping[str, Any]) -> ClipConfig:
    """Image processing, text length and prompts, from the directory's other files.

    Raises:
      UnsupportedModelError: image processing that is not implemented.
      ValueError: pictures of another size than the tower reads.
    """
    del config_json
    settings = read_texts(directory, config.max_length)
    path = directory / "preprocessor_config.json"
    if path.is_file():
        settings["images"] = processor_from_hf(read_json(path), str(path))
    try:
        return dataclasses.replace(config, **settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def save(model: Clip, directory: pathlib.Path) -> None:
    """Writes the files that `complete` reads."""
    write_json(directory / "preprocessor_config.json", model.config.images.to_hf())
    save_texts(model, directory)


def _part(config: Mapping[str, Any], name: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A tower's section. As in transformers, an old section `name`_dict replaces it entirely, if there is one."""
    old = config.get(f"{name}_dict")
    part = (config.get(name) or {}) if old is None else old
    return {**defaults, **{key: value for key, value in part.items() if key in defaults}}


def _tower(part: Mapping[str, Any]) -> TowerConfig:
    return TowerConfig(
        embed=part["hidden_size"],
        layers=part["num_hidden_layers"],
        heads=part["num_attention_heads"],
        mlp=part["intermediate_size"],
        norm_eps=part["layer_norm_eps"],
        activation=part["hidden_act"],
    )


def _tower_to_hf(tower: TowerConfig) -> dict[str, Any]:
    return {
        "hidden_size": tower.embed,
        "num_hidden_layers": tower.layers,
        "num_attention_heads": tower.heads,
        "intermediate_size": tower.mlp,
        "layer_norm_eps": tower.norm_eps,
        "hidden_act": tower.activation,
    }


def _block_rules(tower: str) -> Rules:
    layer = f"{tower}_model.encoder.layers.{{}}."
    qkv = [f"{layer}self_attn.{part}_proj." for part in "qkv"]
    rules = {
        "qkv": Rule("|".join(part + "weight" for part in qkv), TO_HEADS),
        "qkv_bias": Rule("|".join(part + "bias" for part in qkv), HEADS_BIAS),
        "o": Rule(layer + "self_attn.out_proj.weight", FROM_HEADS),
        "o_bias": Rule(layer + "self_attn.out_proj.bias", VECTOR),
        "attention_norm": Rule(layer + "layer_norm1.weight", VECTOR),
        "attention_norm_bias": Rule(layer + "layer_norm1.bias", VECTOR),
        "mlp_norm": Rule(layer + "layer_norm2.weight", VECTOR),
        "mlp_norm_bias": Rule(layer + "layer_norm2.bias", VECTOR),
        "up": Rule(layer + "mlp.fc1.weight", TRANSPOSED),
        "up_bias": Rule(layer + "mlp.fc1.bias", VECTOR),
        "down": Rule(layer + "mlp.fc2.weight", TRANSPOSED),
        "down_bias": Rule(layer + "mlp.fc2.bias", VECTOR),
    }
    return {(tower, "blocks", name): rule for name, rule in rules.items()}


FAMILIES.register("clip")(
    Family(
        role="encoder",
        read=clip_from_hf,
        write=clip_to_hf,
        create=Clip,
        rules=clip_rules,
        complete=complete,
        save=save,
    )
)
