"""The engine against generation by whole forward passes, and its books."""

import dataclasses
import gc
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from routerl_jax.engine.engine import Engine
from routerl_jax.engine.policy import EngineStats, Generated
from routerl_jax.engine.rows import (
    Chunk,
    PrefillShapes,
    RowTable,
    cheapest_cuts,
    decode_rows,
    decode_spans,
    filled_size,
    ladder,
    most_rows,
    prefill_rows,
    round_up,
)
from routerl_jax.engine.sampling import GREEDY, Sampling
from routerl_jax.parallel.mesh import single_device_mesh
from tests import tiny

FREE = Sampling()


def prompts(count, seed=0, shortest=3, longest=30):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, tiny.VOCABULARY, rng.integers(shortest, longest)).tolist() for _ in range(count)]


def greedy_reference(model, tokens, steps):
    """Greedy continuation by one whole forward pass per token."""
    tokens = list(tokens)
    forward = jax.jit(lambda t: model(t))
    for _ in range(steps):
        padded = jnp.asarray([tokens + [0] * (256 - len(tokens))])
        tokens.append(int(np.asarray(forward(padded))[0, len(tokens) - 1].argmax()))
    return tokens


def finish(engine):
    """Runs until no turn is under way; finished turns by stream."""
    done = {}
    while engine.busy:
        for stream, generated in engine.step():
            done[id(stream)] = generated
    return done


def test_greedy_multi_turn_generation_equals_whole_forward_passes():
    model = tiny.model()
    engine = Engine(model, rows=4, max_length=200)
    for prompt, observation in zip(prompts(3), prompts(3, seed=1, longest=60)):
        stream = engine.open(prompt)
        engine.request(stream, max_tokens=9)
        first = finish(engine)[id(stream)]
        expected = greedy_reference(model, prompt, 9)
        assert prompt + first.tokens == expected
        engine.feed(stream, observation)
        engine.request(stream, max_tokens=7)
        second = finish(engine)[id(stream)]
        assert second.tokens == greedy_reference(model, expected + observation, 7)[-7:]
        assert stream.ledger.tokens == expected + observation + second.tokens
        engine.close(stream)


def test_log_probs_equal_a_forward_pass_over_the_ledger():
    model = tiny.model(devices=2)
    engine = Engine(model, rows=6, max_length=200)
    streams = [engine.open(p, str(i)) for i, p in enumerate(prompts(5))]
    for turn in range(3):
        for stream in streams:
            engine.request(stream, max_tokens=5 + turn, sampling=Sampling(temperature=0.7))
        finish(engine)
        for stream, extra in zip(streams, prompts(5, seed=turn + 10)):
            engine.feed(stream, extra)
    for stream in streams:
        sequence = stream.ledger.sequence()
        logits = np.asarray(model(jnp.asarray(sequence.tokens[None])))[0] / 0.7
        expected = jax.nn.log_softmax(logits)[np.arange(len(sequence) - 1), sequence.tokens[1:]]
        mask = sequence.loss_mask[1:]
        assert mask.sum() == 5 + 6 + 7
        np.testing.assert_allclose(sequence.logprobs[1:][mask], np.asarray(expected)[mask], atol=1e-4)


def test_every_token_is_prefilled_once_and_group_prompts_are_shared():
    engine = Engine(tiny.model(), rows=8, max_length=200)
    prompt = prompts(1, shortest=20)[0]
    streams = [engine.open(prompt, "q", sample) for sample in range(8)]
    for stream in streams:
        engine.request(stream, max_tokens=6, sampling=Sampling())
    finish(engine)
    # The last prompt token is fed by the first decode step, so a prompt of n tokens is prefilled as n - 1.
    assert engine.stats.prefilled_tokens == len(prompt) - 1
    assert engine.stats.forked_tokens == 7 * (len(prompt) - 1)
    engine.stats = EngineStats()
    for stream in streams:
        engine.feed(stream, [1, 2, 3, 4])
        engine.request(stream, max_tokens=3, sampling=Sampling())
    finish(engine)
    # Per stream: the last sampled token and three of the four new ones; never the conversation so far.
    assert engine.stats.prefilled_tokens == 8 * 4


