"""The engine's device programs: extend rows by given tokens, fork rows, decode a segment, encode images.

Rows belong to shards: array dimension 0 of the cache is split over the mesh's batch axes. A program accesses the rows of a
shard only from that shard, so no row ever moves between devices. Row indices are local to their shard. An index equal to the
number of rows is padding (reads give zeros, writes are dropped).

Dimensions: D shards, R rows per shard, A rows of a shard in this call, B = D * A, S new tokens or decode steps, P span of
cached positions that the call may read, Q automaton states, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, UInt32

from routerl_jax.engine.cache import KVCache
from routerl_jax.engine.policy import TopLogprobs
from routerl_jax.engine.sampling import row_keys, sample_tokens, token_logprobs, top_logprobs
from routerl_jax.models.attention import Attention
from routerl_jax.models.decoder import Decoder, Features
from routerl_jax.models.patches import VisionInputs
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.parallel.devices import compiled_programs
from routerl_jax.parallel.mesh import batch_sharding, on_tpu, replicated

LONGEST_MATCH = 3  # tokens that are looked up; if they do not occur earlier, the last two, then the last one
Host = Array | np.ndarray | jax.ShapeDtypeStruct  # an argument made on the host, or only its shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeInputs:
    """The host's inputs for each row of a decode segment."""

    rows: Int[Host, "D A"]  # local row, or R for padding
    starts: Int[Host, "D A"]  # tokens in the cache
    offsets: Int[Host, "D A"]  # rotary position of a token minus its index in the row; 0 for text
    tokens: Int[Host, "D A"]  # the newest token, not in the cache yet
    limits: Int[Host, "D A"]  # most tokens to sample here; 0 for padding
    states: Int[Host, "D A"]  # stop automaton states
    stop_masks: UInt32[Host, "D A"]  # bits of the stops that apply to the row
    identity: UInt32[Host, "D A 3"]  # example hash, sample index, turn
    temperature: Float[Host, "D A"]
    top_p: Float[Host, "D A"]
    top_k: Int[Host, "D A"]
    # tokens to take instead of sampled ones, -1 elsewhere; None: there are none
    given: Int[Host, "D A S"] | None = None
    # all tokens of the row, the newest included, from which drafts are copied, with room for S more; None: no drafts
    history: Int[Host, "D A H"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeOutputs:
    """The outputs of a decode segment."""

    tokens: Int[Array, "D A S"]
    logprobs: Float[Array, "D A S"]
    counts: Int[Array, "D A"]  # tokens sampled per row
    passes: Int[Array, "D A"]  # steps that sampled them; fewer where drafts were right
    states: Int[Array, "D A"]
    stopped: UInt32[Array, "D A"]  # bits of the stops that were completed, 0 if none
    # the likeliest tokens of each step, best first; None: not requested
    top_tokens: Int[Array, "D A S K"] | None = None
    top_logprobs: Float[Array, "D A S K"] | None = None
    # the experts of the token that each step read (of the token before the sampled one); None: not wanted
    chosen: Int[Array, "D A S L C"] | None = None

    def tops(self, slot: tuple[int, int], count: int, top: int) -> list[TopLogprobs]:
        """The `top` likeliest tokens of each of a row's first `count` steps; empty if none were requested."""
        if not top or self.top_tokens is None or self.top_logprobs is None:
            return []
        ids, values = (x[slot][:count, :top].tolist() for x in (self.top_tokens, self.top_logprobs))
        return [tuple(zip(*pair)) for pair in zip(ids, values)]


def extend(
    graph: nnx.GraphDef,
    mesh: Mesh,
    params: nnx.State,
    cache: KVCache,
    rows: Int[Array, "D A"],
    starts: Int[Array, "D A"],
    tokens: Int[Array, "D A S"],
    positions: Int[Array, "D A S"] | Int[Array, "D A S 3"],
    counts: Int[Array, "D A"],
    image_values: Float[Array, "D F E"] | Float[Array, "D F N E"] | None = None,
    image_index: Int[Array, "D A S"] | None = None,
    *,
    span: int,
    routes: bool = False,
) -> tuple[KVCache, Int[Array, "D A S L C"] | None]:
    """Feeds `counts` given tokens to each row, whose first `starts` positions are already cached (see KVCache.extension).

    With `routes`, also gives the experts that were chosen for each token.

    `positions` are the tokens' rotary positions (time, row and column for vision models); the position in the cache follows
    from `starts` alone. A token with `image_index` >= 0 gets that feature of its shard's `image_values`; -1: no image.
    """
    model: Decoder = nnx.merge(graph, params)
    rows, starts, tokens, positions, counts = _by_shard(mesh, (rows, starts, tokens, positions, counts))
    extension = cache.extension(rows, starts, counts, steps=tokens.shape[-1], span=span)
    flat, at = _by_shard(mesh, (extension.align(tokens), extension.align(positions)))
    features = None
    if image_values is not None and image_index is not None:
        values, index = _by_shard(mesh, (image_values, extension.align(image_index)))
        features = Features(values=values, index=index)
    ran = model.run(
        flat,
        at if at.ndim == 2 else jnp.moveaxis(at, -1, 0),
        extension.attend,
        extension.caches,
        shared=extension.shared,
        features=features,
        mesh=mesh,
    )
    chosen = extension.restore(ran.routing.chosen.astype(jnp.int16)) if routes and ran.routing else None
    return extension.finish(ran.caches), chosen


def encode(graph: nnx.GraphDef, mesh: Mesh, params: nnx.State, images: VisionInputs) -> Float[Array, "D F ..."]:
    """Features of the images of every shard, [D, P, ...]."""
    model: VisionLanguageModel = nnx.merge(graph, params)
    return model.features(_by_shard(mesh, images), attention=Attention.on(mesh))


def layers_apart(graph: nnx.GraphDef, params: nnx.State) -> list[nnx.State]:
    """The weights of each layer, copied out of the stack, for `decode`.

    Slices of the stack are free on TPUs. On CPUs and GPUs they are copies, which every call would make anew.
    """
    model: Decoder = nnx.merge(graph, params)
    return model.layer_weights()


def fork(cache: KVCache, sources: Int[Array, "D A"], targets: Int[Array, "D A"], *, span: int) -> KVCache:
    """Copies the first `span` cached positions of source rows to target rows of the same shard."""
    return cache.fork(sources, targets, span=span)


def decode(
    graph: nnx.GraphDef,
    mesh: Mesh,
    params: nnx.State,
    cache: KVCache,
    inputs: DecodeInputs,
    transition: Int[Array, "Q V"],
    hits: UInt32[Array, "Q V"],
    seed: Int[Array, ""],
    leave_at: Int[Array, ""],
    layers: Sequence[nnx.State] | None = None,
    *,
    steps: int,
    span: int,
    truncate: bool,
    top: int = 0,
    routes: bool = False,
    drafts: int = 0,
) -> tuple[KVCache, DecodeOutputs, Any]:
    """Samples up to `steps` tokens per row. Returns as soon as at most `leave_at` rows are still running.

    The last of the three results is the second one of `Segment.finish`.

    Args:
      layers: the result of `layers_apart`; None: every step reads slices of the stack.
      drafts: number of tokens, copied from the row's history (`lookup_drafts`), that a step reads with the newest one. It keeps
        those that are drawn.
      top: number of the likeliest tokens to return for each step.
      routes: also return the experts of each token that is read.
    """
    model: Decoder = nnx.merge(graph, params)
    cut = model.layer_weights() if layers is None else None
    shards, active = inputs.rows.shape
    batch = shards * active

    def flat(x: Host) -> Array:
        return _by_shard(mesh, jnp.asarray(x).reshape(batch, *x.shape[2:]))

    starts, stop_masks = flat(inputs.starts), flat(inputs.stop_masks)
    limits = jnp.minimum(flat(inputs.limits), steps)
    rotary = flat(inputs.offsets) + starts
    width = drafts + 1
    keys = jnp.repeat(row_keys(seed, flat(inputs.identity)), width, axis=0)
    temperature = jnp.repeat(flat(inputs.temperature), width)
    top_p, top_k = (jnp.repeat(flat(x), width) for x in (inputs.top_p, inputs.top_k)) if truncate else (None, None)
    given = None if inputs.given is None else jnp.pad(flat(inputs.given), ((0, 0), (0, drafts)), constant_values=-1)
    # room behind the last accepted token for drafts that are rejected
    room = steps + (width if drafts else 0)
    segment = cache.segment(*_by_shard(mesh, (inputs.rows, inputs.starts)), steps=room, span=span)
    ahead = jnp.arange(width)

    def running(counts: Array, stopped: Array) -> Bool[Array, " B"]:
        return (stopped == 0) & (counts < limits)

    def go_on(state: dict[str, Any]) -> Array:
        alive = running(state["counts"], state["stopped"]).sum()
        return (state["step"] < steps) & (alive > leave_at)

    def body(state: dict[str, Any]) -> dict[str, Any]:
        counts = state["counts"]
        alive = running(counts, state["stopped"])
        indices = counts[:, None] + ahead  # indices of this step's draws among the new tokens
        fixed = None if given is None else jnp.take_along_axis(given, indices, axis=1)
        read = state["token"][:, None]
        if drafts:
            draft = lookup_drafts(state["history"], starts + 1 + counts, drafts)
            draft = draft if fixed is None else jnp.where(fixed[:, :-1] >= 0, fixed[:, :-1], draft)
            read = jnp.concatenate([read, jnp.maximum(draft, 0)], axis=1)
        read = _by_shard(mesh, read)
        hidden, cached, routing = model.run(
            read,
            rotary[:, None] + indices,
            segment.attend(counts if drafts else state["step"], alive),
            state["cached"],
            unroll=True,
            layers=layers or model.layer_weights(cut),
            shared=segment.shared,
            mesh=mesh,
        )
        logits = model.policy_logits(hidden).reshape(batch * width, -1)
        positions = (starts[:, None] + indices + 1).reshape(-1)
        drawn, logprob = sample_tokens(logits, keys, positions, temperature, top_p, top_k)
        if fixed is not None:
            flat_fixed = fixed.reshape(-1)
            drawn = jnp.where(flat_fixed >= 0, flat_fixed, drawn)
            logprob = jnp.where(flat_fixed >= 0, token_logprobs(logits, drawn, temperature), logprob)
        drawn, logprob = drawn.reshape(batch, width), logprob.reshape(batch, width)
        going, token, automaton, stopped = alive, state["token"], state["automaton"], state["stopped"]
        accepted_draws = []
        for i in range(width):
            accepted_draws.append(going)
            hit = hits[automaton, drawn[:, i]] & stop_masks
            token = jnp.where(going, drawn[:, i], token)
            stopped = jnp.where(going, hit, stopped)
            automaton = jnp.where(going, transition[automaton, drawn[:, i]], automaton)
            if i < drafts:  # the next draw belongs to this sequence if the draft equals the drawn token
                going = going & (draft[:, i] == drawn[:, i]) & (hit == 0) & (counts + i + 1 < limits)
        accepted = jnp.stack(accepted_draws, axis=1)
        tops = state["tops"]
        if top:
            likeliest = (x.reshape(batch, width, -1) for x in top_logprobs(logits, temperature, top))
            tops = [_put(held, new, counts, accepted) for held, new in zip(tops, likeliest)]
        chosen = state["chosen"]
        if routes and routing is not None:
            chosen = _put(chosen, routing.chosen.astype(jnp.int16), counts, accepted)
        return {
            "step": state["step"] + 1,
            "token": token,
            "cached": cached,
            "history": _put(state["history"], drawn, starts + 1 + counts, accepted) if drafts else None,
            "tokens": _put(state["tokens"], drawn, counts, accepted),
            "logprobs": _put(state["logprobs"], logprob, counts, accepted),
            "counts": counts + accepted.sum(axis=1),
            "passes": state["passes"] + alive,
            "automaton": automaton,
            "stopped": stopped,
            "tops": tops,
            "chosen": chosen,
        }

    shape, experts = (batch, steps, min(top, model.config.vocab_size)), model.config.experts
    routed = None if experts is None or not routes else (model.config.sparse.count(True), experts.chosen)
    state = {
        "step": jnp.int32(0),
        "token": flat(inputs.tokens),
        "cached": segment.state,
        "history": None if inputs.history is None else flat(inputs.history),
        "tokens": jnp.zeros((batch, steps), jnp.int32),
        "logprobs": jnp.zeros((batch, steps), jnp.float32),
        "counts": jnp.zeros(batch, jnp.int32),
        "passes": jnp.zeros(batch, jnp.int32),
        "automaton": flat(inputs.states),
        "stopped": jnp.zeros(batch, jnp.uint32),
        "tops": [jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)] if top else [],
        "chosen": None if routed is None else jnp.zeros((batch, steps, *routed), jnp.int16),
    }
    state = jax.lax.while_loop(go_on, body, state)

    def by_shard(x: Array | None) -> Any:
        return None if x is None else x.reshape(shards, -1, *x.shape[1:])

    tops = state["tops"] or [None, None]
    outputs = DecodeOutputs(
        tokens=by_shard(state["tokens"]),
        logprobs=by_shard(state["logprobs"]),
        counts=by_shard(state["counts"]),
        passes=by_shard(state["passes"]),
        states=by_shard(state["automaton"]),
        stopped=by_shard(state["stopped"]),
        top_tokens=by_shard(tops[0]),
        top_logprobs=by_shard(tops[1]),
        chosen=by_shard(state["chosen"]),
    )
    cache, scratch = segment.finish(state["cached"], outputs.counts)
    return cache, outputs, scratch


