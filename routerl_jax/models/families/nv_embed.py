"""NV-Embed-v1 and -v2 (arXiv 2405.17428): the model, and how NVIDIA stores it beside code of its own.

Mistral without its causal mask, pooled by attention to learnt latents.
Dimensions: B batch, T time, D width, R latents, N heads, H head width.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from routerl_jax.core.progress import Bar
from routerl_jax.models.attention import Attention, self_attention
from routerl_jax.models.config import DecoderConfig, Prompts, UnsupportedModelError, require
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.embedding import Embedder, mean_over, unit
from routerl_jax.models.families.llama import decoder_from_hf, decoder_rules, decoder_to_hf
from routerl_jax.models.families.sentence import read_texts, save_texts
from routerl_jax.models.family import (
    FROM_HEADS,
    MATRIX,
    TO_HEADS,
    TRANSPOSED,
    VECTOR,
    Family,
    Rule,
    Rules,
    with_biases,
)
from routerl_jax.models.layers import Initializer, layer_norm, matmul_precision

_NORM_EPS = 1e-5  # torch's default, which the published code leaves


def instruct(task: str) -> str:
    """The prefix that states a task, such as "Given a question, retrieve passages that answer the question"."""
    return f"Instruct: {task}\nQuery: "


@dataclasses.dataclass(frozen=True, kw_only=True)
class NVEmbedConfig:
    """A bidirectional Mistral and the latent attention that pools it."""

    model_type: str = "nvembed"
    text: DecoderConfig
    latents: int = 512
    latent_heads: int = 8
    latent_head_dim: int = 4096
    latent_mlp: int = 4  # width of its feed-forward, as a multiple of the model's
    normalize: bool = True  # unit length embeddings
    mask_instruction: bool = True  # the prefix is read, but is no part of the mean
    text_length: int | None = None  # tokens of a text that `embed` reads; None: as many as there are positions
    prompts: Prompts = Prompts(query=instruct("Given a question, retrieve passages that answer the question"))

    def __post_init__(self) -> None:
        if self.text.window is not None or not self.text.tied_embeddings:
            raise ValueError("NV-Embed's backbone sees whole texts and has no head: window=None, tied_embeddings=True")


class LatentAttention(nnx.Module):
    """Cross attention (queries: tokens; keys and values: latents), then a gated feed-forward. Both have normed inputs and a
    residual (section 3.2)."""

    def __init__(self, config: NVEmbedConfig, init: Initializer) -> None:
        embed, heads, width = config.text.embed, config.latent_heads, config.latent_head_dim
        mlp = config.latent_mlp * embed
        self.config = config
        self.latents = init.normal((config.latents, embed), (None, "embed"))
        self.token_norm, self.token_norm_bias = init.ones((embed,), (None,)), init.zeros((embed,), (None,))
        self.latent_norm, self.latent_norm_bias = init.ones((embed,), (None,)), init.zeros((embed,), (None,))
        self.q = init.normal((embed, heads, width), ("embed", "heads", "head_dim"))
        self.kv = init.normal((embed, 2 * heads, width), ("embed", "heads", "head_dim"))  # all keys, then all values
        self.o = init.normal((heads, width, embed), ("heads", "head_dim", "embed"))
        self.mlp_norm, self.mlp_norm_bias = init.ones((embed,), (None,)), init.zeros((embed,), (None,))
        self.up = init.normal((embed, 2 * mlp), ("embed", "mlp"))  # all values, then all gates
        self.up_bias = init.zeros((2 * mlp,), ("mlp",))
        self.down = init.normal((mlp, embed), ("mlp", "embed"))
        self.down_bias = init.zeros((embed,), (None,))

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        dtype = x_BTD.dtype
        h = layer_norm(x_BTD, self.token_norm[...], self.token_norm_bias[...], _NORM_EPS)
        latents = layer_norm(
            self.latents[...].astype(dtype), self.latent_norm[...], self.latent_norm_bias[...], _NORM_EPS
        )
        q = jnp.einsum("BTD,DNH->BTNH", h, self.q[...].astype(dtype)) * self.config.latent_head_dim**-0.5
        k, v = jnp.split(jnp.einsum("RD,DNH->RNH", latents, self.kv[...].astype(dtype)), 2, axis=1)
        logits = jnp.einsum("BTNH,RNH->BTNR", q, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(logits, axis=-1).astype(dtype)
        mixed = jnp.einsum("BTNR,RNH->BTNH", weights, v)
        x_BTD = x_BTD + jnp.einsum("BTNH,NHD->BTD", mixed, self.o[...].astype(dtype))
        h = layer_norm(x_BTD, self.mlp_norm[...], self.mlp_norm_bias[...], _NORM_EPS)
        values, gates = jnp.split(h @ self.up[...].astype(dtype) + self.up_bias[...].astype(dtype), 2, axis=-1)
        h = values * jax.nn.gelu(gates, approximate=False)
        return x_BTD + (h @ self.down[...].astype(dtype) + self.down_bias[...].astype(dtype))


class NVEmbed(Embedder):
    """`embed(texts)`; texts end with eos. The model reads the prefix of a query (`instruct`), but the mean excludes it.

    As in the published code, the mean excludes as many tokens as the prefix alone has. bos is one of them, so the last token of
    the prefix, which the tokenizer joins to the text, is included.
    """

    config: NVEmbedConfig

    def __init__(
        self,
        config: NVEmbedConfig,
        key: jax.Array,
        *,
        param_dtype: jnp.dtype = jnp.float32,
        compute_dtype: jnp.dtype | None = None,
    ) -> None:
        super().__init__(config, config.text.embed, param_dtype, compute_dtype)
        self.backbone = Decoder(config.text, key, param_dtype=param_dtype)
        init = Initializer(jax.random.fold_in(key, 0), config.text.init_scale, param_dtype)
        self.pooler = LatentAttention(config, init)

    @property
    def longest_text(self) -> int:
        """Tokens of a text that `embed` reads, special tokens and prefix included."""
        return min(self.config.text_length or self.config.text.max_length, self.config.text.max_length)

    def __call__(
        self, tokens: Int[Array, "B T"], mask: Bool[Array, "B T"], *, attention: Attention | None = None
    ) -> Float[Array, "B T D"]:
        """Token vectors of the backbone; `mask` is True on real tokens, which stand at the left."""
        tokens, segments = jnp.asarray(tokens), jnp.asarray(mask).astype(jnp.int32)
        backend = attention or Attention.for_weight(self.backbone.embedding[...])

        def attend(q: Array, k: Array, v: Array, cache: None, window: int | None) -> tuple[Array, None]:
            return self_attention(q, k, v, segments, causal=False, attention=backend), cache

        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return self.backbone.run(tokens, positions, attend, None)[0]

    def pooled(
        self,
        tokens: Int[Array, "B T"],
        mask: Bool[Array, "B T"],
        skip: Int[Array, " B"] | None = None,
        *,
        attention: Attention | None = None,
    ) -> Float[Array, "B D"]:
        """One float32 vector per row: the mean of the latent attention's outputs for its tokens, without the first `skip`."""
        hidden = self(tokens, mask, attention=attention)
        with matmul_precision(hidden.dtype):
            hidden = self.pooler(hidden)
        keep = jnp.asarray(mask, bool)
        if skip is not None:
            keep &= jnp.arange(keep.shape[1]) >= skip[:, None]
        vectors = mean_over(hidden, keep)
        return unit(vectors) if self.config.normalize else vectors

    def encode(self, text: str, prefix: str = "") -> list[int]:
        """The ids that the model reads for a text: prefix, bos and eos included, cut to `longest_text` (which drops eos)."""
        tokenizer = self._tokenizer()
        return tokenizer.encode_for_model(f"{prefix}{text}{tokenizer.hf.eos_token}", self.longest_text)

    def _vectors(
        self, inputs: Sequence[str | list[int]], prefix: str, batch_size: int, bar: Bar
    ) -> Float32[np.ndarray, "N D"]:
        ids = self._ids(inputs, prefix)
        skip = len(self._tokenizer().begin(prefix)) if prefix and self.config.mask_instruction else 0

        def fill(rows: list[int], shape: tuple[int, int]) -> tuple[np.ndarray, ...]:
            skips = np.zeros(shape[0], np.int32)
            skips[: len(rows)] = skip
            return *self._token_batch(ids, rows, shape), skips

        results = self._run("pooled", [len(i) for i in ids], fill, batch_size, self.longest_text)
        return self._gather(results, len(ids), bar)


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
    rules |= {
        ("pooler", "latents"): Rule(pooler + "latents", MATRIX),
        ("pooler", "q"): Rule(cross + "fn.to_q.weight", TO_HEADS),
        ("pooler", "kv"): Rule(cross + "fn.to_kv.weight", TO_HEADS),
        ("pooler", "o"): Rule(cross + "fn.to_out.weight", FROM_HEADS),
    }
    return rules | with_biases(
        {
            ("pooler", "token_norm"): (cross + "norm", VECTOR),
            ("pooler", "latent_norm"): (cross + "norm_context", VECTOR),
            ("pooler", "mlp_norm"): (mlp + "norm", VECTOR),
            ("pooler", "up"): (mlp + "fn.net.0", TRANSPOSED),
            ("pooler", "down"): (mlp + "fn.net.2", TRANSPOSED),
        }
    )


def complete(config: NVEmbedConfig, directory: pathlib.Path, config_json: Mapping[str, Any]) -> NVEmbedConfig:
    """Text length and prompts, from the directory's other files.

    1_Pooling/ is not read: it describes sentence-transformers' own pooling, but the model pools inside.
    """
    del config_json
    settings = read_texts(directory, config.text.max_length)
    if settings.get("text_length") is None:
        settings.pop("text_length", None)
    return dataclasses.replace(config, **settings)


FAMILY = Family(
    role="encoder",
    read=nv_embed_from_hf,
    write=nv_embed_to_hf,
    create=NVEmbed,
    rules=nv_embed_rules,
    complete=complete,
    save=save_texts,
)
