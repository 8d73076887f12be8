"""Every implementation of self-attention against loops in float64, gradients included."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from routerl_jax.models import attention as attention_module
from routerl_jax.models.attention import Attention, Kind, self_attention
from routerl_jax.models.decoder import Decoder, Remat
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.parallel.mesh import make_mesh, single_device_mesh
from tests.models.families import hf_logits, random_decoder


class Case(NamedTuple):
    """What is computed, and on which data."""

    heads: int
    kv_heads: int
    width: int
    length: int
    segments: tuple[tuple[int, ...], ...] | None  # by row, lengths; the rest is padding
    causal: bool = True
    window: int | None = None


CASES = {
    "one_segment": Case(2, 2, 16, 130, None),
    "packed": Case(6, 2, 8, 200, ((200,), (70, 1, 99))),
    "long": Case(2, 1, 64, 640, ((640,), (213, 400))),
    "both_sides": Case(2, 2, 80, 150, ((150,), (64, 60)), causal=False),
    "window": Case(4, 2, 64, 384, ((384,), (100, 200)), window=37),
    "window_of_one": Case(2, 1, 8, 70, ((70,), (30, 9)), window=1),
    "wide_window": Case(2, 1, 8, 70, ((70,), (30, 9)), window=500),
}


def inputs(case: Case) -> tuple[list[np.ndarray], np.ndarray | None]:
    rng = np.random.default_rng(0)
    shapes = [(2, case.length, n, case.width) for n in (case.heads, case.kv_heads, case.kv_heads)]
    # queries times 2: attention far from uniform
    arrays = [rng.normal(size=shape).astype(np.float32) * scale for shape, scale in zip(shapes, (2, 1, 1))]
    if case.segments is None:
        return arrays, None
    rows = [np.repeat(np.arange(len(sizes)) + 1, sizes) for sizes in case.segments]
    return arrays, np.stack([np.pad(row, (0, case.length - len(row))) for row in rows]).astype(np.int32)


def reference(case: Case, q: np.ndarray, k: np.ndarray, v: np.ndarray, ids: np.ndarray | None, grad: np.ndarray) -> Any:
    """Output and gradients of sum(output * grad) in float64, one query at a time; the softmax's gradient by hand."""
    q, k, v, grad = (x.astype(np.float64) for x in (q, k, v, grad))
    out, dq, dk, dv = np.zeros_like(q), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b, t, n in np.ndindex(*q.shape[:3]):
        see = np.ones(case.length, bool) if ids is None else ids[b] == ids[b, t]
        if case.causal:
            see[t + 1 :] = False
        if case.window is not None:
            see[: max(0, t - case.window + 1)] = False
        at, head = np.flatnonzero(see), n * case.kv_heads // case.heads
        keys, values = k[b, at, head], v[b, at, head]
        scores = keys @ q[b, t, n] / case.width**0.5
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        out[b, t, n] = weights @ values
        dweights = values @ grad[b, t, n]
        dscores = weights * (dweights - weights @ dweights) / case.width**0.5
        dq[b, t, n] = dscores @ keys
        dk[b, at, head] += dscores[:, None] * q[b, t, n]
        dv[b, at, head] += weights[:, None] * grad[b, t, n]
    return out, dq, dk, dv


@functools.cache
def expected(name: str) -> Any:
    case = CASES[name]
    arrays, ids = inputs(case)
    grad = np.random.default_rng(1).normal(size=arrays[0].shape).astype(np.float32)
    if ids is not None:
        grad[ids == 0] = 0  # what padding gives means nothing
    return grad, reference(case, *arrays, ids, grad)


