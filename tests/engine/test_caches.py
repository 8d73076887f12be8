"""The KV caches against whole forward passes: windows, rotary positions, sharded heads; and the paged one's own books."""

import jax
import numpy as np
import pytest
from flax import nnx

from routerl_jax.engine import programs
from routerl_jax.engine.cache import allocator
from routerl_jax.engine.device_calls import cache_kind
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.fused import FusedCache
from routerl_jax.engine.pages import PagedCache, page_length
from routerl_jax.engine.policy import EngineStats
from routerl_jax.engine.sampling import Sampling
from routerl_jax.engine.segments import SegmentCache
from routerl_jax.parallel.mesh import make_mesh
from tests import tiny
from tests.engine import reference

# Float32, but the kernel sums over blocks of positions and divides after each: another order of additions.
ATOL = 1e-4


@pytest.fixture(params=["segment, as on CPUs", "segment, as on old GPUs", "fused, as on GPUs", "paged, as on TPUs"])
def kind(request, interpreted, as_on_cpu):
    as_on_cpu(request.param == "segment, as on CPUs")
    return request.param.partition(",")[0]


def run_turn(engine, streams, tokens):
    for stream in streams:
        engine.request(stream, max_tokens=tokens, sampling=Sampling())
    while engine.busy:
        engine.step()


def test_multi_turn_conversations_equal_whole_forward_passes(kind):
    """With a windowed layer and a full one, rows and heads over four devices, a prompt that two share, a row that fills more
    than a page (128), turns over several segments, and conversations that lose their rows."""
    windows = {
        "model_type": "qwen2",
        "qkv_bias": True,
        "window": 5,
        "windowed": (True, False),
        "head_dim": 16,
        "seed": 3,
    }
    grid = make_mesh({"data": 1, "fsdp": 2, "tensor": 2}, jax.devices()[:4])
    model = tiny.model(mesh=grid, layout="tensor", **windows)
    engine = Engine(model, rows=4, max_length=200, segment=4, cache=kind)
    assert type(engine._calls.cache) is {"segment": SegmentCache, "fused": FusedCache, "paged": PagedCache}[kind]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, tiny.VOCABULARY, n).tolist() for n in (125, 17, 17, 3, 30)]
    prompts[2] = prompts[1]
    streams = [engine.open(prompt, str(i)) for i, prompt in enumerate(prompts)]
    run_turn(engine, streams, 6)
    assert engine.stats == EngineStats(
        **{**vars(engine.stats), "forked_tokens": 16, "prefilled_tokens": 124 + 16 + 2 + 29}
    )
    for stream in streams:
        engine.feed(stream, rng.integers(0, tiny.VOCABULARY, 9).tolist())
    run_turn(engine, streams, 7)
    alone = tiny.model(**windows)
    for stream in streams:
        sequence = stream.ledger.sequence()
        expected = reference.logprobs(alone, sequence.tokens)
        mask = sequence.loss_mask[1:]
        assert mask.sum() == 13
        np.testing.assert_allclose(sequence.logprobs[1:][mask], expected[mask], atol=ATOL)


