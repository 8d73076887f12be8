"""The interface of the KV cache for the engine's programs. There is one implementation per kind of device.

All keep a row's layer as one contiguous block, [..., R rows per shard, T positions, ...]. `SegmentCache` (segments.py) is
plain XLA, for CPUs: a decode call reads rows once and collects new keys and values in a small buffer. `FusedCache` (fused.py,
for GPUs) and `PagedCache` (pages.py, for TPUs) write them in place and attend with a Pallas kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Int8, Shaped

from routerl_jax.models.config import DecoderConfig
from routerl_jax.models.decoder import Attend
from routerl_jax.parallel.mesh import BATCH_AXES

CacheKind = Literal["auto", "segment", "fused", "paged"]
Qtype = Literal["", "int8"]  # of keys and values


class Extension(Protocol):
    """A program call that feeds given tokens to some rows."""

    caches: Any  # the argument of `Decoder.run` ..
    shared: bool  # .. and whether all layers share it

    def align(self, x: Int[Array, "D A S ..."]) -> Int[Array, "B S ..."]:
        """Per-token values in the layout of `attend`: rows flattened, padding moved to the end that it ignores."""
        ...

    def restore(self, x: Int[Array, "B S ..."]) -> Int[Array, "D A S ..."]:
        """The inverse of `align`."""
        ...

    def attend(self, q: Array, k: Array, v: Array, layer: Any, window: int | None) -> tuple[Array, Any]:
        """Attention of the new tokens (models.decoder.Attend)."""
        ...

    def finish(self, caches: Any) -> KVCache:
        """The cache after `Decoder.run` returned `caches`."""
        ...


class Segment(Protocol):
    """A program call that decodes some rows, one token or several drafted ones per step."""

    state: Any  # the argument `caches` of the first step's `Decoder.run`, which returns that of the next one
    shared: bool  # as for Decoder.run

    def attend(self, counts: Int[Array, "*B"], alive: Bool[Array, " B"]) -> Attend:
        """Attention of a step that reads one token or more of each row.

        Args:
          counts: new tokens that have been kept of each row before, or one number for all rows that are alive. What is stored
            of tokens that are not kept is overwritten by the next step.
          alive: nothing is stored for other rows.
        """
        ...

    def finish(self, state: Any, counts: Int[Array, "D A"]) -> tuple[KVCache, Any]:
        """The cache with the first `counts` new tokens of each row.

        Also arrays that the caller keeps until the next call, because that will need their memory again; None: there are none.
        """
        ...


class KVCache(Protocol):
    """Keys and values of all rows, a pytree."""

    @classmethod
    def abstract(
        cls, config: DecoderConfig, mesh: Mesh, shards: int, rows: int, length: int, dtype: Any, qtype: Qtype = ""
    ) -> Self:
        """Shapes and shardings of a cache that holds `rows` conversations of `length` tokens per shard.

        Args:
          dtype: dtype of keys and values, or of their scales if they are quantised.
          qtype: quantises them (`quantize_tokens`).
        """
        ...

    @staticmethod
    def takes_chunks(mesh: Mesh) -> bool:
        """Whether one extension may have several entries of a row, one chunk of its tokens after the other."""
        ...

    @staticmethod
    def reads_any_span() -> bool:
        """Whether rows are read as far as they are filled, so that `span` does not matter."""
        ...

    @property
    def rows(self) -> int:
        """Rows per shard."""
        ...

    def extension(
        self, rows: Int[Array, "D A"], starts: Int[Array, "D A"], counts: Int[Array, "D A"], *, steps: int, span: int
    ) -> Extension:
        """Feeds `counts` of `steps` tokens to rows that already hold `starts` <= span tokens.

        With `takes_chunks`, a row may be there several times, and span does not matter. Chunks without tokens come last.
        """
        ...

    def fork(self, sources: Int[Array, "D A"], targets: Int[Array, "D A"], *, span: int) -> Self:
        """Copies the first `span` positions of source rows to target rows of the same shard."""
        ...

    def segment(self, rows: Int[Array, "D A"], starts: Int[Array, "D A"], *, steps: int, span: int) -> Segment:
        """Decodes up to `steps` tokens, drafts beyond the last one included, for rows that hold `starts` <= span tokens."""
        ...


class Codes(NamedTuple):
    """Quantised vectors: codes times scale. Both are indexed alike, as the last axis is the only one that differs."""

    codes: Int8[Array, "*B H"]
    scale: Float[Array, "*B 1"]


def quantize_tokens(x: Float[Array, "*B H"]) -> Codes:
    """Symmetric int8 over the last axis: the largest entry is 127 steps. Scales have the dtype of `x`.

    A token is quantised when it is computed, before any query attends to it. So all queries see the same numbers, whether the
    token was fed or decoded, in one call or several, and a copied row equals its source.

    (In qwix it is 127.5 steps, between two codes. Then programs that round differently in the last bit would store different
    codes.)
    """
    x32 = x.astype(jnp.float32)
    scale = (jnp.abs(x32).max(axis=-1, keepdims=True) / 127).astype(x.dtype)
    steps = x32 / jnp.where(scale > 0, scale, 1).astype(jnp.float32)
    return Codes(jnp.clip(jnp.round(steps), -127, 127).astype(jnp.int8), scale)


def allocator(abstract: Any) -> Callable[[], Any]:
    """A function that makes a cache of zeros with the shapes and shardings of an abstract one. It is compiled once."""
    return jax.jit(
        lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract),
    )


def heads_axis(config: DecoderConfig, mesh: Mesh) -> str | None:
    """The mesh axis over which the cache's heads are split; None, with a log line, if their number is not divisible."""
    shards = mesh.shape["tensor"]
    if config.kv_heads % shards:
        logging.info("%d kv heads are not divisible by tensor=%d: every device caches all", config.kv_heads, shards)
        return None
    return "tensor"


def stored_spec(config: DecoderConfig, mesh: Mesh) -> PartitionSpec:
    """The sharding of keys and values, [D, L, R, T, heads, ...]: rows over the batch axes, heads over `tensor`."""
    return PartitionSpec(BATCH_AXES, None, None, None, heads_axis(config, mesh))


def copy_rows(
    x: Shaped[Array, "D L R T ..."],
    sources: Int[Array, "D A"],
    targets: Int[Array, "D A"],
    *,
    span: int,
    mesh: Mesh,
    stored: PartitionSpec,
) -> Shaped[Array, "D L R T ..."]:
    """Copies the first `span` positions of source rows to target rows of the same shard, in all L layers. In place, row by row:
    copying all at once would need their memory a second time.

    Args:
      stored: the sharding of `x`.
    """

    def on_shard(x: Array, sources: Array, targets: Array) -> Array:
        _, layers, rows, _, *rest = x.shape
        sources = jnp.minimum(sources[0], rows - 1)
        targets = jnp.where(targets[0] < rows, targets[0], sources)  # padding writes what is there
        origin = (0,) * len(rest)

        def copy_row(i: Array, x: Array) -> Array:
            part = jax.lax.dynamic_slice(x, (0, 0, sources[i], 0, *origin), (1, layers, 1, span, *rest))
            return jax.lax.dynamic_update_slice(x, part, (0, 0, targets[i], 0, *origin))

        return jax.lax.fori_loop(0, sources.size, copy_row, x)

    per_row = PartitionSpec(BATCH_AXES)
    return jax.shard_map(on_shard, mesh=mesh, in_specs=(stored, per_row, per_row), out_specs=stored)(
        x, sources, targets
    )