def test_samples_of_a_group_differ_and_repeat():
    def sample(rows):
        engine = Engine(tiny.model(), rows=rows, max_length=128, seed=3)
        streams = [engine.open([5, 6, 7], "q", sample) for sample in range(6)]
        for stream in streams:
            engine.request(stream, max_tokens=10, sampling=Sampling())
        finish(engine)
        return [tuple(stream.ledger.tokens) for stream in streams]

    first = sample(8)
    assert len(set(first)) == 6
    assert sample(8) == first


def test_more_conversations_than_rows_give_the_same_tokens():
    def texts(rows):
        engine = Engine(tiny.model(), rows=rows, max_length=200)
        streams = [engine.open(p, str(i)) for i, p in enumerate(prompts(10))]
        for turn in range(2):
            for stream in streams:
                engine.request(stream, max_tokens=8, sampling=Sampling())
            finish(engine)
            for stream, extra in zip(streams, prompts(10, seed=turn + 50)):
                engine.feed(stream, extra)
        return [stream.ledger.tokens for stream in streams], engine.stats

    roomy, stats = texts(10)
    assert stats.evictions == 0
    crowded, stats = texts(3)
    assert stats.evictions > 0
    assert crowded == roomy


def test_result_does_not_depend_on_schedule_or_company():
    """Each conversation alone, all together, in short segments, on eight devices: the same tokens and (to 1e-5) log-probs.

    The conversations sample differently; only some are truncated.
    """
    samplings = [Sampling(top_p=0.9), Sampling(), Sampling(temperature=0.7), Sampling(top_k=5), GREEDY, Sampling()]

    def run(devices, rows, order, **schedule):
        engine = Engine(tiny.model(devices), rows=rows, max_length=128, seed=1, **schedule)
        made = {}
        for i in order:
            stream = engine.open(prompts(6)[i], f"example {i}", sample=i % 2)
            engine.request(stream, stops=["Day"], max_tokens=20, sampling=samplings[i])
            made[i] = stream
            if rows == 1:
                finish(engine)
                engine.close(stream)
        finish(engine)
        return [made[i].ledger.sequence() for i in range(6)]

    together = run(1, 8, range(6))
    others = [
        run(1, 1, range(6)),
        run(8, 16, range(6)),
        run(1, 8, [3, 1, 5, 0, 2, 4], segment=3, leave_fraction=0),
        run(1, 4, range(6), segment=3, leave_fraction=0.9),  # rows change hands while others are in mid-turn
    ]
    for other in others:
        for a, b in zip(together, other):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_a_prefill_call_takes_a_bounded_number_of_tokens(monkeypatch, as_on_cpu):
    """Ten prompts of 32 new tokens on each of two shards. A GPU takes them in one call, or eight and two; a CPU takes
    chunks that fill its calls. The turns are the same."""

    def run(most, *, cpu=False):
        monkeypatch.setattr("routerl_jax.engine.rows.PREFILL_TOKENS", most)
        as_on_cpu(cpu)
        engine = Engine(tiny.model(2), rows=64, max_length=64)
        fed, extend = [], engine._calls._programs.extend

        def counted(**inputs):
            fed.append((inputs["tokens"].shape, (inputs["counts"] > 0).sum(axis=1).tolist()))
            return extend(**inputs)

        engine._calls._programs = dataclasses.replace(engine._calls._programs, extend=counted)
        turns = engine.generate(prompts(20, shortest=33, longest=34), max_tokens=5, sampling=FREE)
        assert engine.stats.prefill_slots == sum(int(np.prod(shape)) for shape, _ in fed)
        return [turn.tokens for turn in turns], fed

    whole, calls = run(16_384)
    assert calls == [((2, 32, 32), [10, 10])]
    split, calls = run(8 * 32)
    assert calls == [((2, 8, 32), [8, 8]), ((2, 8, 32), [2, 2])]
    filled, calls = run(16_384, cpu=True)
    assert calls == [((2, 8, 32), [8, 8]), ((2, 2, 32), [2, 2])]
    assert filled == split == whole


