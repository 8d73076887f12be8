"""The engine's calls to the devices: the arrays that live there, and the arguments of the program calls.

engine.py decides which conversations run, and programs.py has the programs. This file places the conversations with rows into
arrays [D shards, A active rows, ...]. Their sizes are rounded up to a few values, because every shape is compiled separately.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, get_args

import jax
import numpy as np
from absl import logging
from flax import nnx
from jax.sharding import Mesh

from routerl_jax.engine.cache import CacheKind, KVCache, Qtype, allocator
from routerl_jax.engine.images import EncodedImages, gather, in_batches, pending_images
from routerl_jax.engine.policy import Stream
from routerl_jax.engine.programs import DecodeInputs, DecodeOutputs, jit_programs
from routerl_jax.engine.rows import (
    Chunk,
    Placement,
    PrefillShapes,
    RowTable,
    cheapest_cuts,
    decode_rows,
    decode_spans,
    ladder,
    prefill_rows,
    round_up,
    rows_cost_time,
)
from routerl_jax.engine.sampling import MOST_TOP
from routerl_jax.engine.segments import SegmentCache
from routerl_jax.engine.stops import StopAutomaton
from routerl_jax.engine.weights import WeightCopier
from routerl_jax.models.config import DecoderConfig
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.models.work import Work
from routerl_jax.parallel.mesh import on_gpu, on_tpu


def cache_kind(
    config: DecoderConfig, mesh: Mesh, dtype: Any, requested: CacheKind = "auto", qtype: Qtype = ""
) -> type[KVCache]:
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
    # Imported here, because JAX's libraries for kernels take seconds to import, and a CPU needs none of them.
    if kind == "paged":
        from routerl_jax.engine.pages import PagedCache

        cache, reason = PagedCache, PagedCache.unsupported(config, mesh, dtype, qtype)
    else:
        from routerl_jax.engine.fused import FusedCache

        cache, reason = FusedCache, FusedCache.unsupported(config, mesh)
    if reason is None:
        return cache
    if requested == kind:
        raise ValueError(f"the {kind} kernel can't serve this model ({reason}); set cache='segment'")
    logging.warning("the %s kernel can't serve this model (%s): attention is plain XLA, which is slower", kind, reason)
    return SegmentCache


class DeviceCalls:
    """The weights, the KV cache and the programs of an engine.

    Args:
      model: a decoder.
      mesh: the devices.
      table: hands out the cache's rows; every stream of a call holds one.
      max_length: most tokens of one row.
      layout, cache, routes, drafts, weight_qtype, cache_qtype: see Engine.

    Attributes:
      params: the weights; None before the first `load`, and while the engine rests.
      cache: keys and values of all rows; None while the engine rests, and after a program has failed, because the cache was
        donated to it. All rows are empty then, and the next call makes a new cache.
    """

    def __init__(
        self,
        model: Decoder,
        mesh: Mesh,
        table: RowTable,
        max_length: int,
        *,
        layout: str,
        cache: CacheKind,
        routes: bool,
        drafts: int,
        weight_qtype: Qtype,
        cache_qtype: Qtype,
    ) -> None:
        if routes and model.config.experts is None:
            raise ValueError(
                f"a {model.architecture.model_type} model has no experts whose choice could be recorded: leave routes "
                f"(config.learner.replay_routing) off"
            )
        self._routes, self._drafts = routes, drafts
        self._mesh, self._dtype, self._max_length = mesh, model.compute_dtype, max_length
        self._vision = model.vl_config.vision if isinstance(model, VisionLanguageModel) else None
        self._kind = cache_kind(model.config, mesh, self._dtype, cache, cache_qtype)
        self._config = model.config
        self._cache_qtype: Qtype = cache_qtype
        work = Work(config=model.config)
        self._weights_in_tokens = work.decode_bytes(1, 0) / work.key_bytes(1)
        self._copy_weights = WeightCopier(model, mesh, layout, self._dtype, weight_qtype)
        self._compiled_here = 0  # programs, before the rows were laid out anew
        self.params: nnx.State | None = None
        self._layers: list[nnx.State] | None = None  # of `params`, from the first decode call on
        self.cache: KVCache | None = None
        # Of the last decode call. If a CPU's memory is freed, the system takes it back, and a virtual machine gives it to its
        # host. The next call would wait for it.
        self._scratch: Any = None
        self._lay_out(table)

    def resize(self, table: RowTable) -> None:
        """Takes the rows of another table. The cache is made anew at the next call."""
        self._compiled_here, self.cache, self._scratch = self.compilations, None, None
        self._lay_out(table)

    def _lay_out(self, table: RowTable) -> None:
        self._table, mesh, longest = table, self._mesh, self._max_length
        # Shapes are rounded up to these. Decoding dominates, so its ladders are finer; every rung costs a compilation.
        rows = table.rows_per_shard
        self._decode_rows = decode_rows(rows, mesh)
        self._fork_rows = prefill_rows(rows, mesh)
        self._prefill = PrefillShapes.of(rows, longest, mesh, chunked=self._kind.takes_chunks(mesh))
        self._fork_spans = ladder(min(256, longest), longest, 2)
        self._decode_spans = (longest,) if self._kind.reads_any_span() else decode_spans(longest, mesh)
        # drafts are written before it is known how many of them are kept
        abstract = self._kind.abstract(
            self._config, mesh, table.shards, rows, longest + self._drafts, self._dtype, self._cache_qtype
        )
        self._programs = jit_programs(self._copy_weights.graph, mesh, abstract)
        self._compiled_elsewhere = self._programs.compiled()
        self._allocate = allocator(abstract)

    def load(self, params: nnx.State) -> None:
        """Sets the weights (same structure and sharding), copied into the layout if there is one. Makes a cache if needed."""
        self.params = self._layers = self._scratch = None  # frees an old copy before the new one is made
        self.params = self._copy_weights(params)
        if self.cache is None:
            self.cache = self._allocate()

    def _take_cache(self) -> KVCache:
        """Hands the cache to a program, which returns the new one. If the program fails or is interrupted, there is none."""
        cache, self.cache = self.cache, None
        return self._allocate() if cache is None else cache

    def rest(self) -> None:
        """Frees the weights and the cache until the next `load`."""
        self.params = self._layers = self.cache = self._scratch = None

    def free_scratch(self) -> None:
        """Frees what is kept between decode calls for their speed alone."""
        self._scratch = None

    @property
    def compilations(self) -> int:
        """Number of programs compiled since this engine was made, by it or by others that share them (`jit_programs`).

        It is bounded by the ladders of shapes.
        """
        return self._compiled_here + self._programs.compiled() - self._compiled_elsewhere

    def extend(self, streams: Sequence[Stream]) -> int:
        """Feeds rows the missing tokens of their ledgers, up to the last-but-one token, and updates `cached`. Their experts are
        recorded, if that is wanted.

        Returns:
          The computed rows x tokens, padding included.
        """
        slots = self._feed([stream for stream in streams if not pending_images(stream)], None)
        for group in in_batches([stream for stream in streams if pending_images(stream)]):
            assert self._vision is not None
            inputs, image_slots = gather(group, self._vision, self._mesh, self._dtype)
            features = self._programs.encode(params=self.params, images=inputs)
            slots += self._feed(group, EncodedImages(values=features, slots=image_slots))
        return slots

    def _feed(self, pending: Sequence[Stream], images: EncodedImages | None) -> int:
        """Feeds rows in calls of a few sizes."""
        missing = [Chunk(holder=each, start=each.cached, stop=len(each.ledger) - 1) for each in pending]
        missing = [each for each in missing if each.start < each.stop]
        return sum(self._extend(chunks, steps, images) for steps, chunks in self._prefill.calls(missing))

    def _extend(self, chunks: Sequence[Chunk[Stream]], steps: int, images: EncodedImages | None) -> int:
        """One program call, with at most `steps` tokens per chunk."""
        layout = Placement(self._table, self._prefill.sizes, chunks)
        tokens = np.zeros((*layout.shape, steps), np.int32)
        positions = np.zeros((*layout.shape, steps, 3), np.int32)
        image_index = np.full((*layout.shape, steps), -1, np.int32)
        for slot, chunk in layout:
            stream, start, stop = chunk.holder, chunk.start, chunk.stop
            tokens[slot][: stop - start] = stream.ledger.tokens[start:stop]
            positions[slot][: stop - start] = stream.ledger.positions(start, stop).T
            if images is not None:
                image_index[slot][: stop - start] = images.index(stream, start, stop)
        starts = layout.gather(lambda chunk: chunk.start)
        self.cache, chosen = self._programs.extend(
            params=self.params,
            cache=self._take_cache(),
            rows=layout.rows,
            starts=starts,
            tokens=tokens,
            positions=positions[..., 0] if self._vision is None else positions,
            counts=layout.gather(lambda chunk: chunk.stop - chunk.start),
            image_values=None if images is None else images.values,
            image_index=None if images is None else image_index,
            span=round_up(int(starts.max()), self._prefill.spans, "cached tokens of a row to feed"),
            routes=self._routes,
        )
        chosen = None if chosen is None else jax.device_get(chosen)
        for slot, chunk in layout:
            if chosen is not None:
                routes = chosen[slot][: chunk.stop - chunk.start].copy()
                chunk.holder.ledger.route(chunk.start, list(routes))
            chunk.holder.cached = chunk.stop
        return tokens.size

    def _decode_span(self, cached: int) -> int:
        return round_up(max(cached, 1), self._decode_spans, "cached tokens of a decoding row")

    def by_length(self, streams: Sequence[Stream]) -> list[list[Stream]]:
        """Splits the streams that decode into calls.

        In a call every row is read as far as the longest one is filled: one long conversation makes all of them slow.
        """
        if not rows_cost_time(self._mesh):
            return [list(streams)]
        span_of = [self._decode_span(stream.cached) for stream in streams]
        rows_of: dict[int, collections.Counter[int]] = {}  # of each span, the numbers of rows by shard
        for stream, span in zip(streams, span_of):
            assert stream.row is not None
            rows_of.setdefault(span, collections.Counter())[stream.row[0]] += 1
        spans = sorted(rows_of)

        def slots(first: int, last: int) -> int:
            counts = sum((rows_of[span] for span in spans[first:last]), collections.Counter())
            return self._table.shards * round_up(max(counts.values()), self._decode_rows, "rows of a shard in a call")

        cuts = cheapest_cuts(spans, slots, self._weights_in_tokens)
        return [
            [stream for stream, span in zip(streams, span_of) if spans[first] <= span <= spans[last - 1]]
            for first, last in cuts
        ]

    def fork(self, pairs: Sequence[tuple[Stream, Stream]]) -> None:
        """For each (source, target) with rows in the same shard, copies the target's cached tokens from the source's row."""
        layout = Placement(self._table, self._fork_rows, [target for _, target in pairs])
        source_of = {id(target): source for source, target in pairs}
        sources = np.full(layout.shape, self._table.rows_per_shard, np.int32)
        for slot, target in layout:
            row = source_of[id(target)].row
            assert row is not None
            sources[slot] = row[1]
        span = round_up(max(target.cached for _, target in pairs), self._fork_spans, "tokens of a row to copy")
        self.cache = self._programs.fork(cache=self._take_cache(), sources=sources, targets=layout.rows, span=span)

    def decode(
        self,
        streams: Sequence[Stream],
        stops: tuple[StopAutomaton, jax.Array, jax.Array],
        *,
        steps: int,
        seed: int,
        leave_at: int,
    ) -> tuple[Placement[Stream], DecodeOutputs]:
        """Samples up to `steps` tokens of the running turns. The streams are not changed.

        Args:
          stops: the result of `StopTables.current`.
          seed: root of the randomness.
          leave_at: the call returns when at most this many rows are still running.

        Returns:
          The position of each stream in the outputs, and the outputs on the host.
        """
        automaton, transition, hits = stops
        layout = Placement(self._table, self._decode_rows, streams)
        identity = np.zeros((*layout.shape, 3), np.uint32)
        for slot, stream in layout:
            identity[slot] = (*stream.identity, stream.turn)
        given = history = None
        if any(stream.turn_request.given for stream in streams):
            given = np.full((*layout.shape, steps), -1, np.int32)
            for slot, stream in layout:
                tokens = stream.turn_request.given[:steps]
                given[slot][: len(tokens)] = tokens
        starts = layout.gather(lambda stream: stream.cached)
        span = self._decode_span(int(starts.max()))
        if self._drafts:
            history = np.zeros((*layout.shape, span + 1 + steps), np.int32)
            for slot, stream in layout:
                history[slot][: len(stream.ledger)] = stream.ledger.tokens
        inputs = DecodeInputs(
            rows=layout.rows,
            starts=starts,
            offsets=layout.gather(lambda stream: stream.ledger.next_position - len(stream.ledger)),
            tokens=layout.gather(lambda stream: stream.ledger.tokens[-1]),
            limits=layout.gather(lambda stream: stream.turn_request.remaining),
            states=layout.gather(lambda stream: stream.turn_request.automaton_state),
            stop_masks=layout.gather(lambda stream: automaton.mask(stream.turn_request.stops), np.uint32),
            identity=identity,
            temperature=layout.gather(lambda stream: stream.turn_request.sampling.temperature, np.float32),
            top_p=layout.gather(lambda stream: stream.turn_request.sampling.top_p, np.float32),
            top_k=layout.gather(lambda stream: stream.turn_request.sampling.top_k),
            given=given,
            history=history,
        )
        if self._layers is None and self._programs.layers is not None:
            self._layers = self._programs.layers(self.params)
        self.free_scratch()
        cache, outputs, self._scratch = self._programs.decode(
            params=self.params,
            layers=self._layers,
            cache=self._take_cache(),
            inputs=inputs,
            transition=transition,
            hits=hits,
            seed=np.int32(seed),
            leave_at=np.int32(leave_at),
            steps=steps,
            span=span,
            truncate=any(stream.turn_request.sampling.truncated for stream in streams),
            top=MOST_TOP if any(stream.turn_request.top for stream in streams) else 0,
            routes=self._routes,
            drafts=self._drafts,
        )
        host = jax.device_get(outputs)
        self.cache = cache  # here at the earliest, because a program may fail when its results are read
        return layout, host
