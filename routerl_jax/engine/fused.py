"""The KV cache for GPUs: new keys and values are written in place, and kernels read each row as far as it is filled.

The kernels are flash attention (arXiv 2205.14135) in Pallas, compiled by Triton. `fused_attention` takes any number of new
tokens per row, which XLA has written before. `fused_decode` is for steps of decoding with few tokens per row, and for a cache
that is not quantised: it also writes the new tokens' keys and values, for which XLA has two kernels more.
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

from routerl_jax.engine.cache import Codes, Qtype
from routerl_jax.engine.segments import LOWEST, RowAttention, SegmentCache, of_layer
from routerl_jax.models.config import DecoderConfig
from routerl_jax.models.decoder import Attend
from routerl_jax.parallel.mesh import on_gpu

try:
    from jax.experimental.pallas import triton
except ImportError:  # deprecated since jax 0.11
    triton: Any = None

LEAST_SIDE = 16  # of a matrix that Triton multiplies
MOST_QUERIES = 64  # of a block
# of a block's keys, half of it beside many queries: two blocks of keys and values fit a small GPU's memory
_KEY_BYTES = 2**14
_PROGRAMS = 264  # that keep a GPU busy: two for each of an H100's 132 multiprocessors
_MOST_PARTS = 16  # a power of two
_LOG2_E = 1.4426950408889634

_Mixed = tuple[Any, Any, Any]  # weighted sum of values [Q, H], sum of weights [Q], highest score [Q]


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

    def attend(self, counts: Int[Array, "*B"], alive: Bool[Array, " B"]) -> Attend:
        by_shard = self._rows.shape
        first = self._starts + (counts.reshape(by_shard) if counts.ndim else counts)

        def attend(q: Array, k: Array, v: Array, layer: Any, window: int | None) -> tuple[Array, Any]:
            new = jnp.where(alive.reshape(by_shard), q.shape[1], 0)
            writes = not isinstance(self._cache.k, Codes) and q.shape[1] * q.shape[2] // k.shape[2] <= MOST_QUERIES
            on_shard = functools.partial(_decode_on_shard, interpret=not on_gpu(self._cache.mesh)) if writes else None
            return self._cache.write_and_attend(q, k, v, layer, window, self._rows, first, new, on_shard=on_shard)

        return attend

    def finish(self, state: tuple[Any, Any], counts: Int[Array, "D A"]) -> tuple[FusedCache, None]:
        return dataclasses.replace(self._cache, k=state[0], v=state[1]), None


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


# --- the kernels ---


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
    size = min(MOST_QUERIES, max(LEAST_SIDE, pl.next_power_of_2(queries)))
    keys = (_KEY_BYTES if size == LEAST_SIDE else _KEY_BYTES // 2) // bytes_per_key
    return size, max(LEAST_SIDE, min(128, keys))


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

    def step(i: Any, carry: _Mixed) -> _Mixed:
        begin = jnp.minimum(i * keys, length - keys)  # the last block overlaps the one before it
        key_positions = begin + jnp.arange(keys)
        visible = (key_positions[None] <= at[:, None]) & (key_positions >= i * keys)[None]
        visible = visible if window is None else visible & (at[:, None] - key_positions[None] < window)
        return _with_keys(carry, q, load(k_refs, begin), functools.partial(load, v_refs, begin), visible)

    last = jnp.minimum(lower + share, first + blocks)
    mixed, total, peak = jax.lax.fori_loop(lower, last, step, _nothing_mixed(size, width))
    if parts == 1:
        mixed = mixed / jnp.where(total > 0, total, 1)[:, None]
    out_ref[...] = mixed.astype(out_ref.dtype)
    total_ref[...] = total
    peak_ref[...] = peak


def _nothing_mixed(size: int, width: int) -> _Mixed:
    rowwise = jnp.zeros(size, jnp.float32)
    return jnp.zeros((size, width), jnp.float32), rowwise, rowwise + LOWEST


def _with_keys(carry: _Mixed, q: Any, keys: tuple[Any, Any], load_values: Any, visible: Any) -> _Mixed:
    """Online softmax: adds a block of keys and values, both with the scales of their codes or None."""
    mixed, total, peak = carry
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    codes, scale = keys
    score = triton.dot(q, codes, trans_b=True, precision=precision) * (q.shape[1] ** -0.5 * _LOG2_E)
    score = jnp.where(visible, score if scale is None else score * scale, -jnp.inf)
    higher = jnp.maximum(peak, score.max(axis=1))
    weight, rescale = jnp.exp2(score - higher[:, None]), jnp.exp2(peak - higher)
    total = total * rescale + weight.sum(axis=1)
    codes, scale = load_values()
    weight = (weight if scale is None else weight * scale).astype(q.dtype)
    return mixed * rescale[:, None] + triton.dot(weight, codes, precision=precision), total, higher


def fused_decode(
    q: Float[Array, "A S N H"],
    new: tuple[Float[Array, "A S K H"], Float[Array, "A S K H"]],
    cached: tuple[Float[Array, "R T K H"], Float[Array, "R T K H"]],
    rows: Int[Array, " A"],
    starts: Int[Array, " A"],
    counts: Int[Array, " A"],
    window: int | None,
    *,
    keys: int | None = None,
    parts: int | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "A S N H"], tuple[Array, Array]]:
    """Writes the keys and values of a few new tokens, and attends to all tokens of their rows up to each query.

    A program takes the queries that share a key head, and a part of the keys that these see. The last part also has the new
    tokens. A second kernel adds the parts up.

    Args:
      new: keys and values of the new tokens.
      cached: those of R rows with T positions, written in place.
      rows, starts, counts: of each entry its row, which is its alone, the position of its first new token, and its number of
        new tokens: S, or 0 to write nothing and attend to nothing.
      window: number of tokens that a query sees, itself included; None: all.
      keys: keys of a block, a power of two from 16 on; None: by their size.
      parts: programs that share a row's keys, a power of two; None: by the number of rows.
      interpret: run the kernels as plain XLA.

    Returns:
      The output, 0 for entries without tokens, and the keys and values.
    """
    entries, steps, heads, width = q.shape
    length, kv_heads = cached[0].shape[1:3]
    group = heads // kv_heads
    size = max(LEAST_SIDE, pl.next_power_of_2(steps * group))
    keys = keys or max(LEAST_SIDE, min(128, _KEY_BYTES // (width * q.dtype.itemsize)))
    keys = min(keys, 1 << (length.bit_length() - 1))
    parts = parts or 1 << (min(_MOST_PARTS, max(1, _PROGRAMS // (entries * kv_heads))).bit_length() - 1)
    tokens = jnp.concatenate([q, *new], axis=2)  # one array, which XLA makes in one kernel
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    of_part = (entries, kv_heads, parts, size)
    mixed, total, peak, keys_written, values_written = pl.pallas_call(
        functools.partial(_decode_kernel, parts=parts, group=group, keys=keys, window=window),
        grid=(parts, kv_heads, entries),
        in_specs=[anywhere] * 6,
        out_specs=[
            pl.BlockSpec((None, None, None, size, width), lambda part, head, entry: (entry, head, part, 0, 0)),
            *[pl.BlockSpec((None, None, None, size), lambda part, head, entry: (entry, head, part, 0))] * 2,
            *[anywhere] * 2,
        ],
        out_shape=[
            jax.ShapeDtypeStruct((*of_part, width), jnp.float32),
            *[jax.ShapeDtypeStruct(of_part, jnp.float32)] * 2,
            *[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in cached],
        ],
        input_output_aliases={4: 3, 5: 4},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="fused_decode",
    )(tokens, rows, starts, counts, *cached)

    def part_index(query: Array, entry: Array) -> tuple[Any, ...]:
        return entry, query % heads // group, 0, query // heads * group + query % group

    out = pl.pallas_call(
        _merge_kernel,
        grid=(steps * heads, entries),
        in_specs=[
            pl.BlockSpec((None, None, parts, None, width), lambda *at: (*part_index(*at), 0)),
            *[pl.BlockSpec((None, None, parts, None), part_index)] * 2,
        ],
        out_specs=pl.BlockSpec((None, None, None, width), lambda i, entry: (entry, i // heads, i % heads, 0)),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="fused_decode_merge",
    )(mixed, total, peak)
    return out, (keys_written, values_written)


def _decode_kernel(
    tokens,
    rows,
    starts,
    counts,
    k_ref,
    v_ref,
    out_ref,
    total_ref,
    peak_ref,
    new_k_ref,
    new_v_ref,
    *,
    parts: int,
    group: int,
    keys: int,
    window: int | None,
) -> None:
    """The queries [Q, H] of one key head over one part of the keys."""
    part, head, entry = (pl.program_id(i) for i in range(3))
    size, width = out_ref.shape
    steps, (length, kv_heads) = tokens.shape[1], k_ref.shape[1:3]
    heads = group * kv_heads
    row, start, count = rows[entry], starts[entry], counts[entry]
    query = jnp.minimum(jnp.arange(size), steps * group - 1)
    of_step, channels = query // group, jnp.arange(width)[None]

    def load_tokens(step: Any, of_head: Any) -> Any:
        return tokens[jnp.full_like(channels, entry), step[:, None], of_head, channels]

    q = load_tokens(of_step, (head * group + query % group)[:, None])
    at = start + of_step
    first = 0 if window is None else jnp.maximum(start - window + 1, 0) // keys
    blocks = jnp.where(count > 0, pl.cdiv(start, keys) - first, 0)
    share = pl.cdiv(jnp.maximum(blocks, 0), parts)
    lower = first + part * share

    def step(i: Any, carry: _Mixed) -> _Mixed:
        begin = jnp.minimum(i * keys, length - keys)  # the last block overlaps the one before it
        key_positions = begin + jnp.arange(keys)
        visible = ((key_positions < start) & (key_positions >= i * keys))[None]
        visible = visible if window is None else visible & (at[:, None] - key_positions[None] < window)

        def load(ref: Any) -> tuple[Any, None]:
            return ref[row, pl.ds(begin, keys), head, :], None

        return _with_keys(carry, q, load(k_ref), lambda: load(v_ref), visible)

    def with_new(carry: _Mixed) -> _Mixed:
        new = jnp.arange(max(LEAST_SIDE, pl.next_power_of_2(steps)))
        k, v = (
            load_tokens(jnp.minimum(new, steps - 1), jnp.full_like(channels, i + head))
            for i in (heads, heads + kv_heads)
        )
        visible = (new[None] <= of_step[:, None]) & (new < count)[None]
        visible = visible if window is None else visible & (of_step[:, None] - new[None] < window)
        return _with_keys(carry, q, (k, None), lambda: (v, None), visible)

    @pl.when((part == parts - 1) & (count > 0))
    def write() -> None:
        for i in range(steps):
            new_k_ref[row, start + i, head, :] = tokens[entry, i, heads + head, :]
            new_v_ref[row, start + i, head, :] = tokens[entry, i, heads + kv_heads + head, :]

    last = jnp.minimum(lower + share, first + blocks)
    carry = jax.lax.fori_loop(lower, last, step, _nothing_mixed(size, width))
    carry = jax.lax.cond(part == parts - 1, with_new, lambda carry: carry, carry)
    out_ref[...], total_ref[...], peak_ref[...] = carry


def _merge_kernel(mixed_ref, total_ref, peak_ref, out_ref) -> None:
    """One query's parts: sums of values [P, H], sums of weights [P], highest scores [P]."""
    weight = jnp.exp2(peak_ref[...] - peak_ref[...].max())
    total = (total_ref[...] * weight).sum()
    out = (mixed_ref[...] * weight[:, None]).sum(axis=0) / jnp.where(total > 0, total, 1)
    out_ref[...] = out.astype(out_ref.dtype)
