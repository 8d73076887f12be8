"""The KV cache for TPUs: new keys and values are written in place, and attention is JAX's ragged paged attention kernel.

The kernel (jax.experimental.pallas.ops.tpu.ragged_paged_attention) reads each row only as far as it is filled, and takes
any number of new tokens per row. So decoding and extending are one function here. A row is a contiguous range of positions, so
its page table is computed arithmetically.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import get_min_heads_per_blk, ragged_paged_attention
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from routerl_jax.engine.cache import Qtype, copy_rows, heads_axis, stored_spec
from routerl_jax.models.config import DecoderConfig
from routerl_jax.models.decoder import Attend
from routerl_jax.parallel.mesh import BATCH_AXES

_LANES = 128  # the kernel's head width must be a multiple of this
# More pages per row than this spill the kernel's scalar registers (according to its tuned_block_sizes.py). Rows are contiguous,
# so long pages cost nothing.
_MOST_PAGES, _LEAST_PAGE = 16, 128
_BLOCK = 512  # cached positions per step of the kernel's loop
_DECODE_QUERIES = 8  # per block; a decoding row fills one of them, but fewer than 8 don't fill the matrix unit's rows
# queries x heads per block of an extension: fills the matrix unit; compile time grows with it
_EXTEND_QUERY_HEADS = 256
# bytes; the default of 16 MiB is less than 32 heads in float32 take. v5e and v5p have more than this
_VMEM = 32 * 2**20


@functools.partial(jax.tree_util.register_dataclass, data_fields=["pages"], meta_fields=["config", "mesh"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedCache:
    """One array for all L layers, so that a scan over layers uses one compiled kernel. See cache.KVCache.

    C combined heads: key and value of each kv head are adjacent, as the kernel requires.
    """

    pages: Float[Array, "D L R T C W"]
    config: DecoderConfig
    mesh: Mesh

    @classmethod
    def abstract(
        cls, config: DecoderConfig, mesh: Mesh, shards: int, rows: int, length: int, dtype: Any, qtype: Qtype = ""
    ) -> Self:
        assert not qtype, "unsupported"
        page = page_length(length)
        # Narrower heads are padded with zeros, which change no score. On TPUs this costs no memory, because an array's last
        # dimension always takes whole lanes.
        width = -(-config.head_dim // _LANES) * _LANES
        shape = (shards, config.layers, rows, -(-length // page) * page, 2 * config.kv_heads, width)
        pages: Any = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, stored_spec(config, mesh)))
        return cls(pages=pages, config=config, mesh=mesh)

    @staticmethod
    def unsupported(config: DecoderConfig, mesh: Mesh, dtype: Any, qtype: Qtype = "") -> str | None:
        """Why the kernel does not support this model on this mesh; None if it does."""
        if qtype:
            return f"it has no scale per token, which a cache of {qtype} needs"
        shards = 1 if heads_axis(config, mesh) is None else mesh.shape["tensor"]
        try:
            get_min_heads_per_blk(
                config.heads // shards, 2 * config.kv_heads // shards, jnp.dtype(dtype), jnp.dtype(dtype)
            )
        except ValueError as error:
            return str(error)
        return None

    @staticmethod
    def takes_chunks(mesh: Mesh) -> bool:
        return True  # all new keys are in their places before any query attends

    @staticmethod
    def reads_any_span() -> bool:
        return True

    @property
    def rows(self) -> int:
        return self.pages.shape[2]

    @property
    def length(self) -> int:
        return self.pages.shape[3]

    def extension(self, rows: Array, starts: Array, counts: Array, *, steps: int, span: int) -> _Extension:
        return _Extension(self, rows, starts, counts, steps)

    def fork(self, sources: Array, targets: Array, *, span: int) -> Self:
        stored = stored_spec(self.config, self.mesh)
        return dataclasses.replace(
            self, pages=copy_rows(self.pages, sources, targets, span=span, mesh=self.mesh, stored=stored)
        )

    def segment(self, rows: Array, starts: Array, *, steps: int, span: int) -> _Segment:
        return _Segment(self, rows, starts)

    def write_and_attend(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K H"],
        layer: tuple[Int[Array, ""] | int, Float[Array, "D L R T C W"]],
        window: int | None,
        rows: Int[Array, " B"],
        positions: Int[Array, "B S"],
        lengths: Int[Array, " B"],
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "D L R T C W"]]:
        """Writes new keys and values of one layer, then attends to all tokens of the rows.

        Args:
          layer: the layer's index, and the pages of all layers.
          window: number of tokens that a query sees, itself included; None: all.
          rows: local row of each batch entry; `self.rows` for padding.
          positions: position of each new token; `self.length` drops the token.
          lengths: tokens of each row, new ones included; the last query of a row is its newest token.

        Returns:
          The attention output (undefined for queries without a position), and the pages.
        """
        i, pages = layer
        batch, steps, _, head_dim = q.shape
        padding = [(0, 0)] * 3 + [(0, pages.shape[-1] - head_dim)]
        q = jnp.pad(q, padding)
        new = jnp.pad(jnp.stack([k, v], axis=3).reshape(batch, steps, -1, head_dim), padding)
        stored = stored_spec(self.config, self.mesh)
        tokens = PartitionSpec(BATCH_AXES, None, heads_axis(self.config, self.mesh))
        per_row = PartitionSpec(BATCH_AXES)
        run = jax.shard_map(
            functools.partial(_on_shard, scale=head_dim**-0.5, window=window),
            mesh=self.mesh,
            in_specs=(tokens, tokens, stored, PartitionSpec(), per_row, per_row, per_row),
            out_specs=(tokens, stored),
            check_vma=False,  # the kernel does not declare over which axes its result varies
        )
        out, pages = run(q, new, pages, jnp.asarray(i, jnp.int32), rows, positions, lengths)
        return out[..., :head_dim], pages


class _Extension:
    """New tokens are padded at the front, because for the kernel a row's last queries are its newest tokens."""

    shared = True

    def __init__(self, cache: PagedCache, rows: Array, starts: Array, counts: Array, steps: int) -> None:
        self._cache, self._rows = cache, rows.reshape(-1)
        self._padding = steps - counts
        before = starts[..., None] - self._padding[..., None] + jnp.arange(steps)
        padded = jnp.arange(steps) < self._padding[..., None]
        self._positions = jnp.where(padded, cache.length, before).reshape(-1, steps)
        self._lengths = jnp.maximum(starts + counts, 1).reshape(-1)
        self.caches = cache.pages

    def align(self, x: Int[Array, "D A S ..."]) -> Int[Array, "B S ..."]:
        moved = jax.vmap(jax.vmap(functools.partial(jnp.roll, axis=0)))(x, self._padding)
        return moved.reshape(-1, *x.shape[2:])

    def restore(self, x: Int[Array, "B S ..."]) -> Int[Array, "D A S ..."]:
        by_row = x.reshape(*self._padding.shape, *x.shape[1:])
        return jax.vmap(jax.vmap(functools.partial(jnp.roll, axis=0)))(by_row, -self._padding)

    def attend(self, q: Array, k: Array, v: Array, layer: Any, window: int | None) -> tuple[Array, Any]:
        return self._cache.write_and_attend(q, k, v, layer, window, self._rows, self._positions, self._lengths)

    def finish(self, caches: Array) -> PagedCache:
        return dataclasses.replace(self._cache, pages=caches)


