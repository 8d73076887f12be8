"""Cross-encoders: BERT, RoBERTa and XLM-R with one label for a pair of texts."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from routerl_jax.models.config import EncoderConfig, UnsupportedModelError
from routerl_jax.models.cross_encoder import CrossEncoder
from routerl_jax.models.families import bert, sentence
from routerl_jax.models.family import FAMILIES, Family
from routerl_jax.models.mapping import TRANSPOSED, VECTOR, Rule, Rules

_CLASSES = {
    "bert": "BertForSequenceClassification",
    "roberta": "RobertaForSequenceClassification",
    "xlm-roberta": "XLMRobertaForSequenceClassification",
}


def cross_encoder_from_hf(config: Mapping[str, Any], source: str = "config.json") -> EncoderConfig:
    """Reads a config.json of these classes. Raises UnsupportedModelError for more labels than one."""
    labels = len(config["id2label"]) if config.get("id2label") else config.get("num_labels", 2)
    if labels != 1:
        raise UnsupportedModelError(f"{source}: {labels} labels are not supported; a reranker has one")
    read, name = bert.encoder_from_hf(config, source), _CLASSES[config["model_type"]]
    return dataclasses.replace(read, model_type=name, pooling="pooler", normalize=False)


def cross_encoder_to_hf(config: EncoderConfig, dtype: str) -> dict[str, Any]:
    """The config.json that `transformers` loads as the same architecture."""
    kind = next(kind for kind, name in _CLASSES.items() if name == config.model_type)
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    config_json = bert.encoder_to_hf(dataclasses.replace(config, model_type=kind), dtype)
    return config_json | {"architectures": [config.model_type], **labels}


def cross_encoder_rules(config: EncoderConfig) -> Rules:
    """Our parameter path -> Hugging Face tensor."""
    rules = bert.encoder_rules(config)
    if config.model_type == _CLASSES["bert"]:
        return rules | {("out",): Rule("classifier.weight", TRANSPOSED), ("out_bias",): Rule("classifier.bias", VECTOR)}
    return rules | {
        ("pooler",): Rule("classifier.dense.weight", TRANSPOSED),
        ("pooler_bias",): Rule("classifier.dense.bias", VECTOR),
        ("out",): Rule("classifier.out_proj.weight", TRANSPOSED),
        ("out_bias",): Rule("classifier.out_proj.bias", VECTOR),
    }


def _complete(config: EncoderConfig, directory: pathlib.Path, config_json: Mapping[str, Any]) -> EncoderConfig:
    """The config with the length of texts from the directory's files."""
    length = sentence.read_texts(directory, config.max_length).get("text_length")
    return dataclasses.replace(config, text_length=length)


for _name in _CLASSES.values():
    FAMILIES.register(_name)(
        Family(
            role="encoder",
            read=cross_encoder_from_hf,
            write=cross_encoder_to_hf,
            create=CrossEncoder,
            rules=cross_encoder_rules,
            spellings=(("", "bert."), ("", "roberta.")),
            complete=_complete,
        )
    )