def test_stop_strings_end_turns_and_stay_in_the_text():
    model = tiny.model()
    engine = Engine(model, rows=4, max_length=128)
    free = engine.generate(prompts(4), max_tokens=30, sampling=Sampling(temperature=1.0))
    text = model.tokenizer.decode(free[0].tokens)
    stop = re.search(r"[ -~]{3,}", text[3:])[0][:4]  # some plain characters from the middle of what it will write
    stopped = engine.generate(prompts(4), max_tokens=30, stops=[stop, "never"], sampling=Sampling(temperature=1.0))
    assert (stopped[0].stop_reason, stopped[0].stop) == ("stop", stop)
    ended = model.tokenizer.decode(stopped[0].tokens)
    assert text.startswith(ended)
    assert stop in ended
    assert stop not in model.tokenizer.decode(stopped[0].tokens[:-1])  # it ended with the token that completed the stop


def test_a_stop_string_may_span_two_segments():
    model = tiny.model()
    written = [
        r.tokens for r in Engine(model, rows=8, max_length=128).generate(prompts(8), max_tokens=30, sampling=FREE)
    ]
    text_of = model.tokenizer.token_bytes

    def spanning(tokens, border):
        """The last byte before the border and the first after it, if they are plain and first meet there."""
        stop = text_of[tokens[border - 1]][-1:] + text_of[tokens[border]][:1]
        before = b"".join(text_of[token] for token in tokens[:border])
        return stop.decode() if re.fullmatch(rb"[!-~]{2}", stop) and stop not in before else None

    found = [(i, b, spanning(tokens, b)) for i, tokens in enumerate(written) for b in range(3, len(tokens), 3)]
    place, border, stop = next(each for each in found if each[2])
    for segment in (3, 32):
        engine = Engine(model, rows=8, max_length=128, segment=segment, leave_fraction=0)
        stopped = engine.generate(prompts(8), max_tokens=30, stops=[stop], sampling=FREE)[place]
        assert (stopped.stop_reason, stopped.stop) == ("stop", stop)
        assert stopped.tokens == written[place][: border + 1]


def test_a_stop_string_may_begin_in_what_a_turn_has_already() -> None:
    """A turn in two requests: the tokens of the first are told to the second."""
    engine = Engine(tiny.model(), rows=1, max_length=128)
    [before], [after] = (engine.tokenizer.encode(letter) for letter in "ab")
    for begun, ended in (([before], "stop"), ([], "length")):
        stream = engine.open([*prompts(1)[0], before])
        engine.request(stream, stops=["ab"], max_tokens=1, given=[after], begun=begun)
        [(_, turn)] = engine.step()
        assert (turn.tokens, turn.stop_reason) == ([after], ended)
        engine.close(stream)


def test_end_tokens_end_turns():
    prompt = prompts(2)[1]
    new = greedy_reference(tiny.model(), prompt, 12)[len(prompt) :]
    place = next(i for i in range(3, 12) if new[i] not in new[:i])
    engine = Engine(tiny.model(eos_ids=(new[place],)), rows=2, max_length=100)
    stream = engine.open(prompt)
    engine.request(stream, max_tokens=40, stops=["never"])
    assert finish(engine)[id(stream)] == Generated(tokens=new[: place + 1], stop_reason="eos", stop=None)
    assert stream.ledger.tokens == prompt + new[: place + 1]
    engine.close(stream)
    assert engine._table.free() == engine.rows == 2


def test_limits_end_turns():
    engine = Engine(tiny.model(), rows=2, max_length=40)
    turns = []
    for limit in (7, 1000):
        stream = engine.open([1, 2, 3])
        engine.request(stream, max_tokens=limit)
        turns.append(finish(engine)[id(stream)])
        assert engine.room(stream) == 40 - len(stream.ledger)
    assert [(len(turn.tokens), turn.stop_reason) for turn in turns] == [(7, "length"), (37, "length")]


