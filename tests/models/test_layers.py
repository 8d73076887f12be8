"""The small pieces, each against another implementation or an algebraic property."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from routerl_jax.models.families.llama import decoder_from_hf
from routerl_jax.models.layers import Initializer, layer_norm, logits_of, rms_norm, rope_angles, rotate

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(0, 3, shape).astype(np.float32)


def test_norms_against_torch() -> None:
    """1e-6: one float32 reduction over 40 numbers, results of a few units."""
    x, scale, bias = normal(3, 5, 40), normal(40), normal(40)
    tensors = [torch.tensor(value) for value in (x, scale, bias)]
    expected = torch.nn.functional.layer_norm(tensors[0], (40,), tensors[1], tensors[2], eps=1e-3)
    np.testing.assert_allclose(layer_norm(x, scale, bias, 1e-3), expected, rtol=1e-5, atol=1e-6)
    expected = torch.nn.functional.rms_norm(tensors[0], (40,), tensors[1], eps=1e-3)
    np.testing.assert_allclose(rms_norm(x, scale, 1e-3), expected, rtol=1e-5, atol=1e-6)


def test_norms_keep_their_statistics_in_float32() -> None:
    """Of bfloat16 numbers: what float32 gives, rounded once at the end."""
    x = jnp.asarray(normal(8, 256), jnp.bfloat16)
    ones, zeros = jnp.ones(256), jnp.zeros(256)
    for norm in (lambda x: rms_norm(x, ones, 1e-6), lambda x: layer_norm(x, ones, zeros, 1e-6)):
        result = norm(x)
        assert result.dtype == jnp.bfloat16
        np.testing.assert_array_equal(result, norm(x.astype(jnp.float32)).astype(jnp.bfloat16))


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3.1": {  # as in meta-llama/Llama-3.1-8B
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama3.2": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


@pytest.mark.parametrize("rope", ROPES)
def test_rotary_embedding_against_transformers(rope: str) -> None:
    """Full-size heads. Float32 angles are 1.5e-5 apart at position 255 and 2.4e-4 at 3000; values are up to 12."""
    hf_config = transformers.LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        head_dim=128,
        max_position_embeddings=131072,
        rope_parameters=ROPES[rope],
    )
    config = decoder_from_hf(hf_config.to_dict())
    positions = np.array([[0, 1, 2, 17, 255, 3000]])
    q, k = normal(1, 6, 4, 128), normal(1, 6, 2, 128)
    cos, sin = LlamaRotaryEmbedding(hf_config)(torch.zeros(1), torch.tensor(positions))
    theirs = apply_rotary_pos_emb(torch.tensor(q).transpose(1, 2), torch.tensor(k).transpose(1, 2), cos, sin)
    angles = rope_angles(jnp.asarray(positions), config)
    for ours, other in zip((rotate(q, angles), rotate(k, angles)), theirs):
        other = other.transpose(1, 2).numpy()
        np.testing.assert_allclose(ours[:, :5], other[:, :5], rtol=0, atol=2e-4)
        np.testing.assert_allclose(ours, other, rtol=0, atol=1e-2)


def test_rotation_keeps_lengths_and_depends_on_the_distance_alone() -> None:
    config = decoder_from_hf(
        {
            "model_type": "llama",
            "vocab_size": 1,
            "hidden_size": 64,
            "intermediate_size": 1,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
    )
    q, k = normal(1, 1, 1, 32), normal(1, 1, 1, 32)

    def at(x: np.ndarray, position: int) -> Any:
        return rotate(x, rope_angles(jnp.array([[position]]), config))[0, 0, 0]

    np.testing.assert_array_equal(at(q, 0), q[0, 0, 0])
    np.testing.assert_allclose(jnp.linalg.norm(at(q, 91)), np.linalg.norm(q), rtol=1e-6)
    np.testing.assert_allclose(at(q, 40) @ at(k, 33), at(q, 7) @ at(k, 0), rtol=1e-4)
    assert abs(at(q, 40) @ at(k, 33) - at(q, 40) @ at(k, 32)) > 1e-2


def test_initializer() -> None:
    """Every parameter has its own stream of the asked scale, and the same key gives the same model."""
    first, second = (Initializer(jax.random.key(3), 0.5, jnp.dtype("float32")) for _ in range(2))
    a, b = (first.normal((100, 100), ("x", "y")) for _ in range(2))
    np.testing.assert_array_equal(a.get_value(), second.normal((100, 100), ("x", "y")).get_value())
    assert abs(float(a.get_value().std()) - 0.5) < 0.02  # 10^4 draws: a standard error of 0.0035
    assert abs(np.corrcoef(a.get_value().ravel(), b.get_value().ravel())[0, 1]) < 0.05
    assert a.get_metadata()["axes"] == ("x", "y")
    half = Initializer(jax.random.key(3), 0.5, jnp.dtype("bfloat16"))
    assert {half.normal((2,), (None,)).dtype, half.ones((2,), (None,)).dtype, half.zeros((2,), (None,)).dtype} == {
        jnp.dtype("bfloat16")
    }


@pytest.mark.parametrize("tied", [True, False])
def test_logits_have_the_gradients_of_their_product(tied: bool) -> None:
    """In float32 exactly those of a plain product. In bfloat16 no product has float32 operands, and the errors are those of
    rounding (2^-9) the logits' gradient, of random signs."""
    x, weight, given = (
        jnp.asarray(normal(12, 16)),
        jnp.asarray(normal(*((40, 16) if tied else (16, 40)))),
        normal(12, 40),
    )

    def plain(x: Any, weight: Any) -> Any:
        return ((x @ (weight.T if tied else weight)) * given).sum()

    def ours(x: Any, weight: Any, dtype: Any) -> Any:
        return (logits_of(x.astype(dtype), weight, tied) * given).sum()

    expected = jax.grad(plain, argnums=(0, 1))(x, weight)
    for dtype, tolerance in ((jnp.float32, 1e-6), (jnp.bfloat16, 6e-3)):
        gradients = jax.grad(ours, argnums=(0, 1))(x, weight, dtype)
        for value, wanted in zip(gradients, expected):
            assert value.dtype == jnp.float32
            assert jnp.linalg.norm(value - wanted) < tolerance * jnp.linalg.norm(wanted)
    products = [
        [str(operand.aval.dtype) for operand in equation.invars]
        for equation in jax.make_jaxpr(jax.grad(ours, argnums=(0, 1)), static_argnums=2)(x, weight, jnp.bfloat16).eqns
        if equation.primitive.name == "dot_general"
    ]
    assert products == [["bfloat16", "bfloat16"]] * len(products)
    assert len(products) >= 2
