"""Self-attention over whole sequences. One function with one contract has several implementations.

Attention against a KV cache belongs to the engine (engine/segments.py).
Dimensions: B rows, T time, N query heads, K key/value heads, H head width.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from routerl_jax.parallel.mesh import BATCH_AXES, batch_shards

Kind = Literal["xla", "splash", "cudnn"]

# XLA: queries and keys of a tile. On CPUs a tile's scores stay in the cache; rows of at most _SHORT take the smaller tiles.
_TILE, _CPU_TILES, _SHORT = 512, (64, 128), 512
# Splash: tiles of queries and keys. They must divide the row; its lanes are 128 wide.
_SPLASH_BLOCKS, _LANES = (512, 256, 128), 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """The implementation of self-attention in a program. It depends on the devices that the program is compiled for.

    Attributes:
      kind: `splash` (a Pallas kernel for TPUs), `cudnn` (GPUs), `xla` (anywhere). A call that a kernel can't compute exactly
        uses `xla`.
      mesh: the program's devices. Rows are split over its batch axes, and heads over `tensor`. The partitioner can't see into a
        kernel, so the kernel runs under shard_map; therefore splash needs the mesh.
      interpret: run splash in Pallas's interpreter (tests on a CPU).
    """

    kind: Kind = "xla"
    mesh: Mesh | None = None
    interpret: bool = False

    def __post_init__(self) -> None:
        if self.kind == "splash" and self.mesh is None:
            raise ValueError("splash attention runs under shard_map: give the mesh")

    @classmethod
    def on(cls, mesh: Mesh) -> Attention:
        """The best implementation for the platform of a mesh's devices (which need not be attached: AOT topologies)."""
        kinds: dict[str, Kind] = {"tpu": "splash", "gpu": "cudnn"}
        return cls(kind=kinds.get(mesh.devices.flat[0].platform, "xla"), mesh=mesh)

    @classmethod
    def for_weight(cls, weight: Array) -> Attention:
        """The best implementation for the devices of a weight; `xla` for a traced weight, whose devices are unknown."""
        if isinstance(weight, Tracer) or not isinstance(weight.sharding, NamedSharding):
            return cls()
        mesh = weight.sharding.mesh
        return cls.on(mesh) if isinstance(mesh, Mesh) else cls()


def self_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    segment_ends: Int[Array, "B T"] | None = None,
    causal: bool = True,
    window: int | None = None,
    attention: Attention = Attention(),
) -> Float[Array, "B T N H"]:
    """Grouped-query softmax attention, softmax in float32, scores scaled by H**-0.5.

    Args:
      segment_ids: tokens see only tokens of their own segment. 0 is padding; its output is meaningless but finite. None: every
        row is one segment.
      segment_ends: makes segments a tree. A query sees the keys whose segment contains its own: id[k] <= id[q] < end[k]. None:
        only its own segment, as with id + 1. (Splash has no such mask, so `xla` computes it.)
      causal: a token sees itself and the tokens before it; otherwise all of its segment.
      window: a token sees only the last `window` indices of these, itself included.
      attention: the implementation.

    Raises:
      ValueError: a window is below 1, or is given without `causal` or with `segment_ends`. Without them the indices of a row
        are no distance between tokens.
    """
    if window is not None and segment_ends is not None:
        raise ValueError("a window can't be counted along a row in which segments form a tree (segment_ends)")
    if window is not None and (window < 1 or not causal):
        raise ValueError(f"window={window} must be at least 1 and needs causal=True")
    if window is not None and window >= q.shape[1]:
        window = None
    if attention.kind == "splash" and segment_ends is None:
        return _splash(q, k, v, segment_ids, causal, window, attention)
    if attention.kind == "cudnn" and _cudnn_can(q, segment_ids):
        return _cudnn(q, k, v, segment_ids, causal, window, segment_ends)
    return _xla(q, k, v, segment_ids, causal, window, segment_ends, attention.mesh)