def test_a_fork_continues_like_its_source():
    model = tiny.model()
    engine = Engine(model, rows=4, max_length=128)
    source = engine.open(prompts(1)[0], "q", 0)
    engine.request(source, max_tokens=5)
    finish(engine)
    prefilled = engine.stats.prefilled_tokens
    copy = engine.fork(source, sample=1)
    for stream in (source, copy):
        engine.feed(stream, [9, 8, 7])
        engine.request(stream, max_tokens=6)
    done = finish(engine)
    assert done[id(source)].tokens == done[id(copy)].tokens  # greedy
    assert engine.stats.prefilled_tokens - prefilled == 2 * 3  # the shared history was not fed again
    engine.feed(copy, [1])
    assert len(copy.ledger) == len(source.ledger) + 1


def test_new_weights_take_effect_and_are_recorded():
    engine = Engine(tiny.model(), rows=2, max_length=128)
    stream = engine.open(prompts(1)[0])
    engine.request(stream, max_tokens=4)
    finish(engine)
    other = tiny.model(seed=1)
    engine.update(nnx.state(other, nnx.Param), version=5)
    engine.request(stream, max_tokens=4)
    turn = finish(engine)[id(stream)]
    assert turn.tokens == greedy_reference(other, stream.ledger.tokens[:-4], 4)[-4:]
    sequence = stream.ledger.sequence()
    assert sequence.versions[sequence.loss_mask].tolist() == [0] * 4 + [5] * 4


def test_an_engine_that_rests_holds_nothing_and_goes_on_after_an_update():
    """Its cache and its own weights are gone, the model's are not; conversations go on as if it had not rested."""
    model = tiny.model(dtype=jnp.bfloat16)
    model.compute_dtype = jnp.dtype(jnp.float32)
    params = nnx.state(model, nnx.Param)

    def held():
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    def converse(rests):
        engine = Engine(model, rows=4, max_length=128, layout="replicated")
        streams = [engine.open(prompt, str(i)) for i, prompt in enumerate(prompts(3))]
        for turn in range(2):
            if turn:
                engine.fork(streams[0], sample=1)  # its row would be copied before the next step
            for stream in streams:
                engine.request(stream, max_tokens=6, sampling=FREE)
            if turn and rests:
                scratch = sum(leaf.nbytes for leaf in jax.tree.leaves(engine._calls._scratch))
                assert scratch
                before = held()
                engine.rest()
                copy = sum(leaf.size * 4 for leaf in jax.tree.leaves(params))
                copy += sum(leaf.size * 4 for leaf in jax.tree.leaves(params["blocks"]))  # each layer's apart
                cache = 4 * 128 * 2 * 2 * 8 * 4 * 2  # rows, tokens, k and v of 2 heads of 8 in float32, layers
                assert before - held() == copy + cache + scratch
                with pytest.raises(RuntimeError, match="the engine rests: give it weights"):
                    engine.step()
            if turn:
                engine.update(params, version=1)
            finish(engine)
        return [stream.ledger.tokens for stream in streams]

    assert converse(rests=True) == converse(rests=False)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("end", ["close", "suspend"])
def test_what_is_kept_between_decode_calls_is_freed_with_the_last_conversation(end):
    engine = Engine(tiny.model(), rows=4, max_length=128)
    first, second = (engine.open(prompt, str(i)) for i, prompt in enumerate(prompts(2)))
    engine.request(second, max_tokens=6, sampling=FREE)
    finish(engine)
    if end == "close":
        engine.close(second)
    assert jax.tree.leaves(engine._calls._scratch)
    engine.close(first) if end == "close" else engine.suspend()
    assert not jax.tree.leaves(engine._calls._scratch)


