"""The KV cache for GPUs: new keys and values are written in place, and a kernel reads each row as far as it is filled.

The kernel takes any number of new tokens per row, so decoding and extending are one function, as on TPUs (pages.py). It is
flash attention (arXiv 2205.14135) in Pallas, compiled by Triton.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from routerl_jax.generation.attention import LOWEST
from routerl_jax.generation.quantized import Qtype
from routerl_jax.generation.segments import RowAttention, SegmentCache
from routerl_jax.models.config import DecoderConfig
from routerl_jax.models.decoder import Attend
from routerl_jax.parallel.mesh import on_gpu

try:
    from jax.experimental.pallas import triton
except ImportError:  # deprecated since jax 0.11
    triton: Any = None

_LEAST_SIDE = 16  # of a matrix that Triton multiplies
_MOST_QUERIES = 64  # of a block
_KEY_BYTES = (
    2**14
)  # of a block's keys, half of it beside many queries: two blocks of keys and values fit a small GPU's memory
_PROGRAMS = 264  # that keep a GPU busy: two for each of an H100's 132 multiprocessors
_MOST_PARTS = 16
_LOG2_E = 1.4426950408889634


@functools.partial(jax.tree_util.register_dataclass, data_fields=["k", "v"], meta_fields=["config", "mesh"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedCache(SegmentCache):
    """On other devices than GPUs the kernel is interpreted, for tests. See cache.KVCache."""

    @classmethod
    def abstract(
        cls, config: DecoderConfig, mesh: Mesh, shards: int, rows: int, length: int, dtype: Any, qtype: Qtype = ""
    ) -> Self:
        return super().abstract(config, mesh, shards, rows, max(length, _LEAST_SIDE), dtype, qtype)

    @staticmethod
    def unsupported(config: DecoderConfig, mesh: Mesh) -> str | None:
        """Why the kernel does not support this model on these devices; None if it does."""
        width = config.head_dim
        if width < _LEAST_SIDE or width & (width - 1):
            return f"heads of {width} channels; it takes powers of two from {_LEAST_SIDE} on"
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
            return self._cache.write_and_attend(q, k, v, layer, window, self._rows, first, new)

        return attend

    def finish(self, state: tuple[Any, Any], counts: Int[Array, "D A"]) -> FusedCache:
        return dataclasses.replace(self._cache, k=state[0], v=state[1])


def fused_attention(
    q: Float[Array, "A S N H"],
    layer: tuple[Any, Any],
    rows: Int[Array, " A"],
    starts: Int[Array, " A"],
    counts: Int[Array, " A"],
    window: int | None,
    *,
    blocks: tuple[int, int] | None = None,
    interpret: bool = False,
) -> Float[Array, "A S N H"]:
    """Attention of new tokens of rows to all tokens of their rows up to each query. For the GPUs of a shard.

    A program takes a block of the queries that share a key head, and goes through the keys that these see. If there are too few
    blocks to keep a GPU busy, the keys of each are divided among several programs.

    Args:
      layer: keys and values of R rows with T positions, [R, T, K, H]; the new tokens' own are among them.
      rows, starts, counts: of each entry its row, the position of its first token, and its number of tokens.
      window: number of tokens that a query sees, itself included; None: all.
      blocks: number of queries and of keys in a block, powers of two from 16 on; None: by the sizes.
      interpret: run the kernel as plain XLA.

    Returns:
      The output; undefined behind an entry's last token.
    """
    entries, steps, heads, width = q.shape
    length, kv_heads = jax.tree.leaves(layer)[0].shape[1:3]
    group = heads // kv_heads
    # one key head's queries, ordered by step, so that a block has few steps
    queries = q.reshape(entries, steps, kv_heads, group, width).transpose(0, 2, 1, 3, 4)
    queries = queries.reshape(entries, kv_heads, steps * group, width)
    size, keys = blocks or _block_sizes(steps * group, width * q.dtype.itemsize)
    keys = min(keys, 1 << (length.bit_length() - 1))
    count = pl.cdiv(steps * group, size)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, count * size - steps * group), (0, 0)))
    parts = min(_MOST_PARTS, max(1, _PROGRAMS // (entries * kv_heads * count)))
    of_part = (parts, entries, kv_heads, count * size)

    def index(i: Array, head: Array, entry: Array) -> tuple[Any, ...]:
        return entry, head, i // parts, 0

    def part_index(i: Array, head: Array, entry: Array) -> tuple[Any, ...]:
        return i % parts, entry, head, i // parts

    mixed, total, peak = pl.pallas_call(
        functools.partial(_kernel, parts=parts, group=group, keys=keys, window=window),
        grid=(count * parts, kv_heads, entries),
        in_specs=[
            pl.BlockSpec((None, None, size, width), index),
            *[pl.BlockSpec(memory_space=pl.ANY)] * (3 + len(jax.tree.leaves(layer))),
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, size, width), lambda *at: (*part_index(*at), 0)),
            pl.BlockSpec((None, None, None, size), part_index),
            pl.BlockSpec((None, None, None, size), part_index),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((*of_part, width), q.dtype if parts == 1 else jnp.float32),
            jax.ShapeDtypeStruct(of_part, jnp.float32),
            jax.ShapeDtypeStruct(of_part, jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=8 if size > 64 else 4, num_stages=2),
        interpret=interpret,
        name="fused_attention",
    )(queries, rows, starts, counts, *jax.tree.leaves(layer))
    if parts == 1:
        out = mixed[0]
    else:
        weight = jnp.exp2(peak - peak.max(axis=0))
        total = (total * weight).sum(axis=0)
        out = (mixed * weight[..., None]).sum(axis=0) / jnp.where(total > 0, total, 1)[..., None]
    out = out[:, :, : steps * group].reshape(entries, kv_heads, steps, group, width).transpose(0, 2, 1, 3, 4)
    return out.reshape(q.shape).astype(q.dtype)


def _block_sizes(queries: int, bytes_per_key: int) -> tuple[int, int]:
    """Queries and keys of a block. Measured on an H200 (benchmarks/fused_attention.py)."""
    size = min(_MOST_QUERIES, max(_LEAST_SIDE, pl.next_power_of_2(queries)))
    keys = (_KEY_BYTES if size == _LEAST_SIDE else _KEY_BYTES // 2) // bytes_per_key
    return size, max(_LEAST_SIDE, min(128, keys))


def _kernel(q_ref, rows, starts, counts, *refs, parts: int, group: int, keys: int, window: int | None) -> None:
    """One block of queries [Q, H] over the keys of one part."""
    *layer, out_ref, total_ref, peak_ref = refs
    k_refs, v_refs = layer[: len(layer) // 2], layer[len(layer) // 2 :]
    head, entry = pl.program_id(1), pl.program_id(2)
    block, part = pl.program_id(0) // parts, pl.program_id(0) % parts
    size, width = q_ref.shape
    length = k_refs[0].shape[1]
    row, start, count = rows[entry], starts[entry], counts[entry]
    q = q_ref[...]
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def positions(i: Any) -> Any:
        return start + (block * size + i) // group

    at = positions(jnp.arange(size))
    end = jnp.where(count > 0, jnp.minimum(start + count, positions(size - 1) + 1), 0)
    end = jnp.where(positions(0) < start + count, end, 0)  # a block of padding
    first = 0 if window is None else jnp.maximum(positions(0) - window + 1, 0) // keys
    blocks = pl.cdiv(end, keys) - first
    share = pl.cdiv(jnp.maximum(blocks, 0), parts)
    lower = first + part * share

    def load(refs: Any, begin: Any) -> tuple[Any, Any]:
        """Codes in the queries' dtype, and their scales."""
        codes = refs[0][row, pl.ds(begin, keys), head, :].astype(q.dtype)
        return codes, refs[1][row, pl.ds(begin, keys), head, 0].astype(jnp.float32)[None] if len(refs) > 1 else None

    def step(i: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        mixed, total, peak = carry
        begin = jnp.minimum(i * keys, length - keys)  # the last block overlaps the one before it
        codes, scale = load(k_refs, begin)
        score = triton.dot(q, codes, trans_b=True, precision=precision) * (width**-0.5 * _LOG2_E)
        score = score if scale is None else score * scale
        key_positions = begin + jnp.arange(keys)
        visible = (key_positions[None] <= at[:, None]) & (key_positions >= i * keys)[None]
        visible = visible if window is None else visible & (at[:, None] - key_positions[None] < window)
        score = jnp.where(visible, score, -jnp.inf)
        higher = jnp.maximum(peak, score.max(axis=1))
        weight, rescale = jnp.exp2(score - higher[:, None]), jnp.exp2(peak - higher)
        total = total * rescale + weight.sum(axis=1)
        codes, scale = load(v_refs, begin)
        weight = (weight if scale is None else weight * scale).astype(q.dtype)
        return mixed * rescale[:, None] + triton.dot(weight, codes, precision=precision), total, higher

    rowwise = jnp.zeros(size, jnp.float32)
    carry = (jnp.zeros((size, width), jnp.float32), rowwise, rowwise + LOWEST)
    mixed, total, peak = jax.lax.fori_loop(lower, jnp.minimum(lower + share, first + blocks), step, carry)
    if parts == 1:
        mixed = mixed / jnp.where(total > 0, total, 1)[:, None]
    out_ref[...] = mixed.astype(out_ref.dtype)
    total_ref[...] = total
    peak_ref[...] = peak
