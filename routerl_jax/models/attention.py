"""Self-attention over whole sequences. One function with one contract has several implementations.

Attention against a KV cache belongs to the engine (engine/segments.py).
Dimensions: B rows, T time, N query heads, K key/value heads, H head width.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from routerl_jax.models.blockwise import Tiling, tiled_attention
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
