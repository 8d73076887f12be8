"""ColQwen2 and ColQwen2.5: late interaction (ColPali, arXiv 2407.01449), and how it is stored.

A vision-language model (Qwen2-VL or Qwen2.5-VL), a projection to 128 dimensions, unit length: one vector per token of a query
or page. A query's score for a page is the sum over its vectors of the best match among the page's. Directories are read as
transformers has them, and as the colpali-engine package saves them.
Dimensions: B inputs, T tokens, P patches of an input, D residual stream, E width of the vectors.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from routerl_jax.core.progress import Bar
from routerl_jax.models.attention import Attention
from routerl_jax.models.config import Prompts, VisionLanguageConfig
from routerl_jax.models.decoder import Features
from routerl_jax.models.embedding import Embedder, unit
from routerl_jax.models.families.qwen_vl import (
    read_processor,
    save_processor,
    vision_language_from_hf,
    vision_language_rules,
    vision_language_to_hf,
)
from routerl_jax.models.family import TRANSPOSED, Family, Rule, Rules, with_biases
from routerl_jax.models.images import ImageSource
from routerl_jax.models.layers import Initializer
from routerl_jax.models.patches import ImagePatches, VisionInputs, array_size, concatenate
from routerl_jax.models.vision_language import VisionLanguageModel

_BATCHES_READ = 2  # batches of pages whose patches the host holds at a time: a page takes 15 MB and more


@dataclasses.dataclass(frozen=True, kw_only=True)
class LateInteractionConfig:
    """A vision-language model, its projection, and the authors' prompts of queries and pages."""

    model_type: str = "colqwen2"
    backbone: VisionLanguageConfig
    dim: int = 128
    init_scale: float = 0.02
    query_padding: int = 10  # pad tokens after a query: room to compute in
    page_prompt: str = (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>"
    )
    prompts: Prompts = Prompts(query="Query: ")