def _cudnn_can(q: Array, segment_ids: Array | None) -> bool:
    """Whether cuDNN can compute this: 16-bit heads of a supported width; masks only with rows of even length."""
    masked = segment_ids is not None
    return (
        q.dtype in (jnp.bfloat16, jnp.float16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 128
        and not (masked and q.shape[1] % 2)
    )


def _cudnn(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None,
    causal: bool,
    window: int | None,
    segment_ends: Array | None,
) -> Float[Array, "B T N H"]:
    """Flash attention. Segments are a mask [B, 1, T, T] that cuDNN adds to the scores of all heads. It is one 16-bit mask for
    all layers, instead of 32-bit scores of every head and layer."""
    attend = functools.partial(jax.nn.dot_product_attention, q, k, v, is_causal=causal, implementation="cudnn")
    if segment_ids is None:
        # cuDNN's window leaves the query itself out.
        return attend(local_window_size=None if window is None else (window - 1, 0))
    return attend(mask=_visible(segment_ids, causal, window, segment_ends)[:, None])


def _xla(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array | None,
    causal: bool,
    window: int | None,
    segment_ends: Array | None,
    mesh: Mesh | None,
) -> Float[Array, "B T N H"]:
    """Tiles in plain XLA. Each device leaves out the tiles that its own rows don't need."""
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    most = _CPU_TILES[q.shape[1] > _SHORT] if platform == "cpu" else _TILE
    tiling = Tiling.of(q.shape[1], most, causal, window)

    def local(q: Array, k: Array, v: Array, ids: Array | None = None, ends: Array | None = None) -> Array:
        return tiled_attention(q, k, v, ids, ends, tiling)

    if mesh is None or mesh.size == 1:
        return local(q, k, v, segment_ids, segment_ends)
    return _by_device(local, mesh, q, k, v, segment_ids, segment_ends)


def _visible(
    segment_ids: Int[Array, "B T"], causal: bool, window: int | None, segment_ends: Array | None
) -> Bool[Array, "B Q S"]:
    """True where a query sees a key."""
    index = jnp.arange(segment_ids.shape[1])
    distance = index[:, None] - index
    visible = jnp.ones(distance.shape, bool) if not causal else distance >= 0
    if window is not None:
        visible &= distance < window
    query_segments, key_segments = segment_ids[:, :, None], segment_ids[:, None]
    if segment_ends is None:
        return visible & (query_segments == key_segments)
    return visible & (key_segments <= query_segments) & (query_segments < segment_ends[:, None])


def _splash(
    q: Array, k: Array, v: Array, segment_ids: Array | None, causal: bool, window: int | None, attention: Attention
) -> Float[Array, "B T N H"]:
    """The sparse flash attention kernel that ships with JAX, on each device's own rows and heads.

    Heads may have any width (64, 80, 96, 128 and 256 compile for v5e with jax 0.10.2). Rows are padded to lanes.
    """
    assert attention.mesh is not None
    length, width = q.shape[1], q.shape[-1]
    padding = -length % _LANES
    if padding:  # as segment 0: padding sees padding, so that no query is left without a key
        ids = jnp.ones(q.shape[:2], jnp.int32) if segment_ids is None else segment_ids
        segment_ids = jnp.pad(ids, ((0, 0), (0, padding)))
        q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q, k, v))

    def local(q: Array, k: Array, v: Array, ids: Array | None = None) -> Array:
        kernel = _splash_kernel(q.shape[1], q.shape[2], causal, window, attention.interpret)
        major = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
        return jax.vmap(kernel)(*major, ids).transpose(0, 2, 1, 3)

    return _by_device(local, attention.mesh, q * width**-0.5, k, v, segment_ids)[:, :length]


def _by_device(
    local: Callable[..., Array], mesh: Mesh, q: Array, k: Array, v: Array, *of_tokens: Array | None
) -> Float[Array, "B T N H"]:
    """`local` on each device's own rows and heads: (q, k, v, arrays [B, T] about tokens). None at the end is left out."""
    count, heads = mesh.shape["tensor"], q.shape[2]
    split = heads % count == 0  # else every device of `tensor` computes all heads
    if split and k.shape[2] % count:  # fewer key/value heads than devices: each gets a copy of those that it needs
        copies = count // math.gcd(k.shape[2], count)
        k, v = jnp.repeat(k, copies, axis=2), jnp.repeat(v, copies, axis=2)
    rows = BATCH_AXES if q.shape[0] % batch_shards(mesh) == 0 else None
    spec = PartitionSpec(rows, None, "tensor" if split else None, None)
    tokens = [array for array in of_tokens if array is not None]
    specs = (spec, spec, spec, *[PartitionSpec(rows, None)] * len(tokens))
    # check_vma needs to know how outputs vary over the mesh, and kernels don't declare it.
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False)
    return mapped(q, k, v, *tokens)


