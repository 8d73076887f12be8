"""Chooses the KV cache for a model on a mesh."""

from __future__ import annotations

from typing import Any

from absl import logging
from jax.sharding import Mesh

from routerl_jax.generation.cache import CacheKind
from routerl_jax.generation.pages import PagedCache
from routerl_jax.generation.quantized import Qtype
from routerl_jax.generation.segments import SegmentCache
from routerl_jax.models.config import DecoderConfig


def cache_kind(
    config: DecoderConfig, mesh: Mesh, dtype: Any, wanted: CacheKind = "auto", qtype: Qtype = ""
) -> type[PagedCache] | type[SegmentCache]:
    """The cache of an engine.

    Args:
      dtype: dtype of keys and values.
      wanted: `auto` means pages on TPUs if the kernel supports the model, else segments.
      qtype: type of quantised keys and values. The kernel knows one constant scale for all tokens alone, so these are in
        segments.

    Raises:
      ValueError: the cache is unknown, or pages are wanted and the kernel does not support the model or the type.
    """
    if wanted not in ("auto", "segment", "paged"):
        raise ValueError(f"cache={wanted!r} is unknown; choose auto, segment or paged")
    if wanted == "segment" or (wanted == "auto" and mesh.devices.flat[0].platform != "tpu"):
        return SegmentCache
    reason = PagedCache.unsupported(config, mesh, dtype, qtype)
    if reason is None:
        return PagedCache
    if wanted == "paged":
        raise ValueError(f"the paged kernel can't serve this model ({reason}); set cache='segment'")
    logging.warning("the paged kernel can't serve this model (%s): attention is plain XLA, which is slower", reason)
    return SegmentCache