def test_rotary_positions_are_apart_from_places_in_the_cache(kind):
    """As for images: several tokens share a position, and what follows goes on from another one than its index."""
    model = tiny.model(layers=1, head_dim=16)
    mesh = make_mesh(devices=jax.devices()[:1])
    graph, params = nnx.split(model)
    abstract = cache_kind(model.config, mesh, np.float32, kind).abstract(model.config, mesh, 1, 3, 64, np.float32)
    jitted = programs.jit_programs(graph, mesh, abstract)
    rng = np.random.default_rng(0)
    fed, steps = np.asarray([[12, 7]]), 4
    tokens = rng.integers(0, tiny.VOCABULARY, (1, 2, 16)).astype(np.int32)
    positions = np.sort(rng.integers(0, 40, (1, 2, 16)), axis=-1).astype(np.int32)
    offsets = np.asarray([[-3, 25]], np.int32)
    rows = np.asarray([[2, 0]], np.int32)
    cache, starts = allocator(abstract)(), np.zeros((1, 2), np.int32)
    for part in (fed // 2, fed - fed // 2):  # in two calls
        take = starts[..., None] + np.arange(8)
        cache, _ = jitted.extend(
            params=params,
            cache=cache,
            rows=rows,
            starts=starts,
            tokens=np.take_along_axis(tokens, take, axis=-1),
            positions=np.take_along_axis(positions, take, axis=-1),
            counts=part.astype(np.int32),
            span=64,
        )
        starts = starts + part.astype(np.int32)
    last = np.asarray([[5, 6]], np.int32)
    every = np.ones((1, 2), np.int32)
    cache, outputs, _ = jitted.decode(
        params=params,
        cache=cache,
        inputs=programs.DecodeInputs(
            rows=rows,
            starts=starts,
            offsets=offsets,
            tokens=last,
            limits=steps * every,
            states=0 * every,
            stop_masks=np.zeros((1, 2), np.uint32),
            identity=np.zeros((1, 2, 3), np.uint32),
            temperature=np.float32(every),
            top_p=np.float32(every),
            top_k=0 * every,
        ),
        transition=np.zeros((1, tiny.VOCABULARY), np.int32),
        hits=np.zeros((1, tiny.VOCABULARY), np.uint32),
        seed=np.int32(0),
        leave_at=np.int32(0),
        steps=steps,
        span=64,
        truncate=False,
    )
    for i, count in enumerate(fed[0]):
        whole = [*tokens[0, i, :count], last[0, i], *np.asarray(outputs.tokens)[0, i]]
        places = [*positions[0, i, :count], *(count + offsets[0, i] + np.arange(steps + 1))]
        expected = reference.logprobs(model, whole, places)[-steps:]
        np.testing.assert_allclose(np.asarray(outputs.logprobs)[0, i], expected, atol=ATOL)


def test_pages_hold_what_was_fed_and_nothing_else(interpreted):
    """Only the fed and sampled positions of used rows are written; the newest token is not."""
    engine = Engine(tiny.model(layers=1), rows=3, max_length=100, segment=4, leave_fraction=0, cache="paged")
    streams = [engine.open(list(range(1, n)), str(n)) for n in (12, 31)]
    engine.request(streams[0], max_tokens=3)
    engine.request(streams[1], max_tokens=50)
    engine.step()  # one segment: the first row stops after 3 of 4 steps, the second goes on
    written = np.asarray(engine._calls.cache.pages[0, 0] != 0)
    width = engine.config.head_dim
    assert not written[..., width:].any()
    filled = {stream.row[1]: stream.cached for stream in streams}
    assert {stream.cached for stream in streams} == {len(stream.ledger) - 1 for stream in streams}
    for row in range(3):
        places = np.flatnonzero(written[row].any(axis=(1, 2)))
        np.testing.assert_array_equal(places, np.arange(filled.get(row, 0)))
        assert written[row, places, :, :width].all()


@pytest.mark.parametrize("cache", ["fused", "paged"])
def test_kernels_compile_once_per_number_of_rows_whatever_the_lengths(cache, interpreted, as_on_cpu):
    as_on_cpu(False)  # chunks of 64 tokens, up to eight
    engine = Engine(tiny.model(layers=1, head_dim=16), rows=2, max_length=256, segment=4, cache=cache)
    for length in (3, 200):
        stream = engine.open([1] * length)
        engine.request(stream, max_tokens=5)
        while engine.busy:
            engine.step()
    # Rows of 3 and 204 tokens decode in one program; 2 tokens were fed in one chunk of eight, 199 in four.
    assert engine.compilations == 2


def test_pages_are_a_power_of_two_and_at_most_sixteen():
    assert [page_length(length) for length in (1, 128, 2048, 2049, 4096, 40_000)] == [128, 128, 128, 256, 256, 4096]


def test_which_cache_a_model_gets():
    mesh = make_mesh(devices=jax.devices()[:1])
    config = tiny.config()
    assert cache_kind(config, mesh, "float32") is SegmentCache  # a CPU
    assert cache_kind(config, mesh, "float32", "paged") is PagedCache
    with pytest.raises(ValueError, match=r"the fused kernel can't serve this model \(heads of 8 channels"):
        cache_kind(config, mesh, "float32", "fused")
    assert cache_kind(tiny.config(head_dim=16), mesh, "float32", "fused") is FusedCache
    three = tiny.config(heads=9, kv_heads=3)  # SmolLM2-135M: six combined heads, not a tile of bfloat16
    with pytest.raises(ValueError, match=r"the paged kernel can't serve this model.*set cache='segment'"):
        cache_kind(three, mesh, "bfloat16", "paged")
    with pytest.raises(ValueError, match="cache='pages' is unknown; choose auto, segment, fused or paged"):
        Engine(tiny.model(), rows=2, max_length=64, cache="pages")
