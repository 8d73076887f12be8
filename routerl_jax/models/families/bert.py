"""BERT text encoders (MiniLM, BGE-large, E5, Contriever) and their sentence-transformers settings."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from routerl_jax.models.config import EncoderConfig, UnsupportedModelError, refuse_quantized, require
from routerl_jax.models.encoder import Encoder
from routerl_jax.models.family import FAMILIES, Family
from routerl_jax.models.mapping import FROM_HEADS, HEADS_BIAS, MATRIX, TO_HEADS, TRANSPOSED, VECTOR, Rule, Rules
from routerl_jax.models.reading import read_json


def encoder_from_hf(config: Mapping[str, Any], source: str = "config.json") -> EncoderConfig:
    """Reads a BERT config.json. Raises UnsupportedModelError for features that would change the vectors."""
    refuse_quantized(config, source)
    require(config, source, "hidden_act", ("gelu", None))
    require(config, source, "position_embedding_type", ("absolute", None))
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


def encoder_to_hf(config: EncoderConfig, dtype: str) -> dict[str, Any]:
    """The config.json that `transformers` loads as the same architecture."""
    return {
        "architectures": ["BertModel"],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp,
        "max_position_embeddings": config.max_length,
        "type_vocab_size": config.type_vocab_size,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": "gelu",
        "initializer_range": config.init_scale,
        "torch_dtype": dtype,
    }


def encoder_rules(config: EncoderConfig) -> Rules:
    """Our parameter path -> Hugging Face tensor."""
    del config  # all have the same
    layer = "encoder.layer.{}."
    qkv = [f"{layer}attention.self.{part}." for part in ("query", "key", "value")]
    return {
        ("word",): Rule("embeddings.word_embeddings.weight", MATRIX),
        ("position",): Rule("embeddings.position_embeddings.weight", MATRIX),
        ("token_type",): Rule("embeddings.token_type_embeddings.weight", MATRIX),
        ("embedding_norm",): Rule("embeddings.LayerNorm.weight", VECTOR),
        ("embedding_norm_bias",): Rule("embeddings.LayerNorm.bias", VECTOR),
        ("blocks", "qkv"): Rule("|".join(part + "weight" for part in qkv), TO_HEADS),
        ("blocks", "qkv_bias"): Rule("|".join(part + "bias" for part in qkv), HEADS_BIAS),
        ("blocks", "o"): Rule(layer + "attention.output.dense.weight", FROM_HEADS),
        ("blocks", "o_bias"): Rule(layer + "attention.output.dense.bias", VECTOR),
        ("blocks", "attention_norm"): Rule(layer + "attention.output.LayerNorm.weight", VECTOR),
        ("blocks", "attention_norm_bias"): Rule(layer + "attention.output.LayerNorm.bias", VECTOR),
        ("blocks", "up"): Rule(layer + "intermediate.dense.weight", TRANSPOSED),
        ("blocks", "up_bias"): Rule(layer + "intermediate.dense.bias", VECTOR),
        ("blocks", "down"): Rule(layer + "output.dense.weight", TRANSPOSED),
        ("blocks", "down_bias"): Rule(layer + "output.dense.bias", VECTOR),
        ("blocks", "mlp_norm"): Rule(layer + "output.LayerNorm.weight", VECTOR),
        ("blocks", "mlp_norm_bias"): Rule(layer + "output.LayerNorm.bias", VECTOR),
    }


def read_sentence_settings(model: Encoder, directory: pathlib.Path) -> None:
    """Takes pooling, normalization and text length from what sentence-transformers stores beside the weights.

    Raises:
      UnsupportedModelError: modules or a pooling that `Encoder.pooled` does not do.
    """
    settings: dict[str, Any] = {}
    transformer = directory / "sentence_bert_config.json"
    if transformer.is_file():
        settings["text_length"] = read_json(transformer).get("max_seq_length")
    modules, pooling = directory / "modules.json", directory / "1_Pooling" / "config.json"
    if modules.is_file():
        kinds = [module["type"].rpartition(".")[-1] for module in read_json(modules)]
        if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            raise UnsupportedModelError(
                f"{modules}: modules {', '.join(kinds)} are not supported; supported: Transformer, Pooling and, optionally, "
                f"Normalize"
            )
        settings["normalize"] = "Normalize" in kinds
    if pooling.is_file():
        modes = [key for key, value in read_json(pooling).items() if key.startswith("pooling_mode_") and value]
        supported = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
        if len(modes) != 1 or modes[0] not in supported:
            raise UnsupportedModelError(
                f"{pooling}: {' with '.join(modes) or 'no pooling mode'} is not supported; supported: one of "
                f"{', '.join(supported)}"
            )
        settings["pooling"] = supported[modes[0]]
    model.config = dataclasses.replace(model.config, **settings)


FAMILIES.register("bert")(
    Family(
        role="encoder",
        read=encoder_from_hf,
        write=encoder_to_hf,
        create=Encoder,
        rules=encoder_rules,
        spellings=(("", "bert."),),
        finish=read_sentence_settings,
    )
)
