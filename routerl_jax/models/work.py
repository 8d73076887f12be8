"""The least FLOPs and bytes of a decoder's work, from its sizes."""

from __future__ import annotations

import dataclasses
import math

from routerl_jax.models.config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """FLOPs and bytes of a decoder's tokens. Norms, rotary embeddings and sampling are left out: they are below a percent."""

    config: DecoderConfig
    bytes_per_entry: int = 2

    @property
    def matrices(self) -> int:
        """Entries of the matrices that a token goes through: the output projection and its own experts are among them."""
        config = self.config
        attention = config.embed * config.head_dim * 2 * (config.heads + config.kv_heads)
        dense = config.sparse.count(False) * 3 * config.embed * config.mlp
        return config.layers * attention + dense + self._experts(1) + config.embed * config.vocab_size

    def _experts(self, tokens: float) -> int:
        """Entries of routers and of the experts that so many tokens take, if every expert is as likely as any."""
        experts, layers = self.config.experts, self.config.sparse.count(True)
        if experts is None:
            return 0
        active = experts.count * (1 - (1 - experts.chosen / experts.count) ** tokens)
        return round(layers * self.config.embed * (experts.count + 3 * active * experts.mlp))

    @property
    def stored(self) -> int:
        """Entries of all parameters."""
        config = self.config
        biases = (config.heads + 2 * config.kv_heads) * config.head_dim if config.qkv_bias else 0
        norms = 2 * config.head_dim * config.qk_norm
        untied = 0 if config.tied_embeddings else config.embed * config.vocab_size
        idle = self._experts(math.inf) - self._experts(1)
        return self.matrices + idle + untied + config.layers * (2 * config.embed + biases + norms) + config.embed

    def key_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of a conversation of `tokens` tokens."""
        return 2 * self.config.layers * self.config.kv_heads * self.config.head_dim * tokens * self.bytes_per_entry

    def decode_bytes(self, rows: int, tokens: int) -> int:
        """Least bytes of one step: every matrix once, and the keys and values of every row's `tokens` cached tokens.

        Of experts, those that the rows take on average, if every expert is as likely as any.
        """
        read = self.matrices - self._experts(1) + self._experts(rows)
        return read * self.bytes_per_entry + rows * self.key_bytes(tokens)

    def forward_flops(self, lengths: list[int], *, unembedded: int | None = None) -> float:
        """FLOPs of whole sequences: two per entry and token, and causal attention (half of the square).

        Args:
          unembedded: tokens that go through the output projection; default: all. (Prefill needs none.)
        """
        config, tokens = self.config, sum(lengths)
        output = config.embed * config.vocab_size
        products = 2 * (self.matrices - output) * tokens + 2 * output * (tokens if unembedded is None else unembedded)
        pairs = sum(length * (length + 1) / 2 for length in lengths)
        return products + 4 * config.layers * config.heads * config.head_dim * pairs

    def update_flops(self, lengths: list[int], *, adapter: bool = False) -> float:
        """Forward and backward of whole sequences; recomputation to save memory does not count.

        Args:
          adapter: the matrices are frozen, so they need no gradient. The adapter's own work is left out.
        """
        return 3 * self.forward_flops(lengths) - (2 * self.matrices * sum(lengths) if adapter else 0)

    def decode_flops(self, rows: int, tokens: int) -> float:
        """FLOPs of one step: every row's token through all matrices, its queries with `tokens` cached keys and values."""
        return rows * (2 * self.matrices + 4 * self.config.layers * self.config.heads * self.config.head_dim * tokens)

    def prefill_flops(self, rows: int, fed: int, tokens: int) -> float:
        """FLOPs of feeding each row the last `fed` of its `tokens`; no logits are wanted."""
        products = 2 * (self.matrices - self.config.embed * self.config.vocab_size)
        pairs = tokens - (fed - 1) / 2
        return rows * fed * (products + 4 * self.config.layers * self.config.heads * self.config.head_dim * pairs)