def lookup_drafts(history: Int[Array, "B L"], lengths: Int[Array, " B"], count: int) -> Int[Array, "B C"]:
    """The `count` tokens after the latest and longest earlier match of a row's last tokens; -1 where there are none.

    A searching policy repeats what it has read: names, titles, whole sentences. A decode step reads such a draft together with
    the newest token, and keeps as much of it as the policy samples (prompt lookup decoding, A. Saxena 2023, in transformers
    `prompt_lookup_num_tokens`; vLLM's `ngram`). The policy's own draws decide, each with the randomness of its position. So
    drafts change the number of steps, and not the sampled tokens.

    Args:
      history: tokens of each row.
      lengths: how many of them there are; at least 1.
    """
    size = history.shape[1]
    index = jnp.arange(size)
    matches = index < lengths[:, None] - 1  # earlier positions at which the last tokens stand
    longest = jnp.zeros_like(history)
    for back in range(LONGEST_MATCH):
        at = lengths - 1 - back
        last = jnp.take_along_axis(history, jnp.maximum(at, 0)[:, None], axis=1)
        matches = matches & (jnp.roll(history, back, axis=1) == last) & (index >= back) & (at >= back)[:, None]
        longest = longest + matches
    match = jnp.argmax(longest * size + index * (longest > 0), axis=1)
    positions = match[:, None] + 1 + jnp.arange(count)
    tokens = jnp.take_along_axis(history, jnp.minimum(positions, size - 1), axis=1)
    return jnp.where((longest.max(axis=1) > 0)[:, None] & (positions < lengths[:, None]), tokens, -1)


