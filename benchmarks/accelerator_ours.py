"""Our side of `benchmarks.accelerator`: correctness, decoding, prefill, rollouts and updates on the device that JAX has."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import peers
from benchmarks.accelerator_limits import peak_gib, timed
from benchmarks.agentic_work import Trajectory, must_prefill
from routerl_jax.core.ledger import Ledger
from routerl_jax.core.types import Sequence as TokenSequence
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.policy import Stream
from routerl_jax.engine.sampling import Sampling
from routerl_jax.learning.batch import BatchLayout
from routerl_jax.learning.learner import Learner
from routerl_jax.learning.losses import LossConfig, token_weights
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.models.attention import Attention, self_attention
from routerl_jax.models.config import DecoderConfig
from routerl_jax.models.decoder import Decoder, Remat
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.models.work import Work
from routerl_jax.parallel.mesh import make_mesh
from routerl_jax.parallel.sharding import create_sharded

Report = Callable[..., None]  # report(part, **numbers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """How much of everything; the default is for a card of 80 GB, TINY for a test on a CPU.

    Attributes:
      live: tokens that rows have cached when decoding is timed.
      segments: decode calls that are timed.
    """

    rows: tuple[int, ...] = (1, 8, 64, 256)
    live: int = 896
    segments: int = 3
    groups: int = 16
    samples: int = 8
    prompt: int = 256
    turns: int = 3
    sampled: int = 64
    observed: int = 256
    sequences: int = 32
    length: int = 1024
    micro_tokens: int = 8192
    repeats: int = 3

    @property
    def conversation(self) -> int:
        """Tokens of a rollout's conversation."""
        return self.prompt + self.turns * self.sampled + (self.turns - 1) * self.observed


TINY = Shapes(
    rows=(1, 8),
    live=64,
    segments=1,
    groups=2,
    samples=2,
    prompt=8,
    sampled=4,
    observed=8,
    sequences=4,
    length=32,
    micro_tokens=64,
    repeats=1,
)


def random_policy(config: DecoderConfig, dtype: Any, compute: Any = None) -> Decoder:
    """Random weights on all devices, with no end token, so turns have the requested length."""
    config = dataclasses.replace(config, eos_ids=())
    model = create_sharded(
        lambda: Decoder(config, jax.random.key(0), param_dtype=dtype, compute_dtype=compute), make_mesh(), "replicated"
    )
    model.tokenizer = peers.tokenizer()
    model.tokenizer.eos_ids = frozenset()
    return model


# --- correctness -----------------------------------------------------------------------------------------------------------


def check(report: Report, shapes: Shapes) -> None:
    """The shipped policy of the quickstart: device against CPU in float32, kinds of attention, sampler against learner."""
    reference = load_pretrained("atlas-warm-start", make_mesh(devices=jax.devices("cpu")[:1]), "float32")
    assert isinstance(reference, Decoder)
    tokens = _texts(reference, shapes)
    with jax.default_device(jax.devices("cpu")[0]):
        wanted = np.asarray(jax.nn.log_softmax(reference(tokens)), np.float64)
    for dtype in ("float32", "bfloat16"):
        model = load_pretrained("atlas-warm-start", make_mesh(), dtype)
        assert isinstance(model, Decoder)
        got = np.asarray(jax.nn.log_softmax(model(tokens)), np.float64)
        relative = float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
        report("logprobs against float32 on the CPU", dtype=dtype, relative_error=relative)
    _check_attention(report, shapes)
    for dtype in ("float32", "bfloat16"):
        _check_sampler(report, dtype, shapes)


def _texts(model: Decoder, shapes: Shapes) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, model.config.vocab_size, (4, min(shapes.length, 256)))


def _check_attention(report: Report, shapes: Shapes) -> None:
    rng, kind = np.random.default_rng(1), Attention.on(make_mesh()).kind
    heads, kv_heads, width = 12, 2, 128
    shape = (2, min(shapes.length, 256))
    q, k, v = (jnp.asarray(rng.normal(size=(*shape, n, width)), jnp.float32) for n in (heads, kv_heads, kv_heads))
    ids = jnp.asarray(np.sort(rng.integers(1, 4, shape), axis=1), jnp.int32)
    for name, segments in (("one segment", None), ("packed rows", ids)):
        with jax.default_matmul_precision("highest"):
            wanted = _with_gradients(_dense, q, k, v, segments)
        for each in sorted({"xla", kind}):
            inputs = [x.astype(jnp.bfloat16) for x in (q, k, v)]
            attend = functools.partial(self_attention, attention=Attention(kind=each, mesh=make_mesh()))
            got = _with_gradients(attend, *inputs, segments)
            errors = [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in zip(got, wanted)]
            report(f"attention in bfloat16, {name}", kind=each, relative_error=errors[0], of_gradients=max(errors[1:]))