def check(name: str, attention: Attention) -> None:
    """1e-4 of values and gradients of a few units: float32 sums of up to 640 terms, in another order."""
    case, (arrays, ids), (grad, want) = CASES[name], inputs(CASES[name]), expected(name)

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        call = functools.partial(
            self_attention, segment_ids=ids, causal=case.causal, window=case.window, attention=attention
        )
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(jnp.asarray(grad))

    got = [np.asarray(x) for x in run(*arrays)]
    assert all(np.isfinite(x).all() for x in got)
    real = np.ones(grad.shape[:2], bool) if ids is None else ids > 0
    for mine, theirs in zip(got, want):
        np.testing.assert_allclose(mine[real], theirs[real], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_xla(name: str) -> None:
    check(name, Attention())


@pytest.mark.parametrize("name", ["packed", "long", "both_sides", "window"])
def test_many_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than are unrolled, the last one padded."""
    monkeypatch.setattr(attention_module, "_CPU_TILES", (15, 15))
    check(name, Attention())


@pytest.mark.parametrize("name", CASES)
def test_splash(name: str) -> None:
    """The TPU kernel in Pallas's interpreter, on one device."""
    check(name, Attention(kind="splash", mesh=single_device_mesh(), interpret=True))


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Attention:
    """What cuDNN is asked for, computed by XLA and in float32; on a GPU benchmarks.accelerator compares the kernel itself."""
    real = jax.nn.dot_product_attention

    def stand_in(*inputs: Any, implementation: str, **options: Any) -> jax.Array:
        assert implementation == "cudnn"
        return real(*inputs, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    monkeypatch.setattr(attention_module, "_cudnn_can", lambda q, ids: True)
    return Attention(kind="cudnn")


@pytest.mark.parametrize("name", CASES)
def test_cudnn(name: str, cudnn: Attention) -> None:
    """Segments and windows among them are masks."""
    check(name, cudnn)


def test_cudnn_sees_trees(cudnn: Attention) -> None:
    arrays = [jnp.asarray(array) for array in inputs(CASES["packed"])[0]]
    ids = jnp.asarray(np.repeat([[1, 2, 3], [1, 2, 0]], [80, 60, 60], axis=1), jnp.int32)
    ends = jnp.asarray(np.repeat([[4, 3, 4], [3, 3, 1]], [80, 60, 60], axis=1), jnp.int32)
    ours, theirs = (
        self_attention(*arrays, ids, segment_ends=ends, attention=each) for each in (cudnn, Attention(kind="xla"))
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    alone = self_attention(*arrays, ids, attention=cudnn)
    assert np.abs(np.asarray(ours - alone)[0, 80:]).max() > 0.1  # the branches do see what they share


def test_what_cudnn_can() -> None:
    def can(dtype: Any, width: int, length: int, packed: bool) -> bool:
        return attention_module._cudnn_can(jnp.zeros((1, length, 2, width), dtype), jnp.ones(1) if packed else None)

    assert can(jnp.bfloat16, 128, 64, True)
    assert can(jnp.float16, 64, 63, False)
    assert not can(jnp.float32, 64, 64, False)
    assert not can(jnp.bfloat16, 136, 64, False)
    assert not can(jnp.bfloat16, 64, 63, True)


@pytest.mark.parametrize("kind", ["splash", "xla"])
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("packed", {"data": 2, "tensor": 2}),  # rows and heads split
        ("window", {"fsdp": 2, "tensor": 4}),  # fewer key/value heads than devices
        ("both_sides", {"data": 1, "fsdp": 2, "tensor": 4}),  # heads that tensor does not divide
        ("one_segment", {"data": 4}),  # rows that the devices do not divide
    ],
)
def test_on_a_mesh(name: str, mesh: dict[str, int], kind: Kind) -> None:
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    check(name, Attention(kind=kind, mesh=make_mesh(mesh, devices), interpret=True))


def test_windows_need_a_direction() -> None:
    x = jnp.zeros((1, 4, 1, 8))
    for window, causal in ((0, True), (2, False)):
        with pytest.raises(ValueError, match=f"window={window}"):
            self_attention(x, x, x, causal=causal, window=window)
    with pytest.raises(ValueError, match="mesh"):
        Attention(kind="splash")


def test_backends() -> None:
    """Devices decide, attached or not; traced weights say nothing."""

    for platform, kind in (("tpu", "splash"), ("gpu", "cudnn"), ("cpu", "xla")):
        mesh: Any = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform=platform)]))
        assert Attention.on(mesh).kind == kind
    weight = jax.device_put(jnp.zeros(4), jax.sharding.NamedSharding(make_mesh(), jax.P()))
    assert Attention.for_weight(weight) == Attention(mesh=make_mesh())
    seen = []
    jax.jit(lambda x: seen.append(Attention.for_weight(x)))(weight)
    assert seen == [Attention()]


WINDOWS = {
    # Qwen2 leaves the first `max_window_layers` layers whole; layers of both kinds share one scan.
    "some_layers": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    "all_layers": ("mistral", {}),
}


@pytest.fixture(scope="module", params=WINDOWS)
def windowed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder]:
    """A transformers model whose queries see 7 tokens in some or all layers, and ours."""
    family, settings = WINDOWS[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    hf, _ = random_decoder(family, directory, sliding_window=7, **settings)
    model = load_pretrained(str(directory))
    assert isinstance(model, Decoder)
    assert set(model.config.windows) == ({None, 7} if family == "qwen2" else {7})
    return hf, model


def test_windows_against_transformers(windowed: tuple[Any, Decoder]) -> None:
    """Whole rows, and a packed one whose second segment must not see the first; as in test_parity, 1e-4."""
    hf, model = windowed
    tokens = np.random.default_rng(0).integers(0, 131, (2, 40))
    segments = np.stack([np.full(40, 1), np.repeat([1, 2], [25, 15])])
    positions = np.stack([np.arange(40), np.r_[np.arange(25), np.arange(15)]])
    got = np.asarray(nnx.jit(Decoder.__call__)(model, tokens, positions, segments))
    whole = np.asarray(nnx.jit(lambda m, t: _without_window(m)(t))(model, tokens[:1]))
    for row, span in ((0, slice(0, 40)), (1, slice(0, 25)), (1, slice(25, 40))):
        alone = hf_logits(hf, tokens[row : row + 1, span])[0]
        np.testing.assert_allclose(got[row, span], alone, rtol=0, atol=1e-4)
    assert np.abs(whole[0] - got[0])[:7].max() < 1e-4  # the window holds all that there is
    assert np.abs(whole[0] - got[0])[8:].max() > 0.1  # and then it matters


def _without_window(model: Decoder) -> Decoder:
    graph, params = nnx.split(model)
    plain = nnx.merge(graph, params)
    plain.config = dataclasses.replace(model.config, window=None, windowed=())
    return plain


def test_gradients_of_windowed_layers(windowed: tuple[Any, Decoder]) -> None:
    """Of the embedding, against torch's; 1e-3 of the largest: sums over 40 tokens in float32."""
    hf, model = windowed
    remat: Remat = "full" if model.config.windowed else "none"
    tokens = np.random.default_rng(0).integers(0, 131, (1, 40))
    hf.zero_grad()
    torch.log_softmax(hf(torch.as_tensor(tokens)).logits, -1)[..., 3].mean().backward()
    theirs = hf.model.embed_tokens.weight.grad.numpy()

    def loss(model: Decoder) -> jax.Array:
        logits = model.unembed(model.hidden(jnp.asarray(tokens), remat=remat))
        return jax.nn.log_softmax(logits)[..., 3].mean()

    mine = np.asarray(nnx.jit(nnx.grad(loss))(model)["embedding"].get_value())
    assert np.abs(mine - theirs).max() < 1e-3 * np.abs(theirs).max()