def _put(values: Array, new: Array, columns: Int[Array, " B"], accepted: Bool[Array, "B T"]) -> Array:
    """`values` [B, S, ..] with the accepted entries of `new` [B, T, ..] from each row's column on, as far as S reaches."""
    index = jnp.arange(values.shape[1])
    for t in range(accepted.shape[1]):
        here = accepted[:, t, None] & (index == columns[:, None] + t)
        here = here.reshape(*here.shape, *(1,) * (values.ndim - 2))
        values = jnp.where(here, new[:, t, None], values)
    return values


def _by_shard(mesh: Mesh, tree: Any) -> Any:
    """Constrains arrays of rows to their shards' devices. Without it, every device may compute everything."""
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(jnp.asarray(x), batch_sharding(mesh)), tree)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """The jitted programs of engines. The cache is donated to them. `layers` is None where slices of the stack are free."""

    layers: Any
    extend: Any
    fork: Any
    decode: Any
    encode: Any

    def compiled(self) -> int:
        """Number of programs that were compiled, without `layers`."""
        return compiled_programs(self.extend, self.fork, self.decode, self.encode)


def jit_programs(graph: nnx.GraphDef, mesh: Mesh, cache: KVCache) -> Programs:
    """Programs for a model and an abstract cache on a mesh. Engines of equal ones share them, and what is compiled."""
    return _shared_programs(graph, mesh, jax.tree.map(lambda leaf: leaf.sharding, cache))


@functools.lru_cache(maxsize=8)  # programs hold no weights, but their code takes memory
def _shared_programs(graph: nnx.GraphDef, mesh: Mesh, cache_shardings: Any) -> Programs:
    return Programs(
        layers=None if on_tpu(mesh) else jax.jit(functools.partial(layers_apart, graph)),
        extend=jax.jit(
            functools.partial(extend, graph, mesh),
            static_argnames=("span", "routes"),
            donate_argnames=("cache",),
            out_shardings=(cache_shardings, replicated(mesh)),
        ),
        fork=jax.jit(  # a partial, so that its compilations are counted separately from those of other caches
            functools.partial(fork),
            static_argnames=("span",),
            donate_argnames=("cache",),
            out_shardings=cache_shardings,
        ),
        decode=jax.jit(
            functools.partial(decode, graph, mesh),
            static_argnames=("steps", "span", "truncate", "top", "routes", "drafts"),
            donate_argnames=("cache",),
            out_shardings=(cache_shardings, replicated(mesh), None),
        ),
        encode=jax.jit(functools.partial(encode, graph, mesh), out_shardings=batch_sharding(mesh)),
    )
