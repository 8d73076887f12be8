"""The generation engine: many conversations, each on its own row of the KV cache, advance together on the device mesh.

The host decides what runs (this file), arranges the arrays (device_calls.py), and calls jitted programs (programs.py). A
conversation is a `Stream`: its token ledger, its row, and the number of ledger tokens that the row holds. Rows are a cache: a
stream that loses its row is fed again, so there may be more conversations than rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from routerl_jax.core.ledger import Ledger
from routerl_jax.core.progress import Bar
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.engine.cache import CacheKind, Qtype
from routerl_jax.engine.device_calls import DeviceCalls
from routerl_jax.engine.policy import DoesNotFit, EngineStats, Generated, PromptTooLong, Request, Stream
from routerl_jax.engine.programs import DecodeOutputs
from routerl_jax.engine.rows import LEAVE_FRACTION, MOST_DRAFTS, SEGMENT, RowTable
from routerl_jax.engine.sampling import GREEDY, MOST_TOP, Sampling
from routerl_jax.engine.stops import StopAutomaton, StopTables
from routerl_jax.engine.weights import mesh_of
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.images import ImageSource
from routerl_jax.models.layers import check_ids
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.parallel.devices import with_less
from routerl_jax.parallel.mesh import batch_shards, replicated

_REMEDY = (
    "lower config.engine.rows (a run may be resumed so); or begin anew with a lower config.engine.max_length, or with the "
    "engine's weights spread over devices (config.engine.layout)"
)


class Engine:
    """Batched multi-turn generation.

    Args:
      model: a decoder.
      rows: number of conversations in the KV cache at once, rounded up to a multiple of the mesh's shards.
      max_length: most tokens of one conversation.
      mesh: the devices; default: those of the model's weights.
      tokenizer: default `model.tokenizer`. A learner leaves out ids without a token by `model.tokenizer` alone.
      segment: decode steps per program call.
      leave_fraction: a decode call returns when at most this share of its rows is still running, so that finished rows can
        call their tools and others can take their place.
      seed: root of all sampling randomness.
      layout: sharding of the engine's copy of the weights (parallel.sharding.LAYOUTS), in the model's compute dtype. Empty: the
        model's own arrays, no copy.
      routes: record the experts that the routers choose for every token (`core.types.Sequence.routes`).
      drafts: tokens that a decode step copies from the conversation as a guess of the next ones. It keeps those that the policy
        samples (programs.lookup_drafts).
      cache: `paged` (pages.py), `fused` (fused.py) or `segment` (segments.py); auto: the one that suits the mesh's devices.
      weight_qtype: int8 quantises the copy's matrices (weights.py); it needs a layout. Empty: no weight is quantised.
      cache_qtype: int8 quantises keys and values (cache.quantize_tokens), not in a `paged` cache. Empty: in the compute dtype.

    Raises:
      ValueError: nothing could be generated with these sizes, `drafts` are too many, max_length exceeds the model's context,
        there is no tokenizer or it has ids beyond the model's rows, the layout, cache or type is unknown or they do not go
        together, or `routes` of a model without experts.
    """

    def __init__(
        self,
        model: Decoder,
        rows: int = 64,
        max_length: int = 2048,
        mesh: Mesh | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        segment: int = SEGMENT,
        leave_fraction: float = LEAVE_FRACTION,
        seed: int = 0,
        layout: str = "",
        cache: CacheKind = "auto",
        routes: bool = False,
        drafts: int = 0,
        weight_qtype: Qtype = "",
        cache_qtype: Qtype = "",
    ) -> None:
        for name, value in (("rows", rows), ("max_length", max_length), ("segment", segment)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not 0 <= leave_fraction < 1:
            raise ValueError(f"leave_fraction={leave_fraction} must be in [0, 1): with 1 no call would decode anything")
        if not 0 <= drafts <= MOST_DRAFTS:
            raise ValueError(f"drafts={drafts} must be in [0, {MOST_DRAFTS}]")
        if max_length > model.config.max_length:
            raise ValueError(
                f"max_length={max_length} exceeds the model's context of {model.config.max_length} tokens; lower max_length"
            )
        tokenizer = tokenizer or model.tokenizer
        if tokenizer is None:
            raise ValueError(
                "the engine needs a tokenizer, and the model has none: put tokenizer.json beside the config.json that "
                "load_pretrained reads, or pass tokenizer="
            )
        tokenizer.check(model.config.vocab_size, "the engine", policy=tokenizer is not model.tokenizer)
        if tokenizer is not model.tokenizer:  # programs take the ids that have a token from it
            model = nnx.merge(*nnx.split(model))
            model.tokenizer = tokenizer
        self.tokenizer = tokenizer
        self.config = model.config
        self.images = model.image_tokens if isinstance(model, VisionLanguageModel) else None
        self.mesh = mesh or mesh_of(model)
        self.max_length = max_length
        self.segment = segment
        self.leave_fraction = leave_fraction
        self.seed = seed
        self.version = 0
        self.stats = EngineStats()
        shards = batch_shards(self.mesh)
        self._streams: list[Stream] = []
        self._finished: list[tuple[Stream, Generated]] = []  # turns that `step` has not returned yet
        self._shared: list[tuple[Stream, Stream]] = []  # (source, target) rows to copy before the next step
        self._clock = 0
        self._table = RowTable(shards, -(-rows // shards))
        self.drafts = drafts
        self._calls = DeviceCalls(
            model,
            self.mesh,
            self._table,
            max_length,
            layout=layout,
            cache=cache,
            routes=routes,
            drafts=drafts,
            weight_qtype=weight_qtype,
            cache_qtype=cache_qtype,
        )
        _, params = nnx.split(model)
        self._load(params)
        eos = sorted(tokenizer.eos_ids | set(self.config.eos_ids))
        self._stops = StopTables(tokenizer.token_bytes, eos, self.config.vocab_size, replicated(self.mesh))

    # --- conversations -------------------------------------------------------------------------------------------------

    def open(
        self, prompt: Sequence[int], example_id: str = "", sample: int = 0, *, images: Sequence[ImageSource] = ()
    ) -> Stream:
        """Starts a conversation from prompt ids. Its randomness depends only on (example_id, sample).

        Args:
          images: the image for each image token of the prompt, in order.

        Raises:
          PromptTooLong: the prompt leaves no room to generate.
          ValueError: the prompt is empty or has an id without a row, an image can't be used, or the model sees no images.
        """
        if not prompt:
            raise ValueError(f"the prompt of example {example_id!r} is empty")
        stream = Stream(identity=(zlib.crc32(example_id.encode()), sample), ledger=Ledger(), example_id=example_id)
        try:
            fed = self._with_images(stream.ledger, prompt, images)
        except ValueError as error:
            raise ValueError(f"the prompt of example {example_id!r}: {error}") from error
        if len(fed["tokens"]) >= self.max_length:
            raise PromptTooLong(
                f"the prompt of example {example_id!r} has {len(fed['tokens'])} tokens, but a conversation may hold "
                f"{self.max_length} (the model's context is {self.config.max_length}): shorten it or raise max_length"
            )
        stream.ledger.feed(**fed)
        self._streams.append(stream)
        return stream

    def room(self, stream: Stream) -> int:
        """Tokens that the conversation may still take."""
        return self.max_length - len(stream.ledger)

    def feed(self, stream: Stream, tokens: Sequence[int], images: Sequence[ImageSource] = ()) -> None:
        """Appends tokens that the policy did not sample. They are prefilled with the next request.

        Args:
          images: the image for each image token among them, in order. (Without images, image tokens count as text.)

        Raises:
          DoesNotFit: there is no room for them; nothing is ever cut here.
          ValueError: an id has no row, an image can't be used, or the model sees no images.
        """
        fed = self._with_images(stream.ledger, tokens, images)
        if len(fed["tokens"]) > self.room(stream):
            raise DoesNotFit(f"{len(fed['tokens'])} tokens do not fit: {stream.name} has room for {self.room(stream)}")
        stream.ledger.feed(**fed)

    def _with_images(self, ledger: Ledger, tokens: Sequence[int], images: Sequence[ImageSource]) -> dict[str, Any]:
        """The arguments of `Ledger.feed`: each image's token repeated, and rotary positions on three axes."""
        check_ids(tokens, self.config.vocab_size)
        if not images:
            return {"tokens": tokens}
        if self.images is None:
            raise ValueError(f"a {self.config.model_type} model sees no images; use a vision-language model")
        return self.images.fed(tokens, images, ledger.next_position)

    def request(
        self,
        stream: Stream,
        *,
        stops: Sequence[str] = (),
        max_tokens: int | None = None,
        sampling: Sampling = GREEDY,
        given: Sequence[int] = (),
        begun: Sequence[int] = (),
        scored: bool = False,
        top: int = 0,
    ) -> None:
        """Requests the next turn, which `step` will produce. The turn ends at a stop string, an end token or a limit.

        Args:
          begun: last tokens of the conversation that belong to this turn, because a stop string may begin in them.
          given: tokens with which the turn begins. They are recorded as if they had been sampled, with the log-probabilities
            that the policy gives them. This is how a fork takes one of several choices.
          scored: the given tokens are all of the turn, and are only scored: they are recorded as fed, and the turn has their
            log-probabilities (`Generated.logprobs`).
          top: number of the likeliest tokens to return for each step (`Generated.tops`).

        Raises:
          DoesNotFit: the conversation is full.
          ValueError: a turn is already requested, `max_tokens` is below 1, `top` is above MOST_TOP, or the stop strings
            can't be used, or a given id has no row.
        """
        if stream.request is not None:
            raise ValueError(f"{stream.name} has a turn under way already")
        room = self.room(stream)
        if room < 1:
            raise DoesNotFit(f"{stream.name} is full; check `room` before asking for a turn")
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} must be at least 1")
        if not 0 <= top <= MOST_TOP:
            raise ValueError(f"top={top} must be in [0, {MOST_TOP}]")
        check_ids(given, self.config.vocab_size, "given")
        self._stops.add(stops)
        remaining = room if max_tokens is None else min(max_tokens, room)
        if len(given) > remaining:
            raise DoesNotFit(f"{len(given)} given tokens do not fit: {stream.name} may have a turn of {remaining}")
        request = Request(
            stops=tuple(stops),
            sampling=sampling,
            remaining=len(given) if scored else remaining,
            given=tuple(given),
            scored=scored,
            top=top,
        )
        if begun:
            request.automaton_state = self._stops.current()[0].after(begun)
        stream.request = request

    def fork(self, stream: Stream, sample: int) -> Stream:
        """A second conversation with the same history. It shares the cached part, and samples its next turns as `sample`."""
        if stream.request is not None:
            raise ValueError(f"{stream.name} has a turn under way and cannot be forked before it ends")
        copy = Stream(
            identity=(stream.identity[0], sample),
            ledger=stream.ledger.copy(),
            turn=stream.turn,
            example_id=stream.example_id,
        )
        self._streams.append(copy)
        self.share([(stream, copy)])
        return copy

    def probe(self, stream: Stream, name: str) -> Stream:
        """A fork that asks something aside and is closed again. Without a free row it borrows the conversation's own.

        Args:
          name: seeds what it samples.
        """
        probe = self.fork(stream, stream.identity[1])
        probe.identity = (zlib.crc32(name.encode()), stream.identity[1])
        probe.lender, probe.lent = stream, len(stream.ledger)
        if probe.row is None and stream.row is not None:
            self._copy_shared()
            probe.row, probe.cached, probe.last_used = stream.row, min(stream.cached, probe.lent - 1), self._clock
            stream.row, stream.cached = None, 0
        return probe

    def share(self, pairs: Sequence[tuple[Stream, Stream]]) -> None:
        """Gives each target a row, and copies into it the cached prefix that it has in common with its source.

        If the source's shard has no free row, the target is fed later instead. All rows are copied together before the next
        step.

        Args:
          pairs: (source, target); a target has no row yet.

        Raises:
          ValueError: their tokens differ.
        """
        for source, target in pairs:
            if any(source is waiting for _, waiting in self._shared):
                self._copy_shared()
            count = min(source.cached, len(target.ledger) - 1)
            if source.row is None or target.row is not None or count < 1:
                continue
            if source.prefix(count) != target.prefix(count):
                raise ValueError(
                    f"{target.name} differs from that of example {source.example_id!r}, sample {source.identity[1]}, "
                    f"within the {count} tokens that it would share"
                )
            row = self._table.take(near=source.row[0])
            if row is not None and row[0] == source.row[0]:
                target.row, target.cached, target.last_used = row, count, self._clock
                target.ledger.route(0, source.ledger.routes(count))
                self._shared.append((source, target))
            elif row is not None:
                self._table.release(row)

    def _copy_shared(self) -> None:
        """Copies shared prefixes between rows. Must run before any row is written or given to another conversation."""
        shared, self._shared = self._shared, []
        if shared and self._calls.cache is not None:  # without a cache, all rows are fed again
            self._calls.fork(shared)
            self.stats.forked_tokens += sum(target.cached for _, target in shared)

    def close(self, stream: Stream) -> None:
        """Ends a conversation and frees its row. Its ledger stays readable."""
        self._copy_shared()
        if (lender := stream.lender) is not None and lender.row is None and lender in self._streams:
            lender.row, lender.cached = stream.row, min(stream.cached, stream.lent - 1)  # what both have in common
            lender.ledger.route(0, stream.ledger.routes(lender.cached))
            stream.row = None
        if stream.row is not None:
            self._table.release(stream.row)
        stream.row, stream.request, stream.cached = None, None, 0
        self._streams.remove(stream)
        self._finished = [(other, turn) for other, turn in self._finished if other is not stream]
        if not self._streams:
            self._calls.free_scratch()

    @property
    def rows(self) -> int:
        """Number of conversations in the KV cache at once."""
        return self._table.shards * self._table.rows_per_shard

    @property
    def busy(self) -> bool:
        """True if a turn is waiting or running, or has not been returned yet."""
        return bool(self._finished) or any(stream.request is not None for stream in self._streams)

    # --- weights -------------------------------------------------------------------------------------------------------

    def update(self, params: nnx.State, version: int) -> None:
        """Sets new weights (same structure and sharding). Cached keys and values of live streams are dropped.

        Without a layout the engine uses these arrays themselves. With a layout it makes a copy, which is kept until the next
        update.
        """
        self._evict_all()
        self._load(params)
        self.version = version

    def rest(self) -> None:
        """Frees the cache and the weights until the next `update`, so that the learner can use their memory.

        Conversations stay open. They may be fed, and turns may be requested; all are prefilled again at the next step.
        """
        self._evict_all()
        self._calls.rest()

    def suspend(self) -> list[Stream]:
        """Takes all conversations out, with the turns that they are in, and frees their rows. Returns them for `resume`.

        Others may use the engine meanwhile, and it may get new weights.
        """
        self._evict_all()
        self._calls.free_scratch()
        streams, self._streams = self._streams, []
        return streams

    def resume(self, streams: Sequence[Stream]) -> None:
        """Takes suspended conversations back, ahead of all others. Their turns go on where they were.

        At the next step all their tokens are fed to the present weights: keys and values of other weights are never read. So
        each token's log-probability is that of the weights of its version, given the tokens before it.
        """
        self._streams = [*streams, *self._streams]

    # --- running -------------------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[Stream, Generated]]:
        """Prefills new tokens, decodes one segment, and returns the turns that finished in it.

        If a program fails or is interrupted, all rows are lost, and conversations are prefilled again at the next step. If the
        devices are out of memory, the engine goes on with half its rows.

        Raises:
          RuntimeError: the engine rests.
          OutOfMemory: the devices are out of memory, and the engine has one row left, or the job several processes.
        """
        with_less(self._step, self._fewer_rows, "rollouts", _REMEDY)
        finished, self._finished = self._finished, []
        return finished

    def _load(self, params: nnx.State) -> None:
        with_less(lambda: self._calls.load(params), self._fewer_rows, "rollouts", _REMEDY)

    def _fewer_rows(self) -> str | None:
        if self._table.rows_per_shard == 1:
            return None
        self._evict_all()
        self._table = RowTable(self._table.shards, self._table.rows_per_shard // 2)
        self._calls.resize(self._table)
        return f"config.engine.rows={self.rows}"

    def _step(self) -> None:
        if self._calls.params is None:
            raise RuntimeError("the engine rests: give it weights with `update` before its next step")
        if self._calls.cache is None:  # a program failed
            self._evict_all()
        self._clock += 1
        self._copy_shared()
        if running := self._schedule():
            self._extend_all(running)
            for part in self._calls.by_length(running):
                self._decode_segment(part)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        stops: Sequence[str] = (),
        max_tokens: int = 256,
        sampling: Sampling = GREEDY,
        progress: bool = False,
    ) -> list[Generated]:
        """One turn for each prompt, in order. This is the simplest use of the engine, without agents or tools."""
        streams = [self.open(prompt, example_id=str(i)) for i, prompt in enumerate(prompts)]
        results: dict[int, Generated] = {}
        index_of = {id(stream): i for i, stream in enumerate(streams)}
        try:
            for stream in streams:
                self.request(stream, stops=stops, max_tokens=max_tokens, sampling=sampling)
            with Bar(total=len(streams), desc="generating", unit="turn", disable=not progress) as bar:
                while self.busy:
                    for stream, generated in self.step():
                        results[index_of[id(stream)]] = generated
                        self.close(stream)
                        bar.update()
        finally:
            for stream in [s for s in streams if s in self._streams]:
                self.close(stream)
        return [results[i] for i in range(len(prompts))]

    @property
    def compilations(self) -> int:
        """Number of device programs compiled so far; bounded by the ladders of shapes."""
        return self._calls.compilations

    def _schedule(self) -> list[Stream]:
        """The streams that run now: those with a request and a row. Free rows are given in order of arrival."""
        wanting = [stream for stream in self._streams if stream.request is not None]
        shard_of: dict[tuple[int, ...], int] = {}  # streams with the same prompt go to one shard, to share it
        for stream in wanting:
            if stream.row is not None:
                continue
            prompt = tuple(stream.ledger.tokens)
            row = self._table.take(shard_of.get(prompt))
            if row is None and self._evict_idle():
                row = self._table.take(shard_of.get(prompt))
            if row is None:
                break
            shard_of[prompt] = row[0]
            stream.row = row
        running = [stream for stream in wanting if stream.row is not None]
        for stream in running:
            stream.last_used = self._clock
        return running

    def _evict_idle(self) -> bool:
        """Takes the row of the stream that has been idle longest. That stream will be prefilled again when it continues."""
        idle = [stream for stream in self._streams if stream.row is not None and stream.request is None]
        if not idle:
            return False
        victim = min(idle, key=lambda stream: stream.last_used)
        self._evict(victim)
        self.stats.evictions += 1
        return True

    def _evict(self, stream: Stream) -> None:
        self._copy_shared()
        if stream.row is not None:
            self._table.release(stream.row)
        stream.row, stream.cached = None, 0

    def _evict_all(self) -> None:
        self._shared = []
        for stream in self._streams:
            self._evict(stream)

    def _extend_all(self, running: list[Stream]) -> None:
        """Brings every row up to the last-but-one token of its ledger (decoding feeds the last one)."""
        leaders: dict[Any, Stream] = {}
        followers: list[tuple[Stream, Stream]] = []
        pending: list[Stream] = []
        for stream in running:
            target = len(stream.ledger) - 1
            if stream.cached >= target:
                continue
            assert stream.row is not None
            if stream.cached == 0:
                key = (stream.row[0], stream.prefix(target))
                if key in leaders:
                    followers.append((leaders[key], stream))
                    continue
                leaders[key] = stream
            pending.append(stream)
        missing = sum(len(stream.ledger) - 1 - stream.cached for stream in pending)
        self.stats.prefill_slots += self._calls.extend(pending)
        self.stats.prefilled_tokens += missing
        for leader, follower in followers:
            follower.cached = leader.cached
            follower.ledger.route(0, leader.ledger.routes(leader.cached))
            self.stats.forked_tokens += leader.cached
        if followers:
            self._calls.fork(followers)

    def _decode_segment(self, running: list[Stream]) -> None:
        stops = self._stops.current()
        leave_at = int(len(running) * self.leave_fraction)
        layout, outputs = self._calls.decode(running, stops, steps=self.segment, seed=self.seed, leave_at=leave_at)
        self.stats.decode_slots += outputs.counts.size * int(outputs.passes.max()) * (self.drafts + 1)
        self.stats.decode_passes += int(outputs.passes.sum())
        for slot, stream in layout:
            self.stats.decoded_tokens += int(outputs.counts[slot])
            if (generated := _record(stream, outputs, slot, stops[0], self.version)) is not None:
                self._finished.append((stream, generated))