def _dense(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None) -> jax.Array:
    """Attention by its definition."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) * q.shape[-1] ** -0.5
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))[None]
    if ids is not None:
        seen = seen & (ids[:, :, None] == ids[:, None])
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("BNTS,BSNH->BTNH", weights, v)


def _with_gradients(attend: Callable[..., jax.Array], q: Any, k: Any, v: Any, ids: Any) -> list[jax.Array]:
    def total(q: Any, k: Any, v: Any) -> Any:
        out = attend(q, k, v, ids).astype(jnp.float32)
        return jnp.square(out).sum(), out

    gradients, out = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return [x.astype(jnp.float32) for x in (out, *gradients)]


def _check_sampler(report: Report, dtype: str, shapes: Shapes) -> None:
    """Log-probabilities that the engine gave to what it sampled, over two turns, against the learner's."""
    model = load_pretrained("atlas-warm-start", make_mesh(), dtype)
    assert isinstance(model, Decoder)
    model.config = dataclasses.replace(model.config, eos_ids=())
    assert model.tokenizer is not None
    model.tokenizer.eos_ids = frozenset()
    small = dataclasses.replace(shapes, prompt=min(shapes.prompt, 48), sampled=min(shapes.sampled, 48), turns=2)
    small = dataclasses.replace(small, observed=min(shapes.observed, 48), groups=4)
    engine = Engine(model, rows=4 * small.samples, max_length=small.conversation + 8)
    sequences = Rollout(engine, small).run()
    length = -(-small.conversation // 128) * 128
    learner = _learner(model, BatchLayout(make_mesh(), (length,), 8 * length), "none")
    theirs = learner.logprobs(sequences)
    sampled = [sequence.loss_mask for sequence in sequences]
    gaps = np.abs(np.concatenate([(a - s.logprobs)[m] for a, s, m in zip(theirs, sequences, sampled)]))
    report("logprobs of sampler against learner", dtype=dtype, mean=float(gaps.mean()), most=float(gaps.max()))


# --- generation ------------------------------------------------------------------------------------------------------------


class Timed:
    """Measures an engine's programs: how long any was under way, and the seconds of each kind.

    Attributes:
      seconds: of every call of `extend`, `fork` and `decode`: until its end if `apart`, else until it was dispatched.
      busy: seconds from the first program of a step until its results were on the host. The host's
        work in between is not counted, and the device idles meanwhile.
    """

    def __init__(self, engine: Engine, apart: bool) -> None:
        calls = engine._calls
        self._apart, self._since = apart, 0.0
        self.busy = 0.0
        self.seconds: dict[str, list[float]] = {"extend": [], "fork": [], "decode": []}
        programs = {name: _TimedProgram(self, name, getattr(calls._programs, name)) for name in self.seconds}
        calls._programs = dataclasses.replace(calls._programs, **programs)
        decode = calls.decode

        def until_on_host(*inputs: Any, **options: Any) -> Any:
            result = decode(*inputs, **options)
            self.busy += time.perf_counter() - self._since
            self._since = 0.0
            return result

        calls.decode = until_on_host  # type: ignore[method-assign]

    def reset(self) -> None:
        """Forgets what was measured."""
        self.busy = self._since = 0.0
        for times in self.seconds.values():
            times.clear()

    def call(self, name: str, program: Any, options: dict[str, Any]) -> Any:
        """Runs a program and writes down its time."""
        started = time.perf_counter()
        self._since = self._since or started
        result = program(**options)
        if self._apart:
            jax.block_until_ready(result)
        self.seconds[name].append(time.perf_counter() - started)
        return result


class _TimedProgram:
    def __init__(self, clock: Timed, name: str, program: Any) -> None:
        self._clock, self._name, self._program = clock, name, program

    def __call__(self, **options: Any) -> Any:
        return self._clock.call(self._name, self._program, options)

    def _cache_size(self) -> int:
        return self._program._cache_size()


class Rollout:
    """Groups of attempts over several turns, with random observations between them, as benchmarks/rollout.py does it."""

    def __init__(self, engine: Engine, shapes: Shapes) -> None:
        self._engine, self._shapes, self._rng = engine, shapes, np.random.default_rng(0)

    def _tokens(self, count: int) -> list[int]:
        return self._rng.integers(0, self._engine.config.vocab_size, count).tolist()

    def run(self) -> list[TokenSequence]:
        """One rollout; its sequences."""
        shapes, engine = self._shapes, self._engine
        prompts = [self._tokens(shapes.prompt) for _ in range(shapes.groups)]
        streams = [engine.open(prompt, str(i), j) for i, prompt in enumerate(prompts) for j in range(shapes.samples)]
        for turn in range(shapes.turns):
            for stream in streams:
                engine.request(stream, max_tokens=shapes.sampled, sampling=Sampling())
            while engine.busy:
                engine.step()
            if turn < shapes.turns - 1:
                for stream in streams:
                    engine.feed(stream, self._tokens(shapes.observed))
        sequences = [stream.ledger.sequence() for stream in streams]
        assert all(len(sequence) == shapes.conversation for sequence in sequences)
        for stream in streams:
            engine.close(stream)
        return sequences


def generation(report: Report, config: DecoderConfig, shapes: Shapes, **options: Any) -> None:
    """Prefill and decoding at several numbers of rows, in one engine, which gets the `options`.

    With drafts, decoding steps are timed that keep none: random weights don't copy.
    """
    work = Work(config=config)
    model = random_policy(config, jnp.bfloat16)
    length = shapes.live + 32 * (shapes.segments + 1)
    engine = Engine(model, rows=max(shapes.rows), max_length=length + 1, segment=32, **options)
    clock, rng = Timed(engine, apart=True), np.random.default_rng(0)
    for rows in shapes.rows:
        clock.reset()
        streams: list[Stream] = []
        for i in range(rows):
            streams.append(engine.open(rng.integers(0, config.vocab_size, shapes.live).tolist(), f"{rows}-{i}"))
            engine.request(streams[-1], max_tokens=length - shapes.live, sampling=Sampling())
        compiled_before = engine.compilations
        while engine.busy:
            engine.step()
        first, *decoded = clock.seconds["decode"]
        compiled = engine.compilations - compiled_before
        per_step = [seconds / 32 for seconds in decoded]
        live = shapes.live + 32 + 16 * len(decoded)
        _report_decode(
            report, work, rows, live, per_step, first_s=first, programs=compiled, peak_gib=peak_gib(), **options
        )
        for stream in streams:
            engine.close(stream)
        _time_prefill(report, engine, clock, work, rows, shapes)


def _report_decode(report: Report, work: Work, rows: int, live: int, seconds: Sequence[float], **more: Any) -> None:
    step = statistics.median(seconds)
    report(
        "decode",
        rows=rows,
        live=live,
        seconds_per_step=step,
        range=[min(seconds), max(seconds)],
        tokens_per_s=rows / step,
        bytes_needed=work.decode_bytes(rows, live),
        bytes_per_s=work.decode_bytes(rows, live) / step,
        **more,
    )


def _time_prefill(report: Report, engine: Engine, clock: Timed, work: Work, rows: int, shapes: Shapes) -> None:
    """The same sizes again, compiled now."""
    rng, seconds = np.random.default_rng(rows), []
    for _ in range(shapes.repeats):
        clock.reset()
        streams = [
            engine.open(rng.integers(0, engine.config.vocab_size, shapes.live).tolist(), str(i)) for i in range(rows)
        ]
        for stream in streams:
            engine.request(stream, max_tokens=1)
        while engine.busy:
            engine.step()
        seconds.append(sum(clock.seconds["extend"]))
        for stream in streams:
            engine.close(stream)
        if seconds[0] * shapes.repeats > 10:
            break
    flops = work.forward_flops([shapes.live - 1] * rows, unembedded=0)
    took = statistics.median(seconds)
    report("prefill", rows=rows, tokens_per_s=rows * (shapes.live - 1) / took, flops_per_s=flops / took, seconds=took)


def rollout(report: Report, config: DecoderConfig, shapes: Shapes) -> None:
    """Three turns with observations between them."""
    engine = Engine(
        random_policy(config, jnp.bfloat16), rows=shapes.groups * shapes.samples, max_length=shapes.conversation + 8
    )
    clock, work = Timed(engine, apart=False), Rollout(engine, shapes)
    started = time.perf_counter()
    work.run()
    first, seconds, idle = time.perf_counter() - started, [], []
    for _ in range(shapes.repeats):
        clock.reset()
        started = time.perf_counter()
        work.run()
        seconds.append(time.perf_counter() - started)
        idle.append(1 - clock.busy / seconds[-1])
    report_rollout(report, "ours", shapes, seconds, first_s=first, idle_share=statistics.median(idle))


def report_rollout(report: Report, side: str, shapes: Shapes, seconds: Sequence[float], **more: Any) -> None:
    """A rollout's line, for either side."""
    sampled = shapes.groups * shapes.samples * shapes.turns * shapes.sampled
    report(
        "rollout",
        side=side,
        conversations=shapes.groups * shapes.samples,
        tokens_of_each=shapes.conversation,
        seconds=statistics.median(seconds),
        range=[min(seconds), max(seconds)],
        sampled_per_s=sampled / statistics.median(seconds),
        **more,
    )


def traces(report: Report, config: DecoderConfig, work: Sequence[Trajectory], repeats: int, **options: Any) -> None:
    """Attempts of recorded lengths with their tools' waits, by the driver, a scripted agent and the engine (agentic_work).

    The engine gets the `options`.
    """
    from benchmarks.agentic_ours import Rollout as Traces

    rollout = Traces(random_policy(config, jnp.bfloat16), work, **options)
    started = time.perf_counter()
    warmed = rollout.run()
    first, seconds, counted = time.perf_counter() - started, [], {}
    clock, idle = Timed(rollout.engine, apart=False), []
    for _ in range(repeats):
        clock.reset()
        started = time.perf_counter()
        counted = rollout.run()
        seconds.append(time.perf_counter() - started)
        idle.append(1 - clock.busy / seconds[-1])
    more = {"first_s": first, "compilations": warmed["compilations"], "compiled_later": counted["compilations"]}
    more |= {"idle_share": statistics.median(idle), "peak_gib": peak_gib(), **options}
    report_traces(report, "ours", work, seconds, counted, **more)


def report_traces(
    report: Report,
    side: str,
    work: Sequence[Trajectory],
    seconds: Sequence[float],
    counted: dict[str, Any],
    **more: Any,
) -> None:
    """A line of recorded attempts, for either side."""
    took, sampled = statistics.median(seconds), sum(each.sampled for each in work)
    names = ("prefilled_tokens", "prefill_slots", "decode_slots")
    report(
        "traces",
        side=side,
        attempts=len(work),
        longest=max(map(len, work)),
        seconds=took,
        range=[min(seconds), max(seconds)],
        attempts_per_s=len(work) / took,
        sampled_per_s=sampled / took,
        must_prefill=must_prefill(work),
        **{name: counted[name] for name in names},
        **more,
    )


# --- updates ---------------------------------------------------------------------------------------------------------------


def _learner(model: Decoder, layout: BatchLayout, remat: Remat) -> Learner:
    optimizer = OptimizerConfig(lr=1e-6, weight_decay=0.0).build(1000)
    return Learner(model, optimizer, LossConfig(), layout, remat=remat)


def conversations(vocabulary: int, shapes: Shapes) -> list[TokenSequence]:
    """Sequences of equal length, a third of it sampled; an update's work for either side."""
    rng, sequences = np.random.default_rng(0), []
    for _ in range(shapes.sequences):
        ledger, sampled = Ledger(), shapes.length // 3
        ledger.feed(rng.integers(0, vocabulary, shapes.length - sampled).tolist())
        ledger.sample(rng.integers(0, vocabulary, sampled).tolist(), [-float(np.log(vocabulary))] * sampled, 0)
        sequences.append(ledger.sequence())
    return sequences


def update(report: Report, config: DecoderConfig, shapes: Shapes, dtype: str, remat: Remat) -> None:
    """GRPO updates of all weights, computed with in bfloat16."""
    model = random_policy(config, jnp.dtype(dtype), jnp.dtype("bfloat16"))
    layout = BatchLayout(make_mesh(), (shapes.length,), shapes.micro_tokens)
    sequences = conversations(config.vocab_size, shapes)
    advantages = np.random.default_rng(0).normal(size=len(sequences)).tolist()
    weights = token_weights([sequence.loss_mask for sequence in sequences], "token", 1.0)
    learner = _learner(model, layout, remat)
    del model
    seconds = timed(
        lambda: learner.update(layout.build(sequences, weights, advantages)[0])[1], shapes.repeats + 1, warm_up=0
    )
    report_update(report, "ours", config, shapes, seconds, dtype=dtype, remat=remat, peak_gib=peak_gib())


def report_update(
    report: Report, side: str, config: DecoderConfig, shapes: Shapes, seconds: Sequence[float], **more: Any
) -> None:
    """An update's line, for either side; the first of `seconds` holds the compilation."""
    first, *rest = seconds
    lengths = [shapes.length] * shapes.sequences
    took = statistics.median(rest)
    report(
        "update",
        side=side,
        tokens=sum(lengths),
        micro_tokens=shapes.micro_tokens,
        seconds=took,
        range=[min(rest), max(rest)],
        tokens_per_s=sum(lengths) / took,
        flops_per_s=Work(config=config).update_flops(lengths) / took,
        first_s=first,
        **more,
    )
