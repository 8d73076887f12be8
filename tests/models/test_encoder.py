"""BERT's and RoBERTa's encoders against transformers, random and real (MiniLM); embeddings that depend on their text alone."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from absl import logging
from flax import nnx

from routerl_jax.models.config import EncoderConfig, Prompts, UnsupportedModelError
from routerl_jax.models.embedding import _run_method, batches
from routerl_jax.models.families.bert import Encoder
from routerl_jax.models.huggingface import load_pretrained, save_pretrained
from routerl_jax.models.pretrained import resolve
from routerl_jax.parallel.devices import compiled_programs
from routerl_jax.parallel.mesh import make_mesh
from tests.models.families import parameters, randomize, same_tensors

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


def test_rows_longer_than_there_are_positions() -> None:
    config = EncoderConfig(model_type="bert", vocab_size=9, embed=8, layers=1, heads=2, mlp=8, max_length=8)
    rows = jnp.ones((2, 9), int)
    with pytest.raises(ValueError, match="rows of 9 tokens; this encoder has 8 positions"):
        Encoder(config, jax.random.key(0))(rows, rows > 0)


def test_embed_needs_a_tokenizer() -> None:
    config = EncoderConfig(model_type="bert", vocab_size=9, embed=8, layers=1, heads=2, mlp=8, max_length=8)
    with pytest.raises(ValueError, match="this encoder has no tokenizer"):
        nnx.eval_shape(lambda: Encoder(config, jax.random.key(0))).embed(["a"])


ROBERTA = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 88,
    "max_position_embeddings": 34,
    "type_vocab_size": 1,
}
KINDS = {
    "bert": lambda: transformers.BertModel(BERT),
    "roberta": lambda: transformers.RobertaModel(transformers.RobertaConfig(**ROBERTA)),
    "xlm-roberta": lambda: transformers.XLMRobertaModel(transformers.XLMRobertaConfig(**ROBERTA, pad_token_id=3)),
}


def random_model(directory: pathlib.Path, kind: str) -> Any:
    """A random model with MiniLM's tokenizer cut down to its vocabulary."""
    torch.manual_seed(0)
    model = KINDS[kind]().eval()
    randomize(model)
    model.save_pretrained(directory)
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        *"abcdefghijklmnopqrstuvwxyz: ",
        *(f"##{letter}" for letter in "abcxyz"),
    ]
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(directory)
    return model


def write_files(directory: pathlib.Path, **files: Any) -> None:
    """`modules`, `pooling`, `texts` and `general`: the JSON files of sentence-transformers."""
    names = {
        "modules": "modules.json",
        "pooling": "1_Pooling/config.json",
        "texts": "sentence_bert_config.json",
        "general": "config_sentence_transformers.json",
    }
    for key, content in files.items():
        if key == "modules":
            content = [{"type": f"sentence_transformers.models.{kind}"} for kind in content]
        path = directory / names[key]
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta"])
def test_positions_begin_after_the_padding_id(tmp_path: pathlib.Path, kind: str) -> None:
    """Padded at either side: a text's places are counted from its own beginning. 2e-5 as above."""
    hf = random_model(tmp_path, kind)
    pad = hf.config.pad_token_id
    encoder = load(tmp_path)
    assert encoder.longest_text == 34 - pad - 1
    right = np.where(MASK, np.where(pad == TOKENS, pad + 1, TOKENS), pad)
    left = np.stack([np.roll(row, -mask.sum()) for row, mask in zip(right, MASK)])
    found = []
    for tokens in (right, left):
        mask = tokens != pad
        got = np.asarray(run(encoder, tokens, mask))
        np.testing.assert_allclose(got[mask], hf_hidden(hf, tokens, mask)[mask], rtol=0, atol=2e-5)
        found.append(got[mask])
    np.testing.assert_allclose(*found, rtol=0, atol=2e-5)


