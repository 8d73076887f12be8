"""ColQwen2 and ColQwen2.5 in Hugging Face's terms: as transformers has them, and as the colpali-engine package saves them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from routerl_jax.models.families.qwen_vl import (
    read_processor,
    save_processor,
    vision_language_from_hf,
    vision_language_rules,
    vision_language_to_hf,
)
from routerl_jax.models.family import FAMILIES, Family
from routerl_jax.models.late_interaction import LateInteraction, LateInteractionConfig
from routerl_jax.models.mapping import TRANSPOSED, VECTOR, Rule, Rules


def late_interaction_from_hf(config: Mapping[str, Any], source: str = "config.json") -> LateInteractionConfig:
    """Reads config.json: with the backbone's under `vlm_config`, or the backbone's own of a class named ColQwen2."""
    backbone = vision_language_from_hf(config.get("vlm_config") or config, source)
    # The head is not used: whether it was tied does not matter.
    backbone = dataclasses.replace(backbone, text=dataclasses.replace(backbone.text, tied_embeddings=True))
    return LateInteractionConfig(
        backbone=backbone,
        dim=config.get("embedding_dim") or 128,
        init_scale=config.get("initializer_range", 0.02),
    )


def late_interaction_to_hf(config: LateInteractionConfig, dtype: str) -> dict[str, Any]:
    """The config.json that `transformers` loads as the same model."""
    return {
        "architectures": ["ColQwen2ForRetrieval"],
        "model_type": config.model_type,
        "vlm_config": vision_language_to_hf(config.backbone, dtype),
        "embedding_dim": config.dim,
        "initializer_range": config.init_scale,
        "torch_dtype": dtype,
    }


def late_interaction_rules(config: LateInteractionConfig) -> Rules:
    """Our parameter path -> Hugging Face tensor."""

    def name(rule: Rule) -> str:
        return "vlm." + rule.name.replace("model.", "language_model.", 1)

    backbone = vision_language_rules(config.backbone).items()
    rules: Rules = {
        ("backbone", *path): dataclasses.replace(rule, name=name(rule), copies=()) for path, rule in backbone
    }
    rules[("projection",)] = Rule("embedding_proj_layer.weight", TRANSPOSED)
    rules[("projection_bias",)] = Rule("embedding_proj_layer.bias", VECTOR)
    return rules


for _name in ("colqwen2", "ColQwen2", "ColQwen2_5"):  # the latter two are colpali-engine's classes
    FAMILIES.register(_name)(
        Family(
            role="encoder",
            read=late_interaction_from_hf,
            write=late_interaction_to_hf,
            create=LateInteraction,
            rules=late_interaction_rules,
            spellings=(
                ("vlm.language_model.", "vlm.model."),
                ("vlm.language_model.", "model."),
                ("vlm.language_model.", "model.language_model."),
                ("vlm.", ""),
                ("vlm.", "model."),
                ("embedding_proj_layer.", "custom_text_proj."),
            ),
            finish=lambda model, directory: read_processor(model.backbone, directory),
            save=lambda model, directory: save_processor(model.backbone, directory),
        )
    )
