"""Text encoders of BERT's build, and cross-encoders: the models, and how Hugging Face stores them.

BERT (MiniLM, BGE-large, E5, Contriever), RoBERTa and XLM-R (BGE-M3, multilingual E5). A cross-encoder reads a query and a
passage together and scores the pair.
Dimensions: B batch, T time, D width.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from routerl_jax.core.progress import Bar
from routerl_jax.models.attention import Attention
from routerl_jax.models.config import EncoderConfig, UnsupportedModelError, refuse_quantized, require
from routerl_jax.models.embedding import Embedder, TransformerBlocks, mean_over, run_layers, unit
from routerl_jax.models.families import sentence
from routerl_jax.models.family import (
    FROM_HEADS,
    MATRIX,
    NEEDED,
    TO_HEADS,
    TRANSPOSED,
    VECTOR,
    Family,
    Modules,
    Rule,
    Rules,
    read_keys,
    with_biases,
    write_keys,
)
from routerl_jax.models.layers import Initializer, layer_norm, matmul_precision


class EncoderBlocks(TransformerBlocks):
    """Norms come after the residual. `__call__` runs the layer whose slice it holds."""

    def __call__(self, x_BTD: Array, segments_BT: Array, attention: Attention) -> Array:
        eps = self.config.norm_eps
        out = self.attend(x_BTD, segments_BT, False, attention)
        x_BTD = layer_norm(x_BTD + out, self.attention_norm[...], self.attention_norm_bias[...], eps)
        h = self.feed_forward(x_BTD, functools.partial(jax.nn.gelu, approximate=False))
        return layer_norm(x_BTD + h, self.mlp_norm[...], self.mlp_norm_bias[...], eps)


class Encoder(Embedder):
    """A bidirectional encoder. `encoder(tokens, mask)` gives token vectors; `embed(texts)` gives one vector per text."""

    config: EncoderConfig

    def __init__(
        self,
        config: EncoderConfig,
        key: jax.Array,
        *,
        param_dtype: jnp.dtype = jnp.float32,
        compute_dtype: jnp.dtype | None = None,
    ) -> None:
        super().__init__(config, config.embed, param_dtype, compute_dtype)
        init = Initializer(key, config.init_scale, param_dtype)
        self.word = init.normal((config.vocab_size, config.embed), ("vocab", "embed"))
        self.position = init.normal((config.first_position + config.max_length, config.embed), (None, "embed"))
        self.token_type = init.normal((config.type_vocab_size, config.embed), (None, "embed"))
        self.embedding_norm = init.ones((config.embed,), (None,))
        self.embedding_norm_bias = init.zeros((config.embed,), (None,))
        self.blocks = EncoderBlocks(config, init)
        if config.pooling == "pooler":
            self.pooler = init.normal((config.embed, config.embed), ("embed", "mlp"))
            self.pooler_bias = init.zeros((config.embed,), (None,))

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        mask: Bool[Array, "B T"],
        *,
        types: Int[Array, "B T"] | None = None,
        attention: Attention | None = None,
    ) -> Float[Array, "B T D"]:
        """Token vectors; `mask` is True on real tokens, which may begin anywhere in a row.

        Args:
          types: which text of a pair each token is from (0 or 1); None: all from the first.

        Raises:
          ValueError: rows are longer than there are positions.
        """
        if tokens.shape[1] > self.config.max_length:  # JAX would use the last position for all later ones
            raise ValueError(f"rows of {tokens.shape[1]} tokens; this encoder has {self.config.max_length} positions")
        attention = attention or Attention.for_weight(self.word[...])
        with matmul_precision(self.word[...].dtype):
            return self._hidden(jnp.asarray(tokens), jnp.asarray(mask, bool), types, attention)

    def _hidden(self, tokens: Array, mask: Array, types: Array | None, attention: Attention) -> Array:
        kind = self.token_type[...][0 if types is None else types]
        x = self.word[...][tokens] + self.position[...][self._positions(tokens)] + kind
        x = layer_norm(x, self.embedding_norm[...], self.embedding_norm_bias[...], self.config.norm_eps)
        return run_layers(self.blocks, x, mask.astype(jnp.int32), attention)

    def _positions(self, tokens: Array) -> Array:
        """Positions: BERT uses the index in the row, RoBERTa counts the tokens that are not padding."""
        if self.config.first_position == 0:
            return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        real = (tokens != self.config.pad_id).astype(jnp.int32)
        return jnp.cumsum(real, axis=1) * real + self.config.pad_id

    def pooled(
        self,
        tokens: Int[Array, "B T"],
        mask: Bool[Array, "B T"],
        *,
        types: Int[Array, "B T"] | None = None,
        attention: Attention | None = None,
    ) -> Float[Array, "B D"]:
        """One float32 vector per row, pooled as in the config. `cls` and `pooler` use the first token of the row."""
        hidden = self(tokens, mask, types=types, attention=attention)
        if self.config.pooling == "mean":
            vectors = mean_over(hidden, mask)
        elif self.config.pooling == "cls":
            vectors = hidden[:, 0].astype(jnp.float32)
        else:
            with matmul_precision(hidden.dtype):
                vectors = jnp.tanh(hidden[:, 0] @ self.pooler[...] + self.pooler_bias[...]).astype(jnp.float32)
        return unit(vectors) if self.config.normalize else vectors

    def _vectors(
        self, inputs: Sequence[str | list[int]], prefix: str, batch_size: int, bar: Bar
    ) -> Float32[np.ndarray, "N D"]:
        ids = self._ids(inputs, prefix)
        fill = functools.partial(self._token_batch, ids)
        results = self._run("pooled", [len(i) for i in ids], fill, batch_size, self.longest_text)
        return self._gather(results, len(ids), bar)


class CrossEncoder(Encoder):
    """An encoder with one output for a pair of texts, as transformers' `..ForSequenceClassification` with one label
    (BGE-reranker, MS MARCO's MiniLM). `score(pairs)` gives one number per pair. Its config pools by "pooler".
    """

    def __init__(
        self,
        config: EncoderConfig,
        key: jax.Array,
        *,
        param_dtype: jnp.dtype = jnp.float32,
        compute_dtype: jnp.dtype | None = None,
    ) -> None:
        super().__init__(config, key, param_dtype=param_dtype, compute_dtype=compute_dtype)
        init = Initializer(jax.random.fold_in(key, 1), config.init_scale, param_dtype)
        self.out = init.normal((config.embed, 1), ("embed", None))
        self.out_bias = init.zeros((1,), (None,))

    def scores(
        self,
        tokens: Int[Array, "B T"],
        mask: Bool[Array, "B T"],
        types: Int[Array, "B T"],
        *,
        attention: Attention | None = None,
    ) -> Float[Array, " B"]:
        """The logit of each row, float32."""
        vectors = self.pooled(tokens, mask, types=types, attention=attention)
        with matmul_precision(vectors.dtype):
            return (vectors @ self.out[...].astype(jnp.float32) + self.out_bias[...].astype(jnp.float32))[:, 0]

    def pair(self, query: str, passage: str) -> tuple[list[int], list[int]]:
        """Ids of a query and a passage with special tokens, and the type of each (0 or 1: which text it is from).

        A pair that is too long is cut at the passage's end. The query is cut only if it is too long alone.
        """
        backend = self._tokenizer().hf.backend_tokenizer
        first = backend.encode(query, add_special_tokens=False)
        second = backend.encode(passage, add_special_tokens=False)
        room = self.longest_text - backend.num_special_tokens_to_add(True)
        first.truncate(room)
        second.truncate(max(room - len(first.ids), 0))
        whole = backend.post_process(first, second)
        return whole.ids, [min(kind, self.config.type_vocab_size - 1) for kind in whole.type_ids]

    def score(self, pairs: Sequence[tuple[str, str]], *, batch_size: int = 32) -> Float32[np.ndarray, " N"]:
        """The logit of each pair (query, passage). It depends on the pair alone; higher is better.

        Batches are made as in `embed`.

        Raises:
          ValueError: there is no tokenizer.
        """
        read = [self.pair(query, passage) for query, passage in pairs]
        ids = [pair_ids for pair_ids, _ in read]

        def filled(rows: list[int], shape: tuple[int, int]) -> tuple[np.ndarray, ...]:
            tokens, mask = self._token_batch(ids, rows, shape)
            types = np.zeros(shape, np.int32)
            for row, i in enumerate(rows):
                types[row, : len(ids[i])] = read[i][1]
            return tokens, mask, types

        scores = np.zeros(len(ids), np.float32)
        for rows, values in self._run(
            "scores", [len(pair_ids) for pair_ids in ids], filled, batch_size, self.longest_text
        ):
            scores[rows] = values
        return scores

    def _vectors(
        self, inputs: Sequence[str | list[int]], prefix: str, batch_size: int, bar: Bar
    ) -> Float32[np.ndarray, "N D"]:
        raise ValueError(
            "a cross-encoder scores pairs of texts and has no vector of one: take a text encoder, or score()"
        )


_CLASSES = {"bert": "BertModel", "roberta": "RobertaModel", "xlm-roberta": "XLMRobertaModel"}
_KEYS = {
    "vocab_size": ("vocab_size", NEEDED),
    "embed": ("hidden_size", NEEDED),
    "layers": ("num_hidden_layers", NEEDED),
    "heads": ("num_attention_heads", NEEDED),
    "mlp": ("intermediate_size", NEEDED),
    "type_vocab_size": ("type_vocab_size", 2),
    "norm_eps": ("layer_norm_eps", 1e-12),
    "init_scale": ("initializer_range", 0.02),
}


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
        **read_keys(config, _KEYS),
        max_length=config["max_position_embeddings"] - first,
        first_position=first,
        pad_id=pad,
    )


def encoder_to_hf(config: EncoderConfig, dtype: str) -> dict[str, Any]:
    """The config.json that `transformers` loads as the same architecture."""
    return {
        "architectures": [_CLASSES[config.model_type]],
        "model_type": config.model_type,
        **write_keys(config, _KEYS),
        "max_position_embeddings": config.first_position + config.max_length,
        "pad_token_id": config.pad_id,
        "hidden_act": "gelu",
        "torch_dtype": dtype,
    }


def encoder_rules(config: EncoderConfig) -> Rules:
    """Our parameter path -> Hugging Face tensor."""
    layer = "encoder.layer.{}."
    rules: Rules = {
        ("word",): Rule("embeddings.word_embeddings.weight", MATRIX),
        ("position",): Rule("embeddings.position_embeddings.weight", MATRIX),
        ("token_type",): Rule("embeddings.token_type_embeddings.weight", MATRIX),
    }
    rules |= with_biases(
        {
            ("embedding_norm",): ("embeddings.LayerNorm", VECTOR),
            ("blocks", "qkv"): ("|".join(f"{layer}attention.self.{x}" for x in ("query", "key", "value")), TO_HEADS),
            ("blocks", "o"): (layer + "attention.output.dense", FROM_HEADS),
            ("blocks", "attention_norm"): (layer + "attention.output.LayerNorm", VECTOR),
            ("blocks", "up"): (layer + "intermediate.dense", TRANSPOSED),
            ("blocks", "down"): (layer + "output.dense", TRANSPOSED),
            ("blocks", "mlp_norm"): (layer + "output.LayerNorm", VECTOR),
        }
    )
    return rules | with_biases({("pooler",): ("pooler.dense", TRANSPOSED)} if config.pooling == "pooler" else {})


ENCODERS = Family(
    role="encoder",
    read=encoder_from_hf,
    write=encoder_to_hf,
    create=Encoder,
    rules=encoder_rules,
    spellings=(("", "bert."), ("", "roberta.")),
    complete=sentence.complete,
    save=sentence.save,
)


_PAIR_CLASSES = {
    "bert": "BertForSequenceClassification",
    "roberta": "RobertaForSequenceClassification",
    "xlm-roberta": "XLMRobertaForSequenceClassification",
}


def cross_encoder_from_hf(config: Mapping[str, Any], source: str = "config.json") -> EncoderConfig:
    """Reads a config.json of these classes. Raises UnsupportedModelError for more labels than one."""
    labels = len(config["id2label"]) if config.get("id2label") else config.get("num_labels", 2)
    if labels != 1:
        raise UnsupportedModelError(f"{source}: {labels} labels are not supported; a reranker has one")
    read, name = encoder_from_hf(config, source), _PAIR_CLASSES[config["model_type"]]
    return dataclasses.replace(read, model_type=name, pooling="pooler", normalize=False)


def cross_encoder_to_hf(config: EncoderConfig, dtype: str) -> dict[str, Any]:
    """The config.json that `transformers` loads as the same architecture."""
    kind = next(kind for kind, name in _PAIR_CLASSES.items() if name == config.model_type)
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    config_json = encoder_to_hf(dataclasses.replace(config, model_type=kind), dtype)
    return config_json | {"architectures": [config.model_type], **labels}


def cross_encoder_rules(config: EncoderConfig) -> Rules:
    """Our parameter path -> Hugging Face tensor."""
    if config.model_type == _PAIR_CLASSES["bert"]:
        return encoder_rules(config) | with_biases({("out",): ("classifier", TRANSPOSED)})
    head: Modules = {("pooler",): ("classifier.dense", TRANSPOSED), ("out",): ("classifier.out_proj", TRANSPOSED)}
    return encoder_rules(config) | with_biases(head)


def _complete(config: EncoderConfig, directory: pathlib.Path, config_json: Mapping[str, Any]) -> EncoderConfig:
    """The config with the length of texts from the directory's files."""
    length = sentence.read_texts(directory, config.max_length).get("text_length")
    return dataclasses.replace(config, text_length=length)


CROSS_ENCODERS = Family(
    role="encoder",
    read=cross_encoder_from_hf,
    write=cross_encoder_to_hf,
    create=CrossEncoder,
    rules=cross_encoder_rules,
    spellings=(("", "bert."), ("", "roberta.")),
    complete=_complete,
)