@pytest.mark.parametrize("program", ["extend", "fork", "decode"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_after_a_program_that_failed_conversations_are_fed_anew(monkeypatch, program, error):
    """It was given the cache to write into, which is then perhaps gone. Some are closed before the engine steps again."""
    texts = prompts(3, seed=5)
    engine, untouched = (Engine(tiny.model(), rows=6, max_length=120, segment=4) for _ in range(2))
    streams = [engine.open(text, str(i)) for i, text in enumerate(texts)]
    expected = untouched.generate(texts, max_tokens=10, sampling=FREE)
    for stream in streams:
        engine.request(stream, max_tokens=10, sampling=FREE)
    other = engine.open(texts[0], "other")
    engine.request(other, max_tokens=1)
    while other.request is not None:
        engine.step()
    forked = engine.fork(other, 1)  # its row is copied before the next step
    engine.feed(other, texts[1])
    engine.request(other, max_tokens=1)
    programs = engine._calls._programs

    def fail(*, cache, **_):
        jax.tree.map(lambda leaf: leaf.delete(), cache)
        raise error("no room")

    with monkeypatch.context() as patch:
        patch.setattr(engine._calls, "_programs", dataclasses.replace(programs, **{program: fail}))
        with pytest.raises(error, match="no room"):
            engine.step()
    engine.fork(forked, 2)
    engine.close(forked)
    done = finish(engine)
    assert [done[id(stream)].tokens for stream in streams] == [turn.tokens for turn in expected]


def test_a_second_engine_of_the_same_model_compiles_nothing_and_has_its_own_weights():
    """Programs are shared; weights are not a part of them. Another length of rows has programs of its own."""
    prompt, made = prompts(1, 3, 20, 30)[0], []
    for seed, length in ((0, 112), (0, 112), (5, 112), (0, 144)):
        engine = Engine(tiny.model(seed=seed), rows=4, max_length=length)
        stream = engine.open(prompt)
        engine.request(stream, max_tokens=12, sampling=GREEDY)
        finish(engine)
        sequence = stream.ledger.sequence()
        made.append((sequence.tokens.tolist(), sequence.logprobs.tolist(), engine.compilations))
    first, same, other, longer = made
    assert first[2] > 0
    assert (same[2], other[2]) == (0, 0)
    assert longer[2] > 0
    assert first[0] == same[0]
    assert first[1] == same[1]
    assert first[1] != other[1]


def test_compilations_are_counted_and_stop_after_warm_up(as_on_cpu):
    as_on_cpu(False)  # the sizes of a GPU
    engine = Engine(tiny.model(), rows=16, max_length=256)

    def workload(seed):
        rng = np.random.default_rng(seed)
        streams = [
            engine.open(p, f"{seed}-{i}", sample) for i, p in enumerate(prompts(8, seed, 3, 60)) for sample in (0, 1)
        ]
        samplings = [FREE, GREEDY, Sampling(top_p=0.9), Sampling(top_k=3)] if seed % 2 else [FREE, GREEDY]
        for turn in range(3):
            for i, stream in enumerate(streams[: 16 if turn < 2 else int(rng.integers(1, 17))]):
                sampling = samplings[i % len(samplings)]
                engine.request(stream, stops=["Day"], max_tokens=int(rng.integers(4, 30)), sampling=sampling)
            finish(engine)
            for stream in streams:
                engine.feed(stream, rng.integers(0, tiny.VOCABULARY, rng.integers(1, 30)).tolist())
        for stream in streams:
            engine.close(stream)

    for seed in range(6):
        workload(seed)
    # Rows are rounded up to 8 or 16, new tokens to 32, 64, ..., cached ones to 0 or 256.
    prompts_fed = 2  # 8 prompts of up to 32 or up to 64 tokens
    prompts_copied = 1  # 8 of them
    observations_fed = 2  # up to 32 tokens after cached ones, 8 or 16 rows
    decoded = 4  # 8 or 16 rows, some truncated or none
    warm = prompts_fed + prompts_copied + observations_fed + decoded
    assert engine.compilations == warm
    for seed in range(6, 10):
        workload(seed)
    assert engine.compilations == warm


def test_prefill_in_chunks_changes_nothing_but_the_slots(as_on_cpu):
    """As on CPUs, chunks of 32 tokens that read their rows in blocks of 128; as on GPUs, whole rows padded to the longest."""

    def run(chunks):
        as_on_cpu(chunks)
        engine = Engine(tiny.model(), rows=4, max_length=256)
        streams = [engine.open(prompt) for prompt in prompts(6, seed=4, shortest=70, longest=150)]
        for turn in range(2):
            for stream in streams:
                engine.request(stream, max_tokens=6)
            finish(engine)
            for stream, observation in zip(streams, prompts(6, seed=turn, shortest=33, longest=40)):
                engine.feed(stream, observation)
        return [stream.ledger.sequence() for stream in streams], engine.stats

    parts, parts_stats = run(chunks=True)
    whole, whole_stats = run(chunks=False)
    for part, once in zip(parts, whole):
        np.testing.assert_array_equal(part.tokens, once.tokens)
        np.testing.assert_allclose(part.logprobs, once.logprobs, atol=1e-5)
    assert parts_stats.prefilled_tokens == whole_stats.prefilled_tokens
    assert parts_stats.prefill_slots < 0.7 * whole_stats.prefill_slots


def test_calls_of_chunks_are_filled():
    """A row of 70 new tokens and one of 300 on shard 0, one of 40 on shard 1: chunks of 32 in order, 3 + 10 and 2."""

    class Holder:
        def __init__(self, shard):
            self.row = (shard, 0)

    missing = [Chunk(holder=Holder(shard), start=5, stop=5 + count) for shard, count in ((0, 70), (0, 300), (1, 40))]
    shapes = PrefillShapes(steps=(32,), sizes=(1, 2, 4, 8), spans=(400,), chunked=True)
    calls = list(shapes.calls(missing))
    assert [len(chunks) for _, chunks in calls] == [8 + 2, 4, 1]
    for each in missing:
        own = [(c.start, c.stop) for _, chunks in calls for c in chunks if c.holder is each.holder]
        assert own[0][0] == each.start
        assert own[-1][1] == each.stop
        assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(own))
        assert {stop - start for start, stop in own[:-1]} == {32}
    assert [filled_size(count, (1, 2, 4, 8, 16, 32)) for count in (1, 3, 5, 7, 13, 14, 27, 28, 99)] == [
        *(1, 4, 4, 8, 8, 16, 16, 32, 32)
    ]
    assert [filled_size(count, (8, 16, 32)) for count in (1, 12, 15, 28)] == [8, 8, 16, 32]


def test_long_rows_decode_apart_from_short_ones_and_nothing_changes(as_on_cpu):
    """One conversation of 700 tokens among 30 short ones: calls for those read no more than 256 tokens of a row."""

    def run(apart):
        as_on_cpu(apart)
        engine = Engine(tiny.model(max_length=1024), rows=40, max_length=1024)
        calls, decode = [], engine._calls._programs.decode

        def noted(**options):
            calls.append((options["span"], options["inputs"].rows.size))
            return decode(**options)

        noted._cache_size = decode._cache_size
        engine._calls._programs = dataclasses.replace(engine._calls._programs, decode=noted)
        texts = [*prompts(5), *prompts(1, seed=1, shortest=700, longest=701), *prompts(25, seed=2)]
        streams = [engine.open(prompt, str(i)) for i, prompt in enumerate(texts)]
        for stream in streams:
            engine.request(stream, max_tokens=5, sampling=FREE)
        assert set(finish(engine)) == set(map(id, streams))
        return [stream.ledger.sequence() for stream in streams], set(calls)

    apart, calls = run(apart=True)
    together, one_call = run(apart=False)
    assert calls == {(256, 32), (768, 2)}
    assert one_call == {(1024, 32)}
    for ours, theirs in zip(apart, together):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)


