"""Lowers the engine's programs for machines that are not attached, from shapes and without weights or a cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from routerl_jax.engine import programs
from routerl_jax.engine.cache import CacheKind, Qtype
from routerl_jax.engine.device_calls import cache_kind
from routerl_jax.engine.images import MOST_PATCHES
from routerl_jax.engine.rows import PrefillShapes, most_rows
from routerl_jax.engine.stops import STATE_BUCKET
from routerl_jax.engine.weights import WeightCopier
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.patches import abstract_images
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.parallel.mesh import batch_sharding, batch_shards, replicated

FED_TOKENS = 512  # of a row in one call of the prefill that is lowered


def fed_at_once(
    model: Decoder,
    mesh: Mesh,
    rows: int,
    max_length: int,
    *,
    prompt_tokens: int = FED_TOKENS,
    cache: CacheKind = "auto",
    cache_qtype: Qtype = "",
) -> tuple[int, int]:
    """The entries of a shard, and the tokens of an entry, in the largest prefill call of an engine with `rows` rows.

    Args:
      prompt_tokens: tokens of the rows that are fed, if an entry may have as many.
    """
    kind = cache_kind(model.config, mesh, model.compute_dtype, cache, cache_qtype)
    per_shard = -(-rows // batch_shards(mesh))
    shapes = PrefillShapes.of(per_shard, max_length, mesh, chunked=kind.takes_chunks(mesh))
    steps = min(prompt_tokens, shapes.steps[-1])
    return most_rows(shapes.sizes, steps), steps


def lower_programs(
    model: Decoder,
    mesh: Mesh,
    *,
    rows: int,
    max_length: int,
    segment: int,
    layout: str = "tensor",
    prompt_rows: int | None = None,
    prompt_tokens: int = FED_TOKENS,
    truncate: bool = False,
    drafts: int = 0,
    cache: CacheKind = "auto",
    weight_qtype: Qtype = "",
    cache_qtype: Qtype = "",
) -> dict[str, jax.stages.Lowered]:
    """Lowers the programs of an `Engine` with these settings under full load: every row is full and decoding.

    Args:
      model: the policy; shapes are enough: `nnx.eval_shape(lambda: Decoder(config, jax.random.key(0), ...))`.
      mesh: may consist of the devices of a topology (jax.experimental.topologies), which need not exist.
      rows, max_length, segment, layout, drafts, cache, weight_qtype, cache_qtype: see Engine. Without a layout, the model's
        shapes must have shardings.
      prompt_rows: entries of a shard in the prefill call, at most one of each row; None: as many as the engine's largest has.
      prompt_tokens: tokens of an entry, at most max_length, and a chunk if the engine feeds chunks.
      truncate: whether some rows sample with top-p or top-k.

    Returns:
      `prefill` and `decode`, and for a vision model `encode` with the largest number of patches per call. `.compile()` gives
      text, memory and cost.
    """
    config, dtype = model.config, model.compute_dtype
    copier, params = WeightCopier(model, mesh, layout, dtype, weight_qtype), nnx.state(model)
    if layout:
        params = copier.abstract(params)
    shards = batch_shards(mesh)
    per_shard = -(-rows // shards)
    kind = cache_kind(config, mesh, dtype, cache, cache_qtype)
    stored = kind.abstract(config, mesh, shards, per_shard, max_length + drafts, dtype, cache_qtype)
    unsplit = replicated(mesh)

    def host(shape: tuple[int, ...], dtype: Any = jnp.int32, sharding: NamedSharding = unsplit) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    jitted = programs.jit_programs(copier.graph, mesh, stored)
    options = {"prompt_tokens": prompt_tokens, "cache": cache, "cache_qtype": cache_qtype}
    entries, steps = fed_at_once(model, mesh, rows, max_length, **options)
    entry_shape = (shards, entries if prompt_rows is None else min(prompt_rows, per_shard))
    fed = (*entry_shape, steps)
    image_inputs: dict[str, Any] = {}
    lowered = {}
    if isinstance(model, VisionLanguageModel):
        vision = model.vl_config.vision
        images = abstract_images((shards,), MOST_PATCHES, vision, dtype, batch_sharding(mesh))
        lowered["encode"] = jitted.encode.lower(params=params, images=images)
        deep = (1 + len(vision.deep_layers),) if vision.deep_layers else ()
        features = (shards, MOST_PATCHES // vision.group, *deep, config.embed)
        image_inputs = {"image_values": host(features, dtype, batch_sharding(mesh)), "image_index": host(fed)}
    lowered["prefill"] = jitted.extend.lower(
        params=params,
        cache=stored,
        rows=host(entry_shape),
        starts=host(entry_shape),
        tokens=host(fed),
        positions=host((*fed, 3) if image_inputs else fed),
        counts=host(entry_shape),
        **image_inputs,
        span=max_length,
    )
    every = (shards, per_shard)
    table = (STATE_BUCKET, config.vocab_size)
    lowered["decode"] = jitted.decode.lower(
        params=params,
        layers=None if jitted.layers is None else jitted.layers.eval_shape(params),
        cache=stored,
        inputs=programs.DecodeInputs(
            rows=host(every),
            starts=host(every),
            offsets=host(every),
            tokens=host(every),
            limits=host(every),
            states=host(every),
            stop_masks=host(every, jnp.uint32),
            identity=host((*every, 3), jnp.uint32),
            temperature=host(every, jnp.float32),
            top_p=host(every, jnp.float32),
            top_k=host(every),
            history=host((*every, max_length + 1 + segment)) if drafts else None,
        ),
        transition=host(table),
        hits=host(table, jnp.uint32),
        seed=host(()),
        leave_at=host(()),
        steps=segment,
        span=max_length,
        truncate=truncate,
        drafts=drafts,
    )
    return lowered
