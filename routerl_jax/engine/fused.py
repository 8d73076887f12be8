"""The KV cache for GPUs: new keys and values are written in place, and kernels read each row as far as it is filled.

One kernel (fused_kernels.py) takes any number of new tokens per row, which XLA has written before. The other also writes. It is
for steps of decoding with few tokens per row, and for a cache that is not quantised.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from routerl_jax.engine.cache import Codes, Qtype
from routerl_jax.engine.fused_kernels import LEAST_SIDE, MOST_QUERIES, fused_attention, fused_decode, triton
from routerl_jax.engine.segments import RowAttention, SegmentCache, of_layer
from routerl_jax.models.config import DecoderConfig
from routerl_jax.models.decoder import Attend
from routerl_jax.parallel.mesh import on_gpu


@functools.partial(jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=["config", "mesh"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedCache(SegmentCache):
    """On other devices than GPUs the kernels are interpreted, for tests. See cache.KVCache."""

    @classmethod
    def abstract(
        cls, config: DecoderConfig, mesh: Mesh, shards: int, rows: int, length: int, dtype: Any, qtype: Qtype = ""
    ) -> Self:
        return super().abstract(config, mesh, shards, rows, max(length, LEAST_SIDE), dtype, qtype)

    @staticmethod
    def unsupported(config: DecoderConfig, mesh: Mesh) -> str | None:
        """Why the kernels don't support this model on these devices; None if they do."""
        width = config.head_dim
        if width < LEAST_SIDE or width & (width - 1):
            return f"heads of {width} channels; the kernels take powers of two from {LEAST_SIDE} on"
        capability = str(getattr(mesh.devices.flat[0], "compute_capability", ""))
        if on_gpu(mesh) and not capability.startswith(("8.", "9.", "10.", "12.")):
            return f"a GPU of compute capability {capability or 'unknown'}; Triton takes NVIDIA's from 8.0 on"
        if triton is None:
            return "this JAX has no Triton for Pallas"
        return None

    @staticmethod
    def takes_chunks(mesh: Mesh) -> bool:
        return True

    @staticmethod
    def reads_any_span() -> bool:
        return True

    @property
    def attention(self) -> RowAttention:
        return functools.partial(fused_attention, interpret=not on_gpu(self.mesh))

    def segment(self, rows: Array, starts: Array, *, steps: int, span: int) -> _Segment:
        return _Segment(self, rows, starts)


class _Segment:
    """Every step writes its tokens. Rows that are not alive write nothing, and attend to nothing."""

    shared = True

    def __init__(self, cache: FusedCache, rows: Array, starts: Array) -> None:
        self._cache, self._rows, self._starts = cache, rows, starts
        self.state = (cache.k, cache.v)

    def caches(self, state: tuple[Any, Any]) -> tuple[Any, Any]:
        return state

    def attend(self, counts: Int[Array, "*B"], alive: Bool[Array, " B"]) -> Attend:
        by_shard = self._rows.shape
        first = self._starts + (counts.reshape(by_shard) if counts.ndim else counts)

        def attend(q: Array, k: Array, v: Array, layer: Any, window: int | None) -> tuple[Array, Any]:
            new = jnp.where(alive.reshape(by_shard), q.shape[1], 0)
            writes = not isinstance(self._cache.k, Codes) and q.shape[1] * q.shape[2] // k.shape[2] <= MOST_QUERIES
            on_shard = functools.partial(_decode_on_shard, interpret=not on_gpu(self._cache.mesh)) if writes else None
            return self._cache.write_and_attend(q, k, v, layer, window, self._rows, first, new, on_shard=on_shard)

        return attend

    def finish(self, state: tuple[Any, Any], counts: Int[Array, "D A"]) -> FusedCache:
        return dataclasses.replace(self._cache, k=state[0], v=state[1])

    def scratch(self, state: Any) -> None:
        return None


def _decode_on_shard(
    q: Float[Array, "A S N H"],
    new: tuple[Array, Array],
    cached: tuple[Array, Array],
    layer: Array,
    rows: Array,
    starts: Array,
    counts: Array,
    *,
    window: int | None,
    interpret: bool,
) -> tuple[Array, tuple[Array, Array]]:
    """See segments.ShardAttention."""
    flat, row_of_layer = of_layer(cached, layer, rows[0])
    out, (keys, values) = fused_decode(q, new, flat, row_of_layer, starts[0], counts[0], window, interpret=interpret)
    return out, (keys.reshape(cached[0].shape), values.reshape(cached[1].shape))