def test_cuts_are_the_cheapest_of_all():
    """Beside every way to cut; by hand where weights are nothing (all apart) or everything (one call)."""
    spans, counts = (256, 512, 1024, 4096), (40, 9, 3, 1)

    def slots(first, last):
        return -(-sum(counts[first:last]) // 8) * 8

    def cost(cuts, weights):
        return sum(weights + slots(a, b) * (spans[b - 1] + weights / 20) for a, b in cuts)

    ways = []
    for inner in itertools.chain.from_iterable(itertools.combinations((1, 2, 3), n) for n in range(4)):
        edges = (0, *inner, 4)
        ways.append(list(itertools.pairwise(edges)))
    for weights in (0.0, 100.0, 3_000.0, 20_000.0, 1e6):
        found = cheapest_cuts(spans, slots, weights)
        assert cost(found, weights) == min(cost(way, weights) for way in ways)
    assert cheapest_cuts(spans, lambda first, last: sum(counts[first:last]), 0.0) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert cheapest_cuts(spans, slots, 1e6) == [(0, 4)]


def test_turns_that_finished_before_a_program_failed_are_returned():
    """Of two calls of a step the second fails: the turns of the first come with the next step, unless they were closed."""
    engine = Engine(tiny.model(max_length=1024), rows=40, max_length=1024)
    long, *short = [engine.open(text, str(i)) for i, text in enumerate(prompts(1, 1, 700, 701) + prompts(30))]
    for stream in (long, *short):
        engine.request(stream, max_tokens=3, sampling=FREE)
    decode, calls = engine._calls.decode, []

    def fails(streams, *inputs, **options):
        calls.append(len(streams))
        if len(calls) == 2:
            raise RuntimeError("no luck")
        return decode(streams, *inputs, **options)

    engine._calls.decode = fails
    with pytest.raises(RuntimeError, match="no luck"):
        engine.step()
    engine.close(short[0])
    assert set(finish(engine)) == {id(stream) for stream in (long, *short[1:])}
    assert calls[:3] == [30, 1, 1]


def test_bad_requests_are_refused():
    model = tiny.model()
    with pytest.raises(ValueError, match="exceeds the model's context of 256 tokens"):
        Engine(model, max_length=300)
    for size in ("rows", "max_length", "segment"):
        with pytest.raises(ValueError, match=f"{size}=0.* must be at least 1"):
            Engine(model, **{size: 0})
    with pytest.raises(ValueError, match=r"leave_fraction=1\.0 must be in"):
        Engine(model, max_length=32, leave_fraction=1.0)
    engine = Engine(model, rows=2, max_length=32)
    with pytest.raises(ValueError, match="prompt of example 'q7' has 40 tokens, but a conversation may hold 32"):
        engine.open([1] * 40, "q7")
    with pytest.raises(ValueError, match="prompt of example 'q8' is empty"):
        engine.open([], "q8")
    stream = engine.open([1] * 20, "q9", 2)
    with pytest.raises(
        ValueError, match="13 tokens do not fit: the conversation of example 'q9', sample 2, has room for 12"
    ):
        engine.feed(stream, [1] * 13)
    assert len(stream.ledger) == 20
    with pytest.raises(ValueError, match="max_tokens=0 must be at least 1"):
        engine.request(stream, max_tokens=0)
    with pytest.raises(ValueError, match="stop strings must be distinct, not empty"):
        engine.request(stream, stops=["Day", ""])
    engine.request(stream, max_tokens=1)  # what was refused left nothing behind
    assert len(finish(engine)[id(stream)].tokens) == 1
    engine.request(stream, max_tokens=1)
    with pytest.raises(ValueError, match="example 'q9', sample 2, has a turn under way already"):
        engine.request(stream)
    model.tokenizer = None
    with pytest.raises(ValueError, match=r"needs a tokenizer.*tokenizer\.json.*tokenizer="):
        Engine(model, max_length=32)


@pytest.mark.parametrize("wrong", [-1, tiny.VOCABULARY, 2**40])
def test_an_id_without_a_row_is_refused_wherever_it_is_given(wrong):
    """JAX would take the last row, or count from the end."""
    model = tiny.model()
    engine = Engine(model, rows=2, max_length=64)
    stream = engine.open([1, 2])
    for give in (
        lambda: engine.open([1, wrong]),
        lambda: engine.feed(stream, [wrong]),
        lambda: engine.request(stream, given=[1, wrong]),
        lambda: engine.generate([[wrong]]),
        lambda: model(np.asarray([[1, wrong]])),
        lambda: model.hidden(np.asarray([[1, wrong]])),
    ):
        with pytest.raises(ValueError, match=rf"id {wrong} has no row .* 0 to {tiny.VOCABULARY - 1}"):
            give()
    assert engine.generate([[1, tiny.VOCABULARY - 1]], max_tokens=1)[0].tokens


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused():
    model = tiny.model(vocab_size=tiny.VOCABULARY - 1)
    with pytest.raises(ValueError, match=r"ids up to 319 \('.*'\), the model 319 rows: resize"):
        Engine(model, max_length=32)
    model.tokenizer = None
    with pytest.raises(ValueError, match="the model 319 rows: resize"):
        Engine(model, max_length=32, tokenizer=tiny.tokenizer())


def test_generate_keeps_order_and_frees_rows():
    engine = Engine(tiny.model(), rows=3, max_length=128)
    wanted = prompts(7)
    results = engine.generate(wanted, max_tokens=5, sampling=GREEDY)
    assert [len(r.tokens) for r in results] == [5] * 7
    for prompt, result in zip(wanted, results):
        assert greedy_reference(tiny.model(), prompt, 5)[-5:] == result.tokens
    assert engine._table.free() == engine.rows


def test_row_table_and_ladders(monkeypatch):
    table = RowTable(2, 2)
    assert [table.take(), table.take(), table.take(near=0), table.take(near=0), table.take()] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
        None,
    ]
    table.release((1, 0))
    assert table.free() == 1
    with pytest.raises(ValueError, match="free already"):
        table.release((1, 0))
    assert ladder(8, 100) == (8, 16, 32, 64, 100)
    assert round_up(17, (8, 32), "rows") == 32
    sizes = prefill_rows(100, single_device_mesh())
    assert sizes == (1, 2, 4, 8, 32, 100)
    assert prefill_rows(3, single_device_mesh()) == (1, 2, 3)
    assert decode_rows(1, single_device_mesh()) == (1,)
    assert decode_rows(8, single_device_mesh()) == (2, 4, 8)
    assert decode_rows(40, single_device_mesh()) == (2, 4, 8, 16, 32, 40)
    assert decode_spans(200, single_device_mesh()) == (200,)
    assert decode_spans(384, single_device_mesh()) == (256, 384)
    assert decode_spans(1700, single_device_mesh()) == (256, 384, 512, 768, 1024, 1536, 1700)
    assert [most_rows(sizes, steps) for steps in (32, 128, 512, 4096)] == [100, 100, 32, 4]
    mesh = single_device_mesh()
    cpu = PrefillShapes.of(2, 100, mesh, chunked=True)  # a row has four chunks of 32
    assert cpu == PrefillShapes(steps=(32,), sizes=(1, 2, 4, 8), spans=(100,), chunked=True)
    assert PrefillShapes.of(2, 20, mesh, chunked=True).steps == (20,)
    monkeypatch.setattr("routerl_jax.engine.rows.on_cpu", lambda mesh: False)
    assert prefill_rows(100, mesh) == (8, 32, 100)
    assert decode_rows(40, mesh) == (8, 16, 32, 40)
    assert decode_spans(1700, mesh) == (256, 512, 1024, 1700)
    tpu = PrefillShapes.of(100, 5000, mesh, chunked=True)
    assert (tpu.steps, tpu.sizes) == ((64,), (8, 16, 32, 64, 128, 256))  # up to 16,384 tokens
    gpu = PrefillShapes.of(100, 5000, mesh, chunked=False)
    assert (gpu.steps, gpu.sizes, gpu.spans) == ((32, 64, 128, 256, 512), (8, 32, 100), (0, 512, 2048, 5000))
    with pytest.raises(ValueError, match="33 rows: programs are made for 32 at most"):
        round_up(33, (8, 32), "rows")
