"""Converts CLIP weights with the names of OpenAI's `clip` package (such as UniIR's CLIP-SF) to a Hugging Face directory.

convert("clip_sf_large.pth", like="openai/clip-vit-large-patch14", target="uniir-clip-sf")
"""

from __future__ import annotations

import pathlib
import re
import shutil

import numpy as np
from safetensors.numpy import save_file

from routerl_jax.models import pretrained
from routerl_jax.models.conversion import read_state

_OTHERS = (
    "config.json",
    "preprocessor_config.json",
    "tokenizer*",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
)
# (theirs, Hugging Face's), in this order; the towers' layers have equal names below their beginnings
_NAMES = (
    (r"^visual\.conv1\.", "vision_model.embeddings.patch_embedding."),
    (r"^visual\.class_embedding$", "vision_model.embeddings.class_embedding"),
    (r"^visual\.positional_embedding$", "vision_model.embeddings.position_embedding.weight"),
    (r"^visual\.ln_pre\.", "vision_model.pre_layrnorm."),
    (r"^visual\.ln_post\.", "vision_model.post_layernorm."),
    (r"^visual\.proj$", "visual_projection.weight"),
    (r"^token_embedding\.", "text_model.embeddings.token_embedding."),
    (r"^positional_embedding$", "text_model.embeddings.position_embedding.weight"),
    (r"^ln_final\.", "text_model.final_layer_norm."),
    (r"^text_projection$", "text_projection.weight"),
    (r"^visual\.transformer\.resblocks\.", "vision_model.encoder.layers."),
    (r"^transformer\.resblocks\.", "text_model.encoder.layers."),
    (r"\.ln_([12])\.", r".layer_norm\1."),
    (r"\.attn\.out_proj\.", ".self_attn.out_proj."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
)
_FACTS = {"input_resolution", "context_length", "vocab_size"}  # numbers that OpenAI's own files hold beside the weights


def convert(weights: str | pathlib.Path, *, like: str, target: str | pathlib.Path) -> None:
    """Writes a directory that `load_pretrained` and transformers load.

    Args:
      weights: a .pth that torch saved (of the model, or with the model under the key `model`).
      like: a Hugging Face directory or hub id of the same architecture. Config, tokenizer and image processing come from it.
      target: the directory to write; it must not exist.

    Raises:
      ValueError: the file can't be read, or holds no CLIP.
    """
    source, target = pretrained.resolve(like), pathlib.Path(target)
    tensors = renamed(read_state(pathlib.Path(weights)), str(weights))
    target.mkdir(parents=True)
    for pattern in _OTHERS:
        for path in source.glob(pattern):
            shutil.copy(path, target)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def renamed(state: dict[str, np.ndarray], source: str = "weights") -> dict[str, np.ndarray]:
    """The tensors by Hugging Face's names and in its layout. Raises ValueError if these are no CLIP's."""
    marker = "visual.conv1.weight"
    prefix = next((name.removesuffix(marker) for name in state if name.endswith(marker)), None)
    if prefix is None:
        raise ValueError(
            f"{source}: holds no {marker!r}; expected the weights of OpenAI's clip package, or of UniIR's CLIP-SF"
        )
    result: dict[str, np.ndarray] = {}
    for full, tensor in state.items():
        name = full.removeprefix(prefix)
        if not full.startswith(prefix) or name in _FACTS:
            continue
        for pattern, new in _NAMES:
            name = re.sub(pattern, new, name)
        if re.search(r"\.attn\.in_proj_(weight|bias)$", name):
            kind = name.rpartition("_")[2]
            for part, rows in zip("qkv", np.split(tensor, 3)):
                result[name.replace(f".attn.in_proj_{kind}", f".self_attn.{part}_proj.{kind}")] = rows
        else:
            result[name] = tensor.T if name in ("visual_projection.weight", "text_projection.weight") else tensor
    return {name: np.ascontiguousarray(tensor) if tensor.ndim else tensor for name, tensor in result.items()}
