"""NV-Embed-v1 and -v2: config.json and tensors, as NVIDIA publishes them beside code of its own."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from routerl_jax.models.config import UnsupportedModelError, require
from routerl_jax.models.families.llama import decoder_from_hf, decoder_rules, decoder_to_hf
from routerl_jax.models.families.sentence import read_texts, save_texts
from routerl_jax.models.family import FAMILIES, Family
from routerl_jax.models.mapping import FROM_HEADS, MATRIX, TO_HEADS, TRANSPOSED, VECTOR, Rule, Rules
from routerl_jax.models.nv_embed import NVEmbed, NVEmbedConfig

# Tokens that `encode` of the published code reads, although there are 32,768 positions.
_TEXT_LENGTH = 4096
_CODE = "nvidia/NV-Embed-v2--{}"  # where transformers finds the classes of an export (trust_remote_code=True)


def nv_embed_from_hf(config: Mapping[str, Any], source: str = "config.json") -> NVEmbedConfig:
    """Reads an NV-Embed config.json. Raises UnsupportedModelError for features that would change the vectors."""
    for key, allowed in (("padding_side", "right"), ("add_eos", True), ("mask_type", "b")):
        require(config, source, key, (allowed, None))
    text, latent = config.get("text_config") or {}, config.get("latent_attention_config") or {}
    if text.get("model_type") != "bidir_mistral":
        raise UnsupportedModelError(
            f"{source}: text_config: model_type={text.get('model_type')!r} is not supported; supported: 'bidir_mistral'"
        )
    # Its attention reads no window, whatever the config says.
    text = {**text, "model_type": "mistral", "sliding_window": None, "tie_word_embeddings": True}
    backbone = decoder_from_hf(text, f"{source}: text_config")
    for key in ("latent_dim", "hidden_dim"):
        if latent.get(key, 4096) != backbone.embed:
            raise UnsupportedModelError(
                f"{source}: latent_attention_config: {key}={latent.get(key, 4096)} is not supported; supported: the width of "
                f"the text model, {backbone.embed}"
            )
    return NVEmbedConfig(
        text=backbone,
        latents=latent.get("num_latents_value", 512),
        latent_heads=latent.get("num_cross_heads", 8),
        latent_head_dim=latent.get("cross_dim_head", 4096),
        normalize=latent.get("output_normalize", True),
        mask_instruction=config.get("is_mask_instruction", True),
        text_length=_TEXT_LENGTH,
    )


def nv_embed_to_hf(config: NVEmbedConfig, dtype: str) -> dict[str, Any]:
    """The config.json that NVIDIA's code loads as the same architecture."""
    text = decoder_to_hf(config.text, dtype) | {"model_type": "bidir_mistral", "architectures": ["MistralModel"]}
    return {
        "architectures": ["NVEmbedModel"],
        "auto_map": {
            "AutoConfig": _CODE.format("configuration_nvembed.NVEmbedConfig"),
            "AutoModel": _CODE.format("modeling_nvembed.NVEmbedModel"),
        },
        "model_type": "nvembed",
        "hidden_size": config.text.embed,
        "padding_side": "right",
        "add_pad_token": True,
        "add_eos": True,
        "is_mask_instruction": config.mask_instruction,
        "mask_type": "b",
        "text_config": text,
        "latent_attention_config": {
            "model_type": "latent_attention",
            "num_latents_value": config.latents,
            "num_cross_heads": config.latent_heads,
            "cross_dim_head": config.latent_head_dim,
            "hidden_dim": config.text.embed,
            "latent_dim": config.text.embed,
            "output_normalize": config.normalize,
        },
        "torch_dtype": dtype,
    }


def nv_embed_rules(config: NVEmbedConfig) -> Rules:
    """Our parameter path -> Hugging Face tensor."""
    rules: Rules = {
        ("backbone", *path): dataclasses.replace(
            rule, name=rule.name.replace("model.", "embedding_model.", 1), copies=()
        )
        for path, rule in decoder_rules(config.text).items()
    }
    pooler = "latent_attention_model."
    cross, mlp = (f"{pooler}cross_attend_blocks.{i}." for i in range(2))
    for path, rule in {
        "latents": Rule(pooler + "latents", MATRIX),
        "token_norm": Rule(cross + "norm.weight", VECTOR),
        "token_norm_bias": Rule(cross + "norm.bias", VECTOR),
        "latent_norm": Rule(cross + "norm_context.weight", VECTOR),
        "latent_norm_bias": Rule(cross + "norm_context.bias", VECTOR),
        "q": Rule(cross + "fn.to_q.weight", TO_HEADS),
        "kv": Rule(cross + "fn.to_kv.weight", TO_HEADS),
        "o": Rule(cross + "fn.to_out.weight", FROM_HEADS),
        "mlp_norm": Rule(mlp + "norm.weight", VECTOR),
        "mlp_norm_bias": Rule(mlp + "norm.bias", VECTOR),
        "up": Rule(mlp + "fn.net.0.weight", TRANSPOSED),
        "up_bias": Rule(mlp + "fn.net.0.bias", VECTOR),
        "down": Rule(mlp + "fn.net.2.weight", TRANSPOSED),
        "down_bias": Rule(mlp + "fn.net.2.bias", VECTOR),
    }.items():
        rules[("pooler", path)] = rule
    return rules


def complete(config: NVEmbedConfig, directory: pathlib.Path, config_json: Mapping[str, Any]) -> NVEmbedConfig:
    """Text length and prompts, from the directory's other files.

    1_Pooling/ is not read: it describes sentence-transformers' own pooling, but the model pools inside.
    """
    del config_json
    settings = read_texts(directory, config.text.max_length)
    if settings.get("text_length") is None:
        settings.pop("text_length", None)
    return dataclasses.replace(config, **settings)


FAMILIES.register("nvembed")(
    Family(
        role="encoder",
        read=nv_embed_from_hf,
        write=nv_embed_to_hf,
        create=NVEmbed,
        rules=nv_embed_rules,
        complete=complete,
        save=save_texts,
    )
)
