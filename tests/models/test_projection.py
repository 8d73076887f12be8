"""Quantised matrices beside qwix's own functions, and what they take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

from routerl_jax.models.projection import dequantize, merge, quantize

WEIGHT = jax.random.normal(jax.random.key(0), (2, 4, 16, 6))  # layers, heads, width, outputs


@pytest.mark.parametrize(("qtype", "bytes_per_weight"), [("int8", 1), ("int4", 0.5), ("nf4", 0.5)])
@pytest.mark.parametrize("tile", [0, 8])
def test_codes_are_qwixs(qtype, bytes_per_weight, tile):
    """Bit for bit, one scale for each tile of one head's inputs to one output; and no entry is off by more than a step."""
    codes, scale = quantize(WEIGHT, 2, qtype, tile)
    assert codes.nbytes == bytes_per_weight * WEIGHT.size
    assert scale.shape == (2, 4, 16 // (tile or 16), 6)
    values = dequantize(codes[0], scale[0], qtype)
    expected = qwix.dequantize(
        qwix.quantize(
            WEIGHT[0],
            qtype if qtype == "nf4" else jnp.dtype(qtype),
            channelwise_axes=(0, 2),
            tiled_axes={1: tile or 16},
        )
    )
    np.testing.assert_array_equal(values, expected)
    # The widest gap between levels, in units of the scale: NormalFloat's first one, 1 - 0.6962. Codes are at most half off.
    gap = {"int8": 1.0, "int4": 1.0, "nf4": 0.3039}[qtype]
    widest = np.repeat(np.asarray(scale[0]), tile or 16, axis=1)
    assert (np.abs(np.asarray(values - WEIGHT[0])) <= gap / 2 * widest * 1.001).all()


def test_merging_is_a_sum_of_outer_products():
    """In float64, by hand: W + alpha / rank * sum over r of A[:, r] B[r, :], rounded once."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 4, 16, 3)).astype(np.float32), rng.normal(size=(2, 3, 6)).astype(np.float32)
    expected = np.asarray(WEIGHT, np.float64) + 5 / 3 * np.einsum(
        "lnhr,lro->lnho", a.astype(np.float64), b.astype(np.float64)
    )
    options = {"alpha": 5.0, "qtype": "", "dtype": jnp.float32}
    value = merge(WEIGHT, None, jnp.asarray(a), jnp.asarray(b), **options)
    np.testing.assert_allclose(value, expected, rtol=0, atol=1e-5)
    half = merge(WEIGHT.astype(jnp.bfloat16), None, jnp.asarray(a), jnp.asarray(b), **options | {"dtype": jnp.bfloat16})
    # The frozen matrix is rounded to 8 bits before, the sum after: each is off by 2^-9 of itself at most.
    assert np.abs(np.asarray(half, np.float64) - expected).max() < 2**-8 * (np.abs(expected).max() + 4)


@pytest.mark.parametrize(
    ("shape", "qtype", "tile", "message"),
    [
        ((1, 8, 6), "int3", 0, "qtype='int3' is not known; known: int8, int4, nf4"),
        ((1, 12, 6), "nf4", 8, "tile_size=8 does not divide an input axis of 12"),
        ((1, 8, 5), "nf4", 0, "codes go in pairs along the last axis, which has 5; use int8"),
    ],
)
def test_what_does_not_fit(shape, qtype, tile, message):
    with pytest.raises(ValueError, match=message):
        quantize(jnp.zeros(shape), 1, qtype, tile)
