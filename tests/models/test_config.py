"""config.json: what is not implemented is refused by name, with what is; what is implemented is read as it is meant."""

import pathlib
from typing import Any

import pytest
import transformers

from routerl_jax.models.config import DecoderConfig, RopeScaling, UnsupportedModelError
from routerl_jax.models.families.bert import encoder_from_hf
from routerl_jax.models.families.llama import decoder_from_hf, decoder_to_hf
from routerl_jax.models.family import FAMILIES, family_of
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.models.published import architecture_of

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
BERT = LLAMA | {"model_type": "bert", "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
            "rope_type 'dynamic' is not supported; supported: default, linear, llama3, yarn",
        ),
        ({"mlp_bias": True}, "mlp_bias=True is not supported; supported: False"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported: 'silu'"),
    ],
)
def test_unsupported_decoders(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        decoder_from_hf(LLAMA | changes, "dir/config.json")
    assert str(error.value).startswith(f"dir/config.json: {message}")
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported; supported: 'gelu'"),
        (
            {"position_embedding_type": "relative_key"},
            "position_embedding_type='relative_key' is not supported; supported: 'absolute'",
        ),
    ],
)
def test_unsupported_encoders(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        encoder_from_hf(BERT | changes, "dir/config.json")
    assert str(error.value) == f"dir/config.json: {message}"


@pytest.mark.parametrize("kind", ["gpt2", None, 3])
def test_unknown_families(kind: Any) -> None:
    """The message names every family there is."""
    with pytest.raises(UnsupportedModelError) as error:
        family_of(LLAMA | {"model_type": kind}, "dir/config.json")
    assert str(error.value).startswith(
        f"dir/config.json: model_type {kind!r} is not supported; decoders: llama, mistral, "
    )
    assert all(name in str(error.value) for name in FAMILIES)


def test_what_is_no_model_configuration(tmp_path: pathlib.Path) -> None:
    """Also where weights are not touched."""
    path = tmp_path / "config.json"
    for content, message in (
        ("[]", "holds no JSON object"),
        ('{"model_type": "llama"}', "'.*' is missing; a llama needs"),
    ):
        path.write_text(content)
        for read in (architecture_of, load_pretrained):
            with pytest.raises(ValueError, match=f"^{path}: {message}"):
                read(str(tmp_path))


def test_windows() -> None:
    """Which layers see a window: as transformers' own configurations have it."""
    qwen = LLAMA | {"model_type": "qwen2", "num_hidden_layers": 3, "sliding_window": 8, "use_sliding_window": True}
    for kind, changes in [
        ("qwen2", qwen | {"max_window_layers": 1}),
        ("qwen3", qwen | {"model_type": "qwen3", "max_window_layers": 0}),
        ("qwen2", qwen | {"max_window_layers": 3}),
        ("qwen2", qwen | {"use_sliding_window": False}),
    ]:
        config = decoder_from_hf(changes)
        theirs = {"qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}[kind](**changes)
        windowed = config.windowed or (config.window is not None,) * config.layers
        assert windowed == tuple(one == "sliding_attention" for one in theirs.layer_types)
        assert config.window == (8 if any(windowed) else None)
    mistral = decoder_from_hf(LLAMA | {"model_type": "mistral", "sliding_window": 16})
    assert (mistral.window, mistral.windowed) == (16, ())
    assert decoder_from_hf(LLAMA | {"sliding_window": 16}).window is None  # Llama has none


def test_defaults_of_sparse_files() -> None:
    config = decoder_from_hf(LLAMA)
    assert (config.kv_heads, config.head_dim, config.rope_theta, config.norm_eps) == (4, 12, 10_000.0, 1e-6)
    assert (config.bos_id, config.eos_ids, config.rope_scaling, config.tied_embeddings) == (None, (), None, False)
    assert (config.qkv_bias, config.output_bias, config.qk_norm) == (False, False, False)
    encoder = encoder_from_hf(BERT)
    assert (encoder.type_vocab_size, encoder.norm_eps, encoder.pooling, encoder.normalize) == (2, 1e-12, "mean", True)


def test_what_a_family_fixes() -> None:
    qwen2 = decoder_from_hf(LLAMA | {"model_type": "qwen2"})
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = decoder_from_hf(LLAMA | {"model_type": "qwen3"})
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm) == (False, False, True)
    biased = decoder_from_hf(LLAMA | {"attention_bias": True})
    assert (biased.qkv_bias, biased.output_bias, biased.qk_norm) == (True, True, False)


def test_one_or_several_end_tokens() -> None:
    assert decoder_from_hf(LLAMA | {"eos_token_id": 0}).eos_ids == (0,)
    assert decoder_from_hf(LLAMA | {"eos_token_id": [7, 9]}).eos_ids == (7, 9)


def make(**changes: Any) -> DecoderConfig:
    fields = {"model_type": "llama", "vocab_size": 10, "embed": 8, "layers": 1, "heads": 4, "kv_heads": 2}
    return DecoderConfig(**{**fields, "head_dim": 4, "mlp": 8, "max_length": 16, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 3}, "heads=4 must be a multiple of kv_heads=3"),
        ({"head_dim": 5}, "head_dim=5 must be even"),
        ({"model_type": "phi"}, "model_type='phi' is not supported; decoders: llama, mistral, qwen2, qwen3"),
        ({"model_type": "mistral", "qkv_bias": True}, "qkv_bias=True makes no mistral; set qkv_bias=False"),
        ({"window": 8}, "window makes no llama; set window=None"),
        (
            {"model_type": "mistral", "window": 8, "windowed": (True, False)},
            "needs a window, and an entry for each of 1",
        ),
        ({"mrope_sections": (1, 2, 2)}, "must add up to head_dim / 2 = 2"),
        ({"model_type": "qwen3"}, "qk_norm=False makes no qwen3; set qk_norm=True"),
        ({"qk_norm": True}, "qk_norm=True makes no llama; set qk_norm=False"),
        ({"model_type": "qwen2"}, "qkv_bias=False makes no qwen2; set qkv_bias=True"),
        ({"qkv_bias": True}, "output_bias=False makes no llama; set output_bias=True"),
        ({"output_bias": True}, "output_bias=True makes no llama; set output_bias=False"),
    ],
)
def test_impossible_architectures(changes: dict[str, Any], message: str) -> None:
    """A combination that config.json can't express would load as another model after its export."""
    with pytest.raises(ValueError, match=message):
        make(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model_type": "qwen2", "qkv_bias": True, "tied_embeddings": True, "eos_ids": (3,), "bos_id": 0},
        {"model_type": "qwen3", "qk_norm": True, "eos_ids": (3, 4), "norm_eps": 1e-5, "init_scale": 0.1},
        {"qkv_bias": True, "output_bias": True, "rope_theta": 5e5},
        {"rope_scaling": RopeScaling(kind="linear", factor=2.0)},
        {"rope_scaling": RopeScaling(kind="yarn", factor=4.0, attention_factor=1.2, beta_fast=16.0, truncate=False)},
        {"model_type": "mistral", "window": 8},
        {"model_type": "qwen3", "qk_norm": True, "window": 8, "windowed": (False, True), "layers": 2},
        {"model_type": "qwen2", "qkv_bias": True, "mrope_sections": (1, 1, 0)},
        {"rope_scaling": RopeScaling(kind="llama3", factor=8.0, low_freq_factor=2.0, original_max_length=64)},
    ],
)
def test_round_trip(changes: dict[str, Any]) -> None:
    config = make(**changes)
    written = decoder_to_hf(config, "float32")
    assert decoder_from_hf(written) == config
    del written["rope_parameters"]  # what transformers 4 reads instead
    assert decoder_from_hf(written) == config
