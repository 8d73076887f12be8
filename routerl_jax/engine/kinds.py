"""Chooses the KV cache for a model on a mesh."""

from __future__ import annotations

from typing import Any, get_args

from absl import logging
from jax.sharding import Mesh

from routerl_jax.engine.cache import CacheKind
from routerl_jax.engine.fused import FusedCache
from routerl_jax.engine.pages import PagedCache
from routerl_jax.engine.quantized import Qtype
from routerl_jax.engine.segments import SegmentCache
from routerl_jax.models.config import DecoderConfig
from routerl_jax.parallel.mesh import on_gpu, on_tpu


def cache_kind(
    config: DecoderConfig, mesh: Mesh, dtype: Any, requested: CacheKind = "auto", qtype: Qtype = ""
) -> type[PagedCache] | type[FusedCache] | type[SegmentCache]:
    """The cache of an engine.

    Args:
      dtype: dtype of keys and values.
      requested: `auto` means pages on TPUs and the fused kernel on GPUs, if the kernel supports the model, else segments.
      qtype: type of quantised keys and values. The paged kernel knows one constant scale for all tokens alone, so on TPUs these
        are in segments.

    Raises:
      ValueError: the cache is unknown, or a kernel is requested that does not support the model, the type or the devices.
    """
    if requested not in get_args(CacheKind):
        raise ValueError(f"cache={requested!r} is unknown; choose auto, segment, fused or paged")
    own = "paged" if on_tpu(mesh) else "fused" if on_gpu(mesh) else "segment"
    kind = own if requested == "auto" else requested
    if kind == "segment":
        return SegmentCache
    if kind == "paged":
        cache, reason = PagedCache, PagedCache.unsupported(config, mesh, dtype, qtype)
    else:
        cache, reason = FusedCache, FusedCache.unsupported(config, mesh)
    if reason is None:
        return cache
    if requested == kind:
        raise ValueError(f"the {kind} kernel can't serve this model ({reason}); set cache='segment'")
    logging.warning("the %s kernel can't serve this model (%s): attention is plain XLA, which is slower", kind, reason)
    return SegmentCache
