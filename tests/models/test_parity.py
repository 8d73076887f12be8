"""Decoders against transformers in float32: logits, padded and packed batches, gradients.

Tolerance 1e-4: both sides work in float32 and differ only in the order of their sums; logits here reach 6.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from routerl_jax.models.decoder import Decoder
from routerl_jax.models.families.llama import decoder_rules
from routerl_jax.models.huggingface import load_pretrained
from tests.models.families import FAMILIES, Saved, hf_logits, parameters

TOLERANCE = 1e-4
VOCAB = 131
Models = Callable[[str], Saved]


@nnx.jit
def logits(model: Decoder, tokens: Any, positions: Any = None, segment_ids: Any = None) -> jax.Array:
    return model(tokens, positions, segment_ids)


def load(saved: Models, family: str) -> tuple[Any, Decoder]:
    hf, directory = saved(family)
    model = load_pretrained(str(directory))
    assert isinstance(model, Decoder)
    return hf, model


def random_tokens(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, shape)


@pytest.mark.parametrize("family", FAMILIES)
def test_full_padded_and_packed_rows_equal_the_sequences_alone(saved: Models, family: str) -> None:
    """Row 0: one sequence. Row 1: padded. Row 2: three packed, positions starting over, then padding."""
    hf, model = load(saved, family)
    length = 60
    sequences = {(0, 0): 60, (1, 0): 29, (2, 0): 33, (2, 33): 1, (2, 34): 20}  # (row, start): length
    tokens = random_tokens(3, length)
    positions, segments = np.zeros((3, length), int), np.zeros((3, length), int)
    for segment, ((row, start), size) in enumerate(sequences.items(), 1):
        positions[row, start : start + size] = np.arange(size)
        segments[row, start : start + size] = segment
    got = np.asarray(logits(model, tokens, positions, segments))
    assert got.dtype == np.float32
    assert np.isfinite(got).all()  # padding too: a NaN there would poison gradients
    for (row, start), size in sequences.items():
        alone = hf_logits(hf, tokens[row : row + 1, start : start + size])[0]
        assert np.abs(alone).max() > 1  # the comparison is of something
        np.testing.assert_allclose(got[row, start : start + size], alone, rtol=0, atol=TOLERANCE)
    other = np.where(segments == 0, (tokens + 1) % VOCAB, tokens)
    again = np.asarray(logits(model, other, positions, segments))
    np.testing.assert_array_equal(again[segments > 0], got[segments > 0])  # what padding holds is never seen


@pytest.mark.parametrize("length", [1, 2, 33, 200])
def test_lengths(saved: Models, length: int) -> None:
    hf, model = load(saved, "llama_rope_llama3")
    tokens = random_tokens(3, length, seed=length)
    np.testing.assert_allclose(logits(model, tokens), hf_logits(hf, tokens), rtol=0, atol=TOLERANCE)


def test_plain_call_is_one_segment_from_position_zero(saved: Models) -> None:
    """`model(tokens)` as users write it: without jit, from lists."""
    hf, model = load(saved, "llama")
    tokens = random_tokens(1, 6)
    plain = model(tokens.tolist())
    np.testing.assert_allclose(plain, hf_logits(hf, tokens), rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(model(tokens, np.arange(6)[None], np.full((1, 6), 7)), plain)


def published(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """A parameter of transformers by the names of published checkpoints; it holds all experts of a layer in two tensors."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: value}
    stem, kind = name.rsplit(".", 1)
    halves = {"gate_proj": value[:, : value.shape[1] // 2], "up_proj": value[:, value.shape[1] // 2 :]}
    parts = halves if kind == "gate_up_proj" else {kind: value}
    return {f"{stem}.{i}.{part}.weight": tensor for part, stack in parts.items() for i, tensor in enumerate(stack)}


@pytest.mark.parametrize(
    ("family", "remat"),
    [
        ("llama_bias", "none"),
        ("qwen2_tied", "full"),
        ("qwen3", "dots"),
        ("qwen3_moe", "full"),
        ("qwen3_moe_mixed", "none"),
    ],
)
def test_gradients(saved: Models, family: str, remat: Any) -> None:
    """Of the mean next-token cross-entropy, for every parameter; 1e-3 of the parameter's largest gradient."""
    hf, model = load(saved, family)
    tokens = random_tokens(3, 24)
    hf.zero_grad()
    hf_loss = hf(torch.as_tensor(tokens), labels=torch.as_tensor(tokens)).loss
    hf_loss.backward()
    theirs: dict[str, np.ndarray] = {}
    for name, parameter in hf.named_parameters():
        theirs |= published(name, parameter.grad.numpy())
    hf.zero_grad()

    graph, params = nnx.split(model, nnx.Param)

    @jax.jit
    def loss_and_gradients(params: nnx.State) -> tuple[jax.Array, nnx.State]:
        def loss(params: nnx.State) -> jax.Array:
            policy = nnx.merge(graph, params)
            logprobs = jax.nn.log_softmax(policy.unembed(policy.hidden(tokens, remat=remat))[:, :-1])
            return -jnp.take_along_axis(logprobs, jnp.asarray(tokens)[:, 1:, None], axis=-1).mean()

        return jax.value_and_grad(loss)(params)

    loss, gradients = loss_and_gradients(params)
    np.testing.assert_allclose(loss, hf_loss.item(), rtol=1e-5)
    rules, gaps = decoder_rules(model.config), {}
    for path, leaf in nnx.to_flat_state(gradients):
        rule, value = rules[path], np.asarray(leaf.get_value())
        for place in np.ndindex(*value.shape[: rule.outer]):
            name = rule.name_at(place)
            expected = theirs.pop(name)
            scale = np.abs(expected).max()
            if ".experts." not in name:
                assert scale > 0
            gaps[name] = np.abs(rule.to_theirs(value[place]) - expected).max() / max(scale, 1e-6)
    assert not theirs  # every parameter of theirs was compared
    assert max(gaps.values()) <= 1e-3, max(gaps, key=lambda name: gaps[name])


def test_unrolled_layers_and_their_caches(saved: Models) -> None:
    """`run` with the layers scanned or in a Python loop: same hidden states, caches in the order of the layers."""
    _, model = load(saved, "qwen3")
    tokens, layers = jnp.asarray(random_tokens(2, 12)), model.config.layers
    positions = jnp.broadcast_to(jnp.arange(12), (2, 12))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: jax.Array, window: None) -> tuple[jax.Array, jax.Array]:
        assert window is None
        return jax.nn.dot_product_attention(q, k, v, is_causal=True), cache + k.sum()

    @nnx.jit(static_argnames="unroll")
    def run(model: Decoder, caches: Any, unroll: bool) -> tuple[jax.Array, Any]:
        return model.run(tokens, positions, attend, caches, unroll=unroll)[:2]

    expected = nnx.jit(Decoder.hidden)(model, tokens)
    scanned, stacked = run(model, jnp.arange(layers, dtype=jnp.float32), unroll=False)
    unrolled, listed = run(model, [jnp.float32(i) for i in range(layers)], unroll=True)
    np.testing.assert_allclose(scanned, expected, rtol=0, atol=1e-5)  # float32, other fusions
    np.testing.assert_allclose(unrolled, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(listed, stacked, rtol=1e-4)  # a sum over 768 keys
    assert len({round(float(cache), 2) for cache in listed}) == layers


@pytest.mark.parametrize("family", ["llama", "qwen3_tied"])
def test_causality_by_gradient(saved: Models, family: str) -> None:
    """Every position holds another token, so the gradient for a row of the embedding table is that of one input."""
    _, model = load(saved, family)
    length, packed = 8, 5  # the second half of the test starts a new segment at index 5
    tokens = jnp.asarray(np.random.default_rng(0).permutation(VOCAB)[None, :length])
    probe = jax.random.normal(jax.random.key(1), (model.config.embed,))
    graph, params = nnx.split(model, nnx.Param)

    @jax.jit
    def influence(segment_ids: jax.Array) -> jax.Array:  # [time of the output, time of the input]
        def output(params: nnx.State) -> jax.Array:
            return nnx.merge(graph, params).hidden(tokens, segment_ids=segment_ids)[0] @ probe

        jacobian = jax.jacrev(output)(params)["embedding"].get_value()  # [T, V, D]
        return jnp.abs(jacobian[:, tokens[0]]).max(-1)

    allowed = np.tri(length, dtype=bool)
    np.testing.assert_array_equal(np.asarray(influence(jnp.ones((1, length), int))) > 0, allowed)
    segments = jnp.asarray([[1] * packed + [2] * (length - packed)])
    allowed[packed:, :packed] = False
    np.testing.assert_array_equal(np.asarray(influence(segments)) > 0, allowed)


def test_logits_do_not_depend_on_later_tokens(saved: Models) -> None:
    """The same through the output projection, for a tied model too: earlier logits keep every bit."""
    _, model = load(saved, "qwen2_tied")
    tokens = random_tokens(1, 12)
    changed = tokens.copy()
    changed[0, 7:] = (changed[0, 7:] + 1) % VOCAB
    first, second = np.asarray(logits(model, tokens)), np.asarray(logits(model, changed))
    np.testing.assert_array_equal(first[:, :7], second[:, :7])
    assert (first[:, 7:] != second[:, 7:]).any(-1).all()


def test_bfloat16_compute(saved: Models) -> None:
    """Weights in float32, activations in bfloat16 (8 bits of mantissa): logits stay float32 and near, but differ."""
    hf, directory = saved("llama")
    model = load_pretrained(str(directory), compute_dtype="bfloat16")
    tokens = random_tokens(2, 16)
    expected, got = hf_logits(hf, tokens), logits(model, tokens)
    assert got.dtype == jnp.float32
    assert {value.dtype for value in parameters(model).values()} == {np.dtype(np.float32)}
    error = np.abs(np.asarray(got) - expected).mean() / np.abs(expected).mean()
    assert 1e-4 < error < 3e-2


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2_tied"])
def test_gradients_of_a_repeated_token_add_up_in_float32(saved: Models, family: str) -> None:
    """Float32 weights, bfloat16 compute: a sum in bfloat16 stands still after 256 equal terms, here there are 4096.

    3%: each term is bfloat16's, with 8 bits of mantissa, after three layers of such.
    """
    tokens = np.full((64, 64), 7)

    def gradient(compute_dtype: str) -> np.ndarray:
        model = load_pretrained(str(saved(family).directory), compute_dtype=compute_dtype)
        probe = jax.random.normal(jax.random.key(1), (model.config.vocab_size,))
        graph, params = nnx.split(model, nnx.Param)
        gradients = jax.jit(jax.grad(lambda params: (nnx.merge(graph, params)(tokens) @ probe).sum()))(params)
        return np.asarray(gradients["embedding"].get_value())

    expected, got = gradient("float32"), gradient("bfloat16")
    assert got.dtype == np.float32
    assert np.linalg.norm(got - expected) < 0.03 * np.linalg.norm(expected)


def test_float32_products_are_float32_on_accelerators_too(saved: Models) -> None:
    """Of every matrix product, backward ones included; by default TPUs multiply float32 in bfloat16."""
    tokens = random_tokens(1, 8)

    def precisions(dtype: str) -> list[str]:
        graph, params = nnx.split(load_pretrained(str(saved("qwen3").directory), dtype=dtype), nnx.Param)
        jaxpr = jax.make_jaxpr(jax.grad(lambda params: nnx.merge(graph, params)(tokens).sum()))(params)
        return re.findall(r"precision=(\S+)", str(jaxpr))

    found = precisions("float32")
    assert len(found) > 25  # 9 in a block, one output projection, each with its gradients
    assert set(found) == {"(Precision.HIGHEST,"}
    assert not any("HIGHEST" in precision for precision in precisions("bfloat16"))


@pytest.mark.parametrize("family", ["llama_rope_llama3", "qwen2_tied", "qwen3"])
def test_bfloat16_is_as_near_to_float32_as_transformers_bfloat16(saved: Models, family: str) -> None:
    """Root mean square of the distance from float32 logits: at most a tenth above that of transformers' own bfloat16.

    And no logit further off than 2 units in the last place of the largest one (2**-7 of it) beyond transformers' worst.
    """
    hf, directory = saved(family)
    tokens = random_tokens(3, 40)
    exact = hf_logits(hf, tokens)
    theirs = hf_logits(type(hf).from_pretrained(directory, dtype=torch.bfloat16).eval(), tokens)
    ours = np.asarray(logits(load_pretrained(str(directory), dtype="bfloat16"), tokens))
    off, reference = np.abs(ours - exact), np.abs(theirs - exact)
    assert 0 < np.sqrt((off**2).mean()) <= 1.1 * np.sqrt((reference**2).mean())
    assert off.max() <= reference.max() + 2 * 2.0**-7 * np.abs(exact).max()


def test_left_padding(saved: Models) -> None:
    """Padding before a sequence, positions counted from its first token, as transformers' `generate` batches prompts."""
    hf, model = load(saved, "qwen2_rope_yarn")
    tokens = random_tokens(2, 30)
    mask = np.ones((2, 30), int)
    mask[0, :11] = 0
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    got = np.asarray(logits(model, tokens, positions, mask))
    with torch.no_grad():
        expected = hf(torch.as_tensor(tokens), attention_mask=torch.as_tensor(mask)).logits.numpy()
    np.testing.assert_allclose(got[mask > 0], expected[mask > 0], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["qwen3_rope_yarn", "mistral"])
def test_beyond_the_trained_positions(saved: Models, family: str) -> None:
    """200 tokens where YaRN's original context has 32."""
    hf, model = load(saved, family)
    tokens = random_tokens(1, 200)
    np.testing.assert_allclose(logits(model, tokens), hf_logits(hf, tokens), rtol=0, atol=TOLERANCE)
