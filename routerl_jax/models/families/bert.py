"""Text encoders of BERT's build: BERT (MiniLM, BGE-large, E5, Contriever), RoBERTa and XLM-R (BGE-M3, multilingual E5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from routerl_jax.models.config import EncoderConfig, refuse_quantized, require
from routerl_jax.models.encoder import Encoder
from routerl_jax.models.families import sentence
from routerl_jax.models.family import FAMILIES, Family
from routerl_jax.models.mapping import FROM_HEADS, HEADS_BIAS, MATRIX, TO_HEADS, TRANSPOSED, VECTOR, Rule, Rules

_CLASSES = {"bert": "BertModel", "roberta": "RobertaModel", "xlm-roberta": "XLMRobertaModel"}


def encoder_from_hf(config: Mapping[str, Any], source: str = "config.json") -> EncoderConfig:
    """Reads a config.json of BERT's kind. Raises UnsupportedModelError for features that would change the vectors."""
    refuse_quantized(config, source)
    require(config, source, "hidden_act", ("gelu", None))
    require(config, source, "position_embedding_type", ("absolute", None))
    kind = config["model_type"]
    pad = config.get("pad_token_id")
    pad = (0 if kind == "bert" else 1) if pad is None else pad
    first = 0 if kind == "bert" else pad + 1
    return EncoderConfig(
        model_type=kind,
        vocab_size=config["vocab_size"],
        embed=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        mlp=config["intermediate_size"],
        max_length=config["max_position_embeddings"] - first,
        first_position=first,
        pad_id=pad,
        type_vocab_size=config.get("type_vocab_size", 2),
        norm_eps=config.get("layer_norm_eps", 1e-12),
        init_scale=config.get("initializer_range", 0.02),
    )


def encoder_to_hf(config: EncoderConfig, dtype: str) -> dict[str, Any]:
    """The config.json that `transformers` loads as the same architecture."""
    return {
        "architectures": [_CLASSES[config.model_type]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.mlp,
        "max_position_embeddings": config.first_position + config.max_length,
        "pad_token_id": config.pad_id,
        "type_vocab_size": config.type_vocab_size,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": "gelu",
        "initializer_range": config.init_scale,
        "torch_dtype": dtype,
    }


def encoder_rules(config: EncoderConfig) -> Rules:
    """Our parameter path -> Hugging Face tensor."""
    layer = "encoder.layer.{}."
    qkv = [f"{layer}attention.self.{part}." for part in ("query", "key", "value")]
    rules = {
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
    if config.pooling == "pooler":
        rules[("pooler",)] = Rule("pooler.dense.weight", TRANSPOSED)
        rules[("pooler_bias",)] = Rule("pooler.dense.bias", VECTOR)
    return rules


for _kind in ("bert", "roberta", "xlm-roberta"):
    FAMILIES.register(_kind)(
        Family(
            role="encoder",
            read=encoder_from_hf,
            write=encoder_to_hf,
            create=Encoder,
            rules=encoder_rules,
            spellings=(("", "bert."), ("", "roberta.")),
            complete=sentence.complete,
            save=sentence.save,
        )
    )