def _record(
    stream: Stream, outputs: DecodeOutputs, slot: tuple[int, int], automaton: StopAutomaton, version: int
) -> Generated | None:
    """Records the new tokens of one row; returns the turn if it is finished.

    Args:
      slot: the row's index in the outputs.
      version: of the weights that sampled the tokens.
    """
    request = stream.turn_request
    count = int(outputs.counts[slot])
    new, logprobs = outputs.tokens[slot][:count].tolist(), outputs.logprobs[slot][:count].tolist()
    if request.scored:  # the policy did not choose them, so they are never trained on
        stream.ledger.feed(new)
        request.logprobs += logprobs
    else:
        stream.ledger.sample(new, logprobs, version)
    if outputs.chosen is not None:
        stream.ledger.route(stream.cached, list(outputs.chosen[slot][:count].copy()))
    stream.cached += count
    request.sampled += count
    request.tops += outputs.tops(slot, count, request.top)
    request.given = request.given[count:]
    request.remaining -= count
    request.automaton_state = int(outputs.states[slot])
    stopped = int(outputs.stopped[slot])
    if not stopped and request.remaining > 0:
        return None
    reason, stop = automaton.ending(stopped)
    stream.request = None
    stream.turn += 1
    tokens = stream.ledger.tokens[-request.sampled :]
    return Generated(tokens=tokens, stop_reason=reason, stop=stop, tops=request.tops, logprobs=request.logprobs)
