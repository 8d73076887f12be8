"""Adapters on a decoder: where they are put, what they leave alone, how they lie on devices, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx

from routerl_jax.models.families.bert import Encoder, EncoderConfig
from routerl_jax.models.lora import (
    Adapter,
    LoraConfig,
    LoraRule,
    adapters,
    apply_lora,
    base_digest,
    merge_state,
    merged,
)
from routerl_jax.models.projection import MODULES, dequantize
from routerl_jax.parallel.mesh import make_mesh
from tests import tiny

TOKENS = jnp.arange(24).reshape(2, 12) * 7 % tiny.VOCABULARY


def lora(model, **settings):
    config = LoraConfig(**{"rank": 4, "tile_size": 8, **settings})
    apply_lora(model, config.build(), jax.random.key(1), config.dtype)
    return model


def with_b(model, seed=2, size=0.1):
    """The model with random B, where a new adapter has zeros."""
    for number, name in enumerate(adapters(model)):
        b = getattr(model.blocks, f"{name}_lora_b")
        b.set_value(size * jax.random.normal(jax.random.fold_in(jax.random.key(seed), number), b.shape, b.dtype))
    return model


def nbytes(model, *suffixes):
    """Bytes of the blocks' matrices, or of what lies beside them."""
    return sum(getattr(model.blocks, name + suffix)[...].nbytes for name in MODULES for suffix in suffixes or ("",))


def test_a_new_adapter_changes_nothing():
    """B is 0; A is within 1 / sqrt(inputs) and fills that interval."""
    model = tiny.model()
    before = model(TOKENS)
    lora(model, alpha=8.0)
    np.testing.assert_array_equal(model(TOKENS), before)
    assert adapters(model) == dict.fromkeys(MODULES, Adapter(4, 8.0))
    shapes = dict.fromkeys("qkv", (32, (32,))) | {"o": (32, (4, 8)), "gate": (32, (32,)), "down": (64, (64,))}
    for name, (inputs, axes) in shapes.items():
        a, b = (getattr(model.blocks, f"{name}_lora_{side}")[...] for side in "ab")
        assert a.shape == (2, *axes, 4)
        assert b.shape == (2, 4, *getattr(model.blocks, name).shape[1 + len(axes) :])
        assert 0.95 < float(jnp.abs(a).max()) * inputs**0.5 <= 1
        assert not b.any()
        assert (a[0] != a[1]).any()
    np.testing.assert_array_equal(merged(model)(TOKENS), before)


def test_rules_by_module():
    """The first rule that matches counts; what none matches gets no adapter."""
    rules = {"attention": LoraRule(modules="[qk]", rank=2), "out": LoraRule(modules="o", alpha=3.0)}
    model = lora(tiny.model(), modules="q|v|o|down", rules=rules, dtype="bfloat16")
    expected = {"q": (2, 16), "k": (2, 16), "v": (4, 16), "o": (4, 3), "down": (4, 16)}
    assert adapters(model) == {name: Adapter(*pair) for name, pair in expected.items()}
    again = lora(tiny.model(), modules="v", dtype="bfloat16")
    assert again.blocks.v_lora_a[...].dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        model.blocks.v_lora_a[...], again.blocks.v_lora_a[...]
    )  # other modules' do not matter


def test_merged_is_the_same_function():
    model = with_b(lora(tiny.model()))
    plain = merged(model)
    assert np.abs(plain(TOKENS) - tiny.model()(TOKENS)).max() > 1
    # W x + B A x and (W + B A) x: float32 rounds 2^-24 of intermediate values of some tens, over a few hundred additions.
    np.testing.assert_allclose(plain(TOKENS), model(TOKENS), atol=5e-5)
    assert not adapters(plain)
    assert plain.embedding[...] is model.embedding[...]  # shared, not copied
    state = merge_state(nnx.state(model))
    assert jax.tree.structure(state) == jax.tree.structure(nnx.split(plain)[1])
    assert merged(plain) is plain


def test_quantised_base():
    """Logits are those of the dequantised weights; the matrices take an eighth, and a scale for every tile."""
    qtype = "nf4"
    model = lora(tiny.model(), base_qtype=qtype)
    full = tiny.model()
    assert nbytes(model) == nbytes(full) / 8
    assert nbytes(model, "_scale") == nbytes(full) / 8  # a float32 for every 8
    for name in MODULES:
        codes, scale = getattr(model.blocks, name)[...], getattr(model.blocks, f"{name}_scale")[...]
        getattr(full.blocks, name).set_value(jax.vmap(lambda c, s: dequantize(c, s, qtype))(codes, scale))
    np.testing.assert_array_equal(model(TOKENS), full(TOKENS))
    np.testing.assert_array_equal(merged(model)(TOKENS), full(TOKENS))
    assert np.abs(model(TOKENS) - tiny.model()(TOKENS)).max() > 0.01
    with_b(model)
    np.testing.assert_allclose(merged(model)(TOKENS), model(TOKENS), atol=5e-5)