def _splash_kernel(length: int, heads: int, causal: bool, window: int | None, interpret: bool) -> Callable[..., Array]:
    """(q [N, T, H], k, v [K, T, H], segment ids [T]) -> [N, T, H]. Blocks outside the mask are not computed."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = (length, length)
    if not causal:
        mask = masks.FullMask(shape)
    elif window is None:
        mask = masks.CausalMask(shape)
    else:
        mask = masks.LocalMask(shape, (window - 1, 0), 0)
    block = next(size for size in _SPLASH_BLOCKS if length % size == 0)
    sizes = kernels.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([mask] * heads), block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret
    )

    def run(q: Array, k: Array, v: Array, ids: Array | None) -> Array:
        out = kernel(q, k, v, None if ids is None else kernels.SegmentIds(q=ids, kv=ids))
        assert isinstance(out, jax.Array)  # no residuals were asked for
        return out

    return run


# --- `xla`: exact attention in tiles ---------------------------------------------------------------------------------------
#
# FlashAttention-2 (Dao, 2023, arXiv 2307.08691, algorithms 1 and 2) in plain XLA, on any device. Scores exist for one tile of
# queries and keys at a time, also in the backward pass, which computes them again from the logarithm of each query's sum. So
# memory grows with the length of a row, not with its square. Tiles in which no query sees a key are left out: above the
# diagonal, outside a window, and between segments of a packed row.
#
# Dimensions: B rows, T time, K key/value heads, G query heads that share one, H head width; a tile has S keys and Q queries.
# Scores are [.., S, Q]: reductions over keys are then sums of whole vectors of queries, which CPUs do several at a time.

# Up to so many tiles of queries, the loop over them is unrolled; then the compiler's costs know the diagonal.
_UNROLLED = 8
_LEAST = float(jnp.finfo(jnp.float32).min)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """Static facts of a call.

    Attributes:
      size: queries of a tile, and keys.
      causal: a query sees no later key.
      window: a query sees the last `window` keys, its own included.
    """

    size: int
    causal: bool
    window: int | None

    @classmethod
    def of(cls, length: int, most: int, causal: bool, window: int | None) -> Tiling:
        """The fewest tiles of at most `most` that hold a row, all as small as possible."""
        return cls(size=-(-length // -(-length // most)), causal=causal, window=window)


def tiled_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None,
    segment_ends: Int[Array, "B T"] | None,
    tiling: Tiling,
) -> Float[Array, "B T N H"]:
    """`self_attention`, in tiles. Rows are padded to whole tiles."""
    batch, length = q.shape[:2]
    spare = -length % tiling.size
    if spare and segment_ids is None:
        segment_ids = jnp.ones((batch, length), jnp.int32)
    if segment_ids is None:
        return _attend(tiling, q, k, v, None, None)
    segment_ends = segment_ids + 1 if segment_ends is None else segment_ends
    q, k, v, segment_ids = (_padded(x, spare, 0) for x in (q, k, v, segment_ids))
    out: Array = _attend(tiling, q, k, v, segment_ids, _padded(segment_ends, spare, 1))
    return out[:, :length]


def _padded(x: Array, spare: int, value: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, spare), *[(0, 0)] * (x.ndim - 2)), constant_values=value) if spare else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(tiling: Tiling, q: Array, k: Array, v: Array, ids: Array | None, ends: Array | None) -> Array:
    out, _ = _forward(tiling, q, k, v, ids, ends)
    return out


def _forward(
    tiling: Tiling, q: Array, k: Array, v: Array, ids: Array | None, ends: Array | None
) -> tuple[Array, tuple[Any, ...]]:
    """The output, and what the backward pass needs: the inputs, the output by tiles, and log(sum(exp(scores)))."""
    size, keys, values = tiling.size, k.swapaxes(1, 2), v.swapaxes(1, 2)
    visible = _Visible(tiling, q.shape[1], ids, ends)

    def of_queries(_: None, tile: tuple[Array | int, Array]) -> tuple[None, tuple[Array, Array]]:
        at, queries = tile

        def of_keys(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            peak, total, mixed = carry
            scores = visible.scores(queries, _tile(keys, number, size), at, number)
            higher = jnp.maximum(peak, scores.max(2))
            weights = jnp.exp(scores - higher[:, :, None])
            scale = jnp.exp(peak - higher)
            of_tile = _product("BKSH,BKSQ->BKHQ", _tile(values, number, size), weights.astype(v.dtype))
            return higher, total * scale + weights.sum(2), mixed * scale[:, :, None] + of_tile

        batch, heads, count, width = queries.shape
        start = jnp.full((batch, heads, count), _LEAST), jnp.zeros((batch, heads, count))
        peak, total, mixed = visible.loop(at, of_keys, (*start, jnp.zeros((batch, heads, width, count))))
        return None, ((mixed / total[:, :, None]).astype(q.dtype), peak + jnp.log(total))

    queries = _by_tile(q * q.shape[-1] ** -0.5, k.shape[2], size)
    _, (mixed, sums) = _over_tiles(of_queries, None, queries)
    return _whole(mixed.swapaxes(3, 4), q.shape), (q, k, v, ids, ends, mixed, sums)


def _backward(tiling: Tiling, residuals: tuple[Any, ...], gradient: Array) -> tuple[Array | None, ...]:
    q, k, v, ids, ends, mixed, sums = residuals
    size, keys, values = tiling.size, k.swapaxes(1, 2), v.swapaxes(1, 2)
    visible = _Visible(tiling, q.shape[1], ids, ends)

    def of_queries(carry: tuple[Array, Array], tile: tuple[Any, ...]) -> tuple[tuple[Array, Array], Array]:
        at, queries, gradients, outputs, logs = tile
        inner = jnp.einsum("BKQH,BKHQ->BKQ", gradients.astype(jnp.float32), outputs.astype(jnp.float32))

        def of_keys(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            of_q, of_k, of_v = carry
            k_tile, v_tile = _tile(keys, number, size), _tile(values, number, size)
            weights = jnp.exp(visible.scores(queries, k_tile, at, number) - logs[:, :, None])
            of_weights = _product("BKSH,BKQH->BKSQ", v_tile, gradients)
            of_scores = (weights * (of_weights - inner[:, :, None])).astype(q.dtype)
            of_q = of_q + _product("BKSQ,BKSH->BKQH", of_scores, k_tile)
            of_k = _add(of_k, _product("BKSQ,BKQH->BKSH", of_scores, queries), number)
            of_v = _add(of_v, _product("BKSQ,BKQH->BKSH", weights.astype(v.dtype), gradients), number)
            return of_q, of_k, of_v

        of_q, *others = visible.loop(at, of_keys, (jnp.zeros(queries.shape), *carry))
        return tuple(others), of_q

    scale = q.shape[-1] ** -0.5
    tiles = (_by_tile(x, k.shape[2], size) for x in (q * scale, gradient))
    start = jnp.zeros(keys.shape), jnp.zeros(values.shape)
    (of_k, of_v), of_q = _over_tiles(of_queries, start, *tiles, mixed, sums)
    of_q = _whole(of_q, q.shape) * scale
    return of_q.astype(q.dtype), of_k.swapaxes(1, 2).astype(k.dtype), of_v.swapaxes(1, 2).astype(v.dtype), None, None


_attend.defvjp(_forward, _backward)


class _Visible:
    """Which keys queries see, by tile."""

    def __init__(self, tiling: Tiling, length: int, ids: Array | None, ends: Array | None) -> None:
        self._tiling, self._ids, self._ends = tiling, ids, ends
        self._first, self._end = self._ranges(length // tiling.size)

    def _ranges(self, count: int) -> tuple[Array, Array]:
        """For every tile of queries, the first tile of keys that one of them sees in any row, and the end of these tiles."""
        tile, size = jnp.arange(count), self._tiling.size
        some = jnp.ones((count, count), bool)
        if self._ids is not None and self._ends is not None:
            ids, ends = (x.reshape(len(x), count, size) for x in (self._ids, self._ends))
            first = jnp.where(ids > 0, ids, jnp.iinfo(ids.dtype).max).min(-1)  # without padding, which is 0
            last, end = ids.max(-1), jnp.where(ids > 0, ends, 0).max(-1)
            some = ((first[:, None] <= last[:, :, None]) & (first[:, :, None] < end[:, None])).any(0)
        if self._tiling.causal:
            some &= tile <= tile[:, None]
        if self._tiling.window is not None:
            some &= (tile + 1) * size + self._tiling.window - 1 > tile[:, None] * size
        some |= jnp.eye(count, dtype=bool)  # padding sees padding, so that no query is without a key
        return jnp.argmax(some, axis=1), count - jnp.argmax(some[:, ::-1], axis=1)

    def loop(self, at: Array | int, body: Any, carry: Any) -> Any:
        """`body(number of a tile of keys, carry)` for all tiles that tile `at` of queries sees."""
        # A constant of the program, from which the compiler's costs are counted (extras/compile_check/hlo.py).
        most = at + 1 if self._tiling.causal and isinstance(at, int) else len(self._end)

        def more(state: tuple[Array, Any]) -> Array:
            return (state[0] < self._end[at]) & (state[0] < most)

        def step(state: tuple[Array, Any]) -> tuple[Array, Any]:
            return state[0] + 1, body(*state)

        return jax.lax.while_loop(more, step, (self._first[at], carry))[1]

    def scores(self, queries: Array, keys: Array, at: Array | int, number: Array) -> Float[Array, "B K S Q"]:
        """Scores of a tile; the least number where a query does not see a key."""
        scores = _product("BKSH,BKQH->BKSQ", keys, queries)
        hidden = self._hidden(at, number)
        if hidden is None:
            return scores
        # A sum, not a choice: one addition, which XLA fuses, for the queries of all heads that share the keys.
        lowest = jnp.where(hidden, _LEAST, 0.0)
        copies = scores.shape[-1] // lowest.shape[-1]
        return scores + jnp.concatenate([lowest] * copies, axis=-1)[:, None]

    def _hidden(self, at: Array | int, number: Array) -> Bool[Array, "#B S Q"] | None:
        size, hidden = self._tiling.size, None
        if self._tiling.causal:
            distance = (at - number) * size + jnp.arange(size)[None] - jnp.arange(size)[:, None]
            outside = False if self._tiling.window is None else distance >= self._tiling.window
            hidden = ((distance < 0) | outside)[None]
        if self._ids is None or self._ends is None:
            return hidden
        own = _tile(self._ids, at, size, axis=1)[:, None]
        key, end = (_tile(x, number, size, axis=1)[:, :, None] for x in (self._ids, self._ends))
        apart = (own < key) | (own >= end)
        return apart if hidden is None else hidden | apart


def _over_tiles(function: Any, carry: Any, *arrays: Array) -> Any:
    """Like `lax.scan` over tiles of queries; the function also gets the tile's number. A few tiles are unrolled."""
    count = len(arrays[0])
    if count > _UNROLLED:
        return jax.lax.scan(function, carry, (jnp.arange(count), *arrays))
    outputs = []
    for at in range(count):
        carry, output = function(carry, (at, *(array[at] for array in arrays)))
        outputs.append(output)
    return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *outputs)