class _Segment:
    """Every step writes its tokens. Rows that are not alive write nothing, and attend to one position only."""

    shared = True

    def __init__(self, cache: PagedCache, rows: Array, starts: Array) -> None:
        self._cache, self._rows, self._starts = cache, rows.reshape(-1), starts.reshape(-1)
        self.state = cache.pages

    def attend(self, counts: Int[Array, "*B"], alive: Bool[Array, " B"]) -> Attend:
        first = self._starts + counts

        def attend(q: Array, k: Array, v: Array, layer: tuple, window: int | None) -> tuple[Array, Array]:
            width = q.shape[1]
            positions = jnp.where(alive[:, None], first[:, None] + jnp.arange(width), self._cache.length)
            lengths = jnp.where(alive, first + width, 1)
            return self._cache.write_and_attend(q, k, v, layer, window, self._rows, positions, lengths)

        return attend

    def finish(self, state: Array, counts: Int[Array, "D A"]) -> tuple[PagedCache, None]:
        return dataclasses.replace(self._cache, pages=state), None


def page_length(length: int) -> int:
    """Positions per page for rows of `length`, a power of two."""
    page = _LEAST_PAGE
    while page * _MOST_PAGES < length:
        page *= 2
    return page


def _on_shard(
    q: Array,
    new: Array,
    pages: Array,
    layer: Array,
    rows: Array,
    positions: Array,
    lengths: Array,
    *,
    scale: float,
    window: int | None,
) -> tuple[Array, Array]:
    """`write_and_attend` on one device: q [A, S, N, W], new [A, S, C, W], pages [1, L, R, T, C, W], rows [A]."""
    active, steps, heads, width = q.shape
    _, layers, stored_rows, length, combined, _ = pages.shape
    pages = pages.at[0, layer, rows[:, None], positions].set(new, mode="drop")
    page = page_length(length)
    per_row = length // page
    stretch = layer * stored_rows + jnp.minimum(rows, stored_rows - 1)
    table = stretch[:, None] * per_row + jnp.arange(per_row, dtype=jnp.int32)
    out = ragged_paged_attention(
        q.reshape(active * steps, heads, width),
        pages.reshape(layers * stored_rows * per_row, page, combined, width),
        lengths,
        table,
        jnp.arange(active + 1, dtype=jnp.int32) * steps,
        jnp.array([active], jnp.int32),
        sm_scale=scale,
        sliding_window=window,
        # Passed explicitly, because the kernel would choose them for this process's device, not for the target device.
        num_kv_pages_per_block=min(max(_BLOCK // page, 1), per_row),
        num_queries_per_block=_queries_per_block(active, steps, heads),
        vmem_limit_bytes=_VMEM,
    )
    return out.reshape(q.shape), pages


def _queries_per_block(rows: int, steps: int, heads: int) -> int:
    """The block size in queries: at most the number of queries; a power of two if rows get more than one token."""
    if steps == 1:
        return min(_DECODE_QUERIES, rows)
    most = min(max(_EXTEND_QUERY_HEADS // heads, _DECODE_QUERIES), rows * steps)
    return 1 << (most.bit_length() - 1)
