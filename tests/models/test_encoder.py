"""BERT encoders against transformers, random and real (MiniLM); embeddings that depend on their text alone."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from absl import logging
from flax import nnx

from routerl_jax.models.config import EncoderConfig, UnsupportedModelError
from routerl_jax.models.encoder import Encoder
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.models.pretrained import resolve
from routerl_jax.parallel.mesh import make_mesh
from tests.models.families import randomize

BERT = transformers.BertConfig(
    vocab_size=97,
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=88,
    max_position_embeddings=40,
    layer_norm_eps=1e-6,
)
TOKENS = np.random.default_rng(0).integers(0, 97, (3, 16))
MASK = np.arange(16) < np.array([[16], [9], [1]])


def random_bert(directory: pathlib.Path, kind: Any = transformers.BertModel) -> Any:
    torch.manual_seed(0)
    model = kind(BERT).eval()
    randomize(model)
    model.save_pretrained(directory)
    return model


def load(name: Any, **options: Any) -> Encoder:
    model = load_pretrained(str(name), **options)
    assert isinstance(model, Encoder)
    return model


def hf_hidden(model: Any, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.as_tensor(tokens), attention_mask=torch.as_tensor(mask).long()).last_hidden_state.numpy()


run = nnx.jit(Encoder.__call__)


def test_random_weights(tmp_path: pathlib.Path) -> None:
    """2e-5: float32 sums in another order through three layers; hidden states are up to 5."""
    hf = random_bert(tmp_path)
    encoder = load(tmp_path)
    got = np.asarray(run(encoder, TOKENS, MASK))
    np.testing.assert_allclose(got[MASK], hf_hidden(hf, TOKENS, MASK)[MASK], rtol=0, atol=2e-5)
    other = np.where(MASK, TOKENS, (TOKENS + 1) % 97)
    np.testing.assert_array_equal(np.asarray(run(encoder, other, MASK))[MASK], got[MASK])  # padding is never seen
    assert (
        np.asarray(run(encoder, TOKENS, np.ones_like(MASK)))[1, :9] != got[1, :9]
    ).any()  # and the mask is what hides it


def test_weights_under_a_head(tmp_path: pathlib.Path) -> None:
    """Checkpoints of BertForMaskedLM hold the encoder under the prefix `bert.`."""
    hf = random_bert(tmp_path, transformers.BertForMaskedLM)
    got = np.asarray(run(load(tmp_path), TOKENS, MASK))
    np.testing.assert_allclose(got[MASK], hf_hidden(hf.bert, TOKENS, MASK)[MASK], rtol=0, atol=2e-5)


@pytest.mark.parametrize(("pooling", "normalize"), [("mean", True), ("mean", False), ("cls", False)])
def test_pooling_settings_of_sentence_transformers(tmp_path: pathlib.Path, pooling: str, normalize: bool) -> None:
    hf = random_bert(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    modes = {"pooling_mode_cls_token": pooling == "cls", "pooling_mode_mean_tokens": pooling == "mean"}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    kinds = ["Transformer", "Pooling", *["Normalize"] * normalize]
    modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    encoder = load(tmp_path)
    assert (encoder.config.pooling, encoder.config.normalize) == (pooling, normalize)
    hidden = hf_hidden(hf, TOKENS, MASK)
    expected = hidden[:, 0] if pooling == "cls" else np.stack([h[m].mean(0) for h, m in zip(hidden, MASK)])
    if normalize:
        expected = expected / np.linalg.norm(expected, axis=-1, keepdims=True)
    np.testing.assert_allclose(nnx.jit(Encoder.pooled)(encoder, TOKENS, MASK), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("kinds", "modes", "message"),
    [
        (
            ["Transformer", "Pooling", "Dense", "Normalize"],
            ["mean_tokens"],
            r"/modules\.json: modules Transformer, Pooling, Dense, Normalize are not supported",
        ),
        (
            ["Transformer", "Pooling"],
            ["max_tokens"],
            r"/1_Pooling/config\.json: pooling_mode_max_tokens is not supported",
        ),
        (
            ["Transformer", "Pooling"],
            ["cls_token", "mean_tokens"],
            "pooling_mode_cls_token with pooling_mode_mean_tokens is",
        ),
        (
            ["Transformer", "Pooling"],
            [],
            "no pooling mode is not supported; supported: one of pooling_mode_mean_tokens",
        ),
    ],
)
def test_settings_that_would_give_other_vectors(
    tmp_path: pathlib.Path, kinds: list[str], modes: list[str], message: str
) -> None:
    random_bert(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    chosen = {f"pooling_mode_{mode}": mode in modes for mode in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(chosen | {"include_prompt": True}))
    modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UnsupportedModelError, match=message):
        load(tmp_path)


def test_a_plain_bert_and_its_spare_tensors(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No files of sentence-transformers: mean over tokens at unit length. The pooler is not missed."""
    lines: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: lines.append(text % values))
    random_bert(tmp_path)
    config = load(tmp_path).config
    assert (config.pooling, config.normalize) == ("mean", True)
    assert not lines


def test_no_compute_dtype(tmp_path: pathlib.Path) -> None:
    random_bert(tmp_path)
    assert load(tmp_path, dtype="bfloat16", compute_dtype="bfloat16").word[...].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"an encoder computes in .* give dtype='bfloat16' and no compute_dtype"):
        load(tmp_path, compute_dtype="bfloat16")