def _by_tile(x: Float[Array, "B T N H"], kv_heads: int, size: int) -> Float[Array, "t B K Q H"]:
    """Tiles of queries; the Q of a tile are `size` of each of the G heads that share a key/value head."""
    batch, length, heads, width = x.shape
    group, count = heads // kv_heads, length // size
    tiles = x.reshape(batch, count, size, kv_heads, group, width).transpose(1, 0, 3, 4, 2, 5)
    return tiles.reshape(count, batch, kv_heads, group * size, width)


def _whole(tiles: Float[Array, "t B K Q H"], shape: tuple[int, ...]) -> Float[Array, "B T N H"]:
    """The inverse of `_by_tile`."""
    count, batch, kv_heads, _, width = tiles.shape
    length, heads = shape[1:3]
    size, group = length // count, heads // kv_heads
    x = tiles.reshape(count, batch, kv_heads, group, size, width).transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(batch, length, heads, width)


def _tile(x: Array, number: Array | int, size: int, axis: int = 2) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, number * size, size, axis)


def _add(whole: Array, part: Array, number: Array) -> Array:
    size = part.shape[2]
    return jax.lax.dynamic_update_slice_in_dim(whole, _tile(whole, number, size) + part, number * size, axis=2)


def _product(equation: str, a: Array, b: Array) -> Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