class LateInteraction(Embedder):
    """`embed(texts | images)` gives a list of [n, E] arrays: a string is a query, anything else a page."""

    config: LateInteractionConfig

    def __init__(
        self,
        config: LateInteractionConfig,
        key: jax.Array,
        *,
        param_dtype: jnp.dtype = jnp.float32,
        compute_dtype: jnp.dtype | None = None,
    ) -> None:
        super().__init__(config, config.dim, param_dtype, compute_dtype)
        # The language model's head is not used. A tied head has no parameters.
        text = dataclasses.replace(config.backbone.text, tied_embeddings=True)
        self.backbone = VisionLanguageModel(
            dataclasses.replace(config.backbone, text=text), key, param_dtype=param_dtype
        )
        init = Initializer(jax.random.fold_in(key, 0), config.init_scale, param_dtype)
        self.projection = init.normal((text.embed, config.dim), ("embed", None))
        self.projection_bias = init.zeros((config.dim,), (None,))

    @property
    def longest_text(self) -> int:
        """Tokens of a query or page, prompts included."""
        return self.config.backbone.text.max_length

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        mask: Bool[Array, "B T"],
        positions: Int[Array, "3 B T"] | None = None,
        features: Features | None = None,
        *,
        attention: Attention | None = None,
    ) -> Float[Array, "B T E"]:
        """A unit vector per token, float32; zero where `mask` is False."""
        hidden = self.backbone.hidden(
            tokens, positions, jnp.asarray(mask).astype(jnp.int32), attention=attention, features=features
        )
        projected = hidden @ self.projection[...] + self.projection_bias[...]
        return unit(projected.astype(jnp.float32)) * jnp.asarray(mask)[..., None]

    def embed(self, inputs: Sequence[str | ImageSource | ImagePatches], **options: Any) -> list[np.ndarray]:  # type: ignore[override]
        """One vector per token for every input, in order: [n, E] float32.

        Args:
          inputs: strings are queries; paths (`pathlib.Path`), bytes, PIL images and arrays are pages.
          options: options of `Embedder.embed`; `prefix` replaces the prefix of queries.

        Raises:
          ValueError: a picture can't be used (the message has its index), or an input is too long for the model.
        """
        if options.get("kind") not in (None, "query", "passage"):
            raise ValueError(f"unknown kind {options['kind']!r}; use 'query' or 'passage'")
        if options.get("prefix") is None:
            options["kind"] = "query"  # strings are queries
        return super().embed(inputs, **options)  # type: ignore[return-value]

    def encode(self, text: str, prefix: str = "") -> list[int]:
        """The ids of a query: prefix, text, pad tokens, a line feed."""
        tokenizer = self._tokenizer()
        padding = tokenizer.decode([tokenizer.pad_id]) * self.config.query_padding
        ids = tokenizer.encode(f"{prefix}{text}{padding}\n")
        if len(ids) > self.longest_text:
            raise ValueError(f"a query of {len(ids)} tokens; this model reads {self.longest_text}: {text[:60]!r}...")
        return ids

    def _vectors(self, inputs: Sequence[Any], prefix: str, batch_size: int, bar: Bar) -> Any:
        result: list[np.ndarray] = [np.zeros((0, self.dim), np.float32)] * len(inputs)

        def collect(indices: list[int], lengths: list[int], results: Iterator[tuple[list[int], np.ndarray]]) -> None:
            for rows, matrices in results:
                for row, matrix in zip(rows, matrices):
                    result[indices[row]] = matrix[: lengths[row]].astype(np.float32)
                bar.update(len(rows))

        queries = [i for i, item in enumerate(inputs) if isinstance(item, str)]
        ids = [self.encode(inputs[i], prefix) for i in queries]
        lengths = [len(query_ids) for query_ids in ids]
        if ids:
            fill = functools.partial(self._token_batch, ids)
            collect(queries, lengths, self._run("__call__", lengths, fill, batch_size, self.longest_text))
        page_inputs = [i for i, item in enumerate(inputs) if not isinstance(item, str)]
        for start in range(0, len(page_inputs), _BATCHES_READ * batch_size):
            pages = page_inputs[start : start + _BATCHES_READ * batch_size]
            read = [self._page(inputs[i], i) for i in pages]
            lengths = [len(tokens) for tokens, _ in read]
            fill = functools.partial(self._page_batch, read)
            collect(pages, lengths, self._run("_pages", lengths, fill, batch_size, self.longest_text))
        return result

    def _page(self, source: ImageSource | ImagePatches, number: int) -> tuple[list[int], ImagePatches]:
        name = None if isinstance(source, ImagePatches) else getattr(source, "name", None) and str(source)
        image = self.backbone.image_tokens.process(source, name or f"input {number}")
        tokens, _ = self.backbone.image_tokens.expand(self._tokenizer().encode(self.config.page_prompt), [image])
        if len(tokens) > self.longest_text:
            raise ValueError(
                f"input {number} takes {len(tokens)} tokens; this model reads {self.longest_text}: lower max_pixels"
            )
        return tokens, image

    def _page_batch(
        self, pages: list[tuple[list[int], ImagePatches]], rows: list[int], shape: tuple[int, int]
    ) -> tuple[np.ndarray, ...]:
        tokens, mask = self._token_batch([ids for ids, _ in pages], rows, shape)
        vision, host = self.config.backbone.vision, self.backbone.image_tokens
        size = array_size(max(len(pages[i][1].patches) for i in rows), vision)
        images = [concatenate([pages[i][1]], size) for i in rows]
        images += [images[0]] * (shape[0] - len(rows))  # whatever stands in rows without an input
        index = np.full(shape, -1, np.int32)
        positions = np.zeros((shape[0], 3, shape[1]), np.int32)
        for row, i in enumerate(rows):
            ids, image = pages[i]
            index[row, : len(ids)][np.asarray(ids) == host.config.image_id] = image.slots
            positions[row, :, : len(ids)], _ = host.positions(ids, [image])
        stacked = jax.tree.map(lambda *parts: np.stack(parts), *images)
        return (
            *(tokens, mask, positions, index),
            *(stacked.patches.astype(self.backbone.compute_dtype), stacked.positions, stacked.segments, stacked.slots),
        )

    def _pages(
        self,
        tokens: Array,
        mask: Array,
        positions: Array,
        index: Array,
        patches: Array,
        patch_positions: Array,
        segments: Array,
        slots: Array,
        *,
        attention: Attention,
    ) -> Array:
        """`__call__` for the arrays of `_page_batch`."""
        inputs = VisionInputs(patches=patches, positions=patch_positions, segments=segments, slots=slots)
        features = Features(values=self.backbone.features(inputs, attention=attention), index=index)
        return self(tokens, mask, jnp.moveaxis(positions, 1, 0), features, attention=attention)


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
    return rules | with_biases({("projection",): ("embedding_proj_layer", TRANSPOSED)})


FAMILY = Family(
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