def test_only_some_matrices_have_an_adapter_and_all_are_quantised():
    model = lora(tiny.model(), modules="q|v", base_qtype="int8")
    assert set(adapters(model)) == {"q", "v"}
    assert all(getattr(model.blocks, name)[...].dtype == jnp.int8 for name in MODULES)
    assert nbytes(model) == nbytes(tiny.model()) / 4
    assert model.embedding[...].dtype == jnp.float32


@pytest.mark.parametrize(("layout", "qtype"), [("fsdp", "nf4"), ("fsdp+tensor", "")])
def test_adapters_lie_as_their_matrix(layout, qtype):
    """Input axes of A and output axes of B are cut as the matrix's; and the values are those of one device."""
    mesh = make_mesh({"data": 1, "fsdp": 4, "tensor": 2})
    model, one = lora(tiny.model(mesh=mesh, layout=layout), base_qtype=qtype), lora(tiny.model(), base_qtype=qtype)

    def cuts(name):
        value = getattr(model.blocks, name)[...]
        return (*value.sharding.spec, *[None] * (value.ndim - len(value.sharding.spec)))

    tensor = "tensor" if layout == "fsdp+tensor" else None
    assert cuts("q_lora_a") == (None, "fsdp", None)
    assert cuts("q_lora_b") == (None, None, tensor, None)
    assert cuts("o_lora_a") == (None, tensor, None, None)
    assert cuts("down_lora_b") == (None, None, "fsdp")
    assert cuts("gate") == (None, "fsdp", tensor)
    for ours, theirs in zip(*(jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (model, one))):
        np.testing.assert_array_equal(ours, theirs)
    assert model.base_identity == one.base_identity == base_digest(tiny.model())
    home = tiny.model(mesh=mesh, layout=layout).blocks.gate[...].sharding
    assert merged(model).blocks.gate[...].sharding.is_equivalent_to(home, 3)


def test_identity_of_the_base():
    """Any other value, place or type of a weight gives another digest; the adapter does not count."""
    seen = {base_digest(tiny.model())}
    changed = tiny.model()
    changed.blocks.q.set_value(changed.blocks.q[...].at[1, 3, 2, 5].multiply(1 + 2**-23))
    seen.add(base_digest(changed))
    swapped = tiny.model()
    swapped.embedding.set_value(
        swapped.embedding[...].at[jnp.asarray([3, 4])].set(swapped.embedding[...][jnp.asarray([4, 3])])
    )
    seen.add(base_digest(swapped))
    seen.add(base_digest(tiny.model(dtype=jnp.bfloat16)))
    assert len(seen) == 4
    assert base_digest(with_b(lora(tiny.model()))) in seen
    again = lora(merged(with_b(lora(tiny.model()))))
    assert again.base_identity == base_digest(again)
    assert again.base_identity not in seen


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0, "rules": {"a": LoraRule(modules="q")}}, "rules is set but rank=0"),
        ({"rank": 0, "base_qtype": "nf4"}, "base_qtype is set but rank=0"),
        ({"base_qtype": "int3"}, "base_qtype='int3' is not known; known: int8, int4, nf4"),
        ({"rank": -1}, "^rank=-1 must not be negative"),
        ({"alpha": 0.0}, "^alpha=0.0 must be above 0"),
        ({"modules": "q|("}, r"modules: 'q\|\(' is not a regular expression"),
        ({"dtype": "int8"}, "dtype='int8' must be float32 or bfloat16"),
        (
            {"modules": "query"},
            r"LoRA rule 1 \('blocks/\(\?:query\)'\) applies to nothing: it matches no module",
        ),
        ({"rules": {"a": LoraRule(modules=".*")}}, "LoRA rule 2 .* applies to nothing: earlier rules take q, k, v, o"),
        ({"base_qtype": "nf4", "tile_size": 24}, "blocks/q: tile_size=24 does not divide an input axis of 32"),
        ({"modules": ""}, "no rule is a qwix.LoraRule"),
    ],
)
def test_bad_configurations(settings, message):
    with pytest.raises(ValueError, match=message):
        lora(tiny.model(), **settings)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dropout": 0.1}, "dropout is not supported"),
        ({"act_qtype": jnp.int8}, "act_qtype and op_names are not supported"),
        ({"weight_qtype": "mxfp4"}, "weight_qtype='mxfp4' is not known"),
        ({"rank": 0}, "rank=0 and alpha=8.0 must be positive"),
    ],
)
def test_bad_rules(fields, message):
    rule = qwix.LoraRule(**{"module_path": "blocks/q", "rank": 2, "alpha": 8.0, **fields})
    with pytest.raises(ValueError, match=message):
        apply_lora(tiny.model(), [rule], jax.random.key(0))


def test_what_has_no_place_for_an_adapter():
    config = EncoderConfig(
        model_type="bert", vocab_size=8, embed=8, layers=1, heads=2, mlp=8, max_length=8, type_vocab_size=1
    )
    with pytest.raises(ValueError, match="LoRA works on decoders, and this is a Encoder"):
        lora(Encoder(config, jax.random.key(0)))
    model = lora(tiny.model(), modules="q")
    lora(model, modules="q", base_qtype="int8")  # the same adapter: kept, and the base quantised
    with pytest.raises(
        ValueError, match="the model has the adapter q: rank 4 alpha 16, but the rules ask for v: rank 4"
    ):
        lora(model, modules="v")