def test_embed_needs_a_tokenizer() -> None:
    config = EncoderConfig(model_type="bert", vocab_size=9, embed=8, layers=1, heads=2, mlp=8, max_length=8)
    with pytest.raises(ValueError, match="this encoder has no tokenizer"):
        nnx.eval_shape(lambda: Encoder(config, jax.random.key(0))).embed(["a"])


# MiniLM, real weights.

TEXTS = [
    "The capital of Togo is Lomé.",
    "photosynthesis",
    "",
    "Who discovered penicillin, and in which year?",
    "日本の首都は東京です。 👩‍👩‍👧",
    "x = [i ** 2 for i in range(10)]",
    "one two three four five six seven eight nine ten " * 9,
    "UPPER and lower",
    "a",
]


@pytest.fixture(scope="module")
def minilm() -> Encoder:
    return load("all-MiniLM-L6-v2")


@pytest.fixture(scope="module")
def reference() -> Any:
    """Sentence embeddings by transformers: its own tokenizer, one text at a time, mean over tokens, unit length."""
    directory = resolve("all-MiniLM-L6-v2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModel.from_pretrained(directory).eval()

    def embed(text: str) -> np.ndarray:
        ids = tokenizer(text, truncation=True, max_length=256, padding=False)["input_ids"]
        hidden = hf_hidden(model, np.array([ids]), np.ones((1, len(ids)), bool))[0]
        vector = hidden.mean(0)
        return vector / np.linalg.norm(vector)

    return tokenizer, model, embed


def test_minilm_hidden_states(minilm: Encoder, reference: Any) -> None:
    """1e-5: float32 sums in another order; hidden states are about 1."""
    tokenizer, model, _ = reference
    batch = tokenizer(TEXTS, padding="max_length", max_length=128, truncation=True, return_tensors="np")
    mask = batch["attention_mask"].astype(bool)
    got = np.asarray(run(minilm, batch["input_ids"], mask))
    np.testing.assert_allclose(got[mask], hf_hidden(model, batch["input_ids"], mask)[mask], rtol=0, atol=1e-5)


def test_minilm_embeddings(minilm: Encoder, reference: Any) -> None:
    """Every text in its place (they are sorted by length inside), to 1e-5, over the limit too: 256 tokens, as its
    sentence_bert_config.json says."""
    texts = [*TEXTS, "word " * 700]
    vectors = minilm.embed(texts, batch_size=3)
    assert vectors.shape == (len(texts), 384)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, [reference[2](text) for text in texts], rtol=0, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
    assert minilm.embed([]).shape == (0, 384)


def test_minilm_vectors_do_not_depend_on_their_neighbours(minilm: Encoder) -> None:
    """Bit for bit: in another order, among other texts, alone."""
    texts = [text for text in TEXTS if len(text) < 400]  # not more lengths than needed: each compiles a program
    vectors = minilm.embed(texts)
    np.testing.assert_array_equal(minilm.embed(texts[::-1]), vectors[::-1])
    crowd = [f"neighbour {i} " * (1 + i % 7) for i in range(60)]
    np.testing.assert_array_equal(minilm.embed([*crowd[:41], *texts, *crowd[41:]])[41 : 41 + len(texts)], vectors)
    for i in (0, 2, 3):
        np.testing.assert_array_equal(minilm.embed([texts[i]])[0], vectors[i])


def test_minilm_cuts_long_texts_and_keeps_the_end_mark(minilm: Encoder, reference: Any) -> None:
    tokenizer = minilm.tokenizer
    assert tokenizer is not None
    for count, limit in [(700, 512), (511, 512), (510, 512), (20, 8), (20, 2)]:
        text = "word " * count
        ids = tokenizer.encode_for_model(text, limit)
        assert ids == reference[0](text, truncation=True, max_length=limit)["input_ids"]
        assert len(ids) == min(count + 2, limit)
        assert (ids[0], ids[-1]) == (101, 102)  # [CLS] and [SEP]


def test_minilm_on_a_mesh(minilm: Encoder) -> None:
    """`embed` runs where `load_pretrained` put the weights; 2e-6: matrices of another height, summed otherwise."""
    mesh = make_mesh({"data": 4, "fsdp": 2})
    spread = load("all-MiniLM-L6-v2", mesh=mesh, layout="fsdp")
    assert len(spread.word[...].addressable_shards) == 8
    assert not spread.blocks.up[...].sharding.is_fully_replicated
    short = [text for text in TEXTS if len(text) < 40]
    np.testing.assert_allclose(spread.embed(short), minilm.embed(short), rtol=0, atol=2e-6)


def test_bfloat16_encoder(tmp_path: pathlib.Path) -> None:
    """Pooling stays in float32: unit length to float32 precision, direction to that of bfloat16."""
    random_bert(tmp_path)
    pooled = nnx.jit(Encoder.pooled)
    half, full = (pooled(load(tmp_path, dtype=dtype), TOKENS, MASK) for dtype in ("bfloat16", "float32"))
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(jnp.linalg.norm(half, axis=1), 1, rtol=1e-6)
    assert ((half * full).sum(1) > 0.999).all()
