"""Settings of encoders (pooling, prompts, lengths), from sentence-transformers' files or from the authors' publications."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from absl import logging

from routerl_jax.core.files import read_json
from routerl_jax.models.config import EncoderConfig, Prompts, UnsupportedModelError
from routerl_jax.models.family import write_json

_POOLINGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    # Not one of sentence-transformers, which refuses the key: BERT's pooler_output, as the Open-WikiTable bi-encoder has.
    "pooling_mode_pooler_output": "pooler",
}
# Names of prompts for passages; the first that exists is used.
_PASSAGE_PROMPTS = ("document", "passage", "corpus")

_BGE_QUERY = "Represent this sentence for searching relevant passages: "
_E5 = Prompts(query="query: ", passage="passage: ")
# Settings from the authors' model cards and code that their files lack, by the last part of the model's name.
PUBLISHED: dict[str, dict[str, Any]] = {
    # github.com/facebookresearch/contriever, src/contriever.py: mean, as it is
    r"contriever(-msmarco)?|mcontriever(-msmarco)?": {"pooling": "mean", "normalize": False},
    # huggingface.co/BAAI/bge-large-en-v1.5: CLS, unit length, an instruction before queries only
    r"bge-(small|base|large)-en(-v1\.5)?": {
        "pooling": "cls",
        "normalize": True,
        "prompts": Prompts(query=_BGE_QUERY),
    },
    # arXiv 2402.03216: CLS, unit length, no instructions
    r"bge-m3": {"pooling": "cls", "normalize": True},
    # arXiv 2212.03533 and the model cards: mean, unit length, 512 tokens
    r"e5-(small|base|large)(-v2)?|multilingual-e5-(small|base|large)": {
        "pooling": "mean",
        "normalize": True,
        "text_length": 512,
        "prompts": _E5,
    },
}


def complete(config: EncoderConfig, directory: pathlib.Path, config_json: Mapping[str, Any]) -> EncoderConfig:
    """Pooling, normalization, text length and prompts: from the directory's files, else `published`, else the defaults.

    Raises:
      UnsupportedModelError: modules or a pooling that `Encoder.pooled` does not do.
    """
    settings = published(directory, config_json) | read_texts(directory, config.max_length)
    modules, pooling = directory / "modules.json", directory / "1_Pooling" / "config.json"
    if modules.is_file():
        kinds = [str(module.get("type")).rpartition(".")[-1] for module in read_json(modules)]
        if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            raise UnsupportedModelError(
                f"{modules}: modules {', '.join(kinds)} are not supported; supported: Transformer, Pooling and, optionally, "
                f"Normalize"
            )
        settings["normalize"] = "Normalize" in kinds
    if pooling.is_file():
        settings["pooling"] = _pooling(read_json(pooling), str(pooling))
        if not read_json(pooling).get("include_prompt", True) and settings.get("prompts", Prompts()) != Prompts():
            raise UnsupportedModelError(
                f"{pooling}: include_prompt=false with prompts is not supported; supported: true"
            )
    return dataclasses.replace(config, **settings)


def published(directory: pathlib.Path, config_json: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that the authors of a model published, by the model's name; {} if the name is unknown.

    The name is searched for, in this order, in the directory's name (in the hub's cache: the repository's), in `_name_or_path`
    and in the class of config.json.
    """
    path = directory.absolute()
    repository = path.parent.parent.name if path.parent.name == "snapshots" else path.name
    names = [
        repository.rpartition("--")[-1],
        str(config_json.get("_name_or_path") or "").rstrip("/").rpartition("/")[-1],
    ]
    for name in [*names, *(config_json.get("architectures") or [])]:
        for pattern, facts in PUBLISHED.items():
            if re.fullmatch(pattern, name, re.IGNORECASE):
                logging.info("%s: where its files say nothing else, as published of %s: %s", directory, name, facts)
                return dict(facts)
    return {}


def read_texts(directory: pathlib.Path, longest: int) -> dict[str, Any]:
    """`text_length` and `prompts`, if the files of sentence-transformers and tokenizer_config.json have them.

    Args:
      longest: tokens that the architecture can read. A length that is no shorter is ignored.

    Raises:
      UnsupportedModelError: texts would have to be lower-cased before the tokenizer reads them.
    """
    settings: dict[str, Any] = {}
    tokenizer = directory / "tokenizer_config.json"
    if tokenizer.is_file():
        length = read_json(tokenizer).get("model_max_length")
        if length is not None:
            settings["text_length"] = int(length)
    transformer, general = directory / "sentence_bert_config.json", directory / "config_sentence_transformers.json"
    if transformer.is_file():
        content = read_json(transformer)
        if content.get("max_seq_length") is not None:
            settings["text_length"] = content["max_seq_length"]
        if content.get("do_lower_case"):
            raise UnsupportedModelError(
                f"{transformer}: do_lower_case=true is not supported; let the tokenizer do it (tokenizer.json)"
            )
    if settings.get("text_length", 0) >= longest:
        settings["text_length"] = None
    if general.is_file():
        content = read_json(general)
        texts = content.get("prompts") or {}
        default = content.get("default_prompt_name")
        if texts:
            passage = next((texts[name] for name in _PASSAGE_PROMPTS if texts.get(name)), "")
            settings["prompts"] = Prompts(
                query=texts.get("query") or "", passage=passage, default=texts.get(default) or ""
            )
    return settings


def save(model: Any, directory: pathlib.Path) -> None:
    """Writes these settings so that sentence-transformers and `complete` read them again."""
    config = model.config
    kinds = ["Transformer", "Pooling", *["Normalize"] * config.normalize]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths))
    ]
    modes = {
        key: mode == config.pooling for key, mode in _POOLINGS.items() if mode != "pooler" or config.pooling == mode
    }
    write_json(directory / "modules.json", modules)
    (directory / "1_Pooling").mkdir()
    write_json(directory / "1_Pooling" / "config.json", {"word_embedding_dimension": model.dim, **modes})
    save_texts(model, directory)


def save_texts(model: Any, directory: pathlib.Path) -> None:
    """Writes `text_length` and `prompts` so that sentence-transformers and `read_texts` read them again."""
    config = model.config
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": model.longest_text, "do_lower_case": False})
    prompts = {"query": config.prompts.query, "document": config.prompts.passage}
    named = {"default": config.prompts.default} if config.prompts.default else {}
    write_json(
        directory / "config_sentence_transformers.json",
        {"prompts": prompts | named, "default_prompt_name": next(iter(named), None)},
    )


def _pooling(content: Mapping[str, Any], source: str) -> str:
    """The one pooling of a 1_Pooling/config.json: a flag per kind or, in newer versions, a name."""
    modes = [key for key, value in content.items() if key.startswith("pooling_mode_") and value]
    if isinstance(content.get("pooling_mode"), str):
        modes = [{"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}.get(content["pooling_mode"], "")]
        modes = modes if modes[0] else [f"pooling_mode {content['pooling_mode']}"]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise UnsupportedModelError(
            f"{source}: {' with '.join(modes) or 'no pooling mode'} is not supported; supported: one of "
            f"{', '.join(_POOLINGS)}"
        )
    return _POOLINGS[modes[0]]
