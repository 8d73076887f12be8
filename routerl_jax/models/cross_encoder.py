"""Cross-encoders: BERT-style encoders that read a query and a passage together and score the pair.

Dimensions: B batch, T time, D width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from routerl_jax.core.progress import Bar
from routerl_jax.models.attention import Attention
from routerl_jax.models.config import EncoderConfig
from routerl_jax.models.encoder import Encoder
from routerl_jax.models.layers import Initializer, matmul_precision


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
            _scored, [len(pair_ids) for pair_ids in ids], filled, batch_size, self.longest_text
        ):
            scores[rows] = values
        return scores

    def _vectors(
        self, inputs: Sequence[str | list[int]], prefix: str, batch_size: int, bar: Bar
    ) -> Float32[np.ndarray, "N D"]:
        raise ValueError(
            "a cross-encoder scores pairs of texts and has no vector of one: take a text encoder, or score()"
        )


@functools.partial(jax.jit, static_argnums=(0, 2))
def _scored(
    graph: nnx.GraphDef, params: nnx.State, attention: Attention, tokens: Array, mask: Array, types: Array
) -> Array:
    """`CrossEncoder.scores` as a pure function."""
    return nnx.merge(graph, params).scores(tokens, mask, types, attention=attention)
