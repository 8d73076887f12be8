"""The kernels for GPUs: interpreted against plain XLA, and lowered for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routerl_jax.engine.cache import quantize_tokens
from routerl_jax.engine.fused import FusedCache, fused_attention, fused_decode
from routerl_jax.engine.segments import chunked_attention
from routerl_jax.parallel.mesh import make_mesh
from tests import tiny

ROWS, LENGTH, KV_HEADS, HEADS = 5, 200, 2, 6


def work(steps, entries, *, width=16, dtype=jnp.float32, int8=False):
    """Queries, keys and values, and the entries' rows, starts and counts; the last entry has no tokens."""
    rng = np.random.default_rng(steps)
    layer = tuple(jnp.asarray(rng.normal(size=(ROWS, LENGTH, KV_HEADS, width)), dtype) for _ in range(2))
    q = jnp.asarray(rng.normal(size=(entries, steps, HEADS, width)), dtype)
    starts = rng.integers(0, LENGTH - steps + 1, entries)
    counts = np.sort(rng.integers(1, steps + 1, entries))[::-1].copy()
    counts[-1] = 0 if entries > 1 else counts[-1]
    call = [jnp.asarray(x, jnp.int32) for x in (rng.integers(0, ROWS, entries), starts, counts)]
    return q, tuple(map(quantize_tokens, layer)) if int8 else layer, *call


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    ("steps", "entries", "window"),
    [
        (1, 3, None),  # the keys of a row are divided among programs
        (64, 4, None),  # several blocks of queries
        (64, 4, 37),
        (3, 70, None),
        (1, 200, 50),  # one program for each row and key head
        (200, 1, None),  # from an empty row to a full one
    ],
)
def test_the_kernel_attends_as_plain_xla_does(steps, entries, window, int8):
    q, layer, rows, starts, counts = work(steps, entries, int8=int8)
    got = np.asarray(fused_attention(q, layer, rows, starts, counts, window, interpret=True))
    wanted = np.asarray(chunked_attention(q, layer, rows, starts, counts, window))
    used = np.arange(steps) < np.asarray(counts)[:, None]
    assert used.any()
    np.testing.assert_allclose(got[used], wanted[used], atol=1e-6)


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize(("steps", "parts", "keys"), [(1, None, None), (1, 1, 16), (3, 2, 64), (17, 4, 32)])
def test_a_step_of_decoding_writes_and_attends_as_plain_xla_does(steps, parts, keys, window):
    q, cached, *_ = work(steps, ROWS)
    rng = np.random.default_rng(1)
    new = tuple(jnp.asarray(rng.normal(size=(ROWS, steps, KV_HEADS, 16)), jnp.float32) for _ in range(2))
    rows = jnp.asarray([3, 0, 4, 1, 4])  # the last entry is padding
    starts = jnp.asarray([0, LENGTH - steps, 100, 65, 7])
    counts = jnp.asarray([steps, steps, steps, steps, 0])
    options = {"keys": keys, "parts": parts, "interpret": True}
    got, written = fused_decode(q, new, cached, rows, starts, counts, window, **options)
    wanted = [np.array(leaf) for leaf in cached]
    for leaf, values in zip(wanted, new):
        for entry in range(ROWS - 1):
            leaf[rows[entry], starts[entry] : starts[entry] + steps] = values[entry]
    for leaf, expected in zip(written, wanted):
        np.testing.assert_array_equal(leaf, expected)
    layer = tuple(map(jnp.asarray, wanted))
    attended = np.asarray(chunked_attention(q, layer, rows, starts, counts, window))
    np.testing.assert_allclose(got[:-1], attended[:-1], atol=1e-6)
    assert not np.asarray(got[-1]).any()


def attend(q, layer, rows, starts, counts):
    return fused_attention(q, layer, rows, starts, counts, window=None)


def decode(q, layer, rows, starts, counts):
    return fused_decode(q, (q[:, :, :KV_HEADS],) * 2, layer, rows, starts, counts, window=None)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    ("kernel", "steps", "entries", "int8"),
    [
        (attend, 1, 64, False),
        (attend, 64, 8, False),
        (attend, 3, 8, True),
        (decode, 1, 64, False),
        (decode, 3, 8, False),
    ],
)
def test_the_kernels_lower_for_gpus(dtype, kernel, steps, entries, int8):
    inputs = work(steps, entries, width=128, dtype=dtype, int8=int8)
    calls = [
        jax.export.DisabledSafetyCheck.custom_call(name) for name in ("__gpu$xla.gpu.triton", "triton_kernel_call")
    ]
    lower = jax.export.export(jax.jit(kernel), platforms=["cuda"], disabled_checks=calls)
    try:
        assert "triton" in lower(*inputs).mlir_module()
    except RuntimeError as error:  # from jax 0.11 on
        if "No supported GPU devices found" not in str(error):
            raise
        pytest.skip("this JAX lowers Triton kernels only where there is a GPU")


def test_which_devices_and_models_it_supports(monkeypatch):
    mesh = make_mesh(devices=jax.devices()[:1])
    assert FusedCache.unsupported(tiny.config(head_dim=64), mesh) is None
    for width in (8, 80):
        assert f"heads of {width} channels" in str(FusedCache.unsupported(tiny.config(head_dim=width), mesh))
    monkeypatch.setattr("routerl_jax.engine.fused.on_gpu", lambda mesh: True)
    assert "compute capability unknown" in str(FusedCache.unsupported(tiny.config(head_dim=64), mesh))
    monkeypatch.setattr("routerl_jax.engine.fused.triton", None)
    monkeypatch.setattr("routerl_jax.engine.fused.on_gpu", lambda mesh: False)
    assert "no Triton" in str(FusedCache.unsupported(tiny.config(head_dim=64), mesh))