def test_a_row_padded_at_its_left_in_bert(tmp_path: pathlib.Path) -> None:
    """BERT counts places of the row, padding included, as transformers does."""
    hf, mask = random_model(tmp_path, "bert"), MASK[:, ::-1].copy()
    got = np.asarray(run(load(tmp_path), TOKENS, mask))
    np.testing.assert_allclose(got[mask], hf_hidden(hf, TOKENS, mask)[mask], rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_bfloat16_hidden_states(tmp_path: pathlib.Path, kind: str) -> None:
    """As near to float32 as transformers in bfloat16 is, or twice: both round at every step, in another order."""
    hf = random_model(tmp_path, kind)
    tokens = np.where(MASK, np.maximum(TOKENS, 5), hf.config.pad_token_id)
    exact = hf_hidden(hf, tokens, MASK)[MASK]
    with torch.no_grad():
        half = hf.bfloat16()(torch.as_tensor(tokens), attention_mask=torch.as_tensor(MASK).long())
    theirs = np.abs(half.last_hidden_state.float().numpy()[MASK] - exact).max()
    ours = np.asarray(run(load(tmp_path, dtype="bfloat16"), tokens, MASK)).astype(np.float32)[MASK]
    assert np.abs(ours - exact).max() < 2 * theirs < 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_pooler(tmp_path: pathlib.Path, kind: str) -> None:
    """As the Open-WikiTable bi-encoder: transformers' pooler_output, as it is. 2e-5 as above; values are below 1."""
    hf = random_model(tmp_path, kind)
    write_files(tmp_path, modules=["Transformer", "Pooling"], pooling={"pooling_mode_pooler_output": True})
    encoder = load(tmp_path)
    assert (encoder.config.pooling, encoder.config.normalize) == ("pooler", False)
    with torch.no_grad():
        expected = hf(torch.as_tensor(TOKENS), attention_mask=torch.as_tensor(MASK).long()).pooler_output
    np.testing.assert_allclose(nnx.jit(Encoder.pooled)(encoder, TOKENS, MASK), expected, rtol=0, atol=2e-5)
    save_pretrained(encoder, tmp_path / "again")
    same_tensors(tmp_path / "again", tmp_path)
    assert load(tmp_path / "again").config == encoder.config


@pytest.mark.parametrize("kind", KINDS)
def test_export(tmp_path: pathlib.Path, kind: str) -> None:
    """Bit for bit; transformers gives the same hidden states, and all settings are there again."""
    hf = random_model(tmp_path / "made", kind)
    write_files(
        tmp_path / "made",
        modules=["Transformer", "Pooling"],
        pooling={"pooling_mode_cls_token": True},
        texts={"max_seq_length": 20, "do_lower_case": False},
        general={"prompts": {"query": "ask ", "passage": "tell ", "other": "x"}, "default_prompt_name": "other"},
    )
    encoder = load(tmp_path / "made")
    save_pretrained(encoder, tmp_path / "out")
    again = load(tmp_path / "out")
    assert again.config == encoder.config
    assert again.config.prompts == Prompts(query="ask ", passage="tell ", default="x")
    assert again.longest_text == 20
    for path, value in parameters(again).items():
        np.testing.assert_array_equal(value, parameters(encoder)[path])
    exported = type(hf).from_pretrained(tmp_path / "out").eval()
    tokens = np.maximum(TOKENS, 4)  # no padding ids among them
    np.testing.assert_array_equal(hf_hidden(exported, tokens, MASK), hf_hidden(hf, tokens, MASK))
    np.testing.assert_array_equal(again.embed(["a b"], kind="query"), encoder.embed(["a b"], kind="query"))
    save_pretrained(again, tmp_path / "out")  # in place of the first
    (tmp_path / "out" / "1_Pooling" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds 1_Pooling/notes\.txt, which is not of an export"):
        save_pretrained(again, tmp_path / "out")


def test_prompts(tmp_path: pathlib.Path) -> None:
    """A prefix is text before the text, whoever gives it; without one nothing is added."""
    random_model(tmp_path, "bert")
    general = {"prompts": {"query": "q ", "document": "d ", "passage": "p "}, "default_prompt_name": None}
    write_files(tmp_path, general=general)
    encoder = load(tmp_path)
    plain = encoder.embed(["q a b", "d a b", "z a b", "a b"])
    found = [
        *(encoder.embed(["a b"], kind="query"), encoder.embed(["a b"], kind="passage")),
        *(encoder.embed(["a b"], prefix="z "), encoder.embed(["a b"])),
    ]
    np.testing.assert_array_equal(np.concatenate(found), plain)
    np.testing.assert_array_equal(encoder.embed([encoder.encode("a b", "q ")], prefix="q "), found[0])
    with pytest.raises(ValueError, match="kind='title' must be 'query', 'passage' or None"):
        encoder.embed(["a"], kind="title")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give kind='query' or a prefix of your own, not both"):
        encoder.embed(["a"], kind="query", prefix="x")
    with pytest.raises(ValueError, match=r"write embed\(\['a b'\]\)"):
        encoder.embed("a b")
    with pytest.raises(ValueError, match="input 1 has 41 ids; this encoder reads 1 to 40"):
        encoder.embed(["a", [5] * 41])


def test_an_encoder_that_is_loaded_again_compiles_nothing(tmp_path: pathlib.Path) -> None:
    random_model(tmp_path, "bert")
    write_files(tmp_path)
    first, again = load(tmp_path), load(tmp_path)
    assert first.tokenizer is not again.tokenizer
    expected, before = first.embed(["a b"]), compiled_programs(_run_method)
    np.testing.assert_array_equal(again.embed(["a b"]), expected)
    assert compiled_programs(_run_method) == before


PUBLISHED = {
    "contriever": {"pooling": "mean", "normalize": False, "prompts": Prompts()},
    "models--facebook--contriever-msmarco/snapshots/4ce6": {"pooling": "mean", "normalize": False},
    "e5-base-v2": {"pooling": "mean", "prompts": Prompts(query="query: ", passage="passage: ")},
    "multilingual-e5-large": {"prompts": Prompts(query="query: ", passage="passage: ")},
    "models--BAAI--bge-large-en-v1.5/snapshots/d4aa": {
        "pooling": "cls",
        "prompts": Prompts(query="Represent this sentence for searching relevant passages: "),
    },
    "bge-m3": {"pooling": "cls", "normalize": True, "prompts": Prompts()},
    "my-contriever-of-things": {"pooling": "mean", "normalize": True, "prompts": Prompts()},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_authors_published(tmp_path: pathlib.Path, name: str) -> None:
    """By the model's name, and only where its files say nothing."""
    random_model(tmp_path / name, "bert")
    config = load(tmp_path / name).config
    for key, value in PUBLISHED[name].items():
        assert getattr(config, key) == value, key
    write_files(
        tmp_path / name,
        modules=["Transformer", "Pooling", "Normalize"],
        pooling={"pooling_mode": "mean", "embedding_dimension": 48},
        general={"prompts": {"query": "mine "}},
    )
    config = load(tmp_path / name).config
    assert (config.pooling, config.normalize, config.prompts) == ("mean", True, Prompts(query="mine "))


@pytest.mark.parametrize("said", [{"_name_or_path": "intfloat/e5-large-v2"}, {"architectures": ["Contriever"]}])
def test_names_in_config_json(tmp_path: pathlib.Path, said: dict[str, Any]) -> None:
    random_model(tmp_path, "bert")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    config = load(tmp_path).config
    assert (config.prompts.query, config.normalize) == (("", False) if "architectures" in said else ("query: ", True))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"texts": {"do_lower_case": True}}, r"sentence_bert_config\.json: do_lower_case=true is not supported"),
        ({"pooling": {"pooling_mode": "lasttoken"}}, "pooling_mode lasttoken is not supported; supported: one of"),
        (
            {"pooling": {"pooling_mode": "mean", "include_prompt": False}, "general": {"prompts": {"query": "q"}}},
            "include_prompt=false with prompts is not supported",
        ),
    ],
)
def test_more_settings_that_would_give_other_vectors(
    tmp_path: pathlib.Path, files: dict[str, Any], message: str
) -> None:
    random_model(tmp_path, "bert")
    write_files(tmp_path, **files)
    with pytest.raises(UnsupportedModelError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("shards", [1, 3])
def test_batches(shards: int) -> None:
    """Every input once, in a batch that holds it; rows follow from the length alone, and long batches have fewer."""
    rng = np.random.default_rng(0)
    lengths = [1, 8192, *rng.integers(1, 8193, 300).tolist(), *rng.integers(1, 40, 100).tolist()]
    seen: list[int] = []
    heights: dict[int, int] = {}
    for rows, (height, length) in batches(lengths, 20, 8192, shards):
        seen += rows
        assert len(rows) <= height
        assert height % shards == 0
        assert all(lengths[i] <= length for i in rows)
        assert heights.setdefault(length, height) == height
        assert height * length <= 20 * 512 + shards * length
    assert sorted(seen) == list(range(len(lengths)))
    assert heights[16] == -(-20 // shards) * shards
    assert heights[8192] == shards
    assert max(heights) == 8192
    for _, (height, length) in batches([lengths[5]], 20, 8192, shards):
        assert heights[length] == height


def test_a_long_text_on_a_mesh(tmp_path: pathlib.Path) -> None:
    """XLM-R with 8,192 places, of which this reads 1,400: a batch longer than those of BERT. 1e-5: unit vectors."""
    torch.manual_seed(0)
    config = transformers.XLMRobertaConfig(**ROBERTA | {"max_position_embeddings": 8194}, pad_token_id=1)
    hf = transformers.XLMRobertaModel(config).eval()
    randomize(hf)
    hf.save_pretrained(tmp_path)
    write_files(tmp_path, modules=["Transformer", "Pooling", "Normalize"], pooling={"pooling_mode_cls_token": True})
    encoder = load(tmp_path, mesh=make_mesh({"data": 2, "fsdp": 2}, jax.devices()[:4]), layout="fsdp")
    encoder.tokenizer = load("all-MiniLM-L6-v2").tokenizer
    assert encoder.longest_text == 8192
    ids = [np.random.default_rng(i).integers(4, 97, length).tolist() for i, length in enumerate((5, 1400))]
    expected = [hf_hidden(hf, np.array([one]), np.ones((1, len(one)), bool))[0, 0] for one in ids]
    got = encoder.embed(ids)
    np.testing.assert_allclose(got, [row / np.linalg.norm(row) for row in expected], rtol=0, atol=1e-5)


def test_sentence_transformers_reads_an_export(tmp_path: pathlib.Path) -> None:
    """Where that library is there (it is no requirement of this one): the same vectors."""
    library = pytest.importorskip("sentence_transformers", exc_type=ImportError)
    random_model(tmp_path / "made", "bert")
    write_files(tmp_path / "made", modules=["Transformer", "Pooling"], general={"prompts": {"query": "q "}})
    encoder = load(tmp_path / "made")
    save_pretrained(encoder, tmp_path / "out")
    theirs = library.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    for kind, found in (
        ("query", theirs.encode_query(["a b", "z"])),
        ("passage", theirs.encode_document(["a b", "z"])),
    ):
        np.testing.assert_allclose(encoder.embed(["a b", "z"], kind=kind), found, rtol=0, atol=1e-5)  # type: ignore[arg-type]


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
